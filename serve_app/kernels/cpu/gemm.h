// bfloat16 matrix products on packed weights, fp32 sums; each output's sum runs over K in one fixed order whatever the
// number of rows, so a token's result does not depend on what it is batched with.
//
// A weight [N, K] is stored as panels of 64 outputs: [ceil(N / 64)][K / 2][64][2], which AVX-512's bf16 dot product reads
// as it stands while each panel is one sequential stream of memory.
#pragma once
#include <algorithm>

#include "simd.h"

namespace {
using namespace simd;

constexpr int PANEL = 64;       // outputs per panel
constexpr int TILE = 6;         // rows per pass over a panel: 6 x 4 sums + 4 weights fit the 32 registers
constexpr int ROW_CHUNK = 48;   // rows whose fp32 sums are kept while a panel is passed in pieces
constexpr int NEAR = 2048;      // elements fetched ahead where a panel is passed once: hardware stops at each 4 KB page
constexpr int K_PIECE = 2048;   // a panel's piece (256 KB) and the next one stay in the second-level cache
constexpr int K_NEAR = 64;      // with two or three tiles memory takes most time: pieces (8 KB) of the first-level cache

struct Linear {  // mirrored by serve_app/kernels/decoder.py
    const void* weight;
    const float* bias;  // [n], in panel order, or null
    int64_t n, k, bits;  // 16: bfloat16, as here; 8 and 4: quantized.h
};

inline int panels(const Linear& l) { return (int)((l.n + PANEL - 1) / PANEL); }

#if HAS_BF16_DOT

// What a pass fetches while it computes: every `every`-th pair of rows, `distance` elements ahead. A piece is passed once
// per tile of rows; all passes together fetch the piece that comes next, so that memory never waits for arithmetic.
struct Ahead {
    int64_t distance;
    int every, wait;
    bool near;  // to the first-level cache, else to the second

    void fetch(const void* line) const {
        near ? _mm_prefetch((const char*)line, _MM_HINT_T0) : _mm_prefetch((const char*)line, _MM_HINT_T1);
    }
};

// A panel's pieces: as few as fit, of even sizes, so that fetching one takes as long as computing the one before.
struct Pieces {
    int64_t units;  // what is divided: pairs of columns, or groups
    int count;

    bool near;

    // `far` and `close` are the most units of a piece in the second and in the first level of the cache.
    Pieces(int64_t units, int tiles, int64_t far, int64_t close) : units(units), near(tiles <= 3) {
        const int64_t most = tiles == 1 ? units : near ? close : far;
        count = (int)((units + most - 1) / most);
    }
    int64_t begin(int i) const { return units * i / count; }
};

// sums[m][64] += x[m][2 * pairs] . w for M rows.
template <int M>
inline void panel_tile(const bf16* x, int64_t x_stride, const bf16* w, int pairs, float* sums, bool fresh, Ahead ahead) {
    __m512 acc[M][4];
    for (int m = 0; m < M; m++)
        for (int j = 0; j < 4; j++) acc[m][j] = fresh ? _mm512_setzero_ps() : _mm512_loadu_ps(sums + m * PANEL + 16 * j);
    for (int p = 0; p < pairs; p++, w += 2 * PANEL) {
        if (--ahead.wait < 0) {
            for (int j = 0; j < 4; j++) ahead.fetch(w + ahead.distance + 32 * j);
            ahead.wait = ahead.every - 1;
        }
        __m512bh b[4];
        for (int j = 0; j < 4; j++) b[j] = (__m512bh)_mm512_loadu_si512(w + 32 * j);
        for (int m = 0; m < M; m++) {
            int32_t pair;
            std::memcpy(&pair, x + m * x_stride + 2 * p, 4);
            const __m512bh a = (__m512bh)_mm512_set1_epi32(pair);
            for (int j = 0; j < 4; j++) acc[m][j] = _mm512_dpbf16_ps(acc[m][j], a, b[j]);
        }
    }
    for (int m = 0; m < M; m++)
        for (int j = 0; j < 4; j++) _mm512_storeu_ps(sums + m * PANEL + 16 * j, acc[m][j]);
}

inline void any_tile(int rows, const bf16* x, int64_t stride, const bf16* w, int pairs, float* sums, bool fresh,
                     Ahead ahead) {
    switch (rows) {
        case 6: return panel_tile<6>(x, stride, w, pairs, sums, fresh, ahead);
        case 5: return panel_tile<5>(x, stride, w, pairs, sums, fresh, ahead);
        case 4: return panel_tile<4>(x, stride, w, pairs, sums, fresh, ahead);
        case 3: return panel_tile<3>(x, stride, w, pairs, sums, fresh, ahead);
        case 2: return panel_tile<2>(x, stride, w, pairs, sums, fresh, ahead);
        case 1: return panel_tile<1>(x, stride, w, pairs, sums, fresh, ahead);
    }
}

// One panel for all rows; `write(row, sums[64])` is called once per row with the finished sums.
template <class Write>
inline void panel_product(const Linear& l, int panel, int next, const bf16* x, int64_t x_stride, int rows, Write write) {
    alignas(64) float sums[ROW_CHUNK * PANEL];
    const bf16* weight = (const bf16*)l.weight + (int64_t)panel * PANEL * l.k;
    const int64_t far = (int64_t)(next - panel) * PANEL * l.k;
    for (int low = 0; low < rows; low += ROW_CHUNK) {
        const int count = std::min(ROW_CHUNK, rows - low);
        // Even tiles: 8 rows go as 4 + 4, not 6 + 2.
        const int tiles = (count + TILE - 1) / TILE;
        const Pieces pieces(l.k / 2, tiles, K_PIECE / 2, K_NEAR / 2);
        for (int i = 0; i < pieces.count; i++) {
            const int64_t k = 2 * pieces.begin(i), after = 2 * pieces.begin(i + 1);
            // Behind the last piece comes the next panel, or this one again for the next rows.
            const int64_t to_come = i + 1 < pieces.count ? after : low + ROW_CHUNK < rows ? 0 : far / PANEL;
            for (int t = 0; t < tiles; t++) {
                const int begin = count * t / tiles, end = count * (t + 1) / tiles;
                any_tile(end - begin, x + (low + begin) * x_stride + k, x_stride, weight + k * PANEL, (int)(after - k) / 2,
                         sums + begin * PANEL, i == 0, Ahead{tiles == 1 ? NEAR : (to_come - k) * PANEL, tiles, t, pieces.near});
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

}  // namespace
