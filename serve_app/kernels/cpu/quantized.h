// Products of weights in 8 or 4 bits with activations in 8, as pairs of (groups of 64 columns) x (panels of 64 outputs).
//
// A weight's value is scale * code + offset, one scale (and for 4 bits one offset) per output and group; a row of
// activations is scale * code with one scale per group. Codes are multiplied exactly in int32 (AVX512_VNNI), and each group's
// sum enters the float32 result in one fixed order: as in gemm.h a token's result does not depend on its batch.
//
// Layout of a panel: per group [16][64][4] codes of 8 bits (biased by 128), or [8][64][4] bytes whose low halves are the columns
// 8 j + e and whose high halves are the columns 8 j + 4 + e; then 64 scales, and for 4 bits 64 offsets, in bfloat16.
#pragma once
#include <vector>

#include "wide.h"

#if HAS_BF16_DOT && defined(__AVX512VNNI__)
#define HAS_QUANTIZED 1
#else
#define HAS_QUANTIZED 0
#endif

namespace {

constexpr int GROUP = 64;  // columns that share a scale

// Activations as they go into a product: [rows, k] codes, and per row and group the scale and the sum of the codes.
struct Codes {
    int8_t* values;
    float* scales;
    int32_t* sums;
    int64_t k;

    int64_t groups() const { return k / GROUP; }
    Codes from(int64_t row) const {
        return Codes{values + row * k, scales + row * groups(), sums + row * groups(), k};
    }
};

// Memory of so many rows of codes.
struct CodeMemory {
    std::vector<int8_t> values;
    std::vector<float> scales;
    std::vector<int32_t> sums;

    Codes take(int64_t rows, int64_t k) {
        if ((int64_t)values.size() < rows * k) values.resize(rows * k);
        if ((int64_t)sums.size() < rows * k / GROUP) scales.resize(rows * k / GROUP), sums.resize(rows * k / GROUP);
        return {values.data(), scales.data(), sums.data(), k};
    }
};

inline void copy_codes(const Codes& from, const Codes& to) {
    std::memcpy(to.values, from.values, from.k);
    std::memcpy(to.scales, from.scales, from.groups() * sizeof(float));
    std::memcpy(to.sums, from.sums, from.groups() * sizeof(int32_t));
}

inline int64_t group_bytes(int bits) { return bits == 8 ? PANEL * GROUP + PANEL * 2 : PANEL * GROUP / 2 + PANEL * 4; }

#if HAS_QUANTIZED

// As Ahead in gemm.h, `bytes` from what is being read.
struct Distance {
    int64_t bytes;
    int every, wait;
    bool near;
};

inline void quantize_row(const bf16* x, const Codes& to) {
    for (int64_t g = 0; g < to.groups(); g++, x += GROUP) {
        vfloat v[GROUP / LANES], top = {};
        for (int j = 0; j < GROUP / LANES; j++) {
            v[j] = load(x + j * LANES);
            top = vmax(top, v[j] < 0.f ? -v[j] : v[j]);
        }
        const float scale = hmax(top) / 127.f, inverse = scale > 0.f ? 1.f / scale : 0.f;
        __m512i total = _mm512_setzero_si512();
        for (int j = 0; j < GROUP / LANES; j++) {
            const __m512i code = _mm512_cvtps_epi32((__m512)(v[j] * inverse));  // to nearest even
            total = _mm512_add_epi32(total, code);
            _mm_storeu_si128((__m128i*)(to.values + g * GROUP + j * LANES), _mm512_cvtsepi32_epi8(code));
        }
        to.scales[g] = scale;
        to.sums[g] = _mm512_reduce_add_epi32(total);
    }
}

// sums[m][64] (+)= x[m] . w over `groups` groups for M rows.
template <int BITS, int M>
inline void quantized_tile(const Codes& x, const uint8_t* w, int groups, float* sums, bool fresh, Distance ahead) {
    constexpr int ROWS = BITS == 8 ? GROUP / 4 : GROUP / 8;  // of [64][4] bytes
    const __m512i low = _mm512_set1_epi8(15);
    for (int g = 0; g < groups; g++, w += group_bytes(BITS)) {
        __m512i acc[M][4];
        for (int m = 0; m < M; m++) {
            const int32_t start = BITS == 8 ? -128 * x.sums[m * x.groups() + g] : 0;
            for (int j = 0; j < 4; j++) acc[m][j] = _mm512_set1_epi32(start);
        }
        for (int r = 0; r < ROWS; r++) {
            if (r % ahead.every == ahead.wait % ahead.every)
                for (int j = 0; j < 4; j++) fetch(w + ahead.bytes + r * 256 + 64 * j, ahead.near);
            __m512i b[4];
            for (int j = 0; j < 4; j++) b[j] = _mm512_loadu_si512(w + r * 256 + 64 * j);
            for (int half = 0; half < (BITS == 8 ? 1 : 2); half++)
                for (int m = 0; m < M; m++) {
                    int32_t quad;
                    std::memcpy(&quad, x.values + m * x.k + g * GROUP + (BITS == 8 ? 4 * r : 8 * r + 4 * half), 4);
                    const __m512i a = _mm512_set1_epi32(quad);
                    for (int j = 0; j < 4; j++) {
                        const __m512i code = BITS == 8 ? b[j]
                                             : _mm512_and_si512(half ? _mm512_srli_epi16(b[j], 4) : b[j], low);
                        acc[m][j] = _mm512_dpbusd_epi32(acc[m][j], code, a);
                    }
                }
        }
        const bf16* scales = (const bf16*)(w + ROWS * 256);
        for (int m = 0; m < M; m++) {
            const float scale = x.scales[m * x.groups() + g];
            const float total = scale * (float)x.sums[m * x.groups() + g];
            for (int j = 0; j < 4; j++) {
                float* sum = sums + m * PANEL + 16 * j;
                vfloat value = (fresh && g == 0) ? vfloat{} : load(sum);
                value += (vfloat)_mm512_cvtepi32_ps(acc[m][j]) * (load(scales + 16 * j) * scale);
                if (BITS == 4) value += load(scales + PANEL + 16 * j) * total;
                store(sum, value);
            }
        }
    }
}

template <int BITS>
inline void any_quantized_tile(int rows, const Codes& x, const uint8_t* w, int groups, float* sums, bool fresh,
                               Distance ahead) {
    switch (rows) {
        case 6: return quantized_tile<BITS, 6>(x, w, groups, sums, fresh, ahead);
        case 5: return quantized_tile<BITS, 5>(x, w, groups, sums, fresh, ahead);
        case 4: return quantized_tile<BITS, 4>(x, w, groups, sums, fresh, ahead);
        case 3: return quantized_tile<BITS, 3>(x, w, groups, sums, fresh, ahead);
        case 2: return quantized_tile<BITS, 2>(x, w, groups, sums, fresh, ahead);
        case 1: return quantized_tile<BITS, 1>(x, w, groups, sums, fresh, ahead);
    }
}

// One panel for all rows, as panel_product in gemm.h.
template <int BITS, class Write>
inline void quantized_panel(const Linear& l, int panel, const uint8_t* following, const Codes& x, int rows, Write write) {
    constexpr int PIECE = 2 * K_PIECE / GROUP, NEAR_PIECE = 2 * K_NEAR / GROUP;  // groups; as many bytes as there
    alignas(64) float sums[ROW_CHUNK * PANEL];
    const int groups = (int)(l.k / GROUP);
    const int64_t bytes = group_bytes(BITS);
    const uint8_t* weight = (const uint8_t*)l.weight + (int64_t)panel * groups * bytes;
    for (int low = 0; low < rows; low += ROW_CHUNK) {
        const int count = std::min(ROW_CHUNK, rows - low);
        const int tiles = (count + TILE - 1) / TILE;
        const Pieces pieces(groups, tiles, tiles == 1, PIECE, NEAR_PIECE);
        for (int i = 0; i < pieces.count; i++) {
            const int64_t g = pieces.begin(i), after = pieces.begin(i + 1);
            const uint8_t* read = weight + g * bytes;
            const uint8_t* to_come = i + 1 < pieces.count ? weight + after * bytes : low + ROW_CHUNK < rows ? weight : following;
            for (int t = 0; t < tiles; t++) {
                const int begin = count * t / tiles, end = count * (t + 1) / tiles;
                Codes rows_of = x.from(low + begin);
                rows_of.values += g * GROUP, rows_of.scales += g, rows_of.sums += g;
                any_quantized_tile<BITS>(end - begin, rows_of, read, (int)(after - g), sums + begin * PANEL, i == 0,
                                         Distance{tiles == 1 ? NEAR : to_come - read, tiles, t, pieces.near});
            }
        }
        for (int m = 0; m < count; m++) {
            float* row = sums + m * PANEL;
            if (l.bias)
                for (int j = 0; j < PANEL; j += LANES) store(row + j, load(row + j) + load(l.bias + panel * PANEL + j));
            write(low + m, row);
        }
    }
}
#endif

#if HAS_BF16_DOT
inline int64_t any_panel_bytes(const Linear& l) {
    return is_wide(l) ? panel_bytes(l) : l.k / GROUP * group_bytes((int)l.bits);
}

inline int64_t weight_bytes(const Linear& l) { return panels(l) * any_panel_bytes(l); }

// Where a panel of any weight begins.
inline const uint8_t* any_panel_at(const Linear& l, int panel) {
    return (const uint8_t*)l.weight + panel * any_panel_bytes(l);
}

// A panel of any weight for all rows: `x` for those that are multiplied as bfloat16, `codes` for the others.
template <class Write>
inline void any_panel(const Linear& l, int panel, const uint8_t* following, const bf16* x, const Codes& codes, int64_t rows,
                      Write write) {
    if (is_wide(l)) wide_panel(l, panel, following, x, rows, write, Nothing());
#if HAS_QUANTIZED
    if (l.bits == 8) quantized_panel<8>(l, panel, following, codes, (int)rows, write);
    if (l.bits == 4) quantized_panel<4>(l, panel, following, codes, (int)rows, write);
#endif
}
#endif

}  // namespace
