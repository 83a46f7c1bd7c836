// bfloat16 weights in 12 bits, exactly: what is multiplied are the very values, unpacked into the cache just before.
//
// The low byte of each value (last bit of the exponent, 7 of the mantissa) is kept as it is. The high byte (sign, first 7
// bits of the exponent) takes few values in trained weights: a code of 4 bits per value says sign and one of 7 neighbouring
// exponent pairs, which a panel chooses, or zero. What fits none (about 1 value in 3,000) is an exception: its place and its
// 16 bits stand in a list, and it is written over what was unpacked.
//
// Layout of a panel: per pair of columns 128 low bytes, then 64 bytes with two codes each. Bytes are ordered so that
// unpacking needs no shuffle across 128-bit lanes: see `packed_at`.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr int COMPACT_BYTES = 192;       // of a pair of columns of a panel of 64 outputs: 128 values
constexpr int COMPACT_BLOCK = 8;         // pairs of columns whose exceptions are counted together
constexpr int COMPACT_TABLE = 16;        // bytes per panel: the high byte of each code

// What a packed linear has on top of its panels. An exception is (place in the block << 16) | the value's bits.
struct Exceptions {
    const uint8_t* tables;     // [panels][16]
    const int32_t* starts;     // [panels * blocks + 1] into `values`
    const uint32_t* values;
};

inline int64_t compact_blocks(int64_t k) { return (k / 2 + COMPACT_BLOCK - 1) / COMPACT_BLOCK; }

// Where the low byte of value `element` (0..127) of a pair of columns lies; its code is in byte 128 + at % 64, the upper half
// if at >= 64.
inline int packed_at(int element) {
    const int vector = element / 32, lane = element % 32 / 8;
    return vector / 2 * 64 + lane * 16 + vector % 2 * 8 + element % 8;
}

#if defined(__AVX512BW__)
// One pair of columns: 128 values in the order of gemm.h.
inline void unpack(const uint8_t* from, __m512i table, __m512i values[4]) {
    const __m512i four_bits = _mm512_set1_epi8(15);
    const __m512i low0 = _mm512_loadu_si512(from), low1 = _mm512_loadu_si512(from + 64);
    const __m512i codes = _mm512_loadu_si512(from + 128);
    const __m512i high0 = _mm512_shuffle_epi8(table, _mm512_and_si512(codes, four_bits));
    const __m512i high1 = _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(codes, 4), four_bits));
    values[0] = _mm512_unpacklo_epi8(low0, high0);
    values[1] = _mm512_unpackhi_epi8(low0, high0);
    values[2] = _mm512_unpacklo_epi8(low1, high1);
    values[3] = _mm512_unpackhi_epi8(low1, high1);
}

inline void unpack_pair(const uint8_t* from, __m512i table, uint16_t* to) {
    __m512i values[4];
    unpack(from, table, values);
    for (int j = 0; j < 4; j++) _mm512_store_si512(to + 32 * j, values[j]);
}

inline __m512i compact_table(const uint8_t* bytes) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)bytes));
}
#endif

// -- packing ----------------------------------------------------------------------------------------------------------

// A panel of the source: value of output `row` (0..63) and column `column`; rows that are not there are zeros.
struct PanelSource {
    const uint16_t* source;
    const int64_t* order;
    int64_t k;

    uint16_t at(int row, int64_t column) const { return order[row] < 0 ? 0 : source[order[row] * k + column]; }
};

inline int high_exponent(uint16_t value) { return value >> 8 & 0x7f; }
inline bool fits(uint16_t value, int base) {
    const int high = high_exponent(value);
    return high == 0 || (high >= base && high < base + 7);
}

// The 7 neighbouring exponent pairs that most values have.
inline int best_base(const PanelSource& panel) {
    int64_t counts[128] = {};
    for (int row = 0; row < 64; row++)
        for (int64_t c = 0; c < panel.k; c++) counts[high_exponent(panel.at(row, c))]++;
    int64_t most = -1;
    int best = 1;
    for (int base = 1; base + 7 <= 128; base++) {
        int64_t held = 0;
        for (int i = 0; i < 7; i++) held += counts[base + i];
        if (held > most) most = held, best = base;
    }
    return best;
}

inline void write_table(int base, uint8_t* table) {
    for (int code = 0; code < 16; code++) table[code] = (code >> 3 << 7) | (code & 7 ? base + (code & 7) - 1 : 0);
}

// Exceptions of each block of a panel.
inline void count_exceptions(const PanelSource& panel, int base, int32_t* counts) {
    for (int64_t b = 0; b < compact_blocks(panel.k); b++) counts[b] = 0;
    for (int row = 0; row < 64; row++)
        for (int64_t c = 0; c < panel.k; c++) counts[c / 2 / COMPACT_BLOCK] += !fits(panel.at(row, c), base);
}

// Writes a panel and, in order, its exceptions.
inline void pack_panel(const PanelSource& panel, int base, uint8_t* to, uint32_t* exceptions) {
    for (int64_t p = 0; p < panel.k / 2; p++, to += COMPACT_BYTES) {
        std::memset(to, 0, COMPACT_BYTES);
        for (int element = 0; element < 128; element++) {
            const uint16_t value = panel.at(element / 2, 2 * p + element % 2);
            if (!fits(value, base)) {
                *exceptions++ = (uint32_t)(p % COMPACT_BLOCK * 128 + element) << 16 | value;
                continue;
            }
            const int high = high_exponent(value), at = packed_at(element);
            const int code = (value >> 15) << 3 | (high ? high - base + 1 : 0);
            to[at] = (uint8_t)value;
            to[128 + at % 64] |= at < 64 ? code : code << 4;
        }
    }
}

}  // namespace
