// What multiplies in a dense layer: fragments of mma.sync with 16 filters as rows and 8 pixels as columns, from filters
// [depth, 16] as the copy engine laid them and pixels [pixel, depth].
#ifndef JSC_CUDA_DENSE_BLOCK_ENGINE_CUH_
#define JSC_CUDA_DENSE_BLOCK_ENGINE_CUH_

#include "dense_block_shape.cuh"
#include "direct_engine.cuh"

namespace jsc {

// A float32 as two that the tensor cores take whole. What is not finite, or would not be when rounded, stays in the
// first and is left out of `clean`, which small parts are multiplied with: infinity times a small part of 0 would be
// NaN.
struct TfParts {
  uint32_t large, small, clean;
  __device__ __forceinline__ explicit TfParts(uint32_t bits) {
    const bool finite = fabsf(__uint_as_float(bits)) < __int_as_float(0x7f7fe000);
    const uint32_t rounded = (bits + 0x1000u) & 0xffffe000u;
    large = finite ? rounded : bits;
    small = finite ? __float_as_uint(__uint_as_float(bits) - __uint_as_float(rounded)) : 0u;
    clean = finite ? rounded : 0u;
  }
};

// 16 filters x one step of depth; of float32 at HIGHEST in parts.
template <typename T, bool kPrecise>
struct DenseFilters {
  uint32_t v[4];
  uint32_t small[kPrecise ? 4 : 1], clean[kPrecise ? 4 : 1];

  // from: row 0 of the step, 16 filters a row. float32: rows r and r + 8 of the fragment are filters 2r and 2r + 1,
  // which are one load; 16 bits: the 16-byte halves of a row are swapped by the copy engine (32-byte swizzle).
  __device__ __forceinline__ void Load(const unsigned char* from) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if constexpr (sizeof(T) == 4) {
      const unsigned char* at = from + lane % 4 * 64 + lane / 4 * 8;
      const uint2 low = *reinterpret_cast<const uint2*>(at), high = *reinterpret_cast<const uint2*>(at + 256);
      v[0] = low.x, v[1] = low.y, v[2] = high.x, v[3] = high.y;
      if constexpr (kPrecise) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const TfParts parts(v[i]);
          v[i] = parts.large, small[i] = parts.small, clean[i] = parts.clean;
        }
      }
    } else {
      const int row = lane / 16 * 8 + lane % 8, half = lane / 8 % 2 ^ row / 4 % 2;
      LoadMatricesTransposed(v, from + row * 32 + half * 16);
    }
  }

  // sums += filters x pixels, of which a thread has two words
  __device__ __forceinline__ void Multiply(float (&sums)[4], uint32_t b0, uint32_t b1) const {
    if constexpr (kPrecise) {
      const TfParts p0(b0), p1(b1);
      float part[4] = {};  // tensor cores cut sums off when they add, so these leave them at once
      MultiplyFragment(part, small, p0.clean, p1.clean, T{});
      MultiplyFragment(part, clean, p0.small, p1.small, T{});
      MultiplyFragment(part, v, p0.large, p1.large, T{});
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[i] += part[i];
    } else {
      MultiplyFragment(sums, v, b0, b1, T{});
    }
  }
};

// The number of a filter among 16: of row lane / 4 (first) or 8 further.
template <typename T>
__device__ __forceinline__ int DenseFilter(int half) {
  const int row = static_cast<int>(threadIdx.x) % 32 / 4;
  return sizeof(T) == 4 ? row * 2 + half : row + half * 8;
}

// sums of a fragment to [pixel, filter]; to: of the fragment's first pixel and filter
template <typename T>
__device__ __forceinline__ void StoreFragment(float* to, int stride, const float (&sums)[4]) {
  float* at = to + static_cast<int>(threadIdx.x) % 4 * 2 * stride;
  if constexpr (sizeof(T) == 4) {
    *reinterpret_cast<float2*>(at + DenseFilter<T>(0)) = make_float2(sums[0], sums[2]);
    *reinterpret_cast<float2*>(at + stride + DenseFilter<T>(0)) = make_float2(sums[1], sums[3]);
  } else {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      at[DenseFilter<T>(half)] = sums[2 * half];
      at[stride + DenseFilter<T>(half)] = sums[2 * half + 1];
    }
  }
}

__device__ __forceinline__ void LoadMatrixPair(uint32_t (&v)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(v[0]), "=r"(v[1])
               : "r"(SharedWord(row)));
}

__device__ __forceinline__ float ReluOrNan(float v) {
  float y;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(v));
  return y;
}

// relu(scale * x + shift) of a thread's two words of pixels, and as the tensor cores take it.
template <typename T, bool kPrecise>
struct DenseInput {
  uint32_t scale[2], shift[2];

  // of the step's first channel
  __device__ __forceinline__ void Load(const T* scales, const T* shifts) {
    const int first = static_cast<int>(threadIdx.x) % 4 * (4 / static_cast<int>(sizeof(T)));
    constexpr int kHalf = 16 / static_cast<int>(sizeof(T));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      scale[i] = *reinterpret_cast<const uint32_t*>(scales + first + i * kHalf);
      shift[i] = *reinterpret_cast<const uint32_t*>(shifts + first + i * kHalf);
    }
  }
  __device__ __forceinline__ uint32_t Apply(uint32_t word, int i) const {
    if constexpr (sizeof(T) == 4) {
      const float y = ReluOrNan(fmaf(__uint_as_float(word), __uint_as_float(scale[i]), __uint_as_float(shift[i])));
      return kPrecise ? __float_as_uint(y) : RoundToTf32(__float_as_uint(y));
    } else {
      using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
      const auto as_pair = [](uint32_t bits) { return *reinterpret_cast<const Pair*>(&bits); };
      const Pair y = __hfma2_relu(as_pair(word), as_pair(scale[i]), as_pair(shift[i]));
      return *reinterpret_cast<const uint32_t*>(&y);
    }
  }
};

// sums[tile] += filters x relu(scale * x + shift) over the calling warp's part of a chunk, kCount tiles from kFirst on.
// pixels: a stage; from: filters of the chunk; first_row: of the warp's pixels in the stage.
template <class U, int kFirst, int kCount>
__device__ __forceinline__ void MultiplyChunk(const unsigned char* pixels, const unsigned char* from,
                                              const typename U::T* scale, const typename U::T* shift, int deep,
                                              int first_row, float (&sums)[U::kWarpTiles][4]) {
  using T = typename U::T;
  constexpr int kEnd = kFirst + kCount < U::kWarpTiles ? kFirst + kCount : U::kWarpTiles;
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int i = 0; i < U::kWarpSteps; ++i) {
    const int step = deep * U::kWarpSteps + i;
    DenseFilters<T, U::kPrecise> filters;
    filters.Load(from + step * U::kStep * 16 * U::kBytes);
    DenseInput<T, U::kPrecise> input;
    input.Load(scale + step * U::kStep, shift + step * U::kStep);
    // Slots of 16 bytes are permuted by the row, by 128 or 64 bytes.
    const int row = first_row + lane / 16 * 8 + lane % 8, slot = step * 2 + lane / 8 % 2;
    const unsigned char* at =
        pixels + row * U::kRowBytes + ((U::kBytes == 4 ? slot ^ (row & 7) : slot ^ (row >> 1 & 3)) << 4);
#pragma unroll
    for (int tile = kFirst; tile < kEnd; tile += 2) {
      uint32_t b[4];
      if (tile + 1 < kEnd) {
        LoadMatrices(b, at + tile * 8 * U::kRowBytes);
      } else {
        LoadMatrixPair(b, at + tile * 8 * U::kRowBytes);
      }
#pragma unroll
      for (int j = 0; j < 2 && tile + j < kEnd; ++j) {
        filters.Multiply(sums[tile + j], input.Apply(b[2 * j], 0), input.Apply(b[2 * j + 1], 1));
      }
    }
  }
}

// The same of the newest chunk, whose tiles the groups that have chunks of their own elsewhere share.
template <class U, int kTurn = 0>
__device__ __forceinline__ void MultiplyNewest(const unsigned char* pixels, const unsigned char* from,
                                               const typename U::T* scale, const typename U::T* shift, int deep,
                                               int first_row, int turn, float (&sums)[U::kWarpTiles][4]) {
  if constexpr (kTurn < U::kTurns) {
    if (turn == kTurn) {
      MultiplyChunk<U, kTurn * U::kNewTiles, U::kNewTiles>(pixels, from, scale, shift, deep, first_row, sums);
    } else {
      MultiplyNewest<U, kTurn + 1>(pixels, from, scale, shift, deep, first_row, turn, sums);
    }
  }
}

// sums[tile] += kernel2 x mid over the calling warp's part of taps and middle channels
template <class U>
__device__ __forceinline__ void MultiplyTaps(const unsigned char* kernel2, const unsigned char* mid, int box_width,
                                             int deep, const int (&rows)[(U::kOutWarpTiles + 1) / 2],
                                             float (&sums)[U::kOutWarpTiles][4]) {
  using T = typename U::T;
  constexpr int kTapSteps = U::kMids / U::kStep;
  constexpr int kSteps = (U::kOutSteps + U::kOutDeepWarps - 1) / U::kOutDeepWarps;
  const int half = static_cast<int>(threadIdx.x) / 8 % 2;
#pragma unroll(kSteps > 5 ? 2 : kSteps)
  for (int i = 0; i < kSteps; ++i) {
    const int step = i * U::kOutDeepWarps + deep;
    if (step >= U::kOutSteps) break;
    const int tap = step / kTapSteps, dy = tap / 3;
    DenseFilters<T, U::kPrecise> filters;
    filters.Load(kernel2 + step * U::kStep * 16 * U::kBytes);
    const unsigned char* at =
        mid + (dy * box_width + tap - dy * 3) * U::kMidStride + (step % kTapSteps * 2 + half) * 16;
#pragma unroll
    for (int tile = 0; tile < U::kOutWarpTiles; tile += 2) {
      uint32_t b[4];
      if (tile + 1 < U::kOutWarpTiles) {
        LoadMatrices(b, at + rows[tile / 2]);
      } else {
        LoadMatrixPair(b, at + rows[tile / 2]);
      }
#pragma unroll
      for (int j = 0; j < 2 && tile + j < U::kOutWarpTiles; ++j) {
        filters.Multiply(sums[tile + j], b[2 * j], b[2 * j + 1]);
      }
    }
  }
}

}  // namespace jsc

#endif  // JSC_CUDA_DENSE_BLOCK_ENGINE_CUH_
