#include "cuda/densenet/limits.h"

#include <algorithm>

#include "native/layer.h"

namespace jsc {
namespace {

constexpr int64_t kMaxTransition = 2048, kOutChannelsStep = 8;  // channels of its input; of its result, a multiple of

std::string Text(int64_t number) { return std::to_string(number); }

}  // namespace

std::string WhyNotDenseBlock(const DenseBlockSizes& sizes) {
  for (const auto& [middle, growth] : sizes.layers) {
    if (middle != kMiddle || growth != kGrowth) {
      return "M=" + Text(middle) + " and G=" + Text(growth) + " of its layers are not " + Text(kMiddle) + " and " +
             Text(kGrowth);
    }
  }
  const int64_t layers = static_cast<int64_t>(sizes.layers.size());
  if (sizes.channels % kDenseChannels != 0 || sizes.channels > kMaxBlockChannels ||
      layers * kGrowth > kMaxBlockChannels - sizes.channels) {
    return "C0=" + Text(sizes.channels) + " is not a multiple of " + Text(kDenseChannels) +
           ", or the result has more than " + Text(kMaxBlockChannels) + " channels";
  }
  if (std::min({sizes.images, sizes.height, sizes.width, sizes.channels, layers}) < 1) {
    return "it has nothing to compute";
  }
  const int64_t total = sizes.channels + layers * kGrowth;
  if (std::max(sizes.height, sizes.width) > kFar ||
      sizes.images > kMaxElements / total / (sizes.height * sizes.width)) {
    return "its map is too large";
  }
  if (!sizes.pools) return "";
  if (total > kMaxTransition || sizes.out_channels % kOutChannelsStep != 0 || sizes.out_channels < 1 ||
      sizes.out_channels > kMaxBlockChannels) {
    return "its transition from C=" + Text(total) + " to K=" + Text(sizes.out_channels) +
           " channels is not from at most " + Text(kMaxTransition) + " to a multiple of " + Text(kOutChannelsStep);
  }
  return std::min(sizes.height, sizes.width) < 2 ? "its map is too small for a pool" : "";
}

}  // namespace jsc
