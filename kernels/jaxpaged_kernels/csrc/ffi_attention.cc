// XLA's handlers of attention: they look at the buffers, divide the work, and call the kernels of this processor.
#include <algorithm>
#include <cstring>
#include <optional>
#include <vector>

#include "kernels.h"
#include "thread_pool.h"
#include "xla/ffi/api/ffi.h"

namespace jaxpaged {
namespace {

namespace ffi = xla::ffi;

// Rows (tokens times the heads that share a KV head) of a tile: enough to make up for packing the keys.
constexpr int64_t kTileRows = 96;
// Tiles of up to this many tokens are divided by spans of keys, so that few queries of long sequences keep all threads
// busy.
constexpr int64_t kMaxDividedTokens = 4;

// The work of a call. It is kept by its thread, for the memory.
struct Plan {
  std::vector<AttentionTile> tiles;
  std::vector<AttentionMerge> merges;
  std::vector<float> partials;
};

struct Batch {
  const int32_t* kv_lens;
  const int32_t* query_starts;
  int64_t num_rows, num_tokens;
  int64_t max_kv_len;  // as far as the block tables reach
  bool decode_only;

  int64_t first_token(int64_t row) const {
    return decode_only ? row : std::clamp<int64_t>(query_starts[row], 0, num_tokens);
  }
  int64_t end_token(int64_t row) const {
    return decode_only ? row + 1 : std::clamp<int64_t>(query_starts[row + 1], first_token(row), num_tokens);
  }
};

// KV heads of a task: where there are tasks enough without dividing them, all, as they lie side by side in memory.
int task_heads(const std::vector<AttentionTile>& tiles, int64_t num_kv_heads) {
  const bool all_small = std::all_of(tiles.begin(), tiles.end(),
                                     [](const AttentionTile& tile) { return tile.num_tokens <= kMaxDividedTokens; });
  return static_cast<int>(all_small && static_cast<int64_t>(tiles.size()) >= 8 * num_threads() ? num_kv_heads : 1);
}

int64_t span_of(int64_t position) { return position / kSpanKeys; }

// Cuts the rows into tiles: the costly ones first, so that the threads end together.
void make_plan(const Batch& batch, const AttentionArgs& args, Plan& plan) {
  plan.tiles.clear();
  plan.merges.clear();
  const int64_t group = args.num_heads / args.num_kv_heads;
  const int64_t tile_tokens = std::max<int64_t>(kTileRows / group, 1);
  std::vector<AttentionTile>& tiles = plan.tiles;
  int64_t num_partials = 0;
  for (int64_t row = 0; row < batch.num_rows; ++row) {
    const int64_t kv_len = std::clamp<int64_t>(batch.kv_lens[row], 0, batch.max_kv_len);
    const int64_t end = batch.end_token(row);
    for (int64_t token = batch.first_token(row); token < end; token += tile_tokens) {
      const int64_t count = std::min(tile_tokens, end - token);
      const int64_t position = kv_len - (end - token), last = position + count - 1;
      const int64_t first_key = args.window == 0 ? 0 : std::max<int64_t>(position - args.window + 1, 0);
      AttentionTile tile = {static_cast<int32_t>(row),
                            static_cast<int32_t>(token),
                            static_cast<int32_t>(count),
                            static_cast<int32_t>(position),
                            static_cast<int32_t>(span_of(first_key)),
                            static_cast<int32_t>(last < 0 ? 0 : span_of(last) + 1),
                            -1};
      if (count > kMaxDividedTokens || tile.end_span - tile.first_span < 2) {
        tiles.push_back(tile);
        continue;
      }
      tile.partial = num_partials;
      const int64_t size = args.num_kv_heads * partial_floats(count * group, args.head_dim);
      plan.merges.push_back({tile, size});
      for (int32_t span = tile.first_span; span < plan.merges.back().tile.end_span; ++span) {
        tile.first_span = span;
        tile.end_span = span + 1;
        tile.partial = num_partials;
        tiles.push_back(tile);
        num_partials += size;
      }
    }
  }
  const auto cost = [](const AttentionTile& tile) {
    const int64_t keys = std::min<int64_t>(tile.first_position + tile.num_tokens, tile.end_span * kSpanKeys);
    return tile.num_tokens * (keys - tile.first_span * kSpanKeys);
  };
  std::sort(tiles.begin(), tiles.end(),
            [&](const AttentionTile& a, const AttentionTile& b) { return cost(a) > cost(b); });
  if (static_cast<int64_t>(plan.partials.size()) < num_partials) plan.partials.resize(num_partials);
}

std::optional<DType> dtype_of(const ffi::AnyBuffer& buffer) {
  switch (buffer.element_type()) {
    case ffi::DataType::F32: return DType::kF32;
    case ffi::DataType::BF16: return DType::kBF16;
    case ffi::DataType::F16: return DType::kF16;
    default: return std::nullopt;
  }
}

std::optional<PoolType> pool_type_of(const ffi::AnyBuffer& buffer) {
  switch (buffer.element_type()) {
    case ffi::DataType::F32: return PoolType::kF32;
    case ffi::DataType::BF16:
    case ffi::DataType::U16: return PoolType::kBF16;  // U16, U8: raw bits
    case ffi::DataType::F16: return PoolType::kF16;
    case ffi::DataType::S8: return PoolType::kInt8;
    case ffi::DataType::F8E4M3FN:
    case ffi::DataType::U8: return PoolType::kFp8;
    default: return std::nullopt;
  }
}

// Shapes and dtypes are checked where the call is made (native_attention.py); here only what the kernels could not
// bear.
ffi::Error check_types(std::optional<DType> dtype, std::optional<PoolType> pool_type, bool has_scales) {
  const bool is_quantized = pool_type == PoolType::kInt8 || pool_type == PoolType::kFp8;
  const bool is_alike = (dtype == DType::kF32 && pool_type == PoolType::kF32) ||
                        (dtype == DType::kBF16 && pool_type == PoolType::kBF16) ||
                        (dtype == DType::kF16 && pool_type == PoolType::kF16);
  if (!dtype || !(is_quantized ? has_scales : is_alike && !has_scales)) {
    return ffi::Error::InvalidArgument("q must be float32, bfloat16 or float16, and pools of its dtype or quantized");
  }
  return ffi::Error::Success();
}

template <typename T>
T* data_or_null(const ffi::AnyBuffer& buffer) {
  return buffer.element_count() == 0 ? nullptr : static_cast<T*>(buffer.untyped_data());
}

ffi::Error run_attention(ffi::AnyBuffer q, ffi::AnyBuffer k_pool, ffi::AnyBuffer v_pool, ffi::AnyBuffer block_tables,
                         ffi::AnyBuffer kv_lens, ffi::AnyBuffer query_starts, ffi::AnyBuffer sinks,
                         ffi::AnyBuffer k_scales, ffi::AnyBuffer v_scales, ffi::Result<ffi::AnyBuffer> out,
                         float scale, float soft_cap, int64_t window, bool decode_only) {
  const auto dtype = dtype_of(q);
  const auto pool_type = pool_type_of(k_pool);
  if (auto error = check_types(dtype, pool_type, k_scales.element_count() > 0); error.failure()) return error;
  AttentionArgs args{};
  args.dtype = *dtype;
  args.pool_type = *pool_type;
  args.num_heads = q.dimensions()[1];
  args.num_blocks = k_pool.dimensions()[0];
  args.block_size = k_pool.dimensions()[1];
  args.num_kv_heads = k_pool.dimensions()[2];
  args.head_dim = k_pool.dimensions()[3];
  args.table_width = block_tables.dimensions()[1];
  args.q = q.untyped_data();
  args.k_pool = k_pool.untyped_data();
  args.v_pool = v_pool.untyped_data();
  args.k_scales = data_or_null<float>(k_scales);
  args.v_scales = data_or_null<float>(v_scales);
  args.sinks = data_or_null<float>(sinks);
  args.block_tables = static_cast<const int32_t*>(block_tables.untyped_data());
  args.scale = scale;
  args.soft_cap = soft_cap;
  args.window = window;
  args.out = out->untyped_data();

  const Batch batch = {static_cast<const int32_t*>(kv_lens.untyped_data()),
                       static_cast<const int32_t*>(query_starts.untyped_data()),
                       block_tables.dimensions()[0],
                       q.dimensions()[0],
                       args.table_width * args.block_size,
                       decode_only};
  thread_local Plan plan;
  make_plan(batch, args, plan);
  args.tiles = plan.tiles.data();
  args.task_heads = task_heads(plan.tiles, args.num_kv_heads);
  args.num_tiles = static_cast<int64_t>(plan.tiles.size());
  args.merges = plan.merges.data();
  args.num_merges = static_cast<int64_t>(plan.merges.size());
  args.partials = plan.partials.data();
  kernels().attention(args);

  const int64_t end = batch.end_token(batch.num_rows - 1);
  const size_t token_bytes = q.size_bytes() / batch.num_tokens;
  std::memset(static_cast<char*>(args.out) + end * token_bytes, 0, (batch.num_tokens - end) * token_bytes);
  return ffi::Error::Success();
}

// The pools come in twice, as arguments and as the results that they are aliased to.
ffi::Error run_rotate_and_write(ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v, ffi::AnyBuffer cos,
                                ffi::AnyBuffer sin, ffi::AnyBuffer slots, ffi::RemainingArgs pools,
                                ffi::Result<ffi::AnyBuffer> rotated_q, ffi::RemainingRets results) {
  auto k_pool = results.get<ffi::AnyBuffer>(0), v_pool = results.get<ffi::AnyBuffer>(1);
  const bool has_scales = results.size() == 4;
  if (!k_pool.has_value() || !v_pool.has_value() || pools.size() != results.size()) {
    return ffi::Error::InvalidArgument("2 pools are needed, or 2 and their scales");
  }
  const auto dtype = dtype_of(q);
  const auto pool_type = pool_type_of(**k_pool);
  if (auto error = check_types(dtype, pool_type, has_scales); error.failure()) return error;
  RotateAndWriteArgs args{};
  args.dtype = *dtype;
  args.pool_type = *pool_type;
  args.num_tokens = q.dimensions()[0];
  args.num_heads = q.dimensions()[1];
  args.head_dim = q.dimensions()[2];
  args.num_kv_heads = k.dimensions()[1];
  args.num_slots = (*k_pool)->dimensions()[0] * (*k_pool)->dimensions()[1];
  args.q = q.untyped_data();
  args.k = k.untyped_data();
  args.v = v.untyped_data();
  args.cos = static_cast<const float*>(cos.untyped_data());
  args.sin = static_cast<const float*>(sin.untyped_data());
  args.slots = static_cast<const int32_t*>(slots.untyped_data());
  args.rotated_q = rotated_q->untyped_data();
  args.k_pool = (*k_pool)->untyped_data();
  args.v_pool = (*v_pool)->untyped_data();
  if (has_scales) {
    args.k_scales = static_cast<float*>((*results.get<ffi::AnyBuffer>(2))->untyped_data());
    args.v_scales = static_cast<float*>((*results.get<ffi::AnyBuffer>(3))->untyped_data());
  }
  kernels().rotate_and_write(args);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxpaged

namespace ffi = xla::ffi;

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxpagedAttention, jaxpaged::run_attention,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()   // q
                                  .Arg<ffi::AnyBuffer>()   // k_pool
                                  .Arg<ffi::AnyBuffer>()   // v_pool
                                  .Arg<ffi::AnyBuffer>()   // block_tables
                                  .Arg<ffi::AnyBuffer>()   // kv_lens
                                  .Arg<ffi::AnyBuffer>()   // query_starts
                                  .Arg<ffi::AnyBuffer>()   // sinks, or nothing
                                  .Arg<ffi::AnyBuffer>()   // k_scales, or nothing
                                  .Arg<ffi::AnyBuffer>()   // v_scales, or nothing
                                  .Ret<ffi::AnyBuffer>()   // out
                                  .Attr<float>("scale")
                                  .Attr<float>("soft_cap")
                                  .Attr<int64_t>("window")
                                  .Attr<bool>("decode_only"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxpagedRotateAndWrite, jaxpaged::run_rotate_and_write,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()   // q
                                  .Arg<ffi::AnyBuffer>()   // k
                                  .Arg<ffi::AnyBuffer>()   // v
                                  .Arg<ffi::AnyBuffer>()   // cos
                                  .Arg<ffi::AnyBuffer>()   // sin
                                  .Arg<ffi::AnyBuffer>()   // slots
                                  .RemainingArgs()         // pools
                                  .Ret<ffi::AnyBuffer>()   // rotated q
                                  .RemainingRets());       // pools
