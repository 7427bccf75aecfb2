// A DenseNet block as a run of kernels that overlap, one per layer: densenet/block_kernel.cuh.
#include <algorithm>
#include <cstdlib>

#include "cuda/core/driver.h"
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
               CUtensorMapDataType type, cuuint64_t bytes, CUtensorMap* map) {
  static const auto encode = FindDriverFunction<decltype(&cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled");
  auto size_of = [](int64_t n) { return static_cast<cuuint64_t>(n); };
  const cuuint64_t size[] = {kDenseChannels, size_of(call.width), size_of(call.height),
                             size_of(channels / kDenseChannels), size_of(call.images)};
  const cuuint64_t pixel = size_of(channels) * bytes, row = size[1] * pixel;
  const cuuint64_t stride[] = {pixel, row, kDenseChannels * bytes, size[2] * row};
  const cuuint32_t box[] = {kDenseChannels, static_cast<cuuint32_t>(plan.tile_width + 2),
                            static_cast<cuuint32_t>(plan.tile_height + 2), static_cast<cuuint32_t>(chunks), 1};
  const cuuint32_t step[] = {1, 1, 1, 1, 1};
  return encode && encode(map, type, 5, const_cast<void*>(data), size, stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
                          bytes == 4 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
                          CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// Boxes of 16 output channels x `deep` channels x all taps of a kernel [taps, channels, output channels].
bool MapWeights(const void* data, int64_t taps, int64_t channels, int64_t out_channels, int64_t box_channels,
                CUtensorMapDataType type, cuuint64_t bytes, CUtensorMap* map) {
  static const auto encode = FindDriverFunction<decltype(&cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled");
  auto size_of = [](int64_t n) { return static_cast<cuuint64_t>(n); };
  const cuuint64_t size[] = {size_of(out_channels), size_of(channels), size_of(taps)};
  const cuuint64_t stride[] = {size_of(out_channels) * bytes, size_of(out_channels * channels) * bytes};
  const cuuint32_t box[] = {16, static_cast<cuuint32_t>(box_channels), static_cast<cuuint32_t>(taps)},
                   step[] = {1, 1, 1};
  return encode && encode(map, type, 3, const_cast<void*>(data), size, stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
                          bytes == 4 ? CU_TENSOR_MAP_SWIZZLE_NONE : CU_TENSOR_MAP_SWIZZLE_32B,
                          CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

template <class U>
ffi::Error LaunchLayers(const DenseBlockCall& call, const DensePlan& plan, cudaStream_t stream) {
  using T = typename U::T;
  constexpr auto kKernel = DenseLayerKernel<U>;
  ffi::Error error = Prepare<kKernel>("DenseLayerKernel");
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
  bool mapped = MapPixels(call.x, call, call.channels, plan, U::kStageChunks, type, U::kBytes, &maps.x) &&
                MapPixels(call.out, call, task.total, plan, U::kStageChunks, type, U::kBytes, &maps.block) &&
                MapPixels(call.out, call, task.total, plan, 1, type, U::kBytes, &maps.newest);
  const int64_t blocks = call.images * plan.tiles_y * plan.tiles_x * U::kSplit;
  for (int64_t i = 0; i < layers && mapped; ++i) {
    const DenseLayerArgs& layer = call.layers[i];
    const int64_t channels = call.channels + i * kGrowth;
    mapped = MapWeights(layer.kernel1, 1, channels, kMiddle, U::kStageChunks * kDenseChannels, weight_type, U::kBytes,
                        &maps.kernel1) &&
             MapWeights(layer.kernel1, 1, channels, kMiddle, kDenseChannels, weight_type, U::kBytes, &maps.weights) &&
             MapWeights(layer.kernel2, 9, kMiddle, kGrowth, U::kMids, weight_type, U::kBytes, &maps.kernel2);
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
  if (mapped) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kInternal, "cuTensorMapEncodeTiled refuses the maps of a dense block");
}

template <class U>
ffi::Error LaunchTransition(const DenseBlockCall& call, cudaStream_t stream) {
  using T = typename U::T;
  constexpr auto kKernel = TransitionKernel<U>;
  ffi::Error error = Prepare<kKernel>("TransitionKernel");
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
ffi::Error LaunchTransition(const DenseBlockCall& call, cudaStream_t stream) {
  const int64_t total = call.channels + static_cast<int64_t>(call.layers.size()) * kGrowth;
  if (TransitionShare(total) <= 64) return LaunchTransition<TransitionShape<T, kPrecise, 128>>(call, stream);
  return LaunchTransition<TransitionShape<T, kPrecise, 64>>(call, stream);
}

template <typename T, bool kPrecise>
ffi::Error LaunchShape(const DenseBlockCall& call, const DensePlan& plan, cudaStream_t stream) {
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
  const bool prefers_large = call.dtype != ffi::DataType::F32 && call.width >= kTiles[1].width;
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
ffi::Error LaunchBlock(const DenseBlockCall& call, cudaStream_t stream) {
  ffi::Error error = LaunchShape<T, kPrecise>(call, ChooseDensePlan(call), stream);
  if (error.failure() || call.transition.scale == nullptr) return error;
  return LaunchTransition<T, kPrecise>(call, stream);
}

ffi::Error DenseBlock(const DenseBlockCall& call, int device, cudaStream_t stream) {
  if (GetDeviceInfo(device).clusters[8] == 0 || !GetDeviceInfo(device).tensor_maps) {
    return ffi::Error(ffi::ErrorCode::kUnimplemented, "jsc_dense_block needs clusters of 8 blocks (Hopper or later)");
  }
  if (call.precise) return LaunchBlock<float, true>(call, stream);
  return DispatchDtype(call.dtype, [&](auto element) { return LaunchBlock<decltype(element), false>(call, stream); });
}

}  // namespace jsc
