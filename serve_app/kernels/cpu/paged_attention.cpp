// Paged attention for CPU: a batch of prefill chunks and decode steps over a blocked KV cache, plain C ABI.
//
// Work is cut into items (request, KV head, tile of query rows); a row is one (query token, query head of the group).
// The items' cost is a line that is cut evenly among the threads; an item that crosses a cut is finished by merging the
// pieces' online-softmax states (Milakov & Gimelshein, arXiv 1805.02867), so one long request keeps every core busy.
#include <algorithm>
#include <cstddef>
#include <vector>

#include "narrow_tile.h"
#include "wide_tile.h"

namespace {

struct Args {  // mirrored by serve_app/kernels/native.py, field by field, 8 bytes each
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
    if (a.query_start[a.requests] > a.tokens) return 2;
    for (int r = 0; r < a.requests; r++) {
        const int queries = a.query_start[r + 1] - a.query_start[r];
        const int context = a.seq_lens[r];
        if (queries <= 0) continue;
        const int table_used = (context + BLOCK - 1) / BLOCK;
        if (queries > context || table_used > a.table_stride) return 2;
        const int32_t* table = a.block_tables + r * a.table_stride;
        for (int b = 0; b < table_used; b++)
            if (table[b] < 0 || table[b] >= a.num_blocks) return 3;
        const int rows = queries * group;
        for (int head = 0; head < a.kv_heads; head++)
            for (int row = 0; row < rows; row += TILE_ROWS) {
                const int count = std::min(TILE_ROWS, rows - row);
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
    tile.values = tile.keys + plane;
    tile.block_stride = block_stride;
    const int begin = item.first_block + block_begin, end = item.first_block + block_end;
    if (item.rows <= NARROW_ROWS)
        narrow_tile(tile, begin, end, scratch, piece.acc, piece.max, piece.sum);
    else
        wide_tile(tile, begin, end, scratch, piece.acc, piece.max, piece.sum);
}

template <class T>
int run(const Args& a) {
    static thread_local std::vector<Item> items;
    static thread_local std::vector<float> memory;
    static thread_local std::vector<Piece> pieces;
    items.clear();
    int64_t total = 0;
    if (int error = plan(a, items, &total)) return error;
    if (items.empty()) return 0;

    int threads = (int)std::max<int64_t>(1, a.threads);
    if (total < SINGLE_THREAD_COST * threads) threads = 1;
    // Splitting items costs a merge: with plenty of items whole ones balance well enough.
    const bool split = items.size() < 8 * (size_t)threads;

    // Per thread: scratch, the piece being worked on, and two pieces that other threads complete.
    const size_t state = TILE_ROWS * (a.head_dim + 2), per_thread = scratch_floats((int)a.head_dim) + 3 * state;
    memory.resize((size_t)threads * per_thread + 16);
    float* base = (float*)(((uintptr_t)memory.data() + 63) / 64 * 64);
    pieces.assign(2 * (size_t)threads, Piece{-1, nullptr, nullptr, nullptr});
    const Item* list = items.data();
    Piece* unfinished = pieces.data();
    const int count = (int)items.size();

    auto work = [&](int thread) {
        float* scratch = base + thread * per_thread;
        float* states = scratch + scratch_floats((int)a.head_dim);
        const int64_t low = total * thread / threads, high = total * (thread + 1) / threads;
        int saved = 0;
        int i = (int)(std::upper_bound(list, list + count, low, [](int64_t x, const Item& it) { return x < it.start; }) -
                      list) - 1;
        for (; i < count && list[i].start < high; i++) {
            const Item& item = list[i];
            auto cut = [&](int64_t at) {
                const int64_t blocks = (at - item.start + item.per_block - 1) / item.per_block;
                return (int)std::min<int64_t>(std::max<int64_t>(blocks, 0), item.blocks);
            };
            int begin = cut(low), end = cut(high);
            if (!split) {
                if (item.start < low) continue;
                begin = 0, end = item.blocks;
            }
            if (begin >= end) continue;
            const bool whole = begin == 0 && end == item.blocks;
            float* at = states + (whole ? 0 : 1 + saved) * state;
            Piece piece{i, at, at + TILE_ROWS * a.head_dim, at + TILE_ROWS * (a.head_dim + 1)};
            compute<T>(a, item, begin, end, scratch, piece);
            if (whole)
                finish<T>(a, item, &piece, 1);
            else
                unfinished[2 * thread + saved++] = piece;
        }
    };
#ifdef _OPENMP
    if (threads > 1) {
#pragma omp parallel for schedule(static, 1) num_threads(threads)
        for (int thread = 0; thread < threads; thread++) work(thread);
    } else
#endif
        for (int thread = 0; thread < threads; thread++) work(thread);

    // Threads hold consecutive stretches of the line, so the pieces of one item lie next to each other.
    pieces.erase(std::remove_if(pieces.begin(), pieces.end(), [](const Piece& p) { return p.item < 0; }), pieces.end());
    for (size_t i = 0; i < pieces.size();) {
        size_t j = i;
        while (j < pieces.size() && pieces[j].item == pieces[i].item) j++;
        finish<T>(a, list[pieces[i].item], &pieces[i], (int)(j - i));
        i = j;
    }
    return 0;
}

}  // namespace

// Returns 0; 2 for lengths that contradict each other, 3 for a block id outside the cache.
extern "C" int paged_attention(const Args* args) { return args->is_bf16 ? run<bf16>(*args) : run<float>(*args); }

struct WriteArgs {
    char *kv;
    const char *k, *v;
    const int64_t* slots;
    int64_t k_token_stride, k_head_stride, v_token_stride, v_head_stride;  // bytes
    int64_t tokens, kv_heads, row_bytes, num_blocks;
};

// Copies K/V rows of new tokens to their slots. Returns 3 for a slot outside the cache (nothing is written then).
extern "C" int write_kv(const WriteArgs* a) {
    for (int64_t t = 0; t < a->tokens; t++)
        if (a->slots[t] < 0 || a->slots[t] >= a->num_blocks * BLOCK) return 3;
    const int64_t plane = a->num_blocks * a->kv_heads * BLOCK * a->row_bytes;
    for (int64_t t = 0; t < a->tokens; t++) {
        const int64_t block = a->slots[t] / BLOCK, offset = a->slots[t] % BLOCK;
        for (int64_t h = 0; h < a->kv_heads; h++) {
            char* to = a->kv + ((block * a->kv_heads + h) * BLOCK + offset) * a->row_bytes;
            std::memcpy(to, a->k + t * a->k_token_stride + h * a->k_head_stride, a->row_bytes);
            std::memcpy(to + plane, a->v + t * a->v_token_stride + h * a->v_head_stride, a->row_bytes);
        }
    }
    return 0;
}
