// What CUDA C++ has and C++ has not, for kernels of the emulated device. Put before a kernel's source.
// As few of C++'s headers as will do: they take longer to read than most kernels.
#include <stddef.h>
#include <stdint.h>
#include <utility>

#define KAGENT_EMULATED 1
#define __CUDACC__ 1
#define __CUDACC_RTC__ 1
#define __CUDA_ARCH__ 800
#define __global__
#define __device__
#define __host__
#define __constant__
#define __managed__
#define __shared__ thread_local
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
#define KAGENT_PLAIN __attribute__((no_sanitize("thread"), no_sanitize("undefined")))

// -- vectors, aligned as on a device

#define KAGENT_VECTORS(T, name, a2, a4)                                                                    \
    struct name##1 { T x; };                                                                               \
    struct __attribute__((aligned(a2))) name##2 { T x, y; };                                               \
    struct name##3 { T x, y, z; };                                                                         \
    struct __attribute__((aligned(a4))) name##4 { T x, y, z, w; };                                         \
    inline name##1 make_##name##1(T x) { return {x}; }                                                     \
    inline name##2 make_##name##2(T x, T y) { return {x, y}; }                                             \
    inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }                                     \
    inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
KAGENT_VECTORS(signed char, char, 2, 4)
KAGENT_VECTORS(unsigned char, uchar, 2, 4)
KAGENT_VECTORS(short, short, 4, 8)
KAGENT_VECTORS(unsigned short, ushort, 4, 8)
KAGENT_VECTORS(int, int, 8, 16)
KAGENT_VECTORS(unsigned int, uint, 8, 16)
KAGENT_VECTORS(long, long, 16, 16)
KAGENT_VECTORS(unsigned long, ulong, 16, 16)
KAGENT_VECTORS(long long, longlong, 16, 16)
KAGENT_VECTORS(unsigned long long, ulonglong, 16, 16)
KAGENT_VECTORS(float, float, 8, 16)
KAGENT_VECTORS(double, double, 16, 16)

// -- threads and blocks

struct dim3 {
    unsigned int x, y, z;
    dim3(unsigned int x = 1, unsigned int y = 1, unsigned int z = 1) : x(x), y(y), z(z) {}
};

extern "C" {
struct kagent_index {
    unsigned int x, y, z;
    operator uint3() const { return {x, y, z}; }
};
kagent_index kagent_thread_index() __attribute__((const));
kagent_index kagent_block_index() __attribute__((const));
kagent_index kagent_block_size() __attribute__((const));
kagent_index kagent_grid_size() __attribute__((const));
extern unsigned char kagent_dynamic_memory[];
unsigned int kagent_lane();
unsigned int kagent_barrier(unsigned int kind, unsigned int line, unsigned int predicate);
unsigned long kagent_warp(unsigned int kind, unsigned int line, unsigned int mask, unsigned long value,
                          unsigned int argument, unsigned int width);
void kagent_atomic(void *place, unsigned int nbytes);
[[noreturn]] void kagent_trap(unsigned int line, const char *what);
}

#define threadIdx (kagent_thread_index())
#define blockIdx (kagent_block_index())
#define blockDim (kagent_block_size())
#define gridDim (kagent_grid_size())
constexpr int warpSize = 32;

#define __syncthreads() ((void)kagent_barrier(0, __LINE__, 1))
#define __syncthreads_count(p) ((int)kagent_barrier(1, __LINE__, (p) != 0))
#define __syncthreads_and(p) ((int)kagent_barrier(2, __LINE__, (p) != 0))
#define __syncthreads_or(p) ((int)kagent_barrier(3, __LINE__, (p) != 0))
#define __syncwarp(...) kagent_syncwarp(__LINE__, ##__VA_ARGS__)
#define __ballot_sync(mask, p) ((unsigned int)kagent_warp(5, __LINE__, mask, (p) != 0, 0, 32))
#define __any_sync(mask, p) ((int)(__ballot_sync(mask, p) != 0))
#define __all_sync(mask, p) ((int)(kagent_warp(5, __LINE__, mask, !(p), 0, 32) == 0))
#define __shfl_sync(mask, ...) kagent_shuffle<6>(__LINE__, mask, __VA_ARGS__)
#define __shfl_up_sync(mask, ...) kagent_shuffle<7>(__LINE__, mask, __VA_ARGS__)
#define __shfl_down_sync(mask, ...) kagent_shuffle<8>(__LINE__, mask, __VA_ARGS__)
#define __shfl_xor_sync(mask, ...) kagent_shuffle<9>(__LINE__, mask, __VA_ARGS__)
#define __trap() kagent_trap(__LINE__, "the kernel calls __trap()")
#define assert(condition) ((condition) ? (void)0 : kagent_trap(__LINE__, "assertion failed: " #condition))

inline void kagent_syncwarp(unsigned int line, unsigned int mask = 0xffffffffu) { kagent_warp(4, line, mask, 0, 0, 32); }
// a thread can only be sure of itself
inline unsigned int __activemask() { return 1u << kagent_lane(); }
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}

template <unsigned int kind, class T>
KAGENT_PLAIN T kagent_shuffle(unsigned int line, unsigned int mask, T value, unsigned int argument, unsigned int width = 32) {
    static_assert(sizeof(T) <= 8, "shuffles take values of up to 8 bytes");
    unsigned long bits = 0;
    __builtin_memcpy(&bits, &value, sizeof(T));
    bits = kagent_warp(kind, line, mask, bits, argument, width);
    __builtin_memcpy(&value, &bits, sizeof(T));
    return value;
}

// -- atomics: threads take turns only where they wait, so plain operations are atomic

template <class T, class F> KAGENT_PLAIN __noinline__ T kagent_update(T *place, F change) {
    kagent_atomic(place, sizeof(T));
    T old = *place;
    *place = change(old);
    return old;
}
#define KAGENT_ATOMIC(name, T, expression)                                                   \
    inline T name(T *place, T value) {                                                       \
        return kagent_update(place, [=](T old) KAGENT_PLAIN -> T { return expression; });    \
    }
#define KAGENT_ATOMICS(T)                                     \
    KAGENT_ATOMIC(atomicMax, T, old < value ? value : old)    \
    KAGENT_ATOMIC(atomicMin, T, value < old ? value : old)    \
    KAGENT_ATOMIC(atomicAnd, T, old & value)                  \
    KAGENT_ATOMIC(atomicOr, T, old | value)                   \
    KAGENT_ATOMIC(atomicXor, T, old ^ value)
KAGENT_ATOMICS(int) KAGENT_ATOMICS(unsigned int) KAGENT_ATOMICS(unsigned long long)
KAGENT_ATOMIC(atomicMax, long long, old < value ? value : old)
KAGENT_ATOMIC(atomicMin, long long, value < old ? value : old)
KAGENT_ATOMIC(atomicAdd, int, int((unsigned int)old + (unsigned int)value))
KAGENT_ATOMIC(atomicAdd, unsigned int, old + value)
KAGENT_ATOMIC(atomicAdd, unsigned long long, old + value)
KAGENT_ATOMIC(atomicAdd, float, old + value)
KAGENT_ATOMIC(atomicAdd, double, old + value)
KAGENT_ATOMIC(atomicSub, int, int((unsigned int)old - (unsigned int)value))
KAGENT_ATOMIC(atomicSub, unsigned int, old - value)
KAGENT_ATOMIC(atomicExch, int, value)
KAGENT_ATOMIC(atomicExch, unsigned int, value)
KAGENT_ATOMIC(atomicExch, unsigned long long, value)
KAGENT_ATOMIC(atomicExch, float, value)
#define KAGENT_CAS(T)                                                                                      \
    inline T atomicCAS(T *place, T compare, T value) {                                                     \
        return kagent_update(place, [=](T old) KAGENT_PLAIN -> T { return old == compare ? value : old; }); \
    }
KAGENT_CAS(int) KAGENT_CAS(unsigned int) KAGENT_CAS(unsigned long long) KAGENT_CAS(unsigned short)

// -- functions

#define KAGENT_F1(name)                                        \
    extern "C" double name(double) noexcept;                   \
    extern "C" float name##f(float) noexcept;                  \
    inline float name(float x) { return name##f(x); }
#define KAGENT_F2(name)                                        \
    extern "C" double name(double, double) noexcept;           \
    extern "C" float name##f(float, float) noexcept;           \
    inline float name(float x, float y) { return name##f(x, y); }
KAGENT_F1(exp) KAGENT_F1(exp2) KAGENT_F1(exp10) KAGENT_F1(expm1) KAGENT_F1(log) KAGENT_F1(log2) KAGENT_F1(log10)
KAGENT_F1(log1p) KAGENT_F1(sin) KAGENT_F1(cos) KAGENT_F1(tan) KAGENT_F1(asin) KAGENT_F1(acos) KAGENT_F1(atan)
KAGENT_F1(sinh) KAGENT_F1(cosh) KAGENT_F1(tanh) KAGENT_F1(asinh) KAGENT_F1(acosh) KAGENT_F1(atanh) KAGENT_F1(erf)
KAGENT_F1(erfc) KAGENT_F1(lgamma) KAGENT_F1(tgamma) KAGENT_F1(sqrt) KAGENT_F1(cbrt) KAGENT_F1(fabs) KAGENT_F1(floor)
KAGENT_F1(ceil) KAGENT_F1(trunc) KAGENT_F1(rint) KAGENT_F1(nearbyint) KAGENT_F1(round) KAGENT_F1(j0) KAGENT_F1(j1)
KAGENT_F2(pow) KAGENT_F2(atan2) KAGENT_F2(hypot) KAGENT_F2(fmod) KAGENT_F2(remainder) KAGENT_F2(fmin) KAGENT_F2(fmax)
KAGENT_F2(fdim) KAGENT_F2(copysign) KAGENT_F2(nextafter)
extern "C" {
double fma(double, double, double) noexcept;
float fmaf(float, float, float) noexcept;
double ldexp(double, int) noexcept;
float ldexpf(float, int) noexcept;
double frexp(double, int *) noexcept;
float frexpf(float, int *) noexcept;
int abs(int) noexcept;
}
inline float fma(float x, float y, float z) { return fmaf(x, y, z); }
inline float ldexp(float x, int n) { return ldexpf(x, n); }
inline long abs(long x) { return x < 0 ? -x : x; }
inline long long abs(long long x) { return x < 0 ? -x : x; }
inline float abs(float x) { return fabsf(x); }
inline double abs(double x) { return fabs(x); }
#define KAGENT_CLASSES(T)                                       \
    inline bool isnan(T x) { return __builtin_isnan(x); }       \
    inline bool isinf(T x) { return __builtin_isinf(x); }       \
    inline bool isfinite(T x) { return __builtin_isfinite(x); } \
    inline bool signbit(T x) { return __builtin_signbit(x); }
KAGENT_CLASSES(float) KAGENT_CLASSES(double)
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")

template <class To, class From> inline To kagent_bits(From value) {
    static_assert(sizeof(To) == sizeof(From), "of the same size");
    To bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    return bits;
}
inline int __float_as_int(float x) { return kagent_bits<int>(x); }
inline float __int_as_float(int x) { return kagent_bits<float>(x); }
inline unsigned int __float_as_uint(float x) { return kagent_bits<unsigned int>(x); }
inline float __uint_as_float(unsigned int x) { return kagent_bits<float>(x); }
inline long long __double_as_longlong(double x) { return kagent_bits<long long>(x); }
inline double __longlong_as_double(long long x) { return kagent_bits<double>(x); }
template <class T> inline T __ldg(const T *place) { return *place; }
template <class T> inline T __ldcs(const T *place) { return *place; }
template <class T> inline T __ldcg(const T *place) { return *place; }
template <class T> inline void __stcs(T *place, T value) { *place = value; }
template <class T> inline void __stcg(T *place, T value) { *place = value; }
template <class T> inline T max(T a, T b) { return a < b ? b : a; }
template <class T> inline T min(T a, T b) { return b < a ? b : a; }
#define KAGENT_MIXED(name, T, A, B) inline T name(A a, B b) { return name((T)a, (T)b); }
#define KAGENT_MIXED_BOTH(T, A, B) KAGENT_MIXED(max, T, A, B) KAGENT_MIXED(min, T, A, B)
KAGENT_MIXED_BOTH(unsigned int, int, unsigned int)
KAGENT_MIXED_BOTH(unsigned int, unsigned int, int)
KAGENT_MIXED_BOTH(long, int, long)
KAGENT_MIXED_BOTH(long, long, int)
KAGENT_MIXED_BOTH(long long, int, long long)
KAGENT_MIXED_BOTH(long long, long long, int)
inline float rsqrtf(float x) { return float(1.0 / sqrt((double)x)); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
inline float rsqrt(float x) { return rsqrtf(x); }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline double __dadd_rn(double x, double y) { return x + y; }
inline double __dmul_rn(double x, double y) { return x * y; }
inline int __popc(unsigned int x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz((unsigned int)x) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __mul24(int x, int y) { return x * y; }
inline unsigned int __umulhi(unsigned int x, unsigned int y) { return (unsigned int)(((unsigned long)x * y) >> 32); }

// -- the half types, rounded to the nearest, ties to even

inline unsigned short kagent_to_half(float x) {
    unsigned int bits = __float_as_uint(x), sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
    if (size > 0x7f800000u) return 0x7fffu;
    if (size >= 143u << 23) return (unsigned short)(sign | 0x7c00u);
    if (size < 113u << 23) return (unsigned short)(sign | (__float_as_uint(__uint_as_float(size) + 0.5f) - 0x3f000000u));
    return (unsigned short)(sign | (size - (112u << 23) + 0xfffu + (size >> 13 & 1u)) >> 13);
}
inline float kagent_from_half(unsigned short half) {
    unsigned int sign = (half & 0x8000u) << 16, rest = (half & 0x7fffu) << 13;
    if (rest >= 31u << 23) return __uint_as_float(sign | 0x7f800000u | rest);
    if (rest >= 1u << 23) return __uint_as_float(sign | (rest + (112u << 23)));
    float small = __uint_as_float(rest + (113u << 23)) - __uint_as_float(113u << 23);
    return __uint_as_float(sign | __float_as_uint(small));
}
inline unsigned short kagent_to_bfloat16(float x) {
    unsigned int bits = __float_as_uint(x);
    return x != x ? 0x7fffu : (unsigned short)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}
inline float kagent_from_bfloat16(unsigned short bits) { return __uint_as_float((unsigned int)bits << 16); }

#define KAGENT_HALF(T, to, from)                                                       \
    struct __attribute__((aligned(2))) T {                                             \
        unsigned short bits;                                                           \
        T() = default;                                                                 \
        T(float x) : bits(to(x)) {}                                                    \
        T(double x) : bits(to((float)x)) {}                                            \
        T(int x) : bits(to((float)x)) {}                                               \
        operator float() const { return from(bits); }                                  \
        T &operator+=(T other) { return *this = T((float)*this + (float)other); }      \
        T &operator-=(T other) { return *this = T((float)*this - (float)other); }      \
        T &operator*=(T other) { return *this = T((float)*this * (float)other); }      \
        T &operator/=(T other) { return *this = T((float)*this / (float)other); }      \
    };                                                                                 \
    inline T operator+(T a, T b) { return a += b; }                                    \
    inline T operator-(T a, T b) { return a -= b; }                                    \
    inline T operator*(T a, T b) { return a *= b; }                                    \
    inline T operator/(T a, T b) { return a /= b; }                                    \
    inline T operator-(T a) { a.bits ^= 0x8000u; return a; }                           \
    inline bool operator<(T a, T b) { return (float)a < (float)b; }                    \
    inline bool operator>(T a, T b) { return (float)a > (float)b; }                    \
    inline bool operator<=(T a, T b) { return (float)a <= (float)b; }                  \
    inline bool operator>=(T a, T b) { return (float)a >= (float)b; }                  \
    inline bool operator==(T a, T b) { return (float)a == (float)b; }                  \
    inline bool operator!=(T a, T b) { return (float)a != (float)b; }                  \
    inline T __hadd(T a, T b) { return a + b; }                                        \
    inline T __hsub(T a, T b) { return a - b; }                                        \
    inline T __hmul(T a, T b) { return a * b; }                                        \
    inline T __hdiv(T a, T b) { return a / b; }                                        \
    inline T __hneg(T a) { return -a; }                                                \
    inline T __hfma(T a, T b, T c) { return T((float)((double)(float)a * (float)b + (float)c)); } \
    inline bool __hisnan(T a) { return (float)a != (float)a; }                         \
    struct __attribute__((aligned(4))) T##2 { T x, y; };                               \
    inline T##2 __hadd2(T##2 a, T##2 b) { return {a.x + b.x, a.y + b.y}; }             \
    inline T##2 __hsub2(T##2 a, T##2 b) { return {a.x - b.x, a.y - b.y}; }             \
    inline T##2 __hmul2(T##2 a, T##2 b) { return {a.x * b.x, a.y * b.y}; }             \
    inline T##2 __h2div(T##2 a, T##2 b) { return {a.x / b.x, a.y / b.y}; }             \
    inline T##2 __hneg2(T##2 a) { return {-a.x, -a.y}; }                               \
    inline T##2 __hfma2(T##2 a, T##2 b, T##2 c) { return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)}; }
KAGENT_HALF(__half, kagent_to_half, kagent_from_half)
KAGENT_HALF(__nv_bfloat16, kagent_to_bfloat16, kagent_from_bfloat16)
typedef __half half;
typedef __half2 half2;
typedef __nv_bfloat16 nv_bfloat16;
typedef __nv_bfloat162 nv_bfloat162;
inline __half __float2half(float x) { return __half(x); }
inline __half __float2half_rn(float x) { return __half(x); }
inline float __half2float(__half x) { return x; }
inline __half2 __halves2half2(__half x, __half y) { return {x, y}; }
inline __half2 __half2half2(__half x) { return {x, x}; }
inline __half2 __float2half2_rn(float x) { return {__half(x), __half(x)}; }
inline __half2 __floats2half2_rn(float x, float y) { return {__half(x), __half(y)}; }
inline __half2 __float22half2_rn(float2 x) { return {__half(x.x), __half(x.y)}; }
inline float2 __half22float2(__half2 x) { return {x.x, x.y}; }
inline float __low2float(__half2 x) { return x.x; }
inline float __high2float(__half2 x) { return x.y; }
inline unsigned short __half_as_ushort(__half x) { return x.bits; }
inline __half __ushort_as_half(unsigned short bits) { __half x; x.bits = bits; return x; }
inline __nv_bfloat16 __float2bfloat16(float x) { return __nv_bfloat16(x); }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return __nv_bfloat16(x); }
inline float __bfloat162float(__nv_bfloat16 x) { return x; }
inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return {x, y}; }
inline __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 x) { return {x, x}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {__nv_bfloat16(x), __nv_bfloat16(y)}; }
inline __nv_bfloat162 __float22bfloat162_rn(float2 x) { return {__nv_bfloat16(x.x), __nv_bfloat16(x.y)}; }
inline float2 __bfloat1622float2(__nv_bfloat162 x) { return {x.x, x.y}; }
inline float __low2float(__nv_bfloat162 x) { return x.x; }
inline float __high2float(__nv_bfloat162 x) { return x.y; }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) { __nv_bfloat16 x; x.bits = bits; return x; }

// -- a kernel's parameters, laid out as the driver does

template <class... Parameters> struct kagent_layout {
    static constexpr size_t count = sizeof...(Parameters);
    size_t offsets[count + 1] = {}, sizes[count + 1] = {}, pointers[count + 1] = {};
    constexpr kagent_layout() {
        const size_t nbytes[] = {sizeof(Parameters)..., 0}, alignments[] = {alignof(Parameters)..., 1};
        const bool is_pointer[] = {std::is_pointer<Parameters>::value..., false};
        size_t end = 0;
        for (size_t n = 0; n < count; n++) {
            end = (end + alignments[n] - 1) / alignments[n] * alignments[n];
            offsets[n] = end, sizes[n] = nbytes[n], pointers[n] = is_pointer[n];
            end += nbytes[n];
        }
        offsets[count] = end;
    }
};

template <class... Parameters> KAGENT_PLAIN void kagent_describe(void (*)(Parameters...), long *table) {
    constexpr kagent_layout<Parameters...> layout;
    *table++ = (long)layout.count;
    *table++ = (long)layout.offsets[layout.count];
    for (size_t n = 0; n < layout.count; n++)
        *table++ = (long)layout.offsets[n], *table++ = (long)layout.sizes[n], *table++ = (long)layout.pointers[n];
}

template <class T> KAGENT_PLAIN T kagent_loaded(const unsigned char *place) {
    typename std::remove_const<T>::type value;
    __builtin_memcpy((void *)&value, place, sizeof(T));
    return value;
}
template <class... Parameters, size_t... n>
KAGENT_PLAIN void kagent_call(void (*kernel)(Parameters...), const unsigned char *block, std::index_sequence<n...>) {
    constexpr kagent_layout<Parameters...> layout;
    kernel(kagent_loaded<Parameters>(block + layout.offsets[n])...);
}
template <class... Parameters> KAGENT_PLAIN void kagent_call(void (*kernel)(Parameters...), const void *block) {
    kagent_call(kernel, static_cast<const unsigned char *>(block), std::index_sequence_for<Parameters...>());
}
// Thread-local memory exists from its first use in a thread of the host on: this uses it.
static thread_local volatile __attribute__((aligned(16))) unsigned char kagent_touched[16];

#define KAGENT_EXPORTED extern "C" __attribute__((visibility("default"))) KAGENT_PLAIN
#define KAGENT_KERNEL(name, bound)                                                           \
    KAGENT_EXPORTED void kagent_touch(long *) { kagent_touched[0] = 0; }                     \
    KAGENT_EXPORTED void kagent_bound(long *table) { *table = (long)(bound); }               \
    KAGENT_EXPORTED void kagent_describe_kernel(long *table) { kagent_describe(name, table); } \
    KAGENT_EXPORTED void kagent_entry(const void *block) { kagent_call(name, block); }
