// The layers of a DenseNet block of many images as a run of kernels, two per layer, that overlap where there is room:
// densenet/layers_first.cuh and densenet/layers_second.cuh.
#include "cuda/densenet/layers.h"

#include <algorithm>

#include "cuda/core/tensor_map.h"
#include "cuda/densenet/layers_first.cuh"
#include "cuda/densenet/layers_second.cuh"

namespace jsc {
namespace {

constexpr int kStaticBytes = 1024;

// A chain of launches on a stream, each of which may start while the one before it runs.
struct LaunchChain {
  cudaStream_t stream;
  template <auto kKernel, typename... Args>
  Error Launch(const char* name, dim3 grid, int threads, int shared, bool overlaps, const Args&... args) const {
    Error error = Prepare<kKernel>(name);
    if (error.failure()) return error;
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = static_cast<size_t>(shared);
    config.stream = stream;
    Gate gate;
    gate.overlaps = overlaps;
    LaunchAttributes attributes(0, gate);
    config.attrs = attributes.list;
    config.numAttrs = attributes.count;
    return CheckCuda(cudaLaunchKernelEx(&config, kKernel, args...), name);
  }
};

// What all layers have in common.
template <typename T, bool kTf32x3>
struct Block {
  static constexpr int kPlanes = kTf32x3 ? 2 : 1;
  const DenseBlockCall& call;
  LaunchChain chain;
  int room, multiprocessors;  // bytes of shared memory of a block
  const unsigned char* prepared;
  T* mid;

  int64_t pixels() const { return call.images * call.height * call.width; }
  int64_t total() const { return call.channels + static_cast<int64_t>(call.layers.size()) * kGrowth; }

  Error Prepare() const {
    PrepareTask task{};
    const int layers = static_cast<int>(call.layers.size());
    for (int i = 0; i < layers; ++i) {
      task.kernel1[i] = call.layers[i].kernel1;
      task.kernel2[i] = call.layers[i].kernel2;
    }
    task.to = const_cast<unsigned char*>(prepared);
    task.first_channels = static_cast<int>(call.channels);
    task.layers = layers;
    const dim3 grid(static_cast<unsigned>(std::max(1, 8 * multiprocessors / layers)), static_cast<unsigned>(layers));
    return chain.Launch<PrepareKernel<T, kTf32x3>>("PrepareKernel", grid, 256, 0, false, task);
  }

  bool MapFirst(int tile_pixels, FirstMaps* maps) const {
    const MapFormat format{TensorMapType(call.dtype, true)};
    const AxisList box = {kChunk<T>, tile_pixels};
    return EncodeDenseMap(call.x, format, {call.channels, pixels()}, box, &maps->x) &&
           EncodeDenseMap(call.out, format, {total(), pixels()}, box, &maps->block);
  }

  template <class U>
  Error First(int layer, const FirstMaps& maps) const {
    const DenseLayerArgs& args = call.layers[layer];
    FirstTask<T> task{};
    task.scale = static_cast<const T*>(args.scale);
    task.shift = static_cast<const T*>(args.shift);
    task.bias = static_cast<const T*>(args.bias1);
    task.kernel = prepared + PreparedBytes(sizeof(T), kTf32x3, static_cast<int>(call.channels), layer);
    task.mid = mid;
    task.x = static_cast<const T*>(call.x);
    task.block = static_cast<const T*>(call.out);
    task.kernel1 = static_cast<const T*>(args.kernel1);
    task.total = static_cast<int>(total());
    task.first_channels = static_cast<int>(call.channels);
    task.channels = static_cast<int>(call.channels) + layer * kGrowth;
    task.pixels = static_cast<int>(pixels());
    task.tiles = (task.pixels + U::kPixels - 1) / U::kPixels * U::kShares;
    task.is_first = layer == 0;
    const DenseChunks chunks(task.first_channels, task.channels, kChunk<T>);
    const int rest = kSwizzleBytes + chunks.all * U::kTableBytes + kMiddle * 4 + U::kSumBytes;
    task.stages = std::min(kMaxPipelineStages, (room - rest) / U::kStageBytes);
    // A split's warpgroups take stages one after another. Only in whole rounds has each seen the last phase of its
    // barriers.
    task.stages -= task.stages % U::kSplit;
    const dim3 grid(static_cast<unsigned>(std::min(task.tiles, multiprocessors)));
    return chain.Launch<FirstKernel<U>>("FirstKernel", grid, U::kThreads, rest + task.stages * U::kStageBytes, true,
                                        task, maps);
  }

  template <class U>
  bool CutSecond(SecondTask<T>* task, SecondMaps* maps, int* shared) const {
    task->mid = mid;
    task->images = static_cast<int>(call.images);
    task->total = static_cast<int>(total());
    task->height = static_cast<int>(call.height);
    task->width = static_cast<int>(call.width);
    task->box_width = std::min(64, task->width);
    task->rows = std::min(64 / task->box_width, task->height);
    task->tiles_x = task->width <= 64 ? 1 : (task->width + 61) / 62;
    task->tiles_y = (task->height + task->rows * U::kGroups - 1) / (task->rows * U::kGroups);
    task->tiles = static_cast<int>(call.images) * task->tiles_y * task->tiles_x;
    const int box_rows = task->rows * U::kGroups + 2;
    task->copied_bytes = box_rows * task->box_width * kRowBytes;
    task->stage_bytes = (task->copied_bytes + kSwizzleBytes - 1) / kSwizzleBytes * kSwizzleBytes;
    // A warpgroup reads 64 pixels from its last row on, some beyond the box.
    const int beyond = std::max(0, 64 - task->rows * task->box_width) * kRowBytes;
    const int rest = kSwizzleBytes + U::kKernelBytes + std::max(beyond, U::kEdgeBytes);
    task->stages = std::min(kMaxPipelineStages, (room - rest) / (kPlanes * task->stage_bytes));
    *shared = rest + task->stages * kPlanes * task->stage_bytes;
    return EncodeDenseMap(mid, MapFormat{TensorMapType(call.dtype, kTf32x3)},
                          {kMiddle, call.width, call.height, call.images * kPlanes},
                          {kChunk<T>, task->box_width, box_rows, 1}, &maps->mid);
  }

  template <class U>
  Error Second(int layer, SecondTask<T> task, const SecondMaps& maps, int shared) const {
    const int first = static_cast<int>(call.channels), channels = first + layer * kGrowth;
    task.kernel = prepared + PreparedBytes(sizeof(T), kTf32x3, first, layer) +
                  DenseChunks(first, channels, kChunk<T>).all * int64_t{kFirstPiece} * kPlanes;
    task.kernel2 = static_cast<const T*>(call.layers[layer].kernel2);
    task.out = static_cast<T*>(call.out) + channels;
    const dim3 grid(static_cast<unsigned>(std::min(task.tiles, multiprocessors)));
    return chain.Launch<SecondKernel<U>>("SecondKernel", grid, U::kThreads, shared, true, task, maps);
  }

  template <class First_, class Second_>
  Error Run() const {
    FirstMaps first_maps;
    SecondMaps second_maps;
    SecondTask<T> second{};
    int shared = 0;
    if (!MapFirst(First_::kPixels, &first_maps) || !CutSecond<Second_>(&second, &second_maps, &shared)) {
      return MapsRefused("FirstKernel and SecondKernel");
    }
    Error error = Prepare();
    for (int i = 0; i < static_cast<int>(call.layers.size()) && error.success(); ++i) {
      error = First<First_>(i, first_maps);
      if (error.success()) error = Second<Second_>(i, second, second_maps, shared);
    }
    return error;
  }

  template <class First_>
  Error RunFirst(const DenseLayersPlan& plan) const {
    if (plan.second_groups == 1) return Run<First_, SecondTile<T, 1, kTf32x3>>();
    return Run<First_, SecondTile<T, 2, kTf32x3>>();
  }
  Error Run(const DenseLayersPlan& plan) const {
    if (plan.first_out_channels == 32) return RunFirst<FirstTile<T, 1, 4, 32, kTf32x3>>(plan);
    if (plan.first_out_channels == 64) return RunFirst<FirstTile<T, 1, kTf32x3 ? 2 : 4, 64, kTf32x3>>(plan);
    if (plan.first_groups == 1) return RunFirst<FirstTile<T, 1, 2, 128, kTf32x3>>(plan);
    if (kTf32x3 || plan.first_groups == 2) return RunFirst<FirstTile<T, 2, 1, 128, kTf32x3>>(plan);
    return RunFirst<FirstTile<T, kTf32x3 ? 2 : 3, 1, 128, kTf32x3>>(plan);
  }
};

}  // namespace

Error LaunchDenseLayers(const DenseBlockCall& call, const DenseLayersPlan& plan, unsigned char* memory,
                        const DeviceInfo& device, cudaStream_t stream) {
  const auto run = [&](auto element, auto tf32x3) {
    using T = decltype(element);
    constexpr bool kTf32x3 = decltype(tf32x3)::value;
    const int64_t kernels = PreparedBytes(sizeof(T), kTf32x3, static_cast<int>(call.channels), call.layers.size());
    const Block<T, kTf32x3> block{call,
                                  LaunchChain{stream},
                                  device.shared_memory - kStaticBytes,
                                  device.multiprocessors,
                                  memory,
                                  reinterpret_cast<T*>(memory + kernels)};
    return block.Run(plan);
  };
  if (call.precise) return run(float{}, std::true_type{});
  return DispatchDtype(call.dtype, [&](auto element) { return run(element, std::false_type{}); });
}

}  // namespace jsc
