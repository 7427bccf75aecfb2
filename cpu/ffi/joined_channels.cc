#include "cpu/ffi/joined_channels.h"

#include <vector>

#include "cpu/ffi/channels_call.h"
#include "cpu/ffi/huge_pages.h"

namespace jsc {
namespace {

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

// Whether a map has the result's pixels, or 2x2 for each of them.
bool HasPixelsOf(ffi::AnyBuffer map, ffi::AnyBuffer result, bool sums) {
  const auto size = map.dimensions(), of_result = result.dimensions();
  if (size.size() != of_result.size() || (sums && size.size() != 4)) return false;
  for (size_t i = 0; i + 1 < size.size(); ++i) {
    if (size[i] != of_result[i] * (sums && i > 0 ? 2 : 1)) return false;
  }
  return true;
}

// Maps that lie side by side in `whole`, the result or its cotangent, with rows of all channels. With `sums` that has
// sums of 2x2 pixels of the maps.
ffi::ErrorOr<std::vector<MapPass>> MakeJoined(ffi::RemainingArgs maps, size_t count, ffi::AnyBuffer whole, bool sums,
                                              std::initializer_list<ffi::AnyBuffer> rows) {
  const ffi::ErrorOr<ChannelsCall> all = MakeChannelsCall(whole, {}, rows);
  if (!all.has_value()) return ffi::Unexpected(all.error());
  std::vector<MapPass> passes;
  int64_t channels = 0, first_sum = 0;
  for (size_t i = 0; i < count; ++i) {
    const ffi::ErrorOr<ffi::AnyBuffer> map = maps.get<ffi::AnyBuffer>(i);
    if (!map.has_value()) return ffi::Unexpected(map.error());
    const ffi::ErrorOr<ChannelsCall> call = MakeChannelsCall(*map, {}, {});
    if (!call.has_value()) return ffi::Unexpected(call.error());
    if (TypeOf(*map) != TypeOf(whole) || !HasPixelsOf(*map, whole, sums)) {
      return ffi::Unexpected(
          InvalidChannels("maps side by side must have the dtype of the result, and its pixels or 2x2 each"));
    }
    passes.push_back({*call, {}, first_sum});
    passes.back().call.pixel_stride = all->channels;
    if (sums) passes.back().call.columns = map->dimensions()[2];
    channels += call->channels;
    first_sum += 2 * PaddedChannels(call->channels);
  }
  if (channels != all->channels) {
    return ffi::Unexpected(InvalidChannels("maps side by side must have the channels of the result"));
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

}  // namespace

ffi::Error ChannelJoined(ffi::ThreadPool pool, ffi::AnyBuffer center, ffi::AnyBuffer scale, ffi::AnyBuffer shift,
                         ffi::RemainingArgs maps, ffi::Result<ffi::AnyBuffer> y, int64_t relu, int64_t sums) {
  return Caught([&] {
    ffi::ErrorOr<std::vector<MapPass>> passes = MakeJoined(maps, maps.size(), *y, sums != 0, {center, scale, shift});
    if (!passes.has_value()) return passes.error();
    AdviseHugePages(*y);
    return WithSums(*y, [&](auto type) {
      using A = decltype(type);
      const std::vector<A> middle = PaddedByMap<A>(*passes, center), factor = PaddedByMap<A>(*passes, scale),
                           added = PaddedByMap<A>(*passes, shift);
      ForEachMap(*passes, *y, [&](MapPass& map, int64_t bytes, int64_t row) {
        map.call.relu = relu != 0;
        if (sums != 0) map.call.pixels /= 4;  // a pass over results
        map.call.out = static_cast<char*>(y->untyped_data()) + bytes;
        map.rows = {middle.data() + row, factor.data() + row, added.data() + row};
      });
      RunPass(pool, *passes, CurrentIsa().channel_affine[IndexOf(TypeOf(*y))], false);
      return ffi::Error::Success();
    });
  });
}

ffi::Error ChannelJoinedGradient(ffi::ThreadPool pool, ffi::AnyBuffer center, ffi::AnyBuffer scale,
                                 ffi::AnyBuffer shift, ffi::AnyBuffer cotangent, ffi::RemainingArgs maps,
                                 ffi::Result<ffi::AnyBuffer> of_scale, ffi::Result<ffi::AnyBuffer> of_shift,
                                 ffi::RemainingRets gradients, int64_t relu, int64_t sums) {
  return Caught([&] {
    const size_t count = gradients.size();
    if (maps.size() != count && maps.size() != 2 * count) {
      return InvalidChannels("there is a gradient of each map, and a cotangent of each or of none");
    }
    ffi::ErrorOr<std::vector<MapPass>> passes =
        MakeJoined(maps, count, cotangent, sums != 0, {center, scale, shift, *of_scale, *of_shift});
    if (!passes.has_value()) return passes.error();
    for (size_t i = 0; i < count; ++i) {
      const ffi::ErrorOr<ffi::AnyBuffer> map = maps.get<ffi::AnyBuffer>(i);
      ffi::ErrorOr<ffi::Result<ffi::AnyBuffer>> gradient = gradients.get<ffi::AnyBuffer>(i);
      if (!gradient.has_value()) return gradient.error();
      if (!AreLike(*map, {**gradient})) return InvalidChannels("the gradient of a map must have its shape and dtype");
      ChannelsCall& call = (*passes)[i].call;
      call.out = (**gradient).untyped_data();
      AdviseHugePages(**gradient);
      if (maps.size() == count) continue;
      const ffi::ErrorOr<ffi::AnyBuffer> added = maps.get<ffi::AnyBuffer>(count + i);
      if (!added.has_value()) return added.error();
      if (!AreLike(*map, {*added})) return InvalidChannels("the cotangent of a map must have its shape and dtype");
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
      const std::vector<double> found =
          RunPass(pool, *passes, CurrentIsa().channel_affine_gradient[IndexOf(TypeOf(cotangent))], true);
      A* scales = static_cast<A*>(of_scale->untyped_data());
      A* shifts = static_cast<A*>(of_shift->untyped_data());
      for (const MapPass& map : *passes) {
        const double* of_map = found.data() + map.first_sum;
        const int64_t padded = PaddedChannels(map.call.channels);
        for (int64_t c = 0; c < map.call.channels; ++c) {
          *shifts++ = static_cast<A>(of_map[c]);
          *scales++ = static_cast<A>(of_map[padded + c]);
        }
      }
      return ffi::Error::Success();
    });
  });
}

}  // namespace jsc
