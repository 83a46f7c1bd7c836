// Linears on packed bfloat16 weights (gemm.h), and those of a mixture's experts in one call; plain C ABI.
#ifdef _OPENMP
#include <omp.h>
#endif
#include <atomic>
#include <vector>

#include "gemm.h"

namespace {

struct LinearArgs {  // mirrored by serve_app/kernels/library/native.py, field by field, 8 bytes each
    const Linear* linears;  // [experts], all of one shape
    const bf16* x;          // [rows, k]
    bf16* out;              // [pairs, n]: pair p is row p / (pairs / rows) of x times expert chosen[p]
    const int64_t* chosen;  // [pairs], or null: expert 0 for all
    int64_t experts, rows, pairs, threads;
};

#if HAS_BF16_DOT

constexpr int64_t SINGLE_THREAD_BYTES = 96 << 10;  // less is read before another thread has woken up
constexpr int FEW_ROWS = CompactPanel::ROWS;

// Rows of x by the expert they go to: those of active[i] are [starts[i], starts[i + 1]) of `order`, which names pairs.
struct Groups {
    std::vector<int64_t> order, starts, counts;
    std::vector<int> active;
    std::vector<bf16> gathered;

    // False for an expert that there is not.
    bool sort(const LinearArgs& a) {
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

template <class Write>
inline void any_panel(const Linear& l, int panel, int next, const bf16* x, int rows, Write write) {
    if (l.bits == 16)
        panel_product<PlainPanel>(l, panel, next, x, l.k, rows, write);
    else if (rows <= FEW_ROWS)
        panel_product<CompactPanel>(l, panel, next, x, l.k, rows, write);
    else
        panel_product<UnpackedPanel>(l, panel, next, x, l.k, rows, write);
}

// Calls work(thread) in `threads` threads, or fewer if the runtime grants fewer.
template <class Work>
inline void in_threads(int64_t threads, Work work) {
#ifdef _OPENMP
    if (threads > 1) {
#pragma omp parallel num_threads((int)threads)
        work();
        return;
    }
#endif
    work();
}

int plain(const LinearArgs& a) {
    const Linear& l = *a.linears;
    const int all = panels(l);
    std::atomic<int> taken{0};
    // Threads take panels one by one: one that comes late takes fewer.
    in_threads(l.n * l.k * 2 < SINGLE_THREAD_BYTES ? 1 : a.threads, [&] {
        for (int panel = taken++, next; panel < all; panel = next) {
            next = taken++;
            const int width = (int)std::min<int64_t>(PANEL, l.n - (int64_t)panel * PANEL);
            any_panel(l, panel, next, a.x, (int)a.rows, [&](int row, const float* sums) {
                write_row(a.out + row * l.n + panel * PANEL, sums, width);
            });
        }
    });
    return 0;
}

int experts(const LinearArgs& a) {
    static thread_local Groups memory;
    Groups& groups = memory;
    if (!groups.sort(a)) return 3;
    const int64_t n = a.linears->n, k = a.linears->k, choices = a.pairs / a.rows;
    if ((int64_t)groups.gathered.size() < a.pairs * k) groups.gathered.resize(a.pairs * k);
    const int each = panels(*a.linears), all = each * (int)groups.active.size();
    for (int64_t i = 0; i < a.pairs; i++)
        std::memcpy(groups.gathered.data() + i * k, a.x + groups.order[i] / choices * k, k * sizeof(bf16));
    std::atomic<int> taken{0};
    in_threads(all * PANEL * k * 2 < SINGLE_THREAD_BYTES ? 1 : a.threads, [&] {
        for (int item = taken++, next; item < all; item = next) {
            next = taken++;
            const int group = item / each, panel = item % each;
            const int64_t first = groups.starts[group], rows = groups.starts[group + 1] - first;
            const int width = (int)std::min<int64_t>(PANEL, n - (int64_t)panel * PANEL);
            any_panel(a.linears[groups.active[group]], panel, panel + next - item, groups.gathered.data() + first * k, (int)rows,
                      [&](int row, const float* sums) {
                          write_row(a.out + groups.order[first + row] * n + panel * PANEL, sums, width);
                      });
        }
    });
    return 0;
}

#endif

}  // namespace

// Returns 0; 3 for an expert that there is not, 9 for a build without bfloat16 dot products.
extern "C" int linear(const LinearArgs* args) {
#if HAS_BF16_DOT
    if (args->rows <= 0 || args->pairs <= 0) return 0;
    return args->chosen ? experts(*args) : plain(*args);
#else
    return 9;
#endif
}
