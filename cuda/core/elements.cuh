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

// Two neighbouring elements of 16 bits as a word, and back.
template <typename T>
__device__ __forceinline__ uint32_t Pack(float low, float high) {
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 pair = __floats2half2_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  }
}
template <typename T>
__device__ __forceinline__ float2 Unpack(uint32_t pair) {
  if constexpr (std::is_same_v<T, __half>) {
    return __half22float2(reinterpret_cast<const __half2&>(pair));
  } else {
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
  }
}

// Four consecutive elements of p as float32; p aligned to four elements.
__device__ inline float4 Load4(const float* p) { return *reinterpret_cast<const float4*>(p); }

template <typename T>
__device__ inline float4 Load4(const T* p) {
  const uint2 raw = *reinterpret_cast<const uint2*>(p);
  const float2 low = Unpack<T>(raw.x), high = Unpack<T>(raw.y);
  return {low.x, low.y, high.x, high.y};
}

template <int kBytes>
using Word =
    std::conditional_t<kBytes == 16, uint4,
                       std::conditional_t<kBytes == 8, uint2, std::conditional_t<kBytes == 4, uint32_t, uint16_t>>>;

// Neighbouring elements as they lie in memory.
template <typename T, int kCount>
struct Packed {
  static_assert(kCount % 2 == 0);
  alignas(kCount * sizeof(T) < 16 ? kCount * sizeof(T) : 16) T element[kCount];

  __device__ __forceinline__ explicit Packed(const float (&v)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if constexpr (sizeof(T) == 4) {
        element[i] = FromFloat<T>(v[i]);
      } else if (i % 2 == 0) {
        reinterpret_cast<uint32_t*>(element)[i / 2] = Pack<T>(v[i], v[i + 1]);
      }
    }
  }
  // In words of kBytes, to which p is aligned; or the first `valid`.
  template <int kBytes>
  __device__ __forceinline__ void Store(T* p) const {
#pragma unroll
    for (int i = 0; i < kCount * static_cast<int>(sizeof(T)) / kBytes; ++i) {
      reinterpret_cast<Word<kBytes>*>(p)[i] = reinterpret_cast<const Word<kBytes>*>(element)[i];
    }
  }
  __device__ __forceinline__ void StoreUpTo(T* p, int valid) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i < valid) p[i] = element[i];
    }
  }
};

// What Load4 loads, in one store.
template <typename T>
__device__ __forceinline__ void Store4(T* p, const float4& v) {
  if constexpr (sizeof(T) == 4) {
    *reinterpret_cast<float4*>(p) = v;
  } else {
    *reinterpret_cast<uint2*>(p) = make_uint2(Pack<T>(v.x, v.y), Pack<T>(v.z, v.w));
  }
}

// The same where `yes`, without a branch; in global memory.
template <typename T>
__device__ __forceinline__ void Store4If(T* p, const float4& v, bool yes) {
  if constexpr (sizeof(T) == 4) {
    asm volatile(
        "{\n .reg .pred yes;\n setp.ne.b32 yes, %0, 0;\n @yes st.global.v4.f32 [%1], {%2, %3, %4, %5};\n}" ::"r"(
            static_cast<int>(yes)),
        "l"(p), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
        : "memory");
  } else {
    asm volatile("{\n .reg .pred yes;\n setp.ne.b32 yes, %0, 0;\n @yes st.global.v2.b32 [%1], {%2, %3};\n}" ::"r"(
                     static_cast<int>(yes)),
                 "l"(p), "r"(Pack<T>(v.x, v.y)), "r"(Pack<T>(v.z, v.w))
                 : "memory");
  }
}
__device__ __forceinline__ void Store2If(float* p, float2 v, bool yes) {
  asm volatile("{\n .reg .pred yes;\n setp.ne.b32 yes, %0, 0;\n @yes st.global.v2.f32 [%1], {%2, %3};\n}" ::"r"(
                   static_cast<int>(yes)),
               "l"(p), "f"(v.x), "f"(v.y)
               : "memory");
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

// The same, or with kWhole all four or none.
template <bool kWhole, typename T>
__device__ __forceinline__ float4 LoadQuad(const T* p, int valid, bool vector) {
  if constexpr (kWhole) {
    return valid > 0 ? Load4(p) : make_float4(0.f, 0.f, 0.f, 0.f);
  } else {
    return LoadUpTo4(p, valid, vector);
  }
}

// And back.
template <typename T>
__device__ inline void StoreUpTo4(T* p, const float4& v, int valid, bool vector) {
  const Packed<T, 4> stored({v.x, v.y, v.z, v.w});
  if (vector && valid == 4) return stored.template Store<4 * sizeof(T)>(p);
  stored.StoreUpTo(p, valid);
}
template <bool kWhole, typename T>
__device__ __forceinline__ void StoreQuad(T* p, const float4& v, int valid, bool vector) {
  if constexpr (kWhole) {
    if (valid > 0) Store4(p, v);
  } else {
    StoreUpTo4(p, v, valid, vector);
  }
}

// kCount neighbouring elements, in words of kBytes to which p is aligned.
template <int kBytes, typename T, int kCount>
__device__ __forceinline__ void LoadRun(const T* p, float (&v)[kCount]) {
  constexpr int kInWord = kBytes / static_cast<int>(sizeof(T));
#pragma unroll
  for (int i = 0; i < kCount; i += kInWord) {
    const auto word = *reinterpret_cast<const Word<kBytes>*>(p + i);
#pragma unroll
    for (int e = 0; e < kInWord; ++e) {
      if constexpr (sizeof(T) == 4 || kInWord == 1) {
        v[i + e] = ToFloat(reinterpret_cast<const T*>(&word)[e]);
      } else if (e % 2 == 0) {
        const float2 pair = Unpack<T>(reinterpret_cast<const uint32_t*>(&word)[e / 2]);
        v[i + e] = pair.x, v[i + e + 1] = pair.y;
      }
    }
  }
}
}  // namespace jsc

#endif  // JSC_CUDA_CORE_ELEMENTS_CUH_
