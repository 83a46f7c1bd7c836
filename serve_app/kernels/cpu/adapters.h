// The adapters of one step's rows: what they add to each product of the base, computed by the same team of threads.
#pragma once
#include <atomic>
#include <memory>

#include "delta.h"
#include "model.h"
#include "team.h"

#if HAS_BF16_DOT

namespace {

class Adapters {
public:
    // Those of one product's rows; `rows` is null where none of them has one.
    struct Product {
        const AdapterRows* rows;
        const Delta* deltas;
        Inner inner;
        bool round;
        int64_t index, count;

        // To the sums [rows][64] of a panel, of `some` rows from `row` on.
        void add(int row, int some, int64_t panel, float* sums) const {
            for (int r = row, next; r < row + some; r = next) {
                const int64_t place = rows->places[r];
                for (next = r + 1; next < std::min(row + some, r + EXPAND_ROWS) && rows->places[next] == place;) next++;
                if (place) expand_panel(deltas[place], panel, inner, r, next - r, sums + (r - row) * PANEL, round);
            }
        }
    };

    // What is done with a panel's finished rows: they get their deltas all at once, then each is written.
    template <class Write>
    struct Adding {
        const Product& product;
        int64_t panel;
        Write write;

        void all(int row, int some, float* sums) const { product.add(row, some, panel, sums); }
        void operator()(int row, const float* sums) const { write(row, sums); }
    };

    explicit Adapters(const StepArgs& args) : a(args), m(*args.model) {}

    // Checks places and lays out memory; 0 or an error code.
    int prepare() {
        if (!a.adapters) return 0;
        static thread_local AdapterRows tokens, samples;
        static thread_local std::vector<float> sums, values;
        static thread_local std::vector<bf16> halves;
        for (int64_t t = 0; t < a.tokens; t++)
            if (a.adapters[t] < 0 || a.adapters[t] > a.places) return 6;
        tokens.sort(a.tokens, a.places, [&](int64_t t) { return a.adapters[t]; });
        samples.sort(a.samples, a.places, [&](int64_t s) { return a.adapters[a.sample_rows[s]]; });
        const int64_t rows = std::max(a.tokens, a.samples), chunks = shrink_chunks(m.widest());
        if ((int64_t)sums.size() < rows * a.lanes * chunks) sums.resize(rows * a.lanes * chunks);
        if ((int64_t)values.size() < rows * a.lanes) values.resize(rows * a.lanes);
        if ((int64_t)halves.size() < 2 * rows * a.lanes) halves.resize(2 * rows * a.lanes);
        of_tokens = &tokens, of_samples = &samples;
        partial = sums.data();
        inner = {values.data(), halves.data(), halves.data() + rows * a.lanes, a.lanes};
        claimed = std::make_unique<std::atomic<int>[]>(m.products());
        for (int64_t i = 0; i < m.products(); i++) claimed[i] = 0;
        return 0;
    }

    // `index` counts products; `count` rows go through this one.
    Product of(int64_t index, int64_t count) const {
        if (!a.adapters) return {};
        const int64_t head = m.products() - 1;
        const bool sampled = index == head || (index > head - 4 && index % 4);  // all that follows the last attention
        const AdapterRows* rows = sampled ? of_samples : of_tokens;
        const Delta* deltas = a.deltas + index * (a.places + 1);
        for (const AdapterRows::Tile& tile : rows->tiles)
            if (deltas[tile.place].a) return {rows, deltas, inner, index < head, index, count};
        return {};
    }

    // The first product of the rows' adapters, shared by all threads, ready when this returns.
    void shrink(const Member& self, const Product& product, const bf16* from, int64_t k) {
        std::atomic<int>& counter = claimed[product.index];
        const AdapterRows& rows = *product.rows;
        int64_t lanes = 0;
        for (const AdapterRows::Tile& tile : rows.tiles) lanes = std::max(lanes, product.deltas[tile.place].lanes);
        const Shrink cut(rows, lanes, k, self.team.size);
        const auto finish = [&](int64_t r) {
            finish_row(product.deltas[rows.places[r]], r, partial, cut.chunks, product.count, product.inner);
        };
        for (int64_t item = counter++; item < cut.items; item = counter++) {
            shrink_item(product.deltas, rows, cut, item, from, k, product.count, partial, a.lanes);
            if (!cut.finishes()) continue;
            const AdapterRows::Tile& tile = rows.tiles[item];
            for (int m = 0; m < tile.count; m++) finish(tile.rows[m]);
        }
        self.team.wait();
        if (cut.finishes()) return;
        self.rows(product.count, [&](int64_t r) {
            if (rows.places[r]) finish(r);
        });
        self.team.wait();
    }

    // What is fetched for adapters while a panel is multiplied, which goes through its columns once per tile of rows.
    Beside& beside(const Product& product, int panel, const Linear& l) const {
        static thread_local Beside fetched;
        const Delta* next = product.index < m.products() - 1 ? product.deltas + a.places + 1 : nullptr;
        fetch_beside(fetched, *product.rows, product.deltas, next, panel, panels(l));
        fetched.spread(l.k / 2 * ((product.count + TILE - 1) / TILE));
        return fetched;
    }

private:
    const StepArgs& a;
    const Model& m;
    const AdapterRows *of_tokens = nullptr, *of_samples = nullptr;
    float* partial = nullptr;
    Inner inner{};
    std::unique_ptr<std::atomic<int>[]> claimed;  // pieces of each product
};

}  // namespace

#endif
