#include "cuda/dense_conv/wgmma/maps.h"

#include "cuda/core/tensor_map.h"

namespace jsc {
namespace {

// data: x, or its low parts
bool MapPixels(const DeviceCall& call, const void* data, const WgmmaPlan& plan, const MapFormat& format,
               CUtensorMap* map) {
  const ConvArgs& a = call.args;
  const AxisList size = {a.channels, a.size[1], a.size[0], a.images};
  const int64_t side = kRowBytes / format.element_bytes();
  if (plan.patch) return EncodeDenseMap(data, format, size, {side, plan.patch_wide, plan.patch_high, 1}, map);
  int lower[2], upper[2];  // where the first and, from the last pixel, the last window begin; columns, then rows
  for (int i = 0; i < 2; ++i) {
    const int axis = 1 - i;
    lower[i] = static_cast<int>(-a.pad_low[axis]);
    upper[i] = static_cast<int>((a.conv_size[axis] - 1) * a.stride[axis] - a.pad_low[axis] - (a.size[axis] - 1));
  }
  return EncodeWindowMap(data, format, size, lower, upper, {side, plan.pixels}, {1, a.stride[1], a.stride[0], 1}, map);
}

// All weights of a tile's step at once, boxes of 128 bytes of them one behind the other; or by pieces, where the last
// has fewer.
bool MapWeights(const DeviceCall& call, const WgmmaPlan& plan, const MapFormat& format, CUtensorMap* map) {
  const ConvArgs& a = call.args;
  const int64_t taps = a.stacks * a.kernel_size[0] * a.kernel_size[1], bytes = format.element_bytes();
  if (!HasWholeWeights(a, static_cast<int>(bytes))) {
    return EncodeKernelPieces(call.kernel, format.type, a.out_channels, a.group_channels, taps, map);
  }
  const int64_t side = kRowBytes / bytes, row = a.out_channels * bytes;
  return EncodeTiledMap(call.kernel, format, {side, a.group_channels, a.out_channels / side, taps},
                        {row, kRowBytes, row * a.group_channels}, {side, side, plan.out_channels / side, 1}, map);
}

}  // namespace

bool MakeWgmmaMaps(const DeviceCall& call, const WgmmaPlan& plan, Tf32x3Maps* maps) {
  const MapFormat format{TensorMapType(call.dtype, plan.tf32x3)};
  return MapWeights(call, plan, format, &maps->kernel) && MapPixels(call, call.x, plan, format, &maps->x) &&
         (!call.low.x || MapPixels(call, call.low.x, plan, format, &maps->low));
}

}  // namespace jsc
