// What a block of the gradient of a kernel computes (training/kernel_gradient.cu): the description of the call, the
// place of a block in it, and the stages of its pipeline.
#ifndef JSC_CUDA_TRAINING_KERNEL_GRADIENT_TASK_CUH_
#define JSC_CUDA_TRAINING_KERNEL_GRADIENT_TASK_CUH_

#include "cuda/core/copies.cuh"
#include "cuda/core/vectors.cuh"
#include "cuda/training/kernel_gradient.h"

namespace jsc {

constexpr int kWarpgroup = 128;
constexpr int kMultiplyingGroups = 2;  // that multiply; a third one copies and transposes
constexpr int kGradientThreads = (kMultiplyingGroups + 1) * kWarpgroup;
constexpr int kMultiplyingRegisters = 208, kCopyingRegisters = 88;  // of a thread
constexpr int kCotangentBoxBytes = kGradientPixels * kRowBytes;     // of the cotangent, 32 output channels
constexpr int kTransposedBytes = kGradientSide * kRowBytes;         // of either part of the transposed cotangent

struct KernelGradientTask {
  const float *x, *cotangent;
  float *partials, *out;  // the same where there is one partial sum
  int channels, out_channels, images, size[2], conv_size[2], kernel_size[2], stride[2], pad_low[2], dilation[2];
  int columns, rows, x_columns, x_pitch, x_boxes, stages, stage_bytes, column_step;
  int steps, splits, partial_count;
  bool by_taps, shares_channels;
  Divider by_kinds, by_channel_blocks, by_out_channel_blocks, by_taps_across, by_column_boxes, by_rows, by_columns;
};

inline KernelGradientTask MakeKernelGradientTask(const ConvArgs& a, const KernelGradientPlan& plan,
                                                 const KernelGradientBuffers& buffers) {
  KernelGradientTask t;
  t.x = buffers.x;
  t.cotangent = buffers.cotangent;
  t.out = buffers.out;
  t.partials = plan.partials() > 1 ? static_cast<float*>(buffers.workspace) : buffers.out;
  t.channels = static_cast<int>(a.channels);
  t.out_channels = static_cast<int>(a.out_channels);
  t.images = static_cast<int>(a.images);
  for (int i = 0; i < 2; ++i) {
    t.size[i] = static_cast<int>(a.size[i]);
    t.conv_size[i] = static_cast<int>(a.conv_size[i]);
    t.kernel_size[i] = static_cast<int>(a.kernel_size[i]);
    t.stride[i] = static_cast<int>(a.stride[i]);
    t.pad_low[i] = static_cast<int>(a.pad_low[i]);
    t.dilation[i] = static_cast<int>(a.dilation[i]);
  }
  t.columns = plan.columns;
  t.rows = plan.rows;
  t.x_columns = plan.x_columns;
  t.x_pitch = plan.x_pitch;
  t.x_boxes = plan.x_boxes;
  t.stages = plan.stages;
  t.stage_bytes = plan.stage_bytes;
  t.column_step = a.kernel_size[1] == 1 ? 1 : static_cast<int>(a.stride[1]);
  t.steps = static_cast<int>(plan.steps);
  t.splits = plan.splits;
  t.partial_count = static_cast<int>(plan.partials());
  t.by_taps = plan.by_taps;
  t.shares_channels = plan.shares_channels;
  t.by_kinds = Divider(plan.kinds());
  t.by_channel_blocks = Divider(plan.channel_blocks);
  t.by_out_channel_blocks = Divider(plan.out_channel_blocks);
  t.by_taps_across = Divider(plan.tap_blocks / t.kernel_size[0]);
  t.by_column_boxes = Divider(DivideUp(a.conv_size[1], plan.columns));
  t.by_rows = Divider(a.conv_size[0]);
  t.by_columns = Divider(plan.columns);
  return t;
}

#if __CUDA_ARCH__ >= 900
struct KernelGradientBarriers {
  uint64_t full[kMostGradientStages], transposed[kMostGradientStages], free[kMostGradientStages];
};

// What a block computes, and of which steps.
struct KernelGradientPlace {
  int channel, out_channel, row, column, split;  // the first ones, and taps
  int first_step, end_step;
};

__device__ __forceinline__ KernelGradientPlace FindPlace(const KernelGradientTask& task, int tiles) {
  const Quotient split = Divide(static_cast<int>(blockIdx.x), task.by_kinds);
  const Quotient out = Divide(split.remainder, task.by_out_channel_blocks);
  const Quotient channel = Divide(out.quotient, task.by_channel_blocks);
  const Quotient tap = Divide(channel.quotient, task.by_taps_across);
  KernelGradientPlace at;
  at.channel = channel.remainder * task.x_boxes * kGradientBoxChannels;
  at.out_channel = out.remainder * kGradientSide;
  at.row = tap.quotient;
  at.column = tap.remainder * tiles;
  at.split = split.quotient;
  const int each = task.steps / task.splits, more = task.steps % task.splits;
  at.first_step = at.split * each + min(at.split, more);
  at.end_step = at.first_step + each + (at.split < more ? 1 : 0);
  return at;
}

// A stage of the pipeline: of x [box][row][column], of the cotangent [box][result], and its parts transposed.
struct KernelGradientStage {
  uint32_t x, cotangent, transposed;
  __device__ __forceinline__ KernelGradientStage(const KernelGradientTask& task, uint32_t stages, int index) {
    x = stages + index * task.stage_bytes;
    transposed = x + task.stage_bytes - 2 * kTransposedBytes;
    cotangent = transposed - kTransposedBytes;
  }
};
#endif

}  // namespace jsc

#endif  // JSC_CUDA_TRAINING_KERNEL_GRADIENT_TASK_CUH_
