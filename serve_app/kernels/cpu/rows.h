// What stands between a decoder's products: values rounded to bfloat16 where transformers' modules round them.
#pragma once
#include "gemm.h"

namespace {

#if HAS_BF16_DOT

constexpr int64_t OWN_ROWS = 8;  // of so few rows every thread makes its own copies: cheaper than waiting for one another

inline vfloat rounded(vfloat v) {
    return (vfloat)_mm512_slli_epi32(_mm512_cvtepu16_epi32(to_bf16(v)), 16);
}

inline void put(bf16* to, vfloat v) {
    const __m256i half = to_bf16(v);
    std::memcpy(to, &half, sizeof half);
}

inline void copy(bf16* to, const float* from, int width) {
    for (int j = 0; j < width; j += LANES) put(to + j, load(from + j));
}

inline void add(bf16* to, const float* from, int width) {
    for (int j = 0; j < width; j += LANES) put(to + j, load(to + j) + rounded(load(from + j)));
}

// Of a panel's gates and ups, `width` each: silu(gate) * up.
inline void gate(bf16* to, const float* from, int width) {
    for (int j = 0; j < width; j += LANES) {
        const vfloat g = rounded(load(from + j)), up = rounded(load(from + PANEL / 2 + j));
        put(to + j, rounded(g / (1.f + vexp(-g))) * up);
    }
}

// gpt-oss's: both are limited, and ups are of one more.
inline void gate_limited(bf16* to, const float* from, int width, float alpha, float limit) {
    const vfloat most = splat(limit);
    for (int j = 0; j < width; j += LANES) {
        vfloat g = rounded(load(from + j)), up = rounded(load(from + PANEL / 2 + j));
        g = g > most ? most : g;
        up = up > most ? most : up < -most ? -most : up;
        const vfloat share = rounded(1.f / (1.f + vexp(-rounded(g * alpha))));
        put(to + j, rounded(up + 1.f) * rounded(g * share));
    }
}

#endif

}  // namespace
