// Online softmax: what is known of a tile's queries after some of the keys, in memory that each thread keeps.
#pragma once

#include "memory.h"
#include "attention_pack.h"

namespace jaxpaged::JAXPAGED_ISA::paged {

// Scores are in units of log2, so that a weight is 2^score. As finite as it is low: no key has been seen yet, and what
// there is of none is scaled by 2^0 or by 0, not by NaN.
inline constexpr float kNoScore = -1e30f;
inline constexpr float kLog2E = 1.44269504088896341f;

// Of every query: the largest score so far, the sum of weights 2^(score - top), and the sum of weights times values.
struct State {
  float* top;    // [queries]
  float* total;  // [queries]
  float* sums;   // [queries, padded head_dim]

  State(float* at, int64_t num_queries) : top(at), total(at + num_queries), sums(at + 2 * num_queries) {}
};

// The state before any key: a sink counts as a key without a value.
inline void begin(const AttentionArgs& args, int kv_head, int64_t num_queries, State state) {
  const int64_t group = args.num_heads / args.num_kv_heads;
  for (int64_t i = 0; i < num_queries; ++i) {
    state.top[i] = args.sinks == nullptr ? kNoScore : args.sinks[kv_head * group + i % group] * kLog2E;
    state.total[i] = args.sinks == nullptr ? 0.0f : 1.0f;
  }
  std::memset(state.sums, 0, num_queries * padded_head_dim(args.head_dim) * sizeof(float));
}

// Adds the keys of `more`. Not inlined: results are the same bit for bit wherever it is called.
[[gnu::noinline]] inline void merge(int64_t num_queries, int64_t padded, State state, State more) {
  for (int64_t i = 0; i < num_queries; ++i) {
    const float top = state.top[i] > more.top[i] ? state.top[i] : more.top[i];
    const Vec old_factor = exp2_of_nonpositive(splat(state.top[i] - top));
    const Vec more_factor = exp2_of_nonpositive(splat(more.top[i] - top));
    state.top[i] = top;
    state.total[i] = state.total[i] * old_factor[0] + more.total[i] * more_factor[0];
    float* const sums = state.sums + i * padded;
    for (int64_t d = 0; d < padded; d += kLanes) {
      store(sums + d, load(sums + d) * old_factor + load(more.sums + i * padded + d) * more_factor);
    }
  }
}

// Writes the result of queries whose keys are all in `state`.
template <typename Query>
void finish(const AttentionArgs& args, const AttentionTile& tile, int kv_head, State state) {
  const int64_t group = args.num_heads / args.num_kv_heads, padded = padded_head_dim(args.head_dim);
  for (int64_t i = 0; i < tile.num_tokens * group; ++i) {
    const int64_t head = (tile.first_token + i / group) * args.num_heads + kv_head * group + i % group;
    Query* const out = static_cast<Query*>(args.out) + head * args.head_dim;
    const float* const sums = state.sums + i * padded;
    const Vec total = splat(state.total[i] == 0 ? 1.0f : state.total[i]);  // 0: it sees no key
    int64_t d = 0;
    for (; d + kLanes <= args.head_dim; d += kLanes) store(out + d, load(sums + d) / total);
    if (d < args.head_dim) store_first(out + d, load(sums + d) / total, static_cast<int>(args.head_dim - d));
  }
}

// What a tile of queries needs for one KV head; a row is a query token and one of the heads that share the KV head.
template <typename Products>
struct Workspace {
  using Element = typename Products::Element;

  int64_t num_rows;
  int64_t padded;         // head size
  float* span;            // a State: of the span of keys under way
  float* all;             // a State: of all spans before it
  float* totals;          // [rows, lanes]: of the span, not yet added up
  float* shrink;          // [rows]: 2^(top before - top now)
  float* scores;          // [rows, kTileKeys]
  Element* weights;       // [rows, kTileKeys]
  Element* q;             // [rows, padded]
  Element* keys;          // packed
  Element* values;        // packed
  Element* zeros;         // [padded], or more of a smaller type
  float k_scales[kTileKeys], v_scales[kTileKeys];

  Workspace(int64_t rows, int64_t head_dim) : num_rows(rows), padded(padded_head_dim(head_dim)) {
    thread_local Memory memory;
    char* at = nullptr;
    for (int pass = 0; pass < 2; ++pass) {  // the first one finds the size
      char* const start = at;
      take(at, span, partial_floats(rows, head_dim));
      take(at, all, partial_floats(rows, head_dim));
      take(at, totals, rows * kLanes);
      take(at, shrink, rows + kLanes);  // a vector of them may start at any row
      take(at, scores, rows * kTileKeys);
      take(at, weights, rows * kTileKeys);
      take(at, q, rows * padded);
      take(at, keys, kTileKeys * padded);
      take(at, values, kTileKeys * padded);
      take(at, zeros, padded);
      if (pass == 0) at = memory.of<char>(at - start);
    }
    std::memset(zeros, 0, padded * sizeof(Element));
  }

 private:
  template <typename T>
  static void take(char*& at, T*& array, int64_t count) {
    array = reinterpret_cast<T*>(at);
    at += (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
  }
};

}  // namespace jaxpaged::JAXPAGED_ISA::paged
