#include "cpu/ffi/dense_block.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <string>
#include <vector>

#include "cpu/core/parallel.h"
#include "cpu/ffi/host.h"
#include "cpu/ffi/huge_pages.h"
#include "cpu/ffi/tasks.h"
#include "cpu/plan/ceil_div.h"
#include "cpu/training/channels_task.h"

namespace jsc {
namespace {

ffi::Error Invalid(const std::string& what) {
  return ffi::Error(ffi::ErrorCode::kInvalidArgument, "jsc_dense_block: " + what);
}

// What one call has room for.
constexpr int64_t kMost16Bits = (int64_t{1} << 16) - 1;    // channels, and columns: plan/scatter_plan.cc, CanScatter
constexpr int64_t kMostElements = (int64_t{1} << 31) - 1;  // of an image of the map

bool IsTooLarge(const BlockOnCpu& block) {
  const int64_t channels = std::max({block.channels, block.all(), block.middle});
  return std::max(channels, block.size[1]) > kMost16Bits || block.size[0] > kMostElements ||
         channels > kMostElements / std::max<int64_t>(1, block.size[0] * block.size[1]);
}

// Channels come in pairs, and a transition's windows whole.
bool SuitsPairs(const BlockOnCpu& block) {
  const bool cuts = block.out_channels > 0 && (block.size[0] % 2 != 0 || block.size[1] % 2 != 0);
  return block.channels % 2 == 0 && block.middle % 2 == 0 && block.growth % 2 == 0 && !cuts;
}

constexpr const char* kNoPairs =
    "in bfloat16 C0, M and G must be even and, in front of a transition, so must height and width";

// In bfloat16, convolutions multiply pairs of channels, which they read as they lie: each layer's scaled map is
// written.
struct Block : BlockOnCpu {
  DataType dtype;
  const char* parameters;
  int64_t elements;  // of the parameters
  ffi::Span<const int64_t> offsets;
  char *map, *middle_map, *scaled;  // scaled: of bfloat16

  int64_t pixels() const { return images * size[0] * size[1]; }
  bool pairs() const { return dtype == DataType::BF16; }
  int64_t bytes() const { return pairs() ? 2 : 4; }  // of an element
};

// Hands out the parameters in turn; null where one does not lie within the array.
class Parameters {
 public:
  explicit Parameters(const Block& block) : block_(block) {}

  const void* Take(int64_t count) {
    if (next_ >= block_.offsets.size()) return nullptr;
    const int64_t offset = block_.offsets[next_++];
    return offset < 0 || offset > block_.elements - count ? nullptr : block_.parameters + offset * block_.bytes();
  }

  // A scale or a shift.
  const void* TakeRow(int64_t channels) { return Take(block_.pairs() ? 2 * channels : channels); }

 private:
  const Block& block_;
  size_t next_ = 0;
};

ffi::Error Outside() { return Invalid("a parameter does not lie in the array"); }

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
  call.dtype = block.dtype;
  call.may_be_dense = true;
  return call;
}

// Elements of the packed kernel.
int64_t KernelElements(const ConvCall& call) {
  const ConvArgs& a = call.args;
  const int64_t whole = PackedBlock(a, call.dtype == DataType::BF16), blocks = CeilDiv(a.out_channels, whole);
  return blocks * a.group_channels * a.kernel_size[0] * a.kernel_size[1] * whole;
}

// A packed kernel of pairs as a kernel, [kh, kw, C, K], for a processor without loops of them.
std::vector<uint16_t> PlainKernel(const ConvCall& call, const uint16_t* packed) {
  const ConvArgs& a = call.args;
  const int64_t taps = a.kernel_size[0] * a.kernel_size[1], whole = PackedBlock(a, true);
  std::vector<uint16_t> kernel(taps * a.group_channels * a.out_channels);
  for (int64_t first = 0; first < a.out_channels; first += whole) {
    const int64_t width = std::min(whole, a.out_channels - first);
    for (int64_t c = 0; c < a.group_channels; ++c) {
      const int64_t row = (first / whole * (a.group_channels / 2) + c / 2) * taps;
      for (int64_t tap = 0; tap < taps; ++tap) {
        uint16_t* to = kernel.data() + (tap * a.group_channels + c) * a.out_channels + first;
        const uint16_t* from = packed + (row + tap) * whole * 2 + c % 2;
        for (int64_t k = 0; k < width; ++k) to[k] = from[2 * k];
      }
    }
  }
  return kernel;
}

ffi::Error Run(Team& team, ConvCall call, const void* packed) {
  call.packed = packed;
  if (call.dtype != DataType::BF16 || MultipliesPairs()) return RunConvCall(team, call);
  const std::vector<uint16_t> kernel = PlainKernel(call, static_cast<const uint16_t*>(packed));
  call.kernel = kernel.data();
  return RunConvCall(team, call);
}

// Runs body(begin, end) over all pixels, some of them at once.
template <typename Body>
void OverPixels(Team& team, int64_t pixels, int64_t channels, const Body& body) {
  constexpr int64_t kElements = 1 << 14;
  const int64_t step = std::max<int64_t>(1, kElements / channels), tasks = CeilDiv(pixels, step);
  const int64_t threads = std::clamp<int64_t>(tasks / 2, 1, team.threads());
  team.Run(threads, tasks, {1, 1}, [&](Taken taken, int64_t) {
    for (int64_t task = taken.begin; task < taken.end; ++task) body(task * step, std::min((task + 1) * step, pixels));
  });
}

// x to the map's first channels.
void CopyInput(Team& team, const Block& block, const char* x) {
  const int64_t from = block.channels * block.bytes(), to = block.all() * block.bytes();
  OverPixels(team, block.pixels(), block.channels, [&](int64_t begin, int64_t end) {
    for (int64_t pixel = begin; pixel < end; ++pixel) std::memcpy(block.map + pixel * to, x + pixel * from, from);
  });
}

// The sum of two rows of bfloat16, [2, channels], times a factor.
std::vector<float> SumOfRows(const void* rows, int64_t channels, float factor) {
  const auto* bits = static_cast<const uint16_t*>(rows);
  const auto wide = [bits](int64_t i) {
    const uint32_t word = static_cast<uint32_t>(bits[i]) << 16;
    float value;
    std::memcpy(&value, &word, sizeof(value));
    return value;
  };
  std::vector<float> sum(PaddedChannels(channels));
  for (int64_t c = 0; c < channels; ++c) sum[c] = factor * (wide(c) + wide(channels + c));
  return sum;
}

// relu(scale * x + shift) of the map's first channels, as a map of bfloat16 of its own; with `averages` the means of
// 2x2 pixels of it.
void WriteScaled(Team& team, const Block& block, int64_t channels, const void* scale, const void* shift,
                 bool averages) {
  const float factor = averages ? 0.25f : 1.0f;  // a sum of quarters: a ReLU lets them through as it does the whole
  const std::vector<float> center(PaddedChannels(channels)), scales = SumOfRows(scale, channels, factor),
                                                             shifts = SumOfRows(shift, channels, factor);
  ChannelsCall call{};
  call.pixels = block.pixels();
  call.channels = call.pixel_stride = channels;
  call.x_stride = block.all();
  call.relu = true;
  call.x = block.map;
  call.out = block.scaled;
  if (averages) {
    call.pixels /= 4;
    call.columns = block.size[1];
  }
  const ChannelRows rows{center.data(), scales.data(), shifts.data()};
  const Isa& isa = CurrentIsa();
  const auto run = MultipliesPairs() && !averages ? isa.scaled_pairs : isa.channel_affine[IndexOf(block.dtype)];
  OverPixels(team, call.pixels, channels,
             [&](int64_t begin, int64_t end) { run({&call, &rows, begin, end, nullptr}); });
}

// Has a 1x1 convolution read the map's first channels scaled, with `averages` means of 2x2 pixels of that; false where
// a parameter is not there.
bool ReadScaled(Team& team, const Block& block, int64_t channels, bool averages, Parameters& parameters,
                ConvCall& call) {
  const void *scale = parameters.TakeRow(channels), *shift = parameters.TakeRow(channels);
  if (scale == nullptr || shift == nullptr) return false;
  if (averages) {
    for (int i = 0; i < 2; ++i) {
      call.args.size[i] = call.args.conv_size[i] = call.args.out_size[i] = block.size[i] / 2;
    }
  }
  if (block.pairs()) {
    WriteScaled(team, block, channels, scale, shift, averages);
    call.x = block.scaled;
    return true;
  }
  call.x = block.map;
  call.args.channels = block.all();
  call.scaled.scale = scale;
  call.scaled.shift = shift;
  call.scaled.window = averages ? 2 : 1;
  std::copy(block.size, block.size + 2, call.scaled.size);
  return true;
}

ffi::Error RunLayer(Team& team, const Block& block, int64_t channels, Parameters& parameters) {
  ConvCall first = CallOf(block, 1, channels, block.middle), second = CallOf(block, 3, block.middle, block.growth);
  first.args.activation = Activation::kRelu;
  first.args.has_bias = true;
  first.out = block.middle_map;
  if (!ReadScaled(team, block, channels, false, parameters, first)) return Outside();
  const void* kernel = parameters.Take(KernelElements(first));
  first.bias = parameters.Take(block.middle);
  const void* next = parameters.Take(KernelElements(second));
  if (kernel == nullptr || first.bias == nullptr || next == nullptr) return Outside();
  second.x = block.middle_map;
  second.out = block.map + channels * block.bytes();
  second.out_stride = block.all();
  ffi::Error error = Run(team, first, kernel);
  return error.failure() ? error : Run(team, second, next);
}

// Averages first, so that a quarter of the pixels is multiplied.
ffi::Error RunTransition(Team& team, const Block& block, Parameters& parameters, void* out) {
  ConvCall call = CallOf(block, 1, block.all(), block.out_channels);
  call.out = out;
  if (!ReadScaled(team, block, block.all(), true, parameters, call)) return Outside();
  const void* kernel = parameters.Take(KernelElements(call));
  return kernel == nullptr ? Outside() : Run(team, call, kernel);
}

ffi::ErrorOr<int64_t> Number(ffi::Dictionary attributes, const char* name) {
  ffi::ErrorOr<int64_t> value = attributes.get<int64_t>(name);
  if (!value.has_value()) return value;
  if (*value < 0) return ffi::Unexpected(Invalid(std::string(name) + " must not be negative"));
  return value;
}

bool Has(ffi::AnyBuffer buffer, DataType dtype, std::initializer_list<int64_t> shape) {
  const auto dimensions = buffer.dimensions();
  return TypeOf(buffer) == dtype && std::equal(dimensions.begin(), dimensions.end(), shape.begin(), shape.end());
}

ffi::Error Run(ffi::ThreadPool& pool, ffi::AnyBuffer x, ffi::AnyBuffer parameters, ffi::AnyBuffer out,
               ffi::RemainingRets memory, ffi::Dictionary attributes) {
  Block block{};
  block.dtype = TypeOf(x);
  if (x.dimensions().size() != 4 || (block.dtype != DataType::F32 && block.dtype != DataType::BF16) ||
      parameters.dimensions().size() != 1 || TypeOf(parameters) != block.dtype) {
    return Invalid("x must be float32 or bfloat16 [N, H, W, C], and the parameters of its dtype with one axis");
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
    if (*value > kMost16Bits) return Invalid(std::string(name) + " is too large");
    *field = *value;
  }
  const auto offsets = attributes.get<ffi::Span<const int64_t>>("offsets");
  if (!offsets.has_value()) return offsets.error();
  block.offsets = *offsets;
  block.parameters = static_cast<const char*>(parameters.untyped_data());
  block.elements = parameters.element_count();
  if (block.channels < 1 || block.middle < 1 || block.growth < 1) {
    return Invalid("x, middle and growth must have at least one channel");
  }
  if (IsTooLarge(block)) {
    return Invalid("the map must have fewer than 65536 channels and columns, and one image fewer than 2^31 elements");
  }
  if (block.pairs() && !SuitsPairs(block)) return Invalid(kNoPairs);
  if (block.pairs() && std::any_of(block.offsets.begin(), block.offsets.end(), [](int64_t at) { return at % 2; })) {
    return Invalid("offsets must be even in bfloat16");
  }
  const bool pooled = block.out_channels > 0, pairs = block.pairs();
  std::vector<ffi::AnyBuffer> scratch;  // middle, of bfloat16 scaled, with a transition the map
  for (size_t i = 0; i < memory.size(); ++i) {
    auto each = memory.get<ffi::AnyBuffer>(i);
    if (!each.has_value()) return each.error();
    scratch.push_back(**each);
  }
  if (scratch.size() != size_t{1} + pairs + pooled) {
    return Invalid(
        "there must be memory for the middle, in bfloat16 for what is scaled, and with a transition for the map");
  }
  if (pooled && !Has(out, block.dtype, {block.images, block.size[0] / 2, block.size[1] / 2, block.out_channels})) {
    return Invalid("the result must be of x's dtype, [N, H / 2, W / 2, K]");
  }
  ffi::AnyBuffer map = pooled ? scratch.back() : out, middle = scratch.front(), scaled = pairs ? scratch[1] : map;
  for (ffi::AnyBuffer each : {map, scaled}) {
    if (!Has(each, block.dtype, {block.images, block.size[0], block.size[1], block.all()})) {
      return Invalid("the map, and in bfloat16 what is scaled, must be of x's dtype, [N, H, W, C0 + layers * G]");
    }
  }
  if (!Has(middle, block.dtype, {block.images, block.size[0], block.size[1], block.middle})) {
    return Invalid("the middle must be of x's dtype, [N, H, W, M]");
  }
  if (block.pixels() == 0) return ffi::Error::Success();
  for (ffi::AnyBuffer written : {out, map, middle, scaled}) AdviseHugePages(written);
  block.map = static_cast<char*>(map.untyped_data());
  block.middle_map = static_cast<char*>(middle.untyped_data());
  block.scaled = static_cast<char*>(scaled.untyped_data());
  Team team(pool);
  CopyInput(team, block, static_cast<const char*>(x.untyped_data()));
  Parameters left(block);
  for (int64_t layer = 0; layer < block.layers; ++layer) {
    ffi::Error error = RunLayer(team, block, block.channels + layer * block.growth, left);
    if (error.failure()) return error;
  }
  return pooled ? RunTransition(team, block, left, out.untyped_data()) : ffi::Error::Success();
}

}  // namespace

std::string WhyNotOnCpu(const BlockOnCpu& block, bool pairs) {
  constexpr int64_t kLeast = 16;  // a vector: of fewer channels it is mostly empty
  if (std::min(block.middle, block.growth) < kLeast) {
    return "M=" + std::to_string(block.middle) + " or G=" + std::to_string(block.growth) + " of its layers is below " +
           std::to_string(kLeast);
  }
  const bool is_empty = std::min({block.images, block.size[0], block.size[1], block.channels, block.layers}) < 1;
  if (is_empty) return "it has nothing to compute";
  if (pairs && !SuitsPairs(block)) return kNoPairs;
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
