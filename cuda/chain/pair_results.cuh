// From sums to the middle of a pair (chain/pair.cuh). At HIGHEST also what of either result is not finite, again by
// FFMA.
#ifndef JSC_CUDA_CHAIN_PAIR_RESULTS_CUH_
#define JSC_CUDA_CHAIN_PAIR_RESULTS_CUH_

#include "cuda/chain/pair_products.cuh"
#include "cuda/dense_conv/wgmma/recompute.cuh"

namespace jsc {

#if __CUDA_ARCH__ >= 900
// Adds the sums of both warpgroups: each keeps the rows of 8 pixels that are its own and gives the other's away.
template <class U, int kGroup>
__device__ __forceinline__ void AddHalves(const float (&sums)[U::kPixels / 2], float4* swap, float4 (&own)[U::kFirst]) {
  constexpr int kFrom = kGroup == 0 ? 0 : U::kFirst, kEnd = kGroup == 0 ? U::kFirst : U::kRows;
  float4* mine = swap + threadIdx.x % 128;
#pragma unroll
  for (int row = 0; row < U::kRows; ++row) {
    if (row >= kFrom && row < kEnd) continue;
    mine[row * 128] = make_float4(sums[row * 4], sums[row * 4 + 1], sums[row * 4 + 2], sums[row * 4 + 3]);
  }
  asm volatile("bar.sync 2, %0;" ::"n"(U::kConsumers) : "memory");
#pragma unroll
  for (int row = kFrom; row < kEnd; ++row) {
    own[row - kFrom] =
        mine[row * 128] + make_float4(sums[row * 4], sums[row * 4 + 1], sums[row * 4 + 2], sums[row * 4 + 3]);
  }
  asm volatile("bar.sync 2, %0;" ::"n"(U::kConsumers) : "memory");  // what follows is written in the same place
}

// v with half of what TF32 drops added, which the tensor cores then drop; NaN stays.
__device__ __forceinline__ float RoundUp(float v) {
  asm("{\n .reg .pred nan;\n setp.nan.f32 nan, %0, %0;\n .reg .b32 bits;\n mov.b32 bits, %0;\n"
      " @!nan add.s32 bits, bits, 0x1000;\n mov.b32 %0, bits;\n}"
      : "+f"(v));
  return v;
}

__device__ __forceinline__ void StoreTwo(uint32_t to, float first, float second) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(first), "f"(second) : "memory");
}

// A thread's part of the middle, which it completes, writes and stages for the next product. Of its warpgroup's rows it
// has two channels of two pixels in float32, as a product leaves them, else four channels of a pixel.
template <class U, typename T>
struct Middle {
  static constexpr bool kTransposed = sizeof(T) < 4;
  const PairTask<T>& task;
  int rows, pixel, channel, own_pixels;  // rows of the warpgroup; the thread's first pixel, and channel of the block's
  int64_t first;                         // its element of the middle
  float least;
  float4 bias, rest[U::kFirst];

  __device__ __forceinline__ Middle(const PairTask<T>& task, int rank, int group, int first_pixel, int own_pixels)
      : task(task), own_pixels(own_pixels) {
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp % 4;
    rows = group == 0 ? U::kFirst : U::kRows - U::kFirst;
    pixel = group * U::kFirst * kPatchWidth + lane % 4 * 2;
    if constexpr (kTransposed) {
      pixel += lane / 4 % 2;
      channel = warp * 16 + lane / 8 % 2 * 8 + lane / 16 * 4;
    } else {
      using Weights = StepWeights<U, float>;
      channel = Weights::Box() * 32 + Weights::Slot() * 4 + Weights::Half() * 2;
    }
    first = static_cast<int64_t>(first_pixel + pixel) * task.channels + rank * U::kOutChannels + channel;
    least = task.relu ? 0.f : -INFINITY;
    bias = {0.f, 0.f, 0.f, 0.f};
    if (task.bias) {
      if constexpr (kTransposed) {
        bias = Load4(task.bias + rank * U::kOutChannels + channel);
      } else {
        const float2 two = *reinterpret_cast<const float2*>(task.bias + rank * U::kOutChannels + channel);
        bias = {two.x, two.x, two.y, two.y};
      }
    }
  }
  // Two channels of a pixel: rounded, or whole with their low parts beside the middle.
  static __device__ __forceinline__ void Stage(uint32_t to, float first, float second) {
    if constexpr (!U::kTf32x3) first = RoundUp(first), second = RoundUp(second);
    StoreTwo(to, first, second);
    if constexpr (U::kTf32x3) StoreTwo(to + U::kBlocks * U::kStageBytes, LowPart(first), LowPart(second));
  }
  __device__ __forceinline__ int RowStep() const { return kPatchWidth * task.channels; }
  __device__ __forceinline__ bool Has(int row, int e) const { return pixel + e + row * kPatchWidth < own_pixels; }
  __device__ __forceinline__ void LoadRest() {
#pragma unroll
    for (int i = 0; i < U::kFirst; ++i) {
      rest[i] = bias;
      if (task.residual == nullptr) continue;
      const T* from = task.residual + first + i * RowStep();
      if constexpr (kTransposed) {
        if (Has(i, 0)) rest[i] = bias + Load4(from);
      } else {
        float2 low = {0.f, 0.f}, high = low;
        if (Has(i, 0)) low = *reinterpret_cast<const float2*>(from);
        if (Has(i, 1)) high = *reinterpret_cast<const float2*>(from + task.channels);
        rest[i] = bias + float4{low.x, high.x, low.y, high.y};
      }
    }
  }
  // sums: of output channels h and pixels e of a row, at 2 * h + e
  __device__ __forceinline__ void Write(const float4 (&sums)[U::kFirst], uint32_t middle) const {
    const int byte = channel % U::kStepChannels * static_cast<int>(sizeof(T));  // of a row of the swizzle
    const uint32_t column = middle + channel / U::kStepChannels * U::kStageBytes + pixel * kRowBytes + byte % 16;
    const uint32_t to = column + ((byte / 16 ^ pixel % 8) << 4);
    const uint32_t next = column + kRowBytes + ((byte / 16 ^ (pixel % 8 + 1)) << 4);  // of the next pixel
    T *out = task.middle + first, *low_out = task.low_middle + first;
    const bool has_low = U::kTf32x3 && task.low_middle != nullptr;
#pragma unroll
    for (int i = 0; i < U::kFirst; ++i) {
      if (i >= rows) break;
      constexpr int kStep = kPatchWidth * kRowBytes;
      if constexpr (kTransposed) {
        const float4 v = AtLeast(TransposeQuad<T>(sums[i]) + rest[i], least);
        asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to + i * kStep), "r"(Pack<T>(v.x, v.y)),
                     "r"(Pack<T>(v.z, v.w))
                     : "memory");
        Store4If(out + i * RowStep(), v, Has(i, 0));
      } else {
        const float4 v = AtLeast(sums[i] + rest[i], least);
        Stage(to + i * kStep, v.x, v.z);
        Stage(next + i * kStep, v.y, v.w);
        Store2If(out + i * RowStep(), float2{v.x, v.z}, Has(i, 0));
        Store2If(out + i * RowStep() + task.channels, float2{v.y, v.w}, Has(i, 1));
        if constexpr (U::kTf32x3) {
          const float4 low = LowPart(v);
          Store2If(low_out + i * RowStep(), float2{low.x, low.z}, has_low && Has(i, 0));
          Store2If(low_out + i * RowStep() + task.channels, float2{low.y, low.w}, has_low && Has(i, 1));
        }
      }
    }
  }
};

// The sum of x[i] * kernel[i * stride] for i below count, by FFMA. It stands in where 3xTF32 met values that are not
// finite.
__device__ __noinline__ float SumInOrder(const float* x, const float* kernel, int count, int stride) {
  float sum = 0.f;
#pragma unroll 1
  for (int i = 0; i < count; ++i) sum = fmaf(x[i], kernel[static_cast<int64_t>(i) * stride], sum);
  return sum;
}

// Computes again what is not finite of a row's two output channels h of two pixels e, at 2 * h + e.
template <typename Again>
__device__ __forceinline__ void CompleteRow(float4& v, const Again& again) {
  if (IsFinite(v)) return;
  v = {again(0, 0), again(0, 1), again(1, 0), again(1, 1)};
}

template <class U>
__device__ __forceinline__ void CompleteFirst(const Middle<U, float>& results, int first_pixel, int rank,
                                              float4 (&own)[U::kFirst]) {
  const PairTask<float>& task = results.task;
#pragma unroll
  for (int i = 0; i < U::kFirst; ++i) {
    CompleteRow(own[i], [&](int h, int e) {
      if (!results.Has(i, e)) return 0.f;
      const int64_t pixel = first_pixel + results.pixel + i * kPatchWidth + e;
      return SumInOrder(task.x + pixel * task.in_channels, task.kernel + rank * U::kOutChannels + results.channel + h,
                        task.in_channels, task.channels);
    });
  }
}

template <class U>
__device__ __forceinline__ void CompleteNext(const Middle<U, float>& results, int first_pixel, int rank, int tile,
                                             float (&sums)[U::kPixels / 2]) {
  if (IsFinite(sums)) return;
  const PairTask<float>& task = results.task;
  const int column = results.pixel % kPatchWidth;
#pragma unroll
  for (int row = 0; row < U::kRows; ++row) {
    float4 v = {sums[row * 4], sums[row * 4 + 1], sums[row * 4 + 2], sums[row * 4 + 3]};
    CompleteRow(v, [&](int h, int e) {
      const int pixel = row * kPatchWidth + column + e;
      if (pixel >= results.own_pixels) return 0.f;
      const int64_t channel = rank * U::kOutChannels;
      return SumInOrder(task.middle + (first_pixel + pixel) * static_cast<int64_t>(task.channels) + channel,
                        task.next_kernel + channel * task.out_channels + tile * U::kOutChannels + results.channel + h,
                        U::kOutChannels, task.out_channels);
    });
    sums[row * 4] = v.x, sums[row * 4 + 1] = v.y, sums[row * 4 + 2] = v.z, sums[row * 4 + 3] = v.w;
  }
}
#endif

}  // namespace jsc

#endif  // JSC_CUDA_CHAIN_PAIR_RESULTS_CUH_
