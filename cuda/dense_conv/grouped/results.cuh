// The epilogue of the engine grouped: bias, residual and ReLU.
#ifndef JSC_CUDA_DENSE_CONV_GROUPED_RESULTS_CUH_
#define JSC_CUDA_DENSE_CONV_GROUPED_RESULTS_CUH_

#include "cuda/core/epilogue.cuh"
#include "cuda/dense_conv/grouped/copies.cuh"
#include "cuda/dense_conv/grouped/engine.cuh"

namespace jsc {

// One sum again by FFMA (SumAgain has four at a time), where that of 3xTF32 is not finite.
template <typename T>
__device__ __noinline__ float GroupedSumAgain(const SmallMapTask<T>& small_map, int stack, int group, int pixel,
                                              int group_out_channel) {
  const float4 sum = SumAgain(small_map, {0, 0, group, stack, 0, 0, 0}, pixel, group_out_channel & ~3);
  return group_out_channel % 4 == 0   ? sum.x
         : group_out_channel % 4 == 1 ? sum.y
         : group_out_channel % 4 == 2 ? sum.z
                                      : sum.w;
}

// From a warp's sums to results. Bias is asked for when the writer is made.
template <class U, typename T>
struct GroupedWriter {
  const GroupedTask<T>& group;
  // What a lane's results of a pixel are aligned to.
  static constexpr int kWordBytes = sizeof(T) == 2 ? 4 : U::kRun % 4 == 0 ? 16 : 8;
  int stack, number, group_out_channel;  // number: of the group; output channel: the lane's first in it
  T* out;                                // of the stack, at the lane's first output channel
  float least;
  float bias[U::kRuns][U::kRun] = {};

  __device__ __forceinline__ GroupedWriter(const GroupedTask<T>& group, int stack, int number, int first)
      : group(group), stack(stack), number(number) {
    const MmaTask<T>& task = group.small_map.mma;
    group_out_channel = first + static_cast<int>(threadIdx.x % 4) * U::kRun;
    const int out_channel = number * task.group_out_channels + group_out_channel;
    out = task.out + static_cast<int64_t>(stack) * task.pixels * task.out_channels + out_channel;
    least = task.relu ? 0.f : __int_as_float(static_cast<int>(0xff800000u));
    if (!task.bias) return;
    const T* from = task.bias + static_cast<int64_t>(stack) * task.out_channels + out_channel;
#pragma unroll
    for (int run = 0; run < U::kRuns; ++run) LoadRun<kWordBytes>(from + run * 8, bias[run]);
  }

  // places: of the warp's pixels. kPlain: there is no residual, and counts are not asked for. Returns how many results
  // are not zero, and how many there are.
  template <bool kPlain>
  __device__ __forceinline__ int2 Write(const GroupedEngine<U, T>& engine, const PixelPlace* places) const {
    const MmaTask<T>& task = group.small_map.mma;
    int2 written = make_int2(0, 0);
#pragma unroll
    for (int i = 0; i < U::kRows; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int pixel = places[i * 16 + half * 8 + threadIdx.x % kWarp / 4].number;
        if (pixel < 0) continue;
        T* to = out + static_cast<int64_t>(pixel) * task.out_channels;
#pragma unroll
        for (int run = 0; run < U::kRuns; ++run) {
          float v[U::kRun];
          engine.Run(i, half, run, v);
          if constexpr (U::kTf32x3) Recompute(pixel, v);
#pragma unroll
          for (int k = 0; k < U::kRun; ++k) v[k] += bias[run][k];
          if constexpr (!kPlain) {
            if (task.residual) {
              float residual[U::kRun];
              LoadRun<kWordBytes>(task.residual + (to - task.out) + run * 8, residual);
#pragma unroll
              for (int k = 0; k < U::kRun; ++k) v[k] += residual[k];
            }
          }
#pragma unroll
          for (int k = 0; k < U::kRun; ++k) {
            v[k] = AtLeast(v[k], least);
          }
          if constexpr (!kPlain) written.x += CountNonzeros<T>(v);
          Packed<T, U::kRun>(v).template Store<kWordBytes>(to + run * 8);
        }
        written.y += U::kRuns * U::kRun;
      }
    }
    return written;
  }

  __device__ __forceinline__ void Recompute(int pixel, float (&v)[U::kRun]) const {
    if (IsFinite(v)) return;
#pragma unroll
    for (int k = 0; k < U::kRun; ++k)
      v[k] = GroupedSumAgain(group.small_map, stack, number, pixel, group_out_channel + k);
  }
};

}  // namespace jsc

#endif  // JSC_CUDA_DENSE_CONV_GROUPED_RESULTS_CUH_
