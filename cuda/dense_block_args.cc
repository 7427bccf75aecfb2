#include <limits>
#include <string>

#include "conv_plan.h"
#include "dense_block.h"

namespace jsc {
namespace {

constexpr int64_t kMaxElements = std::numeric_limits<int32_t>::max(), kMaxChannels = 4096, kFar = 1 << 13;
constexpr size_t kParameters = 5;  // of a layer

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

}  // namespace

ffi::ErrorOr<DenseBlockCall> MakeDenseBlockCall(ffi::AnyBuffer x, ffi::RemainingArgs parameters, ffi::AnyBuffer out,
                                                int64_t precision) {
  if (precision < 0 || precision > 2) return Invalid("attribute precision must be 0, 1 or 2");
  const auto size = x.dimensions();
  if (size.size() != 4) return Invalid("x must be [N, H, W, C]");
  const int64_t layers = static_cast<int64_t>(parameters.size() / kParameters);
  if (layers < 1 || parameters.size() % kParameters != 0) return Invalid("a dense block has five parameters a layer");
  const int64_t channels = size[3], total = channels + layers * kGrowth;
  if (channels < kDenseChannels || channels % kDenseChannels != 0 || total > kMaxChannels) {
    return Invalid("x must have a multiple of 32 channels, and the result at most " + std::to_string(kMaxChannels));
  }
  const bool is_small = size[0] >= 1 && size[1] >= 1 && size[2] >= 1 && size[1] <= kFar && size[2] <= kFar;
  if (!is_small || size[0] > kMaxElements / total / (size[1] * size[2])) {
    return Invalid("x must have sizes from 1 on, and the result at most 2^31 - 1 elements");
  }
  if (!HasSize(out, x.element_type(), {size[0], size[1], size[2], total})) {
    return Invalid("the result is not [N, H, W, C0 + 32 * layers] of x's dtype");
  }
  DenseBlockCall call{x.element_type(),   false, size[0], size[1], size[2], channels, x.untyped_data(),
                      out.untyped_data(), {}};
  call.precise = call.dtype == ffi::DataType::F32 && precision == static_cast<int64_t>(Precision::kHighest);
  call.layers.resize(static_cast<size_t>(layers));
  for (int64_t i = 0; i < layers; ++i) {
    const size_t first = static_cast<size_t>(i) * kParameters;
    const std::string wrong = ReadLayer(parameters, first, call.dtype, channels + i * kGrowth, &call.layers[i]);
    if (!wrong.empty()) return Invalid("layer " + std::to_string(i) + ": " + wrong);
  }
  return call;
}

}  // namespace jsc
