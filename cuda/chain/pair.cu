// Launches two 1x1 convolutions in one kernel (chain/pair.cuh).
#include "cuda/chain/pair.cuh"
#include "cuda/core/tensor_map.h"

namespace jsc {
namespace {

// Boxes of some of a tile's pixels x 128 bytes of channels of a map [pixels, channels].
bool MapTilePixels(const PairCall& call, const void* data, const PairPlan& plan, const MapFormat& format,
                   CUtensorMap* map) {
  return EncodeDenseMap(data, format, {call.shape.in_channels, call.shape.pixels, 1},
                        {kRowBytes / format.element_bytes(), plan.box_rows, 1}, map);
}

bool MapPair(const PairCall& call, const PairPlan& plan, PairMaps* maps) {
  const PairShape& shape = call.shape;
  const MapFormat format{TensorMapType(call.dtype, call.precise)};
  return MapTilePixels(call, call.x, plan, format, &maps->x) &&
         (!call.low_x || MapTilePixels(call, call.low_x, plan, format, &maps->low)) &&
         EncodeKernelPieces(call.kernel, format.type, shape.channels, shape.in_channels, 1, &maps->kernel) &&
         EncodeKernelPieces(call.next_kernel, format.type, shape.out_channels, shape.channels, 1, &maps->next_kernel);
}

template <class U, typename T>
Error Launch(const PairCall& call, const PairPlan& plan, cudaStream_t stream) {
  constexpr auto kKernel = PairKernel<U, T>;
  Error error = Prepare<kKernel>("PairKernel");
  if (error.failure()) return error;
  PairMaps maps;
  if (!MapPair(call, plan, &maps)) return MapsRefused("PairKernel");
  PairTask<T> task{};
  task.bias = static_cast<const T*>(call.bias);
  task.next_bias = static_cast<const T*>(call.next_bias);
  task.residual = static_cast<const T*>(call.residual);
  task.x = static_cast<const T*>(call.x);
  task.kernel = static_cast<const T*>(call.kernel);
  task.next_kernel = static_cast<const T*>(call.next_kernel);
  task.middle = static_cast<T*>(call.middle);
  task.out = static_cast<T*>(call.out);
  task.low_middle = static_cast<T*>(call.low_middle);
  task.low_out = static_cast<T*>(call.low_out);
  task.copies_low = call.low_x != nullptr;
  task.gate = call.gate;
  task.pixels = static_cast<int>(call.shape.pixels);
  task.tile_pixels = plan.tile_pixels;
  task.channels = static_cast<int>(call.shape.channels);
  task.out_channels = static_cast<int>(call.shape.out_channels);
  task.in_channels = static_cast<int>(call.shape.in_channels);
  task.steps = static_cast<int>(call.shape.in_channels / U::kStepChannels);
  task.blocks = plan.blocks;
  task.pieces = static_cast<int>(call.shape.out_channels / kPairPiece / plan.blocks);
  task.box_rows = plan.box_rows;
  task.sharing = plan.sharing;
  task.slots = plan.slots;
  task.middle_at = plan.middle_at;
  task.weights_at = plan.weights_at;
  task.relu = call.relu;
  task.next_relu = call.next_relu;
  task.by_blocks = Divider(plan.blocks);
  task.by_steps = Divider(task.steps);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(plan.tiles * plan.blocks));
  config.blockDim = dim3(U::kThreads);
  config.dynamicSmemBytes = plan.shared_bytes;
  config.stream = stream;
  if (MayOverlap<kKernel>(&config, call.in_front)) task.gate.overlaps = true;
  LaunchAttributes attributes(plan.blocks, task.gate);
  config.attrs = attributes.list;
  config.numAttrs = attributes.count;
  return CheckCuda(cudaLaunchKernelEx(&config, kKernel, task, maps), "PairKernel");
}

}  // namespace

Error LaunchPair(const PairCall& call, const PairPlan& plan, cudaStream_t stream) {
  const bool small = plan.pixels == 32;
  if (call.dtype == DataType::F32 && call.precise) {
    return small ? Launch<PairTile<float, 32, true>, float>(call, plan, stream)
                 : Launch<PairTile<float, 56, true>, float>(call, plan, stream);
  }
  return DispatchDtype(call.dtype, [&](auto element) {
    using T = decltype(element);
    return small ? Launch<PairTile<T, 32>, T>(call, plan, stream) : Launch<PairTile<T, 56>, T>(call, plan, stream);
  });
}

}  // namespace jsc
