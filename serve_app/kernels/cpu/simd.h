// Portable SIMD: GCC/Clang vector extensions, so one source serves AVX-512, AVX2, NEON and plain SSE.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace simd {

#if defined(__AVX512F__) && defined(__AVX512BW__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define HAS_BF16_DOT 1
#else
#define HAS_BF16_DOT 0
#endif

typedef float vfloat __attribute__((vector_size(LANES * 4)));
typedef int32_t vint __attribute__((vector_size(LANES * 4)));
typedef uint32_t vuint __attribute__((vector_size(LANES * 4)));
typedef uint16_t vhalf __attribute__((vector_size(LANES * 2)));

struct bf16 {
    uint16_t bits;
};

inline vfloat splat(float x) { return vfloat{} + x; }

inline vfloat load(const float* p) {
    vfloat v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

inline vfloat load(const bf16* p) {
    vhalf h;
    std::memcpy(&h, p, sizeof h);
    return (vfloat)(__builtin_convertvector(h, vuint) << 16);
}

inline void store(float* p, vfloat v) { std::memcpy(p, &v, sizeof v); }

// Round to nearest even, as torch does; a NaN stays a NaN (the carry could otherwise turn it into an infinity).
inline void store(bf16* p, vfloat v) {
    vuint u = (vuint)v;
    vuint rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    vuint nan = (u >> 16) | 0x40u;
    vhalf h = __builtin_convertvector(v == v ? rounded : nan, vhalf);
    std::memcpy(p, &h, sizeof h);
}

inline vfloat vmax(vfloat a, vfloat b) { return a > b ? a : b; }

#if defined(__AVX512F__) && defined(__AVX512BW__)
inline float hsum(vfloat v) { return _mm512_reduce_add_ps((__m512)v); }
inline float hmax(vfloat v) { return _mm512_reduce_max_ps((__m512)v); }
#else
inline float hsum(vfloat v) {
    float lane[LANES];
    store(lane, v);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) lane[i] += lane[i + width];
    return lane[0];
}

inline float hmax(vfloat v) {
    float lane[LANES];
    store(lane, v);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) lane[i] = lane[i] > lane[i + width] ? lane[i] : lane[i + width];
    return lane[0];
}
#endif

// e^x by range reduction to [-ln2/2, ln2/2] and the degree-6 Taylor polynomial (relative error about 2e-7);
// exactly 0 below the smallest normal float, so that masked scores (-inf) carry no weight at all.
inline vfloat vexp(vfloat x) {
    vfloat clamped = x < -87.f ? splat(-87.f) : x;
    clamped = clamped > 88.f ? splat(88.f) : clamped;
    vfloat shifted = clamped * 1.44269504f + 12582912.f;  // 1.5 * 2^23: the integer lands in the low mantissa bits
    vfloat n = shifted - 12582912.f;
    vfloat r = clamped - n * 0.693359375f + n * 2.12194440e-4f;
    vfloat p = splat(1.f / 720) * r + 1.f / 120;
    p = p * r + 1.f / 24;
    p = p * r + 1.f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.f;
    p = p * r + 1.f;
    vint exponent = ((vint)shifted - 0x4b400000) << 23;
    vfloat y = (vfloat)((vint)p + exponent);
    return x < -87.f ? vfloat{} : y;
}

// tanh by e^(2x); absolute error about 1e-7, which is what a logit soft cap needs.
inline vfloat vtanh(vfloat x) { return 1.f - 2.f / (vexp(x + x) + 1.f); }

// Sums of LANES vectors: result[i] = sum(v[i]).
inline vfloat sum_each(const vfloat* v) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
    __m512 quad[4];
    for (int i = 0; i < 4; i++) {
        __m512 a = (__m512)v[4 * i], b = (__m512)v[4 * i + 1], c = (__m512)v[4 * i + 2], d = (__m512)v[4 * i + 3];
        __m512d ab = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
        __m512d cd = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d)));
        quad[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)),
                                _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)));
    }
    __m512 low = _mm512_add_ps(_mm512_shuffle_f32x4(quad[0], quad[1], 0x88),
                               _mm512_shuffle_f32x4(quad[0], quad[1], 0xdd));
    __m512 high = _mm512_add_ps(_mm512_shuffle_f32x4(quad[2], quad[3], 0x88),
                                _mm512_shuffle_f32x4(quad[2], quad[3], 0xdd));
    return (vfloat)_mm512_add_ps(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd));
#else
    vfloat s;
    for (int i = 0; i < LANES; i++) s[i] = hsum(v[i]);
    return s;
#endif
}

#if HAS_BF16_DOT
inline vfloat dot_pairs(vfloat acc, __m512i a, __m512i b) {
    return (vfloat)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
}

// Lane i = (low: a[i], high: b[i]) for 16 bf16 values each.
inline __m512i interleave(__m256i a, __m256i b) {
    return _mm512_or_si512(_mm512_cvtepu16_epi32(a), _mm512_slli_epi32(_mm512_cvtepu16_epi32(b), 16));
}

inline __m256i to_bf16(vfloat v) { return (__m256i)_mm512_cvtneps_pbh((__m512)v); }
#endif

}  // namespace simd
