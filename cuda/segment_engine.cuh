// What multiplies in a segment: a warp's 32 pixels x 32 filters, summed in registers by mma.sync.
//
// One code for every shape of tile, so that it stays in the instruction cache over all layers: only offsets differ.
// float32 is multiplied as TF32, or, where it is to be precise, as three products of TF32 halves whose sums leave the
// tensor cores after every piece, because these cut sums off instead of rounding them.
#ifndef JSC_CUDA_SEGMENT_ENGINE_CUH_
#define JSC_CUDA_SEGMENT_ENGINE_CUH_

#include "direct_engine.cuh"
#include "segment_load.cuh"

namespace jsc {

// A float32 as two that the tensor cores take whole. True where there is no second one: what is not finite, or would
// not be when rounded, stays in the first.
__device__ __forceinline__ bool SplitTf32(uint32_t bits, uint32_t& high, uint32_t& low) {
  const bool odd = !(fabsf(__uint_as_float(bits)) < __int_as_float(0x7f7fe000));
  high = odd ? bits : (bits + 0x1000u) & 0xffffe000u;
  low = odd ? 0u : __float_as_uint(__uint_as_float(bits) - __uint_as_float(high));
  return odd;
}

__device__ __forceinline__ void DropOdd(uint32_t& high) {
  if (!(fabsf(__uint_as_float(high)) < __int_as_float(0x7f7fe000))) high = 0u;
}

template <typename T, bool kPrecise>
struct WarpEngine {
  static constexpr int kRows = 2, kColumns = 4, kSlices = kPieceBytes / 32;
  float sums[kRows][kColumns][4];
  int pixels_at, filters_at;  // bytes from a piece's start

  static __device__ __forceinline__ int Lane() { return static_cast<int>(threadIdx.x) % 32; }

  __device__ __forceinline__ void Start(int pixel_bytes, int warp_p, int warp_f) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
#pragma unroll
        for (int v = 0; v < 4; ++v) sums[i][j][v] = 0.f;
      }
    }
    pixels_at = (warp_p * kWarpSide + Lane() % 16) * kPieceBytes;
    constexpr int kDeepRows = kPieceBytes / static_cast<int>(sizeof(T));
    if constexpr (sizeof(T) == 4) {
      filters_at = pixel_bytes + warp_f * (kDeepRows * kPieceBytes) + Lane() % 4 * kPieceBytes;
    } else {
      filters_at = pixel_bytes + (warp_f >> 1) * (kDeepRows * kPieceBytes) + Lane() % 16 * kPieceBytes;
    }
  }

  // Of float32, which 16-byte slot of 4 filters is column n of the fragments: one that lets 4 rows x 2 columns, which
  // are read at a time, meet distinct banks.
  static __device__ __forceinline__ int SlotOf(int n) { return n >> 1 | (n & 1) << 2; }

  __device__ __forceinline__ void LoadFilters(const unsigned char* piece, int slice, int warp_f,
                                              uint32_t (&b)[kColumns][2]) const {
    if constexpr (sizeof(T) == 4) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int slot = SlotOf(Lane() / 4) ^ (half * 4 + Lane() % 4);
        const uint4 v =
            *reinterpret_cast<const uint4*>(piece + filters_at + slot * 16 + (slice * 8 + half * 4) * kPieceBytes);
        b[0][half] = v.x, b[1][half] = v.y, b[2][half] = v.z, b[3][half] = v.w;
      }
    } else {
#pragma unroll
      for (int j = 0; j < kColumns; j += 2) {
        const int slot = ((warp_f & 1) * 4 + j + Lane() / 16) ^ (Lane() & 7);
        uint32_t v[4];
        LoadMatricesTransposed(v, piece + filters_at + slice * 16 * kPieceBytes + slot * 16);
        b[j][0] = v[0], b[j][1] = v[1], b[j + 1][0] = v[2], b[j + 1][1] = v[3];
      }
    }
  }
  __device__ __forceinline__ void LoadPixels(const unsigned char* piece, int slice, int i, uint32_t (&a)[4]) const {
    LoadMatrices(a, piece + pixels_at + i * (16 * kPieceBytes) + (((slice * 2 + Lane() / 16) ^ (Lane() & 7)) << 4));
  }

  __device__ __forceinline__ void Multiply(const unsigned char* piece, int warp_f) {
    if constexpr (kPrecise) {
      MultiplyPrecisely(piece, warp_f);
      return;
    }
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      uint32_t b[kColumns][2];
      LoadFilters(piece, slice, warp_f, b);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        uint32_t a[4];
        LoadPixels(piece, slice, i, a);
#pragma unroll
        for (int j = 0; j < kColumns; ++j) MultiplyFragment(sums[i][j], a, b[j][0], b[j][1], T{});
      }
    }
  }

  __device__ __forceinline__ void MultiplyPrecisely(const unsigned char* piece, int warp_f) {
    float part[kRows][kColumns][4] = {};
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      uint32_t b[kColumns][2], b_low[kColumns][2], a[kRows][4], a_low[kRows][4];
      bool odd = false;
      LoadFilters(piece, slice, warp_f, b);
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
#pragma unroll
        for (int half = 0; half < 2; ++half) odd |= SplitTf32(b[j][half], b[j][half], b_low[j][half]);
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        LoadPixels(piece, slice, i, a[i]);
#pragma unroll
        for (int v = 0; v < 4; ++v) odd |= SplitTf32(a[i][v], a[i][v], a_low[i][v]);
#pragma unroll
        for (int j = 0; j < kColumns; ++j) MultiplyFragment(part[i][j], a[i], b[j][0], b[j][1], float{});
      }
      if (__any_sync(0xffffffffu, odd)) {  // infinity times a second part of 0 would be NaN
#pragma unroll
        for (int j = 0; j < kColumns; ++j) DropOdd(b[j][0]), DropOdd(b[j][1]);
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
#pragma unroll
          for (int v = 0; v < 4; ++v) DropOdd(a[i][v]);
        }
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
#pragma unroll
        for (int j = 0; j < kColumns; ++j) MultiplyFragment(part[i][j], a_low[i], b[j][0], b[j][1], float{});
#pragma unroll
        for (int j = 0; j < kColumns; ++j) MultiplyFragment(part[i][j], a[i], b_low[j][0], b_low[j][1], float{});
      }
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
#pragma unroll
        for (int v = 0; v < 4; ++v) sums[i][j][v] += part[i][j][v];
      }
    }
  }

  // Quads of a row of sums are permuted by the row's number, so that a warp's stores meet distinct banks.
  static __device__ __forceinline__ int SumQuad(int pixel, int quad) {
    return quad ^ (sizeof(T) == 4 ? (pixel & 1) * 4 : (pixel & 3) * 2);
  }

  // tile: [tile pixel, tile filter] of the warp's part of the reduction
  __device__ __forceinline__ void Store(float* tile, int filters, int warp_p, int warp_f) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int pixel = warp_p * kWarpSide + i * 16 + half * 8 + Lane() / 4;
        float* row = tile + pixel * filters;
        if constexpr (sizeof(T) == 4) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int quad = warp_f * 8 + SlotOf(Lane() % 4 * 2 + e);
            *reinterpret_cast<float4*>(row + SumQuad(pixel, quad) * 4) = make_float4(
                sums[i][0][2 * half + e], sums[i][1][2 * half + e], sums[i][2][2 * half + e], sums[i][3][2 * half + e]);
          }
        } else {
#pragma unroll
          for (int j = 0; j < kColumns; ++j) {
            const int quad = warp_f * 8 + j * 2 + Lane() % 4 / 2;
            *reinterpret_cast<float2*>(row + SumQuad(pixel, quad) * 4 + Lane() % 2 * 2) =
                make_float2(sums[i][j][2 * half], sums[i][j][2 * half + 1]);
          }
        }
      }
    }
  }
};

}  // namespace jsc

#endif  // JSC_CUDA_SEGMENT_ENGINE_CUH_
