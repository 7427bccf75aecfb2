// How a direct convolution by Hopper's warpgroup products (dense_conv/wgmma/kernel.cuh) is cut.
#ifndef JSC_CUDA_DENSE_CONV_PLAN_WGMMA_PLAN_H_
#define JSC_CUDA_DENSE_CONV_PLAN_WGMMA_PLAN_H_

#include <vector>

#include "cuda/core/device_call.h"
#include "cuda/core/device_info.h"

namespace jsc {

constexpr int kRowBytes = 128;       // channels of a staged pixel, filters of a staged channel: one row of the swizzle
constexpr int kSwizzleBytes = 1024;  // after which it repeats: where a stage may begin
constexpr int kPatchWidth = 8;       // results of a tile's row, where a tile is a patch
constexpr int kMaxRing = 8;          // stages of either ring
constexpr int kSpillBytes = 20;      // of a thread's mail, in parts, while registers are short
constexpr int kConsumerGroupSumsBytes = 256;  // for each pixel of a tile: what two teams add in the rings of the second
constexpr int kModelSplits = 8;  // that the model chooses in chains (MODEL_SPLITS of chain_tiles.py) and in parts

// Blocks of a multiprocessor that a tile's registers suffice for: of 112 pixels and filters in registers for fewer.
// parts: products of float32 in parts, which have tiles of 64 x 56, 64 x 64, 64 x 112 and 128 x 112. roomy: 64 x 56 and
// 64 x 112 in parts, a block less on a multiprocessor, with registers for the sums of two steps.
constexpr int WgmmaResident(int out_channels, int pixels, int element_bytes, bool tf32x3, bool double_accumulators) {
  if (tf32x3) return out_channels > 64 ? 1 : (pixels > 64 ? 2 : 3) - (double_accumulators ? 1 : 0);
  if (pixels == 112 && element_bytes == 4) return out_channels > 64 ? 1 : 3;
  if (pixels > 112) return out_channels > 64 ? 1 : 2;
  return out_channels > 64 ? 2 : 4;
}

// Whether kernels of a tile have registers for blocks that send each other their sums
// (dense_conv/wgmma/cluster_reduction.cuh).
constexpr bool HasSlots(int pixels) { return pixels == 56 || pixels == 112; }

// Whether one copy brings the filters of a tile's step: the map of a kernel then has rows of 128 bytes of filters.
inline bool HasWholeWeights(const ConvArgs& args, int element_bytes) {
  return args.out_channels % (kRowBytes / element_bytes) == 0;
}

// Blocks that take the tiles of a stack in turns: where there are more than run at once, and sums that no other block
// has, so that they never leave registers and the next tile's copies come while results are written.
struct TileScheduler {
  int blocks;     // 0: a block for every tile
  int residents;  // of them on a multiprocessor, in so many rounds of the device's; 1: not known
};

// A step is one tap of a block of channels, 128 bytes deep.
struct WgmmaPlan {
  int out_channels, pixels;  // of a tile: 64 or 128, and 56, 96, 112, 192 or 224, in parts 56, 64 or 112; none: no plan
  bool tf32x3;               // float32-accurate, by products of parts
  bool double_accumulators;  // a tile in parts with registers for the sums of two steps, in chains, see WgmmaResident
  int consumer_groups;       // of a block's warps, each with steps and rings of its own, see WgmmaTile
  bool patch;       // a tile is a patch of one map, staged once for all taps of a block; else pixels of the batch
  int splits;       // blocks of a cluster that share a tile's steps
  bool uses_slots;  // and send each other their sums
  int steps, steps_per_split, taps;
  int pixel_tiles, out_channel_tiles;  // of a stack
  int tiles_high, tiles_wide;          // patches of a map
  int patch_high, patch_wide;          // pixels of x under a patch
  TileScheduler scheduler;
  int pixel_stages, weight_stages, pixel_bytes;  // of the rings of a team
  int slots_at, spill_at;  // where the mailbox of blocks that share steps is and what is kept of it, see WgmmaTask
  int shared_bytes;        // of a block
  double cycles;           // what the model expects

  // At most.
  int steps_of_consumer_group() const { return (steps_per_split + consumer_groups - 1) / consumer_groups; }
  // Of a team.
  int ring_bytes() const { return pixel_stages * pixel_bytes + weight_stages * out_channels * kRowBytes; }
};

// Whether a pool is of windows of 2x2 side by side without padding, which do not cross patches of an even number of
// rows.
bool PoolsPairs(const ConvArgs& args);

// Whether kernels of such tiles are compiled, for some calls at least.
bool IsWgmmaTile(const Candidate& candidate);

// The most pieces of mail that come to a block from each block of its cluster (dense_conv/wgmma/cluster_reduction.cuh),
// and their rows.
int WgmmaSlotsPerSender(const WgmmaPlan& plan, int rows);

// Cycles that a plan is expected to take, 1,500 a microsecond, comparable to those of dense_conv/plan/mma_plan.cc.
// tiles: of all stacks.
double WgmmaCycles(const WgmmaPlan& plan, const ConvArgs& args, int element_bytes, bool in_chain, int64_t tiles,
                   const DeviceInfo& device);

// Every plan that fits a call, of up to 16 splits, in the order in which tiles are tried.
std::vector<WgmmaPlan> WgmmaPlans(const ConvArgs& args, int element_bytes, bool in_chain, const DeviceInfo& device);

// The plan of a candidate, or one without filters where that does not fit. tile: filters, pixels, 1 for a patch,
// splits.
WgmmaPlan WgmmaPlanOf(const Candidate& candidate, const ConvArgs& args, int element_bytes, bool in_chain,
                      const DeviceInfo& device);

// The best plan under the model in dense_conv/plan/wgmma_model.cc, or one without filters.
WgmmaPlan ChooseWgmmaPlan(const ConvArgs& args, int element_bytes, bool in_chain, const DeviceInfo& device);

}  // namespace jsc

#endif  // JSC_CUDA_DENSE_CONV_PLAN_WGMMA_PLAN_H_
