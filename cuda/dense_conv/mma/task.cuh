// A call as the engine mma gets it: buffers, 32-bit sizes, how it is cut, and divisors that the host has prepared.
#ifndef JSC_CUDA_DENSE_CONV_MMA_TASK_CUH_
#define JSC_CUDA_DENSE_CONV_MMA_TASK_CUH_

#include "cuda/core/density.cuh"
#include "cuda/core/task_head.h"
#include "cuda/dense_conv/plan/mma_plan.h"

namespace jsc {

template <typename T>
struct MmaTask {
  const T* x;         // [N, H, W, C]
  const T* kernel;    // [S, kh, kw, C / groups, K]: for a stack a matrix [depth, K]
  const T* bias;      // [S, K] or null
  const T* residual;  // [N, Ho, Wo, K] or null
  T* out;             // [N, Ho, Wo, K]
  CountTask counts;
  Gate gate;
  float* partial;  // [tile, split, tile pixel, tile output channel], only with Reduction::kWorkspace
  int64_t images_per_stack;
  int pixels;  // results of a stack without their channels: images * Ho * Wo
  int depth;   // of the reduction: kh * kw * C / groups
  int taps, height, width, channels, group_channels, out_channels, group_out_channels;
  int stride[2], pad_low[2], dilation[2];
  int chunks, chunks_per_split, splits, tiles, out_channel_tiles;
  Reduction reduction;
  bool relu, vector_out;
  Divider by_splits, by_out_channel_tiles, by_out_height, by_out_width, by_group_channels, by_kernel_width;
};

template <typename T>
MmaTask<T> MakeMmaTask(const DeviceCall& call, const MmaPlan& plan, void* workspace) {
  const ConvArgs& a = call.args;
  MmaTask<T> t{};
  SetBuffers(call, &t);
  SetSizes(a, &t);
  t.gate = call.gate;
  t.partial = static_cast<float*>(workspace);
  t.images_per_stack = a.images / a.stacks;
  t.pixels = static_cast<int>(t.images_per_stack * a.conv_size[0] * a.conv_size[1]);
  t.taps = static_cast<int>(a.kernel_size[0] * a.kernel_size[1]);
  t.depth = static_cast<int>(t.taps * a.group_channels);
  for (int i = 0; i < 2; ++i) {
    t.dilation[i] = static_cast<int>(a.dilation[i]);
  }
  t.chunks = plan.chunks;
  t.chunks_per_split = plan.chunks_per_split;
  t.splits = plan.splits;
  t.tiles = plan.pixel_tiles * plan.out_channel_tiles;
  t.out_channel_tiles = plan.out_channel_tiles;
  t.reduction = plan.reduction;
  t.relu = a.activation == Activation::kRelu;
  t.vector_out = t.out_channels % 4 == 0 && t.group_out_channels % 4 == 0;
  t.by_splits = Divider(plan.splits);
  t.by_out_channel_tiles = Divider(plan.out_channel_tiles);
  t.by_out_height = Divider(a.conv_size[0]);
  t.by_out_width = Divider(a.conv_size[1]);
  t.by_group_channels = Divider(a.group_channels);
  t.by_kernel_width = Divider(a.kernel_size[1]);
  return t;
}

// Which part of the work a block has: a tile of pixels x output channels, and of the reduction a range of chunks.
struct MmaPlace {
  int pixel, out_channel;  // first of the tile, in its stack and group
  int group, stack, split;
  int first_chunk, end_chunk;
};

template <class U, typename T>
__device__ __forceinline__ MmaPlace FindMmaPlace(const MmaTask<T>& task, int tile, int split) {
  const Quotient by = Divide(tile, task.by_out_channel_tiles);
  const int first = split * task.chunks_per_split;
  return {by.quotient * U::kPixels,
          by.remainder * U::kOutChannels,
          static_cast<int>(blockIdx.y),
          static_cast<int>(blockIdx.z),
          split,
          first,
          min(first + task.chunks_per_split, task.chunks)};
}

}  // namespace jsc

#endif  // JSC_CUDA_DENSE_CONV_MMA_TASK_CUH_
