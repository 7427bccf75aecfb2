#include "cpu/ffi/channels.h"

#include <algorithm>
#include <cmath>
#include <exception>
#include <initializer_list>
#include <string>
#include <type_traits>
#include <vector>

#include "cpu/ffi/channels_call.h"
#include "cpu/ffi/huge_pages.h"

namespace jsc {
namespace {

std::vector<double> Run(ffi::ThreadPool& pool, const ChannelsCall& call, Pass pass, const ChannelRows& rows,
                        bool has_sums) {
  return RunPass(pool, {{call, rows, 0}}, pass, has_sums);
}

// A buffer of one number for each channel, padded with zeros; `factor` times what is there.
template <typename A>
std::vector<A> Padded(ffi::AnyBuffer row, A factor = 1) {
  const A* values = static_cast<const A*>(row.untyped_data());
  std::vector<A> padded(PaddedChannels(row.element_count()));
  std::transform(values, values + row.element_count(), padded.begin(), [=](A value) { return value * factor; });
  return padded;
}

template <typename A>
void Write(const double* sums, ffi::AnyBuffer row) {
  std::transform(sums, sums + row.element_count(), static_cast<A*>(row.untyped_data()),
                 [](double sum) { return static_cast<A>(sum); });
}

// The mean of a few pixels that lie evenly over the map, 0 where it is not finite: sums of what is left of x lose no
// digits to a mean far from 0.
template <typename A>
std::vector<A> Center(const ChannelsCall& call, Pass pass) {
  constexpr int64_t kPixels = 16;
  const int64_t pixels = std::min(call.pixels, kPixels), padded = PaddedChannels(call.channels);
  std::vector<A> center(padded);
  std::vector<double> sums(padded), of_pixel(2 * padded);
  const ChannelRows rows = {center.data(), nullptr, nullptr};
  for (int64_t i = 0; i < pixels; ++i) {
    const int64_t pixel = (2 * i + 1) * call.pixels / (2 * pixels);
    pass({&call, &rows, pixel, pixel + 1, of_pixel.data()});
    for (int64_t c = 0; c < padded; ++c) sums[c] += of_pixel[c];
  }
  for (int64_t c = 0; c < call.channels && pixels > 0; ++c) {
    const A mean = static_cast<A>(sums[c] / static_cast<double>(pixels));
    if (std::isfinite(mean)) center[c] = mean;
  }
  return center;
}

// The result of a ReLU, and where the cotangent with its zeros goes.
ffi::Error ReadMask(ffi::AnyBuffer x, ffi::RemainingArgs y, ffi::RemainingRets masked, ChannelsCall& call) {
  if (y.size() != masked.size() || y.size() > 1)
    return InvalidChannels("y and the cotangent with its zeros belong together");
  if (y.size() == 0) return ffi::Error::Success();
  const ffi::ErrorOr<ffi::AnyBuffer> result = y.get<ffi::AnyBuffer>(0);
  ffi::ErrorOr<ffi::Result<ffi::AnyBuffer>> zeros = masked.get<ffi::AnyBuffer>(0);
  if (!result.has_value()) return result.error();
  if (!zeros.has_value()) return zeros.error();
  if (!AreLike(x, {*result, **zeros})) return InvalidChannels("y must have x's shape and dtype");
  call.y = result->untyped_data();
  call.masked = (**zeros).untyped_data();
  AdviseHugePages(**zeros);
  return ffi::Error::Success();
}

}  // namespace

ffi::Error ChannelSums(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> sums,
                       ffi::Result<ffi::AnyBuffer> squares, ffi::Result<ffi::AnyBuffer> spread) {
  return Caught([&] {
    const ffi::ErrorOr<ChannelsCall> call = MakeChannelsCall(x, {}, {*sums, *squares, *spread});
    if (!call.has_value()) return call.error();
    return WithSums(x, [&](auto type) {
      using A = decltype(type);
      const Pass pass = CurrentIsa().channel_sums[IndexOf(TypeOf(x))];
      const std::vector<A> center = Center<A>(*call, pass);
      const int64_t padded = PaddedChannels(call->channels);
      std::vector<double> found = Run(pool, *call, pass, {center.data(), nullptr, nullptr}, true);
      std::vector<double> around = found;
      const double pixels = static_cast<double>(call->pixels);
      for (int64_t c = 0; c < call->channels && call->pixels > 0; ++c) {
        const double sum = found[c], square = found[padded + c], middle = static_cast<double>(center[c]);
        found[c] = sum + pixels * middle;
        if (std::isfinite(square)) found[padded + c] = square + middle * (2 * sum + pixels * middle);
        around[c] = square - sum * sum / pixels;
        if (around[c] < 0) around[c] = 0;  // NaN stays
      }
      Write<A>(found.data(), *sums);
      Write<A>(found.data() + padded, *squares);
      Write<A>(around.data(), *spread);
      return ffi::Error::Success();
    });
  });
}

ffi::Error ChannelSumsGradient(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer mean, ffi::AnyBuffer cotangent,
                               ffi::AnyBuffer of_sums, ffi::AnyBuffer of_squares, ffi::AnyBuffer of_spread,
                               ffi::Result<ffi::AnyBuffer> x_gradient) {
  return Caught([&] {
    ffi::ErrorOr<ChannelsCall> call =
        MakeChannelsCall(x, {cotangent, *x_gradient}, {mean, of_sums, of_squares, of_spread});
    if (!call.has_value()) return call.error();
    call->cotangent = cotangent.untyped_data();
    call->out = x_gradient->untyped_data();
    AdviseHugePages(*x_gradient);
    return WithSums(x, [&](auto type) {
      using A = decltype(type);
      const std::vector<A> center = Padded<A>(mean), squares = Padded<A>(of_squares, 2),
                           spread = Padded<A>(of_spread, 2);
      std::vector<A> scale = squares, shift = Padded<A>(of_sums);
      for (size_t c = 0; c < scale.size(); ++c) {
        scale[c] += spread[c];
        shift[c] += squares[c] * center[c];
      }
      Run(pool, *call, CurrentIsa().channel_sums_gradient[IndexOf(TypeOf(x))],
          {center.data(), scale.data(), shift.data()}, false);
      return ffi::Error::Success();
    });
  });
}

ffi::Error ChannelAffine(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer center, ffi::AnyBuffer scale,
                         ffi::AnyBuffer shift, ffi::RemainingArgs residual, ffi::Result<ffi::AnyBuffer> y,
                         int64_t relu) {
  return Caught([&] {
    ffi::ErrorOr<ChannelsCall> call = MakeChannelsCall(x, {*y}, {center, scale, shift});
    if (!call.has_value()) return call.error();
    call->relu = relu != 0;
    call->out = y->untyped_data();
    if (residual.size() > 1) return InvalidChannels("there is one residual at most");
    if (residual.size() > 0) {
      const ffi::ErrorOr<ffi::AnyBuffer> given = residual.get<ffi::AnyBuffer>(0);
      if (!given.has_value()) return given.error();
      if (!AreLike(x, {*given})) return InvalidChannels("residual must have x's shape and dtype");
      call->residual = given->untyped_data();
    }
    AdviseHugePages(*y);
    return WithSums(x, [&](auto type) {
      using A = decltype(type);
      const std::vector<A> middle = Padded<A>(center), factor = Padded<A>(scale), added = Padded<A>(shift);
      const ChannelRows rows = {middle.data(), factor.data(), added.data()};
      Run(pool, *call, CurrentIsa().channel_affine[IndexOf(TypeOf(x))], rows, false);
      return ffi::Error::Success();
    });
  });
}

ffi::Error ChannelAffineGradient(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer center, ffi::AnyBuffer scale,
                                 ffi::AnyBuffer shift, ffi::AnyBuffer cotangent, ffi::RemainingArgs y,
                                 ffi::Result<ffi::AnyBuffer> x_gradient, ffi::Result<ffi::AnyBuffer> of_scale,
                                 ffi::Result<ffi::AnyBuffer> of_shift, ffi::RemainingRets residual_gradient,
                                 int64_t relu) {
  return Caught([&] {
    ffi::ErrorOr<ChannelsCall> call =
        MakeChannelsCall(x, {cotangent, *x_gradient}, {center, scale, shift, *of_scale, *of_shift});
    if (!call.has_value()) return call.error();
    call->relu = relu != 0;
    call->cotangent = cotangent.untyped_data();
    call->out = x_gradient->untyped_data();
    if (y.size() > 0 && !call->relu) return InvalidChannels("y belongs to a ReLU");
    if (const ffi::Error error = ReadMask(x, y, residual_gradient, *call); error.failure()) return error;
    AdviseHugePages(*x_gradient);
    return WithSums(x, [&](auto type) {
      using A = decltype(type);
      const std::vector<A> middle = Padded<A>(center), factor = Padded<A>(scale), added = Padded<A>(shift);
      const ChannelRows rows = {middle.data(), factor.data(), added.data()};
      const std::vector<double> sums =
          Run(pool, *call, CurrentIsa().channel_affine_gradient[IndexOf(TypeOf(x))], rows, true);
      Write<A>(sums.data(), *of_shift);
      Write<A>(sums.data() + PaddedChannels(call->channels), *of_scale);
      return ffi::Error::Success();
    });
  });
}

ffi::Error ChannelMaskedGradient(ffi::ThreadPool pool, ffi::AnyBuffer cotangent, ffi::RemainingArgs y,
                                 ffi::Result<ffi::AnyBuffer> sums, ffi::RemainingRets masked) {
  return Caught([&] {
    ffi::ErrorOr<ChannelsCall> call = MakeChannelsCall(cotangent, {}, {*sums});
    if (!call.has_value()) return call.error();
    call->cotangent = cotangent.untyped_data();
    if (const ffi::Error error = ReadMask(cotangent, y, masked, *call); error.failure()) return error;
    return WithSums(cotangent, [&](auto type) {
      using A = decltype(type);
      const Pass pass = CurrentIsa().channel_masked_gradient[IndexOf(TypeOf(cotangent))];
      Write<A>(Run(pool, *call, pass, {}, true).data(), *sums);
      return ffi::Error::Success();
    });
  });
}

}  // namespace jsc
