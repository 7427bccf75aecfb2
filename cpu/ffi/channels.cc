#include "cpu/ffi/channels.h"

#include <algorithm>
#include <cmath>
#include <exception>
#include <initializer_list>
#include <string>
#include <type_traits>
#include <vector>

#include "cpu/core/parallel.h"
#include "cpu/ffi/host.h"
#include "cpu/ffi/huge_pages.h"
#include "cpu/ffi/tasks.h"
#include "cpu/plan/ceil_div.h"

namespace jsc {
namespace {

using Pass = void (*)(const ChannelsTask&);

ffi::Error Invalid(const std::string& what) {
  return ffi::Error(ffi::ErrorCode::kInvalidArgument, "jsc_channel: " + what);
}

bool AreLike(ffi::AnyBuffer x, std::initializer_list<ffi::AnyBuffer> others) {
  const auto size = x.dimensions();
  return std::all_of(others.begin(), others.end(), [&](ffi::AnyBuffer other) {
    const auto dimensions = other.dimensions();
    return TypeOf(other) == TypeOf(x) && std::equal(size.begin(), size.end(), dimensions.begin(), dimensions.end());
  });
}

ffi::ErrorOr<ChannelsCall> MakeCall(ffi::AnyBuffer x, std::initializer_list<ffi::AnyBuffer> maps,
                                    std::initializer_list<ffi::AnyBuffer> rows) {
  const auto size = x.dimensions();
  if (IndexOf(TypeOf(x)) < 0) return ffi::Unexpected(UnsupportedDtype());
  if (size.size() == 0) return ffi::Unexpected(Invalid("x must have an axis of channels"));
  const int64_t channels = size.back();
  const DataType sums = TypeOf(x) == DataType::F64 ? DataType::F64 : DataType::F32;
  for (ffi::AnyBuffer row : rows) {
    if (TypeOf(row) != sums || row.dimensions().size() != 1 || row.dimensions()[0] != channels) {
      return ffi::Unexpected(Invalid("what is not a map must be [" + std::to_string(channels) +
                                     "], float64 for a float64 x and else float32"));
    }
  }
  if (!AreLike(x, maps)) return ffi::Unexpected(Invalid("maps must have x's shape and dtype"));
  ChannelsCall call{};
  call.channels = call.wide = channels;
  call.pixels = channels == 0 ? 0 : static_cast<int64_t>(x.element_count()) / channels;
  call.x = x.untyped_data();
  return call;
}

// A pass over one map, and where its sums begin in those of all maps.
struct MapPass {
  ChannelsCall call;
  ChannelRows rows;
  int64_t first_sum;
};

// Pixels of one task: some 64 KB of float32. Rows of sums of all tasks are to be little beside the maps.
int64_t PixelsOfTask(int64_t pixels, int64_t channels) {
  constexpr int64_t kElements = 1 << 14, kMostTasks = 256;
  return std::max({int64_t{1}, CeilDiv(kElements, std::max<int64_t>(1, channels)), CeilDiv(pixels, kMostTasks)});
}

// A pass over maps of as many pixels; of one that makes sums, both rows of each map, of PaddedChannels().
std::vector<double> Run(ffi::ThreadPool& pool, const std::vector<MapPass>& maps, Pass pass, bool has_sums) {
  int64_t size = 0, channels = 0;
  for (const MapPass& map : maps) {
    channels += map.call.channels;
    if (has_sums) size += 2 * PaddedChannels(map.call.channels);
  }
  const int64_t pixels = maps.empty() ? 0 : maps.front().call.pixels;
  if (pixels == 0) return std::vector<double>(size);
  Team team(pool);
  const int64_t step = PixelsOfTask(pixels, channels), tasks = CeilDiv(pixels, step);
  std::vector<double> parts(size * tasks), sums(size);
  const int64_t threads = std::clamp<int64_t>(tasks / 2, 1, team.threads());
  team.Run(threads, tasks, {1, tasks}, [&](Taken taken, int64_t) {
    const int64_t begin = taken.begin * step, end = std::min(begin + step, pixels);
    for (const MapPass& map : maps) {
      pass({&map.call, &map.rows, begin, end, parts.data() + taken.begin * size + map.first_sum});
    }
  });
  for (int64_t task = 0; task < tasks; ++task) {
    for (int64_t i = 0; i < size; ++i) sums[i] += parts[task * size + i];
  }
  return sums;
}

std::vector<double> Run(ffi::ThreadPool& pool, const ChannelsCall& call, Pass pass, const ChannelRows& rows,
                        bool has_sums) {
  return Run(pool, {{call, rows, 0}}, pass, has_sums);
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
  if (y.size() != masked.size() || y.size() > 1) return Invalid("y and the cotangent with its zeros belong together");
  if (y.size() == 0) return ffi::Error::Success();
  const ffi::ErrorOr<ffi::AnyBuffer> result = y.get<ffi::AnyBuffer>(0);
  ffi::ErrorOr<ffi::Result<ffi::AnyBuffer>> zeros = masked.get<ffi::AnyBuffer>(0);
  if (!result.has_value()) return result.error();
  if (!zeros.has_value()) return zeros.error();
  if (!AreLike(x, {*result, **zeros})) return Invalid("y must have x's shape and dtype");
  call.y = result->untyped_data();
  call.masked = (**zeros).untyped_data();
  AdviseHugePages(**zeros);
  return ffi::Error::Success();
}

// The rows of all channels, each map's padded by itself.
template <typename A>
std::vector<A> PaddedByMap(const std::vector<MapPass>& maps, ffi::AnyBuffer row) {
  std::vector<A> padded;
  const A* values = static_cast<const A*>(row.untyped_data());
  for (const MapPass& map : maps) {
    const size_t next = padded.size() + PaddedChannels(map.call.channels);
    padded.insert(padded.end(), values, values + map.call.channels);
    padded.resize(next);
    values += map.call.channels;
  }
  return padded;
}

// Maps that lie side by side in `whole`, the result or its cotangent, with rows of all channels.
ffi::ErrorOr<std::vector<MapPass>> MakeJoined(ffi::RemainingArgs maps, size_t count, ffi::AnyBuffer whole,
                                              std::initializer_list<ffi::AnyBuffer> rows) {
  const ffi::ErrorOr<ChannelsCall> all = MakeCall(whole, {}, rows);
  if (!all.has_value()) return ffi::Unexpected(all.error());
  std::vector<MapPass> passes;
  int64_t channels = 0, first_sum = 0;
  for (size_t i = 0; i < count; ++i) {
    const ffi::ErrorOr<ffi::AnyBuffer> map = maps.get<ffi::AnyBuffer>(i);
    if (!map.has_value()) return ffi::Unexpected(map.error());
    const ffi::ErrorOr<ChannelsCall> call = MakeCall(*map, {}, {});
    if (!call.has_value()) return ffi::Unexpected(call.error());
    if (TypeOf(*map) != TypeOf(whole) || call->pixels != all->pixels) {
      return ffi::Unexpected(Invalid("maps side by side must have the pixels and the dtype of the result"));
    }
    passes.push_back({*call, {}, first_sum});
    passes.back().call.wide = all->channels;
    channels += call->channels;
    first_sum += 2 * PaddedChannels(call->channels);
  }
  if (channels != all->channels) {
    return ffi::Unexpected(Invalid("maps side by side must have the channels of the result"));
  }
  return passes;
}

// body(map, bytes of the channels in front of it, position of its rows)
template <typename Body>
void ForEachMap(std::vector<MapPass>& maps, ffi::AnyBuffer whole, const Body& body) {
  const int64_t size = static_cast<int64_t>(ffi::ByteWidth(whole.element_type()));
  int64_t channels = 0;
  for (MapPass& map : maps) {
    body(map, size * channels, map.first_sum / 2);
    channels += map.call.channels;
  }
}

// run(A{}) with the type of sums.
template <typename Body>
ffi::Error WithSums(ffi::AnyBuffer x, const Body& body) {
  return TypeOf(x) == DataType::F64 ? body(double{}) : body(float{});
}

template <typename Body>
ffi::Error Caught(const Body& body) {
  try {
    return body();
  } catch (const std::exception& error) {
    return ffi::Error(ffi::ErrorCode::kInternal, error.what());
  }
}

}  // namespace

ffi::Error ChannelSums(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> sums,
                       ffi::Result<ffi::AnyBuffer> squares, ffi::Result<ffi::AnyBuffer> spread) {
  return Caught([&] {
    const ffi::ErrorOr<ChannelsCall> call = MakeCall(x, {}, {*sums, *squares, *spread});
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
    ffi::ErrorOr<ChannelsCall> call = MakeCall(x, {cotangent, *x_gradient}, {mean, of_sums, of_squares, of_spread});
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
    ffi::ErrorOr<ChannelsCall> call = MakeCall(x, {*y}, {center, scale, shift});
    if (!call.has_value()) return call.error();
    call->relu = relu != 0;
    call->out = y->untyped_data();
    if (residual.size() > 1) return Invalid("there is one residual at most");
    if (residual.size() > 0) {
      const ffi::ErrorOr<ffi::AnyBuffer> given = residual.get<ffi::AnyBuffer>(0);
      if (!given.has_value()) return given.error();
      if (!AreLike(x, {*given})) return Invalid("residual must have x's shape and dtype");
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
        MakeCall(x, {cotangent, *x_gradient}, {center, scale, shift, *of_scale, *of_shift});
    if (!call.has_value()) return call.error();
    call->relu = relu != 0;
    call->cotangent = cotangent.untyped_data();
    call->out = x_gradient->untyped_data();
    if (y.size() > 0 && !call->relu) return Invalid("y belongs to a ReLU");
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

ffi::Error ChannelJoined(ffi::ThreadPool pool, ffi::AnyBuffer center, ffi::AnyBuffer scale, ffi::AnyBuffer shift,
                         ffi::RemainingArgs maps, ffi::Result<ffi::AnyBuffer> y, int64_t relu) {
  return Caught([&] {
    ffi::ErrorOr<std::vector<MapPass>> passes = MakeJoined(maps, maps.size(), *y, {center, scale, shift});
    if (!passes.has_value()) return passes.error();
    AdviseHugePages(*y);
    return WithSums(*y, [&](auto type) {
      using A = decltype(type);
      const std::vector<A> middle = PaddedByMap<A>(*passes, center), factor = PaddedByMap<A>(*passes, scale),
                           added = PaddedByMap<A>(*passes, shift);
      ForEachMap(*passes, *y, [&](MapPass& map, int64_t bytes, int64_t row) {
        map.call.relu = relu != 0;
        map.call.out = static_cast<char*>(y->untyped_data()) + bytes;
        map.rows = {middle.data() + row, factor.data() + row, added.data() + row};
      });
      Run(pool, *passes, CurrentIsa().channel_affine[IndexOf(TypeOf(*y))], false);
      return ffi::Error::Success();
    });
  });
}

ffi::Error ChannelJoinedGradient(ffi::ThreadPool pool, ffi::AnyBuffer center, ffi::AnyBuffer scale,
                                 ffi::AnyBuffer shift, ffi::AnyBuffer cotangent, ffi::RemainingArgs maps,
                                 ffi::Result<ffi::AnyBuffer> of_scale, ffi::Result<ffi::AnyBuffer> of_shift,
                                 ffi::RemainingRets gradients, int64_t relu) {
  return Caught([&] {
    const size_t count = gradients.size();
    if (maps.size() != count && maps.size() != 2 * count) {
      return Invalid("there is a gradient of each map, and a cotangent of each or of none");
    }
    ffi::ErrorOr<std::vector<MapPass>> passes =
        MakeJoined(maps, count, cotangent, {center, scale, shift, *of_scale, *of_shift});
    if (!passes.has_value()) return passes.error();
    for (size_t i = 0; i < count; ++i) {
      const ffi::ErrorOr<ffi::AnyBuffer> map = maps.get<ffi::AnyBuffer>(i);
      ffi::ErrorOr<ffi::Result<ffi::AnyBuffer>> gradient = gradients.get<ffi::AnyBuffer>(i);
      if (!gradient.has_value()) return gradient.error();
      if (!AreLike(*map, {**gradient})) return Invalid("the gradient of a map must have its shape and dtype");
      ChannelsCall& call = (*passes)[i].call;
      call.out = (**gradient).untyped_data();
      AdviseHugePages(**gradient);
      if (maps.size() == count) continue;
      const ffi::ErrorOr<ffi::AnyBuffer> added = maps.get<ffi::AnyBuffer>(count + i);
      if (!added.has_value()) return added.error();
      if (!AreLike(*map, {*added})) return Invalid("the cotangent of a map must have its shape and dtype");
      call.added = added->untyped_data();
    }
    return WithSums(cotangent, [&](auto type) {
      using A = decltype(type);
      const std::vector<A> middle = PaddedByMap<A>(*passes, center), factor = PaddedByMap<A>(*passes, scale),
                           added = PaddedByMap<A>(*passes, shift);
      ForEachMap(*passes, cotangent, [&](MapPass& map, int64_t bytes, int64_t row) {
        map.call.relu = relu != 0;
        map.call.cotangent = static_cast<const char*>(cotangent.untyped_data()) + bytes;
        map.rows = {middle.data() + row, factor.data() + row, added.data() + row};
      });
      const std::vector<double> sums =
          Run(pool, *passes, CurrentIsa().channel_affine_gradient[IndexOf(TypeOf(cotangent))], true);
      A* scales = static_cast<A*>(of_scale->untyped_data());
      A* shifts = static_cast<A*>(of_shift->untyped_data());
      for (const MapPass& map : *passes) {
        const double* found = sums.data() + map.first_sum;
        const int64_t padded = PaddedChannels(map.call.channels);
        for (int64_t c = 0; c < map.call.channels; ++c) {
          *shifts++ = static_cast<A>(found[c]);
          *scales++ = static_cast<A>(found[padded + c]);
        }
      }
      return ffi::Error::Success();
    });
  });
}

ffi::Error ChannelMaskedGradient(ffi::ThreadPool pool, ffi::AnyBuffer cotangent, ffi::RemainingArgs y,
                                 ffi::Result<ffi::AnyBuffer> sums, ffi::RemainingRets masked) {
  return Caught([&] {
    ffi::ErrorOr<ChannelsCall> call = MakeCall(cotangent, {}, {*sums});
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
