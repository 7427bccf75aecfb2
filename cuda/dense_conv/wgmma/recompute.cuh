// 3xTF32 sums (wgmma/tf32x3.cuh) that are not finite, computed again by FFMA from memory: result by result, before the
// cluster reduction. It runs where there are infinities, NaN, or values that round up to infinity.
#ifndef JSC_CUDA_DENSE_CONV_WGMMA_RECOMPUTE_CUH_
#define JSC_CUDA_DENSE_CONV_WGMMA_RECOMPUTE_CUH_

#include "cuda/core/elements.cuh"
#include "cuda/dense_conv/wgmma/engine.cuh"

namespace jsc {

// The sums of four output channels of a result of the stack, over the block's steps; pixels beyond x count as zeros.
__device__ inline float4 SumAgain(const Tf32x3Task& task, const WgmmaPlace& at, int image, int y, int x,
                                  int out_channel) {
  constexpr int kStepChannels = kRowBytes / 4;
  const int stack = static_cast<int>(blockIdx.z), group = Divide(at.out_channel, task.by_group_out_channels).quotient;
  const float* pixels =
      task.x + group * task.group_channels +
      static_cast<int64_t>(stack * task.images_per_stack + image) * task.in_height * task.in_width * task.channels;
  float4 sum = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 1
  for (int step = at.first_step; step < at.end_step; ++step) {
    const Quotient by = Divide(step, task.by_taps), tap = Divide(by.remainder, task.by_kernel_width);
    const int channel = by.quotient * kStepChannels, end = min(channel + kStepChannels, task.group_channels);
    const int row = y * task.stride[0] - task.pad_low[0] + tap.quotient * task.dilation[0];
    const int column = x * task.stride[1] - task.pad_low[1] + tap.remainder * task.dilation[1];
    const bool inside = row >= 0 && row < task.in_height && column >= 0 && column < task.in_width;
    const float* from = pixels + (static_cast<int64_t>(row) * task.in_width + column) * task.channels;
    const float* weight =
        task.kernel + out_channel +
        (static_cast<int64_t>(stack * task.taps + by.remainder) * task.group_channels + channel) * task.out_channels;
#pragma unroll 1
    for (int c = channel; c < end; ++c, weight += task.out_channels) {
      const float value = inside ? from[c] : 0.f;
      sum = MultiplyAdd(value, Load4(weight), sum);
    }
  }
  return sum;
}

// Computes again what of the tile is not finite. Not inlined: it runs where there are infinities or NaN.
template <class U>
__device__ __noinline__ void ComputeAgain(const Tf32x3Task& task, float* tile) {
  if (task.gate.in_chain) WaitForKernelBefore();  // which wrote x
  const WgmmaPlace at = FindWgmmaPlace<U>(task, blockIdx.x);
  constexpr int kQuads = U::kOutChannels / 4;
  const int tile_out_channel = static_cast<int>(threadIdx.x) % kQuads * 4;
  if (at.out_channel + tile_out_channel >= task.out_channels) return;
#pragma unroll 1
  for (int pixel = static_cast<int>(threadIdx.x) / kQuads; pixel < U::kPixels; pixel += U::kConsumers / kQuads) {
    auto* sums = reinterpret_cast<float4*>(tile + pixel * U::kSumStride + tile_out_channel);
    if (IsFinite(*sums)) continue;
    int image = at.image, y = at.y + pixel / kPatchWidth, x = at.x + pixel % kPatchWidth;
    if (!task.patch) {
      if (at.pixel + pixel >= task.pixels) break;
      const Quotient row = Divide(at.pixel + pixel, task.by_width), place = Divide(row.quotient, task.by_height);
      image = place.quotient, y = place.remainder, x = row.remainder;
    }
    *sums = SumAgain(task, at, image, y, x, at.out_channel + tile_out_channel);
  }
}

#if __CUDA_ARCH__ >= 900
// Whether any thread of the first consumer group, which has the block's sums, has some that are not finite; and all
// stages are read (those of the second consumer group were when its sums came).
template <class U>
__device__ __forceinline__ bool AnyNotFinite(const float (&sums)[U::kPixels / 2]) {
  int any;
  asm volatile(
      "{\n .reg .pred mine, any;\n setp.ne.b32 mine, %1, 0;\n bar.red.or.pred any, 2, %2, mine;\n"
      " selp.b32 %0, 1, 0, any;\n}"
      : "=r"(any)
      : "r"(static_cast<int>(!IsFinite(sums))), "n"(U::kConsumers)
      : "memory");
  return any != 0;
}

// Stores a block's sums where its stages were, those that are not finite computed again.
template <class U>
__device__ __forceinline__ void StoreTf32x3(const Tf32x3Task& task, const float (&sums)[U::kPixels / 2], float* tile) {
  const bool again = AnyNotFinite<U>(sums);
  StepWeights<U, float>::Store(sums, tile);
  if (!again) return;
  asm volatile("bar.sync 2, %0;" ::"n"(U::kConsumers) : "memory");
  ComputeAgain<U>(task, tile);
}

// The same where sums stay in registers. Sums in DSMEM slots that take the place of the stages may not come before
// this.
template <class U>
__device__ __forceinline__ void RecomputeNonFinite(const Tf32x3Task& task, float (&sums)[U::kPixels / 2], float* tile) {
  if (!AnyNotFinite<U>(sums)) return;
  StepWeights<U, float>::Store(sums, tile);
  asm volatile("bar.sync 2, %0;" ::"n"(U::kConsumers) : "memory");
  ComputeAgain<U>(task, tile);
  asm volatile("bar.sync 2, %0;" ::"n"(U::kConsumers) : "memory");
  StepWeights<U, float>::LoadBack(sums, tile);
  asm volatile("fence.acq_rel.cluster;" ::: "memory");  // the arrival behind it is relaxed, and lets sums come here
}
#endif

}  // namespace jsc

#endif  // JSC_CUDA_DENSE_CONV_WGMMA_RECOMPUTE_CUH_
