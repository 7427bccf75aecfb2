// How a call is cut for ECR and PECR. The host chooses an EcrPlan from sizes and the device, and the kernel obeys.
#ifndef JSC_CUDA_SPARSE_ECR_PLAN_H_
#define JSC_CUDA_SPARSE_ECR_PLAN_H_

#include <cstddef>
#include <cstdint>
#include <functional>

#include "cuda/core/device_call.h"
#include "cuda/core/device_info.h"

namespace jsc {

constexpr int kPixels = 4;          // outputs that share one list of entries: the values of a float4
constexpr int kLaneChannels = 8;    // output channels of a lane: two 16-byte loads of weights
constexpr int kMaxWarps = 16;       // of a block
constexpr int kGroupsPerWarp = 2;   // pixel groups whose accumulators a warp keeps: 2 x 4 x 8 registers a lane
constexpr int kListMultiple = 16;   // the room of a list is a multiple of it
constexpr int kMaxChunkRows = 160;  // kernel rows of a stage, at most so many entries in a list
constexpr int kItemBytes = 32;      // of a WarpItem
constexpr int kCornerBytes = 32;    // of a barrier and a FetchCorner
constexpr int kMaxStages = 4;       // chunks in shared memory at a time

struct EcrPlan {
  int lanes;        // lanes over output channels: 4, 8 or 16; the 32 / lanes parts of a warp share a list
  int warps;        // of a block
  int tile_images;  // a block's tile, in outputs of the operation (after the pool)
  int tile_out[2];
  int tile_conv[2];    // the same tile in results of the convolution
  int tile_patch[2];   // and in pixels of x that these results read
  int quads[2];        // 2x2 groups of results along the tile, or 0, 0 where groups are runs of 4 results
  int groups;          // pixel groups of a tile
  int max_rows;        // of a stage, at most kMaxChunkRows
  int row_parts;       // warps that share a group, each with its part of every chunk's rows
  int part_rows;       // and how many rows that is
  int chunk_channels;  // input channels staged at a time, a power of two
  int chunk_shift;     // its logarithm
  int chunk_taps;      // kernel positions staged at a time
  int channel_chunks;  // of all input channels of a group
  int tap_chunks;
  int stages;  // chunks in shared memory at a time; without `stream` 1 where a block has one chunk, else 2
  int splits;  // blocks that share the input channels of one tile
  Reduction reduction;
  int tiles[3];                              // along images of a stack, height, width
  int channel_tiles;                         // per group of output channels
  int copy_x_shift, copy_kernel_shift;       // logarithm of the elements of one asynchronous copy
  int bulk;                                  // 1 where kernel rows come by bulk copies
  int stream;                                // 1 where patches do too: then warps wait for stages, not for each other
  int vector_out;                            // 1 where out, bias and residual take vector access
  int share_quads;                           // four output channels each, of a block in the epilogue
  int helpers;                               // threads that share the loads of a result there: 1, 2 or 4
  int head_bytes;                            // shared memory of the items of all warps
  int inbox_bytes;                           // and of the DSMEM slots for sums of the cluster
  int late_inbox;                            // 1 where they take the place of stages, once all the cluster is there
  int patch_bytes, kernel_bytes, list_rows;  // shared memory: of a stage, of a stage, entries of a warp's list
  int shared_bytes;                          // of a block
  double cycles;                             // what the cost model expects

  constexpr int tile_pixels() const { return tile_images * tile_conv[0] * tile_conv[1]; }
  constexpr int tile_out_channels() const { return lanes * kLaneChannels; }
};

// Every plan that fits a call. tile of a candidate: lanes, splits, images, rows and columns of results, row parts and
// most rows of a stage.
void VisitEcrPlans(const ConvArgs& args, int element_bytes, size_t workspace_bytes, const DeviceInfo& device,
                   const std::function<void(const EcrPlan&)>& visit);

// The plan of a candidate, or one without warps where it does not fit.
EcrPlan EcrPlanOf(const Candidate& candidate, const ConvArgs& args, int element_bytes, size_t workspace_bytes,
                  const DeviceInfo& device);

// The time that its cycles stand for.
double EcrMicroseconds(const EcrPlan& plan, const ConvArgs& args, int element_bytes, const DeviceInfo& device);

// The best plan, or one with warps == 0 where no tile fits and PerOutput has to serve.
EcrPlan ChooseEcrPlan(const ConvArgs& args, int element_bytes, size_t workspace_bytes, const DeviceInfo& device);

// The same for ordinal `device`, chosen once per call site's sizes.
EcrPlan CachedEcrPlan(const DeviceCall& call, int element_bytes, size_t workspace_bytes, int device);

// Completes a plan whose lanes, tile_images, tile_out, splits, row_parts, max_rows and warps (0: as many as have work)
// are set. False where it does not fit.
bool CompleteEcrPlan(const ConvArgs& args, int element_bytes, size_t workspace_bytes, const DeviceInfo& device,
                     EcrPlan* plan);

// Workspace that a convolution with these sizes may use on a device without clusters.
size_t EcrWorkspaceBytes(int64_t images, int64_t conv_height, int64_t conv_width, int64_t out_channels);

}  // namespace jsc

#endif  // JSC_CUDA_SPARSE_ECR_PLAN_H_
