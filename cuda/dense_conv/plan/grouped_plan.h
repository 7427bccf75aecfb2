// How a call is cut for the engine grouped (dense_conv/grouped/kernel.cuh).
#ifndef JSC_CUDA_DENSE_CONV_PLAN_GROUPED_PLAN_H_
#define JSC_CUDA_DENSE_CONV_PLAN_GROUPED_PLAN_H_

#include <functional>

#include "cuda/core/device_call.h"
#include "cuda/core/device_info.h"

namespace jsc {

constexpr int kGroupedWarps = 8;         // of a block
constexpr int kGroupedBlocks = 2;        // of an SM that registers leave room for
constexpr int kUnitBytes = 16;           // of a pixel's channels: half of what a tensor core takes at once
constexpr int kMostGroupedUnits = 2048;  // of a window

struct GroupedPlan {
  int tiles;    // of eight output channels, that a warp multiplies pixels with at once; 0: no plan
  bool tf32x3;  // float32 at HIGHEST
  int tile_images, tile_high, tile_wide;  // results of a block
  int groups;                             // of a block, or
  int out_channel_splits;                 // blocks that share the output channels of one
  // What follows from these.
  int units;                                           // of a window: kUnitBytes of channels under a tap
  int box_high, box_wide;                              // pixels of x that an image of a tile reads
  int tiles_down, tiles_across, image_tiles;           // of a stack
  int bundles;                                         // of groups, or parts of them
  int columns;                                         // of `tiles` tiles of output channels, that a block has
  int pixel_bytes, weight_bytes;                       // of a row in shared memory: a pixel's, a channel's of a tap
  int places_at, weights_at, pixels_at, shared_bytes;  // of shared memory: behind the offsets of units, and all
  double cycles;                                       // what the model expects
};

// Fragments of 16 pixels that a warp multiplies at a time.
constexpr int GroupedRows(int tiles, bool tf32x3) {
  if (tf32x3) return tiles <= 2 ? 4 : tiles <= 4 ? 2 : 1;
  return tiles <= 3 ? 4 : 2;
}

// The tiles of eight output channels of a warp that groups of so many output channels have, or 0 where there is no
// kernel.
int GroupedTiles(int64_t group_out_channels);

// Completes a plan whose tf32x3, tile, groups and out_channel_splits are set; false where it does not fit.
bool CompleteGroupedPlan(const ConvArgs& args, int element_bytes, const DeviceInfo& device, GroupedPlan* plan);

// Every plan that fits a call. tile of a candidate: images, rows and columns of results, groups, output channel splits.
void VisitGroupedPlans(const ConvArgs& args, int element_bytes, const DeviceInfo& device,
                       const std::function<void(const GroupedPlan&)>& visit);

// The plan of a candidate, or one without tiles where it does not fit.
GroupedPlan GroupedPlanOf(const Candidate& candidate, const ConvArgs& args, int element_bytes,
                          const DeviceInfo& device);

// The time that its cycles stand for, comparable to other engines'.
double GroupedMicroseconds(const GroupedPlan& plan, const ConvArgs& args, int element_bytes, bool in_chain,
                           const DeviceInfo& device);

// The best plan under the model in dense_conv/plan/grouped_plan.cc, without tiles where there is none.
GroupedPlan ChooseGroupedPlan(const ConvArgs& args, int element_bytes, const DeviceInfo& device);

}  // namespace jsc

#endif  // JSC_CUDA_DENSE_CONV_PLAN_GROUPED_PLAN_H_
