// How the layers of a DenseNet block of many images are cut, and what memory they need.
#include <algorithm>
#include <string>

#include "cuda/densenet/layers.h"
#include "model_constants.h"

namespace jsc {

int64_t DenseLayersBytes(int element_bytes, bool precise, int64_t pixels, int64_t channels, int64_t layers) {
  const int64_t kernels = PreparedBytes(element_bytes, precise, static_cast<int>(channels), static_cast<int>(layers));
  return kSwizzleBytes + kernels + pixels * kMiddle * element_bytes * (precise ? 2 : 1);
}

// Fits 300 times of DenseNet-121's blocks at batch 1 to 32 on an H200: from how many channels on tiles are narrower is
// in "gpu chains" of dispatch/model.json, other numbers are the kernels' tiles. Blocks of both kernels run side by side
// where there are SMs for all.
DenseLayersPlan ChooseDenseLayersPlan(const DenseBlockCall& call, int multiprocessors) {
  const int64_t pixels = call.images * call.height * call.width, sixty_fours = (pixels + 63) / 64;
  DenseLayersPlan plan{1, 128, 1};
  if (sixty_fours > multiprocessors) plan.first_groups = sixty_fours > 2 * multiprocessors ? 3 : 2;
  const bool has_many_channels = call.channels >= model::gpu_chains::kChannelsOfABlockMany;
  if (sixty_fours * 2 <= multiprocessors && has_many_channels) plan.first_out_channels = 64;
  if (sixty_fours * 4 <= multiprocessors) plan.first_out_channels = 32;
  const int64_t first = (sixty_fours + plan.first_groups - 1) / plan.first_groups * (kMiddle / plan.first_out_channels);
  const int64_t width = std::min<int64_t>(64, call.width), rows = std::min(64 / width, call.height);
  const int64_t wide = call.width > 64 ? (call.width + 61) / 62 : 1, high = (call.height + rows - 1) / rows;
  const int64_t second = call.images * wide * high, half = call.images * wide * ((high + 1) / 2);
  const bool side_by_side = first + second > multiprocessors && first + half <= multiprocessors;
  if (high > 1 && (second > multiprocessors || side_by_side)) plan.second_groups = 2;
  return plan;
}

Error DenseLayers(const DenseBlockCall& call, Workspace workspace, int device, [[maybe_unused]] cudaStream_t stream) {
  if (call.transition.scale != nullptr) {
    return Error(ErrorCode::kInvalidArgument, "a dense block of many images has no transition in its call");
  }
  const int element_bytes = call.dtype == DataType::F32 ? 4 : 2;
  const int64_t pixels = call.images * call.height * call.width, layers = static_cast<int64_t>(call.layers.size());
  const int64_t needed = DenseLayersBytes(element_bytes, call.precise, pixels, call.channels, layers);
  if (static_cast<int64_t>(workspace.bytes) < needed) {
    return Error(ErrorCode::kInvalidArgument,
                 "the workspace of a dense block of many images must have " + std::to_string(needed) + " bytes");
  }
#ifdef JSC_WGMMA
  const DeviceInfo& info = GetDeviceInfo(device);
  if (info.wgmma) {
    auto* memory = static_cast<unsigned char*>(workspace.data);
    memory += -reinterpret_cast<uintptr_t>(memory) % kSwizzleBytes;
    return LaunchDenseLayers(call, ChooseDenseLayersPlan(call, info.multiprocessors), memory, info, stream);
  }
#endif
  return Error(ErrorCode::kUnimplemented,
               "a dense block of many images needs Hopper's warpgroup products on device " + std::to_string(device));
}

}  // namespace jsc
