// The definition, one thread per output: what serves where a block's tile has no use or no room.
//
// Depthwise and nearly depthwise convolution: each list would serve fewer than 4 output channels, so compressing costs
// more than it saves; threads along the channels read x and kernel coalesced and skip zeros by a test, or do not.
// Pooling windows and dilated kernels whose patch of a single output exceeds shared memory: right, and slow. Bound by
// L1 and latency.
#include <algorithm>

#include "cuda/ffi/kernels.h"
#include "cuda/sparse/ecr/window_sums.cuh"

namespace jsc {
namespace {

constexpr int kThreads = 128;

// The convolution's sum for output channel k of one image at (conv_y, conv_x).
template <typename T, bool kSkipZeros>
__device__ __forceinline__ float Sum(const ConvTask<T>& task, const T* image, const T* kernel, int k, int conv_y,
                                     int conv_x) {
  const int group = Divide(k, task.by_group_tiles).quotient;  // divides by the output channels of a group here
  float sum = 0.f;
  for (int ky = 0; ky < task.kernel_height; ++ky) {
    const int64_t y =
        static_cast<int64_t>(conv_y) * task.stride[0] - task.pad_low[0] + static_cast<int64_t>(ky) * task.dilation[0];
    if (y < 0 || y >= task.height) continue;
    for (int kx = 0; kx < task.kernel_width; ++kx) {
      const int64_t x =
          static_cast<int64_t>(conv_x) * task.stride[1] - task.pad_low[1] + static_cast<int64_t>(kx) * task.dilation[1];
      if (x < 0 || x >= task.width) continue;
      const T* pixel = image + (y * task.width + x) * task.channels + group * task.group_channels;
      const T* row = kernel + (ky * task.kernel_width + kx) * task.group_channels * task.out_channels + k;
#pragma unroll 1
      for (int c = 0; c < task.group_channels; ++c) {
        const float value = ToFloat(pixel[c]);
        if (!kSkipZeros || value != 0.f) sum = fmaf(value, ToFloat(row[c * task.out_channels]), sum);
      }
    }
  }
  return sum;
}

// Computes output number `index` of one image.
template <typename T, bool kSkipZeros>
__device__ __forceinline__ void WriteOutput(const ConvTask<T>& task, int64_t n, int64_t stack, int index,
                                            int2* written) {
  const Quotient pixel = Divide(index, task.by_out_channels), row = Divide(pixel.quotient, task.by_out_width);
  const int k = pixel.remainder, oy = row.quotient, ox = row.remainder;
  const int64_t at = n * task.out_size[0] * task.out_size[1] * task.out_channels + index;
  const T* image = task.x + n * task.height * static_cast<int64_t>(task.width) * task.channels;
  const T* kernel =
      task.kernel + stack * task.kernel_height * task.kernel_width * task.group_channels * task.out_channels;
  float extra = task.bias ? ToFloat(task.bias[stack * task.out_channels + k]) : 0.f;
  if (task.residual) extra += ToFloat(task.residual[at]);
  const int first[2] = {oy * task.window_stride[0] - task.window_pad[0],
                        ox * task.window_stride[1] - task.window_pad[1]};
  auto conv = [&](int y, int x) {
    const float sum = Sum<T, kSkipZeros>(task, image, kernel, k, y, x);
    return make_float4(Finish(sum, extra, task.relu), 0.f, 0.f, 0.f);
  };
  const float4 result = PoolWindow(task, first, conv);  // without a pool, the maximum over one result
  const T stored = FromFloat<T>(result.x);
  task.out[at] = stored;
  if (task.counts.rows) *written = make_int2(written->x + (ToFloat(stored) != 0.f), written->y + 1);
}

template <typename T, bool kSkipZeros>
__global__ void __launch_bounds__(kThreads) PerOutputKernel(const __grid_constant__ ConvTask<T> task, int64_t stacks) {
  __shared__ int2 scratch[kThreads / kWarp];
  if (!PassesGate(task.gate)) return;
  int2 written = {0, 0};
  const unsigned index = blockIdx.x * kThreads + threadIdx.x;
  const bool inside = index < static_cast<unsigned>(task.out_size[0] * task.out_size[1] * task.out_channels);
  for (int64_t stack = blockIdx.z; stack < stacks && inside; stack += gridDim.z) {
    for (int64_t n = blockIdx.y; n < task.images_per_stack; n += gridDim.y) {
      WriteOutput<T, kSkipZeros>(task, stack * task.images_per_stack + n, stack, index, &written);
    }
  }
  WriteCounts(task.counts, GridBlock(), written, scratch);
  LeaveGate(task.gate);
}

template <typename T, bool kSkipZeros>
Error Launch(const DeviceCall& call, cudaStream_t stream) {
  const ConvArgs& a = call.args;
  const int64_t outputs = a.out_size[0] * a.out_size[1] * a.out_channels;  // of an image: fewer than 2^31
  if (outputs * a.images == 0) return Error::Success();
  ConvTask<T> task = MakeConvTask<T>(call, EcrPlan{}, nullptr);
  task.by_group_tiles = Divider(task.group_out_channels);
  constexpr int64_t kMaxGrid = 65535;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>((outputs + kThreads - 1) / kThreads),
                        static_cast<unsigned>(std::min(task.images_per_stack, kMaxGrid)),
                        static_cast<unsigned>(std::min(a.stacks, kMaxGrid)));
  config.blockDim = dim3(kThreads);
  task.counts = CountsOf(call.counts, static_cast<int64_t>(config.gridDim.x) * config.gridDim.y * config.gridDim.z);
  config.stream = stream;
  LaunchAttributes attributes(0, call.gate);
  config.attrs = attributes.list;
  config.numAttrs = attributes.count;
  return CheckCuda(cudaLaunchKernelEx(&config, PerOutputKernel<T, kSkipZeros>, task, a.stacks), "PerOutputKernel");
}

}  // namespace

Error PerOutput(const DeviceCall& call, cudaStream_t stream, bool skip_zeros) {
  return DispatchDtype(call.dtype, [&](auto element) {
    using T = decltype(element);
    return skip_zeros ? Launch<T, true>(call, stream) : Launch<T, false>(call, stream);
  });
}

}  // namespace jsc
