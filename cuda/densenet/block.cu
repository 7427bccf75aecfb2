// A DenseNet block as a run of kernels that overlap, one per layer: densenet/block_kernel.cuh.
#include <algorithm>
#include <cstdlib>

#include "cuda/core/tensor_map.h"
#include "cuda/densenet/block_kernel.cuh"
#include "cuda/densenet/block_transition.cuh"

namespace jsc {
namespace {

// Tiles: 16, 56 and 112 results, and up to 48, 96 and 160 pixels with those around them. Where float32 has large tiles,
// two blocks of an SM overlap in TF32 (8.1 to 7.0 us a layer at 56x56); at HIGHEST one block with all registers is the
// faster (13.8 and 12.3).
template <typename T, bool kPrecise>
struct DenseShapes {
  static constexpr bool kIsFloat = sizeof(T) == 4, kTight = kIsFloat && !kPrecise;
  using Small = DenseShape<T, kPrecise, 8, 5, 2, kTight ? 2 : 4, kPrecise ? 2 : kIsFloat ? 4 : 3, 2>;
  using Middle = DenseShape<T, kPrecise, 8, 12, 7, kIsFloat ? 1 : 2, kIsFloat ? 4 : 3, 2>;
  using Large = DenseShape<T, kPrecise, 4, 20, 14, 1, kIsFloat ? 2 : 4, kPrecise ? 1 : 2, kIsFloat, kTight>;
};

// Channels of a block of a transition's clusters of 8: whole products.
int TransitionShare(int64_t channels) { return static_cast<int>((channels + 127) / 128 * 16); }

unsigned Inverse(int64_t n) { return static_cast<unsigned>((65536 + n - 1) / n); }

// Boxes of a tile with the pixels around it x so many chunks of 32 channels of a map [N, H, W, C].
bool MapPixels(const void* data, const DenseBlockCall& call, int64_t channels, const DensePlan& plan, int chunks,
               CUtensorMapDataType type, CUtensorMap* map) {
  MapFormat format{type, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B};
  const int64_t bytes = format.element_bytes(), pixel = channels * bytes, row = call.width * pixel;
  if (bytes == 2) format.swizzle = CU_TENSOR_MAP_SWIZZLE_64B;
  return EncodeTiledMap(data, format, {kDenseChannels, call.width, call.height, channels / kDenseChannels, call.images},
                        {pixel, row, kDenseChannels * bytes, call.height * row},
                        {kDenseChannels, plan.tile_width + 2, plan.tile_height + 2, chunks, 1}, map);
}

// Boxes of 16 output channels x `box_channels` x all taps of a kernel [taps, channels, output channels].
bool MapWeights(const void* data, int64_t taps, int64_t channels, int64_t out_channels, int64_t box_channels,
                CUtensorMapDataType type, CUtensorMap* map) {
  MapFormat format{type, CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_128B};
  if (format.element_bytes() == 2) format.swizzle = CU_TENSOR_MAP_SWIZZLE_32B;
  return EncodeDenseMap(data, format, {out_channels, channels, taps}, {16, box_channels, taps}, map);
}

template <class U>
Error LaunchLayers(const DenseBlockCall& call, const DensePlan& plan, cudaStream_t stream) {
  using T = typename U::T;
  constexpr auto kKernel = DenseLayerKernel<U>;
  static_assert(U::SharedBytes(kMaxBlockChannels) <= kBlockSharedBytes);
  Error error = Prepare<kKernel>("DenseLayerKernel");
  if (error.failure()) return error;
  const CUtensorMapDataType type = TensorMapType(call.dtype, true),
                            weight_type = TensorMapType(call.dtype, call.precise);
  DenseLayerTask<T> task{};
  const int64_t layers = static_cast<int64_t>(call.layers.size());
  task.first_channels = static_cast<int>(call.channels);
  task.total = static_cast<int>(call.channels + layers * kGrowth);
  task.out = static_cast<T*>(call.out);
  task.height = static_cast<int>(call.height);
  task.width = static_cast<int>(call.width);
  task.pixels = static_cast<int>(call.images * call.height * call.width);
  task.tile_height = plan.tile_height, task.tile_width = plan.tile_width;
  task.tiles_y = plan.tiles_y, task.tiles_x = plan.tiles_x;
  task.by_box_width = Inverse(plan.tile_width + 2), task.by_tile_width = Inverse(plan.tile_width);
  DenseLayerMaps maps{};
  bool mapped = MapPixels(call.x, call, call.channels, plan, U::kStageChunks, type, &maps.x) &&
                MapPixels(call.out, call, task.total, plan, U::kStageChunks, type, &maps.block) &&
                MapPixels(call.out, call, task.total, plan, 1, type, &maps.newest);
  const int64_t blocks = call.images * plan.tiles_y * plan.tiles_x * U::kSplit;
  for (int64_t i = 0; i < layers && mapped; ++i) {
    const DenseLayerArgs& layer = call.layers[i];
    const int64_t channels = call.channels + i * kGrowth;
    mapped =
        MapWeights(layer.kernel1, 1, channels, kMiddle, U::kStageChunks * kDenseChannels, weight_type, &maps.kernel1) &&
        MapWeights(layer.kernel1, 1, channels, kMiddle, kDenseChannels, weight_type, &maps.weights) &&
        MapWeights(layer.kernel2, 9, kMiddle, kGrowth, U::kMids, weight_type, &maps.kernel2);
    if (!mapped) break;
    task.scale = static_cast<const T*>(layer.scale);
    task.shift = static_cast<const T*>(layer.shift);
    task.bias = static_cast<const T*>(layer.bias1);
    task.kernel1 = static_cast<const T*>(layer.kernel1);
    task.input = static_cast<const T*>(call.x);
    const bool copies = call.transition.scale == nullptr && i == std::min<int64_t>(1, layers - 1);
    task.x = copies ? static_cast<const T*>(call.x) : nullptr;
    task.channels = static_cast<int>(channels);
    task.early_channels = task.channels - (i > 0 ? kGrowth : 0);
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(blocks));
    config.blockDim = dim3(U::kThreads);
    config.dynamicSmemBytes = U::SharedBytes(task.channels);
    config.stream = stream;
    Gate gate;
    gate.overlaps = i > 0;
    LaunchAttributes attributes(U::kSplit, gate);
    config.attrs = attributes.list;
    config.numAttrs = attributes.count;
    error = CheckCuda(cudaLaunchKernelEx(&config, kKernel, task, maps), "DenseLayerKernel");
    if (error.failure()) return error;
  }
  if (mapped) return Error::Success();
  return MapsRefused("DenseLayerKernel");
}

template <class U>
Error LaunchTransition(const DenseBlockCall& call, cudaStream_t stream) {
  using T = typename U::T;
  constexpr auto kKernel = TransitionKernel<U>;
  Error error = Prepare<kKernel>("TransitionKernel");
  if (error.failure()) return error;
  const DenseTransitionArgs& transition = call.transition;
  TransitionTask<T> task{};
  task.x = static_cast<const T*>(call.x);
  task.map = static_cast<const T*>(call.out);
  task.scale = static_cast<const T*>(transition.scale);
  task.shift = static_cast<const T*>(transition.shift);
  task.kernel = static_cast<const T*>(transition.kernel);
  task.out = static_cast<T*>(transition.out);
  task.first_channels = static_cast<int>(call.channels);
  task.total = static_cast<int>(call.channels + static_cast<int64_t>(call.layers.size()) * kGrowth);
  task.early_channels = task.total - kGrowth;
  task.out_channels = static_cast<int>(transition.out_channels);
  task.height = static_cast<int>(call.height);
  task.width = static_cast<int>(call.width);
  task.pixels = static_cast<int>(call.images * (call.height / 2) * (call.width / 2));
  task.share = TransitionShare(task.total);
  task.out_channel_tiles = (task.out_channels + U::kOutChannels - 1) / U::kOutChannels;
  cudaLaunchConfig_t config{};
  config.gridDim =
      dim3(static_cast<unsigned>((task.pixels + U::kPixels - 1) / U::kPixels * task.out_channel_tiles * U::kSplit));
  config.blockDim = dim3(U::kThreads);
  config.dynamicSmemBytes = U::SharedBytes(task.share);
  config.stream = stream;
  Gate gate;
  gate.overlaps = true;
  LaunchAttributes attributes(U::kSplit, gate);
  config.attrs = attributes.list;
  config.numAttrs = attributes.count;
  return CheckCuda(cudaLaunchKernelEx(&config, kKernel, task), "TransitionKernel");
}

template <typename T, bool kPrecise>
Error LaunchTransition(const DenseBlockCall& call, cudaStream_t stream) {
  const int64_t total = call.channels + static_cast<int64_t>(call.layers.size()) * kGrowth;
  if (TransitionShare(total) <= 64) return LaunchTransition<TransitionShape<T, kPrecise, 128>>(call, stream);
  return LaunchTransition<TransitionShape<T, kPrecise, 64>>(call, stream);
}

template <typename T, bool kPrecise>
Error LaunchShape(const DenseBlockCall& call, const DensePlan& plan, cudaStream_t stream) {
  using Shapes = DenseShapes<T, kPrecise>;
  if (plan.shape == 0) return LaunchLayers<typename Shapes::Small>(call, plan, stream);
  if (plan.shape == 1) return LaunchLayers<typename Shapes::Middle>(call, plan, stream);
  return LaunchLayers<typename Shapes::Large>(call, plan, stream);
}

}  // namespace

DensePlan ChooseDensePlan(const DenseBlockCall& call) {
  // How many clusters run at once; the first tile that does not need more is taken.
  struct Tile {
    int shape, height, width, clusters;
  };
  constexpr Tile kTiles[] = {{0, 2, 7, 15}, {1, 2, 14, 15}, {1, 4, 14, 15}, {2, 8, 14, 30}};
  // 16 bits: at 14x14 seven large tiles take 6 % less than 14 small ones; float32 the other way round.
  const bool prefers_large = call.dtype != DataType::F32 && call.width >= kTiles[1].width;
  DensePlan plan{};
  for (const Tile& tile : kTiles) {
    if (prefers_large ? tile.shape == 0 : tile.shape == 1 && tile.height == 2) continue;
    plan = {tile.shape, tile.height, tile.width, 0, 0};
    plan.tiles_y = static_cast<int>((call.height + plan.tile_height - 1) / plan.tile_height);
    plan.tiles_x = static_cast<int>((call.width + plan.tile_width - 1) / plan.tile_width);
    if (call.images * plan.tiles_y * plan.tiles_x <= tile.clusters) break;
  }
  return plan;
}

template <typename T, bool kPrecise>
Error LaunchBlock(const DenseBlockCall& call, cudaStream_t stream) {
  Error error = LaunchShape<T, kPrecise>(call, ChooseDensePlan(call), stream);
  if (error.failure() || call.transition.scale == nullptr) return error;
  return LaunchTransition<T, kPrecise>(call, stream);
}

Error DenseBlock(const DenseBlockCall& call, int device, cudaStream_t stream) {
  if (GetDeviceInfo(device).clusters[8] == 0 || !GetDeviceInfo(device).tensor_maps) {
    return Error(ErrorCode::kUnimplemented, "jsc_dense_block needs clusters of 8 blocks (Hopper or later)");
  }
  if (call.precise) return LaunchBlock<float, true>(call, stream);
  return DispatchDtype(call.dtype, [&](auto element) { return LaunchBlock<decltype(element), false>(call, stream); });
}

}  // namespace jsc
