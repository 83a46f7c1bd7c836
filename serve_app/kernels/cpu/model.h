// A decoder as the compiled step sees it, and what one step is given. Mirrored by serve_app/kernels/decoder.py, field by
// field, 8 bytes each.
#pragma once
#include "delta.h"
#include "gemm.h"
#include "mixture.h"

namespace {

struct Norm {
    const float* weight;  // null = absent
    double eps;
};

struct Layer {
    Norm input_norm;
    Linear qkv;  // queries, keys, values
    Norm q_norm, k_norm;  // per head, [head_dim]
    Linear o;
    Norm post_norm;
    Linear gate_up;  // per panel 32 gates, then the 32 ups that belong to them
    Linear down;
    int64_t window;  // 0 = none
    double scale, softcap;
    const Mixture* mixture;  // in the place of gate_up and down, or null
    const float* sinks;      // [q_heads] or null
};

struct Model {
    const Layer* layers;
    const bf16* embedding;  // [vocab, hidden]
    Norm final_norm;
    Linear head;
    int64_t layer_count, vocab, hidden, inner, q_heads, kv_heads, head_dim, rotary_dim;

    // Linears that one pass multiplies with: four of each layer (qkv, o, gate_up, down), then the head.
    int64_t products() const { return 4 * layer_count + 1; }
    // The most inputs that any of them has.
    int64_t widest() const { return std::max({hidden, inner, q_heads * head_dim}); }
};

enum Part { NORMS, LINEARS, ROTARY, ATTENTION, HEAD, PARTS };

struct StepArgs {
    const Model* model;
    bf16* kv;  // [layers, 2, num_blocks, kv_heads, 32, head_dim]
    const int64_t *input_ids, *positions, *slots;
    const int32_t *query_start, *seq_lens, *block_tables;
    const int64_t* sample_rows;
    const float *cos, *sin;  // [rotary_positions, rotary_dim / 2]
    float* logits;           // [samples, vocab]
    int64_t* nanoseconds;    // [PARTS] added up per part, or null
    const int64_t* captured_layers;
    bf16* captured;  // [tokens, captures, hidden] what enters those layers
    const int64_t* embedded;  // per token the row of `given` that takes the embedding's place, -1 for none; or null
    const bf16* given;        // [given_rows, 1 + deep, hidden]; what follows the first is added behind the first layers
    const int64_t* adapters;  // [tokens] the place of each token's adapter, 0 for none; or null
    const Delta* deltas;      // [4 * layers + 1][places + 1] of each product, in the order in which they come
    int64_t* experts_read;    // what the weights of the chosen experts take is added here, in bytes; or null
    int64_t num_blocks, tokens, requests, table_stride, samples, rotary_positions, threads, captures, given_rows;
    int64_t places, lanes;    // `lanes`: the most that any of the deltas has
    int64_t deep;             // fewer than there are layers
};

}  // namespace
