// Atomics. Fibers never preempt each other, so that plain operations are atomic; the memory checker must not see them.

#pragma once

#include "types.h"

namespace metal {

enum memory_order { memory_order_relaxed };

template<class T> struct atomic { T v; };
using atomic_int   = atomic<int>;
using atomic_uint  = atomic<uint>;
using atomic_float = atomic<float>;

#define MSL_UNCHECKED __attribute__((noinline, no_sanitize_thread))

template<class T> MSL_UNCHECKED T atomic_load_explicit(const volatile atomic<T> * p, memory_order) { return p->v; }
template<class T, class V> MSL_UNCHECKED void atomic_store_explicit(volatile atomic<T> * p, V v, memory_order) { p->v = T(v); }

#define MSL_ATOMIC(NAME, EXPR)                                                                                          \
    template<class T, class V> MSL_UNCHECKED T NAME(volatile atomic<T> * p, V given, memory_order) {                    \
        T o = p->v, v = T(given);                                                                                       \
        p->v = EXPR;                                                                                                    \
        return o;                                                                                                       \
    }
MSL_ATOMIC(atomic_fetch_add_explicit, o + v)
MSL_ATOMIC(atomic_fetch_sub_explicit, o - v)
MSL_ATOMIC(atomic_fetch_max_explicit, o < v ? v : o)
MSL_ATOMIC(atomic_fetch_min_explicit, v < o ? v : o)
MSL_ATOMIC(atomic_fetch_or_explicit,  o | v)
MSL_ATOMIC(atomic_fetch_and_explicit, o & v)
MSL_ATOMIC(atomic_exchange_explicit,  v)
#undef MSL_ATOMIC
#undef MSL_UNCHECKED

} // namespace metal
