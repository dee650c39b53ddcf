// Keys and values of a tile of positions, taken from their blocks and packed for attention_multiply.h.
#pragma once

#include <algorithm>
#include <type_traits>

#include "attention_args.h"
#include "attention_multiply.h"

namespace jaxpaged::JAXPAGED_ISA::paged {

// Positions whose scores are computed, and then whose values are added up, at a time; tiles start at multiples of it.
inline constexpr int kTileKeys = 64;
static_assert(kSpanKeys % kTileKeys == 0 && kTileKeys % kLanes == 0);

// Where a tile's keys and values are: first element of each position's vector in the pools, and its scale. Positions
// outside [first, end) are not read: they may never have been written, or belong to another sequence by now.
struct KeySlots {
  int first = 0, end = 0;  // from the start of the tile
  int64_t element[kTileKeys];
  int64_t scale[kTileKeys];
};

inline void find_slots(const AttentionArgs& args, int32_t row, int64_t tile_start, int kv_head, KeySlots& slots) {
  const int32_t* const table = args.block_tables + row * args.table_width;
  int64_t block = (tile_start + slots.first) / args.block_size;
  int64_t offset = (tile_start + slots.first) % args.block_size;
  for (int i = slots.first; i < slots.end; ++block, offset = 0) {
    // An id outside of the pool, which only a broken table has, must not reach memory that is not the pool's.
    const int64_t id = std::clamp<int64_t>(table[block], 0, args.num_blocks - 1);
    for (; offset < args.block_size && i < slots.end; ++offset, ++i) {
      slots.scale[i] = (id * args.block_size + offset) * args.num_kv_heads + kv_head;
      slots.element[i] = slots.scale[i] * args.head_dim;
    }
  }
}

// The elements [d, d + kLanes * kPerStep) of a vector of `size`; zeros behind its end.
template <typename Products, typename Stored>
inline Vec elements_at(const Stored* vector, int64_t d, int64_t size) {
  using Element = typename Products::Element;
  constexpr int kVector = kLanes * Products::kPerStep;
  if (d + kVector <= size) return load_elements<Element>(vector + d);
  Stored rest[kVector] = {};
  if (d < size) std::memcpy(rest, vector + d, (size - d) * sizeof(Stored));
  return load_elements<Element>(rest);
}

// Has a vector of the pool fetched into the caches; the second one, where more of them can be under way at a time.
template <typename Stored>
inline void prefetch(const Stored* vector, int64_t size) {
  const char* const bytes = reinterpret_cast<const char*>(vector);
  for (int64_t i = 0; i < size * static_cast<int64_t>(sizeof(Stored)); i += 64) __builtin_prefetch(bytes + i, 0, 2);
}

// A pool to take a tile from, which is mostly waiting for memory: meanwhile the tile after it, `next`, is fetched.
template <typename Products, typename Stored>
struct Source {
  const Stored* pool;
  int64_t head_dim;
  const KeySlots& slots;
  const KeySlots& next;
  const Stored* zeros;  // [head_dim], for positions that are not read

  const Stored* vector(int key) const {
    if (key >= next.first && key < next.end) prefetch(pool + next.element[key], head_dim);
    return key >= slots.first && key < slots.end ? pool + slots.element[key] : zeros;
  }
  int first_key() const { return slots.first / Products::kPerStep * Products::kPerStep; }
};

// Steps [d, d + kLanes * kPerStep) of the keys at `vectors`: in each vector a step, in each lane a key.
template <typename Products, typename Stored>
inline void transposed_keys(const Stored* const (&vectors)[kLanes], int64_t d, int64_t head_dim, Vec (&steps)[kLanes]) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) steps[i] = elements_at<Products>(vectors[i], d, head_dim);
  transpose(steps);
}

// Elements [d, d + kVectors * kLanes) of a step of values, in each lane one, or one of each of two positions.
template <int kVectors, typename Products, typename Stored>
inline void paired_values(const Stored* const (&vectors)[Products::kPerStep], int64_t d, int64_t head_dim,
                          Vec (&values)[kVectors]) {
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; v += Products::kPerStep) {
    const Vec first = elements_at<Products>(vectors[0], d + v * kLanes, head_dim);
    if constexpr (Products::kPerStep == 1) {
      values[v] = first;
    } else {
      const Pairs pairs = zip(first, elements_at<Products>(vectors[1], d + v * kLanes, head_dim));
      values[v] = pairs.low;
      values[v + 1] = pairs.high;
    }
  }
}

// The vectors of kCount positions from `key` on.
template <int kCount, typename Products, typename Stored>
inline void find_vectors(const Source<Products, Stored>& source, int key, const Stored* (&vectors)[kCount]) {
  for (int i = 0; i < kCount; ++i) vectors[i] = source.vector(key + i);
}

// The packed keys: steps of head_dim, each with all positions of the tile.
template <typename Products, typename Stored>
void pack_keys(const Source<Products, Stored>& source, typename Products::Element* packed) {
  constexpr int kStep = kTileKeys * Products::kPerStep;
  const KeySlots& slots = source.slots;
  for (int group = slots.first / kLanes * kLanes; group < slots.end; group += kLanes) {
    const Stored* vectors[kLanes];
    find_vectors(source, group, vectors);
    for (int64_t d = 0; d < source.head_dim; d += kLanes * Products::kPerStep) {
      Vec steps[kLanes];
      transposed_keys<Products>(vectors, d, source.head_dim, steps);
      typename Products::Element* const to = packed + d * kTileKeys + group * Products::kPerStep;
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) std::memcpy(to + i * kStep, &steps[i], sizeof(Vec));
    }
  }
}

// The packed values: steps of positions, each with all of head_dim.
template <typename Products, typename Stored>
void pack_values(const Source<Products, Stored>& source, typename Products::Element* packed) {
  constexpr int kVectors = Products::kPerStep;
  const int64_t padded = padded_head_dim(source.head_dim);
  for (int key = source.first_key(); key < source.slots.end; key += Products::kPerStep) {
    const Stored* vectors[Products::kPerStep];
    find_vectors(source, key, vectors);
    typename Products::Element* const to = packed + key * padded;
    for (int64_t d = 0; d < source.head_dim; d += kVectors * kLanes) {
      Vec values[kVectors];
      paired_values<kVectors, Products>(vectors, d, source.head_dim, values);
      std::memcpy(to + d * Products::kPerStep, values, sizeof values);
    }
  }
}

// The scales of all positions of a tile; 0 for those that are not read.
inline void pack_scales(const float* scales, const KeySlots& slots, float (&packed)[kTileKeys]) {
  for (int i = 0; i < kTileKeys; ++i) packed[i] = i >= slots.first && i < slots.end ? scales[slots.scale[i]] : 0.0f;
}

}  // namespace jaxpaged::JAXPAGED_ISA::paged
