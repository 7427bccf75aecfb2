#include "cuda/sparse/ecr/kernel_map.h"

#include "cuda/core/tensor_map.h"

namespace jsc {

bool MakeTensorMaps(const DeviceCall& call, const EcrPlan& plan, TensorMaps* maps) {
  const ConvArgs& a = call.args;
  const MapFormat format{TensorMapType(call.dtype, true), CU_TENSOR_MAP_SWIZZLE_NONE};
  const int64_t taps = a.stacks * a.kernel_size[0] * a.kernel_size[1];
  const bool has_kernel =
      !plan.bulk || EncodeDenseMap(call.kernel, format, {a.out_channels, a.group_channels, taps},
                                   {plan.tile_out_channels(), plan.chunk_channels, plan.chunk_taps}, &maps->kernel);
  return has_kernel &&
         (!plan.stream ||
          EncodeDenseMap(call.x, format, {a.channels, a.size[1], a.size[0], a.images},
                         {plan.chunk_channels, plan.tile_patch[1], plan.tile_patch[0], plan.tile_images}, &maps->x));
}

}  // namespace jsc
