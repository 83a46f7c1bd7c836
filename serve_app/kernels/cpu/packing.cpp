// Adapters' matrices into the layout of delta.h: all of an adapter in one call, whose numbers are looked at on the way.
#include <cstdint>
#include <cstring>

#include "simd.h"

namespace {

struct PackJob {  // one matrix; mirrored by serve_app/kernels/linear/packing.py, field by field, 8 bytes each
    const uint8_t* from;    // its rows, one behind the other, at any address
    uint8_t* to;            // [groups][words][16] words of 4 bytes
    const int64_t* rows;    // [count * 16] the row that goes into each lane, -1: the lane stays as it is; null: in order
    const int64_t* groups;  // [count] which group of `to`
    int64_t count, columns; // columns of the matrix, numbers of `bits`
    int64_t words, bits;    // words that a lane has, at least as many as the columns take
    uint8_t* scales;        // [ranks] float32 that get `scale`, or null
    int64_t ranks;
    double scale;
};

inline bool ends(uint32_t word, bool half) {  // infinite, or no number
    if (!half) return (word & 0x7f800000u) == 0x7f800000u;
    return (word & 0x7f80u) == 0x7f80u || (word & 0x7f800000u) == 0x7f800000u;
}

// Word `w` of a row; of an odd number of halves the last stands alone.
inline uint32_t word_of(const uint8_t* row, int64_t w, int64_t bytes) {
    uint32_t word = 0;
    std::memcpy(&word, row + 4 * w, bytes - 4 * w < 4 ? bytes - 4 * w : 4);
    return word;
}

// Lanes one by one. True if all numbers are finite.
bool pack_lanes(const PackJob& job, int64_t group) {
    const int64_t bytes = job.columns * job.bits / 8, words = (bytes + 3) / 4;
    uint8_t* to = job.to + job.groups[group] * job.words * 64;
    bool finite = true;
    for (int lane = 0; lane < 16; lane++) {
        const int64_t row = job.rows ? job.rows[16 * group + lane] : 16 * group + lane;
        if (row < 0) continue;
        for (int64_t w = 0; w < words; w++) {
            const uint32_t word = word_of(job.from + row * bytes, w, bytes);
            finite = finite && !ends(word, job.bits == 16);
            std::memcpy(to + (16 * w + lane) * 4, &word, 4);
        }
    }
    return finite;
}

#if defined(__AVX512F__) && defined(__AVX512BW__)

// Sixteen rows of sixteen words: their columns become rows.
inline void transpose(__m512i* r) {
    __m512i t[16];
    for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 4; i++) {
        r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);
        t[4 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
        t[8 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
        t[12 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);
        r[4 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0x88);
        r[8 + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd);
        r[12 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0xdd);
    }
}

// The same as pack_lanes for a group whose sixteen lanes all have a row of whole words.
bool pack_group(const PackJob& job, int64_t group) {
    const int64_t bytes = job.columns * job.bits / 8, words = bytes / 4;
    uint8_t* to = job.to + job.groups[group] * job.words * 64;
    const uint8_t* rows[16];
    for (int lane = 0; lane < 16; lane++)
        rows[lane] = job.from + (job.rows ? job.rows[16 * group + lane] : 16 * group + lane) * bytes;
    const bool half = job.bits == 16;
    const __m512i most = _mm512_set1_epi32(half ? 0x7f807f80 : 0x7f800000);
    __mmask32 halves = 0;
    __mmask16 wholes = 0;
    for (int64_t w = 0; w < words; w += 16) {
        const int64_t left = words - w < 16 ? words - w : 16;
        const __mmask16 there = (__mmask16)((1u << left) - 1);
        __m512i block[16];
        for (int lane = 0; lane < 16; lane++) block[lane] = _mm512_maskz_loadu_epi32(there, rows[lane] + 4 * w);
        for (int lane = 0; lane < 16; lane++) {
            const __m512i exponents = _mm512_and_si512(block[lane], most);
            if (half)
                halves |= _mm512_cmpeq_epi16_mask(exponents, most);
            else
                wholes |= _mm512_cmpeq_epi32_mask(exponents, most);
        }
        transpose(block);
        for (int64_t i = 0; i < left; i++) _mm512_storeu_si512(to + (w + i) * 64, block[i]);
    }
    return !halves && !wholes;
}

#else

bool pack_group(const PackJob& job, int64_t group) { return pack_lanes(job, group); }

#endif

bool pack(const PackJob& job) {
    for (int64_t i = 0; i < job.ranks; i++) {
        const float scale = (float)job.scale;
        std::memcpy(job.scales + 4 * i, &scale, 4);
    }
    bool finite = true;
    for (int64_t group = 0; group < job.count; group++) {
        bool full = job.columns * job.bits % 32 == 0;
        if (job.rows)
            for (int lane = 0; lane < 16; lane++) full = full && job.rows[16 * group + lane] >= 0;
        finite = (full ? pack_group(job, group) : pack_lanes(job, group)) && finite;
    }
    return finite;
}

}  // namespace

// Packs matrices; the number of the first one with a number that is not finite, or -1.
extern "C" int64_t pack_matrices(const PackJob* jobs, int64_t count) {
    int64_t found = -1;
    for (int64_t i = 0; i < count; i++)
        if (!pack(jobs[i]) && found < 0) found = i;
    return found;
}
