#include <limits>
#include <string>

#include "conv_plan.h"
#include "dense_block.h"

namespace jsc {
namespace {

constexpr int64_t kMaxElements = std::numeric_limits<int32_t>::max(), kMaxChannels = 4096, kFar = 1 << 13;
constexpr size_t kParameters = 5, kTransitionParameters = 3;  // of a layer and of a transition
constexpr int64_t kMaxTransition = 2048;                      // channels

ffi::Unexpected<ffi::Error> Invalid(const std::string& sentence) {
  return ffi::Unexpected(ffi::Error(ffi::ErrorCode::kInvalidArgument, sentence));
}

bool HasSize(ffi::AnyBuffer buffer, ffi::DataType dtype, std::initializer_list<int64_t> size) {
  const auto found = buffer.dimensions();
  return buffer.element_type() == dtype &&
         std::vector<int64_t>(found.begin(), found.end()) == std::vector<int64_t>(size);
}

// The parameters of one layer for so many channels; what is wrong with them, or nothing.
std::string ReadLayer(ffi::RemainingArgs parameters, size_t first, ffi::DataType dtype, int64_t channels,
                      DenseLayerArgs* layer) {
  const void** targets[] = {&layer->scale, &layer->shift, &layer->kernel1, &layer->bias1, &layer->kernel2};
  const std::initializer_list<int64_t> sizes[] = {
      {channels}, {channels}, {1, 1, channels, kMiddle}, {kMiddle}, {3, 3, kMiddle, kGrowth}};
  const char* names[] = {"scale is not [C]", "shift is not [C]", "kernel1 is not [1, 1, C, 128]", "bias1 is not [128]",
                         "kernel2 is not [3, 3, 128, 32]"};
  for (size_t i = 0; i < kParameters; ++i) {
    auto buffer = parameters.get<ffi::AnyBuffer>(first + i);
    if (!buffer.has_value() || !HasSize(*buffer, dtype, sizes[i])) return names[i] + std::string(", of x's dtype");
    *targets[i] = buffer->untyped_data();
  }
  return "";
}

// The parameters of a transition behind so many channels; what is wrong with them, or nothing.
std::string ReadTransition(ffi::RemainingArgs parameters, size_t first, ffi::DataType dtype, int64_t channels,
                           DenseTransitionArgs* transition) {
  auto scale = parameters.get<ffi::AnyBuffer>(first), shift = parameters.get<ffi::AnyBuffer>(first + 1);
  auto kernel = parameters.get<ffi::AnyBuffer>(first + 2);
  if (!scale.has_value() || !HasSize(*scale, dtype, {channels})) return "scale is not [C], of x's dtype";
  if (!shift.has_value() || !HasSize(*shift, dtype, {channels})) return "shift is not [C], of x's dtype";
  transition->features = kernel.has_value() && kernel->dimensions().size() == 4 ? kernel->dimensions()[3] : 0;
  const int64_t features = transition->features;
  if (features < 1 || features % 8 != 0 || features > kMaxChannels ||
      !HasSize(*kernel, dtype, {1, 1, channels, features})) {
    return "kernel is not [1, 1, C, K] with K a multiple of 8, of x's dtype";
  }
  if (channels > kMaxTransition) return "C is more than " + std::to_string(kMaxTransition);
  transition->scale = scale->untyped_data();
  transition->shift = shift->untyped_data();
  transition->kernel = kernel->untyped_data();
  return "";
}

}  // namespace

ffi::ErrorOr<DenseBlockCall> MakeDenseBlockCall(ffi::AnyBuffer x, ffi::RemainingArgs parameters, ffi::AnyBuffer out,
                                                ffi::RemainingRets rest, int64_t precision) {
  if (precision < 0 || precision > 2) return Invalid("attribute precision must be 0, 1 or 2");
  const auto size = x.dimensions();
  if (size.size() != 4) return Invalid("x must be [N, H, W, C]");
  const int64_t layers = static_cast<int64_t>(parameters.size() / kParameters);
  const size_t others = parameters.size() % kParameters;
  const bool pools = others == kTransitionParameters;
  if (layers < 1 || (others != 0 && !pools)) {
    return Invalid("a dense block has five parameters a layer, and three of a transition or none");
  }
  if (rest.size() != (pools ? 1 : 0)) return Invalid("the block's map is a second result where a transition follows");
  const int64_t channels = size[3], total = channels + layers * kGrowth;
  if (channels < kDenseChannels || channels % kDenseChannels != 0 || total > kMaxChannels) {
    return Invalid("x must have a multiple of 32 channels, and the result at most " + std::to_string(kMaxChannels));
  }
  const bool is_small = size[0] >= 1 && size[1] >= 1 && size[2] >= 1 && size[1] <= kFar && size[2] <= kFar;
  if (!is_small || size[0] > kMaxElements / total / (size[1] * size[2])) {
    return Invalid("x must have sizes from 1 on, and the result at most 2^31 - 1 elements");
  }
  ffi::AnyBuffer map = out;
  if (pools) {
    auto second = rest.get<ffi::AnyBuffer>(0);
    if (second.has_error()) return Invalid("the block's map is missing");
    map = **second;
  }
  if (!HasSize(map, x.element_type(), {size[0], size[1], size[2], total})) {
    return Invalid("the block's map is not [N, H, W, C0 + 32 * layers] of x's dtype");
  }
  DenseBlockCall call{x.element_type(),   false, size[0], size[1], size[2], channels, x.untyped_data(),
                      map.untyped_data(), {},    {}};
  call.precise = call.dtype == ffi::DataType::F32 && precision == static_cast<int64_t>(Precision::kHighest);
  call.layers.resize(static_cast<size_t>(layers));
  for (int64_t i = 0; i < layers; ++i) {
    const size_t first = static_cast<size_t>(i) * kParameters;
    const std::string wrong = ReadLayer(parameters, first, call.dtype, channels + i * kGrowth, &call.layers[i]);
    if (!wrong.empty()) return Invalid("layer " + std::to_string(i) + ": " + wrong);
  }
  if (!pools) return call;
  const size_t first = static_cast<size_t>(layers) * kParameters;
  const std::string wrong = ReadTransition(parameters, first, call.dtype, total, &call.transition);
  if (!wrong.empty()) return Invalid("transition: " + wrong);
  if (size[1] < 2 || size[2] < 2 ||
      !HasSize(out, call.dtype, {size[0], size[1] / 2, size[2] / 2, call.transition.features})) {
    return Invalid("the result is not [N, H / 2, W / 2, K] of x's dtype");
  }
  call.transition.out = out.untyped_data();
  return call;
}

}  // namespace jsc
