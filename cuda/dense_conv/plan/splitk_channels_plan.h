// How a call is cut for the engine splitk_channels (dense_conv/splitk_channels/kernel.cuh).
#ifndef JSC_CUDA_DENSE_CONV_PLAN_SPLITK_CHANNELS_PLAN_H_
#define JSC_CUDA_DENSE_CONV_PLAN_SPLITK_CHANNELS_PLAN_H_

#include <functional>

#include "cuda/core/device_call.h"
#include "cuda/core/device_info.h"

namespace jsc {

constexpr int kSliceBytes = 32;        // of a pixel's channels: what a tensor core takes at once
constexpr int kMaxChannelSplits = 16;  // the largest cluster
constexpr int kMostKernelRows = 16;

struct SplitKChannelsPlan {
  int out_channels;          // of a tile: 16 or 32; 0: there is no plan
  int columns;               // of eight pixels, that a tile has room for: 2, 4 or 7
  int warps;                 // of a block: 4 or 8
  int tile_high, tile_wide;  // results of a tile
  int splits;                // blocks of a cluster that split a tile's channels
  bool tf32x3;               // float32 at HIGHEST
  // What follows from these.
  int slices;                                       // of a warp
  int box_high, box_wide;                           // pixels of x that a tile reads
  int tiles_down, tiles_across, out_channel_tiles;  // of an image and group
  int sums_at, slots_at, shared_bytes;              // of shared memory: where sums and DSMEM slots are, and all
  double cycles;  // what the model expects; infinite where blocks would not all run at once
};

// A 1x1 convolution that reads every pixel once is the same of one row of all pixels.
ConvArgs FlattenedArgs(const ConvArgs& args);

// Completes a plan whose output channels, columns, warps, tile, splits and tf32x3 are set; false where it does not fit.
// args: as FlattenedArgs gives them
bool CompleteSplitKChannelsPlan(const ConvArgs& args, int element_bytes, const DeviceInfo& device,
                                SplitKChannelsPlan* plan);

// Every plan that fits a call and whose blocks all run at once. tile of a candidate: output channels, columns, warps,
// rows and columns of results, splits. args: as FlattenedArgs gives them
void VisitSplitKChannelsPlans(const ConvArgs& args, int element_bytes, const DeviceInfo& device,
                              const std::function<void(const SplitKChannelsPlan&)>& visit);

// The plan of a candidate, or one without output channels where it does not fit.
SplitKChannelsPlan SplitKChannelsPlanOf(const Candidate& candidate, const ConvArgs& args, int element_bytes,
                                        const DeviceInfo& device);

// The time that its cycles stand for, comparable to other engines'.
double SplitKChannelsMicroseconds(const SplitKChannelsPlan& plan, const ConvArgs& args, int element_bytes,
                                  const DeviceInfo& device);

// The best plan under the model in dense_conv/plan/splitk_channels_plan.cc, without output channels where there is
// none.
SplitKChannelsPlan ChooseSplitKChannelsPlan(const ConvArgs& args, int element_bytes, const DeviceInfo& device);

}  // namespace jsc

#endif  // JSC_CUDA_DENSE_CONV_PLAN_SPLITK_CHANNELS_PLAN_H_
