// Room: what a launch needs: the element types and their one dispatch, error text, a kernel's attributes.
// Beside this file: how kernels overlap (core/programmatic_launch.cuh).
// May change: what the host does before a launch.
// Tests: tests/cuda/test_devices.py; on a GPU all of tests/primitive/test_kernels.py.
#ifndef JSC_CUDA_CORE_LAUNCH_CUH_
#define JSC_CUDA_CORE_LAUNCH_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>
#include <string>

#include "cuda/core/device_call.h"
#include "cuda/core/device_info.h"

namespace jsc {

// Calls body(T{}) with the element type of a call: the only place that lists the types of the CUDA kernels.
template <typename Body>
Error DispatchDtype(DataType dtype, Body&& body) {
  switch (dtype) {
    case DataType::F32:
      return body(float{});
    case DataType::BF16:
      return body(__nv_bfloat16{});
    case DataType::F16:
      return body(__half{});
    default:
      break;
  }
  const std::string name = dtype == DataType::F64 ? "float64" : "code " + std::to_string(static_cast<int>(dtype));
  return Error(ErrorCode::kUnimplemented,
               "dtype " + name + " is not implemented on CUDA; float32, bfloat16 and float16 are");
}

inline Error CheckCuda(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return Error::Success();
  return Error(ErrorCode::kInternal, std::string(what) + ": " + cudaGetErrorString(status));
}

// Lets kKernel take all the shared memory of a block and clusters of more than 8 blocks. Once per device, because a
// handler runs again whenever a command buffer is recorded, and each of these calls costs the host about a microsecond.
template <auto kKernel>
Error Prepare(const char* name) {
  static std::atomic<uint64_t> prepared{0};  // a bit per device; devices beyond 63 are prepared at every call
  int device = 0;
  if (const cudaError_t status = cudaGetDevice(&device)) return CheckCuda(status, name);
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  if (prepared & bit) return Error::Success();
  const DeviceInfo& info = GetDeviceInfo(device);
  cudaFuncAttributes code{};
  cudaError_t status = cudaFuncGetAttributes(&code, kKernel);
  if (status == cudaSuccess) {
    const int dynamic = info.shared_memory - static_cast<int>(code.sharedSizeBytes);
    status = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, dynamic);
  }
  if (status == cudaSuccess && info.clusters[1] > 0) {
    status = cudaFuncSetAttribute(kKernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  }
  if (status == cudaSuccess) prepared |= bit;
  return CheckCuda(status, name);
}

}  // namespace jsc

#endif  // JSC_CUDA_CORE_LAUNCH_CUH_
