// `linear` with quantized weights for one instruction set.
//
// Weights are packed so that the lanes of a vector are outputs (quantized.py writes this): 16 of them are a group, and a block
// of 32 inputs of a group is
//
//     8 bits: [8 steps][16 outputs][4 inputs] bytes, weight + 128
//     4 bits: [4 steps][16 outputs][4 inputs] bytes; low halves are weight + 8 of step s, high halves of step s + 4
//
// so that one instruction multiplies 16 outputs by 4 inputs of a token, and nothing is added across lanes. Behind the blocks of
// a group are their scales, float16 [blocks][16 outputs]. The sums of a block are exact integers; those of the blocks are added
// in float32, always in order, so a token's result does not depend on how many others there are, nor on the number of threads.
#pragma once

#include "linear_quantized_x.h"

namespace jaxpaged::JAXPAGED_ISA {

inline constexpr int kGroupOutputs = 16;
inline constexpr int kGroupVectors = kGroupOutputs / kLanes;
inline constexpr int kStepInputs = 4;
// Tokens multiplied at once: as many as the registers hold the sums of.
inline constexpr int kQuantizedTokens = kGroupVectors == 1 ? 12 : 2;
inline constexpr int kTaskTiles = kBlockTokens / kQuantizedTokens;
inline constexpr int kBlockGroups = kBlockRows / kGroupOutputs;

typedef uint8_t Bytes __attribute__((vector_size(kLanes * 4)));

inline constexpr int64_t block_bytes(Format format) { return kGroupOutputs * kBlockInputs / (format == Format::kQ4_0 ? 2 : 1); }

// A group of outputs, and where its sums are in those of a block of outputs.
struct WeightGroup {
  Format format;
  const uint8_t* data;
  int first;
};

// Each lane's sum, plus the products of its four unsigned bytes of `w`, all at most kMost, with the four signed ones at `x`,
// which are at least -127.
template <int kMost>
inline IVec dot4(IVec sum, Bytes w, const int8_t* x) {
  int32_t four;
  std::memcpy(&four, x, sizeof four);
#if defined(__AVX512VNNI__)
  return bit_cast<IVec>(_mm512_dpbusd_epi32(bit_cast<__m512i>(sum), bit_cast<__m512i>(w), _mm512_set1_epi32(four)));
#elif defined(__AVX2__)
  // Pairs of products are added in 16 bits, where they must not exceed 32767: 2 * 127 * 128 does not.
  const auto pairs = [&](Bytes part) {
#if defined(__AVX512F__)
    const __m512i sums = _mm512_maddubs_epi16(bit_cast<__m512i>(part), _mm512_set1_epi32(four));
    return bit_cast<IVec>(_mm512_madd_epi16(sums, _mm512_set1_epi16(1)));
#else
    const __m256i sums = _mm256_maddubs_epi16(bit_cast<__m256i>(part), _mm256_set1_epi32(four));
    return bit_cast<IVec>(_mm256_madd_epi16(sums, _mm256_set1_epi16(1)));
#endif
  };
  if constexpr (kMost <= 128) return sum + pairs(w);
  return sum + pairs(w & 127) + pairs(w & 128);
#else
  for (int lane = 0; lane < kLanes; ++lane) {
    int32_t products = 0;
    for (int i = 0; i < kStepInputs; ++i) products += w[lane * kStepInputs + i] * x[i];
    sum[lane] += products;
  }
  return sum;
#endif
}

inline Bytes load_bytes(const uint8_t* p) {
  Bytes bytes;
  std::memcpy(&bytes, p, sizeof bytes);
  return bytes;
}

// dots[m][v] = the products of one block of weights with that of each token.
template <Format kFormat, int M>
inline void multiply_block(const TileRecord<M>& x, const uint8_t* w, IVec (&dots)[M][kGroupVectors]) {
  constexpr int kStepBytes = kGroupOutputs * kStepInputs;
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int v = 0; v < kGroupVectors; ++v) {
      dots[m][v] = IVec{} + (kFormat == Format::kQ4_0 ? x.corrections_of_4_bits : x.corrections_of_8_bits)[m];
    }
  }
  if constexpr (kFormat == Format::kQ4_0) {
    constexpr int kHalf = kBlockInputs / 2;
#pragma GCC unroll 4
    for (int step = 0; step < kHalf / kStepInputs; ++step) {
#pragma GCC unroll 4
      for (int v = 0; v < kGroupVectors; ++v) {
        typedef uint16_t Pairs __attribute__((vector_size(kLanes * 4)));  // there is no shift of bytes
        const Bytes both = load_bytes(w + step * kStepBytes + v * kLanes * kStepInputs);
        const Bytes low = both & 15, high = bit_cast<Bytes>(bit_cast<Pairs>(both) >> 4) & 15;
#pragma GCC unroll 12
        for (int m = 0; m < M; ++m) {
          dots[m][v] = dot4<15>(dots[m][v], low, x.values[m] + step * kStepInputs);
          dots[m][v] = dot4<15>(dots[m][v], high, x.values[m] + kHalf + step * kStepInputs);
        }
      }
    }
  } else {
#pragma GCC unroll 8
    for (int step = 0; step < kBlockInputs / kStepInputs; ++step) {
#pragma GCC unroll 4
      for (int v = 0; v < kGroupVectors; ++v) {
        const Bytes bytes = load_bytes(w + step * kStepBytes + v * kLanes * kStepInputs);
#pragma GCC unroll 12
        for (int m = 0; m < M; ++m) dots[m][v] = dot4<255>(dots[m][v], bytes, x.values[m] + step * kStepInputs);
      }
    }
  }
}

// out[m][0 to 16) for a tile of M tokens; row m of `out` starts at m * kBlockRows. The group of weights at `next`, if there
// is one, is brought into the cache meanwhile, so that memory and arithmetic are busy at one time.
template <Format kFormat, int M>
[[gnu::noinline]] void multiply_group(const char* tile, int64_t num_blocks, const uint8_t* group, const WeightGroup* next,
                                      float* out) {
  constexpr int kLine = 64, kScaleBytes = kGroupOutputs * sizeof(F16);
  constexpr int64_t kBytes = block_bytes(kFormat);
  const TileRecord<M>* const records = reinterpret_cast<const TileRecord<M>*>(tile);
  const F16* const scales = reinterpret_cast<const F16*>(group + num_blocks * kBytes);
  const uint8_t* fetched = next == nullptr ? nullptr : next->data;
  const int64_t fetched_bytes = next == nullptr ? 0 : block_bytes(next->format) + kScaleBytes;
  Vec sums[M][kGroupVectors] = {};
  for (int64_t b = 0; b < num_blocks; ++b) {
#pragma GCC unroll 1
    for (int64_t line = 0; line < fetched_bytes; line += kLine) __builtin_prefetch(fetched + line, 0, 2);
    fetched += fetched_bytes;
    IVec dots[M][kGroupVectors];
    multiply_block<kFormat, M>(records[b], group + b * kBytes, dots);
#pragma GCC unroll 4
    for (int v = 0; v < kGroupVectors; ++v) {
      const Vec scale = load(scales + b * kGroupOutputs + v * kLanes);
#pragma GCC unroll 12
      for (int m = 0; m < M; ++m) {
        sums[m][v] += __builtin_convertvector(dots[m][v], Vec) * scale * splat(records[b].scales[m]);
      }
    }
  }
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int v = 0; v < kGroupVectors; ++v) store(out + m * kBlockRows + v * kLanes, sums[m][v]);
  }
}

template <int M = kQuantizedTokens>
inline void multiply_group(int num_tokens, const char* tile, int64_t num_blocks, const WeightGroup& group,
                           const WeightGroup* next, float* out) {
  if constexpr (M > 0) {
    if (num_tokens < M) return multiply_group<M - 1>(num_tokens, tile, num_blocks, group, next, out);
    group.format == Format::kQ4_0 ? multiply_group<Format::kQ4_0, M>(tile, num_blocks, group.data, next, out)
                                  : multiply_group<Format::kQ8_0, M>(tile, num_blocks, group.data, next, out);
  }
}

// The groups of a block of outputs, for swiglu those of the gate and then those of up, which begin at kBlockOutputs.
inline int weight_groups(const LinearArgs& args, const OutputBlock& block, WeightGroup* groups) {
  const int64_t num_blocks = args.in_features / kBlockInputs;
  const int of_part = (block.count + kGroupOutputs - 1) / kGroupOutputs;
  const int count = args.swiglu ? 2 * of_part : of_part;
  for (int i = 0; i < count; ++i) {
    const int part = args.swiglu ? i / of_part : block.part;
    const int64_t bytes = num_blocks * (block_bytes(args.formats[part]) + kGroupOutputs * static_cast<int64_t>(sizeof(F16)));
    const uint8_t* const data = static_cast<const uint8_t*>(args.weights[part]);
    groups[i] = {args.formats[part], data + (block.first / kGroupOutputs + i % of_part) * bytes,
                 i / of_part * kBlockOutputs + i % of_part * kGroupOutputs};
  }
  return count;
}

template <typename T, typename Out>
void quantized_linear_of(const LinearArgs& args) {
  const int64_t num_blocks = args.in_features / kBlockInputs;
  const Parts tiles(args.num_tokens, kQuantizedTokens);
  thread_local Memory scratch;
  const char* const x = quantize_rows<T>(args, tiles, scratch);
  const OutputBlocks blocks(args);
  const int64_t num_output_blocks = blocks.count();
  const Parts tile_blocks(tiles.count, kTaskTiles);
  parallel_for(num_output_blocks * tile_blocks.count, [&](int64_t task) {
    const OutputBlock block = blocks[task % num_output_blocks];
    const int64_t first_tile = tile_blocks.start(task / num_output_blocks);
    const int64_t end_tile = tile_blocks.start(task / num_output_blocks + 1);
    WeightGroup groups[2 * kBlockGroups];
    const int count = weight_groups(args, block, groups);
    // Tasks are handed out in order: by then the others will have taken the ones between.
    weight_groups(args, blocks[(task + num_threads()) % num_output_blocks], groups + count);
    for (int64_t tile = first_tile; tile < end_tile; ++tile) {
      const int64_t token = tiles.start(tile);
      const int num_tokens = static_cast<int>(tiles.start(tile + 1) - token);
      const char* const rows = x + token * num_blocks * kTokenBlockBytes;
      float sums[kQuantizedTokens * kBlockRows];
      for (int i = 0; i < count; ++i) {
        const WeightGroup* const next = tile == first_tile ? &groups[i + 1] : nullptr;
        multiply_group(num_tokens, rows, num_blocks, groups[i], next, sums + groups[i].first);
      }
      for (int m = 0; m < num_tokens; ++m) {
        const float* const row = sums + m * kBlockRows;
        if (args.swiglu) {
          finish_swiglu_row<T, Out>(args, token + m, block.first, block.count, row, row + kBlockOutputs);
        } else {
          finish_row<T, Out>(args, block.part, token + m, block.first, block.count, row);
        }
      }
    }
  });
}

inline void quantized_linear(const LinearArgs& args) {
  const bool wide = args.out_dtype == DType::kF32;
  switch (args.dtype) {
    case DType::kF32: return quantized_linear_of<float, float>(args);
    case DType::kBF16: return wide ? quantized_linear_of<BF16, float>(args) : quantized_linear_of<BF16, BF16>(args);
    case DType::kF16: return wide ? quantized_linear_of<F16, float>(args) : quantized_linear_of<F16, F16>(args);
  }
}

inline void linear_of_any_format(const LinearArgs& args) {
  args.formats[0] == Format::kDense ? linear(args) : quantized_linear(args);
}

}  // namespace jaxpaged::JAXPAGED_ISA
