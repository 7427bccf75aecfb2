// The products of a warp's steps in the engine small_map, from a pipeline stage to sums.
//
// Output channels are the rows of the products and pixels their columns, so a tile may be 8 pixels wide. A stage has
// the pixels [kPixels, kDepth] and the weights [kDepth, kOutChannels] of a step, as SmallMapTuning lays them out.
#ifndef JSC_CUDA_DENSE_CONV_MMA_SMALL_MAP_ENGINE_CUH_
#define JSC_CUDA_DENSE_CONV_MMA_SMALL_MAP_ENGINE_CUH_

#include "cuda/dense_conv/mma/tf32x3.cuh"
#include "cuda/dense_conv/plan/mma_tuning.h"

namespace jsc {

// A warp's sums of its steps: sums[rows of 16 output channels][columns of 8 pixels], as mma.sync has them.
template <class U, typename T>
struct SmallMapEngine {
  static constexpr int kRows = U::kOutChannels / 16, kColumns = U::kPixels / 8;
  static constexpr int kSlices = U::kDepth * static_cast<int>(sizeof(T)) / 32;  // of a step, each 32 bytes deep
  static constexpr int kSlice = 32 / static_cast<int>(sizeof(T));
  float sums[kRows][kColumns][4] = {};
  LowWeights low_weights;  // at 3xTF32

  // A lane's row and column in the fragments of mma.sync.
  static __device__ __forceinline__ int Row() { return static_cast<int>(threadIdx.x % kWarp / 4); }
  static __device__ __forceinline__ int Column() { return static_cast<int>(threadIdx.x % 4); }

  static __device__ __forceinline__ uint32_t Word(const unsigned char* p) {
    return *reinterpret_cast<const uint32_t*>(p);
  }
  static __device__ __forceinline__ void LoadWeights(const unsigned char* stage, int slice, int row, uint32_t (&a)[4]) {
    if constexpr (sizeof(T) == 4) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        a[e] = Word(stage + U::Weight(slice * kSlice + Column() + e / 2 * 4, row * 16 + Row() + e % 2 * 8));
      }
    } else {
      const unsigned lane = threadIdx.x % kWarp;
      const int k = static_cast<int>(lane / 16 * 8 + lane % 8), out_channel = static_cast<int>(lane / 8 % 2) * 8;
      LoadMatricesTransposed(a, stage + U::Weight(slice * kSlice + k, row * 16 + out_channel));
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
      for (int i = 0; i < kRows; ++i) LoadWeights(stage, slice, i, a[slice][i]);
#pragma unroll
      for (int j = 0; j < kColumns; ++j) LoadPixels(stage, slice, j, b[slice][j]);
    }
    if constexpr (U::kTf32x3) {
      MultiplyTf32x3(a, b);
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

  // As Tf32x3Engine (dense_conv/mma/tf32x3.cuh) has it, with sums of a step's 16 products.
  __device__ __forceinline__ void MultiplyTf32x3(uint32_t (&a)[kSlices][kRows][4],
                                                 uint32_t (&b)[kSlices][kColumns][2]) {
    float step[kRows][kColumns][4] = {};
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      uint32_t low_b[kColumns][2];
#pragma unroll
      for (int j = 0; j < kColumns; ++j) SplitHighLow(b[slice][j], low_b[j]);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        uint32_t low_a[4];
        SplitHighLow(a[slice][i], low_a);
        if (i == 0) low_weights.Meet(low_a[0]);
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
          MultiplyFragment(step[i][j], low_a, b[slice][j][0], b[slice][j][1], 0.f);
          MultiplyFragment(step[i][j], a[slice][i], low_b[j][0], low_b[j][1], 0.f);
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

  // tile: [tile pixel, kSumStride]; depth: of the reduction
  __device__ __forceinline__ void Store(float* tile, int depth) const {
    const float share = U::kTf32x3 ? low_weights.Share(TruncatedShare(kTruncatedByWarps, depth, kSlices)) : 0.f;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int pixel = j * 8 + Column() * 2 + e % 2, out_channel = i * 16 + Row() + e / 2 * 8;
          tile[pixel * U::kSumStride + out_channel] = U::kTf32x3 ? Restored(sums[i][j][e], share) : sums[i][j][e];
        }
      }
    }
  }
};

}  // namespace jsc

#endif  // JSC_CUDA_DENSE_CONV_MMA_SMALL_MAP_ENGINE_CUH_
