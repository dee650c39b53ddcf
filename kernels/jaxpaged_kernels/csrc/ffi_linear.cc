// `linear` as XLA calls it. Arguments: x, the number of its rows that count, the weights, those biases that exist, then norm
// and residual if there are any. `formats` has 4 bits for each weight's.
#include <algorithm>
#include <utility>

#include "kernels.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jaxpaged {
namespace {

ffi::ErrorOr<DType> dtype_of(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::F32: return DType::kF32;
    case ffi::DataType::BF16: return DType::kBF16;
    case ffi::DataType::F16: return DType::kF16;
    default: return ffi::Unexpected(ffi::Error::InvalidArgument("linear takes float32, bfloat16 and float16 only"));
  }
}

ffi::Error run_linear(ffi::RemainingArgs arguments, ffi::RemainingRets results, int64_t num_parts, int64_t formats, int64_t biases,
                      bool norm, bool residual, bool swiglu, float eps) {
  // The counts are checked where the call is made (linear.py); here only what would read beyond the arguments.
  size_t next = 0;
  const auto argument = [&]() -> ffi::ErrorOr<ffi::AnyBuffer> { return arguments.get<ffi::AnyBuffer>(next++); };
  if (num_parts < 1 || num_parts > LinearArgs::kMaxParts) return ffi::Error::InvalidArgument("linear takes 1 to 3 weights");

  LinearArgs args{};
  auto x = argument();
  if (x.has_error()) return x.error();
  auto dtype = dtype_of(x->element_type());
  if (dtype.has_error()) return dtype.error();
  args.dtype = *dtype;
  auto num_tokens = arguments.get<ffi::BufferR0<ffi::S32>>(next++);
  if (num_tokens.has_error()) return num_tokens.error();
  args.num_tokens = std::clamp<int64_t>(*num_tokens->typed_data(), 0, x->dimensions()[0]);
  args.in_features = x->dimensions()[1];
  args.x = x->untyped_data();
  args.num_parts = static_cast<int>(num_parts);
  args.swiglu = swiglu;
  args.eps = eps;
  for (int i = 0; i < num_parts; ++i) {
    auto weight = argument();
    if (weight.has_error()) return weight.error();
    args.weights[i] = weight->untyped_data();
    args.formats[i] = static_cast<Format>(formats >> (4 * i) & 15);
  }
  for (int i = 0; i < num_parts; ++i) {
    if ((biases >> i & 1) == 0) continue;
    auto bias = argument();
    if (bias.has_error()) return bias.error();
    args.biases[i] = bias->untyped_data();
  }
  for (const auto& [wanted, pointer] : {std::pair{norm, &args.norm}, std::pair{residual, &args.residual}}) {
    if (!wanted) continue;
    auto buffer = argument();
    if (buffer.has_error()) return buffer.error();
    *pointer = buffer->untyped_data();
  }
  for (size_t i = 0; i < results.size(); ++i) {
    auto result = results.get<ffi::AnyBuffer>(i);
    if (result.has_error()) return result.error();
    auto out_dtype = dtype_of((*result)->element_type());
    if (out_dtype.has_error()) return out_dtype.error();
    args.out_dtype = *out_dtype;
    args.outputs[i] = (*result)->untyped_data();
    args.out_features[i] = (*result)->dimensions()[1];
  }
  if (swiglu) args.out_features[1] = args.out_features[0];
  kernels().linear(args);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxpaged

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxpagedLinear, jaxpaged::run_linear,
                              ffi::Ffi::Bind()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<int64_t>("num_parts")
                                  .Attr<int64_t>("formats")
                                  .Attr<int64_t>("biases")
                                  .Attr<bool>("norm")
                                  .Attr<bool>("residual")
                                  .Attr<bool>("swiglu")
                                  .Attr<float>("eps"));
