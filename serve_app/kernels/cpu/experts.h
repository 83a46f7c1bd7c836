// The experts of a decoder's layer: rows are routed, each expert multiplies its own, and their sums go back to the rows.
//
// Threads take panels of all chosen experts one after the other. Gate and up of a panel are one product with the gate's
// function behind it; then each thread takes columns of the states and adds what all experts have for them, so that nothing
// is written that another thread has to add up.
#pragma once
#include <atomic>

#include "mixture.h"
#include "model.h"
#include "rows.h"
#include "team.h"

namespace {

#if HAS_BF16_DOT

class Experts {
public:
    // Lays out memory for steps of at most `rows` rows.
    void prepare(const Model& m, int64_t rows) {
        static thread_local std::vector<bf16> values;
        static thread_local std::vector<int32_t> indices;
        static thread_local std::vector<float> shares;
        int64_t wide = 0, pairs = 0;
        for (int64_t i = 0; i < m.layer_count; i++) {
            const Mixture* e = m.layers[i].mixture;
            if (!e) continue;
            pairs = std::max(pairs, rows * e->chosen);
            wide = std::max(wide, rows * e->chosen * e->inner);
        }
        if (!pairs) return;
        const int64_t total = wide + pairs * m.hidden + 64;
        if ((int64_t)values.size() < total) values.resize(total);
        if ((int64_t)indices.size() < pairs) indices.resize(pairs), shares.resize(pairs);
        inner = (bf16*)(((uintptr_t)values.data() + 63) / 64 * 64);
        gathered = inner + wide;
        chosen = indices.data(), weights = shares.data();
    }

    // states[r] += the sum of row r's experts, of normalised rows `from` [count, hidden]. `claimed`: two counters at 0.
    void mix(const Member& self, std::atomic<int>* claimed, const Mixture& e, const bf16* from, int64_t count, bf16* states) {
        static thread_local Rows own;
        const int64_t hidden = e.router.k;
        const bool few = count <= OWN_ROWS;
        const Pairs& pairs = routed(self, e, from, count, few, own);
        if (!few) {
            self.rows(count * e.chosen, [&](int64_t p) {
                std::memcpy(gathered + p * hidden, from + pairs.rows[p] * hidden, hidden * sizeof(bf16));
            });
            self.team.wait();
        }
        own.group = -1;
        gate_and_up(self, claimed[0], e, pairs, [&](int group) -> const bf16* {
            return few ? own.gather(pairs, group, from, hidden) : gathered + pairs.first(group) * hidden;
        });
        self.team.wait();
        down(self, claimed[1], e, pairs, count, states, own.sums);
    }

private:
    // One thread's own copies: of few rows each makes them, which costs less than waiting for one another.
    struct Rows {
        Pairs pairs;
        std::vector<float> logits, weights, sums;
        std::vector<int32_t> chosen;
        std::vector<bf16> rows;
        int group = -1;

        const bf16* gather(const Pairs& of, int wanted, const bf16* from, int64_t hidden) {
            const int first = of.first(wanted), count = of.count(wanted);
            if (count == 1) return from + of.rows[first] * hidden;
            if (wanted != group) {
                if ((int64_t)rows.size() < OWN_ROWS * hidden) rows.resize(OWN_ROWS * hidden);
                for (int r = 0; r < count; r++)
                    std::memcpy(rows.data() + r * hidden, from + of.rows[first + r] * hidden, hidden * sizeof(bf16));
                group = wanted;
            }
            return rows.data();
        }
    };

    const Pairs& routed(const Member& self, const Mixture& e, const bf16* from, int64_t count, bool few, Rows& own) {
        const int64_t low = few ? 0 : Team::share(count, self.thread, self.team.size);
        const int64_t high = few ? count : Team::share(count, self.thread + 1, self.team.size);
        const int64_t room = (high - low) * panels(e.router) * PANEL;
        if ((int64_t)own.logits.size() < room) own.logits.resize(room);
        if (few && (int64_t)own.chosen.size() < count * e.chosen) {
            own.chosen.resize(OWN_ROWS * e.chosen);
            own.weights.resize(OWN_ROWS * e.chosen);
        }
        int32_t* which = few ? own.chosen.data() : chosen;
        float* shares = few ? own.weights.data() : weights;
        route(e, from + low * e.router.k, high - low, own.logits.data(), which + low * e.chosen, shares + low * e.chosen);
        if (!few) self.team.wait();
        own.pairs.sort(which, shares, count, e.chosen, e.experts);
        return own.pairs;
    }

    template <class Rows_>
    void gate_and_up(const Member& self, std::atomic<int>& counter, const Mixture& e, const Pairs& pairs, Rows_ rows_of) {
        const int each = panels(e.gate_up[0]), all = each * pairs.groups();
        for (int item = self.thread, next; item < all; item = next) {
            next = self.team.size + counter++;
            const int group = item / each, panel = item % each;
            const Linear& l = e.gate_up[pairs.active[group]];
            if (next < all) fetch_panel(e.gate_up[pairs.active[next / each]], next % each);
            const int width = (int)std::min<int64_t>(PANEL, l.n - (int64_t)panel * PANEL);
            bf16* to = inner + (int64_t)pairs.first(group) * e.inner + panel * (PANEL / 2);
            wide_panel(l, panel, std::min(panel + 1, each - 1), rows_of(group), pairs.count(group),
                       [&](int row, const float* sums) {
                           e.limit ? gate_limited(to + row * e.inner, sums, width / 2, (float)e.alpha, (float)e.limit)
                                   : gate(to + row * e.inner, sums, width / 2);
                       }, Nothing());
        }
    }

    void down(const Member& self, std::atomic<int>& counter, const Mixture& e, const Pairs& pairs, int64_t count, bf16* states,
              std::vector<float>& memory) {
        const int all = panels(e.down[0]), groups = pairs.groups();
        const int64_t hidden = e.router.k;
        if ((int64_t)memory.size() < count * PANEL) memory.resize(count * PANEL);
        float* sums_of = memory.data();
        for (int panel = self.thread, next; panel < all; panel = next) {
            next = self.team.size + counter++;
            std::memset(sums_of, 0, count * PANEL * sizeof(float));
            for (int group = 0; group < groups; group++) {
                const Linear& l = e.down[pairs.active[group]];
                if (group + 1 < groups)
                    fetch_panel(e.down[pairs.active[group + 1]], panel);
                else if (next < all)
                    fetch_panel(e.down[pairs.active[0]], next);
                const int first = pairs.first(group);
                wide_panel(l, panel, panel, inner + (int64_t)first * e.inner, pairs.count(group),
                           [&](int row, const float* sums) {
                               float* to = sums_of + (int64_t)pairs.rows[first + row] * PANEL;
                               const vfloat weight = splat(pairs.weights[first + row]);
                               for (int j = 0; j < PANEL; j += LANES) {
                                   vfloat term = rounded(load(sums + j)) * weight;
                                   if (e.rounded) term = rounded(term);
                                   store(to + j, load(to + j) + term);
                               }
                           }, Nothing());
            }
            const int width = (int)std::min<int64_t>(PANEL, hidden - (int64_t)panel * PANEL);
            for (int64_t r = 0; r < count; r++) add(states + r * hidden + panel * PANEL, sums_of + r * PANEL, width);
        }
    }

    bf16 *inner = nullptr, *gathered = nullptr;  // [pairs, an expert's width], [pairs, hidden]
    int32_t* chosen = nullptr;
    float* weights = nullptr;
};

#endif

}  // namespace
