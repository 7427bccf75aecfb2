// The epilogue of the engine mma: the cluster reduction of split-K, then bias, residual and ReLU.
//
// Blocks read each other's sums between two cluster barriers. Lost on an H200: blocks that send them to the block that
// completes a row, by st.async or by TMA (0.1 to 0.4 us slower for 64 x 64 tiles).
#ifndef JSC_CUDA_DENSE_CONV_MMA_SUMS_CUH_
#define JSC_CUDA_DENSE_CONV_MMA_SUMS_CUH_

#include "cuda/core/epilogue.cuh"
#include "cuda/dense_conv/mma/task.cuh"
#include "cuda/dense_conv/plan/mma_tuning.h"

namespace jsc {

// The sums of one split of a tile in the workspace: [tile pixel, tile output channel].
template <class U, typename T>
__device__ __forceinline__ float* PartialTile(const MmaTask<T>& task, const MmaPlace& at, int tile, int split) {
  const int64_t whole = (static_cast<int64_t>(at.stack) * gridDim.y + at.group) * task.tiles + tile;
  return task.partial + (whole * task.splits + split) * U::kPixels * U::kOutChannels;
}

// The tile of a tuning and threads, for the second step of Reduction::kWorkspace, which needs nothing else.
template <int kPixels_, int kOutChannels_>
struct TileSides {
  static constexpr int kPixels = kPixels_, kOutChannels = kOutChannels_, kThreads = 256;
  static constexpr bool kVector = false;
};

// Completes a tile's pixels rank, rank + ranks, ...: bias, residual and ReLU. A thread keeps four output channels. A
// block alone with its tile loads bias and residual when the writer is made, before the sums are there. Blocks that
// split a tile have few pixels each, so less code to fetch matters more.
template <class U, typename T>
struct TileWriter {
  static constexpr int kQuads = U::kOutChannels / 4, kStep = U::kThreads / kQuads, kBatch = 8;
  static_assert(U::kThreads % kQuads == 0, "a thread keeps its output channels");
  const MmaTask<T>& task;
  int rank, ranks, pixels, tile_out_channel, valid;
  int64_t first;  // element of out at the tile's first pixel and this thread's output channels
  float4 bias = {0.f, 0.f, 0.f, 0.f};
  float4 residual[kBatch] = {};
  int nonzeros = 0;  // that this thread wrote, where they are asked for

  __device__ __forceinline__ TileWriter(const MmaTask<T>& task, const MmaPlace& at, int rank, int ranks)
      : task(task), rank(rank), ranks(ranks), pixels(min(U::kPixels, task.pixels - at.pixel)) {
    tile_out_channel = static_cast<int>(threadIdx.x) % kQuads * 4;
    valid = max(0, min(task.group_out_channels - at.out_channel - tile_out_channel, 4));
    const int out_channel = at.group * task.group_out_channels + at.out_channel + tile_out_channel;
    first = (static_cast<int64_t>(at.stack) * task.pixels + at.pixel) * task.out_channels + out_channel;
    if (task.bias) {
      bias = Load(task.bias + static_cast<int64_t>(at.stack) * task.out_channels + out_channel, valid);
    }
    if (ranks == 1) LoadResiduals(0);
  }
  // With kVector output channels come in whole fours.
  __device__ __forceinline__ float4 Load(const T* p, int count) const {
    return LoadQuad<U::kVector>(p, count, task.vector_out);
  }
  __device__ __forceinline__ int Pixel(int i) const {
    return (static_cast<int>(threadIdx.x) / kQuads + i * kStep) * ranks + rank;
  }
  __device__ __forceinline__ int64_t Element(int pixel) const {
    return first + static_cast<int64_t>(pixel) * task.out_channels;
  }
  __device__ __forceinline__ void LoadResiduals(int from) {
    if (!task.residual) return;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int pixel = Pixel(from + i);
      residual[i] = Load(task.residual + Element(pixel), pixel < pixels ? valid : 0);
    }
  }
  __device__ __forceinline__ void WritePixel(int pixel, float4 sum, float4 extra) {
    sum = Finish(sum, bias + extra, task.relu);
    StoreQuad<U::kVector>(task.out + Element(pixel), sum, valid, task.vector_out);
    if (task.counts.rows) nonzeros += CountNonzeros<T>(sum, valid);
  }
  // Non-zeros and elements that the thread wrote.
  __device__ __forceinline__ int2 Written() const {
    return make_int2(nonzeros, valid * max(0, (pixels - Pixel(0) + kStep * ranks - 1) / (kStep * ranks)));
  }
  // sums(pixel, output channel): four sums.
  template <typename Sums>
  __device__ __forceinline__ void Write(const Sums& sums) {
#pragma unroll 1
    for (int from = 0; Pixel(from) < pixels; from += kBatch) {
      if (from > 0) LoadResiduals(from);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int pixel = Pixel(from + i);
        if (pixel < pixels) WritePixel(pixel, sums(pixel, tile_out_channel), residual[i]);
      }
    }
  }
  // sums(split, pixel, output channel): four sums of one split; they are added in the order of the splits.
  template <typename Sums>
  __device__ __forceinline__ void WriteTogether(const Sums& sums) {
#pragma unroll 1
    for (int i = 0; Pixel(i) < pixels; ++i) {
      const int pixel = Pixel(i);
      float4 extra = {0.f, 0.f, 0.f, 0.f};
      if (task.residual) extra = Load(task.residual + Element(pixel), valid);
      float4 sum = sums(0, pixel, tile_out_channel);
#pragma unroll 4
      for (int split = 1; split < task.splits; ++split) sum = sum + sums(split, pixel, tile_out_channel);
      WritePixel(pixel, sum, extra);
    }
  }
};

}  // namespace jsc

#endif  // JSC_CUDA_DENSE_CONV_MMA_SUMS_CUH_
