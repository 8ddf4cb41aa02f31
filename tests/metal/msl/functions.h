// Functions of the Metal Shading Language on scalars and vectors. Floats are computed with the host's libm.

#pragma once

#include "types.h"

namespace metal {

#define MSL_UNARY(NAME, EXPR)                                                                                           \
    inline float NAME(float x) { return EXPR; }                                                                         \
    inline half  NAME(half h)  { float x = h; return half(float(EXPR)); }                                               \
    template<class T, int N> vec<T, N> NAME(vec<T, N> v) { for (int i = 0; i < N; ++i) v.e[i] = NAME(v.e[i]); return v; }

#define MSL_BINARY(NAME, EXPR)                                                                                          \
    inline float NAME(float x, float y) { return EXPR; }                                                                \
    inline half  NAME(half a, half b)   { float x = a, y = b; return half(float(EXPR)); }                               \
    template<class T, int N> vec<T, N> NAME(vec<T, N> v, vec<T, N> w) { for (int i = 0; i < N; ++i) v.e[i] = NAME(v.e[i], w.e[i]); return v; } \
    template<class S, class T, int N, class = if_scalar<S>> vec<T, N> NAME(S s, vec<T, N> w) { return NAME(vec<T, N>(s), w); } \
    template<class S, class T, int N, class = if_scalar<S>> vec<T, N> NAME(vec<T, N> v, S s) { return NAME(v, vec<T, N>(s)); }

#define MSL_MATH                                                                                                        \
    MSL_UNARY(exp,   std::exp(x))   MSL_UNARY(exp2,  std::exp2(x))      MSL_UNARY(exp10, std::pow(10.0f, x))            \
    MSL_UNARY(log,   std::log(x))   MSL_UNARY(log2,  std::log2(x))      MSL_UNARY(log10, std::log10(x))                 \
    MSL_UNARY(sqrt,  std::sqrt(x))  MSL_UNARY(rsqrt, 1.0f/std::sqrt(x))                                                 \
    MSL_UNARY(sin,   std::sin(x))   MSL_UNARY(cos,   std::cos(x))       MSL_UNARY(tan,   std::tan(x))                   \
    MSL_UNARY(asin,  std::asin(x))  MSL_UNARY(acos,  std::acos(x))      MSL_UNARY(atan,  std::atan(x))                  \
    MSL_UNARY(sinh,  std::sinh(x))  MSL_UNARY(cosh,  std::cosh(x))      MSL_UNARY(tanh,  std::tanh(x))                  \
    MSL_UNARY(fabs,  std::fabs(x))  MSL_UNARY(floor, std::floor(x))     MSL_UNARY(ceil,  std::ceil(x))                  \
    MSL_UNARY(round, std::round(x)) MSL_UNARY(trunc, std::trunc(x))     MSL_UNARY(rint,  std::nearbyint(x))             \
    MSL_UNARY(fract, x - std::floor(x))                                                                                 \
    MSL_UNARY(sign,  x > 0 ? 1.0f : x < 0 ? -1.0f : 0.0f)                                                               \
    MSL_UNARY(saturate, x > 1 ? 1.0f : x > 0 ? x : 0.0f)                                                                \
    MSL_BINARY(pow,  std::pow(x, y))  MSL_BINARY(powr, std::pow(x, y))                                                  \
    MSL_BINARY(fmin, std::fmin(x, y)) MSL_BINARY(fmax, std::fmax(x, y)) MSL_BINARY(fmod, std::fmod(x, y))               \
    MSL_BINARY(atan2, std::atan2(x, y)) MSL_BINARY(copysign, std::copysign(x, y))

MSL_MATH
namespace precise { MSL_MATH }
namespace fast    { MSL_MATH }

#undef MSL_UNARY
#undef MSL_BINARY
#undef MSL_MATH

inline float fma(float a, float b, float c) { return std::fma(a, b, c); }
template<class T, int N> vec<T, N> fma(vec<T, N> a, vec<T, N> b, vec<T, N> c) {
    for (int i = 0; i < N; ++i) a[i] = fma(a[i], b[i], c[i]);
    return a;
}

inline bool isnan(float x)    { return x != x; }
inline bool isfinite(float x) { return std::isfinite(x); }
inline bool isinf(float x)    { return std::isinf(x); }

template<class A, class B> using common = std::enable_if_t<is_scalar<A> && is_scalar<B>, std::conditional_t<std::is_same_v<A, B>, A, decltype(A() + B())>>;
template<class A, class B> common<A, B> min(A a, B b) { const common<A, B> x = a, y = b; return y < x ? y : x; }
template<class A, class B> common<A, B> max(A a, B b) { const common<A, B> x = a, y = b; return x < y ? y : x; }
template<class T, int N> vec<T, N> min(vec<T, N> a, vec<T, N> b) { for (int i = 0; i < N; ++i) a[i] = min(a[i], b[i]); return a; }
template<class T, int N> vec<T, N> max(vec<T, N> a, vec<T, N> b) { for (int i = 0; i < N; ++i) a[i] = max(a[i], b[i]); return a; }
template<class T, int N, class S, class = if_scalar<S>> vec<T, N> min(vec<T, N> a, S s) { return min(a, vec<T, N>(s)); }
template<class T, int N, class S, class = if_scalar<S>> vec<T, N> max(vec<T, N> a, S s) { return max(a, vec<T, N>(s)); }
template<class T, class L, class H> T clamp(T x, L lo, H hi) { return T(min(max(x, lo), hi)); }

template<class T, class = if_scalar<T>> T abs(T x) { return x < T(0) ? T(-x) : x; }
template<class T, int N> vec<T, N> abs(vec<T, N> v) { for (int i = 0; i < N; ++i) v[i] = abs(v[i]); return v; }

template<class T, int N> T dot(vec<T, N> a, vec<T, N> b) {
    T s = a[0]*b[0];
    for (int i = 1; i < N; ++i) s = T(s + a[i]*b[i]);
    return s;
}
template<class T, int N> T length(vec<T, N> a) { return sqrt(dot(a, a)); }

template<class T> T select(T a, T b, bool c) { return c ? b : a; }
template<class T, int N> vec<T, N> select(vec<T, N> a, vec<T, N> b, vec<bool, N> c) {
    for (int i = 0; i < N; ++i) if (c[i]) a[i] = b[i];
    return a;
}
template<class T> T mix(T a, T b, T t) { return a + (b - a)*t; }
template<int N> bool any(vec<bool, N> v) { for (int i = 0; i < N; ++i) if (v[i]) return true; return false; }
template<int N> bool all(vec<bool, N> v) { for (int i = 0; i < N; ++i) if (!v[i]) return false; return true; }

template<class T> T popcount(T x) { return T(__builtin_popcountll((uint64_t) std::make_unsigned_t<T>(x))); }
inline uint clz(uint x) { return x ? __builtin_clz(x) : 32; }
inline uint ctz(uint x) { return x ? __builtin_ctz(x) : 32; }

} // namespace metal
