// How a call is cut for the engine few_channels (dense_conv/few_channels/kernel.cuh).
#ifndef JSC_CUDA_DENSE_CONV_PLAN_FEW_CHANNELS_PLAN_H_
#define JSC_CUDA_DENSE_CONV_PLAN_FEW_CHANNELS_PLAN_H_

#include <functional>

#include "cuda/core/device_call.h"
#include "cuda/core/device_info.h"

namespace jsc {

constexpr int kMostFewChannels = 4;  // of x, at most
// Neighbouring results of a row: rows of a fragment, whose other eight are a run too.
constexpr int kFewChannelsRun = 8;
constexpr int kFewChannelsWarpRuns = 4;     // of a warp at a time
constexpr int kFewChannelsWarps = 8;        // of a block, at most
constexpr int kFewChannelsAhead = 16;       // pairs beyond the last, whose offsets are read ahead
constexpr int kFewChannelsChunkPairs = 16;  // of the reduction, whose products a tensor core adds before FADD does

// Warps of an SM that its registers suffice for.
constexpr int FewChannelsWarpsResident(int out_channels, bool tf32x3) {
  return tf32x3 ? (out_channels > 32 ? 8 : 10) : out_channels > 32 ? 12 : 16;
}

// The reduction runs over pairs of neighbouring elements of x. Each row of the window, kernel width x channels, begins
// `lead` elements early and is as many pairs as it takes. Weights of what a pair has beside the window are zero.
struct FewChannelsPlan {
  int out_channels;  // of a block and of each of its warps, 32 or 64; 0: no plan
  bool tf32x3;       // float32 at HIGHEST
  bool paired;       // every pair begins at an even element of the staged row, so that one load brings it
  int lead;          // 0 or 1
  int row_pairs;     // of a row of the window
  int pairs;         // of the window, whole chunks
  int tile_out[2];   // results of a tile, after the pool
  int tile[2];       // of the convolution: rows, columns in whole runs
  int patch_rows;    // of x, under a tile
  int pitch;         // elements of a staged row
  int tiles[2];      // of a map
  int out_channel_tiles;
  int warps, blocks;  // of a block; that share the tiles of a stack and output channel tile
  // Of a block's shared memory, which begins with the weights in order. raw_at: where pixels are copied to; it is
  // patch_at except at 3xTF32 or where another tile is read meanwhile. pool_at: of results before the pool, and of the
  // weights as they lie, before that.
  int table_at, bias_at, raw_at, patch_at, pool_at, shared_bytes;
  double cycles;  // what the model expects
};

// Completes a plan that has output channels and tile_out; false where it does not fit.
bool CompleteFewChannelsPlan(const ConvArgs& args, int element_bytes, const DeviceInfo& device, FewChannelsPlan* plan);

// Every plan that fits a call. tile of a candidate: output channels, rows and columns of results.
void VisitFewChannelsPlans(const ConvArgs& args, int element_bytes, const DeviceInfo& device,
                           const std::function<void(const FewChannelsPlan&)>& visit);

// The plan of a candidate, or one without output channels where it does not fit.
FewChannelsPlan FewChannelsPlanOf(const Candidate& candidate, const ConvArgs& args, int element_bytes,
                                  const DeviceInfo& device);

// The time that its cycles stand for, comparable to other engines'.
double FewChannelsMicroseconds(const FewChannelsPlan& plan, const ConvArgs& args, int element_bytes,
                               const DeviceInfo& device);

// The best plan under the model in dense_conv/plan/few_channels_plan.cc, or one without output channels.
FewChannelsPlan ChooseFewChannelsPlan(const ConvArgs& args, int element_bytes, const DeviceInfo& device);

}  // namespace jsc

#endif  // JSC_CUDA_DENSE_CONV_PLAN_FEW_CHANNELS_PLAN_H_
