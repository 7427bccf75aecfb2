#include <string>

#include "cuda/core/tensor_map.h"
#include "cuda/training/kernel_gradient.h"

namespace jsc {

Error KernelGradient(const ConvArgs& a, const KernelGradientPlan& plan, const KernelGradientBuffers& buffers,
                     [[maybe_unused]] cudaStream_t stream) {
  if (plan.tiles == 0) {
    return Error(
        ErrorCode::kUnimplemented,
        "the gradient of a kernel needs Hopper's warpgroup products, channels in multiples of 4, no groups, and "
        "a tile that fits the call");
  }
  const int64_t needed = KernelGradientBytes(a, plan);
  if (static_cast<int64_t>(buffers.workspace_bytes) < needed) {
    return Error(ErrorCode::kInvalidArgument,
                 "the workspace of the gradient of a kernel must have " + std::to_string(needed) + " bytes");
  }
#ifdef JSC_WGMMA
  KernelGradientMaps maps;
  MapFormat format{TensorMapType(DataType::F32, /*precise=*/true)};
  // Without taps in a row, x is its columns under the results alone.
  const int64_t step = a.kernel_size[1] == 1 ? a.stride[1] : 1, pixel = 4 * a.channels;
  const bool mapped = EncodeTiledMap(buffers.x, format, {a.channels, DivideUp(a.size[1], step), a.size[0], a.images},
                                     {step * pixel, a.size[1] * pixel, a.size[0] * a.size[1] * pixel},
                                     {kGradientBoxChannels, plan.x_columns, 1, 1}, &maps.x);
  format.swizzle = CU_TENSOR_MAP_SWIZZLE_NONE;
  if (!mapped || !EncodeDenseMap(buffers.cotangent, format, {a.out_channels, a.conv_size[1], a.conv_size[0], a.images},
                                 {kGradientBoxChannels, plan.columns, 1, 1}, &maps.cotangent)) {
    return MapsRefused("the gradient of a kernel");
  }
  return LaunchKernelGradient(a, plan, buffers, maps, stream);
#else
  return Error(ErrorCode::kUnimplemented, "this build has no code for Hopper's warpgroup products");
#endif
}

}  // namespace jsc
