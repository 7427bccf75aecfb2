// The 1x1 convolution of a DenseNet layer, C -> 128, with the batch norm and ReLU in front of it.
//
//   mid = relu(relu(scale * x + shift) * kernel1 + bias1)
//
// Layout: x is channels [0, C) of the block's map, rows of `total` channels, but for the first C0. Those are read where
//   they came from, and the first layer copies them into the map, from its stages.
// Why this tiling: pixels are the rows of a product, which wgmma takes from registers. So a pixel's values go from
//   their stage through registers, where they are scaled, shifted and cut off, into the product, with no way back
//   through shared memory. Weights come in 128-byte rows of channels (PrepareKernel). On small maps two or four
//   warpgroups share a tile's chunks of channels (sliced-K), and add their sums in a fixed order.
// float32 at HIGHEST: 3xTF32, as in dense_conv/wgmma/tf32x3.cuh, and mid is written as high and low part. What is not
//   finite is computed again by FFMA.
// Bound by: device memory on large maps, the run of one chunk's steps on small ones.
// Lost: operands of the next chunk made while products are in flight; see MultiplyTile.
#ifndef JSC_CUDA_DENSENET_LAYERS_FIRST_CUH_
#define JSC_CUDA_DENSENET_LAYERS_FIRST_CUH_

#include "cuda/core/epilogue.cuh"
#include "cuda/core/low_parts.cuh"
#include "cuda/core/truncation.cuh"
#include "cuda/densenet/layers_operands.cuh"

namespace jsc {

#if __CUDA_ARCH__ >= 900
// The sum of a pixel and a middle channel, in float32. Not inlined: it runs where there are infinities or NaN.
template <typename T>
__device__ __noinline__ float SumAgain(const FirstTask<T>& task, int pixel, int out_channel) {
  const T* x = task.x + static_cast<int64_t>(pixel) * task.first_channels;
  const T* block = task.block + static_cast<int64_t>(pixel) * task.total;
  float sum = 0.f;
#pragma unroll 1
  for (int c = 0; c < task.channels; ++c) {
    const float value = ToFloat(c < task.first_channels ? x[c] : block[c]);
    const float y = fmaf(value, ToFloat(task.scale[c]), ToFloat(task.shift[c]));
    sum = fmaf(Relu(y), ToFloat(task.kernel1[static_cast<int64_t>(c) * kMiddle + out_channel]), sum);
  }
  return sum;
}

// bias and ReLU of a warp's pixels, to mid.
template <class U>
__device__ __forceinline__ void StoreMiddle(const FirstTask<typename U::T>& task, int pixel, int first_out_channel,
                                            const float* bias, const float (&sums)[U::kOutChannels / 2]) {
  using T = typename U::T;
  const int lane = threadIdx.x % kWarp, quad = lane % 4;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = pixel + h * 8 + lane / 4;
    T* to = task.mid + static_cast<int64_t>(row) * kMiddle + first_out_channel;
#pragma unroll
    for (int j = 0; j < U::kOutChannels / 8; j += 2) {
      float v[2][2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float2 added = *reinterpret_cast<const float2*>(bias + (j + i) * 8 + quad * 2);
        float both[2] = {sums[(j + i) * 4 + h * 2], sums[(j + i) * 4 + h * 2 + 1]};
        if constexpr (U::kTf32x3) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            both[e] = Restored(both[e], 4 * kTruncatedByWarpgroups);
            if (row < task.pixels && !IsFinite(both[e])) {
              both[e] = SumAgain(task, row, first_out_channel + (j + i) * 8 + quad * 2 + e);
            }
          }
        }
        v[i][0] = Finish(both[0], added.x, true);
        v[i][1] = Finish(both[1], added.y, true);
      }
      if constexpr (sizeof(T) == 4) {
        if (row >= task.pixels) continue;
        if constexpr (U::kTf32x3) {
          const int64_t plane = static_cast<int64_t>(task.pixels) * kMiddle;
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float low[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              const float high = CutOff(v[i][e]);
              low[e] = v[i][e];  // NaN may be cut off to infinity
              if (IsFinite(v[i][e])) low[e] = CutOff(LowPart(v[i][e]));
              v[i][e] = high;
            }
            *reinterpret_cast<float2*>(to + plane + j * 8 + i * 8 + quad * 2) = make_float2(low[0], low[1]);
          }
        }
        *reinterpret_cast<float2*>(to + j * 8 + quad * 2) = make_float2(v[0][0], v[0][1]);
        *reinterpret_cast<float2*>(to + j * 8 + 8 + quad * 2) = make_float2(v[1][0], v[1][1]);
      } else {  // lanes swap pairs, for four neighbouring output channels each
        const uint2 four = SwapPairs(Pack<T>(v[0][0], v[0][1]), Pack<T>(v[1][0], v[1][1]));
        if (row < task.pixels) *reinterpret_cast<uint2*>(to + j * 8 + SwappedQuad()) = four;
      }
    }
  }
}

template <class U>
struct FirstWalk {
  const FirstTask<typename U::T>& task;
  FirstBarriers& barriers;
  StagePlace place;

  __device__ __forceinline__ void Skip(int chunks) {
    place.stage += chunks;
    while (place.stage >= task.stages) {
      place.stage -= task.stages;
      place.parity ^= 1;
    }
  }
};

// All copies, by one warp.
template <class U>
__device__ __forceinline__ void AskForFirst(const FirstTask<typename U::T>& task, const FirstMaps& maps,
                                            const DenseChunks& chunks, unsigned char* stages, FirstBarriers& barriers) {
  using T = typename U::T;
  StagePlace to;
  // What the kernel in front writes is x's last channels; of the first layer, kernels.
  bool waits = true;
  const int wait_at = task.is_first ? 0 : chunks.all - 1;
#pragma unroll 1
  for (int tile = static_cast<int>(blockIdx.x); tile < task.tiles; tile += static_cast<int>(gridDim.x)) {
    const int pixel = tile / U::kShares * U::kPixels, out_channel = tile % U::kShares * U::kOutChannels;
#pragma unroll 1
    for (int chunk = 0; chunk < chunks.all; ++chunk) {
      WaitForBytes(barriers.empty + to.stage, to.parity ^ 1);
      if (waits && chunk == wait_at) {
        WaitForKernelBefore();
        LetNextKernelStart();
        waits = false;
      }
      if (IsElected()) {
        uint64_t* full = barriers.full + to.stage;
        unsigned char* stage = stages + to.stage * U::kStageBytes;
        const bool of_x = chunk < chunks.of_x;
        ExpectBytes(full, U::kStageBytes);
        CopyBox(stage, of_x ? &maps.x : &maps.block,
                of_x ? chunk * kChunk<T> : task.first_channels + (chunk - chunks.of_x) * kChunk<T>, pixel, full);
#pragma unroll
        for (int plane = 0; plane < U::kPlanes; ++plane) {
          CopyBytes(
              stage + U::kPixelBytes + plane * U::kPlaneBytes,
              task.kernel + static_cast<int64_t>(chunk * U::kPlanes + plane) * kFirstPiece + out_channel * kRowBytes,
              U::kPlaneBytes, full);
        }
      }
      __syncwarp();
      to.Advance(task.stages);
    }
  }
}

// x into the block's map, from the stages, by one warp of the block's first layer.
template <class U>
__device__ __forceinline__ void CopyStages(const FirstTask<typename U::T>& task, const FirstMaps& maps,
                                           const DenseChunks& chunks, const unsigned char* stages,
                                           FirstBarriers& barriers) {
  using T = typename U::T;
  StagePlace from;
#pragma unroll 1
  for (int tile = static_cast<int>(blockIdx.x); tile < task.tiles; tile += static_cast<int>(gridDim.x)) {
#pragma unroll 1
    for (int chunk = 0; chunk < chunks.all; ++chunk) {
      WaitForBytes(barriers.full + from.stage, from.parity);
      if (IsElected()) {
        if (tile % U::kShares == 0) {
          StoreBox(&maps.block, chunk * kChunk<T>, tile / U::kShares * U::kPixels,
                   stages + from.stage * U::kStageBytes);
          asm volatile("cp.async.bulk.commit_group;\n cp.async.bulk.wait_group.read 0;" ::: "memory");
        }
        Arrive(SharedAddress(barriers.empty + from.stage));
      }
      __syncwarp();
      from.Advance(task.stages);
    }
  }
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// The compiler is not to make operands after this place.
__device__ __forceinline__ void PinOperands(uint32_t (&a)[16]) {
#pragma unroll
  for (uint32_t& word : a) asm volatile("" : "+r"(word)::"memory");
}

// A chunk's operands, as soon as it is there.
template <class U>
__device__ __forceinline__ void LoadChunk(FirstWalk<U>& walk, uint32_t stages, uint32_t row, uint32_t table,
                                          bool is_half, uint32_t (&a)[16]) {
  using T = typename U::T;
  WaitForBytes(walk.barriers.full + walk.place.stage, walk.place.parity);
  MakeOperands<T, U::kTf32x3>(stages + walk.place.stage * U::kStageBytes + row, table, a);
  if (sizeof(T) == 2 && is_half) {  // beyond them is what nobody has written yet
#pragma unroll
    for (int i = 8; i < 16; ++i) a[i] = 0;
  }
}

// Its products, issued.
template <class U>
__device__ __forceinline__ void MultiplyChunk(FirstWalk<U>& walk, uint32_t stages, bool add, const uint32_t (&a)[16],
                                              float (&sums)[U::kOutChannels / 2]) {
  const uint64_t weights = SwizzledMatrix(stages + walk.place.stage * U::kStageBytes + U::kPixelBytes, 1024);
  BeginProducts();
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    PixelProduct<typename U::T, U::kOutChannels>::Multiply(sums, a + 4 * k, weights + k * 2, add || k > 0);
  }
  CommitProducts();
}

// The same at 3xTF32: the low products first, summed from zero, since tensor cores truncate when they add.
template <class U>
__device__ __forceinline__ void MultiplyTf32x3(FirstWalk<U>& walk, uint32_t stages, const uint32_t (&high)[16],
                                               const uint32_t (&low)[16], float (&partial)[U::kOutChannels / 2]) {
  using Product = PixelProduct<typename U::T, U::kOutChannels>;
  const uint32_t stage = stages + walk.place.stage * U::kStageBytes + U::kPixelBytes;
  const uint64_t weights = SwizzledMatrix(stage, 1024), rest = SwizzledMatrix(stage + U::kPlaneBytes, 1024);
  BeginProducts();
#pragma unroll
  for (int k = 0; k < 4; ++k) Product::Multiply(partial, low + 4 * k, weights + k * 2, k > 0);
#pragma unroll
  for (int k = 0; k < 4; ++k) Product::Multiply(partial, high + 4 * k, rest + k * 2, true);
#pragma unroll
  for (int k = 0; k < 4; ++k) Product::Multiply(partial, high + 4 * k, weights + k * 2, true);
  CommitProducts();
}

// What a thread keeps for all tiles. row: of the pixels' stage; table: of the calling thread.
struct FirstThread {
  uint32_t stages, row, table;
  int split;  // of a tile's chunks, those that its warpgroup takes: split, split + kSplit, ...
};

// The sums of a warpgroup's chunks of a tile. Products are waited for right after they are issued, while other
// warpgroups make operands. ptxas 13.0 gives the registers of operands away while products are still queued.
template <class U>
__device__ __forceinline__ void MultiplyTile(FirstWalk<U>& walk, const DenseChunks& chunks, const FirstThread& thread,
                                             float (&sums)[U::kOutChannels / 2]) {
  using T = typename U::T;
  const auto& task = walk.task;
  // A chunk of 16-bit types may hold half as many channels.
  const auto is_half = [&](int chunk) {
    const int left = chunk < chunks.of_x ? task.first_channels - chunk * kChunk<T>
                                         : task.channels - task.first_channels - (chunk - chunks.of_x) * kChunk<T>;
    return left < kChunk<T>;
  };
  if constexpr (U::kSplit > 1) {  // there may be no chunk for it
#pragma unroll
    for (float& sum : sums) sum = 0.f;
  }
#pragma unroll 1
  for (int chunk = thread.split; chunk < chunks.all; chunk += U::kSplit) {
    uint32_t a[16];
    LoadChunk<U>(walk, thread.stages, thread.row, thread.table + chunk * U::kTableBytes, is_half(chunk), a);
    PinOperands(a);
    MultiplyChunk<U>(walk, thread.stages, U::kSplit > 1 || chunk > 0, a, sums);
    WaitForProducts<0>();
    PinSums(sums);
    if (threadIdx.x % kWarp == 0) Arrive(SharedAddress(walk.barriers.empty + walk.place.stage));
    walk.Skip(min(U::kSplit, chunks.all - chunk));
  }
}

// The same at 3xTF32.
template <class U>
__device__ __forceinline__ void MultiplyTileTf32x3(FirstWalk<U>& walk, const DenseChunks& chunks,
                                                   const FirstThread& thread, float (&sums)[U::kOutChannels / 2]) {
#pragma unroll
  for (float& sum : sums) sum = 0.f;
#pragma unroll 1
  for (int chunk = thread.split; chunk < chunks.all; chunk += U::kSplit) {
    uint32_t high[16], low[16];
    float partial[U::kOutChannels / 2];
    LoadChunk<U>(walk, thread.stages, thread.row, thread.table + chunk * U::kTableBytes, false, high);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float value = __uint_as_float(high[i]);
      high[i] = (high[i] + 0x1000u) & 0xffffe000u;
      low[i] = __float_as_uint(value - __uint_as_float(high[i]));
    }
    PinOperands(high);
    PinOperands(low);
    MultiplyTf32x3<U>(walk, thread.stages, high, low, partial);
    WaitForProducts<0>();
    PinSums(partial);
    if (threadIdx.x % kWarp == 0) Arrive(SharedAddress(walk.barriers.empty + walk.place.stage));
    walk.Skip(min(U::kSplit, chunks.all - chunk));
#pragma unroll
    for (int i = 0; i < U::kOutChannels / 2; ++i) sums[i] += partial[i];
  }
}

// Adds the sums of the warpgroups that share a tile, in their order, in the first one. others: [kSplit - 1, sum,
// thread].
template <class U>
__device__ __forceinline__ void AddSplits(int split, float* others, float (&sums)[U::kOutChannels / 2]) {
  constexpr int kSums = U::kOutChannels / 2;
  float* mine = others + threadIdx.x % 128;
  if (split > 0) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) mine[((split - 1) * kSums + i) * 128] = sums[i];
  }
  asm volatile("bar.sync 1, %0;" ::"n"(U::kConsumers) : "memory");
  if (split == 0) {
#pragma unroll
    for (int from = 1; from < U::kSplit; ++from) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) sums[i] += mine[((from - 1) * kSums + i) * 128];
    }
  }
  asm volatile("bar.sync 1, %0;" ::"n"(U::kConsumers) : "memory");  // they are read
}
#endif

template <class U>
__global__ void __launch_bounds__(U::kThreads, 1)
    FirstKernel(const __grid_constant__ FirstTask<typename U::T> task, const __grid_constant__ FirstMaps maps) {
#if __CUDA_ARCH__ >= 900
  using T = typename U::T;
  extern __shared__ unsigned char shared[];
  __shared__ FirstBarriers barriers;
  unsigned char* stages = shared + (-SharedAddress(shared) & (kSwizzleBytes - 1));
  const DenseChunks chunks(task.first_channels, task.channels, kChunk<T>);
  unsigned char* table = stages + task.stages * U::kStageBytes;
  auto* bias = reinterpret_cast<float*>(table + chunks.all * U::kTableBytes);
  float* others = bias + kMiddle;
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarp, 0);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kMaxPipelineStages; ++i) {
      InitBarrier(barriers.full + i);
      InitBarrier(barriers.empty + i, U::kGroups * 4 + (task.is_first ? 1 : 0));
    }
    FenceBarriers();
  }
  MakeTable<U>(task, chunks, table);
  if (threadIdx.x < kMiddle) bias[threadIdx.x] = ToFloat(task.bias[threadIdx.x]);
  __syncthreads();
  if (warp == U::kConsumers / kWarp) {
    AskForFirst<U>(task, maps, chunks, stages, barriers);
  } else if (warp == U::kConsumers / kWarp + 1) {
    if (task.is_first) CopyStages<U>(task, maps, chunks, stages, barriers);
  } else {
    const int lane = threadIdx.x % kWarp, in_tile = (U::kSplit > 1 ? warp % 4 : warp) * 16;
    const int row = (in_tile + lane % 16) * kRowBytes + ((lane / 16 ^ (lane & 7)) << 4);
    const FirstThread thread{SharedAddress(stages), static_cast<uint32_t>(row), SharedAddress(table) + lane % 4 * 16,
                             U::kSplit > 1 ? warp / 4 : 0};
    FirstWalk<U> walk{task, barriers};
#pragma unroll 1
    for (int tile = static_cast<int>(blockIdx.x); tile < task.tiles; tile += static_cast<int>(gridDim.x)) {
      float sums[U::kOutChannels / 2];
      walk.Skip(min(thread.split, chunks.all));
      if constexpr (U::kTf32x3) {
        MultiplyTileTf32x3<U>(walk, chunks, thread, sums);
      } else {
        MultiplyTile<U>(walk, chunks, thread, sums);
      }
      if constexpr (U::kSplit > 1) AddSplits<U>(thread.split, others, sums);
      if (thread.split > 0) continue;
      WaitForKernelBefore();  // it may still read mid
      const int out_channel = tile % U::kShares * U::kOutChannels;
      StoreMiddle<U>(task, tile / U::kShares * U::kPixels + in_tile, out_channel, bias + out_channel, sums);
    }
  }
#endif
}

}  // namespace jsc

#endif  // JSC_CUDA_DENSENET_LAYERS_FIRST_CUH_
