// 3xTF32 for warpgroup products (docs/design/kernels/highest.md): the operand in registers in high and low parts, and
// the three products of two slices of 8, with which partial sums begin.
#ifndef JSC_CUDA_CORE_TF32X3_CUH_
#define JSC_CUDA_CORE_TF32X3_CUH_

#include "cuda/core/wgmma.cuh"

namespace jsc {

// A thread's part of two slices of 64 x 8 values.
struct HighLowSlices {
  static constexpr int kHeld = 2;
  uint32_t high[kHeld][4], low[kHeld][4];

  // From values in `high` to both of their parts.
  __device__ __forceinline__ void Split() {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float value = __uint_as_float(high[k][i]);
        high[k][i] += 0x1000u;  // half of what is dropped
        low[k][i] = __float_as_uint(value - __uint_as_float(high[k][i] & 0xffffe000u));
      }
    }
  }

  // sums (+)= these x columns, the low products first. columns: a matrix in shared memory, whose high parts are what
  // tensor cores keep of it; low_columns: from there to its low parts.
  template <int kCount>
  __device__ __forceinline__ void Multiply(float (&sums)[kCount], uint64_t columns, uint64_t low_columns,
                                           bool add) const {
    using Products = Wgmma<float, kCount * 2>;
    BeginProducts();
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      Products::Multiply(sums, low[k], columns + k * 2, add || k > 0);
      Products::Multiply(sums, high[k], columns + low_columns + k * 2, true);
    }
#pragma unroll
    for (int k = 0; k < kHeld; ++k) Products::Multiply(sums, high[k], columns + k * 2, true);
    CommitProducts();
  }
};

// sums += partial, whose products are done.
template <int kCount>
__device__ __forceinline__ void AddPartial(float (&sums)[kCount], float (&partial)[kCount]) {
  PinSums(partial);
#pragma unroll
  for (int i = 0; i < kCount; ++i) sums[i] += partial[i];
}

}  // namespace jsc

#endif  // JSC_CUDA_CORE_TF32X3_CUH_
