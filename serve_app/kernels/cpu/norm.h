// RMS normalisation of one row, rounding where transformers' modules round.
#pragma once
#include "simd.h"

namespace {
using namespace simd;

// out = x / rms(x) * weight over `dim` elements, a multiple of 16; `out` may be `x`. round_first: x / rms is rounded to the
// row's type before the weight is applied.
template <class T>
inline void rms_norm_row(const T* x, const float* weight, T* out, int64_t dim, double eps, bool round_first) {
    vfloat squares[4] = {};
    int64_t d = 0;
    for (; d + 4 * LANES <= dim; d += 4 * LANES)
        for (int j = 0; j < 4; j++) {
            const vfloat v = load(x + d + j * LANES);
            squares[j] += v * v;
        }
    for (; d < dim; d += LANES) {
        const vfloat v = load(x + d);
        squares[0] += v * v;
    }
    const float scale = 1.f / std::sqrt(hsum(squares[0] + squares[1] + (squares[2] + squares[3])) / (float)dim + (float)eps);
    for (d = 0; d < dim; d += LANES) {
        vfloat v = load(x + d) * scale;
        if (round_first && sizeof(T) == 2) {
            T rounded[LANES];
            store(rounded, v);
            v = load(rounded);
        }
        store(out + d, v * load(weight + d));
    }
}

}  // namespace
