// The products of a warp in the engine grouped, from shared memory to sums.
#ifndef JSC_CUDA_DENSE_CONV_GROUPED_ENGINE_CUH_
#define JSC_CUDA_DENSE_CONV_GROUPED_ENGINE_CUH_

#include "cuda/dense_conv/grouped/task.cuh"

namespace jsc {

// A warp's sums of kRows fragments of pixels and kTiles of output channels, as mma.sync has them.
template <class U, typename T>
struct GroupedEngine {
  static constexpr int kRows = U::kRows, kTiles = U::kTiles;
  static constexpr int kStepRows = 2 * U::kUnit;  // of weights
  static constexpr int kChunkSteps = 4;           // of 32 products, as Tf32x3Engine
  float sums[kRows][kTiles][4] = {};
  LowWeights low_weights;  // at 3xTF32

  static __device__ __forceinline__ int Lane() { return static_cast<int>(threadIdx.x % kWarp); }

  // float32: of tile j, column n of a fragment is output channel n * kTiles + j, so that a thread's results are
  // neighbours.
  static __device__ __forceinline__ void LoadWeights(const unsigned char* from, int row_bytes,
                                                     uint32_t (&b)[kTiles][2]) {
    if constexpr (U::kWide) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const unsigned char* row = from + (half * 4 + Lane() % 4) * row_bytes + Lane() / 4 * (kTiles * 4);
        if constexpr (kTiles % 4 == 0) {
#pragma unroll
          for (int j = 0; j < kTiles; j += 4) {
            const uint4 v = *reinterpret_cast<const uint4*>(row + j * 4);
            b[j][half] = v.x, b[j + 1][half] = v.y, b[j + 2][half] = v.z, b[j + 3][half] = v.w;
          }
        } else if constexpr (kTiles % 2 == 0) {
#pragma unroll
          for (int j = 0; j < kTiles; j += 2) {
            const uint2 v = *reinterpret_cast<const uint2*>(row + j * 4);
            b[j][half] = v.x, b[j + 1][half] = v.y;
          }
        } else {
#pragma unroll
          for (int j = 0; j < kTiles; ++j) b[j][half] = *reinterpret_cast<const uint32_t*>(row + j * 4);
        }
      }
    } else {
      const unsigned char* row = from + Lane() % 16 * row_bytes;
#pragma unroll
      for (int j = 0; j + 1 < kTiles; j += 2) {
        uint32_t v[4];
        LoadMatricesTransposed(v, row + (j + Lane() / 16) * 16);
        b[j][0] = v[0], b[j][1] = v[1], b[j + 1][0] = v[2], b[j + 1][1] = v[3];
      }
      if constexpr (kTiles % 2 == 1) LoadMatrixPairTransposed(b[kTiles - 1], row + (kTiles - 1) * 16);
    }
  }

  // pixels: of the group, starts: of the lane's windows; weights: of the warp's output channels.
  __device__ __forceinline__ void MultiplyAll(int units, const int* offsets, const unsigned char* pixels,
                                              const int (&starts)[kRows], const unsigned char* weights, int row_bytes) {
    const int half = Lane() / 16, steps = units / 2;
    float chunk[U::kTf32x3 ? kRows : 1][U::kTf32x3 ? kTiles : 1][4] = {};
    offsets += half;
#pragma unroll 2
    for (int step = 0; step < steps; ++step) {
      const unsigned char* from = pixels + offsets[step * 2];
      uint32_t b[kTiles][2];
      LoadWeights(weights + step * (kStepRows * row_bytes), row_bytes, b);
      Multiply<false>(from, starts, b, chunk);
      if constexpr (U::kTf32x3) {
        if (step % kChunkSteps == kChunkSteps - 1) AddChunk(chunk);
      }
    }
    if (units % 2 == 1) {  // a unit alone, with zeros for the other: what is not finite stays out
      const unsigned char* from = pixels + offsets[steps * 2 - half];
      uint32_t b[kTiles][2];
      // The rows of the other would lie behind the last.
      LoadWeights(weights + (steps * kStepRows - U::kUnit) * row_bytes, row_bytes, b);
#pragma unroll
      for (int j = 0; j < kTiles; ++j) b[j][0] = b[j][1], b[j][1] = 0;
      Multiply<true>(from, starts, b, chunk);
    }
    if constexpr (U::kTf32x3) {
      AddChunk(chunk);
      RestoreSums(sums, low_weights.Share(TruncatedShare(kTruncatedByWarps, units * U::kUnit, kChunkSteps)));
    }
  }

  // alone: of the fragments' two units there is the first.
  template <bool kAlone, int kA, int kB>
  __device__ __forceinline__ void Multiply(const unsigned char* from, const int (&starts)[kRows],
                                           uint32_t (&b)[kTiles][2], float (&chunk)[kA][kB][4]) {
    uint32_t low_b[U::kTf32x3 ? kTiles : 1][2];
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      if constexpr (U::kTf32x3) {
        SplitHighLow(b[j], low_b[j]);
      } else if constexpr (U::kWide) {
        b[j][0] = RoundToTf32(b[j][0]), b[j][1] = RoundToTf32(b[j][1]);
      }
    }
    if constexpr (U::kTf32x3) low_weights.Meet(low_b[0][kAlone ? 0 : 1]);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      uint32_t a[4];
      LoadMatrices(a, from + starts[i]);
      if constexpr (kAlone) a[2] = a[3] = 0;
      if constexpr (U::kTf32x3) {
        uint32_t low_a[4];
        SplitHighLow(a, low_a);
#pragma unroll
        for (int j = 0; j < kTiles; ++j) MultiplyFragment(chunk[i][j], low_a, b[j][0], b[j][1], 0.f);
#pragma unroll
        for (int j = 0; j < kTiles; ++j) MultiplyFragment(chunk[i][j], a, low_b[j][0], low_b[j][1], 0.f);
#pragma unroll
        for (int j = 0; j < kTiles; ++j) MultiplyFragment(chunk[i][j], a, b[j][0], b[j][1], 0.f);
      } else {
        if constexpr (U::kWide) {
#pragma unroll
          for (int e = 0; e < 4; ++e) a[e] = RoundToTf32(a[e]);
        }
#pragma unroll
        for (int j = 0; j < kTiles; ++j) MultiplyFragment(sums[i][j], a, b[j][0], b[j][1], T{});
      }
    }
  }

  template <int kA, int kB>
  __device__ __forceinline__ void AddChunk(float (&chunk)[kA][kB][4]) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[i][j][e] += chunk[i][j][e], chunk[i][j][e] = 0.f;
      }
    }
  }

  // The run of the lane's results of a fragment's pixel Lane() / 4 + 8 * half.
  __device__ __forceinline__ void Run(int i, int half, int run, float (&v)[U::kRun]) const {
    if constexpr (U::kWide) {
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) v[e * kTiles + j] = sums[i][j][half * 2 + e];
      }
    } else {
      v[0] = sums[i][run][half * 2], v[1] = sums[i][run][half * 2 + 1];
    }
  }
};

}  // namespace jsc

#endif  // JSC_CUDA_DENSE_CONV_GROUPED_ENGINE_CUH_
