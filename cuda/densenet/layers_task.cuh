// What the kernels of a DenseNet block's layers get, and a kernel that lays out weights as products take them.
#ifndef JSC_CUDA_DENSENET_LAYERS_TASK_CUH_
#define JSC_CUDA_DENSENET_LAYERS_TASK_CUH_

#include "cuda/core/programmatic_launch.cuh"
#include "cuda/dense_conv/wgmma/copies.cuh"
#include "cuda/densenet/layers.h"

namespace jsc {

constexpr int kMostLayers = 128;

template <typename T>
constexpr int kChunk = kRowBytes / static_cast<int>(sizeof(T));  // channels of a chunk

struct FirstMaps {
  CUtensorMap x;      // [N * H * W, C0], boxes of a tile's pixels x 128 bytes of channels
  CUtensorMap block;  // [N * H * W, total] of the result, the same
};

// 1x1: mid = relu(relu(scale * x + shift) * kernel1 + bias1)
template <typename T>
struct FirstTask {
  const T* x;                   // [N * H * W, C0]
  const T* block;               // [N * H * W, total]
  const T* kernel1;             // [C, kMiddle]
  int total;                    // these four for what 3xTF32 products compute again
  const T* scale;               // [C]
  const T* shift;               // [C]
  const T* bias;                // [kMiddle]
  const unsigned char* kernel;  // [chunk, kMiddle, 128 bytes of channels], swizzled
  T* mid;                       // [planes, N * H * W, kMiddle]
  int first_channels, channels, pixels, tiles, stages;
  bool is_first;  // of the block: copies x, and all that it reads may still be written
};

struct SecondMaps {
  CUtensorMap mid;  // [N, H, W, kMiddle], boxes of a tile and the rows around it x 128 bytes of channels
};

// 3x3: out[channels C to C + 32] = mid * kernel2
template <typename T>
struct SecondTask {
  const T* mid;      // [2, N, H, W, kMiddle]
  const T* kernel2;  // [9, kMiddle, kGrowth]; these two for what 3xTF32 products compute again
  int images;
  const unsigned char* kernel;  // [chunk, 3 rows, 3 taps of kGrowth weights, 128 bytes of channels], swizzled
  T* out;                       // [N, H, W, total], from channel C on
  int total, height, width;
  int tiles, tiles_y, tiles_x;
  int rows, box_width;  // of a warpgroup's 64 pixels; a box has all columns of the map, or 64
  int stages, stage_bytes, copied_bytes;
};

struct PrepareTask {
  const void* kernel1[kMostLayers];  // [C, kMiddle]
  const void* kernel2[kMostLayers];  // [9, kMiddle, kGrowth]
  unsigned char* to;                 // of layer 0; of each layer its 1x1 kernel, then its 3x3 kernel
  int first_channels, layers;
};

// A weight as the tensor cores take it: they drop the last 13 bits of float32.
template <typename T>
__device__ __forceinline__ T RoundWeight(T weight) {
  if constexpr (sizeof(T) == 4) {
    if (fabsf(weight) < __int_as_float(0x7f800000)) {
      return __uint_as_float((__float_as_uint(weight) + 0x1000u) & 0xffffe000u);
    }
  }
  return weight;
}

// 16 bytes of weights to a slot of a piece's row, and at 3xTF32 what they lack to the next piece.
template <typename T, bool kTf32x3>
__device__ __forceinline__ void StoreWeights(const T (&weights)[16 / sizeof(T)], unsigned char* to, int piece_bytes) {
  constexpr int kSlot = 16 / static_cast<int>(sizeof(T));
  alignas(16) T values[kSlot], low[kSlot];
#pragma unroll
  for (int e = 0; e < kSlot; ++e) {
    values[e] = RoundWeight(weights[e]);
    if constexpr (kTf32x3) low[e] = weights[e] - values[e];
  }
  *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(values);
  if constexpr (kTf32x3) *reinterpret_cast<uint4*>(to + piece_bytes) = *reinterpret_cast<const uint4*>(low);
}

// blockIdx.y: the layer. A thread makes 16 bytes: neighbouring channels of an output channel.
template <typename T, bool kTf32x3>
__global__ void __launch_bounds__(256) PrepareKernel(const __grid_constant__ PrepareTask task) {
  constexpr int kSlot = 16 / static_cast<int>(sizeof(T)), kPlanes = kTf32x3 ? 2 : 1;
  const int layer = blockIdx.y, channels = task.first_channels + layer * kGrowth;
  const DenseChunks chunks(task.first_channels, channels, kChunk<T>);
  unsigned char* to = task.to + PreparedBytes(sizeof(T), kTf32x3, task.first_channels, layer);
  const int first = chunks.all * kMiddle * 8, all = first + SecondBytes(sizeof(T), false) / 16;
  for (int i = blockIdx.x * 256 + threadIdx.x; i < all; i += gridDim.x * 256) {
    T values[kSlot];
    if (i < first) {
      const int out_channel = i % kMiddle, slot = i / kMiddle % 8, chunk = i / kMiddle / 8;
      const bool of_x = chunk < chunks.of_x;
      const int in_part = (of_x ? chunk : chunk - chunks.of_x) * kChunk<T> + slot * kSlot;
      const int channel = (of_x ? 0 : task.first_channels) + in_part, end = of_x ? task.first_channels : channels;
      const T* from =
          static_cast<const T*>(task.kernel1[layer]) + static_cast<int64_t>(channel) * kMiddle + out_channel;
#pragma unroll
      for (int e = 0; e < kSlot; ++e) values[e] = channel + e < end ? from[e * kMiddle] : FromFloat<T>(0.f);
      unsigned char* piece = to + static_cast<int64_t>(chunk) * kPlanes * kFirstPiece;
      StoreWeights<T, kTf32x3>(values, piece + out_channel * kRowBytes + ((slot ^ (out_channel & 7)) << 4),
                               kFirstPiece);
    } else {
      const int rest = i - first, out_channel = rest % kGrowth, slot = rest / kGrowth % 8, row = rest / kGrowth / 8;
      const int tap = row % 3, dy = row / 3 % 3, chunk = row / 9, channel = chunk * kChunk<T> + slot * kSlot;
      const T* from = static_cast<const T*>(task.kernel2[layer]) +
                      (static_cast<int64_t>(dy * 3 + tap) * kMiddle + channel) * kGrowth + out_channel;
#pragma unroll
      for (int e = 0; e < kSlot; ++e) values[e] = from[e * kGrowth];
      unsigned char* piece =
          to + static_cast<int64_t>(chunks.all) * kPlanes * kFirstPiece + (chunk * 3 + dy) * kPlanes * kSecondPiece;
      const int column = tap * kGrowth + out_channel;
      StoreWeights<T, kTf32x3>(values, piece + column * kRowBytes + ((slot ^ (column & 7)) << 4), kSecondPiece);
    }
  }
}

}  // namespace jsc

#endif  // JSC_CUDA_DENSENET_LAYERS_TASK_CUH_
