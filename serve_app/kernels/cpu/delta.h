// What adapters add to a product: scale * (x A^T) B^T for each row with the A and B of its own adapter (LoRA, arXiv
// 2106.09685). Sums are float32, and a row's do not depend on the rows beside it.
//
// A and B are bfloat16 where that loses nothing (bits 16), else float32 (bits 32). A row's x A^T goes into the second
// product as float32 there, and as two bfloat16 (its upper 8 and next 8 bits) where B is bfloat16.
//
// Outputs stand in groups of 16, four to a panel of gemm.h; all of a group belong to one module (`part_of`). Layouts:
//   A  [lanes / 16][k / 2][16][2] bfloat16, or [lanes / 16][k][16] float32; a lane is one rank of one module
//   B  [groups][rank / 2][16][2] bfloat16, or [groups][rank][16] float32
#pragma once
#include <vector>

#include "gemm.h"

namespace {

constexpr int GROUP_OUTPUTS = 16;
constexpr int PARTS_OF_LINEAR = 4;

struct Delta {  // mirrored by serve_app/kernels/linear/places.py
    const uint8_t* a;       // null: nothing is added
    const uint8_t* b;
    const float* scales;    // [lanes]
    const int8_t* part_of;  // [panels * 4] module of each group of outputs, -1 for none
    int64_t lanes, rank, bits, k;
    int64_t starts[PARTS_OF_LINEAR];  // the first lane of each module, -1 where it has no adapter
};

#if HAS_BF16_DOT

constexpr int SHRINK_ROWS = 4;           // rows that share a pass over A
constexpr int64_t SHRINK_COLUMNS = 1024; // of A that are one piece of work

inline int64_t shrink_chunks(int64_t k) { return (k + SHRINK_COLUMNS - 1) / SHRINK_COLUMNS; }

// Rows of a batch by adapter, in tiles of rows with one adapter. Rows without one are in no tile.
struct AdapterRows {
    struct Tile {
        int64_t place;
        int count;
        int64_t rows[SHRINK_ROWS];
    };
    std::vector<int64_t> places;  // of each row
    std::vector<int64_t> used;    // the places that rows have, each once
    std::vector<Tile> tiles;

    // `place(row)` is 0 for none.
    template <class Place>
    void sort(int64_t count, int64_t all_places, Place place) {
        places.resize(count);
        tiles.clear();
        used.clear();
        last_.assign(all_places + 1, -1);
        for (int64_t r = 0; r < count; r++) {
            const int64_t own = places[r] = place(r);
            if (!own) continue;
            if (last_[own] < 0) used.push_back(own);
            if (last_[own] < 0 || tiles[last_[own]].count == SHRINK_ROWS) {
                last_[own] = (int64_t)tiles.size();
                tiles.push_back({own, 0, {}});
            }
            Tile& tile = tiles[last_[own]];
            tile.rows[tile.count++] = r;
        }
    }

private:
    std::vector<int64_t> last_;
};

// sums[m][16] = x[m] . A over columns [from, to) for one group of 16 lanes: four sums over every fourth pair of columns, so
// that no instruction waits for the one before.
template <int M>
inline void shrink_tile(const Delta& d, int64_t lane_group, const bf16* const* x, int64_t from, int64_t to, float* const* sums) {
    __m512 acc[M][4];
    for (int m = 0; m < M; m++)
        for (int j = 0; j < 4; j++) acc[m][j] = _mm512_setzero_ps();
    if (d.bits == 16) {
        const uint8_t* a = d.a + (lane_group * d.k / 2 + from / 2) * 64;
        const int64_t pairs = (to - from) / 2;
        const auto step = [&](int64_t p, int j) {
            const __m512bh w = (__m512bh)_mm512_loadu_si512(a + p * 64);
            for (int m = 0; m < M; m++) {
                int32_t pair;
                std::memcpy(&pair, x[m] + from + 2 * p, 4);
                acc[m][j] = _mm512_dpbf16_ps(acc[m][j], (__m512bh)_mm512_set1_epi32(pair), w);
            }
        };
        int64_t p = 0;
        for (; p + 4 <= pairs; p += 4) {
            _mm_prefetch((const char*)(a + (p + 32) * 64), _MM_HINT_T0);
            _mm_prefetch((const char*)(a + (p + 33) * 64), _MM_HINT_T0);
            _mm_prefetch((const char*)(a + (p + 34) * 64), _MM_HINT_T0);
            _mm_prefetch((const char*)(a + (p + 35) * 64), _MM_HINT_T0);
            for (int j = 0; j < 4; j++) step(p + j, j);
        }
        for (; p < pairs; p++) step(p, (int)(p % 4));
    } else {
        const float* a = (const float*)d.a + (lane_group * d.k + from) * 16;
        const auto step = [&](int64_t c, int j) {
            const __m512 w = _mm512_loadu_ps(a + c * 16);
            for (int m = 0; m < M; m++) {
                uint16_t half;
                std::memcpy(&half, x[m] + from + c, 2);
                const __m512 value = (__m512)_mm512_set1_epi32((int32_t)((uint32_t)half << 16));
                acc[m][j] = _mm512_fmadd_ps(value, w, acc[m][j]);
            }
        };
        int64_t c = 0;
        for (; c + 4 <= to - from; c += 4) {
            for (int j = 0; j < 4; j++) _mm_prefetch((const char*)(a + (c + 32 + j) * 16), _MM_HINT_T0);
            for (int j = 0; j < 4; j++) step(c + j, j);
        }
        for (; c < to - from; c++) step(c, (int)(c % 4));
    }
    for (int m = 0; m < M; m++)
        _mm512_storeu_ps(sums[m], _mm512_add_ps(_mm512_add_ps(acc[m][0], acc[m][1]), _mm512_add_ps(acc[m][2], acc[m][3])));
}

// x A^T of a batch's rows, scaled: [rows, lanes] float32, and the same in two bfloat16.
struct Inner {
    float* values;
    bf16 *high, *low;
    int64_t stride;  // lanes between rows
};

// One piece of the first product: `item` counts (tile of rows) x (group of lanes) x (piece of columns). Writes
// partial[chunk][row][stride].
inline void shrink_item(const Delta* deltas, const AdapterRows& rows, int64_t item, int64_t lane_groups, int64_t chunks,
                        const bf16* x, int64_t k, int64_t count, float* partial, int64_t stride) {
    const int64_t chunk = item % chunks, lane_group = item / chunks % lane_groups;
    const AdapterRows::Tile& tile = rows.tiles[item / chunks / lane_groups];
    const Delta& d = deltas[tile.place];
    if (!d.a || lane_group * 16 >= d.lanes) return;
    const bf16* from[SHRINK_ROWS];
    float* to[SHRINK_ROWS];
    for (int m = 0; m < tile.count; m++) {
        from[m] = x + tile.rows[m] * k;
        to[m] = partial + (chunk * count + tile.rows[m]) * stride + lane_group * 16;
    }
    const int64_t begin = chunk * SHRINK_COLUMNS, end = std::min(k, begin + SHRINK_COLUMNS);
    switch (tile.count) {
        case 1: return shrink_tile<1>(d, lane_group, from, begin, end, to);
        case 2: return shrink_tile<2>(d, lane_group, from, begin, end, to);
        case 3: return shrink_tile<3>(d, lane_group, from, begin, end, to);
        case 4: return shrink_tile<4>(d, lane_group, from, begin, end, to);
    }
}

// Adds one row's partial sums up, scales and splits them.
inline void finish_row(const Delta& d, int64_t row, const float* partial, int64_t chunks, int64_t count, const Inner& to) {
    if (!d.a) return;
    for (int64_t i = 0; i < d.lanes; i += LANES) {
        vfloat sum = load(partial + row * to.stride + i);
        for (int64_t c = 1; c < chunks; c++) sum += load(partial + (c * count + row) * to.stride + i);
        sum *= load(d.scales + i);
        const __m256i high = to_bf16(sum);
        const vfloat rest = sum - (vfloat)_mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16);
        const __m256i low = to_bf16(rest);
        store(to.values + row * to.stride + i, sum);
        std::memcpy(to.high + row * to.stride + i, &high, sizeof high);
        std::memcpy(to.low + row * to.stride + i, &low, sizeof low);
    }
}

// Memory that adapters will be read from, in pieces, fetched line by line beside a product of the base.
class Beside {
public:
    void clear() { pieces_.clear(), piece_ = 0, lines_ = 0, at_ = end_ = nullptr; }
    void add(const uint8_t* begin, int64_t bytes) {
        if (bytes <= 0) return;
        pieces_.push_back({(const char*)begin, (const char*)begin + bytes});
        lines_ += bytes / 64;
    }
    // To be through after so many pairs of columns.
    void spread(int64_t pairs) {
        per_pair_ = (int)std::min<int64_t>(8, lines_ / std::max<int64_t>(1, pairs) + 1);
        if (!pieces_.empty()) at_ = pieces_[0].begin, end_ = pieces_[0].end;
    }

    struct Both : Ahead {
        Beside* beside;
    };
    Both with(Ahead ahead) { return Both{ahead, this}; }

    ALWAYS_INLINE void some() {
        for (int i = 0; i < per_pair_ && at_; i++) {
            _mm_prefetch(at_, _MM_HINT_T1);
            at_ += 64;
            if (at_ < end_) continue;
            at_ = nullptr;
            if (++piece_ < pieces_.size()) at_ = pieces_[piece_].begin, end_ = pieces_[piece_].end;
        }
    }

private:
    struct Piece {
        const char *begin, *end;
    };

    std::vector<Piece> pieces_;
    size_t piece_ = 0;
    int64_t lines_ = 0;
    int per_pair_ = 1;
    const char *at_ = nullptr, *end_ = nullptr;
};

// What panel `panel` of `panels` fetches: B of its own outputs, and its share of A of the product that comes next.
inline void fetch_beside(Beside& beside, const AdapterRows& rows, const Delta* deltas, const Delta* next, int64_t panel, int64_t panels) {
    beside.clear();
    for (const int64_t place : rows.used)
        if (const Delta& d = deltas[place]; d.a)
            beside.add(d.b + panel * 4 * d.rank * 2 * d.bits, 4 * d.rank * 2 * d.bits);
    if (!next) return;
    const int64_t count = (int64_t)rows.used.size(), slices = (panels + count - 1) / count;
    for (int64_t unit = panel; unit < count * slices; unit += panels)
        if (const Delta& d = next[rows.used[unit / slices]]; d.a) {
            const int64_t lines = d.lanes * d.k * d.bits / 8 / 64, slice = unit % slices;
            const int64_t begin = lines * slice / slices;
            beside.add(d.a + begin * 64, (lines * (slice + 1) / slices - begin) * 64);
        }
}

// What is added to a group of 16 outputs of one row.
inline __m512 expand_group(const Delta& d, int64_t group, int64_t start, const Inner& inner, int64_t row) {
    __m512 high = _mm512_setzero_ps(), low = _mm512_setzero_ps();
    const int64_t at = row * inner.stride + start;
    if (d.bits == 16) {
        const uint8_t* b = d.b + group * (d.rank / 2) * 64;
        for (int64_t p = 0; p < d.rank / 2; p++) {
            const __m512bh w = (__m512bh)_mm512_loadu_si512(b + p * 64);
            int32_t pair, rest;
            std::memcpy(&pair, inner.high + at + 2 * p, 4);
            std::memcpy(&rest, inner.low + at + 2 * p, 4);
            high = _mm512_dpbf16_ps(high, (__m512bh)_mm512_set1_epi32(pair), w);
            low = _mm512_dpbf16_ps(low, (__m512bh)_mm512_set1_epi32(rest), w);
        }
    } else {
        const float* b = (const float*)d.b + group * d.rank * 16;
        for (int64_t r = 0; r < d.rank; r += 2) {
            high = _mm512_fmadd_ps(_mm512_set1_ps(inner.values[at + r]), _mm512_loadu_ps(b + r * 16), high);
            low = _mm512_fmadd_ps(_mm512_set1_ps(inner.values[at + r + 1]), _mm512_loadu_ps(b + (r + 1) * 16), low);
        }
    }
    return _mm512_add_ps(high, low);
}

// Adds a row's delta to its sums of a panel, which `round` first rounds to bfloat16, as the base's result is.
inline void expand_panel(const Delta& d, int64_t panel, const Inner& inner, int64_t row, float* sums, bool round) {
    if (!d.a) return;
    for (int j = 0; j < 4; j++) {
        const int part = d.part_of[panel * 4 + j];
        if (part < 0 || d.starts[part] < 0) continue;
        vfloat base = load(sums + 16 * j);
        if (round) base = (vfloat)_mm512_slli_epi32(_mm512_cvtepu16_epi32(to_bf16(base)), 16);
        store(sums + 16 * j, base + (vfloat)expand_group(d, panel * 4 + j, d.starts[part], inner, row));
    }
}

#endif

}  // namespace

