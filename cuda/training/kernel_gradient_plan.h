// How the gradient of a kernel is cut for Hopper's warpgroup products (training/kernel_gradient.cu).
#ifndef JSC_CUDA_TRAINING_KERNEL_GRADIENT_PLAN_H_
#define JSC_CUDA_TRAINING_KERNEL_GRADIENT_PLAN_H_

#include <vector>

#include "cuda/core/device_info.h"
#include "cuda/core/swizzle.h"
#include "native/call.h"

namespace jsc {

constexpr int kGradientSide = 64;         // channels, and output channels, of a tile of sums
constexpr int kGradientPixels = 32;       // of a step: a row of 128 bytes of an operand
constexpr int kGradientBoxChannels = 32;  // of a copy: 128 bytes
constexpr int kMostGradientTiles = 3;     // of a warpgroup
constexpr int kMostGradientStages = 5;    // of the pipeline

// A block has two warpgroups that multiply. Each has `tiles` tiles of 64 channels x 64 output channels: of neighbouring
// taps of a row of the kernel, or of neighbouring channels. A step is up to 32 results, a box of the cotangent.
struct KernelGradientPlan {
  int tiles;             // none: no plan
  bool by_taps;          // else by channels
  bool shares_channels;  // both warpgroups have the same channels, and take steps in turns
  int columns, rows;     // of a box; rows of all images lie one below the other
  int x_columns;         // pixels of a row of x that a box's row meets
  int x_pitch;           // from such a row to the next, in pixels
  int x_boxes;           // of 32 channels
  int stages, stage_bytes;
  int channel_blocks, out_channel_blocks, tap_blocks;  // of the grid
  int64_t steps;
  int splits;           // of the steps, each with sums of its own
  double microseconds;  // expected

  // Blocks of a split.
  int64_t kinds() const { return int64_t{channel_blocks} * out_channel_blocks * tap_blocks; }
  // Partial sums of the whole gradient, added up in the end; of one there is no workspace.
  int64_t partials() const { return int64_t{splits} * (shares_channels ? 2 : 1); }
};

// What a call is told of its plan, as the attribute `tile` has it.
struct KernelGradientTile {
  int tiles;
  bool shares_channels;
  int columns, splits;
};

// Plans that fit, with the splits that are expected to be fastest, the fastest first: for float32 without groups, whose
// channels are multiples of 4. args: of MakeKernelGradientArgs.
std::vector<KernelGradientPlan> KernelGradientPlans(const ConvArgs& args, const DeviceInfo& device);

// The plan of a tile, or one without tiles where that does not fit.
KernelGradientPlan KernelGradientPlanOf(const KernelGradientTile& tile, const ConvArgs& args, const DeviceInfo& device);

int64_t KernelGradientBytes(const ConvArgs& args, const KernelGradientPlan& plan);  // of workspace

}  // namespace jsc

#endif  // JSC_CUDA_TRAINING_KERNEL_GRADIENT_PLAN_H_
