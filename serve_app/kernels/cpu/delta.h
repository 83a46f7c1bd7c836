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

constexpr int SHRINK_ROWS = 6;           // rows that share a pass over A
constexpr int SHRINK_GROUPS = 3;         // groups of lanes that share a pass over those rows
constexpr int EXPAND_ROWS = 4;           // rows that share what is read of B
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

// sums[m][16 * g] = x[m] . A over columns [from, to) for G groups of 16 lanes from `group` on. Each quarter of the columns has
// a sum of its own, of which as many go side by side as there are registers: so no instruction waits for the one before, and
// a row's result is the same whatever M and G are.
template <int M, int G, bool HALF>
inline void shrink_tile(const Delta& d, int64_t group, const bf16* const* x, int64_t from, int64_t to, float* const* sums) {
    constexpr int SIDE = M * G <= 6 ? 4 : M * G <= 12 ? 2 : 1;
    constexpr int COLUMNS = HALF ? 2 : 1;  // of a line of A
    alignas(64) float quarters[4][M][G][16];
    const int64_t lines = (to - from) / COLUMNS, all = d.k / COLUMNS;
    const uint8_t* a = d.a + (group * all + from / COLUMNS) * 64;
    for (int q = 0; q < 4; q += SIDE) {
        __m512 acc[SIDE][M][G];
        for (int s = 0; s < SIDE; s++)
            for (int m = 0; m < M; m++)
                for (int g = 0; g < G; g++) acc[s][m][g] = _mm512_setzero_ps();
        const auto step = [&](int s, int64_t line) {
            if constexpr (HALF) {
                __m512bh w[G];
                for (int g = 0; g < G; g++) w[g] = (__m512bh)_mm512_loadu_si512(a + (g * all + line) * 64);
                for (int m = 0; m < M; m++) {
                    int32_t pair;
                    std::memcpy(&pair, x[m] + from + 2 * line, 4);
                    const __m512bh value = (__m512bh)_mm512_set1_epi32(pair);
                    for (int g = 0; g < G; g++) acc[s][m][g] = _mm512_dpbf16_ps(acc[s][m][g], value, w[g]);
                }
            } else {
                __m512 w[G];
                for (int g = 0; g < G; g++) w[g] = _mm512_loadu_ps(a + (g * all + line) * 64);
                for (int m = 0; m < M; m++) {
                    uint16_t half;
                    std::memcpy(&half, x[m] + from + line, 2);
                    const __m512 value = (__m512)_mm512_set1_epi32((int32_t)((uint32_t)half << 16));
                    for (int g = 0; g < G; g++) acc[s][m][g] = _mm512_fmadd_ps(value, w[g], acc[s][m][g]);
                }
            }
        };
        int64_t at[SIDE], end[SIDE], least = lines;
        for (int s = 0; s < SIDE; s++) {
            at[s] = lines * (q + s) / 4, end[s] = lines * (q + s + 1) / 4;
            least = std::min(least, end[s] - at[s]);
        }
        for (int64_t i = 0; i < least; i++)
            for (int s = 0; s < SIDE; s++) {
                if constexpr (M <= 2)  // more rows come again, and find it in the cache
                    for (int g = 0; g < G; g++) _mm_prefetch((const char*)(a + (g * all + at[s] + i + 12) * 64), _MM_HINT_T0);
                step(s, at[s] + i);
            }
        for (int s = 0; s < SIDE; s++) {
            if (at[s] + least < end[s]) step(s, at[s] + least);
            for (int m = 0; m < M; m++)
                for (int g = 0; g < G; g++) _mm512_store_ps(quarters[q + s][m][g], acc[s][m][g]);
        }
    }
    for (int m = 0; m < M; m++)
        for (int g = 0; g < G; g++) {
            const auto sum = [&](int q) {
                return _mm512_add_ps(_mm512_load_ps(quarters[q][m][g]), _mm512_load_ps(quarters[q + 1][m][g]));
            };
            _mm512_storeu_ps(sums[m] + 16 * g, _mm512_add_ps(sum(0), sum(2)));
        }
}

template <int G, bool HALF>
inline void shrink_rows(const Delta& d, int64_t group, int count, const bf16* const* x, int64_t from, int64_t to, float* const* sums) {
    switch (count) {
        case 1: return shrink_tile<1, G, HALF>(d, group, x, from, to, sums);
        case 2: return shrink_tile<2, G, HALF>(d, group, x, from, to, sums);
        case 3: return shrink_tile<3, G, HALF>(d, group, x, from, to, sums);
        case 4: return shrink_tile<4, G, HALF>(d, group, x, from, to, sums);
        case 5: return shrink_tile<5, G, HALF>(d, group, x, from, to, sums);
        case 6: return shrink_tile<6, G, HALF>(d, group, x, from, to, sums);
    }
}

template <bool HALF>
inline void shrink_groups(const Delta& d, int64_t group, int64_t groups, int count, const bf16* const* x, int64_t from, int64_t to,
                          float* const* sums) {
    switch (groups) {
        case 1: return shrink_rows<1, HALF>(d, group, count, x, from, to, sums);
        case 2: return shrink_rows<2, HALF>(d, group, count, x, from, to, sums);
        case 3: return shrink_rows<3, HALF>(d, group, count, x, from, to, sums);
    }
}

// x A^T of a batch's rows, scaled: [rows, lanes] float32, and the same in two bfloat16.
struct Inner {
    float* values;
    bf16 *high, *low;
    int64_t stride;  // lanes between rows
};

// How the first product of some rows is cut: into (tile of rows) x (piece of columns), and where those are few for `threads`
// also x (group of lanes).
struct Shrink {
    int64_t chunks, groups, items;
    bool whole;  // all lanes of a tile's rows are one piece

    Shrink(const AdapterRows& rows, int64_t lanes, int64_t k, int threads) : chunks(shrink_chunks(k)), groups(lanes / 16) {
        items = (int64_t)rows.tiles.size() * chunks;
        whole = groups == 1 || items >= 2 * threads;
        if (!whole) items *= groups;
    }
    // A piece's result is a row's: nothing is left to be added up.
    bool finishes() const { return whole && chunks == 1; }
};

// One piece of the first product. Writes partial[chunk][row][stride].
inline void shrink_item(const Delta* deltas, const AdapterRows& rows, const Shrink& cut, int64_t item, const bf16* x, int64_t k,
                        int64_t count, float* partial, int64_t stride) {
    const int64_t chunk = item % cut.chunks, unit = item / cut.chunks;
    const AdapterRows::Tile& tile = rows.tiles[cut.whole ? unit : unit / cut.groups];
    const Delta& d = deltas[tile.place];
    if (!d.a) return;
    const int64_t first = cut.whole ? 0 : unit % cut.groups, last = std::min(d.lanes / 16, cut.whole ? cut.groups : first + 1);
    const int64_t begin = chunk * SHRINK_COLUMNS, end = std::min(k, begin + SHRINK_COLUMNS);
    const bf16* from[SHRINK_ROWS];
    float* to[SHRINK_ROWS];
    for (int m = 0; m < tile.count; m++) from[m] = x + tile.rows[m] * k;
    for (int64_t group = first; group < last;) {
        const int64_t left = last - group, some = left == SHRINK_GROUPS + 1 ? 2 : std::min<int64_t>(SHRINK_GROUPS, left);
        for (int m = 0; m < tile.count; m++) to[m] = partial + (chunk * count + tile.rows[m]) * stride + group * 16;
        d.bits == 16 ? shrink_groups<true>(d, group, some, tile.count, from, begin, end, to)
                     : shrink_groups<false>(d, group, some, tile.count, from, begin, end, to);
        group += some;
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

// Adds the deltas of M rows with one adapter, from `row` on, to their sums [M][64] of G groups of outputs of one module, as
// expand_group does. `round` first rounds the sums to bfloat16, as the base's result is.
template <int M, int G, bool HALF>
inline void expand_tile(const Delta& d, int64_t group, int64_t start, const Inner& inner, int64_t row, float* sums, bool round) {
    __m512 high[M][G], low[M][G];
    for (int m = 0; m < M; m++)
        for (int g = 0; g < G; g++) high[m][g] = low[m][g] = _mm512_setzero_ps();
    for (int64_t p = 0; p < d.rank / 2; p++) {
        if constexpr (HALF) {
            __m512bh b[G];
            for (int g = 0; g < G; g++) b[g] = (__m512bh)_mm512_loadu_si512(d.b + ((group + g) * (d.rank / 2) + p) * 64);
            for (int m = 0; m < M; m++) {
                int32_t pair, rest;
                std::memcpy(&pair, inner.high + (row + m) * inner.stride + start + 2 * p, 4);
                std::memcpy(&rest, inner.low + (row + m) * inner.stride + start + 2 * p, 4);
                const __m512bh upper = (__m512bh)_mm512_set1_epi32(pair), next = (__m512bh)_mm512_set1_epi32(rest);
                for (int g = 0; g < G; g++) {
                    high[m][g] = _mm512_dpbf16_ps(high[m][g], upper, b[g]);
                    low[m][g] = _mm512_dpbf16_ps(low[m][g], next, b[g]);
                }
            }
        } else {
            __m512 even[G], odd[G];
            for (int g = 0; g < G; g++) {
                const float* b = (const float*)d.b + ((group + g) * d.rank + 2 * p) * 16;
                even[g] = _mm512_loadu_ps(b), odd[g] = _mm512_loadu_ps(b + 16);
            }
            for (int m = 0; m < M; m++) {
                const float* values = inner.values + (row + m) * inner.stride + start + 2 * p;
                const __m512 first = _mm512_set1_ps(values[0]), second = _mm512_set1_ps(values[1]);
                for (int g = 0; g < G; g++) {
                    high[m][g] = _mm512_fmadd_ps(first, even[g], high[m][g]);
                    low[m][g] = _mm512_fmadd_ps(second, odd[g], low[m][g]);
                }
            }
        }
    }
    for (int m = 0; m < M; m++)
        for (int g = 0; g < G; g++) {
            float* to = sums + m * PANEL + 16 * g;
            vfloat base = load(to);
            if (round) base = (vfloat)_mm512_slli_epi32(_mm512_cvtepu16_epi32(to_bf16(base)), 16);
            store(to, base + (vfloat)_mm512_add_ps(high[m][g], low[m][g]));
        }
}

template <int M, bool HALF>
inline void expand_rows(const Delta& d, int64_t panel, const Inner& inner, int64_t row, float* sums, bool round) {
    int64_t starts[4];
    for (int j = 0; j < 4; j++) {
        const int part = d.part_of[panel * 4 + j];
        starts[j] = part < 0 ? -1 : d.starts[part];
    }
    if constexpr (M <= 2)  // sums enough, so that none waits for the one before
        if (starts[0] >= 0 && starts[0] == starts[1] && starts[0] == starts[2] && starts[0] == starts[3])
            return expand_tile<M, 4, HALF>(d, panel * 4, starts[0], inner, row, sums, round);
    for (int j = 0; j < 4; j += 2) {
        if (starts[j] >= 0 && starts[j] == starts[j + 1]) {
            expand_tile<M, 2, HALF>(d, panel * 4 + j, starts[j], inner, row, sums + 16 * j, round);
            continue;
        }
        for (int i = j; i < j + 2; i++)
            if (starts[i] >= 0) expand_tile<M, 1, HALF>(d, panel * 4 + i, starts[i], inner, row, sums + 16 * i, round);
    }
}

// Adds the deltas of `count` rows with one adapter to their sums [count][64] of a panel.
inline void expand_panel(const Delta& d, int64_t panel, const Inner& inner, int64_t row, int count, float* sums, bool round) {
    if (!d.a) return;
    const bool half = d.bits == 16;
    switch (count) {
        case 1: return (half ? expand_rows<1, true> : expand_rows<1, false>)(d, panel, inner, row, sums, round);
        case 2: return (half ? expand_rows<2, true> : expand_rows<2, false>)(d, panel, inner, row, sums, round);
        case 3: return (half ? expand_rows<3, true> : expand_rows<3, false>)(d, panel, inner, row, sums, round);
        case 4: return (half ? expand_rows<4, true> : expand_rows<4, false>)(d, panel, inner, row, sums, round);
    }
}

#endif

}  // namespace
