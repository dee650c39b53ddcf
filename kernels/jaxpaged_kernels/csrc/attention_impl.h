// `paged_attention` and `rotate_and_write_kv` for one instruction set.
//
// Work is cut into tiles of query tokens of one sequence, and each is done for one KV head after the other, with all G
// query heads that share it:
//
//     rows (tokens x G heads)        keys, 64 positions at a time
//         q  ----------------+   +-- every key is read and converted once for all rows
//                            scores --> online softmax --> weights x values --> sums in float32
//
// A token's arithmetic is the same in every tile: a decode is a tile of one token. Tiles of keys begin at multiples of
// 64 positions and spans of them at multiples of kSpanKeys, whatever the blocks, the chunk or the batch, and what is
// masked adds exact zeros. So a result does not depend on these, nor on the threads, in any bit.
#pragma once

#include "attention_direct.h"
#include "attention_state.h"
#include "attention_write.h"
#include "thread_pool.h"

namespace jaxpaged::JAXPAGED_ISA {
namespace paged {

// Scores become scores in units of log2, masked to -inf outside of the keys [first, end) of the tile; returns the
// largest, or `top` if that is larger.
inline float mask_scores(const AttentionArgs& args, const float* k_scales, float* scores, int num_vectors, int first,
                         int end, float top) {
  const bool has_cap = args.soft_cap != 0;
  const Vec factor = splat(has_cap ? args.scale / args.soft_cap : args.scale * kLog2E);
  const Vec cap = splat(args.soft_cap * kLog2E);
  const bool is_full = first <= 0 && end >= num_vectors * kLanes;
  IVec lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
  Vec largest = splat(top);
#pragma GCC unroll 4
  for (int v = 0; v < num_vectors; ++v) {
    Vec x = load(scores + v * kLanes) * factor;
    if (k_scales != nullptr) x *= load(k_scales + v * kLanes);
    if (has_cap) x = tanh(x) * cap;
    if (!is_full) {
      const IVec key = lane + v * kLanes;
      x = ((key >= first) & (key < end)) ? x : splat(-__builtin_inff());
    }
    store(scores + v * kLanes, x);
    largest = max(x, largest);  // leaves NaN out, which will be a weight all the same
  }
  return largest_everywhere(largest)[0];
}

// Weights of a row's scores; returns the lanes of their sum.
template <typename Element>
inline Vec weigh(const float* scores, const float* v_scales, float top, int num_vectors, Element* weights) {
  Vec total{};
#pragma GCC unroll 4
  for (int v = 0; v < num_vectors; ++v) {
    const Vec weight = exp2_of_nonpositive(load(scores + v * kLanes) - splat(top));
    total += weight;
    const Vec scaled = v_scales == nullptr ? weight : weight * load(v_scales + v * kLanes);
    to_elements(weights + v * kLanes, scaled);
  }
  return total;
}

template <typename Products, typename Query, typename Stored>
class Tile {
 public:
  using Element = typename Products::Element;

  // For the KV heads [kv_head, end_kv_head), one after the other.
  Tile(const AttentionArgs& args, const AttentionTile& tile, int kv_head, int end_kv_head)
      : args_(args),
        tile_(tile),
        group_(args.num_heads / args.num_kv_heads),
        last_position_(tile.first_position + tile.num_tokens - 1),
        first_key_(args.window == 0 ? 0 : std::max<int64_t>(tile.first_position - args.window + 1, 0)),
        first_start_(std::max(first_key_, tile.first_span * kSpanKeys) / kTileKeys * kTileKeys),
        end_key_(std::min(last_position_ + 1, tile.end_span * kSpanKeys)),
        kv_head_(kv_head),
        end_kv_head_(end_kv_head),
        work_(tile.num_tokens * group_, args.head_dim) {}

  void run() {
    if (first_start_ < end_key_) {
      find(first_start_, kv_head_, slots_[0]);
      prefetch_all(slots_[0]);
    }
    for (; kv_head_ < end_kv_head_; ++kv_head_) attend_head();
  }

 private:
  void attend_head() {
    load_queries();
    State all(work_.all, work_.num_rows);
    if (tile_.partial < 0) {
      begin(args_, kv_head_, work_.num_rows, all);
      for (int64_t span = tile_.first_span; span < tile_.end_span; ++span) {
        attend_span(span);
        merge(work_.num_rows, work_.padded, all, State(work_.span, work_.num_rows));
      }
      finish<Query>(args_, tile_, kv_head_, all);
    } else {
      attend_span(tile_.first_span);
      const int64_t size = partial_floats(work_.num_rows, args_.head_dim);
      std::memcpy(args_.partials + tile_.partial + kv_head_ * size, work_.span, size * sizeof(float));
    }
  }

  void load_queries() {
    for (int64_t i = 0; i < work_.num_rows; ++i) {
      const int64_t head = (tile_.first_token + i / group_) * args_.num_heads + kv_head_ * group_ + i % group_;
      const Query* const from = static_cast<const Query*>(args_.q) + head * args_.head_dim;
      Element* const to = work_.q + i * work_.padded;
      for (int64_t d = 0; d < args_.head_dim; d += kLanes * Products::kPerStep) {
        const Vec elements = elements_at<Products>(from, d, args_.head_dim);
        std::memcpy(to + d, &elements, sizeof elements);
      }
    }
  }

  // The state of the keys of one span alone.
  void attend_span(int64_t span) {
    const State state(work_.span, work_.num_rows);
    std::fill_n(state.top, work_.num_rows, kNoScore);
    std::memset(work_.totals, 0, work_.num_rows * sizeof(Vec));
    std::memset(state.sums, 0, work_.num_rows * work_.padded * sizeof(float));
    const int64_t first = std::max(first_start_, span * kSpanKeys), end = std::min(end_key_, (span + 1) * kSpanKeys);
    for (int64_t start = first; start < end; start += kTileKeys, current_ ^= 1) {
      find_next(start, slots_[current_ ^ 1]);
      attend_keys(start, slots_[current_], slots_[current_ ^ 1], state);
    }
    for (int64_t i = 0; i < work_.num_rows; ++i) state.total[i] = sum(load(work_.totals + i * kLanes));
  }

  // Where the keys [start, start + kTileKeys) are, as far as the first and the last token see them.
  void find(int64_t start, int kv_head, KeySlots& slots) const {
    slots.first = static_cast<int>(std::max<int64_t>(first_key_ - start, 0));
    slots.end = static_cast<int>(std::min<int64_t>(last_position_ + 1 - start, kTileKeys));
    find_slots(args_, tile_.row, start, kv_head, slots);
  }

  // Of what comes after the keys from `start` on: those behind them, or the next head's first ones, or none.
  void find_next(int64_t start, KeySlots& slots) const {
    slots.first = slots.end = 0;
    if (start + kTileKeys < end_key_) {
      find(start + kTileKeys, kv_head_, slots);
    } else if (kv_head_ + 1 < end_kv_head_) {
      find(first_start_, kv_head_ + 1, slots);
    }
  }

  void prefetch_all(const KeySlots& slots) const {
    for (const void* pool : {args_.k_pool, args_.v_pool}) {
      for (int key = slots.first; key < slots.end; ++key) {
        prefetch(static_cast<const Stored*>(pool) + slots.element[key], args_.head_dim);
      }
    }
  }

  // Adds the keys [start, start + kTileKeys).
  void attend_keys(int64_t start, const KeySlots& slots, const KeySlots& next, State state) {
    // Rows of tokens that see some of these keys: not before them, nor with a window that lies behind them.
    const int64_t end_token =
        args_.window == 0 ? tile_.num_tokens : start + kTileKeys - 1 + args_.window - tile_.first_position;
    const int64_t row = std::max<int64_t>(start - tile_.first_position, 0) * group_;
    const int64_t end_row = std::min<int64_t>(end_token, tile_.num_tokens) * group_;

    const int num_vectors = (slots.end + kLanes - 1) / kLanes;
    const auto source = [&](const void* pool) {
      const Stored* const zeros = reinterpret_cast<const Stored*>(work_.zeros);
      return Source<Products, Stored>{static_cast<const Stored*>(pool), args_.head_dim, slots, next, zeros};
    };
    if (args_.k_scales != nullptr) {
      pack_scales(args_.k_scales, slots, work_.k_scales);
      pack_scales(args_.v_scales, slots, work_.v_scales);
    }
    if (end_row - row <= kMaxDirectRows) {
      with_rows<kMaxDirectRows>(end_row - row, [&]<int kRows>() {
        score_directly<kRows>(source(args_.k_pool), work_.q + row * work_.padded, work_.scores + row * kTileKeys);
        softmax(start, row, end_row, num_vectors, state);
        add_values_directly<kRows>(source(args_.v_pool), work_.weights + row * kTileKeys, work_.shrink + row,
                                   state.sums + row * work_.padded);
      });
      return;
    }
    pack_keys(source(args_.k_pool), work_.keys);
    multiply_scores(row, end_row, num_vectors);
    softmax(start, row, end_row, num_vectors, state);
    pack_values(source(args_.v_pool), work_.values);
    add_values(row, end_row, slots, state);
  }

  void multiply_scores(int64_t row, int64_t end_row, int num_vectors) {
    const int64_t steps = (args_.head_dim + Products::kPerStep - 1) / Products::kPerStep;
    multiply<Products>({work_.q, work_.padded, work_.keys, kTileKeys * Products::kPerStep, steps, work_.scores,
                        kTileKeys, nullptr},
                       row, end_row, num_vectors);
  }

  void add_values(int64_t row, int64_t end_row, const KeySlots& slots, State state) {
    const int64_t first = slots.first / Products::kPerStep * Products::kPerStep;
    const int64_t steps = (slots.end - first + Products::kPerStep - 1) / Products::kPerStep;
    multiply<Products>({work_.weights + first, kTileKeys, work_.values + first * work_.padded,
                        work_.padded * Products::kPerStep, steps, state.sums, work_.padded, work_.shrink},
                       row, end_row, (args_.head_dim + kLanes - 1) / kLanes);
  }

  // Weights of rows [row, end_row) from their scores, and by how much what came before them shrinks.
  void softmax(int64_t start, int64_t row, int64_t end_row, int num_vectors, State state) {
    const bool has_scales = args_.k_scales != nullptr;
    for (int64_t i = row; i < end_row; ++i) {
      const int64_t position = tile_.first_position + i / group_;
      const int64_t first = args_.window == 0 ? 0 : std::max<int64_t>(position - args_.window + 1 - start, 0);
      const int64_t end = std::min<int64_t>(position + 1 - start, kTileKeys);
      const float top = mask_scores(args_, has_scales ? work_.k_scales : nullptr, work_.scores + i * kTileKeys,
                                    num_vectors, static_cast<int>(first), static_cast<int>(end), state.top[i]);
      work_.shrink[i] = state.top[i] - top;
      state.top[i] = top;
    }
    for (int64_t i = row; i < end_row; i += kLanes) {
      store(work_.shrink + i, exp2_of_nonpositive(load(work_.shrink + i)));
    }
    for (int64_t i = row; i < end_row; ++i) {
      const Vec total = weigh(work_.scores + i * kTileKeys, has_scales ? work_.v_scales : nullptr, state.top[i],
                              num_vectors, work_.weights + i * kTileKeys);
      float* const totals = work_.totals + i * kLanes;
      store(totals, load(totals) * splat(work_.shrink[i]) + total);
    }
  }

  const AttentionArgs& args_;
  const AttentionTile& tile_;
  const int64_t group_;
  const int64_t last_position_;
  const int64_t first_key_;    // that the first token sees, which sees the earliest
  const int64_t first_start_;  // of the keys that are attended to first
  const int64_t end_key_;      // of the spans
  int kv_head_;
  const int end_kv_head_;
  KeySlots slots_[2];  // of the keys under way, and of the next ones
  int current_ = 0;
  Workspace<Products> work_;
};

// Adds up a tile's spans that were attended apart.
template <typename Query>
void merge_spans(const AttentionArgs& args, const AttentionMerge& spans, int kv_head) {
  const int64_t num_rows = spans.tile.num_tokens * (args.num_heads / args.num_kv_heads);
  thread_local Memory memory;
  const int64_t size = partial_floats(num_rows, args.head_dim);
  const State all(memory.of<float>(size), num_rows);
  begin(args, kv_head, num_rows, all);
  float* partial = args.partials + spans.tile.partial + kv_head * size;
  for (int span = spans.tile.first_span; span < spans.tile.end_span; ++span, partial += spans.partial_size) {
    merge(num_rows, padded_head_dim(args.head_dim), all, State(partial, num_rows));
  }
  finish<Query>(args, spans.tile, kv_head, all);
}

template <typename Products, typename Query, typename Stored>
void attend(const AttentionArgs& args) {
  const int64_t num_heads = args.num_kv_heads, tasks_per_tile = num_heads / args.task_heads;
  parallel_for(args.num_tiles * tasks_per_tile, [&](int64_t task) {
    const int head = static_cast<int>(task % tasks_per_tile * args.task_heads);
    Tile<Products, Query, Stored>(args, args.tiles[task / tasks_per_tile], head, head + args.task_heads).run();
  });
  if (args.num_merges == 0) return;
  parallel_for(args.num_merges * num_heads, [&](int64_t task) {
    merge_spans<Query>(args, args.merges[task / num_heads], static_cast<int>(task % num_heads));
  });
}

template <typename Products, typename Query>
void attend(const AttentionArgs& args) {
  switch (args.pool_type) {
    case PoolType::kInt8: return attend<Products, Query, Int8>(args);
    case PoolType::kFp8: return attend<Products, Query, Fp8>(args);
    default: return attend<Products, Query, Query>(args);
  }
}

}  // namespace paged

inline void attention(const AttentionArgs& args) {
#if defined(__AVX512BF16__)
  using OfBF16 = paged::BF16Products;
#else
  using OfBF16 = paged::F32Products;
#endif
  switch (args.dtype) {
    case DType::kF32: return paged::attend<paged::F32Products, float>(args);
    case DType::kBF16: return paged::attend<OfBF16, BF16>(args);
    case DType::kF16: return paged::attend<paged::F32Products, F16>(args);
  }
}

}  // namespace jaxpaged::JAXPAGED_ISA
