// The planner of the engine wgmma: every tile and number of splits that a call may have, and the best of them by the
// model in dense_conv/plan/wgmma_model.cc.
#include "cuda/dense_conv/plan/wgmma_plan.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <iterator>
#include <limits>
#include <vector>

namespace jsc {
namespace {

constexpr int64_t kMaxCount = std::numeric_limits<int32_t>::max();
constexpr int64_t kMaxStacks = 65535;  // the grid's third axis
constexpr int kMaxBox = 256;           // pixels of a box along an axis
constexpr int kMaxCorner = 127;        // of an im2col map's corners
constexpr int kMaxStride = 8;
constexpr int kMostSplits = 16,
              kMostRead = 8;    // blocks of a cluster with DSMEM slots, and where they read each other's sums
constexpr int kMaxReach = 255;  // of the taps of an im2col map
constexpr int kTileOutChannels[] = {64, 128};
constexpr int kTilePixels[] = {56, 64, 96, 112, 192, 224};  // 64 at 3xTF32 alone

int RoundUp(int bytes) { return static_cast<int>(Whole(bytes, kSwizzleBytes)); }

// Whether a plan's kind of products has kernels of its tile.
bool HasKernel(const WgmmaPlan& plan) {
  const bool is_narrow = plan.out_channels == 64;  // of which 192 pixels were the best in 4 of 700 layers, by 3 %
  if (!plan.tf32x3) return plan.pixels != 64 && !(is_narrow && plan.pixels == 192);
  return plan.pixels == 112 || (plan.pixels <= 64 && plan.out_channels == 64);
}

// Whether TMA can describe the windows of a call.
bool FitsIm2col(const ConvArgs& a) {
  for (int i = 0; i < 2; ++i) {
    const int64_t upper = (a.conv_size[i] - 1) * a.stride[i] - a.pad_low[i] - (a.size[i] - 1);
    if (std::abs(a.pad_low[i]) > kMaxCorner || std::abs(upper) > kMaxCorner || a.stride[i] > kMaxStride ||
        (a.kernel_size[i] - 1) * a.dilation[i] > kMaxReach) {
      return false;
    }
  }
  return true;
}

// Whether a tile's output channels are of one group, and no step reaches into the channels of the next: there is
// nothing that keeps infinities in those from the sums.
bool FitsGroups(const ConvArgs& a, int out_channels, int step_channels) {
  return a.groups == 1 || (a.out_channels / a.groups % out_channels == 0 && a.group_channels % step_channels == 0);
}

TileScheduler FindTileScheduler(const ConvArgs& a, const WgmmaPlan& plan, int resident, const DeviceInfo& device) {
  const int64_t at_once = static_cast<int64_t>(resident) * device.multiprocessors;
  const int64_t tiles = static_cast<int64_t>(plan.pixel_tiles) * plan.out_channel_tiles;
  if (plan.splits > 1 || plan.tf32x3 || tiles * a.stacks <= at_once) return {0, 1};
  const bool whole = a.stacks == 1 && device.multiprocessors % resident == 0;
  return {static_cast<int>(std::max<int64_t>(at_once / a.stacks, 1)), whole ? resident : 1};
}

// Shares the `room` of a consumer group among both pipelines. steps, blocks: of channels, of all tiles that a block
// takes.
bool FindStages(int room, int steps, int blocks, WgmmaPlan* plan) {
  const int weight_bytes = plan->out_channels * kRowBytes, of_consumer_group = plan->steps_of_consumer_group();
  if (plan->patch) {
    plan->pixel_stages = std::min(2, blocks);
    const int left = room - plan->pixel_stages * plan->pixel_bytes;
    plan->weight_stages = std::min({kMaxPipelineStages, left / weight_bytes, steps});
    const int least = plan->pixels == 64 ? 2 : 3;  // three blocks of 64 x 64 on an SM cover for each other
    return left >= 0 && plan->weight_stages >= std::min(least, of_consumer_group);
  }
  const int stages = std::min({kMaxPipelineStages, room / (plan->pixel_bytes + weight_bytes), steps});
  plan->pixel_stages = plan->weight_stages = stages;
  return stages >= std::min(2, of_consumer_group);
}

// Whether blocks may have two consumer groups: an SM each, all at once, and more than a few steps.
bool MayHaveConsumerGroups(const WgmmaPlan& plan, int element_bytes, int64_t clusters, bool in_chain,
                           const DeviceInfo& device) {
  constexpr int kFewSteps = 2;  // of a block
  const bool has_kernel = plan.out_channels == 64 && (plan.pixels == 112 || (plan.pixels == 56 && plan.tf32x3));
  return has_kernel && element_bytes == 4 && !in_chain && clusters <= device.clusters[plan.splits] &&
         plan.steps_per_split > kFewSteps;
}

// Whether blocks that split the steps send their sums to DSMEM slots. At 3xTF32 up to four blocks with tiles of 64 x
// 112 read them in one go instead, which is as fast and in whole networks faster, unless they have double accumulators.
// A tile of 128 x 112 takes all registers there are.
bool ReducesBySlots(const WgmmaPlan& plan) {
  if (!HasSlots(plan.pixels)) return false;
  if (plan.double_accumulators) return plan.splits > 2;
  if (plan.tf32x3 && plan.pixels > 56) return plan.out_channels == 64 && plan.splits > 4;
  return plan.splits > 2;
}

// Lays out a block's shared memory: pipelines and, in their place when they are done with, sums or DSMEM slots. Slots
// lie behind the pipelines where that leaves enough stages. Behind all lies what is spilled where registers are short.
bool LayOut(int room, int steps, int blocks, bool pools, WgmmaPlan* plan) {
  constexpr int kEnoughStages = 4, kSlotRowBytes = 512;  // stages; a warp's sums of a row
  const int spilled =
      plan->uses_slots && plan->tf32x3 && !plan->double_accumulators ? kSpillBytes * plan->out_channels * 2 : 0;
  WgmmaPlan apart = *plan;
  if (!FindStages((room - spilled) / plan->consumer_groups, steps, blocks, plan)) {
    if (spilled == 0) return false;
    plan->uses_slots = false;  // there may be room for the pipelines alone
    return LayOut(room, steps, blocks, pools, plan);
  }
  plan->slots_at = 0;
  const int pipelines = plan->consumer_groups * plan->pipeline_bytes(), rows = pools ? 2 : 1;
  const int sums = plan->pixels * (plan->out_channels + 4) * static_cast<int>(sizeof(float));
  if (!plan->uses_slots) {
    plan->shared_bytes = kSwizzleBytes + (plan->scheduler.blocks > 0 ? pipelines : std::max(pipelines, sums));
    return true;
  }
  const int slot_bytes = WgmmaSlotsPerSender(*plan, rows) * rows * plan->splits * kSlotRowBytes;
  const int recomputed = plan->tf32x3 ? sums : 0;  // where sums are computed again, once the stages are read
  plan->shared_bytes = kSwizzleBytes + std::max({pipelines, slot_bytes, recomputed});
  if (FindStages((room - spilled - slot_bytes) / plan->consumer_groups, steps, blocks, &apart) &&
      apart.weight_stages >= std::min(plan->weight_stages, kEnoughStages) && apart.pipeline_bytes() >= recomputed) {
    *plan = apart;
    plan->slots_at = plan->consumer_groups * plan->pipeline_bytes();
    plan->shared_bytes = kSwizzleBytes + plan->slots_at + slot_bytes;
  }
  plan->spill_at = plan->shared_bytes - kSwizzleBytes;
  plan->shared_bytes += spilled;
  return true;
}

// Tiles of a stack that are patches of a map, or 0 where patches do not fit.
int64_t CutIntoPatches(const ConvArgs& a, WgmmaPlan* plan) {
  const int64_t rows = plan->pixels / kPatchWidth;
  const int64_t high = rows + (a.kernel_size[0] - 1) * a.dilation[0];
  const int64_t wide = kPatchWidth + (a.kernel_size[1] - 1) * a.dilation[1];
  if (a.stride[0] != 1 || a.stride[1] != 1 || plan->taps == 1 || std::max(high, wide) > kMaxBox) return 0;
  plan->patch_high = static_cast<int>(high);
  plan->patch_wide = static_cast<int>(wide);
  plan->pixel_bytes = RoundUp(plan->patch_high * plan->patch_wide * kRowBytes);
  plan->tiles_high = static_cast<int>(DivideUp(a.conv_size[0], rows));
  plan->tiles_wide = static_cast<int>(DivideUp(a.conv_size[1], kPatchWidth));
  return a.images / a.stacks * plan->tiles_high * plan->tiles_wide;
}

// Tiles of a stack that are consecutive pixels of its images, or 0 where TMA cannot bring their windows.
int64_t CutIntoWindows(const ConvArgs& a, WgmmaPlan* plan) {
  if (!FitsIm2col(a)) return 0;
  plan->pixel_bytes = plan->pixels * kRowBytes;
  plan->tiles_high = plan->tiles_wide = 1;
  return DivideUp(a.images / a.stacks * a.conv_size[0] * a.conv_size[1], plan->pixels);
}

// Completes a plan that has a tile, `patch` and splits; false where it does not fit.
bool CompleteWgmmaPlan(const ConvArgs& a, int element_bytes, bool in_chain, int most_consumer_groups,
                       const DeviceInfo& device, WgmmaPlan* plan) {
  if (plan->splits > 1 && device.clusters[plan->splits] == 0) return false;
  const bool pools = a.pool != Pool::kNone;
  if (pools && (!plan->patch || plan->pixels / kPatchWidth % 2 != 0 || !PoolsPairs(a))) return false;
  plan->tf32x3 = element_bytes == 4 && a.precision == Precision::kHighest;
  if (!HasKernel(*plan)) return false;
  const int step_channels = kRowBytes / element_bytes;
  if (!FitsGroups(a, plan->out_channels, step_channels)) return false;
  plan->taps = static_cast<int>(a.kernel_size[0] * a.kernel_size[1]);
  const int64_t steps = DivideUp(a.group_channels, step_channels) * plan->taps;
  if (steps > kMaxCount || plan->splits > steps) return false;
  plan->steps = static_cast<int>(steps);
  plan->steps_per_split = static_cast<int>(DivideUp(steps, plan->splits));
  if (DivideUp(steps, plan->steps_per_split) != plan->splits) return false;  // a split would be empty
  const int64_t tiles = plan->patch ? CutIntoPatches(a, plan) : CutIntoWindows(a, plan);
  if (tiles == 0) return false;
  if (plan->tf32x3) plan->pixel_bytes *= 2;  // low parts beside the pixels
  const int64_t out_channel_tiles = DivideUp(a.out_channels, plan->out_channels);
  if (tiles * out_channel_tiles > kMaxCount / plan->splits) return false;
  plan->pixel_tiles = static_cast<int>(tiles);
  plan->out_channel_tiles = static_cast<int>(out_channel_tiles);
  constexpr int kStatic = 2048;  // shared memory of barriers, and what the system keeps of a block
  // Where there is an SM for each block, it leaves room for as large a block of the next kernel. Two consumer groups
  // take all, as nothing overlaps them.
  const int64_t clusters = tiles * out_channel_tiles * a.stacks;  // or blocks, without splits
  const bool is_alone = clusters * plan->splits <= device.multiprocessors;
  plan->consumer_groups =
      is_alone && MayHaveConsumerGroups(*plan, element_bytes, clusters, in_chain, device) ? most_consumer_groups : 1;
  // In a chain double accumulators leave room for the kernels in front and behind.
  const bool may_double_accumulators =
      plan->tf32x3 && in_chain && is_alone && plan->out_channels == 64 && plan->pixels != 64;
  plan->double_accumulators =
      may_double_accumulators && (plan->pixels == 56 || clusters <= device.clusters[plan->splits]);
  plan->uses_slots = ReducesBySlots(*plan);
  const int resident =
      WgmmaResident(plan->out_channels, plan->pixels, element_bytes, plan->tf32x3, plan->double_accumulators);
  const int beside = plan->consumer_groups > 1   ? 1
                     : plan->double_accumulators ? 2
                     : is_alone                  ? std::min(resident, 2)
                                                 : resident;
  const int room = std::min(device.shared_memory, device.shared_memory_sm / beside) - kStatic - kSwizzleBytes;
  const int64_t blocks = std::min<int64_t>(steps / plan->taps, plan->steps_per_split / plan->taps + 2);
  plan->scheduler = FindTileScheduler(a, *plan, resident, device);
  const int64_t tiles_ahead = plan->scheduler.blocks > 0 ? 2 : 1;  // or more
  const int most =
      static_cast<int>(std::min<int64_t>(tiles_ahead * plan->steps_of_consumer_group(), kMaxPipelineStages));
  if (!LayOut(room, most, static_cast<int>(tiles_ahead * blocks), pools, plan)) return false;
  if (plan->splits > kMostRead && !plan->uses_slots) return false;
  if (plan->consumer_groups > 1 && plan->pipeline_bytes() < kConsumerGroupSumsBytes * plan->pixels) return false;
  plan->cycles = WgmmaCycles(*plan, a, element_bytes, in_chain, clusters, device);
  return true;
}

// Every plan of at most so many splits.
std::vector<WgmmaPlan> PlansUpTo(int most_splits, const ConvArgs& a, int element_bytes, bool in_chain,
                                 const DeviceInfo& device) {
  std::vector<WgmmaPlan> plans;
  for (bool patch : {false, true}) {
    for (int out_channels : kTileOutChannels) {
      for (int pixels : kTilePixels) {
        for (int splits = 1; splits <= most_splits; ++splits) {
          const Candidate tile{Family::kWgmma, {out_channels, pixels, patch, splits}};
          const WgmmaPlan plan = WgmmaPlanOf(tile, a, element_bytes, in_chain, device);
          if (plan.out_channels > 0) plans.push_back(plan);
        }
      }
    }
  }
  return plans;
}

// What holds for every tile: maps and kernels that TMA can describe, and pixels that have numbers.
bool FitsWgmmas(const ConvArgs& a, int element_bytes) {
  const int64_t step = 16 / element_bytes;  // elements of 16 bytes, which TMA asks of rows
  if (a.channels % step != 0 || a.out_channels % step != 0) return false;
  constexpr int64_t kSlack = 1 << 10;  // numbers of pixels beyond the last, in a tile
  const int64_t results = a.images * a.conv_size[0] * a.conv_size[1];
  return results <= kMaxCount - kSlack && a.images * a.size[0] * a.size[1] <= kMaxCount - kSlack &&
         a.stacks <= kMaxStacks && a.conv_size[1] * a.out_channels <= kMaxCount &&
         kPatchWidth * a.out_channels <= kMaxCount;
}

}  // namespace

bool PoolsPairs(const ConvArgs& a) {
  for (int i = 0; i < 2; ++i) {
    if (a.window[i] != 2 || a.window_stride[i] != 2 || a.window_pad_low[i] != 0) return false;
    if (a.out_size[i] != a.conv_size[i] / 2) return false;  // padded behind
  }
  return a.pool != Pool::kNone;
}

bool IsWgmmaTile(const Candidate& candidate) {
  const auto has = [](const auto& list, int value) {
    return std::find(std::begin(list), std::end(list), value) != std::end(list);
  };
  const auto& [out_channels, pixels, patch, splits, none1, none2, none3] = candidate.tile;
  return candidate.family == Family::kWgmma && has(kTileOutChannels, out_channels) && has(kTilePixels, pixels) &&
         patch >= 0 && patch <= 1 && splits >= 1 && splits <= (HasSlots(pixels) ? kMostSplits : kMostRead) &&
         none1 + none2 + none3 == 0;
}

WgmmaPlan WgmmaPlanOf(const Candidate& candidate, const ConvArgs& a, int element_bytes, bool in_chain,
                      const DeviceInfo& device) {
  if (!IsWgmmaTile(candidate) || !FitsWgmmas(a, element_bytes)) return {};
  if (a.pool != Pool::kNone && a.groups > 1) return {};  // no case has been compared
  WgmmaPlan plan{};
  plan.out_channels = candidate.tile[0];
  plan.pixels = candidate.tile[1];
  plan.patch = candidate.tile[2] == 1;
  plan.splits = candidate.tile[3];
  const bool tf32x3 =
      element_bytes == 4 && a.precision == Precision::kHighest;  // two consumer groups are faster where they may be
  WgmmaPlan of_consumer_groups = plan;
  if (!CompleteWgmmaPlan(a, element_bytes, in_chain, tf32x3 ? 2 : 1, device, &plan)) return {};
  if (!tf32x3 && CompleteWgmmaPlan(a, element_bytes, in_chain, 2, device, &of_consumer_groups) &&
      of_consumer_groups.cycles < plan.cycles) {
    plan = of_consumer_groups;
  }
  return plan;
}

std::vector<WgmmaPlan> WgmmaPlans(const ConvArgs& a, int element_bytes, bool in_chain, const DeviceInfo& device) {
  return PlansUpTo(kMostSplits, a, element_bytes, in_chain, device);
}

WgmmaPlan ChooseWgmmaPlan(const ConvArgs& a, int element_bytes, bool in_chain, const DeviceInfo& device) {
  // Of clusters of more than eight that do not all run at once the model knows too little, and of those at 3xTF32.
  const bool tf32x3 = element_bytes == 4 && a.precision == Precision::kHighest;
  const int most_splits = in_chain || tf32x3 ? kModelSplits : kMostSplits;
  WgmmaPlan best{};
  best.cycles = std::numeric_limits<double>::infinity();
  for (const WgmmaPlan& plan : PlansUpTo(most_splits, a, element_bytes, in_chain, device)) {
    const int64_t clusters = int64_t{plan.pixel_tiles} * plan.out_channel_tiles * a.stacks;
    if (plan.splits > kModelSplits && clusters > device.clusters[plan.splits]) continue;
    if (plan.cycles < best.cycles) best = plan;
  }
  return best;
}

}  // namespace jsc
