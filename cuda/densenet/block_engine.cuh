// What multiplies in a DenseNet layer: fragments of mma.sync with 16 output channels as rows and 8 pixels as columns,
// from weights [depth, 16] as TMA laid them and pixels [pixel, depth].
#ifndef JSC_CUDA_DENSENET_BLOCK_ENGINE_CUH_
#define JSC_CUDA_DENSENET_BLOCK_ENGINE_CUH_

#include "cuda/dense_conv/mma/engine.cuh"
#include "cuda/densenet/block_shape.cuh"

namespace jsc {

// A float32 as two that the tensor cores take whole. What is not finite leaves sums that are not (and infinity times a
// low part may be NaN): those are computed again by FFMA.
__device__ __forceinline__ void SplitInTwo(uint32_t bits, uint32_t* high, uint32_t* low) {
  *high = (bits + 0x1000u) & 0xffffe000u;
  *low = __float_as_uint(__uint_as_float(bits) - __uint_as_float(*high));
}

// 16 output channels x one step of depth.
template <typename T, bool kPrecise>
struct DenseWeights {
  uint32_t v[4];

  // from: row 0 of the step, 16 output channels a row. float32: rows r and r + 8 of the fragment are output channels 2r
  // and 2r + 1, which are one load. 16 bits: TMA swaps the 16-byte halves of a row (32-byte swizzle).
  __device__ __forceinline__ void Load(const unsigned char* from) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if constexpr (sizeof(T) == 4) {
      const unsigned char* at = from + lane % 4 * 64 + lane / 4 * 8;
      const uint2 front = *reinterpret_cast<const uint2*>(at), back = *reinterpret_cast<const uint2*>(at + 256);
      v[0] = front.x, v[1] = front.y, v[2] = back.x, v[3] = back.y;
    } else {
      const int row = lane / 16 * 8 + lane % 8, half = lane / 8 % 2 ^ row / 4 % 2;
      LoadMatricesTransposed(v, from + row * 32 + half * 16);
    }
  }
};

// 16 channels of float32 at HIGHEST, each eight in a high and a low part that TF32 takes.
template <typename T>
struct DenseWeights<T, true> {
  uint32_t high[2][4], low[2][4];

  __device__ __forceinline__ void Load(const unsigned char* from) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const unsigned char* at = from + lane % 4 * 64 + lane / 4 * 8;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint2 front = *reinterpret_cast<const uint2*>(at + half * 512);
      const uint2 back = *reinterpret_cast<const uint2*>(at + half * 512 + 256);
      const uint32_t v[4] = {front.x, front.y, back.x, back.y};
#pragma unroll
      for (int i = 0; i < 4; ++i) SplitInTwo(v[i], &high[half][i], &low[half][i]);
    }
  }
};

// Two words of pixels of a step; at HIGHEST four, high and low parts.
template <bool kPrecise>
struct DensePixels {
  uint32_t v[2];
  __device__ __forceinline__ void Take(const uint32_t (&words)[2]) { v[0] = words[0], v[1] = words[1]; }
};

template <>
struct DensePixels<true> {
  uint32_t high[2][2], low[2][2];
  __device__ __forceinline__ void Take(const uint32_t (&words)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) SplitInTwo(words[i], &high[i / 2][i % 2], &low[i / 2][i % 2]);
  }
};

// sums += weights x pixels, for kFragments sixteens of output channels and kTiles tiles of eight pixels from `tile` on.
// The tensor cores cut sums off when they add, so at HIGHEST products are summed there from zero and leave them after
// each step.
template <typename T, bool kPrecise, int kFragments, int kTiles, int kAllTiles>
__device__ __forceinline__ void MultiplyTiles(const DenseWeights<T, kPrecise> (&weights)[kFragments],
                                              const uint32_t (&words)[2][kPrecise ? 4 : 2],
                                              float (&sums)[kFragments][kAllTiles][4], int tile) {
  DensePixels<kPrecise> pixels[kTiles];
#pragma unroll
  for (int t = 0; t < kTiles; ++t) pixels[t].Take(words[t]);
  const auto for_each = [&](auto&& body) {
#pragma unroll
    for (int f = 0; f < kFragments; ++f) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) body(f, t);
    }
  };
  if constexpr (!kPrecise) {
    for_each(
        [&](int f, int t) { MultiplyFragment(sums[f][tile + t], weights[f].v, pixels[t].v[0], pixels[t].v[1], T{}); });
  } else {
    float partial[kFragments][kTiles][4] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      for_each([&](int f, int t) {
        MultiplyFragment(partial[f][t], weights[f].low[half], pixels[t].high[half][0], pixels[t].high[half][1], T{});
      });
      for_each([&](int f, int t) {
        MultiplyFragment(partial[f][t], weights[f].high[half], pixels[t].low[half][0], pixels[t].low[half][1], T{});
      });
      for_each([&](int f, int t) {
        MultiplyFragment(partial[f][t], weights[f].high[half], pixels[t].high[half][0], pixels[t].high[half][1], T{});
      });
    }
    for_each([&](int f, int t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[f][tile + t][i] += partial[f][t][i];
    });
  }
}

// The number of an output channel among 16: of row lane / 4 (first) or 8 further.
template <typename T>
__device__ __forceinline__ int DenseOutChannel(int half) {
  const int row = static_cast<int>(threadIdx.x) % 32 / 4;
  return sizeof(T) == 4 ? row * 2 + half : row + half * 8;
}

// sums of a fragment to [pixel, output channel]; to: of the fragment's first pixel and output channel
template <typename T>
__device__ __forceinline__ void StoreFragment(float* to, int stride, const float (&sums)[4]) {
  float* at = to + static_cast<int>(threadIdx.x) % 4 * 2 * stride;
  if constexpr (sizeof(T) == 4) {
    *reinterpret_cast<float2*>(at + DenseOutChannel<T>(0)) = make_float2(sums[0], sums[2]);
    *reinterpret_cast<float2*>(at + stride + DenseOutChannel<T>(0)) = make_float2(sums[1], sums[3]);
  } else {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      at[DenseOutChannel<T>(half)] = sums[2 * half];
      at[stride + DenseOutChannel<T>(half)] = sums[2 * half + 1];
    }
  }
}

__device__ __forceinline__ void LoadMatrixPair(uint32_t (&v)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(v[0]), "=r"(v[1])
               : "r"(SharedWord(row)));
}

// The words of two tiles of eight pixels, or of one, in a step of depth; high: at the step's second half of 32 bytes,
// which float32 at HIGHEST has.
template <bool kPrecise>
__device__ __forceinline__ void LoadTiles(uint32_t (&words)[2][kPrecise ? 4 : 2], const unsigned char* front,
                                          const unsigned char* back, bool two) {
#pragma unroll
  for (int half = 0; half < (kPrecise ? 2 : 1); ++half) {
    uint32_t b[4];
    if (two) {
      LoadMatrices(b, half == 0 ? front : back);
      words[1][half * 2] = b[2], words[1][half * 2 + 1] = b[3];
    } else {
      LoadMatrixPair(b, half == 0 ? front : back);
    }
    words[0][half * 2] = b[0], words[0][half * 2 + 1] = b[1];
  }
}

// relu(scale * x + shift) of a thread's words of pixels, and as the tensor cores take it.
template <typename T, bool kPrecise>
struct DenseInput {
  static constexpr int kWords = kPrecise ? 4 : 2;
  uint32_t scale[kWords], shift[kWords];

  // of the step's first channel
  __device__ __forceinline__ void Load(const T* scales, const T* shifts) {
    const int first = static_cast<int>(threadIdx.x) % 4 * (4 / static_cast<int>(sizeof(T)));
    constexpr int kHalf = 16 / static_cast<int>(sizeof(T));
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      scale[i] = *reinterpret_cast<const uint32_t*>(scales + first + i * kHalf);
      shift[i] = *reinterpret_cast<const uint32_t*>(shifts + first + i * kHalf);
    }
  }
  __device__ __forceinline__ uint32_t Apply(uint32_t word, int i) const {
    if constexpr (sizeof(T) == 4) {
      const float y = AtLeast(fmaf(__uint_as_float(word), __uint_as_float(scale[i]), __uint_as_float(shift[i])), 0.f);
      return kPrecise ? __float_as_uint(y) : RoundToTf32(__float_as_uint(y));
    } else {
      using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
      const auto as_pair = [](uint32_t bits) { return *reinterpret_cast<const Pair*>(&bits); };
      const Pair y = __hfma2_relu(as_pair(word), as_pair(scale[i]), as_pair(shift[i]));
      return *reinterpret_cast<const uint32_t*>(&y);
    }
  }
};

// sums[tile] += weights x relu(scale * x + shift) over the calling warp's part of a chunk, kCount tiles from kFirst on.
// pixels: a stage; from: weights of the chunk; first_row: of the warp's pixels in the stage.
template <class U, int kFirst, int kCount>
__device__ __forceinline__ void MultiplyChunk(const unsigned char* pixels, const unsigned char* from, int weight_bytes,
                                              const typename U::T* scale, const typename U::T* shift, int depth_warp,
                                              int first_row, float (&sums)[U::kWarpMids][U::kWarpTiles][4]) {
  using T = typename U::T;
  constexpr int kEnd = kFirst + kCount < U::kWarpTiles ? kFirst + kCount : U::kWarpTiles;
  constexpr int kWords = DenseInput<T, U::kPrecise>::kWords;
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int i = 0; i < U::kWarpSteps; ++i) {
    const int step = depth_warp * U::kWarpSteps + i;
    DenseWeights<T, U::kPrecise> weights[U::kWarpMids];
#pragma unroll
    for (int f = 0; f < U::kWarpMids; ++f) weights[f].Load(from + f * weight_bytes + step * U::kStep * 16 * U::kBytes);
    DenseInput<T, U::kPrecise> input;
    input.Load(scale + step * U::kStep, shift + step * U::kStep);
    // Slots of 16 bytes are permuted by the row, by 128 or 64 bytes.
    const int row = first_row + lane / 16 * 8 + lane % 8, slot = step * kWords + lane / 8 % 2;
    const int at = row * U::kRowBytes + ((U::kBytes == 4 ? slot ^ (row & 7) : slot ^ (row >> 1 & 3)) << 4);
    const unsigned char *front = pixels + at, *back = pixels + (at ^ 32);
#pragma unroll
    for (int tile = kFirst; tile < kEnd; tile += 2) {
      const bool two = tile + 1 < kEnd;
      uint32_t words[2][kWords];
      LoadTiles<U::kPrecise>(words, front + tile * 8 * U::kRowBytes, back + tile * 8 * U::kRowBytes, two);
#pragma unroll
      for (int j = 0; j < (two ? 2 : 1); ++j) {
#pragma unroll
        for (int w = 0; w < kWords; ++w) words[j][w] = input.Apply(words[j][w], w);
      }
      if (two) {
        MultiplyTiles<T, U::kPrecise, U::kWarpMids, 2, U::kWarpTiles>(weights, words, sums, tile);
      } else {
        MultiplyTiles<T, U::kPrecise, U::kWarpMids, 1, U::kWarpTiles>(weights, words, sums, tile);
      }
    }
  }
}

// The same of the newest chunk, whose tiles the groups that have chunks of their own elsewhere share.
template <class U, int kStageChunk = 0>
__device__ __forceinline__ void MultiplyNewest(const unsigned char* pixels, const unsigned char* from, int weight_bytes,
                                               const typename U::T* scale, const typename U::T* shift, int depth_warp,
                                               int first_row, int stage_chunk,
                                               float (&sums)[U::kWarpMids][U::kWarpTiles][4]) {
  if constexpr (kStageChunk < U::kStageChunks) {
    if (stage_chunk == kStageChunk) {
      MultiplyChunk<U, kStageChunk * U::kNewTiles, U::kNewTiles>(pixels, from, weight_bytes, scale, shift, depth_warp,
                                                                 first_row, sums);
    } else {
      MultiplyNewest<U, kStageChunk + 1>(pixels, from, weight_bytes, scale, shift, depth_warp, first_row, stage_chunk,
                                         sums);
    }
  }
}

// sums[tile] += kernel2 x mid over the calling warp's part of taps and middle channels
template <class U>
__device__ __forceinline__ void MultiplyTaps(const unsigned char* kernel2, const unsigned char* mid, int box_width,
                                             int depth_warp, const int (&rows)[(U::kOutWarpTiles + 1) / 2],
                                             float (&sums)[U::kWarpOutChannels][U::kOutWarpTiles][4]) {
  using T = typename U::T;
  constexpr int kTapSteps = U::kMids / U::kStep;
  constexpr int kSteps = (U::kOutSteps + U::kOutDepthWarps - 1) / U::kOutDepthWarps;
  const int half = static_cast<int>(threadIdx.x) / 8 % 2;
#pragma unroll(kSteps > 5 ? 2 : kSteps)
  for (int i = 0; i < kSteps; ++i) {
    const int step = i * U::kOutDepthWarps + depth_warp;
    if (step >= U::kOutSteps) break;
    const int tap = step / kTapSteps, dy = tap / 3;
    DenseWeights<T, U::kPrecise> weights[U::kWarpOutChannels];
#pragma unroll
    for (int f = 0; f < U::kWarpOutChannels; ++f) {
      weights[f].Load(kernel2 + f * U::kTapBytes + step * U::kStep * 16 * U::kBytes);
    }
    const unsigned char* at =
        mid + (dy * box_width + tap - dy * 3) * U::kMidStride + step % kTapSteps * (U::kStep * U::kBytes) + half * 16;
#pragma unroll
    for (int tile = 0; tile < U::kOutWarpTiles; tile += 2) {
      const bool two = tile + 1 < U::kOutWarpTiles;
      uint32_t words[2][U::kPrecise ? 4 : 2];
      LoadTiles<U::kPrecise>(words, at + rows[tile / 2], at + rows[tile / 2] + 32, two);
      if (two) {
        MultiplyTiles<T, U::kPrecise, U::kWarpOutChannels, 2, U::kOutWarpTiles>(weights, words, sums, tile);
      } else {
        MultiplyTiles<T, U::kPrecise, U::kWarpOutChannels, 1, U::kOutWarpTiles>(weights, words, sums, tile);
      }
    }
  }
}

}  // namespace jsc

#endif  // JSC_CUDA_DENSENET_BLOCK_ENGINE_CUH_
