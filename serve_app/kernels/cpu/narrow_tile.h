// Decode: a tile of few query rows. Each K row is dotted with each query row; V is read once for up to four rows.
#pragma once
#include "attention_tile.h"

namespace {

// scores[32] = q . K for one row.
template <class T, int DIM>
inline void row_scores(const T* q, const float* qf, const T* keys, int any_dim, float* scores) {
    const int dim = DIM ? DIM : any_dim;
    for (int t = 0; t < BLOCK; t += LANES) {
        vfloat acc[LANES];
        for (int j = 0; j < LANES; j++) {
            const T* k = keys + (int64_t)(t + j) * dim;
            vfloat v = {};
#if HAS_BF16_DOT
            if constexpr (pairs<T>) {
                int d = 0;
                for (; d + 32 <= dim; d += 32) v = dot_pairs(v, _mm512_loadu_si512(q + d), _mm512_loadu_si512(k + d));
                if (d < dim)
                    v = dot_pairs(v, _mm512_maskz_loadu_epi16(0xffff, q + d), _mm512_maskz_loadu_epi16(0xffff, k + d));
            } else
#endif
                for (int d = 0; d < dim; d += LANES) v += load(qf + d) * load(k + d);
            acc[j] = v;
        }
        store(scores + t, sum_each(acc));
    }
}

// acc[m][dim] += p[m][32] . V for up to NARROW_ROWS rows; tokens from `valid` on hold anything and are not read.
template <class T, int DIM, int ROWS>
inline void row_values(const float* p, const T* values, int valid, int any_dim, float* acc) {
    const int dim = DIM ? DIM : any_dim;
#if HAS_BF16_DOT
    if constexpr (pairs<T>) {
        int32_t weight[ROWS][BLOCK / 2];
        for (int m = 0; m < ROWS; m++)
            for (int t = 0; t < BLOCK; t += 16) {
                __m256i w = to_bf16(load(p + m * BLOCK + t));
                std::memcpy(&weight[m][t / 2], &w, sizeof w);
            }
        for (int d = 0; d < dim; d += 16) {
            vfloat sum[ROWS];
            for (int m = 0; m < ROWS; m++) sum[m] = load(acc + m * dim + d);
            const bf16* at = values + d;
            int t = 0;
            for (; t + 1 < valid; t += 2, at += 2 * dim) {
                __m512i v = interleave(_mm256_loadu_si256((const __m256i*)at),
                                       _mm256_loadu_si256((const __m256i*)(at + dim)));
                for (int m = 0; m < ROWS; m++) sum[m] = dot_pairs(sum[m], _mm512_set1_epi32(weight[m][t / 2]), v);
            }
            if (t < valid) {
                __m512i v = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)at));
                for (int m = 0; m < ROWS; m++) sum[m] = dot_pairs(sum[m], _mm512_set1_epi32(weight[m][t / 2]), v);
            }
            for (int m = 0; m < ROWS; m++) store(acc + m * dim + d, sum[m]);
        }
        return;
    }
#endif
    for (int d = 0; d < dim; d += LANES) {
        vfloat sum[ROWS];
        for (int m = 0; m < ROWS; m++) sum[m] = load(acc + m * dim + d);
        for (int t = 0; t < valid; t++) {
            vfloat v = load(values + (int64_t)t * dim + d);
            for (int m = 0; m < ROWS; m++) sum[m] += p[m * BLOCK + t] * v;
        }
        for (int m = 0; m < ROWS; m++) store(acc + m * dim + d, sum[m]);
    }
}

template <class T, int DIM>
inline void any_row_values(int rows, const float* p, const T* values, int valid, int dim, float* acc) {
    for (; rows >= 4; rows -= 4, p += 4 * BLOCK, acc += 4 * dim) row_values<T, DIM, 4>(p, values, valid, dim, acc);
    if (rows == 3) row_values<T, DIM, 3>(p, values, valid, dim, acc);
    if (rows == 2) row_values<T, DIM, 2>(p, values, valid, dim, acc);
    if (rows == 1) row_values<T, DIM, 1>(p, values, valid, dim, acc);
}

// Online softmax over blocks [begin, end). Outputs, unnormalised: acc [rows, dim], max [rows], sum [rows].
template <class T, int DIM>
void narrow_tile_of(const Tile<T>& tile, int begin, int end, float* scratch, float* acc, float* max, float* sum) {
    const int rows = tile.rows, dim = DIM ? DIM : tile.dim;
    float* p = scratch;                     // [rows, 32]
    float* qf = scratch + BLOCK * TILE_ROWS;  // [rows, dim] when there is no bf16 dot product
    if (!pairs<T>)
        for (int m = 0; m < rows; m++)
            for (int d = 0; d < dim; d += LANES) store(qf + m * dim + d, load(tile.q[m] + d));
    std::fill(acc, acc + rows * dim, 0.f);
    std::fill(max, max + rows, -1e30f);
    std::fill(sum, sum + rows, 0.f);
    for (int b = begin; b < end; b++) {
        const T* keys = tile.keys + tile.table[b] * tile.block_stride;
        const T* values = tile.values + tile.table[b] * tile.block_stride;
        prefetch(values, (int64_t)BLOCK * dim * sizeof(T));
        const bool masked = needs_mask(tile, b);
        for (int m = 0; m < rows; m++) {
            float* s = p + m * BLOCK;
            row_scores<T, DIM>(tile.q[m], qf + m * dim, keys, dim, s);
            vfloat top = splat(max[m]);
            for (int t = 0; t < BLOCK; t += LANES) {
                vfloat x = logit(load(s + t), tile.scale, tile.softcap);
                if (masked) {
                    vint key;
                    for (int j = 0; j < LANES; j++) key[j] = b * BLOCK + t + j;
                    x = (key <= tile.last[m]) & (key >= tile.first[m]) ? x : splat(-INFINITY);
                }
                store(s + t, x);
                top = vmax(x, top);
            }
            const float peak = hmax(top);
            if (peak > max[m]) {
                const float shrink = std::exp(max[m] - peak);
                for (int d = 0; d < dim; d += LANES) store(acc + m * dim + d, load(acc + m * dim + d) * shrink);
                sum[m] *= shrink;
                max[m] = peak;
            }
            vfloat total = {};
            for (int t = 0; t < BLOCK; t += LANES) {
                vfloat e = vexp(load(s + t) - peak);
                store(s + t, e);
                total += e;
            }
            sum[m] += hsum(total);
        }
        if (b + 1 < end) prefetch(tile.keys + tile.table[b + 1] * tile.block_stride, (int64_t)BLOCK * dim * sizeof(T));
        any_row_values<T, DIM>(rows, p, values, std::min(BLOCK, tile.last[rows - 1] + 1 - b * BLOCK), dim, acc);
    }
}

// The usual head sizes get their own code: loops of known length are unrolled, which halves the time at 64.
template <class T>
void narrow_tile(const Tile<T>& tile, int begin, int end, float* scratch, float* acc, float* max, float* sum) {
    if (tile.dim == 64) return narrow_tile_of<T, 64>(tile, begin, end, scratch, acc, max, sum);
    if (tile.dim == 128) return narrow_tile_of<T, 128>(tile, begin, end, scratch, acc, max, sum);
    narrow_tile_of<T, 0>(tile, begin, end, scratch, acc, max, sum);
}

}  // namespace
