// Room: what follows a kernel's sums: bias and residual, ReLU, pools of 2x2, and counts of what is stored. Engines say
//   who owns which element, and where sums come from: registers, shared memory, a cluster.
// Beside this file: loads and stores (core/elements.cuh), low parts beside results (core/low_parts.cuh), what a cluster
//   adds up (core/cluster_sums.cuh), rows of counts (core/density.cuh).
// May change: anything that leaves results bitwise as they are. Tests: on a GPU all of tests/cuda/ and
//   tests/primitive/test_kernels.py.
#ifndef JSC_CUDA_CORE_EPILOGUE_CUH_
#define JSC_CUDA_CORE_EPILOGUE_CUH_

#include "cuda/core/elements.cuh"
#include "cuda/core/low_parts.cuh"
#include "cuda/core/vectors.cuh"
#include "native/call.h"

namespace jsc {

// rest: bias, and residual where there is one. V is, here and below: float, float2 or float4.
template <typename V>
__device__ __forceinline__ V Finish(V sum, V rest, bool relu) {
  sum = sum + rest;
  return relu ? Relu(sum) : sum;
}

// Sums of 2x2 windows as results. The greatest is found before bias and ReLU, if those leave it so: an infinite bias
// makes NaN of some.
struct WindowPool {
  const Pool pool;
  const bool relu, finishes_first;

  // of a thread's bias
  __device__ __forceinline__ WindowPool(Pool pool, bool relu, float4 bias)
      : pool(pool), relu(relu), finishes_first(pool == Pool::kAverage || !IsFinite(bias)) {}
  // of all of a warp's
  __device__ __forceinline__ WindowPool(Pool pool, bool relu, float2 bias)
      : pool(pool),
        relu(relu),
        finishes_first(pool == Pool::kAverage || __any_sync(0xffffffffu, !IsFinite(bias.x) || !IsFinite(bias.y)) != 0) {
  }
  template <typename V>
  __device__ __forceinline__ V Before(V sum, V bias) const {
    return finishes_first ? Finish(sum, bias, relu) : sum;
  }
  template <typename V>
  __device__ __forceinline__ V After(V most, V bias) const {
    return finishes_first ? most : Finish(most, bias, relu);
  }
  // Of four sums, rows first.
  template <typename V>
  __device__ __forceinline__ V Of(V bias, V a, V b, V c, V d) const {
    if (finishes_first) {
      a = Finish(a, bias, relu), b = Finish(b, bias, relu), c = Finish(c, bias, relu), d = Finish(d, bias, relu);
    }
    if (pool == Pool::kAverage) return 0.25f * ((a + b) + (c + d));
    return After(MaxOrNan(MaxOrNan(a, b), MaxOrNan(c, d)), bias);
  }
};

// Of 16-bit types, where products leave a lane the pairs l % 4 of two eights of output channels: lanes swap them, and
// then have four neighbours each, of the first eight in even lanes. And back.
__device__ __forceinline__ uint2 SwapPairs(uint32_t low, uint32_t high) {
  const bool odd = threadIdx.x % 2 != 0;
  const uint32_t other = __shfl_xor_sync(0xffffffffu, odd ? low : high, 1);
  return odd ? make_uint2(other, high) : make_uint2(low, other);
}
// The first of the four, of both eights.
__device__ __forceinline__ int SwappedQuad() {
  return static_cast<int>(threadIdx.x) % 2 * 8 + static_cast<int>(threadIdx.x) % 4 / 2 * 4;
}

// Non-zeros among the first `valid` of some results, as they are stored: rounded by pairs, as for the store.
template <typename T>
__device__ __forceinline__ int CountNonzeros(float2 v, int valid = 2) {
  if constexpr (sizeof(T) == 2) v = Unpack<T>(Pack<T>(v.x, v.y));
  int nonzeros = 0;
  nonzeros += valid > 0 && v.x != 0.f;
  nonzeros += valid > 1 && v.y != 0.f;
  return nonzeros;
}
template <typename T>
__device__ __forceinline__ int CountNonzeros(float4 v, int valid = 4) {
  return CountNonzeros<T>(float2{v.x, v.y}, valid) + CountNonzeros<T>(float2{v.z, v.w}, valid - 2);
}
template <typename T, int kCount>
__device__ __forceinline__ int CountNonzeros(const float (&v)[kCount], int valid = kCount) {
  static_assert(kCount % 2 == 0);
  int nonzeros = 0;
#pragma unroll
  for (int i = 0; i < kCount; i += 2) nonzeros += CountNonzeros<T>(float2{v[i], v[i + 1]}, valid - i);
  return nonzeros;
}

// What a thread has written, for WriteCounts (core/density.cuh).
struct Tally {
  int nonzeros = 0, elements = 0;

  template <typename T, typename V>
  __device__ __forceinline__ void Add(const V& v, int valid) {
    nonzeros += CountNonzeros<T>(v, valid);
    elements += valid;
  }
  __device__ __forceinline__ int2 Row() const { return make_int2(nonzeros, elements); }
};

}  // namespace jsc

#endif  // JSC_CUDA_CORE_EPILOGUE_CUH_
