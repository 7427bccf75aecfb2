// How two 1x1 convolutions in one kernel are cut, and whether they are.
#include "cuda/chain/pair_plan.h"

#include <algorithm>

#include "cuda/dense_conv/plan/wgmma_plan.h"

namespace jsc {
namespace {

constexpr int64_t kRooms[] = {32, 56};  // for pixels, that kernels are compiled for; 112 lost
constexpr int64_t kOutChannels = kPairOutChannels, kSlotBytes = kOutChannels * kRowBytes, kLeastSlots = 3;

// Of middle channels, of x's at 16 bits, whose steps are the longest, and of the map between the layers: 132 blocks
// with the most pixels each.
constexpr int64_t kMostMiddle = kOutChannels * kMaxSplits, kMostInputs = kMaxPairSteps * kRowBytes / 2,
                  kMostElements = kOutChannels * kRooms[1] * 132;

bool HasWholeBlocks(const PairShape& shape) {
  return shape.in_channels % kOutChannels == 0 && shape.channels % kOutChannels == 0 &&
         shape.out_channels % kOutChannels == 0;
}

}  // namespace

bool MayBePair(const PairShape& shape) {
  return HasWholeBlocks(shape) && shape.in_channels <= kMostInputs && shape.channels >= 2 * kOutChannels &&
         shape.channels <= kMostMiddle && shape.pixels * shape.channels <= kMostElements;
}

PairPlan ChoosePairPlan(const PairShape& shape, int element_bytes, bool tf32x3, const DeviceInfo& device) {
  const int64_t step_channels = kRowBytes / element_bytes,
                copies = tf32x3 ? 2 : 1;  // of pixels: low parts beside the high ones
  const int64_t blocks = shape.channels / kOutChannels, steps = shape.in_channels / step_channels,
                pieces = shape.out_channels / kPairPiece;
  if (!device.wgmma || !HasWholeBlocks(shape) || blocks < 2 || blocks > kMaxSplits || steps > kMaxPairSteps ||
      pieces % blocks != 0) {
    return {};
  }
  for (const int64_t room : kRooms) {
    const int64_t tiles = (shape.pixels + room - 1) / room, row = room * kRowBytes;
    if (tiles > device.clusters[blocks]) continue;
    const int64_t sum_bytes = pieces * kPairPiece * room * 4;  // sums of all blocks for its pieces
    const int64_t middle_at = std::max(copies * steps * row, sum_bytes),
                  weights_at = middle_at + copies * room * kOutChannels * 4;
    // Two blocks fit an SM, as MayOverlap wants it: 1 KB is the system's, 1 the kernel's own.
    const int64_t most = device.shared_memory_sm / 2 - 2 * 1024 - kSwizzleBytes;
    const int64_t items = steps + shape.out_channels / kOutChannels * (kOutChannels / step_channels);
    const int64_t slots = std::min({int64_t{kMaxPairSlots}, items, (most - weights_at) / kSlotBytes});
    if (slots < std::min(items, kLeastSlots)) continue;
    const int64_t sharing = std::max<int64_t>(1, blocks / steps);
    PairPlan plan{};
    plan.blocks = static_cast<int>(blocks);
    plan.tiles = static_cast<int>(tiles);
    plan.pixels = static_cast<int>(room);
    plan.tile_pixels = static_cast<int>((shape.pixels + tiles - 1) / tiles);
    plan.box_rows = static_cast<int>(room % (sharing * kPatchWidth) == 0 ? room / sharing : kPatchWidth);
    plan.sharing = static_cast<int>(sharing);
    plan.slots = static_cast<int>(slots);
    plan.middle_at = static_cast<int>(middle_at);
    plan.weights_at = static_cast<int>(weights_at);
    plan.shared_bytes = static_cast<int>(kSwizzleBytes + weights_at + slots * kSlotBytes);
    return plan;
  }
  return {};
}

}  // namespace jsc
