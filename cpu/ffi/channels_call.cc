#include "cpu/ffi/channels_call.h"

#include <algorithm>

#include "cpu/core/parallel.h"
#include "cpu/plan/ceil_div.h"

namespace jsc {

ffi::Error InvalidChannels(const std::string& what) {
  return ffi::Error(ffi::ErrorCode::kInvalidArgument, "jsc_channel: " + what);
}

bool AreLike(ffi::AnyBuffer x, std::initializer_list<ffi::AnyBuffer> others) {
  const auto size = x.dimensions();
  return std::all_of(others.begin(), others.end(), [&](ffi::AnyBuffer other) {
    const auto dimensions = other.dimensions();
    return TypeOf(other) == TypeOf(x) && dimensions.size() == size.size() &&
           std::equal(size.begin(), size.end(), dimensions.begin());
  });
}

ffi::ErrorOr<ChannelsCall> MakeChannelsCall(ffi::AnyBuffer x, std::initializer_list<ffi::AnyBuffer> maps,
                                            std::initializer_list<ffi::AnyBuffer> rows) {
  const auto size = x.dimensions();
  if (IndexOf(TypeOf(x)) < 0) return ffi::Unexpected(UnsupportedDtype());
  if (size.size() == 0) return ffi::Unexpected(InvalidChannels("x must have an axis of channels"));
  const int64_t channels = size.back();
  const DataType sums = TypeOf(x) == DataType::F64 ? DataType::F64 : DataType::F32;
  for (ffi::AnyBuffer row : rows) {
    if (TypeOf(row) != sums || row.dimensions().size() != 1 || row.dimensions()[0] != channels) {
      return ffi::Unexpected(InvalidChannels("what is not a map must be [" + std::to_string(channels) +
                                             "], float64 for a float64 x and else float32"));
    }
  }
  if (!AreLike(x, maps)) return ffi::Unexpected(InvalidChannels("maps must have x's shape and dtype"));
  ChannelsCall call{};
  call.channels = call.x_stride = call.pixel_stride = channels;
  call.pixels = channels == 0 ? 0 : static_cast<int64_t>(x.element_count()) / channels;
  call.x = x.untyped_data();
  return call;
}

namespace {

// Pixels of one task: some 64 KB of float32, and as much of each of several maps, up to 256 KB. Rows of sums of all
// tasks are to be little beside the maps.
int64_t PixelsOfTask(int64_t pixels, int64_t channels, int64_t maps) {
  constexpr int64_t kElements = 1 << 14, kMostTasks = 256, kMostMaps = 4;
  const int64_t elements = kElements * std::min(maps, kMostMaps);
  return std::max({int64_t{1}, CeilDiv(elements, std::max<int64_t>(1, channels)), CeilDiv(pixels, kMostTasks)});
}

}  // namespace

std::vector<double> RunPass(ffi::ThreadPool& pool, const std::vector<MapPass>& maps, Pass pass, bool has_sums) {
  int64_t size = 0, channels = 0;
  for (const MapPass& map : maps) {
    channels += map.call.channels;
    if (has_sums) size += 2 * PaddedChannels(map.call.channels);
  }
  const int64_t pixels = maps.empty() ? 0 : maps.front().call.pixels;
  if (pixels == 0) return std::vector<double>(size);
  Team team(pool);
  const int64_t step = PixelsOfTask(pixels, channels, static_cast<int64_t>(maps.size())), tasks = CeilDiv(pixels, step);
  std::vector<double> parts(size * tasks), sums(size);
  const int64_t threads = std::clamp<int64_t>(tasks / 2, 1, team.threads());
  team.Run(threads, tasks, {1, tasks}, [&](Taken taken, int64_t) {
    const int64_t begin = taken.begin * step, end = std::min(begin + step, pixels);
    for (const MapPass& map : maps) {
      double* of_map = has_sums ? parts.data() + taken.begin * size + map.first_sum : nullptr;
      pass({&map.call, &map.rows, begin, end, of_map});
    }
  });
  for (int64_t task = 0; task < tasks; ++task) {
    for (int64_t i = 0; i < size; ++i) sums[i] += parts[task * size + i];
  }
  return sums;
}

}  // namespace jsc
