// Room: arithmetic that kernels have in common: division by prepared divisors, and float32 by one, two and four.
// May change: anything that leaves the kernels' machine code and results as they are.
// Tests: tests/cuda/test_devices.py; on a GPU all of tests/primitive/test_kernels.py.
#ifndef JSC_CUDA_CORE_VECTORS_CUH_
#define JSC_CUDA_CORE_VECTORS_CUH_

#include <cuda_runtime.h>

#include "cuda/core/device_info.h"

namespace jsc {

// n = quotient * divisor + remainder
struct Quotient {
  int quotient, remainder;
};

__device__ inline Quotient Divide(int n, const Divider& by) {
  const int quotient = static_cast<int>((__umulhi(n, by.multiplier) + n) >> by.shift);
  return {quotient, n - quotient * static_cast<int>(by.divisor)};
}

__device__ inline float4 operator+(float4 a, float4 b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }

__device__ inline float Relu(float v) { return v < 0.f ? 0.f : v; }  // keeps NaN
__device__ inline float MaxOrNan(float a, float b) {
#if __CUDA_ARCH__ >= 800
  float most;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(a), "f"(b));
  return most;
#else
  return b > a || b != b ? b : a;
#endif
}

// Whether the greatest of sums stays so when a bias has been added: an infinite one makes NaN of some.
__device__ inline bool KeepsOrder(float bias) { return bias * 0.f == 0.f; }

}  // namespace jsc

#endif  // JSC_CUDA_CORE_VECTORS_CUH_
