// `linear` for one instruction set.
//
// Weights are multiplied where they are, [out, in] row by row as checkpoints have them: every output is the dot product of a
// row of x and a row of W. A tile of up to 6 tokens and 4 or 8 outputs keeps its sums in registers, so that each vector
// loaded is used several times:
//
//                 in ->                 the sums of a tile are vectors too: lane l of sum[m][n] adds up the products of
//     x rows      ████████ m            elements l, l + lanes, l + 2 lanes, ... of x row m and W row n, and the lanes are
//     W rows      ████████ n            added at the end
//
// A sum takes its products in the same order whatever tile it is in, so a token's result does not depend on how many
// others there are, nor on the number of threads.
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "linear_args.h"
#include "memory.h"
#include "simd.h"
#include "thread_pool.h"

namespace jaxpaged::JAXPAGED_ISA {

inline constexpr int kTileTokens = 6;
inline constexpr int kMaxGroupTokens = 4 * kTileTokens;
inline constexpr int kBlockOutputs = 32;  // outputs of a task: of 16 bits they fill cache lines, which no other task writes to
inline constexpr int kBlockRows = 2 * kBlockOutputs;  // of weights of a task, at most: swiglu takes two for an output
inline constexpr int kWideOutputs = 8;   // of a tile of one or two tokens
inline constexpr int kBlockTokens = 96;  // of a task: its weights stay in the caches meanwhile
inline constexpr int kMaxAhead = 12;     // rows of weights that are fetched before they are wanted, at most

// What x is converted to before it is multiplied by weights of type W.
template <typename W>
struct Operand {
  using X = float;
  static constexpr int kStep = kLanes;  // elements of a row that one vector operation takes
  static Vec multiply_add(Vec sum, const float* x, const W* w) { return load(x) * load(w) + sum; }
};

#if defined(__AVX512BF16__)
// Pairs of products are added in hardware: lane l takes elements 2l and 2l + 1 of each step.
template <>
struct Operand<BF16> {
  using X = BF16;
  static constexpr int kStep = 2 * kLanes;
  static Vec multiply_add(Vec sum, const BF16* x, const BF16* w) {
    const auto pairs = [](const BF16* p) { return bit_cast<__m512bh>(_mm512_loadu_si512(p)); };
    return bit_cast<Vec>(_mm512_dpbf16_ps(bit_cast<__m512>(sum), pairs(x), pairs(w)));
  }
};
#endif

// Sums of the lanes of four vectors.
inline void sum4(const Vec& a, const Vec& b, const Vec& c, const Vec& d, float* out) {
#if defined(__AVX512F__)
  const auto m = [](Vec v) { return bit_cast<__m512>(v); };
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(m(a), m(b)), _mm512_unpackhi_ps(m(a), m(b)));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(m(c), m(d)), _mm512_unpackhi_ps(m(c), m(d)));
  const __m512 abcd = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(abcd), _mm512_extractf32x8_ps(abcd, 1));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
#else
  out[0] = sum(a), out[1] = sum(b), out[2] = sum(c), out[3] = sum(d);
#endif
}

// out[m][n] = x row m times weight row n, for M tokens and N outputs (a multiple of 4, or 1). With kFetch the rows of weights
// in [next, end) are brought into the cache meanwhile, so that memory and arithmetic are busy at one time.
template <int M, int N, bool kFetch, typename W>
inline void multiply_tile(const typename Operand<W>::X* x, int64_t x_stride, const W* const* rows, int64_t size, float* out,
                          const W* const* next, const W* const* end) {
  using Op = Operand<W>;
  Vec sums[M][N] = {};
  int64_t k = 0;
  for (; k + Op::kStep <= size; k += Op::kStep) {
    if constexpr (kFetch) {
#pragma GCC unroll 1
      // Into the second cache: far more of its misses can be under way at a time than of the first one's.
      for (const W* const* row = next; row < end; ++row) __builtin_prefetch(*row + k, 0, 2);
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) sums[m][n] = Op::multiply_add(sums[m][n], x + m * x_stride + k, rows[n] + k);
    }
  }
  if (k < size) {  // what is left of the rows, padded with zeros
    typename Op::X x_rest[Op::kStep];
    W w_rest[Op::kStep];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      std::memset(w_rest, 0, sizeof w_rest);
      std::memcpy(w_rest, rows[n] + k, (size - k) * sizeof(W));
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        std::memset(x_rest, 0, sizeof x_rest);
        std::memcpy(x_rest, x + m * x_stride + k, (size - k) * sizeof(x_rest[0]));
        sums[m][n] = Op::multiply_add(sums[m][n], x_rest, w_rest);
      }
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
    float* const to = out + m * kBlockRows;
    if constexpr (N == 1) {
      to[0] = sum(sums[m][0]);
    } else {
#pragma GCC unroll 2
      for (int n = 0; n < N; n += 4) sum4(sums[m][n], sums[m][n + 1], sums[m][n + 2], sums[m][n + 3], to + n);
    }
  }
}

// [0, total) in as few parts of at most `most` as possible, all of nearly one size.
struct Parts {
  int64_t total, count;
  Parts(int64_t total, int64_t most) : total(total), count((total + most - 1) / most) {}
  int64_t start(int64_t i) const { return total * i / count; }
  int64_t of(int64_t item) const { return item * count / total; }  // a part that is not behind `item`'s
};

template <int N, bool kFetch, typename W>
inline void multiply_tile(int num_tokens, const typename Operand<W>::X* x, int64_t x_stride, const W* const* rows,
                          int64_t size, float* out, const W* const* next, const W* const* end) {
  switch (num_tokens) {
    case 1: return multiply_tile<1, N, kFetch>(x, x_stride, rows, size, out, next, end);
    case 2: return multiply_tile<2, N, kFetch>(x, x_stride, rows, size, out, next, end);
    case 3: return multiply_tile<3, N, kFetch>(x, x_stride, rows, size, out, next, end);
    case 4: return multiply_tile<4, N, kFetch>(x, x_stride, rows, size, out, next, end);
    case 5: return multiply_tile<5, N, kFetch>(x, x_stride, rows, size, out, next, end);
    case 6: return multiply_tile<6, N, kFetch>(x, x_stride, rows, size, out, next, end);
  }
}

// out[m][0 to N) for `num_tokens` tokens; row m of `out` starts at m * kBlockRows. Of the N rows from `ahead` on each tile
// fetches its share.
template <int N, bool kFetch, typename W>
inline void multiply_columns(int num_tokens, const typename Operand<W>::X* x, int64_t x_stride, const W* const* rows,
                             int64_t size, float* out, int ahead) {
  const Parts tiles(num_tokens, kTileTokens);
  for (int64_t i = 0; i < tiles.count; ++i) {
    const int64_t start = tiles.start(i);
    const W* const* const next = rows + ahead + N * i / tiles.count;
    const W* const* const end = rows + ahead + N * (i + 1) / tiles.count;
    multiply_tile<N, kFetch>(static_cast<int>(tiles.start(i + 1) - start), x + start * x_stride, x_stride, rows, size,
                             out + start * kBlockRows, next, end);
  }
}

// For one or two tokens, kWideOutputs.
template <bool kFetch, typename W>
inline void multiply_wide(int num_tokens, const typename Operand<W>::X* x, int64_t x_stride, const W* const* rows,
                          int64_t size, float* out, int ahead) {
  const W* const* const next = rows + std::max(ahead, kWideOutputs);
  const W* const* const end = next + kWideOutputs;
  num_tokens == 1 ? multiply_tile<1, kWideOutputs, kFetch>(x, x_stride, rows, size, out, next, end)
                  : multiply_tile<2, kWideOutputs, kFetch>(x, x_stride, rows, size, out, next, end);
}

// Rows of weights that are on their way to the caches: memory takes as long to answer whether a row is long or short.
template <typename W>
inline int rows_ahead(int64_t size) {
  constexpr int64_t kBytes = 16 * 1024;
  return static_cast<int>(std::clamp<int64_t>(kBytes / (size * static_cast<int64_t>(sizeof(W))), 4, kMaxAhead));
}

// out[m][n] for `num_tokens` tokens and `count` outputs. With kFetch the weights are expected to be out of the caches, and
// behind `rows` are kMaxAhead more, which will be wanted next.
template <bool kFetch, typename W>
inline void multiply_rows(int num_tokens, const typename Operand<W>::X* x, int64_t x_stride, const W* const* rows, int count,
                          int64_t size, float* out) {
  const int ahead = rows_ahead<W>(size);
  int n = 0;
  if (num_tokens <= 2) {  // few tokens: more rows, so that enough sums are under way at a time
    for (; n + kWideOutputs <= count; n += kWideOutputs) {
      multiply_wide<kFetch>(num_tokens, x, x_stride, rows + n, size, out + n, ahead);
    }
  }
  for (; n + 4 <= count; n += 4) multiply_columns<4, kFetch>(num_tokens, x, x_stride, rows + n, size, out + n, ahead);
  for (; n < count; ++n) multiply_columns<1, false>(num_tokens, x, x_stride, rows + n, size, out + n, ahead);
}

// f(i, vector of `count` lanes) over [0, size): whole vectors, then the rest.
template <typename F>
inline void for_vectors(int64_t size, const F& f) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) f(i, kLanes);
  if (i < size) f(i, static_cast<int>(size - i));
}

template <typename T>
inline Vec load_some(const T* p, int count) {
  return count == kLanes ? load(p) : load_first(p, count);
}
template <typename T>
inline void store_some(T* p, Vec v, int count) {
  count == kLanes ? store(p, v) : store_first(p, v, count);
}

// A row of x as the operand of the product: RMS-normalized if there is a `norm`, and converted.
template <typename X, typename T>
inline void prepare_row(const T* x, const T* norm, float eps, int64_t size, X* out) {
  if (norm == nullptr) {
    for_vectors(size, [&](int64_t i, int count) { store_some(out + i, load_some(x + i, count), count); });
    return;
  }
  Vec squares{};
  for_vectors(size, [&](int64_t i, int count) {
    const Vec v = load_some(x + i, count);
    squares += v * v;
  });
  const Vec scale = splat(1.0f / std::sqrt(sum(squares) / static_cast<float>(size) + eps));
  for_vectors(size, [&](int64_t i, int count) {
    store_some(out + i, load_some(x + i, count) * scale * load_some(norm + i, count), count);
  });
}

// The rows of x as operands; `scratch` holds them where they are not those of the argument itself.
template <typename T>
inline const typename Operand<T>::X* prepare(const LinearArgs& args, Memory& scratch) {
  using X = typename Operand<T>::X;
  const T* const x = static_cast<const T*>(args.x);
  const T* const norm = static_cast<const T*>(args.norm);
  if constexpr (std::is_same_v<X, T>) {
    if (norm == nullptr) return x;
  }
  const int64_t size = args.in_features;
  X* const out = scratch.of<X>(args.num_tokens * size);
  constexpr int64_t kTokens = 8;  // few tokens are done sooner than another thread has heard of them
  parallel_for((args.num_tokens + kTokens - 1) / kTokens, [&](int64_t task) {
    for (int64_t t = task * kTokens; t < std::min(args.num_tokens, (task + 1) * kTokens); ++t) {
      prepare_row(x + t * size, norm, args.eps, size, out + t * size);
    }
  });
  return out;
}

// One token's outputs [first, first + count) of a part, from its sums.
template <typename T, typename Out>
inline void finish_row(const LinearArgs& args, int part, int64_t token, int64_t first, int count, const float* sums) {
  const int64_t num_outputs = args.out_features[part];
  const T* const bias = static_cast<const T*>(args.biases[part]);
  const T* const residual = part == 0 ? static_cast<const T*>(args.residual) : nullptr;
  Out* const out = static_cast<Out*>(args.outputs[part]) + token * num_outputs + first;
  for_vectors(count, [&](int64_t i, int lanes) {
    Vec y = load_some(sums + i, lanes);
    if (bias != nullptr) y += load_some(bias + first + i, lanes);
    if (residual != nullptr) y += load_some(residual + token * num_outputs + first + i, lanes);
    store_some(out + i, y, lanes);
  });
}

// The same for silu(gate) * up: the sums of the gate, then, at `up_sums`, those of up.
template <typename T, typename Out>
inline void finish_swiglu_row(const LinearArgs& args, int64_t token, int64_t first, int count, const float* gate_sums,
                              const float* up_sums) {
  const T* const gate_bias = static_cast<const T*>(args.biases[0]);
  const T* const up_bias = static_cast<const T*>(args.biases[1]);
  Out* const out = static_cast<Out*>(args.outputs[0]) + token * args.out_features[0] + first;
  for_vectors(count, [&](int64_t i, int lanes) {
    Vec gate = load_some(gate_sums + i, lanes), up = load_some(up_sums + i, lanes);
    if (gate_bias != nullptr) gate += load_some(gate_bias + first + i, lanes);
    if (up_bias != nullptr) up += load_some(up_bias + first + i, lanes);
    store_some(out + i, gate / (1.0f + exp(-gate)) * up, lanes);
  });
}

// A task's share of the outputs: rows [first, first + count) of one part, or of both for swiglu.
struct OutputBlock {
  int part;
  int64_t first;
  int count;
};

// How the outputs of all parts are cut into blocks.
class OutputBlocks {
 public:
  explicit OutputBlocks(const LinearArgs& args) : args_(args), num_parts_(args.swiglu ? 1 : args.num_parts) {}

  int64_t of_part(int part) const { return (args_.out_features[part] + kBlockOutputs - 1) / kBlockOutputs; }

  int64_t count() const {
    int64_t count = 0;
    for (int part = 0; part < num_parts_; ++part) count += of_part(part);
    return count;
  }

  OutputBlock operator[](int64_t index) const {
    int part = 0;
    while (index >= of_part(part)) index -= of_part(part++);
    const int64_t first = index * kBlockOutputs;
    return {part, first, static_cast<int>(std::min<int64_t>(kBlockOutputs, args_.out_features[part] - first))};
  }

 private:
  const LinearArgs& args_;
  const int num_parts_;
};

// The rows of weights for a block, those of the gate before those of up; returns their number.
template <typename T>
inline int weight_rows(const LinearArgs& args, const OutputBlock& block, const T** rows) {
  const int num_rows = args.swiglu ? 2 * block.count : block.count;
  for (int i = 0; i < num_rows; ++i) {
    const int part = args.swiglu ? i / block.count : block.part;
    rows[i] = static_cast<const T*>(args.weights[part]) + (block.first + i % block.count) * args.in_features;
  }
  return num_rows;
}

// Tokens that are multiplied by a few rows of weights before the next ones: what of x stays in the first cache.
template <typename X>
inline int64_t group_tokens(int64_t size) {
  const int64_t fitting = 24 * 1024 / (size * static_cast<int64_t>(sizeof(X)));
  return std::clamp<int64_t>(fitting / kTileTokens * kTileTokens, kTileTokens, kMaxGroupTokens);
}

template <typename T, typename Out>
void linear_of(const LinearArgs& args) {
  using X = typename Operand<T>::X;
  thread_local Memory scratch;
  const X* const x = prepare<T>(args, scratch);
  const int64_t size = args.in_features;
  const OutputBlocks blocks(args);
  const int64_t num_blocks = blocks.count();
  const Parts token_blocks(args.num_tokens, kBlockTokens);
  parallel_for(num_blocks * token_blocks.count, [&](int64_t task) {
    const OutputBlock block = blocks[task % num_blocks];
    const int64_t first_token = token_blocks.start(task / num_blocks);
    const Parts groups(token_blocks.start(task / num_blocks + 1) - first_token, group_tokens<X>(size));
    const T* rows[kBlockRows + kMaxAhead];
    const int num_rows = weight_rows(args, block, rows);
    // Tasks are handed out in order: by then the others will have taken the ones between.
    const T* next[kBlockRows];
    const int num_next = weight_rows(args, blocks[(task + num_threads()) % num_blocks], next);
    for (int i = 0; i < kMaxAhead; ++i) rows[num_rows + i] = next[std::min(i, num_next - 1)];
    float sums[kMaxGroupTokens * kBlockRows];
    for (int64_t group = 0; group < groups.count; ++group) {
      const int64_t token = first_token + groups.start(group);
      const int num_tokens = static_cast<int>(groups.start(group + 1) - groups.start(group));
      group == 0 ? multiply_rows<true>(num_tokens, x + token * size, size, rows, num_rows, size, sums)
                 : multiply_rows<false>(num_tokens, x + token * size, size, rows, num_rows, size, sums);
      for (int m = 0; m < num_tokens; ++m) {
        const float* const row = sums + m * kBlockRows;
        if (args.swiglu) {
          finish_swiglu_row<T, Out>(args, token + m, block.first, block.count, row, row + block.count);
        } else {
          finish_row<T, Out>(args, block.part, token + m, block.first, block.count, row);
        }
      }
    }
  });
}

inline void linear(const LinearArgs& args) {
  const bool wide = args.out_dtype == DType::kF32;
  switch (args.dtype) {
    case DType::kF32: return linear_of<float, float>(args);
    case DType::kBF16: return wide ? linear_of<BF16, float>(args) : linear_of<BF16, BF16>(args);
    case DType::kF16: return wide ? linear_of<F16, float>(args) : linear_of<F16, F16>(args);
  }
}

}  // namespace jaxpaged::JAXPAGED_ISA
