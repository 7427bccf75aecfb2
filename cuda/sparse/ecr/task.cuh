// A call as the kernels get it: buffers, 32-bit sizes, the plan, and divisors made ready by the host.
#ifndef JSC_CUDA_SPARSE_ECR_TASK_CUH_
#define JSC_CUDA_SPARSE_ECR_TASK_CUH_

#include "cuda/core/density.cuh"
#include "cuda/core/task_head.h"
#include "cuda/sparse/ecr/plan.h"

namespace jsc {

// The buffers of a call and its static sizes, passed to kernels by value.
template <typename T>
struct ConvTask {
  const T* x;         // [N, H, W, C]
  const T* kernel;    // [S, kh, kw, C / groups, K]
  const T* bias;      // [S, K] or null
  const T* residual;  // [N, Ho, Wo, K] or null
  T* out;             // [N, Ho, Wo, K]
  float*
      partial;  // [tile, output channel tile, split, tile pixel, tile output channel], only with Reduction::kWorkspace
  EcrPlan plan;
  int64_t images_per_stack;
  int height, width, channels, group_channels, out_channels, group_out_channels, groups;
  int kernel_height, kernel_width;
  int stride[2], pad_low[2], dilation[2], conv[2], out_size[2];
  int window[2], window_stride[2], window_pad[2];
  bool relu, average;
  CountTask counts;
  Gate gate;
  float pool_scale;  // 1 / pixels of an averaged window, else 1
  // Divisors that the kernels need.
  Divider by_splits, by_channel_tiles, by_group_tiles, by_tiles[3], by_tile_conv[2], by_tile_out[2], by_tile_patch[2],
      by_quads[2], by_kernel_width, by_groups, by_share_quads, by_out_channels, by_out_width;
};

template <typename T>
void SetDividers(ConvTask<T>* t) {
  const EcrPlan& plan = t->plan;
  t->by_out_channels = Divider(t->out_channels);
  t->by_out_width = Divider(t->out_size[1]);
  t->by_kernel_width = Divider(t->kernel_width);
  if (plan.warps == 0) return;  // no tiles
  t->by_splits = Divider(plan.splits);
  t->by_channel_tiles = Divider(static_cast<int64_t>(plan.channel_tiles) * t->groups);
  t->by_group_tiles = Divider(plan.channel_tiles);
  for (int i = 0; i < 3; ++i) t->by_tiles[i] = Divider(plan.tiles[i]);
  for (int i = 0; i < 2; ++i) {
    t->by_tile_conv[i] = Divider(plan.tile_conv[i]);
    t->by_tile_out[i] = Divider(plan.tile_out[i]);
    t->by_tile_patch[i] = Divider(plan.tile_patch[i]);
    if (plan.quads[0]) t->by_quads[i] = Divider(plan.quads[i]);
  }
  t->by_share_quads = Divider(plan.share_quads);
  t->by_groups = Divider(plan.groups);
}

template <typename T>
ConvTask<T> MakeConvTask(const DeviceCall& call, const EcrPlan& plan, void* workspace) {
  const ConvArgs& a = call.args;
  ConvTask<T> t{};
  SetBuffers(call, &t);
  SetSizes(a, &t);
  t.partial = static_cast<float*>(workspace);
  t.plan = plan;
  t.images_per_stack = a.images / a.stacks;
  t.groups = static_cast<int>(a.groups);
  t.kernel_height = static_cast<int>(a.kernel_size[0]);
  t.kernel_width = static_cast<int>(a.kernel_size[1]);
  for (int i = 0; i < 2; ++i) {
    t.dilation[i] = static_cast<int>(a.dilation[i]);
    t.conv[i] = static_cast<int>(a.conv_size[i]);
    t.out_size[i] = static_cast<int>(a.out_size[i]);
    const bool pooled = a.pool != Pool::kNone;
    t.window[i] = pooled ? static_cast<int>(a.window[i]) : 1;
    t.window_stride[i] = pooled ? static_cast<int>(a.window_stride[i]) : 1;
    t.window_pad[i] = pooled ? static_cast<int>(a.window_pad_low[i]) : 0;
  }
  t.relu = a.activation == Activation::kRelu;
  t.gate = call.gate;
  t.average = a.pool == Pool::kAverage;
  t.pool_scale = t.average ? static_cast<float>(1.0 / (static_cast<double>(a.window[0]) * a.window[1])) : 1.f;
  SetDividers(&t);
  return t;
}

}  // namespace jsc

#endif  // JSC_CUDA_SPARSE_ECR_TASK_CUH_
