#pragma once
#ifdef _OPENMP
#include <omp.h>
#endif
#include <chrono>
#include <memory>

#include "adapters.h"
#include "experts.h"
#include "model.h"
#include "norm.h"
#include "paged_attention.h"
#include "quantized.h"
#include "team.h"

namespace {

#if HAS_BF16_DOT

class Step {
public:
    explicit Step(const StepArgs& args) : a(args), m(*args.model), adapters(args) {}

    // Checks every index that will be followed and lays out memory; 0 or an error code.
    int prepare() {
        for (int64_t t = 0; t < a.tokens; t++) {
            if (a.input_ids[t] < 0 || a.input_ids[t] >= m.vocab) return 4;
            if (a.slots[t] < 0 || a.slots[t] >= a.num_blocks * BLOCK) return 3;
            if (a.positions[t] < 0 || a.positions[t] >= a.rotary_positions) return 5;
            if (a.embedded && a.embedded[t] >= a.given_rows) return 2;
        }
        for (int64_t s = 0; s < a.samples; s++)
            if (a.sample_rows[s] < 0 || a.sample_rows[s] >= a.tokens) return 2;
        const int64_t q_width = m.q_heads * m.head_dim;
        qkv_width = q_width + 2 * m.kv_heads * m.head_dim;
        if (a.embedded && (a.deep < 0 || a.deep >= m.layer_count)) return 2;
        if (quantized() && !HAS_QUANTIZED) return 9;
        static thread_local std::vector<bf16> memory;
        const int64_t widths[] = {m.hidden, m.hidden, qkv_width, q_width, m.inner};
        const int64_t count = std::max(a.tokens + a.samples, OWN_ROWS * std::max<int64_t>(1, a.threads));
        int64_t total = 32;
        for (int64_t width : widths) total += (width * count + 63) / 32 * 32;
        if ((int64_t)memory.size() < total) memory.resize(total);
        bf16* at = (bf16*)(((uintptr_t)memory.data() + 63) / 64 * 64);
        bf16** buffers[] = {&x, &normed, &qkv, &attended, &inner};
        for (int i = 0; i < 5; i++) {
            *buffers[i] = at;
            at += (widths[i] * count + 31) / 32 * 32;
        }
        if (quantized()) prepare_codes(count);
        if (const int error = adapters.prepare()) return error;
        experts.prepare(m, count);
        claimed = std::make_unique<std::atomic<int>[]>(m.products());
        for (int64_t i = 0; i < m.products(); i++) claimed[i] = 0;
        return prepare_attention();
    }

    void run(Team& team, int thread) {
        const Member self{team, thread};
        int64_t count = a.tokens;  // rows still of interest
        const auto mark = [&](Part part) {
            if (a.nanoseconds && thread == 0) clock(part);
        };
        // `next`: whose weights to fetch while others are not done.
        const auto done = [&](Part part, const Linear& next) {
            team.wait(first_panel(next, count, self));
            mark(part);
        };
        if (thread == 0) last = Clock::now();
        self.rows(a.tokens, [&](int64_t t) {
            const bf16* row = m.embedding + a.input_ids[t] * m.hidden;
            if (a.embedded && a.embedded[t] >= 0) row = given(t, 0);
            std::memcpy(x + t * m.hidden, row, m.hidden * sizeof(bf16));
        });
        done(NORMS, m.layer_count ? m.layers[0].qkv : m.head);
        const bf16* from;
        bf16 *states = x, *heads = attended;  // those rows
        for (int64_t i = 0; i < m.layer_count; i++) {
            const Layer& l = m.layers[i];
            if (a.embedded && i > 0 && i <= a.deep) {
                self.rows(a.tokens, [&](int64_t t) {
                    if (a.embedded[t] >= 0) add_given(x + t * m.hidden, given(t, i));
                });
                team.wait();
            }
            for (int64_t c = 0; c < a.captures; c++) {
                if (a.captured_layers[c] != i) continue;
                self.rows(a.tokens, [&](int64_t t) {
                    std::memcpy(a.captured + (t * a.captures + c) * m.hidden, x + t * m.hidden, m.hidden * sizeof(bf16));
                });
            }
            from = norm(self, l.input_norm, x, a.tokens);
            mark(NORMS);
            product(self, 4 * i, l.qkv, from, a.tokens, [&](int row, int column, int width, const float* sums) {
                copy(qkv + row * qkv_width + column, sums, width);
            });
            done(LINEARS, l.o);
            rotate_and_write(self, i);
            done(ROTARY, l.o);
            const bool last = i + 1 == m.layer_count;
            if (last && a.samples == 0) return;  // all that was wanted are the keys and values
            attend(self, i);
            if (last) {  // only sampled rows matter from here on
                team.wait();
                count = a.samples;
                states = x + a.tokens * m.hidden;
                heads = attended + a.tokens * m.q_heads * m.head_dim;
                self.rows(count, [&](int64_t s) {
                    const int64_t t = a.sample_rows[s], width = m.q_heads * m.head_dim;
                    std::memcpy(states + s * m.hidden, x + t * m.hidden, m.hidden * sizeof(bf16));
                    std::memcpy(heads + s * width, attended + t * width, width * sizeof(bf16));
                });
            }
            done(ATTENTION, l.o);
            product(self, 4 * i + 1, l.o, heads, count, [&](int row, int column, int width, const float* sums) {
                add(states + row * m.hidden + column, sums, width);
            });
            done(LINEARS, l.mixture ? l.mixture->router : l.gate_up);
            from = norm(self, l.post_norm, states, count);
            mark(NORMS);
            const Linear& following = last ? m.head : m.layers[i + 1].qkv;
            if (l.mixture) {
                experts.mix(self, &claimed[4 * i + 2], *l.mixture, from, count, states, a.experts_read);
                done(LINEARS, following);
                continue;
            }
            product(self, 4 * i + 2, l.gate_up, from, count, [&](int row, int column, int width, const float* sums) {
                gate(inner + row * m.inner + column / 2, sums, width / 2);
            });
            done(LINEARS, l.down);
            product(self, 4 * i + 3, l.down, inner, count, [&](int row, int column, int width, const float* sums) {
                add(states + row * m.hidden + column, sums, width);
            });
            done(LINEARS, following);
        }
        from = norm(self, m.final_norm, states, count);
        mark(NORMS);
        product(self, m.products() - 1, m.head, from, count, [&](int row, int column, int width, const float* sums) {
            std::memcpy(a.logits + row * m.vocab + column, sums, width * sizeof(float));
        });
        done(HEAD, Linear{});
    }

private:
    using Clock = std::chrono::steady_clock;

    void clock(Part part) {
        const auto now = Clock::now();
        a.nanoseconds[part] += std::chrono::duration_cast<std::chrono::nanoseconds>(now - last).count();
        last = now;
    }

    // Normalised rows. Of a few rows every thread makes its own copy: that costs less than waiting for one another.
    const bf16* norm(const Member& self, const Norm& n, const bf16* from, int64_t count) {
        const auto row = [&](bf16* to, int64_t r) {
            rms_norm_row(from + r * m.hidden, n.weight, to + r * m.hidden, m.hidden, n.eps, true);
        };
        if (count <= OWN_ROWS) {
            bf16* own = normed + self.thread * OWN_ROWS * m.hidden;
            for (int64_t r = 0; r < count; r++) row(own, r);
            return own;
        }
        self.rows(count, [&](int64_t r) { row(normed, r); });
        self.team.wait();
        return normed;
    }

    // What is given for a token: its embedding, then what is added behind layer `part - 1`.
    const bf16* given(int64_t t, int64_t part) const {
        return a.given + (a.embedded[t] * (1 + a.deep) + part) * m.hidden;
    }

    void add_given(bf16* to, const bf16* from) const {
        for (int64_t d = 0; d < m.hidden; d += LANES) put(to + d, load(to + d) + load(from + d));
    }

    // How threads share a product: small ones evenly, others in turns, so that one that lost its core does not keep the rest.
    static Runs runs_of(const Linear& l, int64_t count, int threads) {
        const int all = panels(l), share = (all + threads - 1) / threads;
        const int most = count > OWN_ROWS ? 1 : (int)std::max<int64_t>(1, RUN_BYTES / any_panel_bytes(l));
        return Runs(all, share <= most ? std::max(1, share) : std::clamp(all / (8 * threads), 1, most));
    }

    // Where thread `thread` will begin with a product of `count` rows, as far as it stays in the cache until then.
    static Fetch first_panel(const Linear& l, int64_t count, const Member& self) {
        if (!l.weight) return {};
        const Runs runs = runs_of(l, count, self.team.size);
        if (self.thread >= runs.count) return {};
        const int64_t bytes = any_panel_bytes(l);
        return {any_panel_at(l, runs.begin(self.thread)), std::min<int64_t>(bytes, 2 * PANEL * K_PIECE)};
    }

    // Threads begin with a run of panels each and take the others one by one, the next before the last panel of the present
    // one is begun, so that it can be fetched meanwhile. Where rows are few, memory takes most time, and runs are long.
    template <class Write>
    void product(const Member& self, int64_t index, const Linear& l, const bf16* from, int64_t count, Write write) {
        std::atomic<int>& counter = claimed[index];
        const int all = panels(l);
        const Codes codes = is_wide(l) ? Codes{} : quantize(self, from, count, l.k);
        const Adapters::Product adapted = adapters.of(index, count);
        if (adapted.rows) adapters.shrink(self, adapted, from, l.k);
        const Runs runs = runs_of(l, count, self.team.size);
        int run = self.thread, panel = runs.begin(std::min(run, runs.count)), next = 0;
        for (; run < runs.count; panel = next) {
            next = panel + 1;
            if (next == runs.end(run)) {
                run = self.team.size + counter++;
                next = run < runs.count ? runs.begin(run) : all;
            }
            const int width = (int)std::min<int64_t>(PANEL, l.n - (int64_t)panel * PANEL);
            const auto put = [&](int row, const float* sums) { write(row, panel * PANEL, width, sums); };
            const auto finished = [&](int row, float* sums) {
                if (adapted.rows) adapted.add(row, 1, panel, sums);
                put(row, sums);
            };
            const uint8_t* following = any_panel_at(l, next < all ? next : panel);
            if (is_wide(l) && adapted.rows)
                wide_panel(l, panel, following, from, count, Adapters::Adding<decltype(put)>{adapted, panel, put},
                           adapters.beside(adapted, panel, l));
            else
                any_panel(l, panel, following, from, codes, count, finished);
        }
    }

    // Rows in 8 bits. As with norms, every thread makes its own copy of a few rows.
    Codes quantize(const Member& self, const bf16* from, int64_t count, int64_t k) {
        Codes to{codes, code_scales, code_sums, k};
#if HAS_QUANTIZED
        if (count <= OWN_ROWS) {
            to = to.from(self.thread * OWN_ROWS);
            for (int64_t r = 0; r < count; r++) quantize_row(from + r * k, to.from(r));
            return to;
        }
        self.rows(count, [&](int64_t r) { quantize_row(from + r * k, to.from(r)); });
        self.team.wait();
#endif
        return to;
    }

    bool quantized() const {
        for (int64_t i = 0; i < m.layer_count; i++)
            for (const Linear* l : {&m.layers[i].qkv, &m.layers[i].o, &m.layers[i].gate_up, &m.layers[i].down})
                if (!is_wide(*l)) return true;
        for (int64_t i = 0; i < m.layer_count; i++)
            if (const Mixture* e = m.layers[i].mixture)
                if (!is_wide(e->gate_up[0]) || !is_wide(e->down[0])) return true;
        return !is_wide(m.head);
    }

    void prepare_codes(int64_t count) {
        static thread_local std::vector<int8_t> values;
        static thread_local std::vector<float> scales;
        static thread_local std::vector<int32_t> sums;
        const int64_t widest = m.widest();
        if ((int64_t)values.size() < count * widest) values.resize(count * widest);
        if ((int64_t)scales.size() < count * widest / GROUP) {
            scales.resize(count * widest / GROUP);
            sums.resize(count * widest / GROUP);
        }
        codes = values.data(), code_scales = scales.data(), code_sums = sums.data();
    }

    // Rotates queries in place, rotates keys into the cache and copies values there (half-split rotary embedding,
    // arXiv 2104.09864 in GPT-NeoX's order).
    void rotate_and_write(const Member& self, int64_t layer) {
        const Layer& l = m.layers[layer];
        const int64_t dim = m.head_dim, heads = m.q_heads + m.kv_heads;
        const int64_t plane = a.num_blocks * m.kv_heads * BLOCK * dim;
        self.rows(a.tokens * heads, [&](int64_t unit) {
            const int64_t t = unit / heads, head = unit % heads, kv_head = head - m.q_heads;
            bf16* vector = qkv + t * qkv_width + head * dim;
            const Norm& n = kv_head < 0 ? l.q_norm : l.k_norm;
            if (n.weight) rms_norm_row(vector, n.weight, vector, dim, n.eps, true);
            rotate(vector, a.positions[t]);
            if (kv_head < 0) return;
            const int64_t block = a.slots[t] / BLOCK, offset = a.slots[t] % BLOCK;
            bf16* to = a.kv + 2 * layer * plane + ((block * m.kv_heads + kv_head) * BLOCK + offset) * dim;
            std::memcpy(to, vector, dim * sizeof(bf16));
            std::memcpy(to + plane, vector + m.kv_heads * dim, dim * sizeof(bf16));
        });
    }

    void rotate(bf16* vector, int64_t position) {
        const int64_t half = m.rotary_dim / 2;
        const float *cos = a.cos + position * half, *sin = a.sin + position * half;
        for (int64_t d = 0; d < half; d += LANES) {
            const vfloat low = load(vector + d), high = load(vector + half + d), c = load(cos + d), s = load(sin + d);
            put(vector + d, rounded(low * c) - rounded(high * s));
            put(vector + half + d, rounded(high * c) + rounded(low * s));
        }
    }

    Args attention_args(int64_t layer) const {
        const Layer& l = m.layers[layer];
        const int64_t plane = a.num_blocks * m.kv_heads * BLOCK * m.head_dim;
        return Args{qkv, a.kv + 2 * layer * plane, attended, a.query_start, a.seq_lens, a.block_tables, l.sinks,
                    qkv_width, m.head_dim, a.requests, a.tokens, m.q_heads, m.kv_heads, m.head_dim, a.num_blocks,
                    a.table_stride, l.window, 1, a.threads, l.scale, l.softcap};
    }

    // Layers with the same window share a plan; models have one or two windows.
    int prepare_attention() {
        static thread_local std::vector<std::unique_ptr<Attention<bf16>>> pool;
        plans.clear();
        for (int64_t i = 0; i < m.layer_count; i++) {
            const int64_t window = m.layers[i].window;
            size_t at = 0;
            while (at < windows.size() && windows[at] != window) at++;
            if (at == windows.size()) {
                windows.push_back(window);
                if (pool.size() <= at) pool.push_back(std::make_unique<Attention<bf16>>());
                if (const int error = pool[at]->prepare(attention_args(i), (int)a.threads, true)) return error;
            }
            plans.push_back(pool[at].get());
        }
        return 0;
    }

    void attend(const Member& self, int64_t layer) {
        Attention<bf16>& plan = *plans[layer];
        const Args args = attention_args(layer);
        // The team may be smaller than planned for.
        for (int part = self.thread; part < plan.threads(); part += self.team.size) plan.work(args, part);
        if (!plan.split()) return;
        self.team.wait();
        if (self.thread == 0) plan.merge(args);
    }

    const StepArgs& a;
    const Model& m;
    Clock::time_point last;
    int64_t qkv_width = 0;
    int8_t* codes = nullptr;
    float* code_scales = nullptr;
    int32_t* code_sums = nullptr;
    Adapters adapters;
    Experts experts;
    bf16 *x = nullptr, *normed = nullptr, *qkv = nullptr, *attended = nullptr, *inner = nullptr;
    std::unique_ptr<std::atomic<int>[]> claimed;
    std::vector<Attention<bf16>*> plans;
    std::vector<int64_t> windows;
};

#endif

}  // namespace
