// The rows of x as operands of products with quantized weights: each block of 32 inputs of a token becomes 8-bit integers
// q = round(x / scale) with scale = largest |x| / 127, so that a block's products add up exactly in 32-bit integers.
//
// Tokens are packed in tiles, as they are multiplied: for each block of inputs one record with the values of all tokens of the
// tile, then their scales, then their corrections.
#pragma once

#include <algorithm>

#include "linear_impl.h"

namespace jaxpaged::JAXPAGED_ISA {

inline constexpr int kBlockInputs = 32;

// A block of inputs of M tokens.
template <int M>
struct TileRecord {
  int8_t values[M][kBlockInputs];
  float scales[M];
  // What the products with weights + 128, and with weights + 8, have too much, to be added.
  int32_t corrections_of_8_bits[M], corrections_of_4_bits[M];
};
inline constexpr int64_t kTokenBlockBytes = sizeof(TileRecord<1>);

// The largest of lanes that are not negative.
inline int32_t largest(IVec v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_epi32(bit_cast<__m512i>(v));
#else
  int32_t largest = 0;
  for (int i = 0; i < kLanes; ++i) largest = std::max(largest, static_cast<int32_t>(v[i]));
  return largest;
#endif
}

inline IVec round_to_int(Vec v) {  // to nearest, ties to even
#if defined(__AVX512F__)
  return bit_cast<IVec>(_mm512_cvtps_epi32(bit_cast<__m512>(v)));
#elif defined(__AVX2__)
  return bit_cast<IVec>(_mm256_cvtps_epi32(bit_cast<__m256>(v)));
#else
  const float magic = 12582912.0f;  // 1.5 * 2^23
  return bit_cast<IVec>(v + magic) - bit_cast<int32_t>(magic);
#endif
}

inline int32_t sum(IVec v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32(bit_cast<__m512i>(v));
#else
  int32_t total = 0;
  for (int i = 0; i < kLanes; ++i) total += v[i];
  return total;
#endif
}

// 32 values of x as a token's part of a record.
inline void quantize_block(const float* x, int8_t* values, float* scale, int32_t* correction_of_8_bits,
                           int32_t* correction_of_4_bits) {
  typedef int8_t Bytes __attribute__((vector_size(kLanes)));
  constexpr int kVectors = kBlockInputs / kLanes;
  IVec magnitudes{};  // as integers, which have the same order, and NaN above all numbers
  for (int i = 0; i < kVectors; ++i) {
    const IVec magnitude = bit_cast<IVec>(load(x + i * kLanes)) & 0x7fffffff;
    magnitudes = magnitude > magnitudes ? magnitude : magnitudes;
  }
  const float most = bit_cast<float>(largest(magnitudes));
  // Values whose inverse would overflow count as zeros.
  const Vec inverse = splat(most > 1e-36f ? 127.0f / most : 0.0f);
  IVec sums{};
  for (int i = 0; i < kVectors; ++i) {
    const IVec rounded = round_to_int(load(x + i * kLanes) * inverse);
    sums += rounded << 24 >> 24;  // as what is stored, whatever becomes of NaN
    const Bytes bytes = __builtin_convertvector(rounded, Bytes);
    std::memcpy(values + i * kLanes, &bytes, sizeof bytes);
  }
  *scale = most / 127.0f;
  const int32_t total = sum(sums);
  *correction_of_8_bits = -128 * total;
  *correction_of_4_bits = -8 * total;
}

// A token's part of each of the `num_blocks` records of its tile, in which it is the m-th of `num_tokens`.
inline void quantize_row(const float* x, int64_t num_blocks, int num_tokens, int m, char* tile) {
  for (int64_t b = 0; b < num_blocks; ++b) {
    char* const record = tile + b * num_tokens * kTokenBlockBytes;
    float* const scales = reinterpret_cast<float*>(record + num_tokens * kBlockInputs);
    int32_t* const corrections = reinterpret_cast<int32_t*>(scales + num_tokens);
    quantize_block(x + b * kBlockInputs, reinterpret_cast<int8_t*>(record + m * kBlockInputs), scales + m, corrections + m,
                   corrections + num_tokens + m);
  }
}

// All rows of x, RMS-normalized if there is a norm, in `tiles`; a tile begins at its first token's share of the memory.
template <typename T>
inline const char* quantize_rows(const LinearArgs& args, const Parts& tiles, Memory& scratch) {
  const int64_t size = args.in_features, num_blocks = size / kBlockInputs;
  const T* const x = static_cast<const T*>(args.x);
  const T* const norm = static_cast<const T*>(args.norm);
  char* const out = scratch.of<char>(args.num_tokens * num_blocks * kTokenBlockBytes);
  constexpr int64_t kTokens = 8;  // few tokens are done sooner than another thread has heard of them
  parallel_for((args.num_tokens + kTokens - 1) / kTokens, [&](int64_t task) {
    thread_local Memory row;
    float* const wide = row.of<float>(size);
    int64_t tile = tiles.of(task * kTokens);
    for (int64_t t = task * kTokens; t < std::min(args.num_tokens, (task + 1) * kTokens); ++t) {
      while (tiles.start(tile + 1) <= t) ++tile;
      const int64_t first = tiles.start(tile);
      prepare_row(x + t * size, norm, args.eps, size, wide);
      quantize_row(wide, num_blocks, static_cast<int>(tiles.start(tile + 1) - first), static_cast<int>(t - first),
                   out + first * num_blocks * kTokenBlockBytes);
    }
  });
  return out;
}

}  // namespace jaxpaged::JAXPAGED_ISA
