// A call of the COO* convolution as its kernels get it.
#ifndef JSC_CUDA_SPARSE_COO_TASK_CUH_
#define JSC_CUDA_SPARSE_COO_TASK_CUH_

#include <algorithm>

#include "cuda/core/launch.cuh"
#include "cuda/core/task_head.h"
#include "cuda/core/vectors.cuh"
#include "cuda/sparse/coo/plan.h"
#include "native/coo_variants.h"

namespace jsc {

constexpr int kCooChunk = 32;  // channels whose lists a block holds at a time: one lane each

template <typename T>
struct CooTask {
  const T* x;         // [N, H, W, C]
  const T* kernel;    // [S, R, R, C / groups, K]
  const T* bias;      // [S, K] or null
  const T* residual;  // [N, Ho, Wo, K] or null
  T* out;             // [N, Ho, Wo, K]
  float* partial;     // [split, N, Ho, Wo, K], only with splits > 1
  CooPlan plan;
  int height, width, channels, group_channels, out_channels, group_out_channels;
  int stride[2], step[2], pad_low[2];  // pixels between tiles' results, and between positions of a patch
  int out_size[2];
  int images_per_stack;
  int64_t images;
  int split_channels;  // channels of a split, a multiple of 8
  int copy_x_shift;    // logarithm of the elements of one asynchronous copy of x
  bool vector_kernel;  // a thread's weights of one tap come in one copy
  bool vector_out;
  bool relu;
  Divider by_out_channel_tiles, by_splits, by_tiles[2], by_groups, by_out_channels, by_image;
};

template <typename T>
CooTask<T> MakeCooTask(const DeviceCall& call, const CooPlan& plan, void* workspace) {
  const ConvArgs& a = call.args;
  const CooVariant& shape = kCooVariants[plan.variant];
  CooTask<T> t{};
  SetBuffers(call, &t);
  SetSizes(a, &t);
  t.partial = static_cast<float*>(workspace);
  t.plan = plan;
  for (int i = 0; i < 2; ++i) {
    t.step[i] = shape.kernel == 1 ? t.stride[i] : 1;
    t.out_size[i] = static_cast<int>(a.conv_size[i]);
    t.by_tiles[i] = Divider(plan.tiles[i]);
  }
  t.images = a.images;
  t.images_per_stack = static_cast<int>(a.images / a.stacks);
  t.split_channels = CooSplitChannels(a, plan.splits);
  t.copy_x_shift = 0;
  while ((2 << t.copy_x_shift) * sizeof(T) <= 16 && t.channels % (2 << t.copy_x_shift) == 0 &&
         t.group_channels % (2 << t.copy_x_shift) == 0) {
    ++t.copy_x_shift;
  }
  t.vector_kernel = t.out_channels % shape.out_channels == 0 && t.group_out_channels % shape.out_channels == 0;
  t.vector_out = t.out_channels % 4 == 0 && t.group_out_channels % 4 == 0;
  t.relu = a.activation == Activation::kRelu;
  t.by_out_channel_tiles = Divider(plan.out_channel_tiles);
  t.by_splits = Divider(plan.splits);
  t.by_groups = Divider(a.groups);
  t.by_out_channels = Divider(t.out_channels);
  t.by_image = Divider(a.conv_size[0] * a.conv_size[1]);
  return t;
}

}  // namespace jsc

#endif  // JSC_CUDA_SPARSE_COO_TASK_CUH_
