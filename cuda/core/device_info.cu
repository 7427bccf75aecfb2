// What planners have to know about a device.
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <utility>

#include "cuda/core/device_info.h"
#include "cuda/core/device_scope.h"
#include "cuda/core/tensor_map.h"

namespace jsc {
namespace {

__global__ void EmptyKernel() {}

// How many clusters of `size` blocks run at once when each block fills an SM. Multiprocessors of one cluster share a
// GPC, and GPCs differ in size, so this is less than SMs / size.
int CountClusters(int size, const DeviceInfo& info) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = size;
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(size);
  config.blockDim = dim3(kWarp);
  config.dynamicSmemBytes = info.shared_memory;
  config.attrs = &attribute;
  config.numAttrs = 1;
  int count = 0;
  if (cudaFuncSetAttribute(EmptyKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, info.shared_memory) ||
      cudaFuncSetAttribute(EmptyKernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) ||
      cudaOccupancyMaxActiveClusters(&count, EmptyKernel, &config)) {
    cudaGetLastError();  // such a cluster does not fit this device
    return 0;
  }
  return count;
}

cudaError_t ReadDevice(int device, DeviceInfo* info) {
  const DeviceScope scope(device);  // functions have attributes, and clusters room, on the device that is current
  if (scope.status() != cudaSuccess) return scope.status();
  int major = 0, minor = 0, clock_khz = 0, memory_clock_khz = 0, memory_bus_bits = 0;
  const std::pair<int*, cudaDeviceAttr> wanted[] = {
      {&major, cudaDevAttrComputeCapabilityMajor},
      {&minor, cudaDevAttrComputeCapabilityMinor},
      {&clock_khz, cudaDevAttrClockRate},
      {&memory_clock_khz, cudaDevAttrMemoryClockRate},
      {&memory_bus_bits, cudaDevAttrGlobalMemoryBusWidth},
      {&info->multiprocessors, cudaDevAttrMultiProcessorCount},
      {&info->shared_memory, cudaDevAttrMaxSharedMemoryPerBlockOptin},
      {&info->shared_memory_sm, cudaDevAttrMaxSharedMemoryPerMultiprocessor}};
  for (const auto& [target, attribute] : wanted) {
    if (const cudaError_t status = cudaDeviceGetAttribute(target, attribute, device)) return status;
  }
  info->clock_hz = 1e3 * clock_khz;
  info->memory_bytes_per_second = 2e3 * memory_clock_khz * memory_bus_bits / 8;
  if (const char* pretended = std::getenv("JSC_CAPABILITY")) {  // for tests: kernels of an older GPU on a newer one
    if (std::sscanf(pretended, "%d.%d", &major, &minor) != 2) return cudaErrorInvalidValue;
  }
  info->tensor_maps = major >= 9 && HasTensorMaps();
  // The same list is in jax_sparse_conv/_src/devices.py.
  info->fast_tf32 = (major >= 8 && major <= 10 && minor == 0) || (major == 10 && minor == 3);  // A100, H100, B200, B300
#ifdef JSC_WGMMA
  info->wgmma = major == 9 && minor == 0 && info->tensor_maps;
#endif
  cudaFuncAttributes code{};
  if (const cudaError_t status = cudaFuncGetAttributes(&code, EmptyKernel)) return status;
  // Cluster code is there only if this binary was compiled for a device that has clusters.
  for (int size = 1; major >= 9 && code.ptxVersion >= 90 && size <= kMaxSplits; ++size) {
    info->clusters[size] = CountClusters(size, *info);
  }
  return cudaSuccess;
}

}  // namespace

const DeviceInfo& GetDeviceInfo(int device) {
  static std::mutex mutex;
  static std::map<int, DeviceInfo> known;
  const std::lock_guard<std::mutex> lock(mutex);
  auto [entry, fresh] = known.try_emplace(device);
  DeviceInfo& info = entry->second;
  if (fresh) {
    const cudaError_t status = ReadDevice(device, &info);
    info.error = status == cudaSuccess ? nullptr : cudaGetErrorString(status);
    cudaGetLastError();  // reported here, not by the next launch
  }
  return info;
}

}  // namespace jsc
