// `rotate_and_write_kv`: RoPE of queries and keys, and the write of keys and values to their slots.
#pragma once

#include <algorithm>
#include <type_traits>

#include "attention_args.h"
#include "memory.h"
#include "attention_vector.h"
#include "thread_pool.h"

namespace jaxpaged::JAXPAGED_ISA {
namespace paged {

template <typename T>
inline Vec load_some(const T* p, int64_t count) {
  return count >= kLanes ? load(p) : load_first(p, static_cast<int>(count));
}
template <typename T>
inline void store_some(T* p, Vec v, int64_t count) {
  count >= kLanes ? store(p, v) : store_first(p, v, static_cast<int>(count));
}

// One head, its halves being the two parts of complex numbers.
template <typename T>
inline void rotate_head(const T* x, const float* cos, const float* sin, int64_t half, T* out) {
  for (int64_t d = 0; d < half; d += kLanes) {
    const int64_t count = half - d;
    const Vec c = load_some(cos + d, count), s = load_some(sin + d, count);
    const Vec first = load_some(x + d, count), second = load_some(x + half + d, count);
    store_some(out + d, first * c - second * s, count);
    store_some(out + half + d, second * c + first * s, count);
  }
}

template <typename Stored>
inline constexpr float kLargest = 0;
template <>
inline constexpr float kLargest<Int8> = 127.0f;
template <>
inline constexpr float kLargest<Fp8> = 448.0f;

// As in quantize.py; returns the scale. What is not finite makes the scale not finite.
template <typename Stored, typename T>
inline float quantize_head(const T* x, int64_t size, Stored* out) {
  Vec largest{};
  for (int64_t d = 0; d < size; d += kLanes) {
    const Vec v = load_some(x + d, size - d);
    const Vec magnitude = bit_cast<Vec>(bit_cast<UVec>(v) & 0x7fffffffu);
    largest = ((magnitude > largest) | (v != v)) ? magnitude : largest;
  }
  float of_all = 0;
  for (int i = 0; i < kLanes; ++i) of_all = largest[i] > of_all || largest[i] != largest[i] ? largest[i] : of_all;
  const float scale = of_all * (1 / kLargest<Stored>);
  const Vec divisor = splat(scale == 0 ? 1.0f : scale), limit = splat(kLargest<Stored>);
  for (int64_t d = 0; d < size; d += kLanes) {
    const Vec v = load_some(x + d, size - d) / divisor;
    const Vec at_least = -limit > v ? -limit : v;
    store_some(out + d, limit < at_least ? limit : at_least, size - d);
  }
  return scale;
}

// K and V of one token to its slot.
template <typename Stored, typename T>
inline void write_slot(const RotateAndWriteArgs& args, int64_t token, const float* cos, const float* sin) {
  const int64_t size = args.head_dim, slot = args.slots[token];
  if (slot < 0 || slot >= args.num_slots) return;
  for (int64_t head = 0; head < args.num_kv_heads; ++head) {
    const int64_t from = token * args.num_kv_heads + head, to = slot * args.num_kv_heads + head;
    const T* const k = static_cast<const T*>(args.k) + from * size;
    const T* const v = static_cast<const T*>(args.v) + from * size;
    Stored* const k_slot = static_cast<Stored*>(args.k_pool) + to * size;
    Stored* const v_slot = static_cast<Stored*>(args.v_pool) + to * size;
    if constexpr (std::is_same_v<Stored, T>) {
      rotate_head(k, cos, sin, size / 2, k_slot);
      std::memcpy(v_slot, v, size * sizeof(T));
    } else {
      thread_local Memory memory;
      T* const rotated = memory.of<T>(size);
      rotate_head(k, cos, sin, size / 2, rotated);
      args.k_scales[to] = quantize_head(rotated, size, k_slot);
      args.v_scales[to] = quantize_head(v, size, v_slot);
    }
  }
}

template <typename T, typename Stored>
void rotate_and_write(const RotateAndWriteArgs& args) {
  const int64_t size = args.head_dim;
  // Fewer values than this are done sooner than another thread has heard of them.
  constexpr int64_t kTaskValues = 16384;
  const int64_t num_values = (args.num_heads + 2 * args.num_kv_heads) * size;
  const int64_t task_tokens = std::max<int64_t>(kTaskValues / num_values, 1);
  parallel_for((args.num_tokens + task_tokens - 1) / task_tokens, [&](int64_t task) {
    const int64_t end = std::min(args.num_tokens, (task + 1) * task_tokens);
    for (int64_t token = task * task_tokens; token < end; ++token) {
      const float* const cos = args.cos + token * (size / 2);
      const float* const sin = args.sin + token * (size / 2);
      for (int64_t head = token * args.num_heads; head < (token + 1) * args.num_heads; ++head) {
        rotate_head(static_cast<const T*>(args.q) + head * size, cos, sin, size / 2,
                    static_cast<T*>(args.rotated_q) + head * size);
      }
      write_slot<Stored, T>(args, token, cos, sin);
    }
  });
}

template <typename T>
void rotate_and_write(const RotateAndWriteArgs& args) {
  switch (args.pool_type) {
    case PoolType::kInt8: return rotate_and_write<T, Int8>(args);
    case PoolType::kFp8: return rotate_and_write<T, Fp8>(args);
    default: return rotate_and_write<T, T>(args);
  }
}

}  // namespace paged

inline void rotate_and_write(const RotateAndWriteArgs& args) {
  switch (args.dtype) {
    case DType::kF32: return paged::rotate_and_write<float>(args);
    case DType::kBF16: return paged::rotate_and_write<BF16>(args);
    case DType::kF16: return paged::rotate_and_write<F16>(args);
  }
}

}  // namespace jaxpaged::JAXPAGED_ISA
