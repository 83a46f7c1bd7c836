// Linears on packed weights, bfloat16 (gemm.h) or in fewer bits (quantized.h), and those of a mixture's experts in one call; plain
// C ABI.
#include <atomic>
#include <vector>

#include "quantized.h"

namespace {

struct LinearArgs {  // mirrored by serve_app/kernels/library/native.py, field by field, 8 bytes each
    const Linear* linears;  // [experts], all of one shape; all in 8 bits, all in 4, or none
    const bf16* x;          // [rows, k]
    bf16* out;              // [pairs, n]: pair p is row p / (pairs / rows) of x times expert chosen[p]
    const int64_t* chosen;  // [pairs], or null: expert 0 for all
    int64_t experts, rows, pairs, threads;
};

#if HAS_BF16_DOT

constexpr int64_t SINGLE_THREAD_BYTES = 96 << 10;  // less is read before another thread has woken up
constexpr int64_t FEW_ROWS = 16;                   // one thread has them in 8 bits before another has woken up

// Rows of x by the expert they go to: those of active[i] are [starts[i], starts[i + 1]) of `order`, which names pairs.
struct Groups {
    std::vector<int64_t> order, starts, counts;
    std::vector<int> active;
    std::vector<bf16> gathered;

    // Sorts pairs by expert and copies their rows side by side. False for an expert that there is not.
    bool gather(const LinearArgs& a) {
        counts.assign(a.experts + 1, 0);
        for (int64_t p = 0; p < a.pairs; p++) {
            if (a.chosen[p] < 0 || a.chosen[p] >= a.experts) return false;
            counts[a.chosen[p] + 1]++;
        }
        active.clear();
        starts.clear();
        for (int64_t e = 0; e < a.experts; e++) {
            if (counts[e + 1]) {
                active.push_back((int)e);
                starts.push_back(counts[e]);
            }
            counts[e + 1] += counts[e];
        }
        starts.push_back(a.pairs);
        order.resize(a.pairs);
        for (int64_t p = 0; p < a.pairs; p++) order[counts[a.chosen[p]]++] = p;
        const int64_t k = a.linears->k, choices = a.pairs / a.rows;
        if ((int64_t)gathered.size() < a.pairs * k) gathered.resize(a.pairs * k);
        for (int64_t i = 0; i < a.pairs; i++)
            std::memcpy(gathered.data() + i * k, a.x + order[i] / choices * k, k * sizeof(bf16));
        return true;
    }
};

inline void write_row(bf16* to, const float* sums, int width) {
    int j = 0;
    for (; j + LANES <= width; j += LANES) {
        const __m256i half = to_bf16(load(sums + j));
        std::memcpy(to + j, &half, sizeof half);
    }
    if (j == width) return;
    const __m256i half = to_bf16(load(sums + j));
    std::memcpy(to + j, &half, (width - j) * sizeof(bf16));
}

// Rows in 8 bits, for weights that are multiplied so.
Codes coded(const bf16* x, int64_t rows, int64_t k, int threads) {
    static thread_local CodeMemory memory;
    const Codes to = memory.take(rows, k);
#if HAS_QUANTIZED
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows > FEW_ROWS)
    for (int64_t r = 0; r < rows; r++) quantize_row(x + r * k, to.from(r));
#endif
    return to;
}

// Every panel of every expert that rows go to, by `threads` threads: each takes one after the other, so that one that comes
// late takes fewer. Without `groups` there is one expert, and rows keep their order.
void multiply(const LinearArgs& a, const Groups* groups) {
    const int64_t n = a.linears->n, k = a.linears->k;
    const int each = panels(*a.linears), all = each * (groups ? (int)groups->active.size() : 1);
    const int threads = all * any_panel_bytes(*a.linears) < SINGLE_THREAD_BYTES ? 1 : (int)a.threads;
    const bf16* x = groups ? groups->gathered.data() : a.x;
    const Codes codes = is_wide(*a.linears) ? Codes{} : coded(x, groups ? a.pairs : a.rows, k, threads);
    std::atomic<int> taken{0};
#pragma omp parallel num_threads(threads) if (threads > 1)
    for (int item = taken++, next; item < all; item = next) {
        next = taken++;
        const int group = item / each, panel = item % each;
        const int64_t first = groups ? groups->starts[group] : 0;
        const int rows = (int)(groups ? groups->starts[group + 1] - first : a.rows);
        const int width = (int)std::min<int64_t>(PANEL, n - (int64_t)panel * PANEL);
        const auto linear_of = [&](int which) -> const Linear& { return a.linears[groups ? groups->active[which] : 0]; };
        const int then = next < all ? next : item;
        any_panel(linear_of(group), panel, any_panel_at(linear_of(then / each), then % each), x + first * k,
                  codes.k ? codes.from(first) : codes, rows, [&](int row, const float* sums) {
                      const int64_t to = groups ? groups->order[first + row] : row;
                      write_row(a.out + to * n + panel * PANEL, sums, width);
                  });
    }
}

#endif

}  // namespace

// Returns 0; 3 for an expert that there is not, 9 for a build without the dot products that it takes.
extern "C" int linear(const LinearArgs* args) {
#if HAS_BF16_DOT
    if (!HAS_QUANTIZED && !is_wide(*args->linears)) return 9;
    if (args->rows <= 0 || args->pairs <= 0) return 0;
    if (!args->chosen) {
        multiply(*args, nullptr);
        return 0;
    }
    static thread_local Groups groups;
    if (!groups.gather(*args)) return 3;
    multiply(*args, &groups);
    return 0;
#else
    return 9;
#endif
}
