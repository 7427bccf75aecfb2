#include "native/call.h"

#include <algorithm>
#include <initializer_list>
#include <limits>
#include <string>

#include "native/decode.h"

namespace jsc {
namespace {

// Sizes that index one image or the kernel stay in 31 bits, so that kernels may use 32-bit offsets within them.
constexpr int64_t kMaxElements = std::numeric_limits<int32_t>::max();

// Without streams: beside another copy of the C++ library in the process, their locales are not safe to use.
template <typename Range>
std::string Show(const Range& values) {
  std::string text;
  for (int64_t value : values) text += (text.empty() ? "" : ", ") + std::to_string(value);
  return "[" + text + "]";
}

ffi::Error Invalid(const std::string& sentence) { return ffi::Error(ffi::ErrorCode::kInvalidArgument, sentence); }

// Reads attributes and remembers the first one that is missing or of the wrong length.
class Attributes {
 public:
  explicit Attributes(ffi::Dictionary attributes) : attributes_(attributes) {}

  int64_t Scalar(std::string_view name) {
    auto value = attributes_.get<int64_t>(name);
    if (value.has_value()) return *value;
    error_ = "attribute " + std::string(name) + " must be an int64";
    return 0;
  }

  template <size_t kLength>
  void Array(std::string_view name, int64_t (&target)[kLength]) {
    auto value = attributes_.get<ffi::Span<const int64_t>>(name);
    if (value.has_value() && value->size() == kLength) {
      std::copy(value->begin(), value->end(), target);
      return;
    }
    std::fill(target, target + kLength, 1);
    error_ = "attribute " + std::string(name) + " must be an array of " + std::to_string(kLength) + " int64";
  }

  const std::string& error() const { return error_; }

 private:
  ffi::Dictionary attributes_;
  std::string error_;
};

bool SameDimensions(ffi::AnyBuffer::Dimensions dimensions, std::initializer_list<int64_t> expected) {
  return dimensions.size() == expected.size() && std::equal(dimensions.begin(), dimensions.end(), expected.begin());
}

int64_t WindowedSize(int64_t size, int64_t low, int64_t high, int64_t window, int64_t dilation, int64_t stride) {
  const int64_t span = size + low + high - ((window - 1) * dilation + 1);
  return span < 0 ? 0 : span / stride + 1;
}

// Sizes of x [N, H, W, C] and of kernel [S, kh, kw, C / groups, K], or of its gradient.
void ReadSizes(ffi::AnyBuffer x, ffi::AnyBuffer kernel, const int64_t (&padding)[4], ConvArgs& a) {
  a.images = x.dimensions()[0];
  a.channels = x.dimensions()[3];
  a.group_channels = kernel.dimensions()[3];
  a.out_channels = kernel.dimensions()[4];
  for (int i = 0; i < 2; ++i) {
    a.size[i] = x.dimensions()[1 + i];
    a.kernel_size[i] = kernel.dimensions()[1 + i];
    a.pad_low[i] = padding[2 * i];
  }
}

std::string CheckSizes(const ConvArgs& a) {
  for (int i = 0; i < 2; ++i) {
    if (a.stride[i] < 1 || a.dilation[i] < 1 || a.window[i] < 1 || a.window_stride[i] < 1 || a.kernel_size[i] < 1) {
      return "strides, dilations, windows and kernel sizes must be at least 1";
    }
  }
  if (a.channels < 1) return "x must have at least one channel, C=" + std::to_string(a.channels);
  if (a.groups < 1 || a.group_channels * a.groups != a.channels || a.out_channels % a.groups != 0) {
    return "groups=" + std::to_string(a.groups) + " does not divide C=" + std::to_string(a.channels) +
           " into kernel's C/groups=" + std::to_string(a.group_channels) + " and K=" + std::to_string(a.out_channels);
  }
  if (a.stacks < 1 || a.images % a.stacks != 0) {
    return "N=" + std::to_string(a.images) + " is not a multiple of the " + std::to_string(a.stacks) + " kernels";
  }
  const int64_t per_image = a.size[0] * a.size[1] * a.channels;
  const int64_t per_result = a.conv_size[0] * a.conv_size[1] * a.out_channels;
  const int64_t per_kernel = a.kernel_size[0] * a.kernel_size[1] * a.group_channels * a.out_channels;
  const int64_t per_output = a.out_size[0] * a.out_size[1] * a.out_channels;  // more than per_result with a padded pool
  if (std::max({per_image, per_result, per_kernel, per_output}) > kMaxElements) {
    return "one image of x, one image of the result and one kernel must each have fewer than 2^31 elements";
  }
  return "";
}

}  // namespace

int64_t PackedBlock(const ConvArgs& a, bool pairs) {
  const int64_t out_channels = a.out_channels / a.groups;
  int64_t block = 16;
  if (pairs && a.kernel_size[0] == 3 && out_channels > block) return 2 * block;
  while (a.kernel_size[0] == 1 && block < 128 && block < out_channels) block *= 2;
  return block;
}

ffi::ErrorOr<ConvCall> MakeConvCall(ffi::AnyBuffer x, ffi::AnyBuffer kernel, ffi::RemainingArgs optional,
                                    ffi::Result<ffi::AnyBuffer> out, ffi::Dictionary attributes) {
  ConvCall call{};
  ConvArgs& a = call.args;
  if (x.dimensions().size() != 4 || kernel.dimensions().size() != 5) {
    return ffi::Unexpected(Invalid("x must be [N, H, W, C] and kernel [S, kh, kw, C / groups, K], got " +
                                   Show(x.dimensions()) + " and " + Show(kernel.dimensions())));
  }
  int64_t padding[4], window_padding[4];
  Attributes read(attributes);
  read.Array("stride", a.stride);
  read.Array("padding", padding);
  read.Array("dilation", a.dilation);
  read.Array("window", a.window);
  read.Array("window_stride", a.window_stride);
  read.Array("window_padding", window_padding);
  a.groups = read.Scalar("groups");
  a.has_bias = read.Scalar("has_bias") != 0;
  a.has_residual = read.Scalar("has_residual") != 0;
  const bool has_packed = read.Scalar("has_packed") != 0;
  call.may_be_dense = read.Scalar("may_be_dense") != 0;
  const int64_t activation = read.Scalar("activation");
  const int64_t pool = read.Scalar("pool");
  const int64_t precision = read.Scalar("precision");
  if (!read.error().empty()) return ffi::Unexpected(Invalid(read.error()));
  if (activation < 0 || activation > 1 || pool < 0 || pool > 2) {
    return ffi::Unexpected(Invalid("activation must be 0 or 1 and pool 0, 1 or 2, got " + std::to_string(activation) +
                                   " and " + std::to_string(pool)));
  }
  if (precision < 0 || precision > 2) {
    return ffi::Unexpected(Invalid("precision must be 0, 1 or 2, got " + std::to_string(precision)));
  }
  a.precision = static_cast<Precision>(precision);
  a.activation = static_cast<Activation>(activation);
  a.pool = static_cast<Pool>(pool);
  ReadSizes(x, kernel, padding, a);
  a.stacks = kernel.dimensions()[0];
  for (int i = 0; i < 2; ++i) {
    a.window_pad_low[i] = window_padding[2 * i];
  }
  if (std::string wrong = CheckSizes(a); !wrong.empty()) return ffi::Unexpected(Invalid(wrong));
  for (int i = 0; i < 2; ++i) {
    a.conv_size[i] =
        WindowedSize(a.size[i], a.pad_low[i], padding[2 * i + 1], a.kernel_size[i], a.dilation[i], a.stride[i]);
    a.out_size[i] = a.pool == Pool::kNone ? a.conv_size[i]
                                          : WindowedSize(a.conv_size[i], a.window_pad_low[i], window_padding[2 * i + 1],
                                                         a.window[i], 1, a.window_stride[i]);
  }
  if (std::string wrong = CheckSizes(a); !wrong.empty()) return ffi::Unexpected(Invalid(wrong));
  if (!SameDimensions(out->dimensions(), {a.images, a.out_size[0], a.out_size[1], a.out_channels})) {
    return ffi::Unexpected(
        Invalid("out is " + Show(out->dimensions()) + ", but the operation gives " +
                Show(std::initializer_list<int64_t>{a.images, a.out_size[0], a.out_size[1], a.out_channels})));
  }
  call.dtype = TypeOf(x);
  call.x = x.untyped_data();
  call.kernel = kernel.untyped_data();
  call.out = out->untyped_data();
  call.out_stride = a.out_channels;
  if (TypeOf(kernel) != call.dtype || TypeOf(*out) != call.dtype) {
    return ffi::Unexpected(Invalid("x, kernel and out must have one dtype"));
  }
  if (optional.size() !=
      static_cast<size_t>(a.has_bias) + static_cast<size_t>(a.has_residual) + static_cast<size_t>(has_packed)) {
    return ffi::Unexpected(Invalid("the number of operands does not match has_bias, has_residual and has_packed"));
  }
  size_t next = 0;
  if (a.has_bias) {
    auto bias = optional.get<ffi::AnyBuffer>(next++);
    if (!bias.has_value()) return ffi::Unexpected(bias.error());
    if (TypeOf(*bias) != call.dtype || !SameDimensions(bias->dimensions(), {a.stacks, a.out_channels})) {
      return ffi::Unexpected(Invalid("bias must be [S, K] in x's dtype, got " + Show(bias->dimensions())));
    }
    call.bias = bias->untyped_data();
  }
  if (a.has_residual) {
    auto residual = optional.get<ffi::AnyBuffer>(next++);
    if (!residual.has_value()) return ffi::Unexpected(residual.error());
    if (a.pool != Pool::kNone || TypeOf(*residual) != call.dtype ||
        !SameDimensions(residual->dimensions(), {a.images, a.conv_size[0], a.conv_size[1], a.out_channels})) {
      return ffi::Unexpected(
          Invalid("residual must be [N, Ho, Wo, K] in x's dtype, without a pool, got " + Show(residual->dimensions())));
    }
    call.residual = residual->untyped_data();
  }
  if (has_packed) {
    auto packed = optional.get<ffi::AnyBuffer>(next++);
    if (!packed.has_value()) return ffi::Unexpected(packed.error());
    const bool pairs = call.dtype == DataType::BF16;  // of channels, side by side
    const int64_t block = PackedBlock(a, pairs), blocks = (a.out_channels / a.groups + block - 1) / block;
    const int64_t each = pairs ? 2 : 1, taps = a.kernel_size[0] * a.kernel_size[1];
    const std::initializer_list<int64_t> expected = {a.stacks, a.groups,    blocks, a.group_channels / each,
                                                     taps,     each * block};
    if ((call.dtype != DataType::F32 && !pairs) || TypeOf(*packed) != call.dtype || a.group_channels % each != 0 ||
        !SameDimensions(packed->dimensions(), expected)) {
      return ffi::Unexpected(Invalid("packed must be float32 or, with an even number of channels, bfloat16 " +
                                     Show(expected) + ", got " + Show(packed->dimensions())));
    }
    call.packed = packed->untyped_data();
  }
  return call;
}

ffi::ErrorOr<ConvArgs> MakeKernelGradientArgs(ffi::AnyBuffer x, ffi::AnyBuffer cotangent, ffi::AnyBuffer kernel,
                                              ffi::Dictionary attributes) {
  ConvArgs a{};
  if (x.dimensions().size() != 4 || cotangent.dimensions().size() != 4 || kernel.dimensions().size() != 5) {
    return ffi::Unexpected(Invalid("x and cotangent must have four axes, and the gradient five"));
  }
  int64_t padding[4];
  Attributes read(attributes);
  read.Array("stride", a.stride);
  read.Array("padding", padding);
  read.Array("dilation", a.dilation);
  a.groups = read.Scalar("groups");
  if (!read.error().empty()) return ffi::Unexpected(Invalid(read.error()));
  ReadSizes(x, kernel, padding, a);
  a.stacks = 1;
  for (int i = 0; i < 2; ++i) a.window[i] = a.window_stride[i] = 1;
  if (std::string wrong = CheckSizes(a); !wrong.empty()) return ffi::Unexpected(Invalid(wrong));
  for (int i = 0; i < 2; ++i) {
    a.conv_size[i] = a.out_size[i] =
        WindowedSize(a.size[i], a.pad_low[i], padding[2 * i + 1], a.kernel_size[i], a.dilation[i], a.stride[i]);
  }
  if (std::string wrong = CheckSizes(a); !wrong.empty()) return ffi::Unexpected(Invalid(wrong));
  if (!SameDimensions(cotangent.dimensions(), {a.images, a.conv_size[0], a.conv_size[1], a.out_channels})) {
    return ffi::Unexpected(
        Invalid("cotangent is " + Show(cotangent.dimensions()) + ", but the convolution gives " +
                Show(std::initializer_list<int64_t>{a.images, a.conv_size[0], a.conv_size[1], a.out_channels})));
  }
  if (kernel.dimensions()[0] * a.images * a.size[0] * a.conv_size[0] * a.conv_size[1] * a.out_channels == 0) {
    return ffi::Unexpected(Invalid("nothing may be empty"));
  }
  return a;
}

ffi::Error CheckKernelGradientOnCpu(const ConvArgs& a) {
  // What a task copies has offsets of 32 bits, and columns of 16.
  constexpr int64_t kMostColumns = int64_t{1} << 16, kMostPlaces = int64_t{1} << 20, kMostPhases = 1024,
                    kTilePlaces = 1024;
  if (a.size[1] >= kMostColumns) return Invalid("x must have fewer than 65536 columns");
  int64_t reach[2];
  for (int i = 0; i < 2; ++i) reach[i] = (a.kernel_size[i] - 1) * a.dilation[i] / a.stride[i];
  if (reach[0] >= kMostPlaces || reach[1] >= kMostPlaces || a.stride[0] > kMostPhases || a.stride[1] > kMostPhases ||
      a.stride[0] * a.stride[1] > kMostPhases || reach[1] + a.size[1] / a.stride[1] + 2 >= kMostColumns ||
      (reach[0] + 3) * std::max(reach[1] + a.size[1] / a.stride[1] + 2, kTilePlaces) > kMostPlaces) {
    return Invalid("a window or a stride is too large for the gradient of a kernel");
  }
  return ffi::Error::Success();
}

ffi::ErrorOr<ConvArgs> MakeMaxPoolArgs(ffi::AnyBuffer x, ffi::AnyBuffer pooled, ffi::Dictionary attributes) {
  constexpr int64_t kMost = int64_t{1} << 31;
  ConvArgs a{};
  if (x.dimensions().size() != 4) return ffi::Unexpected(Invalid("x must have four axes, got " + Show(x.dimensions())));
  int64_t padding[4];
  Attributes read(attributes);
  read.Array("window", a.window);
  read.Array("window_stride", a.window_stride);
  read.Array("window_padding", padding);
  if (!read.error().empty()) return ffi::Unexpected(Invalid(read.error()));
  a.images = x.dimensions()[0];
  a.channels = a.out_channels = x.dimensions()[3];
  a.pool = Pool::kMax;
  int64_t elements[2] = {a.channels, a.channels};  // of one image of x and of the result
  for (int i = 0; i < 2; ++i) {
    a.size[i] = x.dimensions()[1 + i];
    a.window_pad_low[i] = padding[2 * i];
    const int64_t least = std::min({a.window[i], a.window_stride[i], padding[2 * i] + 1, padding[2 * i + 1] + 1});
    const int64_t most =
        std::max({a.window[i], a.window_stride[i], padding[2 * i], padding[2 * i + 1], a.size[i], a.channels});
    if (least < 1 || most >= kMost) {
      return ffi::Unexpected(Invalid("windows and strides must be at least 1, paddings 0, and all below 2^31"));
    }
    a.out_size[i] = WindowedSize(a.size[i], padding[2 * i], padding[2 * i + 1], a.window[i], 1, a.window_stride[i]);
    for (int64_t j = 0; j < 2; ++j) {
      elements[j] *= j == 0 ? a.size[i] : a.out_size[i];
      if (elements[j] > kMaxElements) return ffi::Unexpected(Invalid("an image must have fewer than 2^31 elements"));
    }
  }
  if (!SameDimensions(pooled.dimensions(), {a.images, a.out_size[0], a.out_size[1], a.channels})) {
    return ffi::Unexpected(
        Invalid("the result is " + Show(pooled.dimensions()) + ", but the pool gives " +
                Show(std::initializer_list<int64_t>{a.images, a.out_size[0], a.out_size[1], a.channels})));
  }
  return a;
}

}  // namespace jsc
