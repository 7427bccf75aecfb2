// What truncation takes from sums of 3xTF32 products, and how it is given back (docs/design/kernels/highest.md).
//
// Tensor cores truncate when they add, always towards zero. The products of a step are summed from zero there, and
// their sum is too small by a share of itself: nearly the same share on average, whatever the values are. So the sums
// of a tile are made larger by that share, once, when all steps are done. Sums of operands that TF32 holds whole are
// exact if float32 holds them: integers up to 2,048, values of 16 bits. Those must stay exact. So sums stay as they are
// where a warp has met no weight with a low part. Blocks of a DenseNet restore all sums: they normalise what they read,
// so nothing is exact there.
#ifndef JSC_CUDA_CORE_TRUNCATION_CUH_
#define JSC_CUDA_CORE_TRUNCATION_CUH_

#include <cuda_runtime.h>

#include <cstdint>

namespace jsc {

// The share that each product of 8 in a step takes, of an H200 where half of x is zeros. Without zeros they are up to a
// tenth larger, with 90 % of them a good third smaller. `python -m benchmarks accuracy` has what is left: its bias of
// each family of kernels.
constexpr float kTruncatedByWarps = 0.42e-7f;       // mma.sync
constexpr float kTruncatedByWarpgroups = 0.29e-7f;  // wgmma

// What sums lose whose step has so many of `depth` products. most: products of 8 in a step
__device__ __forceinline__ float TruncatedShare(float of_eight, int depth, int most) {
  return of_eight * static_cast<float>(min((depth + 7) / 8, most));
}

// A sum with what truncation took of it. share: see TruncatedShare
__device__ __forceinline__ float Restored(float sum, float share) { return fmaf(sum, share, sum); }
__device__ __forceinline__ float4 Restored(float4 sum, float share) {
  return {Restored(sum.x, share), Restored(sum.y, share), Restored(sum.z, share), Restored(sum.w, share)};
}

template <int kCount>
__device__ __forceinline__ void RestoreSums(float (&sums)[kCount], float share) {
#pragma unroll
  for (float& sum : sums) sum = Restored(sum, share);
}
template <int kRows, int kColumns, int kCount>
__device__ __forceinline__ void RestoreSums(float (&sums)[kRows][kColumns][kCount], float share) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) RestoreSums(sums[i][j], share);
  }
}

// Whether some of a warp's weights have a low part.
class LowWeights {
 public:
  __device__ __forceinline__ void Meet(uint32_t low) { met_ |= low; }
  // What to give back of sums of which tensor cores took a share. All threads of a warp call it.
  __device__ __forceinline__ float Share(float truncated) const {
    return __any_sync(0xffffffffu, met_ != 0) ? truncated : 0.f;
  }

 private:
  uint32_t met_ = 0;
};

}  // namespace jsc

#endif  // JSC_CUDA_CORE_TRUNCATION_CUH_
