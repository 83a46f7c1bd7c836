// bfloat16 matrix products on packed weights, fp32 sums; each output's sum runs over K in one fixed order whatever the
// number of rows, so a token's result does not depend on what it is batched with.
//
// A weight [N, K] is stored as panels of 64 outputs: [ceil(N / 64)][K / 2][64][2], which AVX-512's bf16 dot product reads
// as it stands while each panel is one sequential stream of memory.
#pragma once
#include <algorithm>
#include <type_traits>

#include "compact.h"
#include "simd.h"

namespace {
using namespace simd;

constexpr int PANEL = 64;       // outputs per panel
constexpr int TILE = 6;         // rows per pass over a panel: 6 x 4 sums + 4 weights fit the 32 registers
constexpr int ROW_CHUNK = 48;   // rows whose fp32 sums are kept while a panel is passed in pieces
constexpr int NEAR = 4096;      // bytes fetched ahead where a panel is passed once: hardware stops at each such page
constexpr int K_PIECE = 2048;   // a panel's piece (256 KB) and the next one stay in the second-level cache
constexpr int K_NEAR = 64;      // with two or three tiles memory takes most time: pieces (8 KB) of the first-level cache

struct Linear {  // mirrored by serve_app/kernels/decoder.py
    const void* weight;
    const float* bias;  // [n], in panel order, or null
    Exceptions exceptions;  // of compact.h, else nulls
    int64_t n, k, bits;     // 16: bfloat16, as here; 12: compact.h; 5: float4.h; 8 and 4: quantized.h
};

// Within a loop whose sums are in registers, a call would put them all into memory and back.
#define ALWAYS_INLINE __attribute__((always_inline)) inline

constexpr int64_t RUN_BYTES = 384 << 10;

// A weight's panels in runs of neighbours, `most` at the most. A thread that takes a run reads one stream. A panel elsewhere
// begins a new one, which takes as long as reading some 20 KB: runs of RUN_BYTES make that little.
struct Runs {
    int panels, count;

    Runs(int panels, int most) : panels(panels), count((panels + most - 1) / most) {}
    int begin(int run) const { return (int)((int64_t)panels * run / count); }
    int end(int run) const { return begin(run + 1); }
    int longest() const { return (panels + count - 1) / count; }
};

inline int panels(const Linear& l) { return (int)((l.n + PANEL - 1) / PANEL); }

#if HAS_BF16_DOT

inline void fetch(const void* line, bool near) {
    near ? _mm_prefetch((const char*)line, _MM_HINT_T0) : _mm_prefetch((const char*)line, _MM_HINT_T1);
}

// What a pass fetches while it computes: with every `every`-th pair of columns the lines of that pair from `next` on. A piece
// is passed once per tile of rows; all passes together fetch the piece that comes next, so that memory never waits for
// arithmetic.
struct Ahead {
    const uint8_t* next;
    int every, wait;
    bool near;  // to the first-level cache, else to the second
};

// Nothing else is fetched beside a product.
struct Nothing {
    Ahead with(Ahead ahead) { return ahead; }
};

// sums[m][64] += x[m][2 * pairs] . w for M rows; a pair of columns to be fetched has LINES lines.
template <int M, int LINES, class Fetching>
inline void panel_tile(const bf16* x, int64_t x_stride, const bf16* w, int pairs, float* sums, bool fresh, Fetching ahead) {
    __m512 acc[M][4];
    for (int m = 0; m < M; m++)
        for (int j = 0; j < 4; j++) acc[m][j] = fresh ? _mm512_setzero_ps() : _mm512_loadu_ps(sums + m * PANEL + 16 * j);
    for (int p = 0; p < pairs; p++, w += 2 * PANEL) {
        if (--ahead.wait < 0) {
            for (int j = 0; j < LINES; j++) fetch(ahead.next + (p * LINES + j) * 64, ahead.near);
            ahead.wait = ahead.every - 1;
        }
        if constexpr (!std::is_same<Fetching, Ahead>::value) ahead.beside->some();
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

// How panel_product below goes through a panel of bfloat16 as it stands.
class PlainPanel {
public:
    static constexpr int LINES = 4;  // of 64 bytes per pair of columns
    static constexpr int UNIT = 1;   // pairs of columns that a piece has at least
    static constexpr int TILE_ROWS = TILE, ROWS = ROW_CHUNK, FAR = K_PIECE / 2, CLOSE = K_NEAR / 2;
    static constexpr bool STREAMS = true;  // one tile of rows passes it in one piece

    PlainPanel(const Linear& l, int panel) : begin_((const uint8_t*)l.weight + panel * bytes(l)) {}
    static int64_t bytes(const Linear& l) { return 2 * PANEL * l.k; }
    const uint8_t* at(int64_t pair) const { return begin_ + pair * LINES * 64; }
    // Before the tiles of a piece: pairs [from, to).
    void begin(int64_t from, int64_t) { piece_ = (const bf16*)at(from); }

    template <int M, class Fetching>
    void tile(const bf16* x, int64_t x_stride, int pairs, float* sums, bool fresh, Fetching ahead) const {
        panel_tile<M, LINES>(x, x_stride, piece_, pairs, sums, fresh, ahead);
    }

private:
    const uint8_t* begin_;
    const bf16* piece_ = nullptr;
};

// A panel in 12 bits a value for few rows: each tile unpacks into registers. Blocks with exceptions take a way of their own.
class CompactPanel {
public:
    static constexpr int LINES = 3, UNIT = COMPACT_BLOCK;
    static constexpr int TILE_ROWS = 4, ROWS = 8, FAR = 8 * COMPACT_BLOCK, CLOSE = 4 * COMPACT_BLOCK;  // unpacking takes registers, too
    static constexpr bool STREAMS = true;

    CompactPanel(const Linear& l, int panel)
        : begin_((const uint8_t*)l.weight + panel * bytes(l)),
          starts_(l.exceptions.starts + panel * compact_blocks(l.k)),
          exceptions_(l.exceptions.values),
          table_(compact_table(l.exceptions.tables + panel * COMPACT_TABLE)) {}
    static int64_t bytes(const Linear& l) { return PANEL * l.k * 3 / 2; }
    const uint8_t* at(int64_t pair) const { return begin_ + pair * COMPACT_BYTES; }
    void begin(int64_t from, int64_t) { from_ = from; }

    template <int M, class Fetching>
    void tile(const bf16* x, int64_t x_stride, int pairs, float* sums, bool fresh, Fetching ahead) const {
        alignas(64) uint16_t unpacked[COMPACT_BLOCK * 2 * PANEL];
        const uint8_t* from = at(from_);
        const int32_t* starts = starts_ + from_ / UNIT;
        __m512 acc[M][4];
        for (int m = 0; m < M; m++)
            for (int j = 0; j < 4; j++)
                acc[m][j] = fresh ? _mm512_setzero_ps() : _mm512_loadu_ps(sums + m * PANEL + 16 * j);
        for (int block = 0; block < pairs; block += UNIT, starts++) {
            const int end = std::min(pairs, block + UNIT);
            const bool exact = starts[0] == starts[1];
            if (!exact) {
                for (int p = block; p < end; p++)
                    unpack_pair(from + p * COMPACT_BYTES, table_, unpacked + (p - block) * 2 * PANEL);
                for (int32_t e = starts[0]; e < starts[1]; e++) unpacked[exceptions_[e] >> 16] = (uint16_t)exceptions_[e];
            }
            for (int p = block; p < end; p++) {
                if (--ahead.wait < 0) {
                    for (int j = 0; j < LINES; j++) fetch(ahead.next + (p * LINES + j) * 64, ahead.near);
                    ahead.wait = ahead.every - 1;
                }
                if constexpr (!std::is_same<Fetching, Ahead>::value) ahead.beside->some();
                __m512i b[4];
                if (exact)
                    unpack(from + p * COMPACT_BYTES, table_, b);
                else
                    for (int j = 0; j < 4; j++) b[j] = _mm512_load_si512(unpacked + (p - block) * 2 * PANEL + 32 * j);
                for (int m = 0; m < M; m++) {
                    int32_t pair;
                    std::memcpy(&pair, x + m * x_stride + 2 * p, 4);
                    const __m512bh a = (__m512bh)_mm512_set1_epi32(pair);
                    for (int j = 0; j < 4; j++) acc[m][j] = _mm512_dpbf16_ps(acc[m][j], a, (__m512bh)b[j]);
                }
            }
        }
        for (int m = 0; m < M; m++)
            for (int j = 0; j < 4; j++) _mm512_storeu_ps(sums + m * PANEL + 16 * j, acc[m][j]);
    }

protected:
    const uint8_t* begin_;
    const int32_t* starts_;
    const uint32_t* exceptions_;
    __m512i table_;
    int64_t from_ = 0;
};

// The same for more rows than two tiles of that have: a piece is unpacked once, into the cache, for as many rows as can be.
class UnpackedPanel : public CompactPanel {
public:
    static constexpr int TILE_ROWS = TILE, ROWS = 192, FAR = 512, CLOSE = 64;
    static constexpr bool STREAMS = false;  // a piece must fit `memory`, however few rows are left

    UnpackedPanel(const Linear& l, int panel) : CompactPanel(l, panel) {
        alignas(64) static thread_local uint16_t memory[FAR * 2 * PANEL];
        unpacked_ = memory;
    }

    void begin(int64_t from, int64_t to) {
        for (int64_t p = from; p < to; p++) unpack_pair(at(p), table_, unpacked_ + (p - from) * 2 * PANEL);
        for (int64_t b = from / UNIT; b * UNIT < to; b++)
            for (int32_t e = starts_[b]; e < starts_[b + 1]; e++)
                unpacked_[(b * UNIT - from) * 2 * PANEL + (exceptions_[e] >> 16)] = (uint16_t)exceptions_[e];
    }

    template <int M, class Fetching>
    void tile(const bf16* x, int64_t x_stride, int pairs, float* sums, bool fresh, Fetching ahead) const {
        panel_tile<M, LINES>(x, x_stride, (const bf16*)unpacked_, pairs, sums, fresh, ahead);
    }

private:
    uint16_t* unpacked_;
};

// A panel's pieces: as few as fit, of even sizes, so that fetching one takes as long as computing the one before.
struct Pieces {
    int64_t units;  // what is divided: pairs of columns, or groups
    int count;
    bool near;

    // `far` and `close` are the most units of a piece in the second and in the first level of the cache; `whole`: all
    // units are one piece.
    Pieces(int64_t units, int tiles, bool whole, int64_t far, int64_t close) : units(units), near(tiles <= 3) {
        const int64_t most = whole ? units : near ? close : far;
        count = (int)((units + most - 1) / most);
    }
    int64_t begin(int i) const { return units * i / count; }
};

template <class Panel, class Fetching>
inline void any_tile(const Panel& panel, int rows, const bf16* x, int64_t stride, int pairs, float* sums, bool fresh,
                     Fetching ahead) {
    switch (rows) {
        case 6: return panel.template tile<6>(x, stride, pairs, sums, fresh, ahead);
        case 5: return panel.template tile<5>(x, stride, pairs, sums, fresh, ahead);
        case 4: return panel.template tile<4>(x, stride, pairs, sums, fresh, ahead);
        case 3: return panel.template tile<3>(x, stride, pairs, sums, fresh, ahead);
        case 2: return panel.template tile<2>(x, stride, pairs, sums, fresh, ahead);
        case 1: return panel.template tile<1>(x, stride, pairs, sums, fresh, ahead);
    }
}

// A panel that one tile of rows passes once: what lies NEAR bytes on is fetched, and at the end what the thread reads next.
template <class Panel, class Beside>
inline void stream_panel(Panel& panel, const uint8_t* following, const bf16* x, int64_t x_stride, int rows, int64_t pairs,
                         float* sums, Beside&& beside) {
    constexpr int64_t DISTANCE = (NEAR + Panel::LINES * 64 - 1) / (Panel::LINES * 64);
    const int64_t turn = std::max<int64_t>(0, pairs - DISTANCE) / Panel::UNIT * Panel::UNIT;
    if (turn > 0) {
        panel.begin(0, turn);
        any_tile(panel, rows, x, x_stride, (int)turn, sums, true, beside.with(Ahead{panel.at(pairs - turn), 1, 0, true}));
    }
    panel.begin(turn, pairs);
    any_tile(panel, rows, x + 2 * turn, x_stride, (int)(pairs - turn), sums, turn == 0,
             beside.with(Ahead{following, 1, 0, true}));
}

// What `write` does with the finished sums of some rows at once, where it does.
template <class Write>
inline auto with_all(const Write& write, int row, int some, float* sums, int) -> decltype(write.all(row, some, sums)) {
    write.all(row, some, sums);
}
template <class Write>
inline void with_all(const Write&, int, int, float*, long) {}

// One panel for all rows; `write(row, sums[64])` is called once per row with the finished sums. `following`: what this thread
// reads next; `beside` says what else is fetched meanwhile.
template <class Panel, class Write, class Beside = Nothing>
inline void panel_product(const Linear& l, int number, const uint8_t* following, const bf16* x, int64_t x_stride, int rows,
                          Write write, Beside&& beside = Beside()) {
    alignas(64) float sums[Panel::ROWS * PANEL];
    Panel panel(l, number);
    const int64_t pairs = l.k / 2;
    for (int low = 0; low < rows; low += Panel::ROWS) {
        const int count = std::min(Panel::ROWS, rows - low);
        // Behind the last piece comes the next panel, or this one again for the next rows.
        const uint8_t* behind = low + Panel::ROWS < rows ? panel.at(0) : following;
        // Even tiles: 8 rows go as 4 + 4, not 6 + 2.
        const int tiles = (count + Panel::TILE_ROWS - 1) / Panel::TILE_ROWS;
        if (tiles == 1 && Panel::STREAMS) {
            stream_panel(panel, behind, x + low * x_stride, x_stride, count, pairs, sums, beside);
        } else {
            const Pieces pieces((pairs + Panel::UNIT - 1) / Panel::UNIT, tiles, false, Panel::FAR / Panel::UNIT,
                                Panel::CLOSE / Panel::UNIT);
            for (int i = 0; i < pieces.count; i++) {
                const int64_t from = pieces.begin(i) * Panel::UNIT, to = std::min(pairs, pieces.begin(i + 1) * Panel::UNIT);
                panel.begin(from, to);
                const uint8_t* to_come = i + 1 < pieces.count ? panel.at(to) : behind;
                for (int t = 0; t < tiles; t++) {
                    const int begin = count * t / tiles, end = count * (t + 1) / tiles;
                    any_tile(panel, end - begin, x + (low + begin) * x_stride + 2 * from, x_stride, (int)(to - from),
                             sums + begin * PANEL, i == 0, beside.with(Ahead{to_come, tiles, t, pieces.near}));
                }
            }
        }
        if (l.bias)
            for (int m = 0; m < count; m++)
                for (int j = m * PANEL; j < (m + 1) * PANEL; j += LANES)
                    store(sums + j, load(sums + j) + load(l.bias + number * PANEL + j % PANEL));
        with_all(write, low, count, sums, 0);
        for (int m = 0; m < count; m++) write(low + m, sums + m * PANEL);
    }
}
#endif

}  // namespace
