#include <string>
#include <vector>

#include "cuda/core/device_call.h"
#include "cuda/core/device_info.h"
#include "cuda/densenet/decode.h"

namespace jsc {
namespace {

constexpr size_t kParameters = 5, kTransitionParameters = 3;  // of a layer and of a transition
constexpr int64_t kPackedBytes = 128;                         // parameters in one buffer start at a multiple of so many

ffi::Unexpected<ffi::Error> Invalid(const std::string& sentence) {
  return ffi::Unexpected(ffi::Error(ffi::ErrorCode::kInvalidArgument, sentence));
}

bool HasSize(ffi::AnyBuffer buffer, ffi::DataType dtype, std::initializer_list<int64_t> size) {
  const auto found = buffer.dimensions();
  return buffer.element_type() == dtype &&
         std::vector<int64_t>(found.begin(), found.end()) == std::vector<int64_t>(size);
}

// Where a call's parameters lie: each in a buffer of its own, or all in one at offsets that an attribute has.
class Parameters {
 public:
  static ffi::ErrorOr<Parameters> Of(ffi::RemainingArgs operands, ffi::DataType dtype, ffi::Dictionary attributes) {
    Parameters found{operands, dtype};
    if (!attributes.contains("offsets")) return found;
    const auto offsets = attributes.get<ffi::Span<const int64_t>>("offsets");
    if (!offsets.has_value()) return Invalid("attribute offsets must be an array of int64");
    const auto packed = operands.get<ffi::AnyBuffer>(0);
    if (operands.size() != 1 || !packed.has_value() || packed->element_type() != dtype ||
        packed->dimensions().size() != 1) {
      return Invalid("with attribute offsets the only parameter must be one array [size] of x's dtype");
    }
    found.is_packed_ = true;
    found.offsets_.assign(offsets->begin(), offsets->end());
    found.packed_ = static_cast<const char*>(packed->untyped_data());
    found.elements_ = static_cast<int64_t>(packed->element_count());
    return found;
  }

  size_t count() const { return is_packed_ ? offsets_.size() : operands_.size(); }

  // The last size of a parameter of four, which a packed one does not tell; 0 where it has not so many.
  int64_t OutChannels(size_t i, int64_t if_packed) const {
    if (is_packed_) return if_packed;
    auto buffer = operands_.get<ffi::AnyBuffer>(i);
    return buffer.has_value() && buffer->dimensions().size() == 4 ? buffer->dimensions()[3] : 0;
  }

  // A parameter of such a size, which `text` describes; what is wrong with it, or nothing.
  std::string Find(size_t i, std::initializer_list<int64_t> size, const char* text, const void** data) const {
    if (!is_packed_) {
      auto buffer = operands_.get<ffi::AnyBuffer>(i);
      if (!buffer.has_value() || !HasSize(*buffer, dtype_, size)) return text + std::string(", of x's dtype");
      *data = buffer->untyped_data();
      return "";
    }
    int64_t elements = 1;
    for (const int64_t n : size) elements *= n;
    const int64_t offset = offsets_[i], bytes = static_cast<int64_t>(ffi::ByteWidth(dtype_));
    if (offset < 0 || elements > elements_ || offset > elements_ - elements || offset * bytes % kPackedBytes != 0) {
      return "offset " + std::to_string(offset) + " is not a multiple of 128 bytes, or leaves the packed parameters";
    }
    *data = packed_ + offset * bytes;
    return "";
  }

 private:
  Parameters(ffi::RemainingArgs operands, ffi::DataType dtype) : operands_(operands), dtype_(dtype) {}

  ffi::RemainingArgs operands_;
  ffi::DataType dtype_;
  bool is_packed_ = false;
  std::vector<int64_t> offsets_;  // elements
  const char* packed_ = nullptr;
  int64_t elements_ = 0;
};

// The parameters of one layer for so many channels; what is wrong with them, or nothing.
std::string ReadLayer(const Parameters& parameters, size_t first, int64_t channels, DenseLayerArgs* layer) {
  const void** targets[] = {&layer->scale, &layer->shift, &layer->kernel1, &layer->bias1, &layer->kernel2};
  const std::initializer_list<int64_t> sizes[] = {
      {channels}, {channels}, {1, 1, channels, kMiddle}, {kMiddle}, {3, 3, kMiddle, kGrowth}};
  const char* texts[] = {"scale is not [C]", "shift is not [C]", "kernel1 is not [1, 1, C, 128]", "bias1 is not [128]",
                         "kernel2 is not [3, 3, 128, 32]"};
  for (size_t i = 0; i < kParameters; ++i) {
    const std::string wrong = parameters.Find(first + i, sizes[i], texts[i], targets[i]);
    if (!wrong.empty()) return wrong;
  }
  return "";
}

// The parameters of a transition behind so many channels; what is wrong with them, or nothing.
std::string ReadTransition(const Parameters& parameters, size_t first, int64_t channels,
                           DenseTransitionArgs* transition) {
  std::string wrong = parameters.Find(first, {channels}, "scale is not [C]", &transition->scale);
  if (wrong.empty()) wrong = parameters.Find(first + 1, {channels}, "shift is not [C]", &transition->shift);
  if (!wrong.empty()) return wrong;
  return parameters.Find(first + 2, {1, 1, channels, transition->out_channels}, "kernel is not [1, 1, C, K]",
                         &transition->kernel);
}

}  // namespace

ffi::ErrorOr<DenseBlockCall> MakeDenseBlockCall(ffi::AnyBuffer x, ffi::RemainingArgs operands, ffi::AnyBuffer out,
                                                ffi::RemainingRets rest, ffi::Dictionary attributes) {
  const auto precision = attributes.get<int64_t>("precision");
  if (!precision.has_value() || *precision < 0 || *precision > 2) {
    return Invalid("attribute precision must be 0, 1 or 2");
  }
  const ffi::ErrorOr<Parameters> found = Parameters::Of(operands, x.element_type(), attributes);
  if (found.has_error()) return ffi::Unexpected(found.error());
  const Parameters& parameters = *found;
  const auto size = x.dimensions();
  if (size.size() != 4) return Invalid("x must be [N, H, W, C]");
  const int64_t layers = static_cast<int64_t>(parameters.count() / kParameters);
  const size_t others = parameters.count() % kParameters;
  const bool pools = others == kTransitionParameters;
  if (layers < 1 || (others != 0 && !pools)) {
    return Invalid("a dense block has five parameters a layer, and three of a transition or none");
  }
  if (rest.size() != (pools ? 1 : 0)) return Invalid("the block's map is a second result where a transition follows");
  const int64_t channels = size[3], total = channels + layers * kGrowth;
  DenseBlockSizes sizes{size[0], size[1], size[2], channels, {}, 0, pools};
  sizes.layers.assign(static_cast<size_t>(layers), {kMiddle, kGrowth});  // as ReadLayer wants them
  if (pools) {
    const int64_t results = out.dimensions().size() == 4 ? out.dimensions()[3] : 0;
    sizes.out_channels = parameters.OutChannels(static_cast<size_t>(layers) * kParameters + 2, results);
  }
  if (const std::string wrong = WhyNotDenseBlock(sizes); !wrong.empty()) {
    return Invalid("a dense block cannot be one call: " + wrong);
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
  DenseBlockCall call{TypeOf(x),          false, size[0], size[1], size[2], channels, x.untyped_data(),
                      map.untyped_data(), {},    {}};
  call.precise = call.dtype == DataType::F32 && *precision == static_cast<int64_t>(Precision::kHighest);
  call.layers.resize(static_cast<size_t>(layers));
  for (int64_t i = 0; i < layers; ++i) {
    const size_t first = static_cast<size_t>(i) * kParameters;
    const std::string wrong = ReadLayer(parameters, first, channels + i * kGrowth, &call.layers[i]);
    if (!wrong.empty()) return Invalid("layer " + std::to_string(i) + ": " + wrong);
  }
  if (!pools) return call;
  const size_t first = static_cast<size_t>(layers) * kParameters;
  call.transition.out_channels = sizes.out_channels;
  const std::string wrong = ReadTransition(parameters, first, total, &call.transition);
  if (!wrong.empty()) return Invalid("transition: " + wrong);
  if (!HasSize(out, x.element_type(), {size[0], size[1] / 2, size[2] / 2, call.transition.out_channels})) {
    return Invalid("the result is not [N, H / 2, W / 2, K] of x's dtype");
  }
  call.transition.out = out.untyped_data();
  return call;
}

}  // namespace jsc
