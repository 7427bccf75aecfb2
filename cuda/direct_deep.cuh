// The direct convolution of small maps: the warps of a block share the reduction axis of one small tile; dense.
//
//   out[pixel][filter] = relu(sum over taps and channels of x * kernel + bias + residual)
//
// Why: a map of 7x7 or 14x14 gives tiles of 64 x 64 to few blocks, which then share them in clusters and wait for each
//   other's sums; starting a kernel, its first copies and that meeting are most of such a layer's time. Here a tile is
//   8 or 16 pixels by 16 or 32 filters, so there are blocks enough without clusters, and the axis is shared by the
//   eight warps of a block, which meet once, in shared memory.
// A step is 64 bytes of the axis. Steps are dealt to warps in turn; each warp copies its own into a ring of its own and
//   waits for no other before all sums are there. They are added in the order of the warps: bitwise repeatable.
// Code that runs once costs its fetch: one loop has both the copies and the products, so that either is there once.
// Filters are the rows of the products and pixels their columns, so that a tile may be 8 pixels wide.
// Bound by: launch, the first fetch of code and parameters, copies (each block reads its pixels and filters itself, so
//   deep or large maps are faster by tiles of 64 and more, direct_warpgroup.cuh).
#ifndef JSC_CUDA_DIRECT_DEEP_CUH_
#define JSC_CUDA_DIRECT_DEEP_CUH_

#include "direct_split.cuh"
#include "direct_sums.cuh"

namespace jsc {

// The same for all steps of a lane's copies: of the pixels of its rows, where their windows begin.
template <class U, typename T>
struct DeepSource {
  static constexpr int kElements = U::kVector ? 16 / static_cast<int>(sizeof(T)) : 1;  // of a copy
  static constexpr int kPixelLanes = U::kDepth / kElements, kPixelStep = kWarp / kPixelLanes;
  static constexpr int kFilterLanes = U::kFilters / kElements, kFilterStep = kWarp / kFilterLanes;
  static constexpr int kPixelCopies = U::kPixels / kPixelStep, kFilterCopies = U::kDepth / kFilterStep;
  static_assert(kWarp % kPixelLanes == 0 && kWarp % kFilterLanes == 0, "a lane keeps one column of copies");
  static_assert(U::kPixels % kPixelStep == 0 && U::kDepth % kFilterStep == 0, "all lanes copy as much");

  const DirectTask<T>& task;
  const T* kernel;  // of the stack and group, at the lane's filters
  WindowStart<T> windows[kPixelCopies];
  int lane;
  bool has_filters;

  __device__ __forceinline__ DeepSource(const DirectTask<T>& task, const DirectPlace& at)
      : task(task), lane(static_cast<int>(threadIdx.x) % kWarp) {
    const int filter = at.feature + lane % kFilterLanes * kElements;
    has_filters = filter < task.group_features;
    kernel = task.kernel + static_cast<int64_t>(at.stack) * task.depth * task.features +
             at.group * task.group_features + filter;
    const T* x = task.x + at.stack * task.images_per_stack * task.height * task.width * task.channels +
                 at.group * task.group_channels;
#pragma unroll
    for (int i = 0; i < kPixelCopies; ++i) {
      windows[i] = FindWindow(task, x, at.pixel + lane / kPixelLanes + i * kPixelStep);
    }
  }

  // Step number `step` of the axis to a warp's stage.
  __device__ __forceinline__ void Copy(int step, unsigned char* stage) const {
    const int row = step * U::kDepth + lane / kFilterLanes;
#pragma unroll
    for (int i = 0; i < kFilterCopies; ++i) {
      const int k = row + i * kFilterStep;
      CopyPiece<U>(stage + U::Filter(lane / kFilterLanes + i * kFilterStep, lane % kFilterLanes * kElements),
                   kernel + static_cast<int64_t>(k) * task.features, has_filters && k < task.depth);
    }
    const int column = lane % kPixelLanes * kElements, k = step * U::kDepth + column;
    const Reach reach = FindReach(task, k);
#pragma unroll
    for (int i = 0; i < kPixelCopies; ++i) {
      const WindowStart<T>& window = windows[i];
      CopyPiece<U>(stage + U::Pixel(lane / kPixelLanes + i * kPixelStep, column), window.first + reach.offset,
                   k < task.depth && Inside(task, window.y + reach.dy, window.x + reach.dx));
    }
  }
};

// A warp's sums of its steps: sums[rows of 16 filters][columns of 8 pixels], as mma.sync has them.
template <class U, typename T>
struct DeepEngine {
  static constexpr int kRows = U::kFilters / 16, kColumns = U::kPixels / 8;
  static constexpr int kSlices = U::kDepth * static_cast<int>(sizeof(T)) / 32;  // of a step, each 32 bytes deep
  static constexpr int kSlice = 32 / static_cast<int>(sizeof(T));
  float sums[kRows][kColumns][4] = {};

  static __device__ __forceinline__ int Lane() { return static_cast<int>(threadIdx.x) % kWarp; }

  static __device__ __forceinline__ uint32_t Word(const unsigned char* p) {
    return *reinterpret_cast<const uint32_t*>(p);
  }
  static __device__ __forceinline__ void LoadFilters(const unsigned char* stage, int slice, int row, uint32_t (&a)[4]) {
    if constexpr (sizeof(T) == 4) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        a[e] = Word(stage + U::Filter(slice * kSlice + Lane() % 4 + e / 2 * 4, row * 16 + Lane() / 4 + e % 2 * 8));
      }
    } else {
      const int k = slice * kSlice + Lane() / 16 * 8 + Lane() % 8;
      LoadMatricesTransposed(a, stage + U::Filter(k, row * 16 + Lane() / 8 % 2 * 8));
    }
  }
  static __device__ __forceinline__ void LoadPixels(const unsigned char* stage, int slice, int column,
                                                    uint32_t (&b)[2]) {
    constexpr int kWord = 4 / static_cast<int>(sizeof(T));  // elements
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      b[half] = Word(stage + U::Pixel(column * 8 + Lane() / 4, slice * kSlice + (Lane() % 4 + half * 4) * kWord));
    }
  }

  __device__ __forceinline__ void Multiply(const unsigned char* stage) {
    if constexpr (U::kSplit) {
      MultiplyParts(stage);
    } else {
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) {
        uint32_t b[kColumns][2];
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
          LoadPixels(stage, slice, j, b[j]);
          if constexpr (sizeof(T) == 4) b[j][0] = RoundToTf32(b[j][0]), b[j][1] = RoundToTf32(b[j][1]);
        }
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          uint32_t a[4];
          LoadFilters(stage, slice, i, a);
          if constexpr (sizeof(T) == 4) {
#pragma unroll
            for (int e = 0; e < 4; ++e) a[e] = RoundToTf32(a[e]);
          }
#pragma unroll
          for (int j = 0; j < kColumns; ++j) MultiplyFragment(sums[i][j], a, b[j][0], b[j][1], T{});
        }
      }
    }
  }

  // As SplitEngine (direct_split.cuh) has it, with sums of a step's 16 products.
  __device__ __forceinline__ void MultiplyParts(const unsigned char* stage) {
    float step[kRows][kColumns][4] = {};
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      uint32_t b[kColumns][2], small_b[kColumns][2];
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        LoadPixels(stage, slice, j, b[j]);
        SplitInParts(b[j], small_b[j]);
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        uint32_t a[4], small_a[4];
        LoadFilters(stage, slice, i, a);
        SplitInParts(a, small_a);
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
          MultiplyFragment(step[i][j], small_a, b[j][0], b[j][1], 0.f);
          MultiplyFragment(step[i][j], a, small_b[j][0], small_b[j][1], 0.f);
          MultiplyFragment(step[i][j], a, b[j][0], b[j][1], 0.f);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[i][j][e] += step[i][j][e];
      }
    }
  }

  // tile: [tile pixel, kSumStride]
  __device__ __forceinline__ void Store(float* tile) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int pixel = j * 8 + Lane() % 4 * 2 + e % 2, filter = i * 16 + Lane() / 4 + e / 2 * 8;
          tile[pixel * U::kSumStride + filter] = sums[i][j][e];
        }
      }
    }
  }
};

// A gate and counts, which few calls have. Not inlined: code that is jumped over is fetched too.
inline __device__ __noinline__ bool PassesGateApart(const Gate& gate) { return PassesGate(gate); }

inline __device__ __noinline__ void WriteCountsApart(const CountTask& task, int2 written, int2* scratch) {
  WriteCounts(task, GridBlock(), written, scratch);
}

// Four sums again by FFMA, in the order of the axis, with zeros outside the map. Not inlined: it runs where sums of
// parts are not finite.
template <typename T>
__device__ __noinline__ float4 SumAgain(const DirectTask<T>& task, DirectPlace at, int pixel, int filter) {
  const T* x = task.x + at.stack * task.images_per_stack * task.height * task.width * task.channels +
               at.group * task.group_channels;
  const int valid = min(task.group_features - at.feature - filter, 4);
  const T* kernel = task.kernel + static_cast<int64_t>(at.stack) * task.depth * task.features +
                    at.group * task.group_features + at.feature + filter;
  const WindowStart<T> window = FindWindow(task, x, at.pixel + pixel);
  float4 sum = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 1
  for (int k = 0; k < task.depth; ++k) {
    const Reach reach = FindReach(task, k);
    const bool inside = Inside(task, window.y + reach.dy, window.x + reach.dx);
    const float value = inside ? ToFloat(window.first[reach.offset]) : 0.f;
    const float4 weight = LoadUpTo4(kernel + static_cast<int64_t>(k) * task.features, valid, task.vector_out);
    sum.x = fmaf(value, weight.x, sum.x);
    sum.y = fmaf(value, weight.y, sum.y);
    sum.z = fmaf(value, weight.z, sum.z);
    sum.w = fmaf(value, weight.w, sum.w);
  }
  return sum;
}

template <class U, typename T>
__global__ void __launch_bounds__(U::kThreads) DeepKernel(const __grid_constant__ DirectTask<T> task) {
  extern __shared__ __align__(128) unsigned char shared[];
  if (task.gate.nonzeros && !PassesGateApart(task.gate)) return;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const DirectPlace at = FindDirectPlace<U>(task, blockIdx.x, 0);
  const DeepSource<U, T> source(task, at);
  unsigned char* ring = shared + warp * (U::kStages * U::kStageBytes);
  DeepEngine<U, T> engine;
  int stage = 0;
#pragma unroll 1
  for (int step = warp - U::kStages * U::kWarps; step < task.chunks; step += U::kWarps) {
    unsigned char* place = ring + stage * U::kStageBytes;
    if (step >= 0) {
      WaitForCopies<U::kStages - 1>();
      __syncwarp();
      engine.Multiply(place);
      __syncwarp();
    }
    if (step + U::kStages * U::kWarps < task.chunks) source.Copy(step + U::kStages * U::kWarps, place);
    CommitCopies();
    stage = stage + 1 == U::kStages ? 0 : stage + 1;
  }
  TileWriter<U, T> writer(task, at, 0, 1);
  float* sums = reinterpret_cast<float*>(shared);
  constexpr int kTile = U::kPixels * U::kSumStride;
  __syncthreads();  // sums take the rings' place
  engine.Store(sums + warp * kTile);
  __syncthreads();
  writer.Write([&](int pixel, int filter) {
    const float* from = sums + pixel * U::kSumStride + filter;
    float4 sum = *reinterpret_cast<const float4*>(from);
#pragma unroll
    for (int i = 1; i < U::kWarps; ++i) sum = sum + *reinterpret_cast<const float4*>(from + i * kTile);
    if constexpr (U::kSplit) {
      // Zero times a sum is zero, or NaN.
      if (fmaf(sum.x, 0.f, sum.y * 0.f) + fmaf(sum.z, 0.f, sum.w * 0.f) != 0.f) {
        sum = SumAgain(task, at, pixel, filter);
      }
    }
    return sum;
  });
  if (task.counts.rows) WriteCountsApart(task.counts, writer.Written(), reinterpret_cast<int2*>(shared));
  LeaveGate(task.gate);
}

template <class U, typename T>
ffi::Error LaunchDeep(const ConvCall& call, const DirectPlan& plan, cudaStream_t stream) {
  constexpr auto kKernel = DeepKernel<U, T>;
  const ffi::Error error = Prepare<kKernel>("DeepKernel");
  if (error.failure()) return error;
  DirectTask<T> task = MakeDirectTask<T>(call, plan, nullptr);
  task.counts = CountsOf(call.counts, static_cast<int64_t>(task.tiles) * call.args.groups * call.args.stacks);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(task.tiles), static_cast<unsigned>(call.args.groups),
                        static_cast<unsigned>(call.args.stacks));
  config.blockDim = dim3(U::kThreads);
  config.dynamicSmemBytes = U::kSharedBytes;
  config.stream = stream;
  LaunchAttributes attributes(0, task.gate);
  config.attrs = attributes.list;
  config.numAttrs = attributes.count;
  return CheckCuda(cudaLaunchKernelEx(&config, kKernel, task), "DeepKernel");
}

// The kernel of a plan's tile; false where it is of another kernel.
template <typename T, bool kSplit>
bool LaunchDeepPlan(const ConvCall& call, const DirectPlan& plan, cudaStream_t stream, ffi::Error* error) {
  const auto launch = [&](auto tuning) {
    *error = LaunchDeep<decltype(tuning), T>(call, plan, stream);
    return true;
  };
  switch (plan.tile) {
    case DirectTile::kDeepNarrow:
      return launch(DeepTuning<T, 16, 8, kSplit, false>{});
    case DirectTile::kDeep16x8:
      return launch(DeepTuning<T, 16, 8, kSplit>{});
    case DirectTile::kDeep16x16:
      return launch(DeepTuning<T, 16, 16, kSplit>{});
    case DirectTile::kDeep32x16:
      return launch(DeepTuning<T, 32, 16, kSplit>{});
    default:
      return false;
  }
}

}  // namespace jsc

#endif  // JSC_CUDA_DIRECT_DEEP_CUH_
