// What `linear` computes; see jaxpaged_kernels/linear.py, which has the same parts.
#pragma once

#include <cstdint>

namespace jaxpaged {

enum class DType { kF32, kBF16, kF16 };

// Of weights: as they are, or quantized in blocks of 32 inputs and packed as linear_quantized.h says.
enum class Format { kDense, kQ8_0, kQ4_0 };

// y = x W^T, W being up to three matrices one below the other, each with an output of its own.
struct LinearArgs {
  static constexpr int kMaxParts = 3;

  DType dtype;      // of x, dense weights, biases, norm and residual
  DType out_dtype;  // of the outputs
  int64_t num_tokens;
  int64_t in_features;
  const void* x;  // [T, in]

  const void* norm = nullptr;  // [in]: x is RMS-normalized and scaled by it first
  float eps = 0;

  int num_parts;
  const void* weights[kMaxParts];          // [out_i, in]
  Format formats[kMaxParts] = {};          // all dense or none; quantized ones have `in` a multiple of 32
  const void* biases[kMaxParts] = {};      // [out_i] or null
  int64_t out_features[kMaxParts] = {};
  void* outputs[kMaxParts] = {};           // [T, out_i]

  // The first part's output: silu(y_0) * y_1, which takes exactly two parts of one size and gives one output.
  bool swiglu = false;
  const void* residual = nullptr;  // [T, out_0], added to the first part's output
};

}  // namespace jaxpaged
