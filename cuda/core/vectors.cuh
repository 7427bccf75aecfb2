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

__device__ __forceinline__ float2 operator+(float2 a, float2 b) { return {a.x + b.x, a.y + b.y}; }
__device__ __forceinline__ float4 operator+(float4 a, float4 b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }
__device__ __forceinline__ float4 operator*(float a, float4 b) { return {a * b.x, a * b.y, a * b.z, a * b.w}; }

__device__ inline float4 MultiplyAdd(float v, const float4& w, const float4& sum) {
  return {fmaf(v, w.x, sum.x), fmaf(v, w.y, sum.y), fmaf(v, w.z, sum.z), fmaf(v, w.w, sum.w)};
}

// Keeps NaN. By reference: with copies of float4 the kernels of sparse/matvec/rows.cu spill more.
__device__ inline float Relu(float v) { return v < 0.f ? 0.f : v; }
__device__ __forceinline__ float2 Relu(const float2& v) { return {Relu(v.x), Relu(v.y)}; }
__device__ __forceinline__ float4 Relu(const float4& v) { return {Relu(v.x), Relu(v.y), Relu(v.z), Relu(v.w)}; }

__device__ inline float MaxOrNan(float a, float b) {
#if __CUDA_ARCH__ >= 800
  float most;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(a), "f"(b));
  return most;
#else
  return b > a || b != b ? b : a;
#endif
}
__device__ inline float4 MaxOrNan(float4 a, float4 b) {
  return {MaxOrNan(a.x, b.x), MaxOrNan(a.y, b.y), MaxOrNan(a.z, b.z), MaxOrNan(a.w, b.w)};
}

// What is below `least` becomes that: a ReLU with 0, which keeps NaN, and nothing with -infinity.
__device__ inline float AtLeast(float v, float least) { return MaxOrNan(v, least); }
__device__ inline float4 AtLeast(const float4& v, float least) { return MaxOrNan(v, {least, least, least, least}); }

// Neither infinite nor NaN: zero times a number is zero, or NaN.
__device__ inline bool IsFinite(float v) { return v * 0.f == 0.f; }
__device__ inline bool IsFinite(const float2& v) { return fmaf(v.x, 0.f, v.y * 0.f) == 0.f; }
__device__ inline bool IsFinite(const float4& v) {
  return fmaf(v.x, 0.f, fmaf(v.y, 0.f, fmaf(v.z, 0.f, v.w * 0.f))) == 0.f;
}
template <int kCount>
__device__ __forceinline__ bool IsFinite(const float (&v)[kCount]) {
  float all = 0.f;
#pragma unroll
  for (int i = 0; i < kCount; ++i) all = fmaf(v[i], 0.f, all);
  return all == 0.f;
}

// Sums of several warps or blocks, `step` apart, added in their order: bitwise repeatable.
template <int kCount, typename V>
__device__ __forceinline__ V AddParts(const V* first, int step) {
  V sum = *first;
#pragma unroll
  for (int i = 1; i < kCount; ++i) sum = sum + first[i * step];
  return sum;
}
// The same from zero on, which makes 0 of -0.
__device__ __forceinline__ float4 AddParts(const float4* first, int step, int count) {
  float4 sum = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 4
  for (int i = 0; i < count; ++i) sum = sum + first[i * step];
  return sum;
}

}  // namespace jsc

#endif  // JSC_CUDA_CORE_VECTORS_CUH_
