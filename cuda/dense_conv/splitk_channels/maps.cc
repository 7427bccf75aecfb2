#include "cuda/dense_conv/splitk_channels/maps.h"

#include "cuda/core/tensor_map.h"

namespace jsc {

bool MakeSplitKChannelsMaps(const DeviceCall& call, const SplitKChannelsPlan& plan, SplitKChannelsMaps* maps) {
  const ConvArgs& a = call.args;
  const CUtensorMapDataType type = TensorMapType(call.dtype, plan.tf32x3);
  const MapFormat of_pixels{type, CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_128B};
  const int64_t bytes = of_pixels.element_bytes(), weight_bytes = plan.out_channels * bytes;
  const MapFormat of_weights{type, weight_bytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                                   : weight_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                        : CU_TENSOR_MAP_SWIZZLE_32B};
  const int64_t channels = kSliceBytes / bytes, slices = plan.slices * plan.warps, pixel = a.channels * bytes;
  const int64_t row = pixel * a.size[1], taps = a.stacks * a.kernel_size[0] * a.kernel_size[1];
  return EncodeTiledMap(call.x, of_pixels, {channels, a.size[1], a.size[0], a.images, a.channels / channels},
                        {pixel, row, row * a.size[0], kSliceBytes}, {channels, plan.box_wide, plan.box_high, 1, slices},
                        &maps->x) &&
         EncodeDenseMap(call.kernel, of_weights, {a.out_channels, a.group_channels, taps},
                        {plan.out_channels, slices * channels, a.kernel_size[1]}, &maps->kernel);
}

}  // namespace jsc
