#include "cuda/dense_conv/splitk_channels/maps.h"

#include "cuda/core/driver.h"

namespace jsc {

bool MakeSplitKChannelsMaps(const DeviceCall& call, const SplitKChannelsPlan& plan, SplitKChannelsMaps* maps) {
  static const auto encode = FindDriverFunction<decltype(&cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled");
  if (!encode) return false;
  const ConvArgs& a = call.args;
  const CUtensorMapDataType type = TensorMapType(call.dtype, plan.tf32x3);
  const int64_t bytes = call.dtype == ffi::DataType::F32 ? 4 : 2;
  const auto size_of = [](int64_t n) { return static_cast<cuuint64_t>(n); };
  const auto side_of = [](int64_t n) { return static_cast<cuuint32_t>(n); };
  const cuuint32_t step[] = {1, 1, 1, 1, 1};
  const int64_t channels = kSliceBytes / bytes, weight_bytes = plan.out_channels * bytes;
  const cuuint64_t size[] = {size_of(channels), size_of(a.size[1]), size_of(a.size[0]), size_of(a.images),
                             size_of(a.channels / channels)};
  const cuuint64_t stride[] = {size_of(a.channels * bytes), size_of(a.channels * a.size[1] * bytes),
                               size_of(a.channels * a.size[1] * a.size[0] * bytes), size_of(kSliceBytes)};
  const cuuint32_t box[] = {side_of(channels), side_of(plan.box_wide), side_of(plan.box_high), 1,
                            side_of(plan.slices * plan.warps)};
  const int64_t taps = a.stacks * a.kernel_size[0] * a.kernel_size[1];
  const cuuint64_t kernel_size[] = {size_of(a.out_channels), size_of(a.group_channels), size_of(taps)};
  const cuuint64_t kernel_stride[] = {size_of(a.out_channels * bytes),
                                      size_of(a.out_channels * a.group_channels * bytes)};
  const cuuint32_t kernel_box[] = {side_of(plan.out_channels), side_of(plan.slices * plan.warps * channels),
                                   side_of(a.kernel_size[1])};
  const CUtensorMapSwizzle swizzle = weight_bytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                                     : weight_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                          : CU_TENSOR_MAP_SWIZZLE_32B;
  return encode(&maps->x, type, 5, const_cast<void*>(call.x), size, stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
                CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS &&
         encode(&maps->kernel, type, 3, const_cast<void*>(call.kernel), kernel_size, kernel_stride, kernel_box, step,
                CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace jsc
