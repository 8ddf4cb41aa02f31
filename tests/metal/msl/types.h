// Scalars, vectors and small matrices of the Metal Shading Language.

#pragma once

#include "runtime.h"

#include <cfloat>
#include <climits>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

// Address spaces and function qualifiers mean nothing on the host; lint/ checks them.
#define kernel
#define device
#define thread
#define threadgroup
#define constant const

#define MAXHALF ((metal::half) 65504.0f)
#define M_PI_F  3.14159265358979323846f
#define M_E_F   2.71828182845904523536f

using uchar  = uint8_t;
using ushort = uint16_t;
using uint   = uint32_t;
using ulong  = uint64_t;

namespace metal {

using std::numeric_limits;
using std::is_same;
using std::is_same_v;
using std::enable_if;
using std::enable_if_t;
using std::conditional;
using std::conditional_t;

template<class T, class F> T as_type(F f) {
    static_assert(sizeof(T) == sizeof(F));
    T t;
    memcpy((void *) &t, &f, sizeof(t));
    return t;
}

// ---------------------------------------------------------------- 16-bit floats

#if (defined(__clang__) && __clang_major__ >= 15) || (!defined(__clang__) && __GNUC__ >= 12)
using half = _Float16;
#else
#error "gcc >= 12 or clang >= 15 is needed for _Float16"
#endif

// stored in 16 bits; every operation rounds
struct bfloat {
    uint16_t bits;

    bfloat() = default;
    bfloat(float f) {
        uint32_t u;
        memcpy(&u, &f, 4);
        bits = (u & 0x7fffffff) > 0x7f800000 ? u >> 16 | 64 : (u + 0x7fff + (u >> 16 & 1)) >> 16;
    }
    bfloat(double f)   : bfloat((float) f) {}
    bfloat(int f)      : bfloat((float) f) {}
    bfloat(unsigned f) : bfloat((float) f) {}
    operator float() const {
        const uint32_t u = (uint32_t) bits << 16;
        float f;
        memcpy(&f, &u, 4);
        return f;
    }
    bfloat & operator+=(float o) { return *this = bfloat(float(*this) + o); }
    bfloat & operator-=(float o) { return *this = bfloat(float(*this) - o); }
    bfloat & operator*=(float o) { return *this = bfloat(float(*this)*o); }
    bfloat & operator/=(float o) { return *this = bfloat(float(*this)/o); }
};

inline bfloat operator+(bfloat a, bfloat b) { return bfloat(float(a) + float(b)); }
inline bfloat operator-(bfloat a, bfloat b) { return bfloat(float(a) - float(b)); }
inline bfloat operator*(bfloat a, bfloat b) { return bfloat(float(a)*float(b)); }
inline bfloat operator/(bfloat a, bfloat b) { return bfloat(float(a)/float(b)); }
inline bfloat operator-(bfloat a)           { return bfloat(-float(a)); }

template<class T> constexpr bool is_scalar = std::is_arithmetic_v<T> || std::is_same_v<T, half> || std::is_same_v<T, bfloat>;
template<class S> using if_scalar = std::enable_if_t<is_scalar<S>>;

// ---------------------------------------------------------------- vectors

template<class T> struct vec_data2 { union { T e[2]; struct { T x, y; };       struct { T r, g; };       }; };
template<class T> struct vec_data3 { union { T e[4]; struct { T x, y, z; };    struct { T r, g, b; };    }; };
template<class T> struct vec_data4 { union { T e[4]; struct { T x, y, z, w; }; struct { T r, g, b, a; }; }; };
template<class T, int N> using vec_data = std::conditional_t<N == 2, vec_data2<T>, std::conditional_t<N == 3, vec_data3<T>, vec_data4<T>>>;

template<class T, int N> struct packed_vec {
    T e[N];
    T &       operator[](int i)       { return e[i]; }
    const T & operator[](int i) const { return e[i]; }
};

// MSL aligns a vector to its size; ggml's kernels load float4 at any multiple of 4 bytes, which Apple's GPUs allow.
template<class T, int N> struct vec : vec_data<T, N> {
    using vec_data<T, N>::e;

    vec() = default;
    template<class S, class = if_scalar<S>> vec(S s) { for (int i = 0; i < N; ++i) e[i] = T(s); }
    template<class U, class = std::enable_if_t<!std::is_same_v<U, T>>> explicit vec(const vec<U, N> & o) { copy(o); }
    template<class U, class = std::enable_if_t<!std::is_same_v<U, T>>> explicit vec(const packed_vec<U, N> & o) { copy(o); }
    vec(const packed_vec<T, N> & o) { copy(o); }
    template<class A, class B, class... R> vec(A a, B b, R... r) {
        int n = 0;
        put(n, a);
        put(n, b);
        (put(n, r), ...);
    }
    operator packed_vec<T, N>() const {
        packed_vec<T, N> p;
        for (int i = 0; i < N; ++i) p.e[i] = e[i];
        return p;
    }
    T &       operator[](int i)       { return e[i]; }
    const T & operator[](int i) const { return e[i]; }

    static vec from_dim3(uint32_t x, uint32_t y, uint32_t z) {
        const uint32_t d[4] = { x, y, z, 0 };
        vec v;
        for (int i = 0; i < N; ++i) v.e[i] = T(d[i]);
        return v;
    }

private:
    template<class V> void copy(const V & o) { for (int i = 0; i < N; ++i) e[i] = (T) o.e[i]; }
    template<class S> void put(int & n, S s) {
        if constexpr (is_scalar<S>) {
            if (n < N) e[n] = T(s);
            ++n;
        } else {
            for (auto & q : s.e) put(n, q);
        }
    }
};

#define MSL_BINARY(OP)                                                                                                  \
    template<class T, int N> vec<T, N> operator OP(vec<T, N> a, const vec<T, N> & b) {                                  \
        for (int i = 0; i < N; ++i) a.e[i] = T(a.e[i] OP b.e[i]);                                                       \
        return a;                                                                                                       \
    }                                                                                                                   \
    template<class T, int N, class S, class = if_scalar<S>> vec<T, N> operator OP(vec<T, N> a, S s) { return a OP vec<T, N>(s); } \
    template<class T, int N, class S, class = if_scalar<S>> vec<T, N> operator OP(S s, vec<T, N> a) { return vec<T, N>(s) OP a; } \
    template<class T, int N, class B> vec<T, N> & operator OP##=(vec<T, N> & a, const B & b) { return a = a OP b; }
MSL_BINARY(+) MSL_BINARY(-) MSL_BINARY(*) MSL_BINARY(/) MSL_BINARY(%) MSL_BINARY(&) MSL_BINARY(|) MSL_BINARY(^) MSL_BINARY(<<) MSL_BINARY(>>)
#undef MSL_BINARY

template<class T, int N> vec<T, N> operator-(vec<T, N> a) {
    for (int i = 0; i < N; ++i) a.e[i] = T(-a.e[i]);
    return a;
}
template<class T, int N> vec<T, N> operator~(vec<T, N> a) {
    for (int i = 0; i < N; ++i) a.e[i] = T(~a.e[i]);
    return a;
}

#define MSL_COMPARE(OP)                                                                                                 \
    template<class T, int N> vec<bool, N> operator OP(const vec<T, N> & a, const vec<T, N> & b) {                       \
        vec<bool, N> r;                                                                                                 \
        for (int i = 0; i < N; ++i) r.e[i] = a.e[i] OP b.e[i];                                                          \
        return r;                                                                                                       \
    }                                                                                                                   \
    template<class T, int N, class S, class = if_scalar<S>> vec<bool, N> operator OP(const vec<T, N> & a, S s) { return a OP vec<T, N>(s); }
MSL_COMPARE(<) MSL_COMPARE(>) MSL_COMPARE(<=) MSL_COMPARE(>=) MSL_COMPARE(==) MSL_COMPARE(!=)
#undef MSL_COMPARE

#define MSL_FOR_EACH_TYPE(F) F(float) F(half) F(bfloat) F(char) F(uchar) F(short) F(ushort) F(int) F(uint) F(long) F(ulong) F(bool)
#define MSL_VECTORS(T)                                                                                                  \
    using packed_##T##2 = packed_vec<T, 2>; using packed_##T##3 = packed_vec<T, 3>; using packed_##T##4 = packed_vec<T, 4>; \
    using T##2 = vec<T, 2>; using T##3 = vec<T, 3>; using T##4 = vec<T, 4>;
MSL_FOR_EACH_TYPE(MSL_VECTORS)
#undef MSL_VECTORS

// ---------------------------------------------------------------- matrices: columns of vectors

template<class T, int C, int R> struct matrix {
    vec<T, R> c[C];

    matrix() = default;
    explicit matrix(float d) {
        for (int i = 0; i < C; ++i) for (int j = 0; j < R; ++j) c[i][j] = T(i == j ? d : 0.0f);
    }
    template<class U> explicit matrix(const matrix<U, C, R> & o) { for (int i = 0; i < C; ++i) c[i] = vec<T, R>(o.c[i]); }
    vec<T, R> &       operator[](int i)       { return c[i]; }
    const vec<T, R> & operator[](int i) const { return c[i]; }
};

template<class T, int C, int R, class S, class = if_scalar<S>> matrix<T, C, R> operator*(matrix<T, C, R> m, S s) {
    for (auto & c : m.c) c *= s;
    return m;
}
template<class T, int C, int R, class S, class = if_scalar<S>> matrix<T, C, R> operator*(S s, matrix<T, C, R> m) { return m*s; }

#define MSL_MATRICES(T) using T##2x4 = matrix<T, 2, 4>; using T##4x4 = matrix<T, 4, 4>; using T##2x2 = matrix<T, 2, 2>; using T##3x3 = matrix<T, 3, 3>;
MSL_MATRICES(float) MSL_MATRICES(half)
#undef MSL_MATRICES

} // namespace metal
