#include "cuda/dense_conv/wgmma/maps.h"

#include "cuda/core/driver.h"

namespace jsc {
namespace {

// data: x, or its low parts
bool MapPixels(const DeviceCall& call, const void* data, const WgmmaPlan& plan, CUtensorMapDataType type,
               cuuint64_t bytes, CUtensorMap* map) {
  static const auto tiled = FindDriverFunction<decltype(&cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled");
  static const auto windows = FindDriverFunction<decltype(&cuTensorMapEncodeIm2col)>("cuTensorMapEncodeIm2col");
  const ConvArgs& a = call.args;
  const int64_t axes[] = {a.channels, a.size[1], a.size[0], a.images};
  cuuint64_t size[4], stride[4];  // stride: bytes of all axes up to this one
  for (int i = 0; i < 4; ++i) {
    size[i] = static_cast<cuuint64_t>(axes[i]);
    stride[i] = size[i] * (i > 0 ? stride[i - 1] : bytes);
  }
  const auto side = static_cast<cuuint32_t>(kRowBytes / bytes);
  if (plan.patch) {
    const cuuint32_t box[] = {side, static_cast<cuuint32_t>(plan.patch_wide), static_cast<cuuint32_t>(plan.patch_high),
                              1};
    const cuuint32_t step[] = {1, 1, 1, 1};
    return tiled && tiled(map, type, 4, const_cast<void*>(data), size, stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
                          CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                          CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
  }
  int lower[2], upper[2];  // where the first and, from the last pixel, the last window begin; columns, then rows
  for (int i = 0; i < 2; ++i) {
    const int axis = 1 - i;
    lower[i] = static_cast<int>(-a.pad_low[axis]);
    upper[i] = static_cast<int>((a.conv_size[axis] - 1) * a.stride[axis] - a.pad_low[axis] - (a.size[axis] - 1));
  }
  const cuuint32_t step[] = {1, static_cast<cuuint32_t>(a.stride[1]), static_cast<cuuint32_t>(a.stride[0]), 1};
  return windows &&
         windows(map, type, 4, const_cast<void*>(data), size, stride, lower, upper, side,
                 static_cast<cuuint32_t>(plan.pixels), step, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// All weights of a tile's step at once, boxes of 128 bytes of them one behind the other; or by pieces, where the last
// has fewer. Strides need not grow from axis to axis.
bool MapWeights(const DeviceCall& call, const WgmmaPlan& plan, CUtensorMapDataType type, cuuint64_t bytes,
                CUtensorMap* map) {
  static const auto tiled = FindDriverFunction<decltype(&cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled");
  const ConvArgs& a = call.args;
  const int64_t taps = a.stacks * a.kernel_size[0] * a.kernel_size[1];
  if (!HasWholeWeights(a, static_cast<int>(bytes))) {
    return MapKernelPieces(call.kernel, a.out_channels, a.group_channels, taps, type, static_cast<int64_t>(bytes), map);
  }
  const auto side = static_cast<cuuint32_t>(kRowBytes / bytes);
  const auto out_channels = static_cast<cuuint64_t>(a.out_channels), depth = static_cast<cuuint64_t>(a.group_channels);
  const cuuint64_t size[] = {side, depth, out_channels / side, static_cast<cuuint64_t>(taps)};
  const cuuint64_t stride[] = {out_channels * bytes, kRowBytes, out_channels * depth * bytes};
  const cuuint32_t box[] = {side, side, static_cast<cuuint32_t>(plan.out_channels) / side, 1}, step[] = {1, 1, 1, 1};
  return tiled && tiled(map, type, 4, const_cast<void*>(call.kernel), size, stride, box, step,
                        CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace

bool MakeWgmmaMaps(const DeviceCall& call, const WgmmaPlan& plan, Tf32x3Maps* maps) {
  const CUtensorMapDataType type = TensorMapType(call.dtype, plan.tf32x3);
  const cuuint64_t bytes = call.dtype == ffi::DataType::F32 ? 4 : 2;
  return MapWeights(call, plan, type, bytes, &maps->kernel) && MapPixels(call, call.x, plan, type, bytes, &maps->x) &&
         (!call.low.x || MapPixels(call, call.low.x, plan, type, bytes, &maps->low));
}

}  // namespace jsc
