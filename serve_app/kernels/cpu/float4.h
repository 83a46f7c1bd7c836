// bfloat16 weights that are four-bit floats with a power of two as scale (MXFP4 of the OCP's microscaling formats, v1.0),
// exactly: +-{0, 0.5, 1, 1.5, 2, 3, 4, 6} times a scale that 32 columns of an output share.
//
// Layout of a panel: per 16 pairs of columns a line of 64 bytes for each pair, two codes a byte in the order of compact.h's
// (`packed_at`), then a line with the exponents of the 64 outputs' scales, biased by 127.
#pragma once
#include "gemm.h"

namespace {

constexpr int64_t FLOAT4 = 5;  // `bits` of such a linear
constexpr int FLOAT4_BLOCK = 16, FLOAT4_LINES = FLOAT4_BLOCK + 1;

inline int64_t float4_bytes(int64_t k) { return k / 32 * FLOAT4_LINES * 64; }

#if HAS_BF16_DOT

// One pair of columns: 128 values before they are scaled, in the order of gemm.h.
inline void unpack_float4(const uint8_t* from, __m512i values[4]) {
    // Of the 16 codes the low and the high bytes.
    const __m512i lows = _mm512_broadcast_i32x4(_mm_set_epi32(0xc0804000, 0xc0800000, 0xc0804000, 0xc0800000));
    const __m512i highs = _mm512_broadcast_i32x4(_mm_set_epi32(0xc0c0c0c0, 0xbfbfbf80, 0x40404040, 0x3f3f3f00));
    const __m512i four_bits = _mm512_set1_epi8(15), codes = _mm512_loadu_si512(from);
    for (int half = 0; half < 2; half++) {
        const __m512i code = _mm512_and_si512(half ? _mm512_srli_epi16(codes, 4) : codes, four_bits);
        const __m512i low = _mm512_shuffle_epi8(lows, code), high = _mm512_shuffle_epi8(highs, code);
        values[2 * half] = _mm512_unpacklo_epi8(low, high);
        values[2 * half + 1] = _mm512_unpackhi_epi8(low, high);
    }
}

// For few rows: each tile unpacks into registers. Sums of a block are scaled and added up, block by block, however many rows
// there are: a row's result does not depend on the others.
class Float4Panel {
public:
    static constexpr int LINES = 1, UNIT = FLOAT4_BLOCK;
    static constexpr int TILE_ROWS = 4, ROWS = 8, FAR = 8 * FLOAT4_BLOCK, CLOSE = 4 * FLOAT4_BLOCK;
    static constexpr bool STREAMS = true;

    Float4Panel(const Linear& l, int panel) : begin_((const uint8_t*)l.weight + panel * float4_bytes(l.k)) {}
    const uint8_t* at(int64_t pair) const { return begin_ + (pair / UNIT * FLOAT4_LINES + pair % UNIT) * 64; }
    void begin(int64_t from, int64_t) { from_ = from; }

    template <int M, class Fetching>
    void tile(const bf16* x, int64_t x_stride, int pairs, float* sums, bool fresh, Fetching ahead) const {
        multiply<M>(x, x_stride, pairs, sums, fresh, ahead, [&](const uint8_t* line, int, __m512i values[4]) {
            unpack_float4(line, values);
        });
    }

protected:
    // `read(line, pair, values)` gives the values of a pair of columns whose codes are in that line.
    template <int M, class Fetching, class Read>
    ALWAYS_INLINE void multiply(const bf16* x, int64_t x_stride, int pairs, float* sums, bool fresh, Fetching ahead,
                                Read read) const {
        const uint8_t* from = at(from_);
        if (fresh) std::memset(sums, 0, M * PANEL * sizeof(float));
        for (int block = 0; block < pairs; block += UNIT, from += FLOAT4_LINES * 64, ahead.next += FLOAT4_LINES * 64) {
            __m512 acc[M][4];
            for (int m = 0; m < M; m++)
                for (int j = 0; j < 4; j++) acc[m][j] = _mm512_setzero_ps();
            for (int p = 0; p < UNIT; p++) {
                if (--ahead.wait < 0) {
                    fetch(ahead.next + p * 64, ahead.near);
                    if (p == UNIT - 1) fetch(ahead.next + UNIT * 64, ahead.near);
                    ahead.wait = ahead.every - 1;
                }
                if constexpr (!std::is_same<Fetching, Ahead>::value) ahead.beside->some();
                __m512i b[4];
                read(from + p * 64, block + p, b);
                for (int m = 0; m < M; m++) {
                    int32_t pair;
                    std::memcpy(&pair, x + m * x_stride + 2 * (block + p), 4);
                    const __m512bh a = (__m512bh)_mm512_set1_epi32(pair);
                    for (int j = 0; j < 4; j++) acc[m][j] = _mm512_dpbf16_ps(acc[m][j], a, (__m512bh)b[j]);
                }
            }
            const uint8_t* scales = from + UNIT * 64;
            for (int j = 0; j < 4; j++) {
                const __m512i exponents = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(scales + 16 * j)));
                const __m512 scale = _mm512_castsi512_ps(_mm512_slli_epi32(exponents, 23));
                for (int m = 0; m < M; m++) {
                    float* sum = sums + m * PANEL + 16 * j;
                    _mm512_storeu_ps(sum, _mm512_fmadd_ps(acc[m][j], scale, _mm512_loadu_ps(sum)));
                }
            }
        }
    }

    const uint8_t* begin_;
    int64_t from_ = 0;
};

// For more rows than two tiles of that have: a piece is unpacked once, into the cache.
class UnpackedFloat4Panel : public Float4Panel {
public:
    static constexpr int TILE_ROWS = TILE, ROWS = 192, FAR = 512, CLOSE = 64;
    static constexpr bool STREAMS = false;

    UnpackedFloat4Panel(const Linear& l, int panel) : Float4Panel(l, panel) {
        alignas(64) static thread_local uint16_t memory[FAR * 2 * PANEL];
        unpacked_ = memory;
    }

    void begin(int64_t from, int64_t to) {
        from_ = from;
        for (int64_t pair = from; pair < to; pair++) {
            __m512i values[4];
            unpack_float4(at(pair), values);
            for (int j = 0; j < 4; j++) _mm512_store_si512(unpacked_ + (pair - from) * 2 * PANEL + 32 * j, values[j]);
        }
    }

    template <int M, class Fetching>
    void tile(const bf16* x, int64_t x_stride, int pairs, float* sums, bool fresh, Fetching ahead) const {
        multiply<M>(x, x_stride, pairs, sums, fresh, ahead, [&](const uint8_t*, int pair, __m512i values[4]) {
            for (int j = 0; j < 4; j++) values[j] = _mm512_load_si512(unpacked_ + pair * 2 * PANEL + 32 * j);
        });
    }

private:
    uint16_t* unpacked_;
};

#endif

// -- packing ----------------------------------------------------------------------------------------------------------

// The largest exponent of 32 neighbouring columns; 0 if all are zeros.
inline int largest_exponent(const uint16_t* columns) {
    int most = 0;
    for (int c = 0; c < 32; c++) most = std::max(most, columns[c] >> 7 & 0xff);
    return most;
}

// The code of a value of a group with that exponent, -1 if there is none.
inline int float4_code(uint16_t value, int most) {
    const int sign = value >> 15 << 3, exponent = value >> 7 & 0xff, fraction = value & 0x7f, above = exponent - (most - 2);
    if ((value & 0x7fff) == 0) return sign;
    if (exponent == 0 || above < -1 || (fraction & 0x3f) || (above < 0 && fraction)) return -1;
    return sign | (above < 0 ? 1 : 2 + 2 * above + (fraction >> 6));
}

// Whether each 32 columns of a row [k] are such values, and their scale is one that there is.
inline bool is_float4(const uint16_t* row, int64_t k) {
    for (int64_t at = 0; at < k; at += 32) {
        const int most = largest_exponent(row + at);
        if (most && (most < 3 || most > 253)) return false;
        for (int c = 0; c < 32; c++)
            if (float4_code(row[at + c], most) < 0) return false;
    }
    return true;
}

inline void pack_float4_panel(const PanelSource& panel, uint8_t* to) {
    std::memset(to, 0, float4_bytes(panel.k));
    for (int64_t block = 0; block < panel.k / 32; block++, to += FLOAT4_LINES * 64)
        for (int row = 0; row < 64; row++) {
            uint8_t& exponent = to[FLOAT4_BLOCK * 64 + row];
            exponent = 127;
            if (panel.order[row] < 0) continue;
            const uint16_t* columns = panel.source + panel.order[row] * panel.k + block * 32;
            const int most = largest_exponent(columns);
            if (most) exponent = (uint8_t)(most - 2);
            for (int c = 0; c < 32; c++) {
                const int at = packed_at(2 * row + c % 2), code = float4_code(columns[c], most);
                to[c / 2 * 64 + at % 64] |= at < 64 ? code : code << 4;
            }
        }
}

}  // namespace
