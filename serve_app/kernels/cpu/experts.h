// The experts of a decoder's layer: rows are routed, each expert multiplies its own, and their sums go back to the rows.
//
// Threads take panels of all chosen experts one after the other. Gate and up of a panel are one product with the gate's
// function behind it; then each thread takes columns of the states and adds what all experts have for them, so that nothing
// is written that another thread has to add up.
#pragma once
#include <atomic>

#include "mixture.h"
#include "model.h"
#include "quantized.h"
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
        static thread_local CodeMemory of_rows, of_pairs;
        int64_t wide = 0, pairs = 0, widest = 0;
        for (int64_t i = 0; i < m.layer_count; i++) {
            const Mixture* e = m.layers[i].mixture;
            if (!e) continue;
            pairs = std::max(pairs, rows * e->choices());
            wide = std::max(wide, rows * e->choices() * e->inner);
            if (!is_wide(e->gate_up[0]) || !is_wide(e->down[0])) widest = std::max({widest, m.hidden, e->inner});
        }
        if (!pairs) return;
        const int64_t total = wide + pairs * m.hidden + 64;
        if ((int64_t)values.size() < total) values.resize(total);
        if ((int64_t)indices.size() < pairs) indices.resize(pairs), shares.resize(pairs);
        inner = (bf16*)(((uintptr_t)values.data() + 63) / 64 * 64);
        gathered = inner + wide;
        chosen = indices.data(), weights = shares.data();
        if (widest) rows_coded = of_rows.take(rows, widest), pairs_coded = of_pairs.take(pairs, widest);
    }

    // states[r] += the sum of row r's experts, of normalised rows `from` [count, hidden]. `claimed`: two counters at 0.
    // The bytes of the experts that are read are added to `read`, if there.
    void mix(const Member& self, std::atomic<int>* claimed, const Mixture& e, const bf16* from, int64_t count, bf16* states,
             int64_t* read) {
        static thread_local Rows own;
        const int64_t hidden = e.router.k;
        const bool few = count <= OWN_ROWS;
        const Pairs& pairs = routed(self, e, from, count, few, own);
        const int64_t total = count * e.choices();
        own.group = -1;
        if (read && self.thread == 0)
            for (const int32_t one : pairs.active) *read += weight_bytes(e.gate_up[one]) + weight_bytes(e.down[one]);
        if (is_wide(e.gate_up[0])) {
            if (!few) {
                self.rows(total, [&](int64_t p) {
                    std::memcpy(gathered + p * hidden, from + pairs.rows[p] * hidden, hidden * sizeof(bf16));
                });
                self.team.wait();
            }
            gate_and_up(self, claimed[0], e, pairs, [&](int group) {
                return Input{few ? own.gather(pairs, group, from, hidden) : gathered + pairs.first(group) * hidden, {}};
            });
        } else {
            const Codes coded = few ? own.codes.take(OWN_ROWS, hidden) : of_width(rows_coded, hidden);
            const Codes sorted = few ? own.sorted.take(OWN_ROWS, hidden) : of_width(pairs_coded, hidden);
            quantize(self, from, count, coded, few);
            if (!few) {
                self.rows(total, [&](int64_t p) { copy_codes(coded.from(pairs.rows[p]), sorted.from(p)); });
                self.team.wait();
            }
            gate_and_up(self, claimed[0], e, pairs, [&](int group) {
                return Input{nullptr, few ? own.gather(pairs, group, coded, sorted) : sorted.from(pairs.first(group))};
            });
        }
        self.team.wait();
        Codes coded{};
        if (!is_wide(e.down[0])) {
            coded = of_width(pairs_coded, e.inner);
            quantize(self, inner, total, coded, false);
        }
        down(self, claimed[1], e, pairs, coded, count, states, own.sums);
    }

private:
    // Rows as a product takes them: as bfloat16, or in 8 bits.
    struct Input {
        const bf16* rows;
        Codes codes;
    };

    // One thread's own copies: of few rows each makes them, which costs less than waiting for one another.
    struct Rows {
        Pairs pairs;
        std::vector<float> logits, weights, sums;
        std::vector<int32_t> chosen;
        std::vector<bf16> rows;
        CodeMemory codes, sorted;
        int group = -1;

        Codes gather(const Pairs& of, int wanted, const Codes& from, const Codes& to) {
            const int first = of.first(wanted), count = of.count(wanted);
            if (count == 1) return from.from(of.rows[first]);
            if (wanted != group)
                for (int r = 0; r < count; r++) copy_codes(from.from(of.rows[first + r]), to.from(r));
            group = wanted;
            return to;
        }

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

    static Codes of_width(Codes codes, int64_t k) {
        codes.k = k;
        return codes;
    }

    // Rows in 8 bits, each by one thread, or all by each for itself.
    static void quantize(const Member& self, const bf16* from, int64_t count, const Codes& to, bool own) {
#if HAS_QUANTIZED
        if (own) {
            for (int64_t r = 0; r < count; r++) quantize_row(from + r * to.k, to.from(r));
            return;
        }
        self.rows(count, [&](int64_t r) { quantize_row(from + r * to.k, to.from(r)); });
        self.team.wait();
#endif
    }

    const Pairs& routed(const Member& self, const Mixture& e, const bf16* from, int64_t count, bool few, Rows& own) {
        const int64_t low = few ? 0 : Team::share(count, self.thread, self.team.size);
        const int64_t high = few ? count : Team::share(count, self.thread + 1, self.team.size);
        const int64_t room = (high - low) * panels(e.router) * PANEL;
        if ((int64_t)own.logits.size() < room) own.logits.resize(room);
        if (few && (int64_t)own.chosen.size() < count * e.choices()) {
            own.chosen.resize(OWN_ROWS * e.choices());
            own.weights.resize(OWN_ROWS * e.choices());
        }
        int32_t* which = few ? own.chosen.data() : chosen;
        float* shares = few ? own.weights.data() : weights;
        const int64_t begin = low * e.choices();
        route(e, from + low * e.router.k, high - low, own.logits.data(), which + begin, shares + begin);
        if (!few) self.team.wait();
        own.pairs.sort(which, shares, count, e.choices(), e.experts + e.shared);
        return own.pairs;
    }

    template <class Rows_>
    void gate_and_up(const Member& self, std::atomic<int>& counter, const Mixture& e, const Pairs& pairs, Rows_ rows_of) {
        const int each = panels(e.gate_up[0]);
        const Runs runs(each, most_in_a_row(e.gate_up[0], pairs, each * pairs.groups() / (TURNS * self.team.size)));
        const int all = runs.count * pairs.groups();
        for (int item = self.thread, next = item; item < all; item = next) {
            const int group = item / runs.count, end = runs.end(item % runs.count);
            const Linear& l = e.gate_up[pairs.active[group]];
            const Input input = rows_of(group);
            for (int panel = runs.begin(item % runs.count); panel < end; panel++) {
                const uint8_t* following = any_panel_at(l, panel + 1 < end ? panel + 1 : panel);
                if (panel + 1 == end && (next = self.team.size + counter++) < all)
                    following = any_panel_at(e.gate_up[pairs.active[next / runs.count]], runs.begin(next % runs.count));
                const int width = (int)std::min<int64_t>(PANEL, l.n - (int64_t)panel * PANEL);
                bf16* to = inner + (int64_t)pairs.first(group) * e.inner + panel * (PANEL / 2);
                any_panel(l, panel, following, input.rows, input.codes, pairs.count(group),
                          [&](int row, const float* sums) {
                              e.limit ? gate_limited(to + row * e.inner, sums, width / 2, (float)e.alpha, (float)e.limit)
                                      : gate(to + row * e.inner, sums, width / 2);
                          });
            }
        }
    }

    // `coded`: the inner values of all pairs, where they are multiplied in 8 bits.
    void down(const Member& self, std::atomic<int>& counter, const Mixture& e, const Pairs& pairs, const Codes& coded,
              int64_t count, bf16* states, std::vector<float>& memory) {
        const int each = panels(e.down[0]), groups = pairs.groups();
        const Runs runs(each, most_in_a_row(e.down[0], pairs, (each + self.team.size - 1) / self.team.size));
        const int64_t hidden = e.router.k, wide = runs.longest() * PANEL;
        if ((int64_t)memory.size() < count * wide) memory.resize(count * wide);
        float* sums_of = memory.data();
        for (int run = self.thread, next; run < runs.count; run = next) {
            next = self.team.size + counter++;
            const int begin = runs.begin(run), end = runs.end(run);
            std::memset(sums_of, 0, count * wide * sizeof(float));
            for (int group = 0; group < groups; group++) {
                const Linear& l = e.down[pairs.active[group]];
                const int first = pairs.first(group);
                for (int panel = begin; panel < end; panel++) {
                    // Of the next expert the same panels, else the first one's next.
                    const bool more = group + 1 < groups;
                    const uint8_t* following =
                        panel + 1 < end ? any_panel_at(l, panel + 1)
                                        : any_panel_at(e.down[pairs.active[more ? group + 1 : 0]],
                                                       more || next >= runs.count ? begin : runs.begin(next));
                    any_panel(l, panel, following, inner + (int64_t)first * e.inner, coded.from(first), pairs.count(group),
                              [&](int row, const float* sums) {
                                  float* to = sums_of + pairs.rows[first + row] * wide + (panel - begin) * PANEL;
                                  const vfloat weight = splat(pairs.weights[first + row]);
                                  for (int j = 0; j < PANEL; j += LANES) {
                                      vfloat term = rounded(load(sums + j)) * weight;
                                      if (e.rounded) term = rounded(term);
                                      store(to + j, load(to + j) + term);
                                  }
                              });
                }
            }
            const int width = (int)std::min<int64_t>((end - begin) * PANEL, hidden - (int64_t)begin * PANEL);
            for (int64_t r = 0; r < count; r++) add(states + r * hidden + begin * PANEL, sums_of + r * wide, width);
        }
    }

    // Panels of a run, `wanted` at the most; where an expert's rows are many, memory does not matter and short turns are
    // shared more evenly.
    static int most_in_a_row(const Linear& l, const Pairs& pairs, int wanted) {
        const bool many = (int64_t)pairs.rows.size() > MANY * pairs.groups();
        return many ? 1 : std::clamp<int64_t>(RUN_BYTES / any_panel_bytes(l), 1, std::max(1, wanted));
    }

    static constexpr int TURNS = 4;  // of a thread at the least, so that all end together
    static constexpr int MANY = 12;

    bf16 *inner = nullptr, *gathered = nullptr;  // [pairs, an expert's width], [pairs, hidden]
    Codes rows_coded{}, pairs_coded{};           // of rows, and of pairs
    int32_t* chosen = nullptr;
    float* weights = nullptr;
};

#endif

}  // namespace
