// How the partial sums of the gradient of a kernel (training/kernel_gradient.cu) become the gradient: in order, and
// again in float64 where they are not finite.
#ifndef JSC_CUDA_TRAINING_KERNEL_GRADIENT_PARTIALS_CUH_
#define JSC_CUDA_TRAINING_KERNEL_GRADIENT_PARTIALS_CUH_

#include "cuda/training/kernel_gradient_task.cuh"

namespace jsc {

constexpr int kAdders = 256;      // threads of a block
constexpr int kManyPartials = 8;  // from which on threads share them

// Four results again, in float64, from memory.
__device__ __noinline__ float4 SumAgain(const KernelGradientTask& task, int tap, int channel, int out_channel) {
  const int row = tap / task.kernel_size[1] * task.dilation[0] - task.pad_low[0];
  const int column = tap % task.kernel_size[1] * task.dilation[1] - task.pad_low[1];
  double sum[4] = {};
#pragma unroll 1
  for (int image = 0; image < task.images; ++image) {
    if (isnan(sum[0]) && isnan(sum[1]) && isnan(sum[2]) && isnan(sum[3])) break;  // as they stay
#pragma unroll 1
    for (int y = 0; y < task.conv_size[0]; ++y) {
      const int in_y = y * task.stride[0] + row;
      if (in_y < 0 || in_y >= task.size[0]) continue;
#pragma unroll 1
      for (int x = 0; x < task.conv_size[1]; ++x) {
        const int in_x = x * task.stride[1] + column;
        if (in_x < 0 || in_x >= task.size[1]) continue;
        const double value =
            task.x[((int64_t{image} * task.size[0] + in_y) * task.size[1] + in_x) * task.channels + channel];
        const float4 by = *reinterpret_cast<const float4*>(
            task.cotangent + ((int64_t{image} * task.conv_size[0] + y) * task.conv_size[1] + x) * task.out_channels +
            out_channel);
        sum[0] += value * by.x, sum[1] += value * by.y, sum[2] += value * by.z, sum[3] += value * by.w;
      }
    }
  }
  return {static_cast<float>(sum[0]), static_cast<float>(sum[1]), static_cast<float>(sum[2]),
          static_cast<float>(sum[3])};
}

// out = the partial sums, added in order. A thread has four results; kReducers threads share their partial sums.
template <int kReducers>
__global__ void __launch_bounds__(kAdders) AddPartialsKernel(const __grid_constant__ KernelGradientTask task) {
  constexpr int kQuads = kAdders / kReducers;
  __shared__ float4 parts[kReducers][kQuads];
  const int64_t quads = int64_t{task.kernel_size[0]} * task.kernel_size[1] * task.channels * task.out_channels / 4;
  const int64_t quad = int64_t{blockIdx.x} * kQuads + threadIdx.x;
  float4 sum = {0.f, 0.f, 0.f, 0.f};
  if (quad < quads) {
    const auto* from = reinterpret_cast<const float4*>(task.partials) + quad;
#pragma unroll 4
    for (int i = static_cast<int>(threadIdx.y); i < task.partial_count; i += kReducers) {
      sum = sum + from[i * quads];
    }
  }
  if constexpr (kReducers > 1) {
    parts[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y > 0) return;
#pragma unroll
    for (int i = 1; i < kReducers; ++i) sum = sum + parts[i][threadIdx.x];
  }
  if (quad >= quads) return;
  if (!IsFinite(sum)) {
    const int width = task.out_channels / 4, rest = static_cast<int>(quad / width);
    sum = SumAgain(task, rest / task.channels, rest % task.channels, static_cast<int>(quad % width) * 4);
  }
  reinterpret_cast<float4*>(task.out)[quad] = sum;
}

}  // namespace jsc

#endif  // JSC_CUDA_TRAINING_KERNEL_GRADIENT_PARTIALS_CUH_
