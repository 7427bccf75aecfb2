#include "cpu/ffi/batch_norm.h"

#include <algorithm>
#include <cmath>
#include <exception>
#include <initializer_list>
#include <string>
#include <vector>

#include "cpu/core/parallel.h"
#include "cpu/ffi/host.h"
#include "cpu/ffi/huge_pages.h"
#include "cpu/ffi/tasks.h"
#include "cpu/plan/ceil_div.h"

namespace jsc {
namespace {

ffi::Error Invalid(const std::string& what) {
  return ffi::Error(ffi::ErrorCode::kInvalidArgument, "jsc_batch_norm: " + what);
}

struct Attributes {
  double epsilon;
  bool relu;
};

ffi::ErrorOr<Attributes> Read(ffi::Dictionary attributes) {
  const auto epsilon = attributes.get<double>("epsilon");
  const auto relu = attributes.get<int64_t>("relu");
  if (!epsilon.has_value() || !relu.has_value()) {
    return ffi::Unexpected(Invalid("attributes must be epsilon, a float64, and relu, an int64"));
  }
  return Attributes{*epsilon, *relu != 0};
}

bool AreLike(ffi::AnyBuffer x, std::initializer_list<ffi::AnyBuffer> others) {
  const auto size = x.dimensions();
  return std::all_of(others.begin(), others.end(), [&](ffi::AnyBuffer other) {
    const auto dimensions = other.dimensions();
    return TypeOf(other) == TypeOf(x) && std::equal(size.begin(), size.end(), dimensions.begin(), dimensions.end());
  });
}

// The sizes of a call, once its arrays are what they must be: `maps` are like x, `rows` of the dtype of sums.
ffi::ErrorOr<BatchNormCall> MakeCall(ffi::AnyBuffer x, std::initializer_list<ffi::AnyBuffer> maps,
                                     std::initializer_list<ffi::AnyBuffer> rows, bool relu) {
  const auto size = x.dimensions();
  if (IndexOf(TypeOf(x)) < 0) return ffi::Unexpected(UnsupportedDtype());
  if (size.size() == 0) return ffi::Unexpected(Invalid("x must have an axis of channels"));
  const int64_t channels = size.back();
  const DataType sums = TypeOf(x) == DataType::F64 ? DataType::F64 : DataType::F32;
  for (ffi::AnyBuffer row : rows) {
    if (TypeOf(row) != sums || row.dimensions().size() != 1 || row.dimensions()[0] != channels) {
      return ffi::Unexpected(Invalid("rows of channels must be [" + std::to_string(channels) +
                                     "], float64 for a float64 x and else float32"));
    }
  }
  if (!AreLike(x, maps)) return ffi::Unexpected(Invalid("maps must have x's shape and dtype"));
  BatchNormCall call{};
  call.channels = channels;
  call.pixels = channels == 0 ? 0 : static_cast<int64_t>(x.element_count()) / channels;
  call.relu = relu;
  call.x = x.untyped_data();
  return call;
}

// Pixels of one task: some 64 KB of float32, and no more than kMostTasks of them.
int64_t PixelsOfTask(const BatchNormCall& call) {
  constexpr int64_t kElements = 1 << 14, kMostTasks = 256;
  return std::max({int64_t{1}, CeilDiv(kElements, call.channels), CeilDiv(call.pixels, kMostTasks)});
}

// The passes of one call, by one team.
class Passes {
 public:
  Passes(ffi::ThreadPool& pool, const BatchNormCall& call)
      : call_(call),
        team_(pool),
        step_(PixelsOfTask(call)),
        tasks_(CeilDiv(call.pixels, step_)),
        threads_(std::clamp<int64_t>(tasks_ / 2, 1, team_.threads())) {}

  // The two sums of each channel over all pixels. On two rows of PaddedChannels().
  std::vector<double> Sums(void (*pass)(const BatchNormTask&), const BatchNormRows* rows) {
    const int64_t size = 2 * PaddedChannels(call_.channels);
    std::vector<double> parts(size * tasks_), sums(size);
    team_.Run(threads_, tasks_, {1, tasks_}, [&](Taken taken, int64_t) {
      const int64_t begin = taken.begin * step_;
      pass({&call_, rows, begin, std::min(begin + step_, call_.pixels), parts.data() + taken.begin * size});
    });
    for (int64_t task = 0; task < tasks_; ++task) {
      for (int64_t i = 0; i < size; ++i) sums[i] += parts[task * size + i];
    }
    return sums;
  }

  // From the last pixel on: what was read last may still be in cache.
  void Apply(void (*pass)(const BatchNormTask&), const BatchNormRows& rows) {
    team_.Run(threads_, tasks_, {1, tasks_}, [&](Taken taken, int64_t) {
      const int64_t begin = (tasks_ - 1 - taken.begin) * step_;
      pass({&call_, &rows, begin, std::min(begin + step_, call_.pixels), nullptr});
    });
  }

 private:
  const BatchNormCall& call_;
  Team team_;
  int64_t step_, tasks_, threads_;
};

template <typename A>
std::vector<A> Padded(const A* row, int64_t channels) {
  std::vector<A> padded(PaddedChannels(channels));
  std::copy(row, row + channels, padded.begin());
  return padded;
}

// scale / sqrt(variance + epsilon)
template <typename A>
std::vector<A> ScalesOf(const A* scale, const A* variance, double epsilon, int64_t channels) {
  std::vector<A> scales(PaddedChannels(channels));
  for (int64_t c = 0; c < channels; ++c) {
    scales[c] = static_cast<A>(static_cast<double>(scale[c]) / std::sqrt(static_cast<double>(variance[c]) + epsilon));
  }
  return scales;
}

template <typename A>
ffi::Error Run(ffi::ThreadPool& pool, int dtype, const BatchNormCall& call, double epsilon, const A* scale,
               const A* bias, A* mean, A* variance) {
  const Isa& isa = CurrentIsa();
  Passes passes(pool, call);
  const std::vector<double> sums = passes.Sums(isa.batch_norm_sums[dtype], nullptr);
  const int64_t channels = call.channels, padded = PaddedChannels(channels);
  const double pixels = static_cast<double>(call.pixels);
  for (int64_t c = 0; c < channels; ++c) {
    const double middle = sums[c] / pixels, spread = sums[padded + c] / pixels - middle * middle;
    mean[c] = static_cast<A>(middle);
    variance[c] = static_cast<A>(spread < 0 ? 0 : spread);  // NaN stays
  }
  const std::vector<A> middles = Padded(mean, channels), shifts = Padded(bias, channels);
  const std::vector<A> scales = ScalesOf(scale, variance, epsilon, channels);
  passes.Apply(isa.batch_norm_result[dtype], {middles.data(), scales.data(), shifts.data(), nullptr, nullptr});
  return ffi::Error::Success();
}

// What rows of channels a gradient is made of, and those that it makes.
template <typename A>
struct GradientRows {
  const A *scale, *bias, *mean, *variance, *of_mean, *of_variance;
  A *of_scale, *of_bias;
};

// With s = scale / sqrt(variance + epsilon), g behind the ReLU and P pixels:
//   x' = s (g - sum(g) / P - (x - mean) sum(g (x - mean)) / (P (variance + epsilon))) + mean' / P + 2 (x - mean)
//   variance' / P
template <typename A>
ffi::Error RunGradient(ffi::ThreadPool& pool, int dtype, const BatchNormCall& call, double epsilon,
                       const GradientRows<A>& given) {
  const Isa& isa = CurrentIsa();
  const int64_t channels = call.channels, padded = PaddedChannels(channels);
  const std::vector<A> middles = Padded(given.mean, channels), shifts = Padded(given.bias, channels);
  const std::vector<A> scales = ScalesOf(given.scale, given.variance, epsilon, channels);
  std::vector<A> slopes(padded), offsets(padded);
  const BatchNormRows rows = {middles.data(), scales.data(), shifts.data(), slopes.data(), offsets.data()};
  Passes passes(pool, call);
  const std::vector<double> sums = passes.Sums(isa.batch_norm_gradient_sums[dtype], &rows);
  const double pixels = static_cast<double>(call.pixels);
  for (int64_t c = 0; c < channels; ++c) {
    const double spread = static_cast<double>(given.variance[c]) + epsilon;
    const double scale = static_cast<double>(given.scale[c]) / std::sqrt(spread);
    given.of_bias[c] = static_cast<A>(sums[c]);
    given.of_scale[c] = static_cast<A>(sums[padded + c] / std::sqrt(spread));
    offsets[c] = static_cast<A>((static_cast<double>(given.of_mean[c]) - scale * sums[c]) / pixels);
    slopes[c] =
        static_cast<A>((2 * static_cast<double>(given.of_variance[c]) - scale * sums[padded + c] / spread) / pixels);
  }
  passes.Apply(isa.batch_norm_gradient[dtype], rows);
  return ffi::Error::Success();
}

template <typename A>
A* RowOf(ffi::AnyBuffer buffer) {
  return static_cast<A*>(buffer.untyped_data());
}

ffi::Error Empty() { return Invalid("x must have elements"); }

ffi::Error CheckedBatchNorm(ffi::ThreadPool& pool, ffi::AnyBuffer x, ffi::AnyBuffer scale, ffi::AnyBuffer bias,
                            ffi::RemainingArgs residual, ffi::AnyBuffer y, ffi::AnyBuffer mean, ffi::AnyBuffer variance,
                            ffi::Dictionary attributes) {
  const ffi::ErrorOr<Attributes> read = Read(attributes);
  if (!read.has_value()) return read.error();
  ffi::ErrorOr<BatchNormCall> call = MakeCall(x, {y}, {scale, bias, mean, variance}, read->relu);
  if (!call.has_value()) return call.error();
  if (call->pixels == 0) return Empty();
  call->out = y.untyped_data();
  AdviseHugePages(y);
  if (residual.size() > 0) {
    const ffi::ErrorOr<ffi::AnyBuffer> given = residual.get<ffi::AnyBuffer>(0);
    if (!given.has_value()) return given.error();
    if (!AreLike(x, {*given})) return Invalid("residual must have x's shape and dtype");
    call->residual = given->untyped_data();
  }
  const int dtype = IndexOf(TypeOf(x));
  if (dtype == kFloat64) {
    return Run(pool, dtype, *call, read->epsilon, RowOf<double>(scale), RowOf<double>(bias), RowOf<double>(mean),
               RowOf<double>(variance));
  }
  return Run(pool, dtype, *call, read->epsilon, RowOf<float>(scale), RowOf<float>(bias), RowOf<float>(mean),
             RowOf<float>(variance));
}

}  // namespace

ffi::Error BatchNorm(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer scale, ffi::AnyBuffer bias,
                     ffi::RemainingArgs residual, ffi::Result<ffi::AnyBuffer> y, ffi::Result<ffi::AnyBuffer> mean,
                     ffi::Result<ffi::AnyBuffer> variance, ffi::Dictionary attributes) {
  try {
    return CheckedBatchNorm(pool, x, scale, bias, residual, *y, *mean, *variance, attributes);
  } catch (const std::exception& error) {
    return ffi::Error(ffi::ErrorCode::kInternal, error.what());
  }
}

ffi::Error BatchNormGradient(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer scale, ffi::AnyBuffer bias,
                             ffi::AnyBuffer mean, ffi::AnyBuffer variance, ffi::AnyBuffer cotangent,
                             ffi::AnyBuffer of_mean, ffi::AnyBuffer of_variance, ffi::RemainingArgs y,
                             ffi::Result<ffi::AnyBuffer> x_gradient, ffi::Result<ffi::AnyBuffer> scale_gradient,
                             ffi::Result<ffi::AnyBuffer> bias_gradient, ffi::RemainingRets residual_gradient,
                             ffi::Dictionary attributes) {
  try {
    const ffi::ErrorOr<Attributes> read = Read(attributes);
    if (!read.has_value()) return read.error();
    ffi::ErrorOr<BatchNormCall> call =
        MakeCall(x, {cotangent, *x_gradient},
                 {scale, bias, mean, variance, of_mean, of_variance, *scale_gradient, *bias_gradient}, read->relu);
    if (!call.has_value()) return call.error();
    if (call->pixels == 0) return Empty();
    call->cotangent = cotangent.untyped_data();
    call->out = x_gradient->untyped_data();
    AdviseHugePages(*x_gradient);
    if (y.size() != residual_gradient.size() || (y.size() > 0 && !read->relu)) {
      return Invalid("y and the residual's gradient belong together, and to a ReLU");
    }
    if (y.size() > 0) {
      const ffi::ErrorOr<ffi::AnyBuffer> result = y.get<ffi::AnyBuffer>(0);
      ffi::ErrorOr<ffi::Result<ffi::AnyBuffer>> masked = residual_gradient.get<ffi::AnyBuffer>(0);
      if (!result.has_value()) return result.error();
      if (!masked.has_value()) return masked.error();
      if (!AreLike(x, {*result, **masked})) return Invalid("y must have x's shape and dtype");
      call->y = result->untyped_data();
      call->masked = (**masked).untyped_data();
      AdviseHugePages((**masked));
    }
    const int dtype = IndexOf(TypeOf(x));
    if (dtype == kFloat64) {
      return RunGradient<double>(pool, dtype, *call, read->epsilon,
                                 {RowOf<double>(scale), RowOf<double>(bias), RowOf<double>(mean),
                                  RowOf<double>(variance), RowOf<double>(of_mean), RowOf<double>(of_variance),
                                  RowOf<double>(*scale_gradient), RowOf<double>(*bias_gradient)});
    }
    return RunGradient<float>(
        pool, dtype, *call, read->epsilon,
        {RowOf<float>(scale), RowOf<float>(bias), RowOf<float>(mean), RowOf<float>(variance), RowOf<float>(of_mean),
         RowOf<float>(of_variance), RowOf<float>(*scale_gradient), RowOf<float>(*bias_gradient)});
  } catch (const std::exception& error) {
    return ffi::Error(ffi::ErrorCode::kInternal, error.what());
  }
}

}  // namespace jsc
