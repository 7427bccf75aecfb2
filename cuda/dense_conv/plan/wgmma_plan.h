// How a call is cut for the engine wgmma (dense_conv/wgmma/kernel.cuh).
#ifndef JSC_CUDA_DENSE_CONV_PLAN_WGMMA_PLAN_H_
#define JSC_CUDA_DENSE_CONV_PLAN_WGMMA_PLAN_H_

#include <vector>

#include "cuda/core/device_call.h"
#include "cuda/core/device_info.h"
#include "cuda/core/swizzle.h"

namespace jsc {

// A row of the swizzle (core/swizzle.h) is channels of a staged pixel, or output channels of a staged channel.
constexpr int kPatchWidth = 8;         // results of a tile's row, where a tile is a patch
constexpr int kMaxPipelineStages = 8;  // stages of either pipeline
constexpr int kSpillBytes = 20;        // of a thread, at 3xTF32: what it spills while registers are short
// For each pixel of a tile: sums that the second consumer group leaves in its pipeline.
constexpr int kConsumerGroupSumsBytes = 256;
constexpr int kModelSplits = 8;  // that the model chooses in chains and at 3xTF32

// Blocks of an SM that a tile's registers suffice for. TF32 with 112 pixels has weights in registers, so fewer. tf32x3:
// tiles of 64 x 56, 64 x 64, 64 x 112 and 128 x 112. double_accumulators: 64 x 56 and 64 x 112 at 3xTF32 with registers
// for the sums of two steps, so a block less on an SM.
constexpr int WgmmaResident(int out_channels, int pixels, int element_bytes, bool tf32x3, bool double_accumulators) {
  if (tf32x3) return out_channels > 64 ? 1 : (pixels > 64 ? 2 : 3) - (double_accumulators ? 1 : 0);
  if (pixels == 112 && element_bytes == 4) return out_channels > 64 ? 1 : 3;
  if (pixels > 112) return out_channels > 64 ? 1 : 2;
  return out_channels > 64 ? 2 : 4;
}

// Whether kernels of a tile have registers for DSMEM slots (dense_conv/wgmma/cluster_reduction.cuh).
constexpr bool HasSlots(int pixels) { return pixels == 56 || pixels == 112; }

// Whether one copy brings the weights of a tile's step. The tensor map of a kernel then has rows of 128 bytes of output
// channels.
inline bool HasWholeWeights(const ConvArgs& args, int element_bytes) {
  return args.out_channels % (kRowBytes / element_bytes) == 0;
}

// The tile scheduler of a persistent kernel. Used where there are more tiles than blocks that run at once, and no
// splits. Sums then never leave registers, and the next tile's copies come while results are written.
struct TileScheduler {
  int blocks;     // 0: a block for every tile
  int residents;  // of them on an SM, in so many rounds of the device's; 1: not known
};

// A step is one tap of a block of channels, 128 bytes deep.
struct WgmmaPlan {
  int out_channels,
      pixels;   // of a tile: 64 or 128, and 56, 96, 112, 192 or 224, at 3xTF32 56, 64 or 112; none: no plan
  bool tf32x3;  // float32 at HIGHEST
  bool double_accumulators;  // registers for the sums of two steps, in chains, see WgmmaResident
  int consumer_groups;       // each with steps and pipelines of its own, see WgmmaTile
  bool patch;       // a tile is a patch of one map, staged once for all taps of a block; else pixels of the batch
  int splits;       // blocks of a cluster that split a tile's steps
  bool uses_slots;  // and send their sums to DSMEM slots
  int steps, steps_per_split, taps;
  int pixel_tiles, out_channel_tiles;  // of a stack
  int tiles_high, tiles_wide;          // patches of a map
  int patch_high, patch_wide;          // pixels of x under a patch
  TileScheduler scheduler;
  int pixel_stages, weight_stages, pixel_bytes;  // of the pipelines of a consumer group
  int slots_at, spill_at;                        // where the DSMEM slots are, and what threads spill, see WgmmaTask
  int shared_bytes;                              // of a block
  double cycles;                                 // what the model expects

  // At most.
  int steps_of_consumer_group() const { return (steps_per_split + consumer_groups - 1) / consumer_groups; }
  // Of a consumer group.
  int pipeline_bytes() const { return pixel_stages * pixel_bytes + weight_stages * out_channels * kRowBytes; }
};

// Whether a pool is of windows of 2x2 side by side without padding, which do not cross patches of an even number of
// rows.
bool PoolsPairs(const ConvArgs& args);

// Whether kernels of such tiles are compiled, for some calls at least.
bool IsWgmmaTile(const Candidate& candidate);

// The most slots of a block that each block of its cluster fills (dense_conv/wgmma/cluster_reduction.cuh). rows: of a
// slot.
int WgmmaSlotsPerSender(const WgmmaPlan& plan, int rows);

// Cycles that a plan is expected to take.
// tiles: of all stacks.
double WgmmaCycles(const WgmmaPlan& plan, const ConvArgs& args, int element_bytes, bool in_chain, int64_t tiles,
                   const DeviceInfo& device);

// The time that its cycles stand for, comparable to other engines'.
double WgmmaMicroseconds(const WgmmaPlan& plan, const ConvArgs& args, int element_bytes, bool in_chain,
                         const DeviceInfo& device);

// Every plan that fits a call, of up to 16 splits, in the order in which tiles are tried.
std::vector<WgmmaPlan> WgmmaPlans(const ConvArgs& args, int element_bytes, bool in_chain, const DeviceInfo& device);

// The plan of a candidate, or one without output channels where that does not fit. tile: output channels, pixels, 1 for
// a patch, splits.
WgmmaPlan WgmmaPlanOf(const Candidate& candidate, const ConvArgs& args, int element_bytes, bool in_chain,
                      const DeviceInfo& device);

// The best plan under the model in dense_conv/plan/wgmma_model.cc, or one without output channels.
WgmmaPlan ChooseWgmmaPlan(const ConvArgs& args, int element_bytes, bool in_chain, const DeviceInfo& device);

}  // namespace jsc

#endif  // JSC_CUDA_DENSE_CONV_PLAN_WGMMA_PLAN_H_
