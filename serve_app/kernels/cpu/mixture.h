// The mixture of a decoder's layer: which experts each row goes to, and its rows grouped by them.
//
// A row of router logits chooses K experts. Pairs of a row and an expert are sorted by expert, rows ascending within one, so
// that each expert's weights are read once per step and multiplied with all of its rows. Sums over a row's experts run in
// the experts' order in float32 and are rounded once: a row's result does not depend on its batch.
#pragma once
#include <algorithm>
#include <vector>

#include "gemm.h"

namespace {

enum Routing : int64_t { CHOSEN_NORMALISED, CHOSEN_OF_ALL };  // softmax over the chosen ones, or over all of them

struct Mixture {  // mirrored by serve_app/kernels/mixture.py, field by field, 8 bytes each
    Linear router;
    const Linear* gate_up;  // [experts], per panel 32 gates and the 32 ups that belong to them
    const Linear* down;     // [experts]
    int64_t experts, chosen, inner;
    int64_t routing;
    int64_t rounded;       // whether the weights of the chosen experts are rounded to bfloat16
    double alpha, limit;   // of gpt-oss's gate; 0: silu(gate) * up
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

// The K largest of `logits` [experts], the first of equal ones, with their weights; `logits` is spoilt.
inline void choose(const Mixture& e, float* logits, int32_t* chosen, float* weights) {
    float top = -INFINITY, all = 0.f;
    for (int64_t i = 0; i < e.experts; i++) top = std::max(top, logits[i]);
    if (e.routing == CHOSEN_OF_ALL)
        for (int64_t i = 0; i < e.experts; i++) all += std::exp(logits[i] - top);
    float sum = 0.f;
    for (int64_t c = 0; c < e.chosen; c++) {
        int64_t best = 0;  // never one that is chosen already, whatever the logits are
        while (std::find(chosen, chosen + c, (int32_t)best) != chosen + c) best++;
        for (int64_t i = best + 1; i < e.experts; i++)
            if (logits[i] > logits[best]) best = i;
        chosen[c] = (int32_t)best;
        weights[c] = std::exp(logits[best] - top);
        sum += weights[c];
        logits[best] = -INFINITY;
    }
    if (e.routing == CHOSEN_OF_ALL) sum = all;
    for (int64_t c = 0; c < e.chosen; c++) {
        weights[c] /= sum;
        if (e.rounded) weights[c] = as_bf16(weights[c]);
    }
}

// Experts and weights of `count` rows x [count, k]; `logits` has room for [count, panels of the router * 64].
inline void route(const Mixture& e, const bf16* x, int64_t count, float* logits, int32_t* chosen, float* weights) {
    const int all = panels(e.router);
    const int64_t width = (int64_t)all * PANEL;
    for (int panel = 0; panel < all; panel++)
        wide_panel(e.router, panel, panel + 1 < all ? panel + 1 : 0, x, count, [&](int row, const float* sums) {
            for (int j = 0; j < PANEL; j++) logits[row * width + panel * PANEL + j] = as_bf16(sums[j]);
        });
    for (int64_t r = 0; r < count; r++) choose(e, logits + r * width, chosen + r * e.chosen, weights + r * e.chosen);
}

// The lines that a panel begins with, before they are needed: nothing else fetches them where an expert follows another.
inline void fetch_panel(const Linear& l, int panel) {
    const int64_t bytes = l.bits == 16 ? PlainPanel::bytes(l) : CompactPanel::bytes(l);
    const uint8_t* at = (const uint8_t*)l.weight + panel * bytes;
    for (int64_t line = 0; line < std::min<int64_t>(bytes, NEAR); line += 64) fetch((const void*)(at + line), false);
}

#endif

}  // namespace
