// Scores and weighted sums of so few queries that packing the keys and values would cost more than the products: here
// they go from their blocks into the products through registers. The products and their order are those of
// attention_multiply.h.
#pragma once

#include "attention_pack.h"

namespace jaxpaged::JAXPAGED_ISA::paged {

#if defined(__AVX512F__)
inline constexpr int kMaxDirectRows = 8;
#else
inline constexpr int kMaxDirectRows = 4;
#endif

// scores[r][key] of kRows queries.
template <int kRows, typename Products, typename Stored>
void score_directly(const Source<Products, Stored>& source, const typename Products::Element* q, float* scores) {
  const KeySlots& slots = source.slots;
  const int64_t padded = padded_head_dim(source.head_dim);
  for (int group = slots.first / kLanes * kLanes; group < slots.end; group += kLanes) {
    const Stored* vectors[kLanes];
    find_vectors(source, group, vectors);
    Vec sums[kRows] = {};
    for (int64_t d = 0; d < source.head_dim; d += kLanes * Products::kPerStep) {
      Vec steps[kLanes];
      transposed_keys<Products>(vectors, d, source.head_dim, steps);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          sums[r] = Products::multiply_add(sums[r], q + r * padded + d + i * Products::kPerStep, steps[i]);
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) store(scores + r * kTileKeys + group, sums[r]);
  }
}

// sums[r][d] = factors[r] * sums[r][d] + weights[r][key] * values[key][d] for kRows queries and kVectors vectors of d.
template <int kRows, int kVectors, typename Products, typename Stored>
void add_values_directly(const Source<Products, Stored>& source, int64_t d, const typename Products::Element* weights,
                         const float* factors, float* sums) {
  const int64_t padded = padded_head_dim(source.head_dim);
  Vec sum[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) sum[r][v] = load(sums + r * padded + d + v * kLanes) * splat(factors[r]);
  }
  for (int key = source.first_key(); key < source.slots.end; key += Products::kPerStep) {
    const Stored* vectors[Products::kPerStep];
    find_vectors(source, key, vectors);
    Vec values[kVectors];
    paired_values<kVectors, Products>(vectors, d, source.head_dim, values);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        sum[r][v] = Products::multiply_add(sum[r][v], weights + r * kTileKeys + key, values[v]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) store(sums + r * padded + d + v * kLanes, sum[r][v]);
  }
}

template <int kRows, typename Products, typename Stored>
void add_values_directly(const Source<Products, Stored>& source, const typename Products::Element* weights,
                         const float* factors, float* sums) {
  constexpr int kVectors = kRows <= kTileRows ? kTileVectors : 2;
  int64_t d = 0;
  for (; d + kVectors * kLanes <= source.head_dim; d += kVectors * kLanes) {
    add_values_directly<kRows, kVectors>(source, d, weights, factors, sums);
  }
  for (; d < source.head_dim; d += 2 * kLanes) add_values_directly<kRows, 2>(source, d, weights, factors, sums);
}

}  // namespace jaxpaged::JAXPAGED_ISA::paged
