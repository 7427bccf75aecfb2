#include "cuda/sparse/ecr/kernel_map.h"

#include "cuda/core/driver.h"

namespace jsc {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

Encode GetEncode() {
  static const auto encode = FindDriverFunction<Encode>("cuTensorMapEncodeTiled");
  return encode;
}

// A map of a dense array, the innermost of its kRank axes first. Boxes beyond the array's edges are filled with zeros.
template <int kRank>
bool MakeMap(ffi::DataType dtype, const void* data, const cuuint64_t (&size)[kRank], const cuuint32_t (&box)[kRank],
             CUtensorMap* map) {
  cuuint64_t stride[kRank];  // bytes, of all but the first axis
  cuuint32_t step[kRank];
  cuuint64_t bytes = dtype == ffi::DataType::F32 ? 4 : 2;
  for (int i = 0; i < kRank; ++i) {
    bytes *= size[i];
    stride[i] = bytes;
    step[i] = 1;
  }
  return GetEncode()(map, TensorMapType(dtype, true), kRank, const_cast<void*>(data), size, stride, box, step,
                     CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                     CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace

bool HasKernelMaps() { return GetEncode() != nullptr; }

bool MakeTensorMaps(const DeviceCall& call, const EcrPlan& plan, TensorMaps* maps) {
  const ConvArgs& a = call.args;
  auto size = [](int64_t n) { return static_cast<cuuint64_t>(n); };
  auto box = [](int64_t n) { return static_cast<cuuint32_t>(n); };
  return (!plan.bulk ||
          MakeMap<3>(
              call.dtype, call.kernel,
              {size(a.out_channels), size(a.group_channels), size(a.stacks * a.kernel_size[0] * a.kernel_size[1])},
              {box(plan.tile_out_channels()), box(plan.chunk_channels), box(plan.chunk_taps)}, &maps->kernel)) &&
         (!plan.stream ||
          MakeMap<4>(
              call.dtype, call.x, {size(a.channels), size(a.size[1]), size(a.size[0]), size(a.images)},
              {box(plan.chunk_channels), box(plan.tile_patch[1]), box(plan.tile_patch[0]), box(plan.tile_images)},
              &maps->x));
}

}  // namespace jsc
