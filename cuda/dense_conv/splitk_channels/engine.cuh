// The products of a warp's slices in the engine splitk_channels, from operands in shared memory to sums.
//
// Output channels are the rows of mma.sync's products and pixels their columns. Layout of a block's operands: weights
// [row of taps, tap, channel, tile's output channel], in TMA's swizzle of a row's bytes; pixels [slice, row, column, 32
// bytes]. The lane of row r and column c of a fragment has output channels kVector * r and on, and the channels 2 c and
// 2 c + 1 of a slice, which are one load of a pixel. The order in which channels are added is free.
#ifndef JSC_CUDA_DENSE_CONV_SPLITK_CHANNELS_ENGINE_CUH_
#define JSC_CUDA_DENSE_CONV_SPLITK_CHANNELS_ENGINE_CUH_

#include "cuda/dense_conv/mma/tf32x3.cuh"
#include "cuda/dense_conv/plan/splitk_channels_plan.h"

namespace jsc {

template <typename T, int kOutChannels_, int kColumns_, int kWarps_, bool kTf32x3_>
struct SplitKChannelsTuning {
  static constexpr int kOutChannels = kOutChannels_, kColumns = kColumns_, kRows = kOutChannels / 16;
  static constexpr int kWarps = kWarps_, kThreads = kWarps * kWarp;
  static constexpr bool kTf32x3 = kTf32x3_;
  static constexpr int kChannels = kSliceBytes / static_cast<int>(sizeof(T));  // of a slice
  static constexpr int kWeightRow = kOutChannels * static_cast<int>(sizeof(T));
  static constexpr int kWeightBytes = kChannels * kWeightRow;  // of a slice under one tap
  static constexpr int kUnits = 2 * kColumns;
  static constexpr int kVector = kOutChannels / 8;  // weights of a lane, of one pixel
  using Vector = std::conditional_t<kVector == 4, float4, float2>;
};

// How a warp walks over its operands: of a row of taps, of a tap, slice by slice.
struct SplitKChannelsSteps {
  int slices;  // of a warp
  int kernel_rows, kernel_columns;
  int slice_bytes;  // of a slice's pixels
  // Bytes from what would follow the last slice under a tap to the first under the next, weights and pixels; and from
  // the first pixels of a row of taps to those of the next.
  int weights_on, pixels_on, down;
};

template <class U, typename T>
struct SplitKChannelsEngine {
  static constexpr int kRows = U::kRows, kColumns = U::kColumns;
  static constexpr int kChunkSteps = 4;  // of 32 products, as Tf32x3Engine
  static constexpr int kGroup = 4;       // columns whose products follow each other, so that none waits for its sum
  float sums[kRows][kColumns][4] = {};
  LowWeights low_weights;  // at 3xTF32
  int pixel_at[kColumns];  // bytes, of the lane's channels of each column's pixel
  int weight_at[2];
  uint32_t a[kRows][4], b[kColumns][2];

  template <class Task>
  __device__ __forceinline__ SplitKChannelsEngine(const Task& slice, int warp) {
    const int lane = threadIdx.x % kWarp, row = lane / 4, pair = lane % 4;
    const int pixels = slice.pixels_at + warp * (slice.steps.slices * slice.steps.slice_bytes);
    const int weights = warp * (slice.steps.slices * U::kWeightBytes);
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      const Quotient place = Divide(j * 8 + row, slice.by_tile_wide);
      const int first = place.quotient * slice.pixel_down + place.remainder * slice.pixel_across;
      pixel_at[j] = pixels + (place.quotient < slice.high ? first : 0) + pair * 8;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = pair * 2 + half;
      if constexpr (U::kWeightRow == 128) {
        weight_at[half] = weights + at * 128 + ((row ^ at) << 4);
      } else {
        weight_at[half] = weights + at * 64 + (((row / 2) ^ pair) << 4) + row % 2 * 8;
      }
      asm volatile("" : "+r"(weight_at[half]));  // not found again in each step
    }
  }

#if __CUDA_ARCH__ >= 900
  // full: the address of the barriers of the pixels and of each row of taps
  __device__ __forceinline__ void MultiplyAll(const SplitKChannelsSteps& by, const unsigned char* shared,
                                              uint32_t full) {
    int left = by.slices * by.kernel_columns * by.kernel_rows;
    int slice = by.slices, tap = by.kernel_columns, weights = 0, pixels = 0, row = 0, in_chunk = 0;
    float chunk[U::kTf32x3 ? kRows : 1][U::kTf32x3 ? kColumns : 1][4] = {};
    WaitForBytes(full, 0);
    full += 8;
    WaitForBytes(full, 0);
    LoadWeights(shared, a);
#pragma unroll
    for (int j = 0; j < kColumns; ++j) LoadPixels(shared, j);
#pragma unroll 1
    while (true) {
      if (--left > 0) {
        weights += U::kWeightBytes;
        pixels += by.slice_bytes;
        if (--slice == 0) {
          slice = by.slices;
          weights += by.weights_on;
          pixels += by.pixels_on;
          if (--tap == 0) {
            tap = by.kernel_columns;
            row += by.down;
            pixels = row;
            full += 8;
            WaitForBytes(full, 0);
          }
        }
      }
      uint32_t next[kRows][4];
      LoadWeights(shared + weights, next);
      if constexpr (U::kTf32x3) {
        MultiplyTf32x3(shared + pixels, chunk);
        if (++in_chunk == kChunkSteps || left == 0) {
          in_chunk = 0;
#pragma unroll
          for (int i = 0; i < kRows; ++i) {
#pragma unroll
            for (int j = 0; j < kColumns; ++j) {
#pragma unroll
              for (int e = 0; e < 4; ++e) sums[i][j][e] += chunk[i][j][e], chunk[i][j][e] = 0.f;
            }
          }
        }
      } else {
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
#pragma unroll
          for (int i = 0; i < kRows; ++i) MultiplyFragment(sums[i][j], a[i], b[j][0], b[j][1], T{});
          LoadPixels(shared + pixels, j);
        }
      }
      if (left == 0) break;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) a[i][e] = next[i][e];
      }
    }
    if constexpr (U::kTf32x3) {
      const int depth = by.slices * by.kernel_columns * by.kernel_rows * U::kChannels;
      RestoreSums(sums, low_weights.Share(TruncatedShare(kTruncatedByWarps, depth, kChunkSteps)));
    }
  }
#endif

  // And loads the next step's pixels.
  __device__ __forceinline__ void MultiplyTf32x3(const unsigned char* pixels, float (&chunk)[kRows][kColumns][4]) {
    uint32_t low_a[kRows][4];
#pragma unroll
    for (int i = 0; i < kRows; ++i) SplitHighLow(a[i], low_a[i]);
    low_weights.Meet(low_a[0][0]);
#pragma unroll
    for (int first = 0; first < kColumns; first += kGroup) {
      uint32_t low_b[kGroup][2];
#pragma unroll
      for (int j = first; j < first + kGroup && j < kColumns; ++j) SplitHighLow(b[j], low_b[j - first]);
#pragma unroll
      for (int product = 0; product < 3; ++product) {
#pragma unroll
        for (int j = first; j < first + kGroup && j < kColumns; ++j) {
          const auto& v = product == 1 ? low_b[j - first] : b[j];
#pragma unroll
          for (int i = 0; i < kRows; ++i) {
            MultiplyFragment(chunk[i][j], product == 0 ? low_a[i] : a[i], v[0], v[1], 0.f);
          }
        }
      }
#pragma unroll
      for (int j = first; j < first + kGroup && j < kColumns; ++j) LoadPixels(pixels, j);
    }
  }

  __device__ __forceinline__ void LoadPixels(const unsigned char* from, int j) {
    const uint2 v = *reinterpret_cast<const uint2*>(from + pixel_at[j]);
    b[j][0] = v.x, b[j][1] = v.y;
  }
  __device__ __forceinline__ void LoadWeights(const unsigned char* shared, uint32_t (&to)[kRows][4]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const unsigned char* from = shared + weight_at[half];
      if constexpr (kRows == 2) {
        const uint4 v = *reinterpret_cast<const uint4*>(from);
        to[0][half * 2] = v.x, to[0][half * 2 + 1] = v.y, to[1][half * 2] = v.z, to[1][half * 2 + 1] = v.w;
      } else {
        const uint2 v = *reinterpret_cast<const uint2*>(from);
        to[0][half * 2] = v.x, to[0][half * 2 + 1] = v.y;
      }
    }
  }

  // to: the lane's place of the warp's first unit; a unit is the even or the odd pixels of a column
  __device__ __forceinline__ void Store(typename U::Vector* to) const {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        auto& v = to[(j * 2 + e) * kWarp];
        if constexpr (kRows == 2) {
          v = {sums[0][j][e], sums[0][j][e + 2], sums[1][j][e], sums[1][j][e + 2]};
        } else {
          v = {sums[0][j][e], sums[0][j][e + 2]};
        }
      }
    }
  }
};

}  // namespace jsc

#endif  // JSC_CUDA_DENSE_CONV_SPLITK_CHANNELS_ENGINE_CUH_
