// Engine grouped: dense convolution with few channels per group. Details: docs/design/kernels/grouped.md.
//
// Computes out[pixel][output channel] = relu(sum over taps and a group's channels of x * kernel + bias + residual).
// Layout of shared memory: distances of units; where each pixel of the tile reads and writes; weights [tap, channel,
//   output channel of the block]; pixels [image, row, column, channel of the block]. Rows of both are an odd number of
//   16 bytes apart (float32 weights: of 32), so they share no banks. A unit is 16 bytes of a pixel's channels under a
//   tap. A step of the tensor cores is two units, wherever they lie. Fragments of pixels are the rows of the products,
//   one ldmatrix each.
// Why this tiling: tiles of the other engines have 64 or 128 output channels of one group, of which groups of 16 or 24
//   fill a part. They also copy pixels again under every tap. Such layers mostly read and write maps. So a block copies
//   its pixels with their halo, and the weights of some neighbouring groups, once.
// Bound by: launch and first copies where there are few blocks. Else in 16 bits copies and results, since no more than
//   two blocks overlap; in TF32 rounding beside mma.sync; at HIGHEST mma.sync.
// Lost: four warps a block, three blocks an SM, columns by their remainder where the stride is 2.
// Tests: tests/cuda/test_groups.py.
#ifndef JSC_CUDA_DENSE_CONV_GROUPED_KERNEL_CUH_
#define JSC_CUDA_DENSE_CONV_GROUPED_KERNEL_CUH_

#include "cuda/dense_conv/grouped/launch.h"
#include "cuda/dense_conv/grouped/results.cuh"

namespace jsc {

template <class U, typename T>
__global__ void __launch_bounds__(U::kThreads, kGroupedBlocks)
    GroupedKernel(const __grid_constant__ GroupedTask<T> group) {
  extern __shared__ __align__(128) unsigned char shared[];
  const MmaTask<T>& task = group.small_map.mma;
  if (!PassesGate(task.gate)) return;
  const GroupedPlace at = FindGroupedPlace<U>(group);
  int* offsets = reinterpret_cast<int*>(shared);
  auto* places = reinterpret_cast<PixelPlace*>(shared + group.places_at);
  CopyGroupedWeights<U>(group, at, shared + group.weights_at);
  FillOffsets<U>(group, offsets);
  if (task.gate.in_chain) {  // weights are there before the kernel in front is done
    if (threadIdx.x == 0) FetchAhead(task.gate);
    WaitForKernelBefore();
    LetNextKernelStart();
  }
  CopyGroupedPixels<U>(group, at, shared + group.pixels_at);
  CommitCopies();
  FillPlaces<U>(group, at, places);
  WaitForCopies<0>();
  __syncthreads();
  const int pixels = group.tile_images * group.tile_pixels;
  const bool is_plain = task.residual == nullptr && task.counts.rows == nullptr;
  int2 written = make_int2(0, 0);
#pragma unroll 1
  for (int item = static_cast<int>(threadIdx.x / kWarp);; item += kGroupedWarps) {
    const Quotient part = Divide(item, group.by_columns), column = Divide(part.remainder, group.by_of_group);
    const int first = part.quotient * (U::kRows * 16), number = at.group + column.quotient;
    if (first >= pixels) break;
    if (number >= group.all_groups) continue;
    int starts[U::kRows];
#pragma unroll
    for (int i = 0; i < U::kRows; ++i) starts[i] = places[first + i * 16 + threadIdx.x % 16].start;
    const int in_group = at.out_channel - at.group * task.group_out_channels + column.remainder * (8 * U::kTiles);
    const GroupedWriter<U, T> writer(group, at.stack, number, in_group);
    GroupedEngine<U, T> engine;
    engine.MultiplyAll(group.units, offsets, shared + group.pixels_at + column.quotient * group.group_bytes, starts,
                       shared + group.weights_at + part.remainder * (8 * U::kTiles * static_cast<int>(sizeof(T))),
                       group.weight_bytes);
    if (is_plain) {
      writer.template Write<true>(engine, places + first);
    } else {
      const int2 count = writer.template Write<false>(engine, places + first);
      written.x += count.x, written.y += count.y;
    }
  }
  if (task.counts.rows) WriteCountsApart(task.counts, written, reinterpret_cast<int2*>(shared));
  LeaveGate(task.gate);
}

template <class U, typename T>
Error LaunchGrouped(const DeviceCall& call, const GroupedPlan& plan, cudaStream_t stream) {
  constexpr auto kKernel = GroupedKernel<U, T>;
  const Error error = Prepare<kKernel>("GroupKernel");
  if (error.failure()) return error;
  GroupedTask<T> group = MakeGroupedTask<T>(call, plan);
  const int64_t tiles = call.args.stacks * plan.image_tiles * plan.tiles_down * plan.tiles_across;
  MmaTask<T>& task = group.small_map.mma;
  task.counts = CountsOf(call.counts, tiles * plan.bundles);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(tiles), static_cast<unsigned>(plan.bundles));
  config.blockDim = dim3(U::kThreads);
  config.dynamicSmemBytes = plan.shared_bytes;
  config.stream = stream;
  if (MayOverlap<kKernel>(&config, call.in_front)) task.gate.overlaps = true;
  LaunchAttributes attributes(0, task.gate);
  config.attrs = attributes.list;
  config.numAttrs = attributes.count;
  return CheckCuda(cudaLaunchKernelEx(&config, kKernel, group), "GroupKernel");
}

// The kernel of a plan's tiles, one of those of GroupedTiles in dense_conv/plan/grouped_plan.cc.
template <typename T, bool kTf32x3>
Error LaunchGroupedTiles(const DeviceCall& call, const GroupedPlan& plan, cudaStream_t stream) {
  switch (plan.tiles) {
    case 1:
      return LaunchGrouped<GroupedTuning<T, 1, kTf32x3>, T>(call, plan, stream);
    case 2:
      return LaunchGrouped<GroupedTuning<T, 2, kTf32x3>, T>(call, plan, stream);
    case 3:
      return LaunchGrouped<GroupedTuning<T, 3, kTf32x3>, T>(call, plan, stream);
    case 4:
      return LaunchGrouped<GroupedTuning<T, 4, kTf32x3>, T>(call, plan, stream);
    case 5:
      return LaunchGrouped<GroupedTuning<T, 5, kTf32x3>, T>(call, plan, stream);
    case 7:
      return LaunchGrouped<GroupedTuning<T, 7, kTf32x3>, T>(call, plan, stream);
    default:
      return Error(ErrorCode::kInternal, "GroupKernel: no such tiles");
  }
}

template <typename T>
Error LaunchGroupedPlan(const DeviceCall& call, const GroupedPlan& plan, cudaStream_t stream) {
  if constexpr (sizeof(T) == 4) {
    if (plan.tf32x3) return LaunchGroupedTiles<T, true>(call, plan, stream);
  }
  return LaunchGroupedTiles<T, false>(call, plan, stream);
}

}  // namespace jsc

#endif  // JSC_CUDA_DENSE_CONV_GROUPED_KERNEL_CUH_
