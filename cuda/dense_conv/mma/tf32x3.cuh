// 3xTF32 for warp products: float32 accuracy on tensor cores. Details: docs/design/kernels/highest.md.
//
//   x * w = high(x) * high(w) + high(x) * low(w) + low(x) * high(w)
//
// high(v) is v rounded to TF32. low(v) = v - high(v) is exact, and TF32 keeps all of it but the last bit. low * low is
//   below 2^-22 of the product. After Ootomo and Yokota 2022, "Recovering single precision accuracy from Tensor Cores
//   while surpassing the FP32 theoretical peak performance".
// Accuracy: tensor cores truncate when they add, always towards zero. So a chunk's 32 products are summed from zero
//   there and added to the tile's accumulators by FADD, which rounds to nearest. What is lost all the same is given
//   back at the end (core/truncation.cuh). Values below 2^-113 keep an absolute accuracy of 2^-136: most subnormals
//   lose digits, those below 2^-137 count as zero.
// Not finite: infinity times a low part that is zero or of the other sign would be NaN. Values beyond 3.4e38 * (1 -
//   2^-12) round up to infinity. So a block whose sums are not all finite computes its part again by FFMA
//   (MultiplyAgain in mma/kernel.cuh, SumAgain in mma/small_map.cuh).
// Why when fragments are loaded: a split is 3 instructions an element, for 24 elements beside 48 mma.sync of a warp's
//   64 x 32 x 8 part. Both parts in shared memory would double what is read from there.
// Bound by: mma.sync on large maps, 8 to 11 cycles of a scheduler for each 16 x 8 x 8 product.
// Lost by count: three bfloat16 parts and six products take the same time on tensor cores and 5.5 instructions an
//   element.
#ifndef JSC_CUDA_DENSE_CONV_MMA_TF32X3_CUH_
#define JSC_CUDA_DENSE_CONV_MMA_TF32X3_CUH_

#include "cuda/core/truncation.cuh"
#include "cuda/dense_conv/mma/engine.cuh"

namespace jsc {

// From values as they lie in memory to both parts.
template <int kCount>
__device__ __forceinline__ void SplitHighLow(uint32_t (&v)[kCount], uint32_t (&low)[kCount]) {
#pragma unroll
  for (int e = 0; e < kCount; ++e) {
    const float value = __uint_as_float(v[e]);
    v[e] += 0x1000u;  // half of what is dropped
    low[e] = __float_as_uint(value - __uint_as_float(v[e] & 0xffffe000u));
  }
}

template <class U>
struct Tf32x3Engine : TensorEngine<U, float> {
  using Base = TensorEngine<U, float>;
  using Base::kColumns, Base::kRows, Base::sums;
  LowWeights low_weights;

  __device__ __forceinline__ void Multiply(const unsigned char* stage) {
    float chunk[kRows][kColumns][4] = {};
#pragma unroll
    for (int slice = 0; slice < Base::kSlices; ++slice) {
      uint32_t b[kColumns][2], low_b[kColumns][2];
      Base::LoadWeights(stage + Base::Layout::kWeightsAt, slice, b);
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        SplitHighLow(b[j], low_b[j]);
      }
      low_weights.Meet(low_b[0][0]);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        uint32_t a[4], low_a[4];
        Base::LoadPixels(stage, slice, i, a);
        SplitHighLow(a, low_a);
        MultiplyRow(chunk[i], low_a, b);
        MultiplyRow(chunk[i], a, low_b);
        MultiplyRow(chunk[i], a, b);
      }
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
#pragma unroll
        for (int v = 0; v < 4; ++v) sums[i][j][v] += chunk[i][j][v];
      }
    }
  }

  // Gives back what truncation took, when all steps are done. depth: of the reduction
  __device__ __forceinline__ void Restore(int depth) {
    RestoreSums(sums, low_weights.Share(TruncatedShare(kTruncatedByWarps, depth, Base::kSlices)));
  }

  __device__ __forceinline__ bool Finite() const {
    float all = 0.f;  // zero times a sum is zero, or NaN
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
#pragma unroll
        for (int v = 0; v < 4; ++v) all = fmaf(sums[i][j][v], 0.f, all);
      }
    }
    return all == 0.f;
  }

 private:
  static __device__ __forceinline__ void MultiplyRow(float (&d)[kColumns][4], const uint32_t (&a)[4],
                                                     const uint32_t (&b)[kColumns][2]) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) MultiplyFragment(d[j], a, b[j][0], b[j][1], 0.f);
  }
};

template <class U, typename T>
struct EngineOf {
  using Type = TensorEngine<U, T>;
};
template <class U>
struct EngineOf<U, float> {
  using Tensor = std::conditional_t<U::kTf32x3, Tf32x3Engine<U>, TensorEngine<U, float>>;
  using Type = std::conditional_t<U::kTensor, Tensor, ScalarEngine<U>>;
};

}  // namespace jsc

#endif  // JSC_CUDA_DENSE_CONV_MMA_TF32X3_CUH_
