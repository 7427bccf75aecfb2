// What multiplies in the engine mma: sums[pixel][output channel] += a staged chunk of pixels x weights, in a thread's
// registers.
//
// Engines differ in which results a thread has. By FFMA: pixels tx + kThreadsX * i, and output channels in runs of 4
// (or kOutChannelsPerThread, if less). Both operands then come in 16-byte loads, and a warp's pixels meet distinct
// banks. On tensor cores: what mma.sync's fragments say, 16 pixels x 8 output channels a fragment. With TF32 a warp's
// four fragments interleave 32 output channels by 4. Four neighbouring output channels are then one 16-byte load, as
// there is no transposing ldmatrix for 32 bits.
#ifndef JSC_CUDA_DENSE_CONV_MMA_ENGINE_CUH_
#define JSC_CUDA_DENSE_CONV_MMA_ENGINE_CUH_

#include "cuda/dense_conv/mma/load.cuh"

namespace jsc {

__device__ __forceinline__ uint32_t SharedWord(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Four 8x8 matrices of 16-bit elements (or 8x4 of 32 bits), whose rows begin at the addresses of the lanes.
__device__ __forceinline__ void LoadMatrices(uint32_t (&v)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "r"(SharedWord(row)));
}

__device__ __forceinline__ void LoadMatricesTransposed(uint32_t (&v)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "r"(SharedWord(row)));
}

// The first two of them, by the rows of lanes 0 to 15.
__device__ __forceinline__ void LoadMatrixPairTransposed(uint32_t (&v)[2], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(v[0]), "=r"(v[1])
               : "r"(SharedWord(row)));
}

// A float32 as the tensor cores take it: they drop 13 bits, so half of what is dropped goes on first.
__device__ __forceinline__ uint32_t RoundToTf32(uint32_t bits) {
  return fabsf(__uint_as_float(bits)) < __int_as_float(0x7f800000) ? bits + 0x1000u : bits;
}
__device__ __forceinline__ float RoundToTf32(float v) { return __uint_as_float(RoundToTf32(__float_as_uint(v))); }
__device__ __forceinline__ float4 RoundToTf32(float4 v) {
  return {RoundToTf32(v.x), RoundToTf32(v.y), RoundToTf32(v.z), RoundToTf32(v.w)};
}

__device__ __forceinline__ void MultiplyFragment(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                                 float) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void MultiplyFragment(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                                 __nv_bfloat16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void MultiplyFragment(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                                 __half) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <class U, typename T>
struct TensorEngine {
  static constexpr int kRows = U::kImagesPerThread / 2;  // fragments of a warp along pixels
  static constexpr int kColumns = U::kOutChannelsPerThread / 2;
  static constexpr int kWarpsX = U::kThreadsX / 8;
  static constexpr int kSlices = U::kCachedPixels * static_cast<int>(sizeof(T)) / 32;  // of a chunk, each 32 bytes deep
  static_assert(kColumns % (sizeof(T) == 4 ? 4 : 2) == 0, "output channels come in whole loads");
  using Layout = StageLayout<U, T>;
  float sums[kRows][kColumns][4] = {};

  static __device__ __forceinline__ int Lane() { return threadIdx.x % 32; }
  static __device__ __forceinline__ int FirstPixel() { return threadIdx.x / 32 % kWarpsX * kRows * 16; }
  static __device__ __forceinline__ int FirstOutChannel() { return threadIdx.x / 32 / kWarpsX * kColumns * 8; }

  // b[column][half of the slice], as it lies in memory
  __device__ __forceinline__ void LoadWeights(const unsigned char* weights, int slice, uint32_t (&b)[kColumns][2]) {
    if constexpr (sizeof(T) == 4) {
#pragma unroll
      for (int j = 0; j < kColumns; j += 4) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int k = slice * 8 + half * 4 + Lane() % 4, out_channel = FirstOutChannel() + j * 8 + Lane() / 4 * 4;
          const uint4 v = *reinterpret_cast<const uint4*>(weights + Layout::Weight(k, out_channel));
          b[j][half] = v.x, b[j + 1][half] = v.y, b[j + 2][half] = v.z, b[j + 3][half] = v.w;
        }
      }
    } else {
#pragma unroll
      for (int j = 0; j < kColumns; j += 2) {
        const int k = slice * 16 + Lane() % 16, out_channel = FirstOutChannel() + j * 8 + Lane() / 16 * 8;
        uint32_t v[4];
        LoadMatricesTransposed(v, weights + Layout::Weight(k, out_channel));
        b[j][0] = v[0], b[j][1] = v[1], b[j + 1][0] = v[2], b[j + 1][1] = v[3];
      }
    }
  }

  __device__ __forceinline__ void LoadPixels(const unsigned char* pixels, int slice, int i, uint32_t (&a)[4]) {
    constexpr int kHalf = 16 / static_cast<int>(sizeof(T));  // elements of half a slice
    LoadMatrices(a, pixels + Layout::Pixel(FirstPixel() + i * 16 + Lane() % 16, (slice * 2 + Lane() / 16) * kHalf));
  }

  __device__ __forceinline__ void Multiply(const unsigned char* stage) {
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      uint32_t b[kColumns][2];
      LoadWeights(stage + Layout::kWeightsAt, slice, b);
      if constexpr (sizeof(T) == 4) {
#pragma unroll
        for (int j = 0; j < kColumns; ++j) b[j][0] = RoundToTf32(b[j][0]), b[j][1] = RoundToTf32(b[j][1]);
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        uint32_t a[4];
        LoadPixels(stage, slice, i, a);
        if constexpr (sizeof(T) == 4) {
#pragma unroll
          for (int v = 0; v < 4; ++v) a[v] = RoundToTf32(a[v]);
        }
#pragma unroll
        for (int j = 0; j < kColumns; ++j) MultiplyFragment(sums[i][j], a, b[j][0], b[j][1], T{});
      }
    }
  }

  // tile: [tile pixel, kSumStride]
  __device__ __forceinline__ void Store(float* tile) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float* row = tile + (FirstPixel() + i * 16 + half * 8 + Lane() / 4) * U::kSumStride;
#pragma unroll
        for (int j = 0; j < kColumns; j += sizeof(T) == 4 ? 4 : 1) {
          if constexpr (sizeof(T) == 4) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              *reinterpret_cast<float4*>(row + FirstOutChannel() + j * 8 + (Lane() % 4 * 2 + e) * 4) =
                  make_float4(sums[i][j][2 * half + e], sums[i][j + 1][2 * half + e], sums[i][j + 2][2 * half + e],
                              sums[i][j + 3][2 * half + e]);
            }
          } else {
            *reinterpret_cast<float2*>(row + FirstOutChannel() + j * 8 + Lane() % 4 * 2) =
                make_float2(sums[i][j][2 * half], sums[i][j][2 * half + 1]);
          }
        }
      }
    }
  }
};

// float32 by FFMA, in the order that U::kEngine says.
template <class U>
struct ScalarEngine {
  // Neighbouring output channels of a thread.
  static constexpr int kRun = U::kOutChannelsPerThread < 4 ? U::kOutChannelsPerThread : 4;
  static constexpr int kLoadDepth = 4;  // of the chunk, a 16-byte load
  using Layout = StageLayout<U, float>;
  float sums[U::kImagesPerThread][U::kOutChannelsPerThread] = {};

  static __device__ __forceinline__ int Pixel(int i) { return threadIdx.x % U::kThreadsX + U::kThreadsX * i; }
  static __device__ __forceinline__ int OutChannel(int f) {
    return (f / kRun * U::kThreadsY + static_cast<int>(threadIdx.x) / U::kThreadsX) * kRun + f % kRun;
  }
  static __device__ __forceinline__ float PixelAt(const unsigned char* stage, int i, int k) {
    return *reinterpret_cast<const float*>(stage + Layout::Pixel(Pixel(i), k));
  }
  static __device__ __forceinline__ float WeightAt(const unsigned char* stage, int f, int k) {
    return *reinterpret_cast<const float*>(stage + Layout::kWeightsAt + Layout::Weight(k, OutChannel(f)));
  }

  __device__ __forceinline__ void OuterProducts(const unsigned char* stage) {
#pragma unroll
    for (int k = 0; k < U::kCachedPixels; k += kLoadDepth) {
      float pixel[U::kImagesPerThread][kLoadDepth];
#pragma unroll
      for (int i = 0; i < U::kImagesPerThread; ++i) {
        *reinterpret_cast<float4*>(pixel[i]) = *reinterpret_cast<const float4*>(stage + Layout::Pixel(Pixel(i), k));
      }
#pragma unroll
      for (int d = 0; d < kLoadDepth; ++d) {
        float weight[U::kOutChannelsPerThread];
#pragma unroll
        for (int f = 0; f < U::kOutChannelsPerThread; f += kRun) {
          const unsigned char* source = stage + Layout::kWeightsAt + Layout::Weight(k + d, OutChannel(f));
          if constexpr (kRun == 4) {
            *reinterpret_cast<float4*>(weight + f) = *reinterpret_cast<const float4*>(source);
          } else {
#pragma unroll
            for (int e = 0; e < kRun; ++e) weight[f + e] = WeightAt(stage, f + e, k + d);
          }
        }
#pragma unroll
        for (int i = 0; i < U::kImagesPerThread; ++i) {
#pragma unroll
          for (int f = 0; f < U::kOutChannelsPerThread; ++f) sums[i][f] = fmaf(pixel[i][d], weight[f], sums[i][f]);
        }
      }
    }
  }

  __device__ __forceinline__ void InnerProducts(const unsigned char* stage) {
#pragma unroll
    for (int f = 0; f < U::kOutChannelsPerThread; ++f) {
#pragma unroll
      for (int i = 0; i < U::kImagesPerThread; ++i) {
        float sum = 0.f;
#pragma unroll 1
        for (int k = 0; k < U::kCachedPixels; ++k) sum = fmaf(PixelAt(stage, i, k), WeightAt(stage, f, k), sum);
        sums[i][f] += sum;
      }
    }
  }

  __device__ __forceinline__ void LocalOuterProducts(const unsigned char* stage) {
#pragma unroll 1
    for (int k = 0; k < U::kCachedPixels; ++k) {
#pragma unroll 1
      for (int f = 0; f < U::kOutChannelsPerThread; ++f) {
#pragma unroll 1
        for (int i = 0; i < U::kImagesPerThread; ++i) {
          sums[i][f] = fmaf(PixelAt(stage, i, k), WeightAt(stage, f, k), sums[i][f]);
        }
      }
    }
  }

  __device__ __forceinline__ void Multiply(const unsigned char* stage) {
    if constexpr (U::kEngine == Engine::kOuterProduct) OuterProducts(stage);
    if constexpr (U::kEngine == Engine::kInnerProduct) InnerProducts(stage);
    if constexpr (U::kEngine == Engine::kLocalSums) LocalOuterProducts(stage);
  }

  // tile: [tile pixel, kSumStride]
  __device__ __forceinline__ void Store(float* tile) {
#pragma unroll
    for (int i = 0; i < U::kImagesPerThread; ++i) {
      float* row = tile + Pixel(i) * U::kSumStride;
#pragma unroll
      for (int f = 0; f < U::kOutChannelsPerThread; f += kRun) {
        if constexpr (kRun == 4) {
          *reinterpret_cast<float4*>(row + OutChannel(f)) =
              make_float4(sums[i][f], sums[i][f + 1], sums[i][f + 2], sums[i][f + 3]);
        } else {
#pragma unroll
          for (int e = 0; e < kRun; ++e) row[OutChannel(f + e)] = sums[i][f + e];
        }
      }
    }
  }
};

}  // namespace jsc

#endif  // JSC_CUDA_DENSE_CONV_MMA_ENGINE_CUH_
