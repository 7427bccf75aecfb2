// The direct convolution by Hopper's warpgroup products (wgmma), for layers that are bound by multiplication; dense.
//
//   out[pixel][filter] = pool(relu(sum over taps and channels of x * kernel + bias + residual))
//
// Layout: NHWC and HWIO, as they lie; the copy engine brings both to shared memory (warpgroup_copies.cuh).
// Why this tiling: filters are the rows of a product, pixels its columns, of which it takes any multiple of 8, and
//   tiles of 56, 112 or 224 pixels cut the maps of the common networks without rest. Where the stride is 1 a tile is a
//   patch 8 results wide: its pixels are staged once for all taps, and a tap is a shift of the address at which a
//   product begins to read, so the copies of pixels are a quarter to a ninth of im2col's, from the L2 cache as into
//   shared memory. Elsewhere the copy engine brings the pixels under each tap.
// A pool of 2x2 windows is taken of the sums of a patch of 14 or 28 rows, which no window crosses.
// float32 at HIGHEST: three products of two parts each, warpgroup_parts.cuh.
// Small maps: blocks of a cluster share the steps of a tile and add their sums in a fixed order.
// Bound by: the tensor cores on large maps, else launch, first copies and the meeting of a cluster.
// Lost: barriers made by a lane each, TF32 filters waited for before every product; see benchmarks/NOTES.md.
#ifndef JSC_CUDA_DIRECT_WARPGROUP_CUH_
#define JSC_CUDA_DIRECT_WARPGROUP_CUH_

#include <cooperative_groups.h>

#include "warpgroup_parts.cuh"

namespace jsc {

// Four results in one store; to: aligned to four elements.
template <typename T>
__device__ __forceinline__ void StoreQuad(T* to, float4 v) {
  if constexpr (sizeof(T) == 4) {
    *reinterpret_cast<float4*>(to) = v;
  } else {
    const T element[4] = {FromFloat<T>(v.x), FromFloat<T>(v.y), FromFloat<T>(v.z), FromFloat<T>(v.w)};
    const uint2 words = *reinterpret_cast<const uint2*>(element);
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(words.x), "r"(words.y) : "memory");
  }
}

// Four sums of any block of the cluster, where `yes`; without a branch. What is loaded has to be used: no load
// may be under way when the cluster parts.
__device__ __forceinline__ void LoadIf(float4& v, const float* from, bool yes) {
  asm volatile("{\n .reg .pred yes;\n setp.ne.b32 yes, %5, 0;\n @yes ld.v4.f32 {%0, %1, %2, %3}, [%4];\n}"
               : "+f"(v.x), "+f"(v.y), "+f"(v.z), "+f"(v.w)
               : "l"(from), "r"(static_cast<int>(yes))
               : "memory");
}

// Completes a tile's rows of kPatchWidth pixels `part`, part + parts, ...: bias, residual and ReLU. A thread keeps four
// filters, and its column of the row.
template <class U, typename T>
struct WarpgroupWriter {
  static constexpr int kQuads = U::kFilters / 4, kPooledWidth = kPatchWidth / 2;
  static_assert(U::kConsumers / kQuads == kPatchWidth, "a thread keeps its column");
  const WarpgroupTask<T>& task;
  int column, filter, rows, row_step;  // rows: in which this thread's column has results
  int64_t first;                       // element of out, of row 0
  int nonzeros = 0, written = 0;

  static __device__ __forceinline__ int Filter() { return static_cast<int>(threadIdx.x) % kQuads * 4; }
  // The bias of the calling thread's filters.
  static __device__ __forceinline__ float4 LoadBias(const WarpgroupTask<T>& task, const WarpgroupPlace& at) {
    const int feature = at.feature + Filter();
    if (task.bias == nullptr || feature >= task.features) return {0.f, 0.f, 0.f, 0.f};
    return Load4(task.bias + static_cast<int64_t>(blockIdx.z) * task.features + feature);
  }
  __device__ __forceinline__ WarpgroupWriter(const WarpgroupTask<T>& task, const WarpgroupPlace& at) : task(task) {
    constexpr int kRows = U::kPixels / kPatchWidth;
    column = static_cast<int>(threadIdx.x) / kQuads;
    filter = Filter();
    int64_t pixel = static_cast<int64_t>(blockIdx.z) * task.pixels + column;
    if (task.patch) {
      pixel += static_cast<int64_t>(at.image * task.height + at.y) * task.width + at.x;
      rows = at.x + column < task.width ? min(kRows, task.height - at.y) : 0;
      row_step = task.width * task.features;
    } else {
      pixel += at.pixel;
      rows = min(kRows, (task.pixels - at.pixel - column + kPatchWidth - 1) / kPatchWidth);
      row_step = kPatchWidth * task.features;
    }
    if (task.pool != Pool::kNone) {  // a column of pooled results, every second row of them
      const int pooled = at.x / 2 + column % kPooledWidth;
      pixel = static_cast<int64_t>(blockIdx.z) * task.images_per_stack + at.image;
      pixel = (pixel * task.pooled_height + at.y / 2) * task.pooled_width + pooled;
      rows = pooled < task.pooled_width ? min(kRows / 2, task.pooled_height - at.y / 2) : 0;
      row_step = task.pooled_width * task.features;
    }
    if (threadIdx.x >= U::kConsumers || at.feature + filter >= task.features) rows = 0;
    first = pixel * task.features + at.feature + filter;
  }
  __device__ __forceinline__ int64_t Element(int row) const { return first + static_cast<int64_t>(row) * row_step; }
  // Rows part, part + parts, ...; tile_of(split): the sums of a split, which are added in the order of the splits.
  // kBatch rows of kSplits splits are asked for at a time.
  template <int kBatch, int kSplits, typename TileOf>
  __device__ __forceinline__ void Write(int part, int parts, float4 bias, const TileOf& tile_of) {
#pragma unroll 1
    for (int from = part; from < rows; from += kBatch * parts) {
      float4 sum[kBatch] = {}, extra[kBatch] = {};
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int row = from + i * parts;
        if (task.residual && row < rows) extra[i] = Load4(task.residual + Element(row));
      }
#pragma unroll 1
      for (int split = 0; split < parts; split += kSplits) {
        float4 next[kSplits][kBatch] = {};
#pragma unroll
        for (int j = 0; j < kSplits; ++j) {
          const float* tile = tile_of(min(split + j, parts - 1)) + column * U::kSumStride + filter;
#pragma unroll
          for (int i = 0; i < kBatch; ++i) {
            const int row = from + i * parts;
            const float* at = tile + row * (kPatchWidth * U::kSumStride);
            if constexpr (kSplits > 1) {
              LoadIf(next[j][i], at, row < rows && split + j < parts);
            } else if (row < rows) {
              next[j][i] = *reinterpret_cast<const float4*>(at);
            }
          }
        }
#pragma unroll
        for (int j = 0; j < kSplits; ++j) {
#pragma unroll
          for (int i = 0; i < kBatch; ++i) {
            sum[i] = sum[i] + next[j][i];
          }
        }
        if (kSplits == 1) break;
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int row = from + i * parts;
        sum[i] = sum[i] + (bias + extra[i]);
        if (task.relu) sum[i] = {Relu(sum[i].x), Relu(sum[i].y), Relu(sum[i].z), Relu(sum[i].w)};
        if (row < rows) Store(row, sum[i]);
      }
    }
  }
  __device__ __forceinline__ void Store(int row, float4 result) {
    StoreQuad(task.out + Element(row), result);
    if (task.counts.rows) {
      nonzeros += CountNonzeros<T>(result, 4);
      written += 4;
    }
  }
  // The same of pooled rows: four sums for each result.
  template <int kSplits, typename TileOf>
  __device__ __forceinline__ void WritePooled(int part, int parts, float4 bias, const TileOf& tile_of) {
#pragma unroll 1
    for (int row = part * 2 + column / kPooledWidth; row < rows; row += parts * 2) {
      const int corner = (row * 2 * kPatchWidth + column % kPooledWidth * 2) * U::kSumStride + filter;
      float4 sum[4] = {};
#pragma unroll 1
      for (int split = 0; split < parts; split += kSplits) {
        float4 next[kSplits][4] = {};
#pragma unroll
        for (int j = 0; j < kSplits; ++j) {
          const float* tile = tile_of(min(split + j, parts - 1)) + corner;
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            LoadIf(next[j][i], tile + (i / 2 * kPatchWidth + i % 2) * U::kSumStride, split + j < parts);
          }
        }
#pragma unroll
        for (int j = 0; j < kSplits; ++j) {
#pragma unroll
          for (int i = 0; i < 4; ++i) sum[i] = sum[i] + next[j][i];
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sum[i] = sum[i] + bias;
        if (task.relu) sum[i] = {Relu(sum[i].x), Relu(sum[i].y), Relu(sum[i].z), Relu(sum[i].w)};
      }
      Store(row, Pooled(sum));
    }
  }
  __device__ __forceinline__ float4 Pooled(const float4 (&v)[4]) const {
    if (task.pool == Pool::kAverage) {
      const float4 sum = (v[0] + v[1]) + (v[2] + v[3]);
      return {0.25f * sum.x, 0.25f * sum.y, 0.25f * sum.z, 0.25f * sum.w};
    }
    const auto most = [](float a, float b, float c, float d) { return MaxOrNan(MaxOrNan(a, b), MaxOrNan(c, d)); };
    return {most(v[0].x, v[1].x, v[2].x, v[3].x), most(v[0].y, v[1].y, v[2].y, v[3].y),
            most(v[0].z, v[1].z, v[2].z, v[3].z), most(v[0].w, v[1].w, v[2].w, v[3].w)};
  }
};

#if __CUDA_ARCH__ >= 900
// Blocks of a cluster share the rows of their tile.
template <int kBatch, int kSplits, class U, typename T>
__device__ __forceinline__ void WriteTogether(WarpgroupWriter<U, T>& writer, int part, int parts, float4 bias,
                                              float* tile) {
  auto cluster = cooperative_groups::this_cluster();
  cluster.sync();
  const auto tile_of = [&](int split) { return cluster.map_shared_rank(tile, split); };
  if (writer.task.pool == Pool::kNone) {
    writer.template Write<kBatch, kSplits>(part, parts, bias, tile_of);
  } else {
    writer.template WritePooled<2>(part, parts, bias, tile_of);
  }
  ArriveAtCluster();
  WaitForCluster();  // a block's sums stay until all have read them
}
#endif

template <class U, typename T>
__global__ void __launch_bounds__(U::kThreads, U::kResident)
    WarpgroupKernel(const __grid_constant__ WarpgroupTaskOf<U, T> task, const __grid_constant__ WarpgroupMaps maps) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ unsigned char shared[];
  __shared__ std::conditional_t<U::kParts, PartsBarriers, WarpgroupBarriers> barriers;
  __shared__ int2 scratch[U::kThreads / kWarp];
  if (!PassesGate(task.gate)) return;
  unsigned char* stages = shared + (-SharedAddress(shared) & (kSwizzleBytes - 1));
  unsigned char* filters = stages + task.pixel_stages * task.pixel_bytes;
  auto* tile = reinterpret_cast<float*>(stages);  // sums take the stages' place
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarp, 0);
  WarpgroupPlace at = FindWarpgroupPlace<U>(task, blockIdx.x);
  float4 bias;
  if constexpr (!U::kParts) bias = WarpgroupWriter<U, T>::LoadBias(task, at);
  if (warp == U::kConsumers / kWarp) {
    if (threadIdx.x % kWarp == 0) InitBarriers(barriers, U::kConsumers / kWarp);
    __syncwarp();
    asm volatile("bar.arrive 1, %0;" ::"n"(U::kThreads) : "memory");  // the first copies wait for nobody
    AskForStages<U>(task, maps, at, stages, filters, barriers);
    __syncwarp();
  } else {
    asm volatile("bar.sync 1, %0;" ::"n"(U::kThreads) : "memory");
    float sums[U::kPixels / 2];
    MultiplySteps(WalkOf<U, T>(task, at, SharedAddress(stages), SharedAddress(filters), barriers),
                  at.end_step - at.first_step, sums);
    if constexpr (U::kParts) {
      StoreParts<U>(task, sums, tile);
    } else {
      asm volatile("bar.sync 2, %0;" ::"n"(U::kConsumers) : "memory");  // all stages are read
      StepFilters<U, T>::Store(sums, tile);
    }
  }
  if (task.gate.in_chain) WaitForKernelBefore();  // it may have read what is written now, and wrote the residual
  if (task.gate.x_is_older) LetNextKernelStart();
  int block = blockIdx.x;
  asm volatile("" : "+r"(block));  // the place is found again, not kept in registers
  at = FindWarpgroupPlace<U>(task, block);
  if constexpr (U::kParts) bias = WarpgroupWriter<U, T>::LoadBias(task, at);  // registers are scarce before
  WarpgroupWriter<U, T> writer(task, at);
  if (task.splits == 1) {
    __syncthreads();
    if (task.pool == Pool::kNone) {
      writer.template Write<7, 1>(0, 1, bias, [&](int) { return tile; });
    } else {
      writer.template WritePooled<1>(0, 1, bias, [&](int) { return tile; });
    }
  } else if (task.splits == 2) {
    WriteTogether<4, 2>(writer, at.split, task.splits, bias, tile);
  } else if (task.splits <= 4) {
    WriteTogether<2, 4>(writer, at.split, task.splits, bias, tile);
  } else {
    WriteTogether<1, 8>(writer, at.split, task.splits, bias, tile);
  }
  WriteCounts(task.counts, GridBlock(), make_int2(writer.nonzeros, writer.written), scratch);
  LeaveGate(task.gate);
#endif
}

template <class U, typename T>
ffi::Error LaunchWarpgroup(const ConvCall& call, const WarpgroupPlan& plan, const WarpgroupMaps& maps,
                           cudaStream_t stream) {
  constexpr auto kKernel = WarpgroupKernel<U, T>;
  ffi::Error error = Prepare<kKernel>("WarpgroupKernel");
  if (error.failure()) return error;
  WarpgroupTaskOf<U, T> task{MakeWarpgroupTask<T>(call, plan)};
  if constexpr (U::kParts) AddOperands(call, &task);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(plan.pixel_tiles * plan.feature_tiles * plan.splits), 1,
                        static_cast<unsigned>(call.args.stacks));
  config.blockDim = dim3(U::kThreads);
  config.dynamicSmemBytes = plan.shared_bytes;
  config.stream = stream;
  task.counts = CountsOf(call.counts, static_cast<int64_t>(config.gridDim.x) * config.gridDim.z);
  if (MayOverlap<kKernel>(&config, call.in_front)) task.gate.overlaps = true;
  LaunchAttributes attributes(plan.splits > 1 ? plan.splits : 0, task.gate);
  config.attrs = attributes.list;
  config.numAttrs = attributes.count;
  return CheckCuda(cudaLaunchKernelEx(&config, kKernel, task, maps), "WarpgroupKernel");
}

// A call of elements T by the tile that its plan has.
template <typename T>
ffi::Error LaunchWarpgroupTile(const ConvCall& call, const WarpgroupPlan& plan, const WarpgroupMaps& maps,
                               cudaStream_t stream) {
  if (plan.filters == 64) {
    if (plan.pixels == 56) return LaunchWarpgroup<WarpgroupTile<T, 64, 56>, T>(call, plan, maps, stream);
    if (plan.pixels == 112) return LaunchWarpgroup<WarpgroupTile<T, 64, 112>, T>(call, plan, maps, stream);
    return LaunchWarpgroup<WarpgroupTile<T, 64, 224>, T>(call, plan, maps, stream);
  }
  if (plan.pixels == 56) return LaunchWarpgroup<WarpgroupTile<T, 128, 56>, T>(call, plan, maps, stream);
  if (plan.pixels == 112) return LaunchWarpgroup<WarpgroupTile<T, 128, 112>, T>(call, plan, maps, stream);
  return LaunchWarpgroup<WarpgroupTile<T, 128, 224>, T>(call, plan, maps, stream);
}

}  // namespace jsc

#endif  // JSC_CUDA_DIRECT_WARPGROUP_CUH_
