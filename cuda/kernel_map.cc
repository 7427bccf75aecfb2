#include "kernel_map.h"

#include <cuda_runtime_api.h>

namespace jsc {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

// The driver's function, found without linking to the driver library.
Encode FindEncode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  const cudaError_t status =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
  return status == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(function) : nullptr;
}

Encode GetEncode() {
  static const Encode encode = FindEncode();
  return encode;
}

CUtensorMapDataType MapType(ffi::DataType dtype) {
  if (dtype == ffi::DataType::F32) return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  return dtype == ffi::DataType::BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
}

}  // namespace

bool HasKernelMaps() { return GetEncode() != nullptr; }

bool MakeKernelMap(const ConvCall& call, const ConvPlan& plan, CUtensorMap* map) {
  const ConvArgs& a = call.args;
  const cuuint64_t element = call.dtype == ffi::DataType::F32 ? 4 : 2;
  const cuuint64_t size[3] = {static_cast<cuuint64_t>(a.features), static_cast<cuuint64_t>(a.group_channels),
                              static_cast<cuuint64_t>(a.stacks * a.kernel_size[0] * a.kernel_size[1])};
  const cuuint64_t stride[2] = {size[0] * element, size[0] * size[1] * element};  // bytes, of all but the first axis
  const cuuint32_t box[3] = {static_cast<cuuint32_t>(plan.tile_features()),
                             static_cast<cuuint32_t>(plan.chunk_channels), static_cast<cuuint32_t>(plan.chunk_taps)};
  const cuuint32_t step[3] = {1, 1, 1};
  return GetEncode()(map, MapType(call.dtype), 3, const_cast<void*>(call.kernel), size, stride, box, step,
                     CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                     CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace jsc
