// Engine small_map: the warps of a block split the reduction of one small tile (sliced-K). Details:
// docs/design/kernels/small_map.md.
//
// Computes out[pixel][output channel] = relu(sum over taps and channels of x * kernel + bias + residual).
// Layout: a tile is 8 or 16 pixels by 16 or 32 output channels. A step is 64 bytes of the reduction axis. Steps are
//   dealt to the eight warps in turn. Each warp copies its own steps into a pipeline of its own and waits for no other
//   warp.
// Why: a map of 7x7 or 14x14 gives 64 x 64 tiles to few SMs. Clusters would then wait for each other's sums, and
//   starting a kernel, first copies and that wait are most of such a layer's time. Small tiles give blocks enough
//   without clusters. The warps meet once, in shared memory, and sums are added in their order: bitwise repeatable.
// Code that runs once costs its fetch. So one loop has both the copies and the products.
// Bound by: launch, the first fetch of code and parameters, and copies. Each block reads its pixels and weights itself,
//   so long reductions and large maps are faster by larger tiles.
// Tests: tests/cuda/test_direct.py.
#ifndef JSC_CUDA_DENSE_CONV_MMA_SMALL_MAP_CUH_
#define JSC_CUDA_DENSE_CONV_MMA_SMALL_MAP_CUH_

#include "cuda/core/epilogue.cuh"
#include "cuda/dense_conv/mma/small_map_engine.cuh"

namespace jsc {

template <typename T>
struct SmallMapTask {
  MmaTask<T> mma;
  int64_t stack_x, stack_kernel;  // elements of a stack
};

template <typename T>
SmallMapTask<T> MakeSmallMapTask(const DeviceCall& call, const MmaPlan& plan) {
  SmallMapTask<T> small_map{MakeMmaTask<T>(call, plan, nullptr), 0, 0};
  const MmaTask<T>& task = small_map.mma;
  small_map.stack_x = task.images_per_stack * task.height * task.width * task.channels;
  small_map.stack_kernel = static_cast<int64_t>(task.depth) * task.out_channels;
  return small_map;
}

// The same for kernels that are cut by plans of their own.
template <typename T>
SmallMapTask<T> MakeSmallMapTask(const DeviceCall& call) {
  MmaPlan whole{};
  whole.splits = whole.pixel_tiles = whole.out_channel_tiles = 1;
  return MakeSmallMapTask<T>(call, whole);
}

// What a lane copies, step after step. The plan sees to it that places in a map have 32-bit numbers.
template <class U, typename T>
struct SmallMapSource {
  static constexpr int kElements = U::kVector ? 16 / static_cast<int>(sizeof(T)) : 1;  // of a copy
  static constexpr int kPixelLanes = U::kDepth / kElements, kPixelStep = kWarp / kPixelLanes;
  static constexpr int kWeightLanes = U::kOutChannels / kElements, kWeightStep = kWarp / kWeightLanes;
  static constexpr int kPixelCopies = U::kPixels / kPixelStep, kWeightCopies = U::kDepth / kWeightStep;
  static constexpr int kStride = U::kWarps * U::kDepth;  // from a warp's step to its next
  static_assert(kWarp % kPixelLanes == 0 && kWarp % kWeightLanes == 0, "a lane keeps one column of copies");
  static_assert(U::kPixels % kPixelStep == 0 && U::kDepth % kWeightStep == 0, "all lanes copy as much");

  const MmaTask<T>& task;
  const T* weights;  // the lane's first of the next step
  int row, column;   // of the axis: where those are, and the lane's elements of the next step's pixels
  unsigned lane;
  bool has_weights;
  WindowStart<T> windows[kPixelCopies];

  __device__ __forceinline__ SmallMapSource(const SmallMapTask<T>& small_map, const MmaPlace& at)
      : task(small_map.mma), lane(threadIdx.x % kWarp) {
    const int first = static_cast<int>(threadIdx.x / kWarp) * U::kDepth;
    row = first + WeightRow();
    column = first + PixelColumn();
    const int tile_out_channel = at.out_channel + WeightColumn();
    has_weights = tile_out_channel < task.group_out_channels;
    weights = task.kernel + at.stack * small_map.stack_kernel + static_cast<int64_t>(row) * task.out_channels +
              at.group * task.group_out_channels + tile_out_channel;
    const T* x = task.x + at.stack * small_map.stack_x + at.group * task.group_channels;
#pragma unroll
    for (int i = 0; i < kPixelCopies; ++i) {
      const int pixel = at.pixel + PixelRow() + i * kPixelStep;
      const Quotient line = Divide(min(pixel, task.pixels - 1), task.by_out_width);
      const Quotient image = Divide(line.quotient, task.by_out_height);
      WindowStart<T>& window = windows[i];
      window.y = image.remainder * task.stride[0] - task.pad_low[0];
      window.x = line.remainder * task.stride[1] - task.pad_low[1];
      const int place = (image.quotient * task.height + window.y) * task.width + window.x;
      window.first = x + static_cast<int64_t>(place) * task.channels;
      if (pixel >= task.pixels) window.y = kOutside;
    }
  }

  // Of the lane's first copies in a stage.
  __device__ __forceinline__ int WeightRow() const { return static_cast<int>(lane / kWeightLanes); }
  __device__ __forceinline__ int WeightColumn() const { return static_cast<int>(lane % kWeightLanes) * kElements; }
  __device__ __forceinline__ int PixelRow() const { return static_cast<int>(lane / kPixelLanes); }
  __device__ __forceinline__ int PixelColumn() const { return static_cast<int>(lane % kPixelLanes) * kElements; }

  // The next step to a warp's stage.
  __device__ __forceinline__ void Copy(unsigned char* stage) {
    constexpr int kCopies = kWeightCopies + kPixelCopies;
    const T* from[kCopies];
    bool valid[kCopies];
#pragma unroll
    for (int i = 0; i < kWeightCopies; ++i) {
      from[i] = weights + static_cast<int64_t>(i * kWeightStep) * task.out_channels;
      valid[i] = has_weights && row + i * kWeightStep < task.depth;
    }
    int dy = 0, dx = 0, offset = column;
    if (task.taps > 1) {
      const Quotient tap = Divide(column, task.by_group_channels), place = Divide(tap.quotient, task.by_kernel_width);
      dy = place.quotient * task.dilation[0];
      dx = place.remainder * task.dilation[1];
      offset = (dy * task.width + dx) * task.channels + tap.remainder;
    }
#pragma unroll
    for (int i = 0; i < kPixelCopies; ++i) {
      const WindowStart<T>& window = windows[i];
      from[kWeightCopies + i] = window.first + offset;
      valid[kWeightCopies + i] = column < task.depth && Inside(task, window.y + dy, window.x + dx);
    }
    CopyAll(stage, from, valid);
    weights += static_cast<int64_t>(kStride) * task.out_channels;
    row += kStride;
    column += kStride;
  }

 private:
  // Weights first, then pixels.
  __device__ __forceinline__ unsigned char* Target(unsigned char* stage, int copy) const {
    if (copy < kWeightCopies) return stage + U::Weight(WeightRow() + copy * kWeightStep, WeightColumn());
    return stage + U::Pixel(PixelRow() + (copy - kWeightCopies) * kPixelStep, PixelColumn());
  }
  template <int kCopies>
  __device__ __forceinline__ void CopyAll(unsigned char* stage, const T* const (&from)[kCopies],
                                          const bool (&valid)[kCopies]) const {
    if constexpr (sizeof(T) < 4 && !U::kVector) {  // there is no asynchronous copy of two bytes: all loads, then stores
      T values[kCopies];
#pragma unroll
      for (int i = 0; i < kCopies; ++i) values[i] = valid[i] ? *from[i] : T{};
#pragma unroll
      for (int i = 0; i < kCopies; ++i) *reinterpret_cast<T*>(Target(stage, i)) = values[i];
    } else {
#pragma unroll
      for (int i = 0; i < kCopies; ++i) CopyPiece<U>(Target(stage, i), from[i], valid[i]);
    }
  }
};

// A tile's results: a thread has four output channels of one pixel, or none. Bias and residual are asked for when it is
// made, in front of the first copies: by then they are there when the sums are.
template <class U, typename T>
struct SmallMapWriter {
  static constexpr int kQuads = U::kOutChannels / 4;
  static_assert(kQuads * U::kPixels <= U::kThreads, "four results of a thread are all");
  const MmaTask<T>& task;
  int pixel, tile_out_channel;  // of the tile
  int valid;                    // weights that there are
  int64_t element;
  float4 bias = {0.f, 0.f, 0.f, 0.f}, residual = {0.f, 0.f, 0.f, 0.f};

  __device__ __forceinline__ SmallMapWriter(const MmaTask<T>& task, const MmaPlace& at)
      : task(task),
        pixel(static_cast<int>(threadIdx.x / kQuads)),
        tile_out_channel(static_cast<int>(threadIdx.x % kQuads) * 4) {
    const bool is_pixel = pixel < U::kPixels && at.pixel + pixel < task.pixels;
    valid = is_pixel ? min(task.group_out_channels - at.out_channel - tile_out_channel, 4) : 0;
    if (valid <= 0) return;
    const int out_channel = at.group * task.group_out_channels + at.out_channel + tile_out_channel;
    element = static_cast<int64_t>(at.stack * task.pixels + at.pixel + pixel) * task.out_channels + out_channel;
    if (task.bias) bias = Load(task.bias + static_cast<int64_t>(at.stack) * task.out_channels + out_channel);
    if (task.residual) residual = Load(task.residual + element);
  }
  // With kVector weights come in whole fours.
  __device__ __forceinline__ float4 Load(const T* p) const { return LoadQuad<U::kVector>(p, valid, task.vector_out); }
  // Returns how many results are not zero, and how many there are.
  template <typename Sum>
  __device__ __forceinline__ int2 Write(const Sum& sum_of) const {
    if (valid <= 0) return make_int2(0, 0);
    const float4 sum = Finish(sum_of(pixel, tile_out_channel), bias + residual, task.relu);
    StoreQuad<U::kVector>(task.out + element, sum, valid, task.vector_out);
    return make_int2(task.counts.rows ? CountNonzeros<T>(sum, valid) : 0, valid);
  }
};

// A gate and counts, which few calls have. Not inlined: code that is jumped over is fetched too.
inline __device__ __noinline__ bool PassesGateApart(const Gate& gate) { return PassesGate(gate); }

inline __device__ __noinline__ void WriteCountsApart(const CountTask& task, int2 written, int2* scratch) {
  WriteCounts(task, GridBlock(), written, scratch);
}

// Four sums again by FFMA, in the order of the axis, with zeros outside the map. Not inlined: it runs where sums of
// 3xTF32 are not finite.
template <typename T>
__device__ __noinline__ float4 SumAgain(const SmallMapTask<T>& small_map, MmaPlace at, int pixel,
                                        int tile_out_channel) {
  const MmaTask<T>& task = small_map.mma;
  const T* x = task.x + at.stack * small_map.stack_x + at.group * task.group_channels;
  const int valid = min(task.group_out_channels - at.out_channel - tile_out_channel, 4);
  const T* kernel = task.kernel + at.stack * small_map.stack_kernel + at.group * task.group_out_channels +
                    at.out_channel + tile_out_channel;
  const WindowStart<T> window = FindWindow(task, x, at.pixel + pixel);
  float4 sum = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 1
  for (int k = 0; k < task.depth; ++k) {
    const Reach reach = FindReach(task, k);
    const bool inside = Inside(task, window.y + reach.dy, window.x + reach.dx);
    const float value = inside ? ToFloat(window.first[reach.offset]) : 0.f;
    const float4 weight = LoadUpTo4(kernel + static_cast<int64_t>(k) * task.out_channels, valid, task.vector_out);
    sum = MultiplyAdd(value, weight, sum);
  }
  return sum;
}

template <class U, typename T>
__global__ void __launch_bounds__(U::kThreads) SmallMapKernel(const __grid_constant__ SmallMapTask<T> small_map) {
  extern __shared__ __align__(128) unsigned char shared[];
  const MmaTask<T>& task = small_map.mma;
  if (task.gate.nonzeros && !PassesGateApart(task.gate)) return;
  const int warp = static_cast<int>(threadIdx.x / kWarp);
  const MmaPlace at = FindMmaPlace<U>(task, blockIdx.x, 0);
  SmallMapSource<U, T> source(small_map, at);
  const SmallMapWriter<U, T> writer(task, at);
  unsigned char* stages = shared + warp * (U::kStages * U::kStageBytes);
  SmallMapEngine<U, T> engine;
  int stage = 0;
#pragma unroll 1
  for (int step = warp - U::kStages * U::kWarps; step < task.chunks; step += U::kWarps) {
    unsigned char* place = stages + stage * U::kStageBytes;
    if (step >= 0) {
      WaitForCopies<U::kStages - 1>();
      __syncwarp();
      engine.Multiply(place);
      __syncwarp();
    }
    if (step + U::kStages * U::kWarps < task.chunks) source.Copy(place);
    CommitCopies();
    stage = stage + 1 == U::kStages ? 0 : stage + 1;
  }
  float* sums = reinterpret_cast<float*>(shared);
  constexpr int kTile = U::kPixels * U::kSumStride;
  __syncthreads();  // sums take the place of the stages
  engine.Store(sums + warp * kTile, task.depth);
  __syncthreads();
  const int2 written = writer.Write([&](int pixel, int tile_out_channel) {
    const float* from = sums + pixel * U::kSumStride + tile_out_channel;
    float4 sum = AddParts<U::kWarps>(reinterpret_cast<const float4*>(from), kTile / 4);
    if constexpr (U::kTf32x3) {
      if (!IsFinite(sum)) {
        sum = SumAgain(small_map, at, pixel, tile_out_channel);
      }
    }
    return sum;
  });
  if (task.counts.rows) WriteCountsApart(task.counts, written, reinterpret_cast<int2*>(shared));
}

template <class U, typename T>
Error LaunchSmallMap(const DeviceCall& call, const MmaPlan& plan, cudaStream_t stream) {
  constexpr auto kKernel = SmallMapKernel<U, T>;
  const Error error = Prepare<kKernel>("DeepKernel");
  if (error.failure()) return error;
  SmallMapTask<T> small_map = MakeSmallMapTask<T>(call, plan);
  MmaTask<T>& task = small_map.mma;
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
  return CheckCuda(cudaLaunchKernelEx(&config, kKernel, small_map), "DeepKernel");
}

// The kernel of a plan's tile; false where it is of another kernel.
template <typename T, bool kTf32x3>
bool LaunchSmallMapPlan(const DeviceCall& call, const MmaPlan& plan, cudaStream_t stream, Error* error) {
  const auto launch = [&](auto tuning) {
    *error = LaunchSmallMap<decltype(tuning), T>(call, plan, stream);
    return true;
  };
  switch (plan.tile) {
    case MmaTile::kSmallMapNarrow:
      return launch(SmallMapTuning<T, 16, 8, kTf32x3, false>{});
    case MmaTile::kSmallMap16x8:
      return launch(SmallMapTuning<T, 16, 8, kTf32x3>{});
    case MmaTile::kSmallMap16x16:
      return launch(SmallMapTuning<T, 16, 16, kTf32x3>{});
    case MmaTile::kSmallMap32x16:
      return launch(SmallMapTuning<T, 32, 16, kTf32x3>{});
    default:
      return false;
  }
}

}  // namespace jsc

#endif  // JSC_CUDA_DENSE_CONV_MMA_SMALL_MAP_CUH_
