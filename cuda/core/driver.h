// What tensor maps take from the driver.
#ifndef JSC_CUDA_CORE_DRIVER_H_
#define JSC_CUDA_CORE_DRIVER_H_

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "native/call.h"

namespace jsc {

// A function of the driver, found without linking to its library; null where there is none.
template <typename Function>
Function FindDriverFunction(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  const cudaError_t status = cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &found);
  return status == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<Function>(function) : nullptr;
}

// float32 that is multiplied as TF32, which is not `precise`, is rounded while it is copied.
inline CUtensorMapDataType TensorMapType(ffi::DataType dtype, bool precise) {
  if (dtype == ffi::DataType::F32) {
    return precise ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : CU_TENSOR_MAP_DATA_TYPE_TFLOAT32;
  }
  return dtype == ffi::DataType::BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
}

// Makes a tensor map of kernels [taps, depth, output channels], `bytes` an element. Its boxes are 128 bytes of output
// channels by as many rows of depth as a square has, in the 128-byte swizzle. False where the driver refuses.
inline bool MapKernelPieces(const void* kernel, int64_t out_channels, int64_t depth, int64_t taps,
                            CUtensorMapDataType type, int64_t bytes, CUtensorMap* map) {
  static const auto encode = FindDriverFunction<decltype(&cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled");
  constexpr int64_t kSwizzleBytes = 128;
  auto size_of = [](int64_t n) { return static_cast<cuuint64_t>(n); };
  const cuuint64_t size[] = {size_of(out_channels), size_of(depth), size_of(taps)};
  const cuuint64_t stride[] = {size_of(out_channels * bytes), size_of(out_channels * depth * bytes)};
  const auto side = static_cast<cuuint32_t>(kSwizzleBytes / bytes);
  const cuuint32_t box[] = {side, side, 1}, step[] = {1, 1, 1};
  return encode && encode(map, type, 3, const_cast<void*>(kernel), size, stride, box, step,
                          CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                          CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace jsc

#endif  // JSC_CUDA_CORE_DRIVER_H_
