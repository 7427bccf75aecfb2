// The end of the COO* convolution (sparse/coo/coo.cu): sums of slices and splits are added in a fixed order, through
// shared memory, a cluster's or the workspace, and become results.
#ifndef JSC_CUDA_SPARSE_COO_SUMS_CUH_
#define JSC_CUDA_SPARSE_COO_SUMS_CUH_

#include "cuda/core/cluster_sums.cuh"
#include "cuda/core/elements.cuh"
#include "cuda/sparse/coo/density_range.cuh"
#include "cuda/sparse/coo/lists.cuh"

namespace jsc {

template <typename T>
__device__ void FinishResult(const CooTask<T>& task, int stack, int64_t at, int out_channel, float4 sum, int valid) {
  if (task.bias) {
    sum = sum +
          LoadUpTo4(task.bias + static_cast<int64_t>(stack) * task.out_channels + out_channel, valid, task.vector_out);
  }
  if (task.residual) sum = sum + LoadUpTo4(task.residual + at, valid, task.vector_out);
  if (task.relu) sum = Relu(sum);
  StoreUpTo4(task.out + at, sum, valid, task.vector_out);
}

// Adds up the slices' sums [slice, output channel warp, pixel, warp output channel] in the place of the first.
template <int kVariant>
__device__ void AddSlices(float* sums, int warps, int slices) {
  constexpr int kWarpSums = CooMicro<kVariant>::kSums * kWarp;
  for (int i = threadIdx.x * 4; i < warps * kWarpSums; i += blockDim.x * 4) {
    float4 sum = Load4(sums + i);
    for (int slice = 1; slice < slices; ++slice) sum = sum + Load4(sums + i + slice * warps * kWarpSums);
    *reinterpret_cast<float4*>(sums + i) = sum;
  }
}

// Adds up the sums [output channel warp, pixel, warp output channel] of `parts` parts, always in the same order.
// part(p, i) is four sums at i. Writes this block's share of the results, or of its partial sums.
template <typename T, int kVariant, typename Part>
__device__ void FinishCoo(const CooTask<T>& task, int share, int shares, int parts, Part part) {
  constexpr CooVariant kShape = kCooVariants[kVariant];
  constexpr int kWarpOutChannels = kWarp * kShape.out_channels, kWarpSums = kShape.pixels() * kWarpOutChannels;
  const CooPlace b = LocateCoo<T, kVariant>(task);
  const int warps = task.plan.out_channel_warps;
  const int64_t results = static_cast<int64_t>(task.by_image.divisor) * task.out_channels;  // of an image
  for (int i = share * blockDim.x + threadIdx.x; i < warps * kWarpSums / 4; i += blockDim.x * shares) {
    const int in_warp = i * 4 % kWarpOutChannels, rest = i * 4 / kWarpOutChannels;
    const int warp = rest & (warps - 1), pixel = rest / warps;
    const int y = b.out[0] + pixel / kShape.width, x = b.out[1] + pixel % kShape.width;
    const int out_channel = b.out_channel + warp * kWarpOutChannels + in_warp;  // within the group
    const int valid = min(task.group_out_channels - out_channel, 4);
    if (valid <= 0 || y >= task.out_size[0] || x >= task.out_size[1]) continue;
    const int from = warp * kWarpSums + pixel * kWarpOutChannels + in_warp;
    float4 sum = part(0, from);
#pragma unroll 8
    for (int p = 1; p < parts; ++p) sum = sum + part(p, from);
    const int all = b.group * task.group_out_channels + out_channel;
    const int64_t at = b.image * results + (y * task.out_size[1] + x) * static_cast<int64_t>(task.out_channels) + all;
    if (task.plan.splits == 1 || task.plan.cluster) {
      FinishResult(task, b.stack, at, all, sum, valid);
    } else {
      StoreUpTo4(task.partial + b.split * results * task.images + at, sum, valid, task.vector_out);
    }
  }
}

// Adds up the splits of every four results.
template <typename T>
__global__ void __launch_bounds__(256) CooReduceKernel(const __grid_constant__ CooTask<T> task, int total) {
  if (!InDensityRange(task.range)) return;
  const unsigned first = (blockIdx.x * 256 + threadIdx.x) * 4;  // beyond 2^31 in the last block of a full workspace
  if (first >= static_cast<unsigned>(total)) return;
  const int at = static_cast<int>(first);
  const int valid = min(total - at, 4);
  float4 sum = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 4
  for (int split = 0; split < task.plan.splits; ++split) {
    sum = sum + LoadUpTo4(task.partial + static_cast<int64_t>(split) * total + at, valid, task.vector_out);
  }
  if (task.vector_out) {
    const Quotient pixel = Divide(at, task.by_out_channels);
    const int stack = Divide(pixel.quotient, task.by_image).quotient / task.images_per_stack;
    FinishResult(task, stack, at, pixel.remainder, sum, valid);
    return;
  }
  const float each[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i >= valid) break;
    const Quotient pixel = Divide(at + i, task.by_out_channels);
    const int stack = Divide(pixel.quotient, task.by_image).quotient / task.images_per_stack;
    FinishResult(task, stack, at + i, pixel.remainder, {each[i], 0.f, 0.f, 0.f}, 1);
  }
}

}  // namespace jsc

#endif  // JSC_CUDA_SPARSE_COO_SUMS_CUH_
