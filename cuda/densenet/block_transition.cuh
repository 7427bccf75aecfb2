// What may follow a DenseNet block, as one more kernel: batch norm, ReLU, 1x1 convolution and the average of 2x2
// pixels.
//
//   out = average(relu(scale * x + shift)) * kernel, C -> K
//
// The average is linear, so it is taken before the convolution, which then has a quarter of the pixels. Only the order
//   of additions differs.
// Layout: x is the block's input (C0 channels) and, behind those, its map (rows of `total` channels).
// How it is shared: a cluster has 32 results x kOutChannels. Each of its blocks multiplies a share of the channels.
//   Blocks send each other these sums, each result to a DSMEM slot of one block, which adds them in the order of the
//   blocks (bitwise repeatable).
// Why: only blocks that have the newest 32 channels wait for the last layer's kernel. The others need channels that
//   were there when this kernel started (densenet/block_kernel.cuh). All of them bring their weights before.
// Bound by: what is in front of the first product, the reading of x, and the exchange.
#ifndef JSC_CUDA_DENSENET_BLOCK_TRANSITION_CUH_
#define JSC_CUDA_DENSENET_BLOCK_TRANSITION_CUH_

#include "cuda/densenet/block_engine.cuh"
#include "cuda/densenet/block_kernel.cuh"

namespace jsc {

template <typename T>
struct TransitionTask {
  const T* x;       // [N, H, W, C0]
  const T* map;     // [N, H, W, total], of which channels [C0, total) are read
  const T* scale;   // [total]
  const T* shift;   // [total]
  const T* kernel;  // [total, output channels]
  T* out;           // [N, H / 2, W / 2, output channels]
  int first_channels, total, out_channels;
  int early_channels;         // of total, that no kernel writes that may still run
  int height, width, pixels;  // pixels: of the result
  int share;                  // channels of a block
  int out_channel_tiles;
};

template <typename T_, bool kPrecise_, int kOutChannels_>
struct TransitionShape {
  using T = T_;
  static constexpr bool kPrecise = kPrecise_;
  static constexpr int kOutChannels = kOutChannels_, kSplit = 8, kWarps = 8, kThreads = kWarps * 32;
  static constexpr int kPixels = 32, kBytes = static_cast<int>(sizeof(T));
  static constexpr int kStep = kPrecise ? 16 : 32 / kBytes;  // channels of a product
  static constexpr int kOutChannelWarps = kOutChannels / 16, kPixelWarps = kWarps / kOutChannelWarps;
  static constexpr int kTiles = kPixels / 8 / kPixelWarps;  // of a warp
  static constexpr int kSumStride = kOutChannels + 4;
  static constexpr int kSlotQuads = kPixels * kOutChannels / 4 / kSplit;

  // Shared memory; behind the slots the weights [output channel / 16, channel, 16] and the pixels [pixel, channel].
  static constexpr int kSums = kSplit * kSlotQuads * 16;  // [pixel, output channel]
  static constexpr int kWeights = kSums + kPixels * kSumStride * 4;
  static constexpr int WeightBytes(int share) { return share * kOutChannels * kBytes; }
  static constexpr int PixelStride(int share) { return share * kBytes + 16; }
  static constexpr int SharedBytes(int share) { return kWeights + WeightBytes(share) + kPixels * PixelStride(share); }
};

#if __CUDA_ARCH__ >= 900
// Where the window of a result lies in x and in the map, in pixels.
template <typename T>
__device__ __forceinline__ int FindWindow(const TransitionTask<T>& task, int pixel) {
  const int out_width = task.width / 2, row = pixel / out_width, out_height = task.height / 2;
  const int image = row / out_height, y = row - image * out_height, x = pixel - row * out_width;
  return (image * task.height + y * 2) * task.width + x * 2;
}

// relu(scale * x + shift) of four channels, averaged over the window.
template <typename T>
__device__ __forceinline__ float4 AverageWindow(const TransitionTask<T>& task, int window, int channel) {
  const bool is_x = channel < task.first_channels;
  const int stride = is_x ? task.first_channels : task.total;
  const T* at = (is_x ? task.x : task.map) + static_cast<int64_t>(window) * stride + channel;
  const int64_t below = static_cast<int64_t>(task.width) * stride;
  const float4 v[4] = {Load4(at), Load4(at + stride), Load4(at + below), Load4(at + below + stride)};
  const float4 scale = Load4(task.scale + channel), shift = Load4(task.shift + channel);
  const auto make = [](float a, float scale, float shift) { return 0.25f * AtLeast(fmaf(a, scale, shift), 0.f); };
  float4 y[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    y[i] = {make(v[i].x, scale.x, shift.x), make(v[i].y, scale.y, shift.y), make(v[i].z, scale.z, shift.z),
            make(v[i].w, scale.w, shift.w)};
  }
  return (y[0] + y[1]) + (y[2] + y[3]);
}

// Four output channels of a result by FFMA, where what is not finite has left NaN; see SumMidAgain.
template <class U>
__device__ __noinline__ float4 SumTransitionAgain(const TransitionTask<float>& task, int pixel, int out_channel) {
  WaitForKernelBefore();
  const int window = FindWindow(task, pixel);
  float4 sum = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 1
  for (int c = 0; c < task.total; c += 4) {
    const float4 v = AverageWindow(task, window, c);
    const float* w = task.kernel + static_cast<int64_t>(c) * task.out_channels + out_channel;
    sum = MultiplyAdd(v.x, Load4(w), sum);
    sum = MultiplyAdd(v.y, Load4(w + task.out_channels), sum);
    sum = MultiplyAdd(v.z, Load4(w + 2 * task.out_channels), sum);
    sum = MultiplyAdd(v.w, Load4(w + 3 * task.out_channels), sum);
  }
  return sum;
}

// The block's part of the kernel, with zeros beyond its channels and output channels; copied by all threads.
template <class U>
__device__ __forceinline__ void AskForTransitionWeights(const TransitionTask<typename U::T>& task, int first_channel,
                                                        int first_out_channel, unsigned char* weights) {
  constexpr int kPiece = 16 / U::kBytes, kPieces = U::kOutChannels / kPiece, kInTile = 16 / kPiece;
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x); i < task.share * kPieces; i += U::kThreads) {
    const int row = i / kPieces, piece = i % kPieces, channel = first_channel + row;
    const int out_channel = first_out_channel + piece * kPiece;
    int slot = piece % kInTile;
    if constexpr (U::kBytes == 2) slot ^= row / 4 % 2;
    const bool valid = channel < task.total && out_channel < task.out_channels;
    const auto* from = task.kernel + (valid ? static_cast<int64_t>(channel) * task.out_channels + out_channel : 0);
    CopyAsync<16>(weights + (piece / kInTile * task.share + row) * 16 * U::kBytes + slot * 16, from, 16, valid);
  }
  CommitCopies();
}

// The averages of the block's channels [begin, end) to [pixel, channel], with zeros beyond what there is.
template <class U>
__device__ __forceinline__ void StoreAverages(const TransitionTask<typename U::T>& task, int first_channel,
                                              int first_pixel, int begin, int end, unsigned char* pixels) {
  using T = typename U::T;
  const int quads = (end - begin) / 4;
#pragma unroll 2
  for (int i = static_cast<int>(threadIdx.x); i < U::kPixels * quads; i += U::kThreads) {
    const int row = i / quads, own = begin + (i - row * quads) * 4, channel = first_channel + own;
    float4 v = {0.f, 0.f, 0.f, 0.f};
    if (first_pixel + row < task.pixels && channel < task.total) {
      v = AverageWindow(task, FindWindow(task, first_pixel + row), channel);
    }
    if constexpr (U::kBytes == 4 && !U::kPrecise) v = RoundToTf32(v);
    Store4(reinterpret_cast<T*>(pixels + row * U::PixelStride(task.share)) + own, v);
  }
}

// Which sums a warp makes.
template <class U>
struct TransitionWarp {
  int out_channel_tile, first_pixel;
  __device__ __forceinline__ TransitionWarp()
      : out_channel_tile(static_cast<int>(threadIdx.x) / 32 % U::kOutChannelWarps),
        first_pixel(static_cast<int>(threadIdx.x) / 32 / U::kOutChannelWarps * U::kTiles * 8) {}
};

// sums += the block's channels [begin, end) of weights x pixels
template <class U>
__device__ __forceinline__ void MultiplyAverages(const TransitionTask<typename U::T>& task, int begin, int end,
                                                 const unsigned char* weights, const unsigned char* pixels,
                                                 float (&sums)[1][U::kTiles][4]) {
  using T = typename U::T;
  const TransitionWarp<U> warp;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const unsigned char* from = weights + warp.out_channel_tile * task.share * 16 * U::kBytes;
  const unsigned char* at =
      pixels + (warp.first_pixel + lane / 16 * 8 + lane % 8) * U::PixelStride(task.share) + lane / 8 % 2 * 16;
#pragma unroll 2
  for (int channel = begin; channel < end; channel += U::kStep) {
    DenseWeights<T, U::kPrecise> kernel[1];
    kernel[0].Load(from + channel * 16 * U::kBytes);
    if constexpr (U::kBytes == 4 && !U::kPrecise) {
#pragma unroll
      for (uint32_t& v : kernel[0].v) v = RoundToTf32(v);
    }
#pragma unroll
    for (int tile = 0; tile < U::kTiles; tile += 2) {
      const unsigned char* low = at + tile * 8 * U::PixelStride(task.share) + channel * U::kBytes;
      uint32_t words[2][U::kPrecise ? 4 : 2];
      LoadTiles<U::kPrecise>(words, low, low + 32, true);
      MultiplyTiles<T, U::kPrecise, 1, 2, U::kTiles>(kernel, words, sums, tile);
    }
  }
}

// Adds what the blocks of the cluster have sent to this one.
template <class U>
__device__ __forceinline__ void StoreTransition(const TransitionTask<typename U::T>& task, int rank, int first_pixel,
                                                int first_out_channel, const float4* slots) {
  constexpr int kOutChannelQuads = U::kOutChannels / 4;
  const int i = static_cast<int>(threadIdx.x);
  if (i >= U::kSlotQuads) return;
  float4 v = AddParts<U::kSplit>(slots + i, U::kSlotQuads);
  const int quad = rank * U::kSlotQuads + i, pixel = first_pixel + quad / kOutChannelQuads;
  const int out_channel = first_out_channel + quad % kOutChannelQuads * 4;
  if (pixel >= task.pixels || out_channel >= task.out_channels) return;
  if constexpr (U::kPrecise) {
    v = Restored(v, 2 * kTruncatedByWarps);
    if (!IsFinite(v)) v = SumTransitionAgain<U>(task, pixel, out_channel);
  }
  Store4(task.out + static_cast<int64_t>(pixel) * task.out_channels + out_channel, v);
}
#endif

template <class U>
__global__ void __launch_bounds__(U::kThreads, 2)
    TransitionKernel(const __grid_constant__ TransitionTask<typename U::T> task) {
#if __CUDA_ARCH__ >= 900
  using T = typename U::T;
  static_assert(U::kSlotQuads <= U::kThreads);
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ uint64_t slots_full;
  const int rank = static_cast<int>(blockIdx.x) % U::kSplit, cluster = static_cast<int>(blockIdx.x) / U::kSplit;
  const int first_pixel = cluster / task.out_channel_tiles * U::kPixels;
  const int first_out_channel = cluster % task.out_channel_tiles * U::kOutChannels;
  const int first_channel = rank * task.share;
  unsigned char *weights = shared + U::kWeights, *pixels = weights + U::WeightBytes(task.share);
  auto* slots = reinterpret_cast<float4*>(shared);
  auto* sums_at = reinterpret_cast<float*>(shared + U::kSums);
  if (threadIdx.x == 0) {
    InitBarrier(&slots_full);
    FenceBarriers();
  }
  __syncwarp();  // racecheck takes the barrier for made by another lane
  if (threadIdx.x == 0) ExpectBytes(&slots_full, U::kSplit * U::kSlotQuads * 16);
  ArriveAtCluster();
  AskForTransitionWeights<U>(task, first_channel, first_out_channel, weights);
  float sums[1][U::kTiles][4] = {};
  const int early = max(0, min(task.share, task.early_channels - first_channel));  // channels of this block
  StoreAverages<U>(task, first_channel, first_pixel, 0, early, pixels);
  WaitForCopies<0>();
  __syncthreads();
  MultiplyAverages<U>(task, 0, early, weights, pixels, sums);
  if (early < task.share) {
    WaitForKernelBefore();
    StoreAverages<U>(task, first_channel, first_pixel, early, task.share, pixels);
    __syncthreads();
    MultiplyAverages<U>(task, early, task.share, weights, pixels, sums);
  }
  const TransitionWarp<U> warp;
#pragma unroll
  for (int tile = 0; tile < U::kTiles; ++tile) {
    StoreFragment<T>(sums_at + (warp.first_pixel + tile * 8) * U::kSumStride + warp.out_channel_tile * 16,
                     U::kSumStride, sums[0][tile]);
  }
  WaitForCluster();  // all blocks' slots are there
  __syncthreads();
#pragma unroll
  for (int quad = static_cast<int>(threadIdx.x); quad < U::kSplit * U::kSlotQuads; quad += U::kThreads) {
    const float4 v = Load4(sums_at + quad / (U::kOutChannels / 4) * U::kSumStride + quad % (U::kOutChannels / 4) * 4);
    const int to = quad / U::kSlotQuads;
    SendToBlock(to, slots + rank * U::kSlotQuads + quad - to * U::kSlotQuads, v, &slots_full);
  }
  WaitForBytes(&slots_full, 0);
  StoreTransition<U>(task, rank, first_pixel, first_out_channel, slots);
#endif
}

}  // namespace jsc

#endif  // JSC_CUDA_DENSENET_BLOCK_TRANSITION_CUH_
