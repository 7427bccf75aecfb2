// What tensor maps take from the driver.
#ifndef JSC_CUDA_DRIVER_H_
#define JSC_CUDA_DRIVER_H_

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "conv_args.h"

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

}  // namespace jsc

#endif  // JSC_CUDA_DRIVER_H_
