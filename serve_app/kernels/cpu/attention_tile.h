// What the two inner loops of paged attention share: one KV head and one tile of query rows.
#pragma once
#include <algorithm>
#include <type_traits>

#include "simd.h"

namespace {
using namespace simd;

constexpr int BLOCK = 32;               // tokens per KV block
constexpr int TILE_ROWS = 2 * LANES;    // query rows of a wide tile
constexpr int NARROW_ROWS = TILE_ROWS * 3 / 4;  // below that a wide tile computes too many rows that are not there
// Up to as many queries of one request are drafts under verification. They stay in narrow tiles, in which a row's result
// does not depend on how many others there are: drafts change nothing, not even the last bit.
constexpr int VERIFIED_QUERIES = 32;
constexpr int UNROLL = LANES == 16 ? 8 : 4;  // accumulators = 2 * UNROLL must fit the register file

template <class T>
struct Tile {
    const T* q[TILE_ROWS];
    int first[TILE_ROWS], last[TILE_ROWS];  // key positions a row sees, both ends included
    int rows, dim;
    float scale, softcap;
    const int32_t* table;
    const T *keys, *values;  // block 0 of this KV head
    int64_t block_stride;    // elements
};

template <class T>
constexpr bool pairs = HAS_BF16_DOT && std::is_same<T, bf16>::value;

inline int64_t scratch_floats(int dim) {
    return (int64_t)TILE_ROWS * dim * 2 + 2 * BLOCK * dim + BLOCK * TILE_ROWS + 8 * TILE_ROWS;
}

inline vfloat logit(vfloat score, float scale, float softcap) {
    score *= scale;
    return softcap > 0 ? softcap * vtanh(score / softcap) : score;
}

template <class T>
inline bool needs_mask(const Tile<T>& tile, int block) {
    // Rows come in order of position: the first row ends first, the last row starts last.
    return tile.last[0] < block * BLOCK + BLOCK - 1 || tile.first[tile.rows - 1] > block * BLOCK;
}

inline void prefetch(const void* at, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char*)at + i, 0, 2);
}

}  // namespace
