// A call of the COO* convolution as its kernels get it.
#ifndef JSC_CUDA_SPARSE_COO_TASK_CUH_
#define JSC_CUDA_SPARSE_COO_TASK_CUH_

#include <algorithm>

#include "cuda/core/launch.cuh"
#include "cuda/core/task_head.h"
#include "cuda/core/vectors.cuh"
#include "cuda/sparse/coo/plan.h"
#include "native/coo_lists.h"
#include "native/coo_variants.h"

namespace jsc {

// Stored lists, read in x's place.
template <typename T>
struct CooStored {
  const T* values;        // [N, tH, tW, tC, slots]
  const void* positions;  // same, of one byte or two
  const int32_t* counts;  // [N, tH, tW, tC]
  int tiles[3], slots;
  bool wide_positions;
  Divider by_tile[3];
};

template <typename T>
CooStored<T> MakeCooStored(const CooLists& lists) {
  CooStored<T> s{};
  s.values = static_cast<const T*>(lists.values);
  s.positions = lists.positions;
  s.counts = lists.counts;
  s.slots = static_cast<int>(lists.args.slots());
  s.wide_positions = lists.args.position_bytes > 1;
  for (int i = 0; i < 3; ++i) {
    s.tiles[i] = static_cast<int>(lists.args.tiles[i]);
    s.by_tile[i] = Divider(lists.args.tile[i]);
  }
  return s;
}

// The densities of x at which a kernel runs, of (non-zeros, elements) that only the device knows; all without any.
struct DensityRange {
  const int32_t* nonzeros;  // [rows, 2], or null
  int rows;
  bool has_above, has_at_most;
  float above, at_most;
};

inline DensityRange RangeOf(const CooChoice& choice, int index) {
  DensityRange range{};
  if (choice.count == 1 && !choice.has_dense) return range;
  range.nonzeros = choice.nonzeros;
  range.rows = choice.rows;
  range.has_above = index > 0;
  range.has_at_most = index + 1 < choice.count;
  if (range.has_above) range.above = choice.densities[index - 1];
  if (range.has_at_most) range.at_most = choice.densities[index];
  if (choice.has_dense) {  // a variant for denser maps only has no density left
    range.at_most = range.has_at_most ? std::min(range.at_most, choice.dense_above) : choice.dense_above;
    range.has_at_most = true;
  }
  return range;
}

template <typename T>
struct CooTask {
  const T* x;         // [N, H, W, C], or null with stored lists
  const T* kernel;    // [S, R, R, C / groups, K]
  const T* bias;      // [S, K] or null
  const T* residual;  // [N, Ho, Wo, K] or null
  T* out;             // [N, Ho, Wo, K]
  float* partial;     // [split, N, Ho, Wo, K], only with splits > 1
  CooStored<T> stored;
  DensityRange range;
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
