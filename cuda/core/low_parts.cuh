// Low parts of float32 values, for 3xTF32 products (docs/design/kernels/highest.md).
//
// In a chain at HIGHEST a kernel writes the low parts of its results beside them. That costs it three instructions and
// a store an element. It spares every tile of the next kernel a load, a store and three instructions for every tap.
#ifndef JSC_CUDA_CORE_LOW_PARTS_CUH_
#define JSC_CUDA_CORE_LOW_PARTS_CUH_

#include <cuda_runtime.h>

namespace jsc {

// What tensor cores keep of v.
__device__ __forceinline__ float CutOff(float v) { return __uint_as_float(__float_as_uint(v) & 0xffffe000u); }

// What tensor cores drop of v, with half of what they drop of that. Of what is not finite nothing that says so: the
// high part does.
__device__ __forceinline__ float LowPart(float v) {
  const float rest = v - CutOff(v);
  return __uint_as_float(__float_as_uint(rest) + 0x1000u);
}

__device__ __forceinline__ float4 LowPart(float4 v) { return {LowPart(v.x), LowPart(v.y), LowPart(v.z), LowPart(v.w)}; }

}  // namespace jsc

#endif  // JSC_CUDA_CORE_LOW_PARTS_CUH_
