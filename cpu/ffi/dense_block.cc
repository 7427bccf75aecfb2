#include "cpu/ffi/dense_block.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <string>

#include "cpu/core/parallel.h"
#include "cpu/ffi/host.h"
#include "cpu/ffi/huge_pages.h"

namespace jsc {
namespace {

ffi::Error Invalid(const std::string& what) {
  return ffi::Error(ffi::ErrorCode::kInvalidArgument, "jsc_dense_block: " + what);
}

// What one call has room for.
constexpr int64_t kMostChannels = int64_t{1} << 16, kMostElements = (int64_t{1} << 31) - 1;  // of an image of the map

bool IsTooLarge(const BlockOnCpu& block) {
  const int64_t channels = std::max({block.channels, block.all(), block.middle});
  return channels > kMostChannels || std::max(block.size[0], block.size[1]) > kMostElements ||
         channels > kMostElements / std::max<int64_t>(1, block.size[0] * block.size[1]);
}

struct Block : BlockOnCpu {
  const float* parameters;
  int64_t elements;  // of the parameters
  ffi::Span<const int64_t> offsets;

  int64_t pixels() const { return images * size[0] * size[1]; }
};

// Hands out the parameters in turn; null where one does not lie within the array.
class Parameters {
 public:
  explicit Parameters(const Block& block) : block_(block) {}

  const float* Take(int64_t count) {
    if (next_ >= block_.offsets.size()) return nullptr;
    const int64_t offset = block_.offsets[next_++];
    return offset < 0 || offset > block_.elements - count ? nullptr : block_.parameters + offset;
  }

 private:
  const Block& block_;
  size_t next_ = 0;
};

// A convolution of stride 1 that keeps the map's size, with a packed kernel.
ConvCall CallOf(const Block& block, int64_t kernel_size, int64_t channels, int64_t out_channels) {
  ConvCall call{};
  ConvArgs& a = call.args;
  a.images = block.images;
  a.channels = a.group_channels = channels;
  a.stacks = a.groups = 1;
  a.out_channels = call.out_stride = out_channels;
  for (int i = 0; i < 2; ++i) {
    a.size[i] = a.conv_size[i] = a.out_size[i] = block.size[i];
    a.kernel_size[i] = kernel_size;
    a.stride[i] = a.dilation[i] = a.window[i] = a.window_stride[i] = 1;
    a.pad_low[i] = kernel_size / 2;
  }
  call.dtype = DataType::F32;
  call.may_be_dense = true;
  return call;
}

// Reads the first `channels` channels of the map, scaled.
void ReadMap(const Block& block, int64_t channels, const float* map, ConvCall& call) {
  call.args.channels = block.all();
  call.args.group_channels = channels;
  std::copy(block.size, block.size + 2, call.scaled.size);
  call.x = map;
}

// Elements of the packed kernel.
int64_t KernelElements(const ConvCall& call) {
  const ConvArgs& a = call.args;
  const int64_t block = PackedBlock(a, false), blocks = (a.out_channels + block - 1) / block;
  return blocks * a.group_channels * a.kernel_size[0] * a.kernel_size[1] * block;
}

// The scale, shift and kernel that come next; false where they are not there.
bool TakeScaled(Parameters& parameters, ConvCall& call) {
  call.scaled.scale = parameters.Take(call.args.group_channels);
  call.scaled.shift = parameters.Take(call.args.group_channels);
  call.packed = parameters.Take(KernelElements(call));
  return call.scaled.scale != nullptr && call.scaled.shift != nullptr && call.packed != nullptr;
}

// x to the map's first channels.
void CopyInput(Team& team, const Block& block, const float* x, float* map) {
  constexpr int64_t kPixels = 256;
  const int64_t tasks = (block.pixels() + kPixels - 1) / kPixels;
  team.Run(team.threads(), tasks, {1, 1}, [&](Taken taken, int64_t) {
    const int64_t end = std::min(taken.end * kPixels, block.pixels());
    for (int64_t pixel = taken.begin * kPixels; pixel < end; ++pixel) {
      std::memcpy(map + pixel * block.all(), x + pixel * block.channels, block.channels * sizeof(float));
    }
  });
}

ffi::Error RunLayer(Team& team, const Block& block, int64_t channels, Parameters& parameters, float* map,
                    float* middle) {
  ConvCall first = CallOf(block, 1, channels, block.middle), second = CallOf(block, 3, block.middle, block.growth);
  ReadMap(block, channels, map, first);
  first.args.activation = Activation::kRelu;
  first.args.has_bias = true;
  first.out = middle;
  if (!TakeScaled(parameters, first)) return Invalid("a parameter does not lie in the array");
  first.bias = parameters.Take(block.middle);
  second.packed = parameters.Take(KernelElements(second));
  if (first.bias == nullptr || second.packed == nullptr) return Invalid("a parameter does not lie in the array");
  second.x = middle;
  second.out = map + channels;
  second.out_stride = block.all();
  ffi::Error error = RunConvCall(team, first);
  return error.failure() ? error : RunConvCall(team, second);
}

// Averages first, so that a quarter of the pixels is multiplied.
ffi::Error RunTransition(Team& team, const Block& block, Parameters& parameters, const float* map, float* out) {
  ConvCall call = CallOf(block, 1, block.all(), block.out_channels);
  ReadMap(block, block.all(), map, call);
  call.scaled.window = 2;
  for (int i = 0; i < 2; ++i) {
    call.args.size[i] = call.args.conv_size[i] = call.args.out_size[i] = block.size[i] / 2;
  }
  call.out = out;
  if (!TakeScaled(parameters, call)) return Invalid("a parameter does not lie in the array");
  return RunConvCall(team, call);
}

ffi::ErrorOr<int64_t> Number(ffi::Dictionary attributes, const char* name) {
  ffi::ErrorOr<int64_t> value = attributes.get<int64_t>(name);
  if (!value.has_value()) return value;
  if (*value < 0) return ffi::Unexpected(Invalid(std::string(name) + " must not be negative"));
  return value;
}

bool Has(ffi::AnyBuffer buffer, std::initializer_list<int64_t> shape) {
  const auto dimensions = buffer.dimensions();
  return buffer.element_type() == ffi::DataType::F32 &&
         std::equal(dimensions.begin(), dimensions.end(), shape.begin(), shape.end());
}

ffi::Error Run(ffi::ThreadPool& pool, ffi::AnyBuffer x, ffi::AnyBuffer parameters, ffi::AnyBuffer out,
               ffi::RemainingRets memory, ffi::Dictionary attributes) {
  Block block{};
  if (x.dimensions().size() != 4 || x.element_type() != ffi::DataType::F32 || parameters.dimensions().size() != 1 ||
      parameters.element_type() != ffi::DataType::F32) {
    return Invalid("x must be float32 [N, H, W, C], and the parameters float32 with one axis");
  }
  const auto size = x.dimensions();
  block.images = size[0];
  block.size[0] = size[1];
  block.size[1] = size[2];
  block.channels = size[3];
  for (auto [name, field] : {std::pair{"layers", &block.layers}, std::pair{"middle", &block.middle},
                             std::pair{"growth", &block.growth}, std::pair{"out_channels", &block.out_channels}}) {
    const ffi::ErrorOr<int64_t> value = Number(attributes, name);
    if (!value.has_value()) return value.error();
    if (*value > kMostChannels) return Invalid(std::string(name) + " is too large");
    *field = *value;
  }
  const auto offsets = attributes.get<ffi::Span<const int64_t>>("offsets");
  if (!offsets.has_value()) return offsets.error();
  block.offsets = *offsets;
  block.parameters = parameters.typed_data<float>();
  block.elements = parameters.element_count();
  if (block.channels < 1 || block.middle < 1 || block.growth < 1) {
    return Invalid("x, middle and growth must have at least one channel");
  }
  if (IsTooLarge(block)) {
    return Invalid("the map must have at most 65536 channels, and one image of it fewer than 2^31 elements");
  }
  const bool pooled = block.out_channels > 0;
  if (memory.size() != (pooled ? 2u : 1u)) return Invalid("memory for the middle, and with a transition the map");
  auto middle = memory.get<ffi::AnyBuffer>(0);
  if (!middle.has_value()) return middle.error();
  ffi::AnyBuffer map = out;
  if (pooled) {
    auto inner = memory.get<ffi::AnyBuffer>(1);
    if (!inner.has_value()) return inner.error();
    map = **inner;
    if (!Has(out, {block.images, block.size[0] / 2, block.size[1] / 2, block.out_channels})) {
      return Invalid("the result must be float32 [N, H / 2, W / 2, K]");
    }
  }
  if (!Has(map, {block.images, block.size[0], block.size[1], block.all()}) ||
      !Has(**middle, {block.images, block.size[0], block.size[1], block.middle})) {
    return Invalid("the map must be float32 [N, H, W, C], and the middle float32 [N, H, W, M]");
  }
  if (block.pixels() == 0) return ffi::Error::Success();
  for (ffi::AnyBuffer written : {out, map, **middle}) AdviseHugePages(written);
  float* const values = map.typed_data<float>();
  Team team(pool);
  CopyInput(team, block, x.typed_data<float>(), values);
  Parameters left(block);
  for (int64_t layer = 0; layer < block.layers; ++layer) {
    const int64_t channels = block.channels + layer * block.growth;
    ffi::Error error = RunLayer(team, block, channels, left, values, (*middle)->typed_data<float>());
    if (error.failure()) return error;
  }
  return pooled ? RunTransition(team, block, left, values, out.typed_data<float>()) : ffi::Error::Success();
}

}  // namespace

std::string WhyNotOnCpu(const BlockOnCpu& block) {
  constexpr int64_t kLeast = 16;  // a vector: of fewer channels it is mostly empty
  if (std::min(block.middle, block.growth) < kLeast) {
    return "M=" + std::to_string(block.middle) + " or G=" + std::to_string(block.growth) + " of its layers is below " +
           std::to_string(kLeast);
  }
  const bool is_empty = std::min({block.images, block.size[0], block.size[1], block.channels, block.layers}) < 1;
  if (is_empty) return "it has nothing to compute";
  return IsTooLarge(block) ? "its map is too large" : "";
}

ffi::Error DenseBlock(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer parameters,
                      ffi::Result<ffi::AnyBuffer> out, ffi::RemainingRets memory, ffi::Dictionary attributes) {
  try {
    return Run(pool, x, parameters, *out, memory, attributes);
  } catch (const std::exception& error) {
    return ffi::Error(ffi::ErrorCode::kInternal, error.what());
  }
}

}  // namespace jsc
