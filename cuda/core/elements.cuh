// Room: the element types in memory: to float32 and back, loads and stores of neighbouring elements.
// May change: anything that leaves the kernels' machine code and results as they are.
// Tests: tests/cuda/test_devices.py; on a GPU all of tests/primitive/test_kernels.py.
#ifndef JSC_CUDA_CORE_ELEMENTS_CUH_
#define JSC_CUDA_CORE_ELEMENTS_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

namespace jsc {

__device__ inline float ToFloat(float v) { return v; }
__device__ inline float ToFloat(__half v) { return __half2float(v); }
__device__ inline float ToFloat(__nv_bfloat16 v) { return __bfloat162float(v); }

template <typename T>
__device__ inline T FromFloat(float v) {
  if constexpr (std::is_same_v<T, float>) {
    return v;
  } else if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(v);
  } else {
    return __float2bfloat16_rn(v);
  }
}

// Four consecutive elements of p as float32; p aligned to four elements.
__device__ inline float4 Load4(const float* p) { return *reinterpret_cast<const float4*>(p); }

__device__ inline float4 Load4(const __half* p) {
  const uint2 raw = *reinterpret_cast<const uint2*>(p);
  const float2 low = __half22float2(reinterpret_cast<const __half2&>(raw.x));
  const float2 high = __half22float2(reinterpret_cast<const __half2&>(raw.y));
  return {low.x, low.y, high.x, high.y};
}

__device__ inline float4 Load4(const __nv_bfloat16* p) {
  const uint2 raw = *reinterpret_cast<const uint2*>(p);
  return {__uint_as_float(raw.x << 16), __uint_as_float(raw.x & 0xffff0000u), __uint_as_float(raw.y << 16),
          __uint_as_float(raw.y & 0xffff0000u)};
}

// The first `valid` (0..4) of four consecutive elements, zeros after them; one load where `vector` says p is aligned.
template <typename T>
__device__ inline float4 LoadUpTo4(const T* p, int valid, bool vector) {
  if (vector && valid == 4) return Load4(p);
  float4 v = {0.f, 0.f, 0.f, 0.f};
  if (valid > 0) v.x = ToFloat(p[0]);
  if (valid > 1) v.y = ToFloat(p[1]);
  if (valid > 2) v.z = ToFloat(p[2]);
  if (valid > 3) v.w = ToFloat(p[3]);
  return v;
}

template <typename T>
__device__ inline void StoreUpTo4(T* p, float4 v, int valid, bool vector) {
  const T element[4] = {FromFloat<T>(v.x), FromFloat<T>(v.y), FromFloat<T>(v.z), FromFloat<T>(v.w)};
  if (vector && valid == 4) {
    if constexpr (sizeof(T) == 4) {
      *reinterpret_cast<float4*>(p) = v;
    } else {
      *reinterpret_cast<uint2*>(p) = *reinterpret_cast<const uint2*>(element);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i < valid) p[i] = element[i];
  }
}

}  // namespace jsc

#endif  // JSC_CUDA_CORE_ELEMENTS_CUH_
