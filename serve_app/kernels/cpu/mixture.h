// The mixture of a decoder's layer: which experts each row goes to, and its rows grouped by them.
//
// A row of router logits chooses K experts; shared experts, which every row goes to, stand behind the others. Pairs of a row
// and an expert are sorted by expert, rows ascending within one, so that each expert's weights are read once per step and
// multiplied with all of its rows. Sums over a row's experts run in the experts' order in float32 and are rounded once: a
// row's result does not depend on its batch.
#pragma once
#include <algorithm>
#include <vector>

#include "wide.h"

namespace {

// Softmax over the chosen ones, or over all of them; sigmoids, as they are or as shares of the chosen ones' sum.
enum Routing : int64_t { CHOSEN_NORMALISED, CHOSEN_OF_ALL, SIGMOID, SIGMOID_NORMALISED };

struct Mixture {  // mirrored by serve_app/kernels/mixture.py, field by field, 8 bytes each
    Linear router;            // with `gated`, one output more than experts
    const Linear* gate_up;    // [experts + shared], per panel 32 gates and the 32 ups that belong to them
    const Linear* down;       // [experts + shared]
    const float* correction;  // [experts] what scores are raised by to choose, or null
    int64_t experts, chosen, shared, inner;  // every row goes to the shared ones as well
    int64_t groups, kept;  // experts are chosen from so many groups, in order of the sum of the two best of each
    int64_t routing;
    int64_t exact;    // logits stay float32
    int64_t rounded;  // the weights of the chosen experts are rounded to bfloat16
    int64_t gated;    // the shared ones' weight is the sigmoid of the router's last output, else 1
    double scale;     // of the weights of the chosen
    double alpha, limit;  // of gpt-oss's gate; 0: silu(gate) * up

    int64_t choices() const { return chosen + shared; }
};

// Pairs of one step's rows by expert: those of active[i] are [starts[i], starts[i + 1]) of `rows` and `weights`.
struct Pairs {
    std::vector<int32_t> rows, starts, active, counts;
    std::vector<float> weights;

    int first(int group) const { return starts[group]; }
    int count(int group) const { return starts[group + 1] - starts[group]; }
    int groups() const { return (int)active.size(); }

    // `chosen` and `given`: [count, choices] experts and weights of each row.
    void sort(const int32_t* chosen, const float* given, int64_t count, int64_t choices, int64_t experts) {
        const int64_t pairs = count * choices;
        counts.assign(experts + 1, 0);
        for (int64_t p = 0; p < pairs; p++) counts[chosen[p] + 1]++;
        active.clear();
        starts.clear();
        for (int64_t e = 0; e < experts; e++) {
            if (counts[e + 1]) {
                active.push_back((int32_t)e);
                starts.push_back(counts[e]);
            }
            counts[e + 1] += counts[e];
        }
        starts.push_back((int32_t)pairs);
        rows.resize(pairs);
        weights.resize(pairs);
        for (int64_t p = 0; p < pairs; p++) {
            const int32_t at = counts[chosen[p]]++;
            rows[at] = (int32_t)(p / choices);
            weights[at] = given[p];
        }
    }
};

#if HAS_BF16_DOT

inline float as_bf16(float x) {
    bf16 half;
    const uint32_t u = [&] {
        uint32_t bits;
        std::memcpy(&bits, &x, 4);
        return bits;
    }();
    half.bits = (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
    const uint32_t back = (uint32_t)half.bits << 16;
    float y;
    std::memcpy(&y, &back, 4);
    return y;
}

inline float sigmoid(float x) { return 1.f / (1.f + std::exp(-x)); }

// Leaves only the experts of the best groups to be chosen.
inline void keep_groups(const Mixture& e, float* keys) {
    static thread_local std::vector<float> sums;
    const int64_t size = e.experts / e.groups;
    sums.assign(e.groups, 0.f);
    for (int64_t g = 0; g < e.groups; g++) {
        float first = -INFINITY, second = -INFINITY;
        for (int64_t i = g * size; i < (g + 1) * size; i++)
            if (keys[i] > first)
                second = first, first = keys[i];
            else if (keys[i] > second)
                second = keys[i];
        sums[g] = first + second;
    }
    for (int64_t left = e.groups - e.kept; left > 0; left--) {  // the worst goes, of equal ones the last
        int64_t worst = -1;
        for (int64_t g = 0; g < e.groups; g++)
            if (sums[g] != INFINITY && (worst < 0 || sums[g] <= sums[worst])) worst = g;
        if (worst < 0) return;
        sums[worst] = INFINITY;
        std::fill(keys + worst * size, keys + (worst + 1) * size, -INFINITY);
    }
}

// The K best experts for `logits`, the first of equal ones, and the shared ones, with their weights.
inline void choose(const Mixture& e, const float* logits, int32_t* chosen, float* weights) {
    static thread_local std::vector<float> memory;
    const bool sigmoids = e.routing >= SIGMOID;
    float top = -INFINITY, all = 0.f;
    for (int64_t i = 0; i < e.experts; i++) top = std::max(top, logits[i]);
    const auto score = [&](int64_t i) { return sigmoids ? sigmoid(logits[i]) : std::exp(logits[i] - top); };
    if (!sigmoids && (e.routing == CHOSEN_OF_ALL || e.correction))
        for (int64_t i = 0; i < e.experts; i++) all += score(i);
    memory.assign(logits, logits + e.experts);
    float* keys = memory.data();
    if (sigmoids || e.correction)
        for (int64_t i = 0; i < e.experts; i++)
            keys[i] = score(i) / (sigmoids ? 1.f : all) + (e.correction ? e.correction[i] : 0.f);
    if (e.kept < e.groups) keep_groups(e, keys);
    float sum = 0.f;
    for (int64_t c = 0; c < e.chosen; c++) {
        int64_t best = 0;  // never one that is chosen already, whatever the logits are
        while (std::find(chosen, chosen + c, (int32_t)best) != chosen + c) best++;
        for (int64_t i = best + 1; i < e.experts; i++)
            if (keys[i] > keys[best]) best = i;
        chosen[c] = (int32_t)best;
        weights[c] = score(best);
        sum += weights[c];
        keys[best] = -INFINITY;
    }
    const float divisor = e.routing == CHOSEN_OF_ALL ? all : e.routing == SIGMOID ? 1.f : sum;
    for (int64_t c = 0; c < e.chosen; c++) {
        weights[c] = weights[c] / divisor * (float)e.scale;
        if (e.rounded) weights[c] = as_bf16(weights[c]);
    }
    const float share = e.gated ? as_bf16(sigmoid(as_bf16(logits[e.experts]))) : 1.f;
    for (int64_t s = 0; s < e.shared; s++) chosen[e.chosen + s] = (int32_t)(e.experts + s), weights[e.chosen + s] = share;
}

// Experts and weights [count, choices] of `count` rows x [count, k]; `logits` has room for [count, panels of the router * 64].
inline void route(const Mixture& e, const bf16* x, int64_t count, float* logits, int32_t* chosen, float* weights) {
    const int all = panels(e.router);
    const int64_t width = (int64_t)all * PANEL;
    for (int panel = 0; panel < all; panel++)
        wide_panel(e.router, panel, panel_at(e.router, panel + 1 < all ? panel + 1 : 0), x, count,
                   [&](int row, const float* sums) {
            for (int j = 0; j < PANEL; j++) logits[row * width + panel * PANEL + j] = e.exact ? sums[j] : as_bf16(sums[j]);
        });
    for (int64_t r = 0; r < count; r++) choose(e, logits + r * width, chosen + r * e.choices(), weights + r * e.choices());
}

#endif

}  // namespace
