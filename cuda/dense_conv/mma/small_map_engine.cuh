// The products of a warp's steps in the kernel of small maps (dense_conv/mma/small_map.cuh), from a stage of its ring
// to sums.
//
// Filters are the rows of the products and pixels their columns, so that a tile may be 8 pixels wide. A stage has the
// pixels [kPixels, kDepth] and the filters [kDepth, kFilters] of a step, as DeepTuning lays them out.
#ifndef JSC_CUDA_DENSE_CONV_MMA_SMALL_MAP_ENGINE_CUH_
#define JSC_CUDA_DENSE_CONV_MMA_SMALL_MAP_ENGINE_CUH_

#include "cuda/dense_conv/mma/split.cuh"
#include "cuda/dense_conv/plan/mma_tuning.h"

namespace jsc {

// A warp's sums of its steps: sums[rows of 16 filters][columns of 8 pixels], as mma.sync has them.
template <class U, typename T>
struct DeepEngine {
  static constexpr int kRows = U::kFilters / 16, kColumns = U::kPixels / 8;
  static constexpr int kSlices = U::kDepth * static_cast<int>(sizeof(T)) / 32;  // of a step, each 32 bytes deep
  static constexpr int kSlice = 32 / static_cast<int>(sizeof(T));
  float sums[kRows][kColumns][4] = {};

  // A lane's row and column in the fragments of mma.sync.
  static __device__ __forceinline__ int Row() { return static_cast<int>(threadIdx.x % kWarp / 4); }
  static __device__ __forceinline__ int Column() { return static_cast<int>(threadIdx.x % 4); }

  static __device__ __forceinline__ uint32_t Word(const unsigned char* p) {
    return *reinterpret_cast<const uint32_t*>(p);
  }
  static __device__ __forceinline__ void LoadFilters(const unsigned char* stage, int slice, int row, uint32_t (&a)[4]) {
    if constexpr (sizeof(T) == 4) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        a[e] = Word(stage + U::Filter(slice * kSlice + Column() + e / 2 * 4, row * 16 + Row() + e % 2 * 8));
      }
    } else {
      const unsigned lane = threadIdx.x % kWarp;
      const int k = static_cast<int>(lane / 16 * 8 + lane % 8), filter = static_cast<int>(lane / 8 % 2) * 8;
      LoadMatricesTransposed(a, stage + U::Filter(slice * kSlice + k, row * 16 + filter));
    }
  }
  static __device__ __forceinline__ void LoadPixels(const unsigned char* stage, int slice, int column,
                                                    uint32_t (&b)[2]) {
    constexpr int kWord = 4 / static_cast<int>(sizeof(T));  // elements
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      b[half] = Word(stage + U::Pixel(column * 8 + Row(), slice * kSlice + (Column() + half * 4) * kWord));
    }
  }

  __device__ __forceinline__ void Multiply(const unsigned char* stage) {
    uint32_t a[kSlices][kRows][4], b[kSlices][kColumns][2];
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) LoadFilters(stage, slice, i, a[slice][i]);
#pragma unroll
      for (int j = 0; j < kColumns; ++j) LoadPixels(stage, slice, j, b[slice][j]);
    }
    if constexpr (U::kSplit) {
      MultiplyParts(a, b);
    } else {
      MultiplyWhole(a, b);
    }
  }

  __device__ __forceinline__ void MultiplyWhole(uint32_t (&a)[kSlices][kRows][4], uint32_t (&b)[kSlices][kColumns][2]) {
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) Round(b[slice][j]);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        Round(a[slice][i]);
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
          MultiplyFragment(sums[i][j], a[slice][i], b[slice][j][0], b[slice][j][1], T{});
        }
      }
    }
  }

  template <int kCount>
  static __device__ __forceinline__ void Round(uint32_t (&v)[kCount]) {
    if constexpr (sizeof(T) == 4) {
#pragma unroll
      for (int e = 0; e < kCount; ++e) v[e] = RoundToTf32(v[e]);
    }
  }

  // As SplitEngine (dense_conv/mma/split.cuh) has it, with sums of a step's 16 products.
  __device__ __forceinline__ void MultiplyParts(uint32_t (&a)[kSlices][kRows][4], uint32_t (&b)[kSlices][kColumns][2]) {
    float step[kRows][kColumns][4] = {};
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      uint32_t small_b[kColumns][2];
#pragma unroll
      for (int j = 0; j < kColumns; ++j) SplitInParts(b[slice][j], small_b[j]);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        uint32_t small_a[4];
        SplitInParts(a[slice][i], small_a);
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
          MultiplyFragment(step[i][j], small_a, b[slice][j][0], b[slice][j][1], 0.f);
          MultiplyFragment(step[i][j], a[slice][i], small_b[j][0], small_b[j][1], 0.f);
          MultiplyFragment(step[i][j], a[slice][i], b[slice][j][0], b[slice][j][1], 0.f);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[i][j][e] += step[i][j][e];
      }
    }
  }

  // tile: [tile pixel, kSumStride]
  __device__ __forceinline__ void Store(float* tile) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int pixel = j * 8 + Column() * 2 + e % 2, filter = i * 16 + Row() + e / 2 * 8;
          tile[pixel * U::kSumStride + filter] = sums[i][j][e];
        }
      }
    }
  }
};

}  // namespace jsc

#endif  // JSC_CUDA_DENSE_CONV_MMA_SMALL_MAP_ENGINE_CUH_
