// Runs Metal compute kernels, compiled as host C++, on one OS thread.
//
// Each GPU thread is a fiber. A simd_* function or a barrier is a rendezvous: the fiber stops there and the scheduler
// goes on when the lanes or threads that have to take part have arrived. Whatever breaks a rule of Metal is a violation:
// dispatch() returns the first one as text.

#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace msl {

constexpr uint32_t SIMD = 32;  // lanes of a simdgroup

struct dim3 {
    uint32_t x = 1, y = 1, z = 1;
};

// place of a call in the .metal source
struct source_line {
    const char * file;
    int          line;
    static constexpr source_line here(const char * file = __builtin_FILE(), int line = __builtin_LINE()) { return { file, line }; }
};

// ---------------------------------------------------------------- kernels

// what a thread knows about itself
struct thread_info {
    dim3     group, thread, group_size, grid_size;  // positions and sizes
    uint32_t index = 0;                             // in the threadgroup
    uint32_t simdgroup = 0, lane = 0, n_simdgroups = 1;
};

struct binding {
    void * ptr  = nullptr;
    size_t size = 0;
};

struct bindings {
    binding buffers[32];
    binding threadgroup[8];  // filled by dispatch()
};

using entry = void (*)(const bindings &, const thread_info &);

struct kernel_info {
    std::string  name;
    entry        run;
    const char * file;
    uint32_t     buffers;  // bit i: buffer i is a parameter
};

const kernel_info *      find_kernel(const std::string & name);
std::vector<std::string> kernel_names();

// registration, by generated code
struct register_kernel {
    register_kernel(const char * name, entry run, const char * file, uint32_t buffers);
};
struct register_constant {  // a function constant
    register_constant(const char * file, int index, void (*set)(int64_t));
};

// ---------------------------------------------------------------- dispatch

struct pipeline {
    const kernel_info *      kernel = nullptr;
    std::map<int, int64_t>   constants;
};

enum class order { in_order, reverse, random };

struct options {
    order    schedule = order::in_order;  // of simdgroups and lanes between two rendezvous, and of threadgroups
    uint64_t seed     = 1;
};

// from the environment: MSL_ORDER (in_order, reverse, random), MSL_SEED
options options_from_environment();

struct limits {
    static constexpr uint32_t threads_per_group        = 1024;
    static constexpr size_t   threadgroup_memory       = 32*1024;
    static constexpr size_t   threadgroup_memory_align = 16;
    static constexpr size_t   bytes_argument           = 4096;
};

struct counters {
    uint64_t threadgroups = 0, threadgroup_barriers = 0, simdgroup_barriers = 0, simdgroup_operations = 0;
};

// runs a grid; empty, or the first violation
std::string dispatch(const pipeline & p, const bindings & b, dim3 grid, dim3 group_size, const std::vector<size_t> & threadgroup_memory,
                     const options & o, counters * count = nullptr);

// ---------------------------------------------------------------- called by kernels, through metal_stdlib

struct simd_call {
    const char * name;
    source_line  where;
    const void * in;
    void *       out;
    int64_t      arg;
    void (*resolve)(simd_call * const * lanes);  // lanes[i] is null for a lane that does not take part
};

enum memory_scope : int { MEMORY_NONE = 0, MEMORY_DEVICE = 1, MEMORY_THREADGROUP = 2 };

void   simd_rendezvous(simd_call & call);
void   simdgroup_barrier(int scope, source_line where);
void   threadgroup_barrier(int scope, source_line where);
void * threadgroup_array(const char * name, size_t size);  // declared in a kernel; one per name and threadgroup
void   violation(const char * format, ...) __attribute__((format(printf, 1, 2)));

// ---------------------------------------------------------------- hooks of the memory checker

struct memory_hooks {
    void (*begin)(const bindings & b);
    void (*begin_group)();
    void (*array)(binding array);               // a threadgroup array of the kernel was placed
    void (*barrier)(int scope, int simdgroup);  // simdgroup -1: the whole threadgroup
    void (*end)();
};
extern memory_hooks * hooks;

struct running_thread {
    uint32_t     group = 0, index = 0;
    bool         inside = false;                  // a kernel runs
    const char * stacks = nullptr, * stacks_end = nullptr;
};
extern running_thread running;

// bytes of one bound buffer that a dispatch touched; filled by the memory checker
struct traffic {
    int      buffer;
    uint64_t read, written;                // by all threads
    uint64_t unique_read, unique_written;  // each byte once
};
extern std::vector<traffic> last_traffic;

// ---------------------------------------------------------------- binding of kernel parameters, by generated code

template<int N> struct buffer {
    template<class A> static A get(const bindings & b, const thread_info &) {
        if constexpr (std::is_pointer_v<A>) {
            return (A) b.buffers[N].ptr;
        } else {
            return *(std::remove_reference_t<A> *) b.buffers[N].ptr;
        }
    }
};

template<int N> struct threadgroup_buffer {
    template<class A> static A get(const bindings & b, const thread_info &) { return (A) b.threadgroup[N].ptr; }
};

template<class A> A from_dim3(dim3 d) {
    if constexpr (std::is_arithmetic_v<A>) {
        return (A) d.x;
    } else {
        return A::from_dim3(d.x, d.y, d.z);
    }
}

#define MSL_PARAMETER(name, expr) \
    struct name { template<class A> static A get(const bindings &, const thread_info & t) { return expr; } }
#define MSL_EACH(e) dim3 { e(x), e(y), e(z) }
#define MSL_POSITION(i) t.group.i*t.group_size.i + t.thread.i
#define MSL_SIZE(i) t.grid_size.i*t.group_size.i
MSL_PARAMETER(threadgroup_position_in_grid,   from_dim3<A>(t.group));
MSL_PARAMETER(thread_position_in_threadgroup, from_dim3<A>(t.thread));
MSL_PARAMETER(threads_per_threadgroup,        from_dim3<A>(t.group_size));
MSL_PARAMETER(threadgroups_per_grid,          from_dim3<A>(t.grid_size));
MSL_PARAMETER(thread_position_in_grid,        from_dim3<A>(MSL_EACH(MSL_POSITION)));
MSL_PARAMETER(threads_per_grid,               from_dim3<A>(MSL_EACH(MSL_SIZE)));
MSL_PARAMETER(thread_index_in_threadgroup,    (A) t.index);
MSL_PARAMETER(simdgroup_index_in_threadgroup, (A) t.simdgroup);
MSL_PARAMETER(thread_index_in_simdgroup,      (A) t.lane);
MSL_PARAMETER(simdgroups_per_threadgroup,     (A) t.n_simdgroups);
MSL_PARAMETER(threads_per_simdgroup,          (A) SIMD);
#undef MSL_PARAMETER
#undef MSL_EACH
#undef MSL_POSITION
#undef MSL_SIZE

template<class... K> struct parameters {
    template<class... A> static void call(void (*f)(A...), const bindings & b, const thread_info & t) {
        static_assert(sizeof...(A) == sizeof...(K), "generate.py misread a parameter list");
        f(K::template get<A>(b, t)...);
    }
};

template<auto F, class P> void call_kernel(const bindings & b, const thread_info & t) { P::call(F, b, t); }

} // namespace msl
