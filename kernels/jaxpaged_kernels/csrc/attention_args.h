// What the attention kernels compute: the arguments are those of `paged_attention` in api.py and of
// `rotate_and_write_kv` in rope.py.
#pragma once

#include <cstdint>

#include "linear_args.h"

namespace jaxpaged {

enum class PoolType { kF32, kBF16, kF16, kInt8, kFp8 };

// Keys are attended to in spans of this many positions, counted from the start of the sequence. A query's result over
// each span is computed by itself, and these are then added up in order: so it does not matter who computes which.
inline constexpr int64_t kSpanKeys = 512;

// Query tokens of one row that are attended together, over some of the spans of keys that they see.
struct AttentionTile {
  int32_t row;
  int32_t first_token;     // in q
  int32_t num_tokens;
  int32_t first_position;  // of the first token, in its sequence; below 0 it sees no key
  int32_t first_span, end_span;
  // Where in `AttentionArgs::partials` the result goes; below 0 the tile has all spans, and its result is final.
  int64_t partial;
};

// A tile whose spans were attended apart; those of span `first_span + i` are at partial + i * partial_size.
struct AttentionMerge {
  AttentionTile tile;
  int64_t partial_size;
};

struct AttentionArgs {
  DType dtype;          // of q and out
  PoolType pool_type;
  int64_t num_heads, num_kv_heads, head_dim;
  int64_t num_blocks, block_size, table_width;
  const void* q;         // [T, H, D]
  const void* k_pool;    // [blocks, block_size, KVH, D]
  const void* v_pool;    // [blocks, block_size, KVH, D]
  const float* k_scales;  // [blocks, block_size, KVH] or null
  const float* v_scales;  // [blocks, block_size, KVH] or null
  const float* sinks;     // [H] or null
  const int32_t* block_tables;  // [S, P]
  float scale;
  float soft_cap;  // 0 = none
  int64_t window;  // 0 = none
  void* out;       // [T, H, D]; tokens that are in no tile are left as they are

  // The work: every tile for each KV head, and then, for each KV head, what is merged of it. A task is a tile for
  // `task_heads` KV heads, which divides their number.
  int task_heads;
  const AttentionTile* tiles;
  int64_t num_tiles;
  const AttentionMerge* merges;
  int64_t num_merges;
  float* partials;
};

// Head sizes are padded to a multiple of this inside the kernels: the elements of the widest vector.
inline constexpr int64_t kHeadDimMultiple = 32;

inline int64_t padded_head_dim(int64_t head_dim) {
  return (head_dim + kHeadDimMultiple - 1) / kHeadDimMultiple * kHeadDimMultiple;
}

// Floats of a partial result of one KV head: largest score, sum of weights, and weighted sum of values of each query.
inline int64_t partial_floats(int64_t num_queries, int64_t head_dim) {
  return num_queries * (padded_head_dim(head_dim) + 2);
}

struct RotateAndWriteArgs {
  DType dtype;  // of q, k and v
  PoolType pool_type;
  int64_t num_tokens, num_heads, num_kv_heads, head_dim;
  int64_t num_slots;
  const void* q;         // [T, H, D]
  const void* k;         // [T, KVH, D]
  const void* v;         // [T, KVH, D]
  const float* cos;      // [T, D / 2]
  const float* sin;      // [T, D / 2]
  const int32_t* slots;  // [T]
  void* rotated_q;       // [T, H, D]
  void* k_pool;          // [slots, KVH, D]
  void* v_pool;          // [slots, KVH, D]
  float* k_scales;       // [slots, KVH] or null
  float* v_scales;       // [slots, KVH] or null
};

}  // namespace jaxpaged
