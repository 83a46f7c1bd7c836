// Adapters (delta.h) of a linear that is called by itself; plain C ABI.
#include "delta.h"

namespace {

struct AdaptArgs {  // mirrored by serve_app/kernels/library/native.py, field by field, 8 bytes each
    const Delta* deltas;      // [places + 1]
    const int64_t* adapters;  // [rows] the place of each row's adapter, 0 for none
    const bf16* x;            // [rows, k]
    bf16* out;                // [rows, n], to which the rows' deltas are added
    int64_t rows, k, n, places, lanes, threads;
};

#if HAS_BF16_DOT

constexpr int64_t SINGLE_THREAD_SUMS = 256 << 10;  // fewer products are done before another thread has woken up

// Outputs [16 * group, 16 * group + 16) of one row, of which there may be fewer.
inline void add_group(const Delta& d, int64_t group, const Inner& inner, int64_t row, bf16* to, int64_t width) {
    const int part = d.part_of[group];
    if (part < 0 || d.starts[part] < 0) return;
    const __mmask16 there = width >= GROUP_OUTPUTS ? 0xffff : (__mmask16)((1 << width) - 1);
    const vfloat base = (vfloat)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(there, to)), 16);
    const __m256i sum = to_bf16(base + (vfloat)expand_group(d, group, d.starts[part], inner, row));
    _mm256_mask_storeu_epi16(to, there, sum);
}

// Three passes of one team: x A^T in pieces, their sums, and B times these. A row's result does not depend on the others.
int adapt(const AdaptArgs& a) {
    static thread_local AdapterRows sorted;
    static thread_local std::vector<float> sums, values;
    static thread_local std::vector<bf16> halves;
    for (int64_t r = 0; r < a.rows; r++)
        if (a.adapters[r] < 0 || a.adapters[r] > a.places) return 6;
    sorted.sort(a.rows, a.places, [&](int64_t r) { return a.adapters[r]; });
    int64_t lanes = 0;
    for (const int64_t place : sorted.used)
        if (a.deltas[place].a) lanes = std::max(lanes, a.deltas[place].lanes);
    if (!lanes) return 0;
    const int64_t all = panels(Linear{nullptr, nullptr, {}, a.n, a.k, 16});
    const int threads = a.rows * lanes * (a.k + a.n) < SINGLE_THREAD_SUMS ? 1 : (int)a.threads;
    const Shrink cut(sorted, lanes, a.k, threads);
    const int64_t chunks = cut.chunks;
    if ((int64_t)sums.size() < a.rows * a.lanes * chunks) sums.resize(a.rows * a.lanes * chunks);
    if ((int64_t)values.size() < a.rows * a.lanes) values.resize(a.rows * a.lanes);
    if ((int64_t)halves.size() < 2 * a.rows * a.lanes) halves.resize(2 * a.rows * a.lanes);
    const AdapterRows& rows = sorted;  // of this thread, whichever names it
    float* const partial = sums.data();
    const Inner inner{values.data(), halves.data(), halves.data() + a.rows * a.lanes, a.lanes};
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < cut.items; item++)
            shrink_item(a.deltas, rows, cut, item, a.x, a.k, a.rows, partial, a.lanes);
#pragma omp for schedule(static)
        for (int64_t r = 0; r < a.rows; r++)
            if (const int64_t place = rows.places[r]) finish_row(a.deltas[place], r, partial, chunks, a.rows, inner);
#pragma omp for schedule(dynamic)
        for (int64_t panel = 0; panel < all; panel++)
            for (const AdapterRows::Tile& tile : rows.tiles) {  // rows of one adapter share what is read of B
                const Delta& d = a.deltas[tile.place];
                if (!d.a) continue;
                for (int64_t group = 4 * panel; group < 4 * panel + 4 && 16 * group < a.n; group++)
                    for (int m = 0; m < tile.count; m++)
                        add_group(d, group, inner, tile.rows[m], a.out + tile.rows[m] * a.n + 16 * group, a.n - 16 * group);
            }
    }
    return 0;
}

#endif

}  // namespace

// Returns 0; 6 for a place that there is not, 9 for a build without bfloat16 dot products.
extern "C" int adapt_linear(const AdaptArgs* args) {
#if HAS_BF16_DOT
    return args->rows > 0 ? adapt(*args) : 0;
#else
    return 9;
#endif
}
