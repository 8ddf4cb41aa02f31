// Barriers, functions across the lanes of a simdgroup, and simdgroup matrices.

#pragma once

#include "functions.h"

namespace metal {

#define MSL_WHERE msl::source_line where = msl::source_line::here()

// ---------------------------------------------------------------- barriers

enum class mem_flags { mem_none = msl::MEMORY_NONE, mem_device = msl::MEMORY_DEVICE, mem_threadgroup = msl::MEMORY_THREADGROUP };
inline mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }
inline void threadgroup_barrier(mem_flags f, MSL_WHERE) { msl::threadgroup_barrier(int(f), where); }
inline void simdgroup_barrier  (mem_flags f, MSL_WHERE) { msl::simdgroup_barrier  (int(f), where); }

// ---------------------------------------------------------------- reductions, scans, shuffles

namespace detail {

using msl::SIMD;

template<class T> T operand(msl::simd_call * c) {
    T t;
    memcpy((void *) &t, c->in, sizeof(t));
    return t;
}
template<class T> void result(msl::simd_call * c, T v) {
    if (c) {
        memcpy(c->out, (void *) &v, sizeof(v));
    }
}

// a tree over the lanes, in the same order for all of them
template<class T, class OP> T reduce(const char * name, T v, msl::source_line where, OP) {
    T r;
    msl::simd_call call { name, where, &v, &r, 0, [](msl::simd_call * const * lanes) {
        T a[SIMD];
        int n = 0;
        for (uint32_t i = 0; i < SIMD; ++i) if (lanes[i]) a[n++] = operand<T>(lanes[i]);
        for (; n > 1; n = (n + 1)/2) for (int i = 0; i < n/2; ++i) a[i] = OP()(a[i], a[i + (n + 1)/2]);
        for (uint32_t i = 0; i < SIMD; ++i) result(lanes[i], a[0]);
    } };
    msl::simd_rendezvous(call);
    return r;
}

template<class T, class OP> T scan(const char * name, T v, T neutral, bool inclusive, msl::source_line where, OP) {
    T in[2] = { v, neutral }, r;
    msl::simd_call call { name, where, in, &r, inclusive, [](msl::simd_call * const * lanes) {
        bool first = true;
        T sum {};
        for (uint32_t i = 0; i < SIMD; ++i) if (lanes[i]) {
            const T * in = (const T *) lanes[i]->in;
            if (first) {
                sum   = in[1];
                first = false;
            }
            const T next = OP()(sum, in[0]);
            result(lanes[i], lanes[i]->arg ? next : sum);
            sum = next;
        }
    } };
    msl::simd_rendezvous(call);
    return r;
}

// F(i, arg) is the lane that lane i reads; outside of the simdgroup a lane keeps its own value
template<class T, class F> T shuffle(const char * name, T v, int64_t arg, msl::source_line where, F) {
    T r;
    msl::simd_call call { name, where, &v, &r, arg, [](msl::simd_call * const * lanes) {
        for (int i = 0; i < (int) SIMD; ++i) if (lanes[i]) {
            int64_t s = F()(i, lanes[i]->arg);
            if (s < 0 || s >= SIMD) s = i;
            if (lanes[s]) {
                result(lanes[i], operand<T>(lanes[s]));
            } else {
                msl::violation("%s at %s:%d: lane %d reads lane %d, which does not take part", lanes[i]->name, lanes[i]->where.file, lanes[i]->where.line, i, (int) s);
            }
        }
    } };
    msl::simd_rendezvous(call);
    return r;
}

struct add     { template<class T> T operator()(T a, T b) const { return T(a + b); } };
struct mul     { template<class T> T operator()(T a, T b) const { return T(a*b); } };
struct minimum { template<class T> T operator()(T a, T b) const { return min(a, b); } };
struct maximum { template<class T> T operator()(T a, T b) const { return max(a, b); } };
struct bit_and { template<class T> T operator()(T a, T b) const { return T(a & b); } };
struct bit_or  { template<class T> T operator()(T a, T b) const { return T(a | b); } };
struct bit_xor { template<class T> T operator()(T a, T b) const { return T(a ^ b); } };

struct lane_at   { int64_t operator()(int,   int64_t a) const { return a; } };
struct lane_down { int64_t operator()(int i, int64_t a) const { return i + a; } };
struct lane_up   { int64_t operator()(int i, int64_t a) const { return i - a; } };
struct lane_xor  { int64_t operator()(int i, int64_t a) const { return i ^ a; } };

} // namespace detail

#define MSL_REDUCE(NAME, OP) template<class T> T NAME(T v, MSL_WHERE) { return detail::reduce(#NAME, v, where, detail::OP()); }
MSL_REDUCE(simd_sum, add)     MSL_REDUCE(simd_product, mul)
MSL_REDUCE(simd_min, minimum) MSL_REDUCE(simd_max, maximum)
MSL_REDUCE(simd_and, bit_and) MSL_REDUCE(simd_or, bit_or)   MSL_REDUCE(simd_xor, bit_xor)
#undef MSL_REDUCE
inline bool simd_any(bool v, MSL_WHERE) { return detail::reduce("simd_any", int(v), where, detail::bit_or()); }
inline bool simd_all(bool v, MSL_WHERE) { return detail::reduce("simd_all", int(v), where, detail::bit_and()); }

template<class T> T simd_prefix_inclusive_sum(T v, MSL_WHERE) { return detail::scan("simd_prefix_inclusive_sum", v, T(0), true,  where, detail::add()); }
template<class T> T simd_prefix_exclusive_sum(T v, MSL_WHERE) { return detail::scan("simd_prefix_exclusive_sum", v, T(0), false, where, detail::add()); }

#define MSL_SHUFFLE(NAME, FROM) template<class T> T NAME(T v, ushort a, MSL_WHERE) { return detail::shuffle(#NAME, v, a, where, detail::FROM()); }
MSL_SHUFFLE(simd_shuffle,      lane_at)   MSL_SHUFFLE(simd_broadcast,  lane_at)
MSL_SHUFFLE(simd_shuffle_down, lane_down) MSL_SHUFFLE(simd_shuffle_up, lane_up)  MSL_SHUFFLE(simd_shuffle_xor, lane_xor)
#undef MSL_SHUFFLE

// ---------------------------------------------------------------- matrices: the first lane holds the values

template<class T, int C, int R> struct simdgroup_matrix { T m[R][C]; };
using simdgroup_float8x8  = simdgroup_matrix<float,  8, 8>;
using simdgroup_half8x8   = simdgroup_matrix<half,   8, 8>;
using simdgroup_bfloat8x8 = simdgroup_matrix<bfloat, 8, 8>;

template<class T, int N> simdgroup_matrix<T, N, N> make_filled_simdgroup_matrix(T v) {
    simdgroup_matrix<T, N, N> r;
    for (auto & row : r.m) for (auto & q : row) q = v;
    return r;
}

namespace detail {

template<class M, class P> struct matrix_io {
    M *      matrix;
    P        memory;
    uint64_t stride;
    ulong2   origin;
    bool     transpose;
    auto & at(int row, int col) const {
        return transpose ? memory[(origin[1] + col)*stride + origin[0] + row] : memory[(origin[1] + row)*stride + origin[0] + col];
    }
};

inline msl::simd_call * first(msl::simd_call * const * lanes) {
    for (uint32_t i = 0; i < SIMD; ++i) if (lanes[i]) return lanes[i];
    return nullptr;
}

// of the first lane; all have to pass the same
template<class IO> const IO & common_operands(msl::simd_call * const * lanes) {
    msl::simd_call * f = first(lanes);
    const IO & a = *(const IO *) f->in;
    for (uint32_t i = 0; i < SIMD; ++i) if (lanes[i]) {
        const IO & b = *(const IO *) lanes[i]->in;
        if (a.memory != b.memory || a.stride != b.stride || a.transpose != b.transpose || a.origin[0] != b.origin[0] || a.origin[1] != b.origin[1]) {
            msl::violation("%s at %s:%d: lanes pass different operands", f->name, f->where.file, f->where.line);
            break;
        }
    }
    return a;
}

template<class D, class A, class B, class C> void multiply(const char * name, D & d, const A & a, const B & b, const C * c, msl::source_line where) {
    struct operands { D * d; const A * a; const B * b; const C * c; } in { &d, &a, &b, c };
    msl::simd_call call { name, where, &in, nullptr, 0, [](msl::simd_call * const * lanes) {
        const operands & o = *(const operands *) first(lanes)->in;
        D r;
        for (int i = 0; i < 8; ++i) for (int j = 0; j < 8; ++j) {
            float sum = o.c ? float(o.c->m[i][j]) : 0.0f;
            for (int k = 0; k < 8; ++k) sum += float(o.a->m[i][k])*float(o.b->m[k][j]);
            r.m[i][j] = sum;
        }
        *o.d = r;
    } };
    msl::simd_rendezvous(call);
}

} // namespace detail

template<class T, class P> void simdgroup_load(simdgroup_matrix<T, 8, 8> & d, const P * src, ulong stride = 8, ulong2 origin = ulong2(0), bool transpose = false, MSL_WHERE) {
    using IO = detail::matrix_io<simdgroup_matrix<T, 8, 8>, const P *>;
    IO io { &d, src, stride, origin, transpose };
    msl::simd_call call { "simdgroup_load", where, &io, nullptr, 0, [](msl::simd_call * const * lanes) {
        const IO & a = detail::common_operands<IO>(lanes);
        for (int r = 0; r < 8; ++r) for (int c = 0; c < 8; ++c) a.matrix->m[r][c] = T(a.at(r, c));
    } };
    msl::simd_rendezvous(call);
}

template<class T, class P> void simdgroup_store(const simdgroup_matrix<T, 8, 8> & s, P * dst, ulong stride = 8, ulong2 origin = ulong2(0), bool transpose = false, MSL_WHERE) {
    using IO = detail::matrix_io<const simdgroup_matrix<T, 8, 8>, P *>;
    IO io { &s, dst, stride, origin, transpose };
    msl::simd_call call { "simdgroup_store", where, &io, nullptr, 0, [](msl::simd_call * const * lanes) {
        const IO & a = detail::common_operands<IO>(lanes);
        for (int r = 0; r < 8; ++r) for (int c = 0; c < 8; ++c) a.at(r, c) = P(a.matrix->m[r][c]);
    } };
    msl::simd_rendezvous(call);
}

template<class D, class A, class B, class C>
void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8> & d, const simdgroup_matrix<A, 8, 8> & a, const simdgroup_matrix<B, 8, 8> & b, const simdgroup_matrix<C, 8, 8> & c, MSL_WHERE) {
    detail::multiply("simdgroup_multiply_accumulate", d, a, b, &c, where);
}
template<class D, class A, class B>
void simdgroup_multiply(simdgroup_matrix<D, 8, 8> & d, const simdgroup_matrix<A, 8, 8> & a, const simdgroup_matrix<B, 8, 8> & b, MSL_WHERE) {
    detail::multiply("simdgroup_multiply", d, a, b, (const simdgroup_matrix<D, 8, 8> *) nullptr, where);
}

#undef MSL_WHERE

} // namespace metal
