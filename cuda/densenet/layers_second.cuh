// The 3x3 convolution of a DenseNet layer, 128 -> 32, into its slice of the block's map.
//
//   out[channels C to C + 32] = mid * kernel2
//
// Why this tiling: 32 output channels are few for the tensor cores, which take 64 rows at least. So rows are pixels,
//   and columns are the output channels of the three taps of a kernel's row side by side. A pixel's three sums belong
//   to three results beside each other, which are added when all are there. So a product reads its pixels for three
//   taps, and once for each row of the kernel. Where a map has up to 64 columns a warpgroup has whole rows of it.
// The kernel stays in shared memory for all tiles of a block. At HIGHEST its pieces come through a pipeline.
// Bound by: the tensor cores and L2 on large maps; on small ones the copy of the kernel.
// Lost: three warpgroups, of more rows (2 % less at 56x56 and batch 32, up to a quarter more elsewhere).
#ifndef JSC_CUDA_DENSENET_LAYERS_SECOND_CUH_
#define JSC_CUDA_DENSENET_LAYERS_SECOND_CUH_

#include "cuda/densenet/layers_first.cuh"

namespace jsc {

template <typename T_, int kGroups_, bool kTf32x3_ = false>
struct SecondTile {
  using T = T_;
  static constexpr bool kTf32x3 = kTf32x3_;
  static constexpr int kPlanes = kTf32x3 ? 2 : 1;
  static constexpr int kPieceStages = 3, kPieceBytes = kPlanes * kSecondPiece;  // at 3xTF32: pieces of the kernel
  static constexpr int kKernelBytes = kTf32x3 ? kPieceStages * kPieceBytes : SecondBytes(sizeof(T), false);
  static constexpr int kGroups = kGroups_;
  static constexpr int kConsumers = kGroups * 128, kThreads = kConsumers + kWarp;
  static constexpr int kChunks = kMiddle / kChunk<T>;
  static constexpr int kEdgeFloats = 2 * 2 * kGrowth;  // of a warp: both sides, for two tiles
  static constexpr int kEdgeBytes = kGroups * 4 * kEdgeFloats * 4;
};

template <int kChunks>
struct SecondBarriers {
  uint64_t full[kMaxPipelineStages], empty[kMaxPipelineStages], kernel[kChunks], kernel_empty[kChunks];
};

struct SecondPlace {
  int image, y, x;  // of the tile's box; x may be -1
};

template <class U>
__device__ __forceinline__ SecondPlace FindSecondPlace(const SecondTask<typename U::T>& task, int tile) {
  const int row = tile / task.tiles_x, image = row / task.tiles_y;
  const int column = tile - row * task.tiles_x;
  return {image, (row - image * task.tiles_y) * task.rows * U::kGroups,
          task.tiles_x > 1 ? column * (task.box_width - 2) - 1 : 0};
}

#if __CUDA_ARCH__ >= 900
template <class U>
__device__ __forceinline__ void AskForSecond(const SecondTask<typename U::T>& task, const SecondMaps& maps,
                                             unsigned char* kernel, unsigned char* stages,
                                             SecondBarriers<U::kChunks>& barriers) {
  using T = typename U::T;
  if (IsElected()) {
    PrefetchMap(maps.mid);
#pragma unroll
    for (int chunk = 0; chunk < U::kChunks; ++chunk) {
      ExpectBytes(barriers.kernel + chunk, 3 * kSecondPiece);
      CopyBytes(kernel + chunk * 3 * kSecondPiece, task.kernel + chunk * 3 * kSecondPiece, 3 * kSecondPiece,
                barriers.kernel + chunk);
    }
  }
  __syncwarp();
  WaitForKernelBefore();
  LetNextKernelStart();
  StagePlace to;
#pragma unroll 1
  for (int tile = static_cast<int>(blockIdx.x); tile < task.tiles; tile += static_cast<int>(gridDim.x)) {
    const SecondPlace at = FindSecondPlace<U>(task, tile);
#pragma unroll 1
    for (int chunk = 0; chunk < U::kChunks; ++chunk) {
      WaitForBytes(barriers.empty + to.stage, to.parity ^ 1);
      if (IsElected()) {
        ExpectBytes(barriers.full + to.stage, task.copied_bytes);
        CopyBox(stages + to.stage * task.stage_bytes, &maps.mid, chunk * kChunk<T>, at.x, at.y - 1, at.image,
                barriers.full + to.stage);
      }
      __syncwarp();
      to.Advance(task.stages);
    }
  }
}

// The same at 3xTF32: pieces of the kernel, for one of its rows each, come in a pipeline of their own.
template <class U>
__device__ __forceinline__ void AskForSecondTf32x3(const SecondTask<float>& task, const SecondMaps& maps,
                                                   unsigned char* kernel, unsigned char* stages,
                                                   SecondBarriers<U::kChunks>& barriers) {
  if (IsElected()) PrefetchMap(maps.mid);
  __syncwarp();
  WaitForKernelBefore();
  LetNextKernelStart();
  StagePlace to, piece;
#pragma unroll 1
  for (int tile = static_cast<int>(blockIdx.x); tile < task.tiles; tile += static_cast<int>(gridDim.x)) {
    const SecondPlace at = FindSecondPlace<U>(task, tile);
#pragma unroll 1
    for (int chunk = 0; chunk < U::kChunks; ++chunk) {
      WaitForBytes(barriers.empty + to.stage, to.parity ^ 1);
      if (IsElected()) {
        ExpectBytes(barriers.full + to.stage, 2 * task.copied_bytes);
#pragma unroll
        for (int plane = 0; plane < 2; ++plane) {
          CopyBox(stages + (to.stage * 2 + plane) * task.stage_bytes, &maps.mid, chunk * kChunk<float>, at.x, at.y - 1,
                  at.image + plane * task.images, barriers.full + to.stage);
        }
      }
      __syncwarp();
      to.Advance(task.stages);
#pragma unroll 1
      for (int dy = 0; dy < 3; ++dy) {
        WaitForBytes(barriers.kernel_empty + piece.stage, piece.parity ^ 1);
        if (IsElected()) {
          ExpectBytes(barriers.kernel + piece.stage, U::kPieceBytes);
          CopyBytes(kernel + piece.stage * U::kPieceBytes, task.kernel + (chunk * 3 + dy) * U::kPieceBytes,
                    U::kPieceBytes, barriers.kernel + piece.stage);
        }
        __syncwarp();
        piece.Advance(U::kPieceStages);
      }
    }
  }
}

// Where a warpgroup is in both pipelines.
struct Tf32x3Place {
  StagePlace pixels, piece;
};

// A tile's sums at 3xTF32, each row of the kernel summed from zero.
template <class U>
__device__ __forceinline__ void MultiplyRows(const SecondTask<float>& task, uint32_t from, uint32_t kernel,
                                             SecondBarriers<U::kChunks>& barriers, Tf32x3Place& at,
                                             float (&sums)[kTapOutChannels / 2]) {
  using Product = PixelProduct<float, kTapOutChannels>;
  const uint32_t row_bytes = task.box_width * kRowBytes;
  const bool arrives = threadIdx.x % kWarp == 0;
#pragma unroll
  for (float& sum : sums) sum = 0.f;
#pragma unroll 1
  for (int chunk = 0; chunk < U::kChunks; ++chunk) {
    WaitForBytes(barriers.full + at.pixels.stage, at.pixels.parity);
    const uint32_t stage = from + at.pixels.stage * 2 * task.stage_bytes;
#pragma unroll 1
    for (int dy = 0; dy < 3; ++dy) {
      WaitForBytes(barriers.kernel + at.piece.stage, at.piece.parity);
      const uint64_t pixels = SwizzledMatrix(stage + dy * row_bytes, 1024);
      const uint64_t low = SwizzledMatrix(stage + task.stage_bytes + dy * row_bytes, 1024);
      const uint64_t weights = SwizzledMatrix(kernel + at.piece.stage * U::kPieceBytes, 1024);
      const uint64_t rest = weights + (kSecondPiece >> 4);
      float partial[kTapOutChannels / 2];
      BeginProducts();
#pragma unroll
      for (int k = 0; k < 4; ++k) Product::Multiply(partial, low + k * 2, weights + k * 2, k > 0);
#pragma unroll
      for (int k = 0; k < 4; ++k) Product::Multiply(partial, pixels + k * 2, rest + k * 2, true);
#pragma unroll
      for (int k = 0; k < 4; ++k) Product::Multiply(partial, pixels + k * 2, weights + k * 2, true);
      CommitProducts();
      WaitForProducts<0>();
      if (arrives) Arrive(SharedAddress(barriers.kernel_empty + at.piece.stage));
      at.piece.Advance(U::kPieceStages);
      PinSums(partial);
#pragma unroll
      for (int i = 0; i < kTapOutChannels / 2; ++i) sums[i] += partial[i];
    }
    if (arrives) Arrive(SharedAddress(barriers.empty + at.pixels.stage));
    at.pixels.Advance(task.stages);
  }
}

// A result in float32. Not inlined: it runs where there are infinities or NaN.
__device__ __noinline__ float SumAgain(const SecondTask<float>& task, int image, int y, int x, int out_channel) {
  const int64_t plane = static_cast<int64_t>(task.images) * task.height * task.width * kMiddle;
  float sum = 0.f;
#pragma unroll 1
  for (int tap = 0; tap < 9; ++tap) {
    const int row = y + tap / 3 - 1, column = x + tap % 3 - 1;
    if (row < 0 || row >= task.height || column < 0 || column >= task.width) continue;
    const float* from = task.mid + (static_cast<int64_t>(image * task.height + row) * task.width + column) * kMiddle;
    const float* weight = task.kernel2 + tap * kMiddle * kGrowth + out_channel;
#pragma unroll 1
    for (int c = 0; c < kMiddle; ++c) {
      const float low = from[plane + c];
      sum = fmaf(IsFinite(low) ? from[c] + low : low, weight[c * kGrowth], sum);
    }
  }
  return sum;
}

// Four results of 16-bit types, or two of float32, of a pair of matrices of eight weights.
template <typename T>
__device__ __forceinline__ void StorePair(T* to, float2 low, float2 high, bool yes) {
  if constexpr (sizeof(T) == 4) {
    if (!yes) return;
    const int quad = threadIdx.x % 4;
    *reinterpret_cast<float2*>(to + quad * 2) = low;
    *reinterpret_cast<float2*>(to + 8 + quad * 2) = high;
  } else {
    const uint2 four = SwapPairs(Pack<T>(low.x, low.y), Pack<T>(high.x, high.y));
    if (yes) *reinterpret_cast<uint2*>(to + SwappedQuad()) = four;
  }
}

// Adds each result's sums of three pixels and stores it. edges: of the warpgroup, [tile parity, warp, side, output
// channel].
template <class U>
__device__ __forceinline__ void StoreSecond(const SecondTask<typename U::T>& task, const SecondPlace& at,
                                            const int (&rows)[2], const int (&columns)[2], float* edges, int parity,
                                            const float (&sums)[kTapOutChannels / 2]) {
  using T = typename U::T;
  const int lane = threadIdx.x % kWarp, quad = lane % 4, warp = threadIdx.x / kWarp % 4, group = threadIdx.x / 128;
  edges += parity * (4 * 2 * kGrowth);
  const auto edge = [&](int of_warp, int side) { return edges + (of_warp * 2 + side) * kGrowth + quad * 2; };
  if (lane / 4 == 7) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      *reinterpret_cast<float2*>(edge(warp, 0) + j * 8) = make_float2(sums[j * 4 + 2], sums[j * 4 + 3]);
    }
  }
  if (lane / 4 == 0) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      *reinterpret_cast<float2*>(edge(warp, 1) + j * 8) = make_float2(sums[(j + 8) * 4], sums[(j + 8) * 4 + 1]);
    }
  }
  asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory");
  const bool split = task.tiles_x > 1;
  bool inside[2];
  T* to[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int y = at.y + group * task.rows + rows[h], x = at.x + columns[h];
    inside[h] = rows[h] < task.rows && y < task.height && x < task.width;
    if (split) inside[h] = inside[h] && columns[h] > 0 && columns[h] < task.box_width - 1;
    to[h] = task.out + (static_cast<int64_t>(at.image * task.height + y) * task.width + x) * task.total;
  }
#pragma unroll
  for (int j = 0; j < 4; j += 2) {
    float2 found[2][2];  // [h][j]
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float v[2][2];  // [h][e]
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float* left = sums + (j + i) * 4 + e;
        const float* middle = sums + (j + i + 4) * 4 + e;
        const float* right = sums + (j + i + 8) * 4 + e;
        const float up0 = __shfl_sync(0xffffffffu, left[0], lane + 28),
                    up1 = __shfl_sync(0xffffffffu, left[2], lane + 28);
        const float down0 = __shfl_sync(0xffffffffu, right[0], lane + 4);
        const float down1 = __shfl_sync(0xffffffffu, right[2], lane + 4);
        float before[2] = {up0, up1}, after[2] = {down0, down1};
        if (lane / 4 == 0) {
          before[0] = warp > 0 ? edge(warp - 1, 0)[(j + i) * 8 + e] : 0.f;
          before[1] = up0;
        }
        if (lane / 4 == 7) {
          after[0] = down1;
          after[1] = warp < 3 ? edge(warp + 1, 1)[(j + i) * 8 + e] : 0.f;
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float outer = (columns[h] > 0 ? before[h] : 0.f) + (columns[h] < task.box_width - 1 ? after[h] : 0.f);
          v[h][e] = middle[h * 2] + outer;
        }
      }
      found[0][i] = make_float2(v[0][0], v[0][1]);
      found[1][i] = make_float2(v[1][0], v[1][1]);
    }
    if constexpr (U::kTf32x3) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float* both[2] = {&found[h][i].x, &found[h][i].y};
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            *both[e] = Restored(*both[e], 4 * kTruncatedByWarpgroups);
            if (inside[h] && !IsFinite(*both[e])) {
              *both[e] = SumAgain(task, at.image, at.y + group * task.rows + rows[h], at.x + columns[h],
                                  (j + i) * 8 + quad * 2 + e);
            }
          }
        }
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) StorePair(to[h] + j * 8, found[h][0], found[h][1], inside[h]);
  }
}
#endif

template <class U>
__global__ void __launch_bounds__(U::kThreads, 1)
    SecondKernel(const __grid_constant__ SecondTask<typename U::T> task, const __grid_constant__ SecondMaps maps) {
#if __CUDA_ARCH__ >= 900
  using T = typename U::T;
  extern __shared__ unsigned char shared[];
  __shared__ SecondBarriers<U::kChunks> barriers;
  unsigned char* kernel = shared + (-SharedAddress(shared) & (kSwizzleBytes - 1));
  unsigned char* stages = kernel + U::kKernelBytes;
  auto* edges = reinterpret_cast<float*>(stages + task.stages * U::kPlanes * task.stage_bytes);
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarp, 0);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kMaxPipelineStages; ++i) {
      InitBarrier(barriers.full + i);
      InitBarrier(barriers.empty + i, U::kGroups * 4);
    }
    for (int i = 0; i < U::kChunks; ++i) {
      InitBarrier(barriers.kernel + i);
      InitBarrier(barriers.kernel_empty + i, U::kGroups * 4);
    }
    FenceBarriers();
  }
  __syncthreads();
  if (warp == U::kConsumers / kWarp) {
    if constexpr (U::kTf32x3) {
      AskForSecondTf32x3<U>(task, maps, kernel, stages, barriers);
    } else {
      AskForSecond<U>(task, maps, kernel, stages, barriers);
    }
  } else {
    const int lane = threadIdx.x % kWarp, group = warp / 4;
    int rows[2], columns[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = warp % 4 * 16 + h * 8 + lane / 4;
      rows[h] = row / task.box_width;
      columns[h] = row - rows[h] * task.box_width;
    }
    const uint32_t row_bytes = task.box_width * kRowBytes;
    const uint32_t from = SharedAddress(stages) + group * task.rows * row_bytes;
    StagePlace place;
    Tf32x3Place tf32x3_place;
    int parity = 0;
    bool is_new = true;  // the kernel
#pragma unroll 1
    for (int tile = static_cast<int>(blockIdx.x); tile < task.tiles; tile += static_cast<int>(gridDim.x)) {
      float sums[kTapOutChannels / 2];
      if constexpr (U::kTf32x3) {
        MultiplyRows<U>(task, from, SharedAddress(kernel), barriers, tf32x3_place, sums);
      } else {
        uint32_t read = 0;
#pragma unroll 1
        for (int chunk = 0; chunk < U::kChunks; ++chunk) {
          if (is_new) WaitForBytes(barriers.kernel + chunk, 0);
          WaitForBytes(barriers.full + place.stage, place.parity);
          const uint32_t stage = from + place.stage * task.stage_bytes;
          const uint64_t weights = SwizzledMatrix(SharedAddress(kernel) + chunk * 3 * kSecondPiece, 1024);
          BeginProducts();
#pragma unroll
          for (int dy = 0; dy < 3; ++dy) {
            const uint64_t pixels = SwizzledMatrix(stage + dy * row_bytes, 1024);
#pragma unroll
            for (int k = 0; k < 4; ++k) {
              PixelProduct<T, kTapOutChannels>::Multiply(
                  sums, pixels + k * 2, weights + (dy * kSecondPiece >> 4) + k * 2, chunk + dy + k > 0);
            }
          }
          CommitProducts();
          WaitForProducts<1>();
          if (read != 0 && lane == 0) Arrive(read);
          read = SharedAddress(barriers.empty + place.stage);
          place.Advance(task.stages);
        }
        is_new = false;
        WaitForProducts<0>();
        PinSums(sums);
        if (lane == 0) Arrive(read);
      }
      StoreSecond<U>(task, FindSecondPlace<U>(task, tile), rows, columns, edges + group * 4 * U::kEdgeFloats, parity,
                     sums);
      parity ^= 1;
    }
  }
#endif
}

}  // namespace jsc

#endif  // JSC_CUDA_DENSENET_LAYERS_SECOND_CUH_
