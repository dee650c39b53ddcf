// Products of small matrices, for scores (queries times keys) and for weighted sums (weights times values).
//
// The left matrix is in rows; an element of it, or a pair of them, is broadcast. The right one has been packed so that
// a vector holds the same element, or pair, of kLanes neighbouring columns:
//
//     rows      left            right [depth][columns]
//      r0     ab cd ef ...       step 0:  a'b' of column 0, 1, 2, ...      sum[r][column] += a a' + b b'
//      r1     .. .. ..           step 1:  c'd' of column 0, 1, 2, ...                      += c c' + d d'
//
// A sum takes its products in the order of the steps, whatever rows and columns share its tile.
#pragma once

#include <algorithm>
#include <type_traits>

#include "attention_vector.h"

namespace jaxpaged::JAXPAGED_ISA::paged {

struct F32Products {
  using Element = float;
  static constexpr int kPerStep = 1;
  static Vec multiply_add(Vec sum, const float* left, Vec right) { return splat(*left) * right + sum; }
};

#if defined(__AVX512BF16__)
struct BF16Products {
  using Element = BF16;
  static constexpr int kPerStep = 2;
  static Vec multiply_add(Vec sum, const BF16* left, Vec right) {
    int32_t pair;
    std::memcpy(&pair, left, sizeof pair);
    const __m512bh pairs = bit_cast<__m512bh>(_mm512_set1_epi32(pair));
    return bit_cast<Vec>(_mm512_dpbf16_ps(bit_cast<__m512>(sum), pairs, bit_cast<__m512bh>(right)));
  }
};
#endif

// A vector's weights as elements.
inline void to_elements(float* to, Vec v) { store(to, v); }
#if defined(__AVX512BF16__)
inline void to_elements(BF16* to, Vec v) {
  const __m256bh rounded = _mm512_cvtneps_pbh(bit_cast<__m512>(v));
  std::memcpy(to, &rounded, sizeof rounded);
}
#endif

// kLanes elements, or pairs of them, as they lie in memory.
template <typename Element>
inline Vec load_bits(const Element* p) {
  Vec bits;
  std::memcpy(&bits, p, sizeof bits);
  return bits;
}

// The same of what is stored as another type, which `Element` can hold exactly.
template <typename Element, typename Stored>
inline Vec load_elements(const Stored* p) {
  if constexpr (std::is_same_v<Element, float>) {
    return load(p);
#if defined(__AVX512BF16__)
  } else if constexpr (std::is_same_v<Stored, Fp8>) {
    return load_as_bf16(p);
  } else if constexpr (std::is_same_v<Stored, Int8>) {
    return bit_cast<Vec>(_mm512_cvtne2ps_pbh(bit_cast<__m512>(load(p + kLanes)), bit_cast<__m512>(load(p))));
#endif
  } else {
    return load_bits(p);
  }
}

// Sums that are kept in registers: most of them, but for a vector of each matrix.
#if defined(__AVX512F__)
inline constexpr int kTileRows = 6, kTileVectors = 4;
#else
inline constexpr int kTileRows = 6, kTileVectors = 2;
#endif

struct Matrices {
  const void* left;
  int64_t left_stride;  // elements
  const void* right;
  int64_t right_stride;  // elements, from step to step
  int64_t num_steps;
  float* sums;
  int64_t sums_stride;
  const float* factors;  // sums = factor of the row * sums + left * right; null = left * right
};

template <typename Products, int kRows, int kVectors>
inline void multiply_tile(const Matrices& m, int64_t row, int64_t column) {
  using Element = typename Products::Element;
  const Element* left = static_cast<const Element*>(m.left) + row * m.left_stride;
  const Element* right = static_cast<const Element*>(m.right) + column * Products::kPerStep;
  float* const out = m.sums + row * m.sums_stride + column;
  Vec sums[kRows][kVectors] = {};
  if (m.factors != nullptr) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        sums[r][v] = load(out + r * m.sums_stride + v * kLanes) * splat(m.factors[row + r]);
      }
    }
  }
  for (int64_t step = 0; step < m.num_steps; ++step, left += Products::kPerStep, right += m.right_stride) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        sums[r][v] = Products::multiply_add(sums[r][v], left + r * m.left_stride,
                                            load_bits(right + v * kLanes * Products::kPerStep));
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) store(out + r * m.sums_stride + v * kLanes, sums[r][v]);
  }
}

template <typename Products, int kRows>
inline void multiply_rows(const Matrices& m, int64_t row, int64_t num_vectors) {
  int64_t v = 0;
  for (; v + kTileVectors <= num_vectors; v += kTileVectors) {
    multiply_tile<Products, kRows, kTileVectors>(m, row, v * kLanes);
  }
  for (; v < num_vectors; ++v) multiply_tile<Products, kRows, 1>(m, row, v * kLanes);
}

// f<count>() for a count of 1 to kMost.
template <int kMost, typename F>
inline void with_rows(int64_t count, const F& f) {
  if constexpr (kMost > 0) {
    if (count == kMost) return f.template operator()<kMost>();
    with_rows<kMost - 1>(count, f);
  }
}

// Rows [row, end_row) and `num_vectors` vectors of columns.
template <typename Products>
void multiply(const Matrices& m, int64_t row, int64_t end_row, int64_t num_vectors) {
  for (; row < end_row; row += kTileRows) {
    with_rows<kTileRows>(std::min<int64_t>(end_row - row, kTileRows),
                         [&]<int kRows>() { multiply_rows<Products, kRows>(m, row, num_vectors); });
  }
}

}  // namespace jaxpaged::JAXPAGED_ISA::paged
