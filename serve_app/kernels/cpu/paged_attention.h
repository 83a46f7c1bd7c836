// Paged attention for CPU: a batch of prefill chunks and decode steps over a blocked KV cache.
//
// Work is cut into items (request, KV head, tile of query rows); a row is one (query token, query head of the group).
// The items' cost is a line that is cut evenly among the threads; an item that crosses a cut is finished by merging the
// pieces' online-softmax states (Milakov & Gimelshein, arXiv 1805.02867), so one long request keeps every core busy.
#pragma once
#include <algorithm>
#include <cstddef>
#include <vector>

#include "narrow_tile.h"
#include "wide_tile.h"

namespace {

struct Args {  // mirrored by serve_app/kernels/library/native.py, field by field, 8 bytes each
    const void* q;
    const void* kv;
    void* out;
    const int32_t* query_start;
    const int32_t* seq_lens;
    const int32_t* block_tables;
    const float* sinks;  // [q_heads] or null
    int64_t q_token_stride, q_head_stride;  // elements
    int64_t requests, tokens, q_heads, kv_heads, head_dim, num_blocks, table_stride;
    int64_t window;  // 0 = none
    int64_t is_bf16, threads;
    double scale, softcap;  // softcap 0 = none
    int64_t shared;  // whether keys are their own values
};

struct Item {
    int32_t request, kv_head, first_row, rows;
    int32_t first_block, blocks;
    int64_t start;      // where the item begins on the line of costs
    int64_t per_block;  // cost of one block
};

struct Piece {  // the softmax state of one item over some of its blocks
    int item;
    float* acc;  // [rows, head_dim]
    float* max;  // [rows]
    float* sum;  // [rows]
};

constexpr int64_t SINGLE_THREAD_COST = 400;  // below roughly 10 us waking the other threads costs more than it saves

int plan(const Args& a, std::vector<Item>& items, int64_t* total) {
    const int group = (int)(a.q_heads / a.kv_heads);
    int64_t cost = 0;
    for (int r = 0; r < a.requests; r++) {
        const int queries = a.query_start[r + 1] - a.query_start[r];
        const int context = a.seq_lens[r];
        if (a.query_start[r] < 0 || a.query_start[r + 1] > a.tokens) return 2;
        if (queries <= 0) continue;
        const int table_used = (context + BLOCK - 1) / BLOCK;
        if (queries > context || table_used > a.table_stride) return 2;
        const int32_t* table = a.block_tables + r * a.table_stride;
        for (int b = 0; b < table_used; b++)
            if (table[b] < 0 || table[b] >= a.num_blocks) return 3;
        const int rows = queries * group, step = queries <= VERIFIED_QUERIES ? NARROW_ROWS : TILE_ROWS;
        for (int head = 0; head < a.kv_heads; head++)
            for (int row = 0; row < rows; row += step) {
                const int count = std::min(step, rows - row);
                const int first = context - queries + row / group, last = context - queries + (row + count - 1) / group;
                const int first_block = a.window > 0 ? (int)std::max<int64_t>(0, first - a.window + 1) / BLOCK : 0;
                const int blocks = last / BLOCK + 1 - first_block;
                const int64_t per_block = (count <= NARROW_ROWS ? 4 + count : 40) * a.head_dim / 16;
                items.push_back({r, head, row, count, first_block, blocks, cost, per_block});
                cost += per_block * blocks;
            }
    }
    *total = cost;
    return 0;
}

// Merges the pieces of one item, adds the sink to the denominator and writes the rows.
template <class T>
void finish(const Args& a, const Item& item, const Piece* pieces, int count) {
    const int group = (int)(a.q_heads / a.kv_heads), dim = (int)a.head_dim;
    for (int m = 0; m < item.rows; m++) {
        const int row = item.first_row + m, head = item.kv_head * group + row % group;
        const int64_t token = a.query_start[item.request] + row / group;
        float top = a.sinks ? a.sinks[head] : -1e30f;
        for (int p = 0; p < count; p++) top = std::max(top, pieces[p].max[m]);
        float total = a.sinks ? std::exp(a.sinks[head] - top) : 0.f;
        for (int p = 0; p < count; p++) total += pieces[p].sum[m] * std::exp(pieces[p].max[m] - top);
        T* out = (T*)a.out + (token * a.q_heads + head) * dim;
        const float inverse = total > 0 ? 1.f / total : 0.f;
        for (int d = 0; d < dim; d += LANES) {
            vfloat v = {};
            for (int p = 0; p < count; p++)
                v += load(pieces[p].acc + (size_t)m * dim + d) * (std::exp(pieces[p].max[m] - top) * inverse);
            store(out + d, v);
        }
    }
}

template <class T>
void compute(const Args& a, const Item& item, int block_begin, int block_end, float* scratch, const Piece& piece) {
    const int group = (int)(a.q_heads / a.kv_heads), dim = (int)a.head_dim;
    const int64_t block_stride = a.kv_heads * BLOCK * dim, plane = a.num_blocks * block_stride;
    const int queries = a.query_start[item.request + 1] - a.query_start[item.request];
    Tile<T> tile;
    tile.rows = item.rows;
    tile.dim = dim;
    tile.scale = (float)a.scale;
    tile.softcap = (float)a.softcap;
    for (int m = 0; m < item.rows; m++) {
        const int row = item.first_row + m;
        const int64_t token = a.query_start[item.request] + row / group, head = item.kv_head * group + row % group;
        tile.q[m] = (const T*)a.q + token * a.q_token_stride + head * a.q_head_stride;
        const int position = a.seq_lens[item.request] - queries + row / group;
        tile.last[m] = position;
        tile.first[m] = a.window > 0 ? (int)std::max<int64_t>(0, position - a.window + 1) : 0;
    }
    tile.table = a.block_tables + item.request * a.table_stride;
    tile.keys = (const T*)a.kv + (int64_t)item.kv_head * BLOCK * dim;
    tile.values = a.shared ? tile.keys : tile.keys + plane;
    tile.block_stride = block_stride;
    const int begin = item.first_block + block_begin, end = item.first_block + block_end;
    if (item.rows <= NARROW_ROWS)
        narrow_tile(tile, begin, end, scratch, piece.acc, piece.max, piece.sum);
    else
        wide_tile(tile, begin, end, scratch, piece.acc, piece.max, piece.sum);
}

// One batch's attention for any number of layers: planned once, worked on by a team of threads, then merged.
template <class T>
class Attention {
public:
    // Returns 0, 2 for lengths that contradict each other, 3 for a block id outside the cache. `warm`: the threads wait
    // in a loop already, so that even little work is worth sharing.
    int prepare(const Args& a, int threads, bool warm) {
        items_.clear();
        total_ = 0;
        if (int error = plan(a, items_, &total_)) return error;
        threads_ = std::max(1, threads);
        if (items_.empty() || (!warm && total_ < SINGLE_THREAD_COST * threads_)) threads_ = 1;
        // Splitting items costs a merge: with plenty of items whole ones balance well enough.
        split_ = items_.size() < 8 * (size_t)threads_;
        // Per thread: scratch, the piece being worked on, and two pieces that other threads complete.
        state_ = TILE_ROWS * (a.head_dim + 2);
        per_thread_ = scratch_floats((int)a.head_dim) + 3 * state_;
        memory_.resize((size_t)threads_ * per_thread_ + 16);
        pieces_.resize(2 * (size_t)threads_);
        return 0;
    }

    int threads() const { return threads_; }
    bool split() const { return split_; }

    // Thread `thread` of threads(): its even share of the line of costs.
    void work(const Args& a, int thread) {
        float* base = (float*)(((uintptr_t)memory_.data() + 63) / 64 * 64);
        float* scratch = base + thread * per_thread_;
        float* states = scratch + scratch_floats((int)a.head_dim);
        Piece* unfinished = pieces_.data() + 2 * thread;
        unfinished[0].item = unfinished[1].item = -1;
        const Item* list = items_.data();
        const int count = (int)items_.size();
        const int64_t low = total_ * thread / threads_, high = total_ * (thread + 1) / threads_;
        int saved = 0;
        int i = (int)(std::upper_bound(list, list + count, low, [](int64_t x, const Item& it) { return x < it.start; }) -
                      list) - 1;
        for (i = std::max(i, 0); i < count && list[i].start < high; i++) {
            const Item& item = list[i];
            auto cut = [&](int64_t at) {
                const int64_t blocks = (at - item.start + item.per_block - 1) / item.per_block;
                return (int)std::min<int64_t>(std::max<int64_t>(blocks, 0), item.blocks);
            };
            int begin = cut(low), end = cut(high);
            if (!split_) {
                if (item.start < low) continue;
                begin = 0, end = item.blocks;
            }
            if (begin >= end) continue;
            const bool whole = begin == 0 && end == item.blocks;
            float* at = states + (whole ? 0 : 1 + saved) * state_;
            Piece piece{i, at, at + TILE_ROWS * a.head_dim, at + TILE_ROWS * (a.head_dim + 1)};
            compute<T>(a, item, begin, end, scratch, piece);
            if (whole)
                finish<T>(a, item, &piece, 1);
            else
                unfinished[saved++] = piece;
        }
    }

    // After all threads' work, by one of them.
    void merge(const Args& a) {
        // Threads hold consecutive stretches of the line, so the pieces of one item lie next to each other.
        const Piece* end = std::remove_if(pieces_.data(), pieces_.data() + pieces_.size(), [](const Piece& p) { return p.item < 0; });
        for (const Piece* p = pieces_.data(); p < end;) {
            const Piece* q = p;
            while (q < end && q->item == p->item) q++;
            finish<T>(a, items_[p->item], p, (int)(q - p));
            p = q;
        }
    }

private:
    std::vector<Item> items_;
    std::vector<float> memory_;
    std::vector<Piece> pieces_;
    int64_t total_ = 0, state_ = 0, per_thread_ = 0;
    int threads_ = 1;
    bool split_ = false;
};

}  // namespace
