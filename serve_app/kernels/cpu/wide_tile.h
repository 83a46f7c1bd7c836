// Prefill: a tile of many query rows. The queries are transposed, so that lanes run over query rows: K and V are
// broadcast from their natural layout and the softmax needs no operation across lanes.
#pragma once
#include "attention_tile.h"

namespace {

// scores[t][row] (t < 32) from transposed queries; `qt` holds [dim][TILE_ROWS] floats or [dim/2][TILE_ROWS] bf16 pairs.
template <class T>
inline void wide_scores(const float* qt, const void* operand, int dim, float* scores) {
    for (int t = 0; t < BLOCK; t += UNROLL) {
        vfloat acc[UNROLL][2] = {};
#if HAS_BF16_DOT
        if constexpr (pairs<T>) {
            for (int d = 0; d < dim; d += 2) {
                __m512i q0 = _mm512_loadu_si512(qt + d / 2 * TILE_ROWS), q1 = _mm512_loadu_si512(qt + d / 2 * TILE_ROWS + 16);
                for (int j = 0; j < UNROLL; j++) {
                    int32_t pair;
                    std::memcpy(&pair, (const bf16*)operand + (int64_t)(t + j) * dim + d, 4);
                    __m512i k = _mm512_set1_epi32(pair);
                    acc[j][0] = dot_pairs(acc[j][0], q0, k);
                    acc[j][1] = dot_pairs(acc[j][1], q1, k);
                }
            }
        } else
#endif
            for (int d = 0; d < dim; d++) {
                vfloat q0 = load(qt + d * TILE_ROWS), q1 = load(qt + d * TILE_ROWS + LANES);
                for (int j = 0; j < UNROLL; j++) {
                    const float k = ((const float*)operand)[(int64_t)(t + j) * dim + d];
                    acc[j][0] += q0 * k;
                    acc[j][1] += q1 * k;
                }
            }
        for (int j = 0; j < UNROLL; j++) {
            store(scores + (t + j) * TILE_ROWS, acc[j][0]);
            store(scores + (t + j) * TILE_ROWS + LANES, acc[j][1]);
        }
    }
}

// acc[d][row] += sum over t of V[t][d] * p[t][row]; with bf16 pairs both operands hold two tokens per 32-bit lane.
template <bool PAIRS>
inline void wide_values(const float* p, const float* values, int steps, int dim, float* acc) {
    for (int d = 0; d < dim; d += UNROLL) {
        vfloat sum[UNROLL][2];
        for (int j = 0; j < UNROLL; j++) {
            sum[j][0] = load(acc + (d + j) * TILE_ROWS);
            sum[j][1] = load(acc + (d + j) * TILE_ROWS + LANES);
        }
        for (int t = 0; t < steps; t++) {
            vfloat p0 = load(p + t * TILE_ROWS), p1 = load(p + t * TILE_ROWS + LANES);
            for (int j = 0; j < UNROLL; j++) {
                vfloat v = splat(0) + values[(int64_t)t * dim + d + j];
#if HAS_BF16_DOT
                if constexpr (PAIRS) {
                    int32_t pair;
                    std::memcpy(&pair, values + (int64_t)t * dim + d + j, 4);
                    sum[j][0] = dot_pairs(sum[j][0], (__m512i)p0, _mm512_set1_epi32(pair));
                    sum[j][1] = dot_pairs(sum[j][1], (__m512i)p1, _mm512_set1_epi32(pair));
                    continue;
                }
#endif
                sum[j][0] += p0 * v;
                sum[j][1] += p1 * v;
            }
        }
        for (int j = 0; j < UNROLL; j++) {
            store(acc + (d + j) * TILE_ROWS, sum[j][0]);
            store(acc + (d + j) * TILE_ROWS + LANES, sum[j][1]);
        }
    }
}

template <class T>
inline void transpose_queries(const Tile<T>& tile, float* qt) {
    std::memset(qt, 0, sizeof(float) * TILE_ROWS * tile.dim);
    for (int m = 0; m < tile.rows; m++) {
        if constexpr (pairs<T>) {
            for (int d = 0; d < tile.dim; d += 2) std::memcpy(qt + d / 2 * TILE_ROWS + m, tile.q[m] + d, 4);
        } else {
            for (int d = 0; d < tile.dim; d += LANES) {
                vfloat q = load(tile.q[m] + d);
                for (int j = 0; j < LANES; j++) qt[(d + j) * TILE_ROWS + m] = q[j];
            }
        }
    }
}

inline void widen(const bf16* from, float* to, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES) store(to + i, load(from + i));
}

// Turns scores[32][rows] into weights in place, moves max/sum on and leaves the factor for acc in `shrink`.
// Returns whether any factor differs from 1.
template <class T>
inline bool wide_softmax(const Tile<T>& tile, int block, const int32_t* first, const int32_t* last, float* scores,
                         float* max, float* sum, float* shrink) {
    const bool masked = needs_mask(tile, block);
    bool moved = false;
    for (int half = 0; half < TILE_ROWS; half += LANES) {
        vint low, high;
        std::memcpy(&low, first + half, sizeof low);
        std::memcpy(&high, last + half, sizeof high);
        const vfloat before = load(max + half);
        vfloat top = before;
        for (int t = 0; t < BLOCK; t++) {
            vfloat x = logit(load(scores + t * TILE_ROWS + half), tile.scale, tile.softcap);
            if (masked) {
                const int key = block * BLOCK + t;
                x = (high >= key) & (low <= key) ? x : splat(-INFINITY);
            }
            store(scores + t * TILE_ROWS + half, x);
            top = vmax(x, top);
        }
        vfloat total = {};
        for (int t = 0; t < BLOCK; t++) {
            vfloat e = vexp(load(scores + t * TILE_ROWS + half) - top);
            store(scores + t * TILE_ROWS + half, e);
            total += e;
        }
        const vfloat factor = vexp(before - top);
        store(shrink + half, factor);
        store(max + half, top);
        store(sum + half, load(sum + half) * factor + total);
        for (int j = 0; j < LANES; j++) moved |= factor[j] != 1.f;
    }
    return moved;
}

// Same contract as narrow_tile.
template <class T>
void wide_tile(const Tile<T>& tile, int begin, int end, float* scratch, float* acc, float* max, float* sum) {
    const int rows = tile.rows, dim = tile.dim;
    float* qt = scratch;
    float* acct = qt + TILE_ROWS * dim;  // [dim, TILE_ROWS]
    float* key_copy = acct + TILE_ROWS * dim;
    float* value_copy = key_copy + BLOCK * dim;
    float* scores = value_copy + BLOCK * dim;
    float* tops = scores + BLOCK * TILE_ROWS;
    float* sums = tops + TILE_ROWS;
    float* shrink = sums + TILE_ROWS;
    int32_t first[TILE_ROWS], last[TILE_ROWS];
    for (int m = 0; m < TILE_ROWS; m++) {
        first[m] = tile.first[std::min(m, rows - 1)];
        last[m] = tile.last[std::min(m, rows - 1)];
    }
    transpose_queries(tile, qt);
    std::fill(acct, acct + TILE_ROWS * dim, 0.f);
    std::fill(tops, tops + TILE_ROWS, -1e30f);
    std::fill(sums, sums + TILE_ROWS, 0.f);
    for (int b = begin; b < end; b++) {
        const T* keys = tile.keys + tile.table[b] * tile.block_stride;
        const T* values = tile.values + tile.table[b] * tile.block_stride;
        const int valid = std::min(BLOCK, tile.last[rows - 1] + 1 - b * BLOCK);  // what lies behind may hold anything
        const void* key_operand = keys;
        const float* value_operand = (const float*)values;
        if constexpr (std::is_same<T, bf16>::value && !pairs<T>) {
            widen(keys, key_copy, (int64_t)BLOCK * dim);
            widen(values, value_copy, (int64_t)BLOCK * dim);
            key_operand = key_copy;
            value_operand = value_copy;
        }
        wide_scores<T>(qt, key_operand, dim, scores);
        if (wide_softmax(tile, b, first, last, scores, tops, sums, shrink))
            for (int half = 0; half < TILE_ROWS; half += LANES) {
                const vfloat factor = load(shrink + half);
                for (int d = 0; d < dim; d++)
                    store(acct + d * TILE_ROWS + half, load(acct + d * TILE_ROWS + half) * factor);
            }
        int steps = valid;
#if HAS_BF16_DOT
        if constexpr (pairs<T>) {
            steps = (valid + 1) / 2;
            for (int t = 0; t < valid; t += 2) {
                for (int d = 0; d < dim; d += 16) {
                    __m256i even = _mm256_loadu_si256((const __m256i*)(values + (int64_t)t * dim + d));
                    __m256i odd = t + 1 < valid
                                      ? _mm256_loadu_si256((const __m256i*)(values + (int64_t)(t + 1) * dim + d))
                                      : _mm256_setzero_si256();
                    _mm512_storeu_si512(value_copy + t / 2 * dim + d, interleave(even, odd));
                }
                for (int half = 0; half < TILE_ROWS; half += LANES)
                    _mm512_storeu_si512(scores + t / 2 * TILE_ROWS + half,
                                        interleave(to_bf16(load(scores + t * TILE_ROWS + half)),
                                                   to_bf16(load(scores + (t + 1) * TILE_ROWS + half))));
            }
            value_operand = value_copy;
        }
#endif
        wide_values<pairs<T>>(scores, value_operand, steps, dim, acct);
    }
    for (int m = 0; m < rows; m++) {
        for (int d = 0; d < dim; d++) acc[m * dim + d] = acct[d * TILE_ROWS + m];
        max[m] = tops[m];
        sum[m] = sums[m];
    }
}

}  // namespace
