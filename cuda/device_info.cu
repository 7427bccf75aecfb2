// What the cost model has to know about a device.
#include <map>
#include <mutex>

#include "common.cuh"
#include "kernel_map.h"

namespace jsc {
namespace {

__global__ void EmptyKernel() {}

// How many clusters of `size` blocks run at once when each block fills a multiprocessor. Multiprocessors of one cluster
// share a GPC, and GPCs differ in size, so this is less than multiprocessors / size.
int CountClusters(int size, const DeviceInfo& info) {
  cudaFuncSetAttribute(EmptyKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, info.shared_memory);
  cudaFuncSetAttribute(EmptyKernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
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
  if (cudaOccupancyMaxActiveClusters(&count, EmptyKernel, &config) != cudaSuccess) {
    cudaGetLastError();  // such a cluster does not fit this device
    return 0;
  }
  return count;
}

}  // namespace

const DeviceInfo& GetDeviceInfo(int device) {
  static std::mutex mutex;
  static std::map<int, DeviceInfo> known;
  const std::lock_guard<std::mutex> lock(mutex);
  auto [entry, fresh] = known.try_emplace(device);
  DeviceInfo& info = entry->second;
  if (fresh) {
    cudaDeviceGetAttribute(&info.multiprocessors, cudaDevAttrMultiProcessorCount, device);
    cudaDeviceGetAttribute(&info.shared_memory, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    cudaDeviceGetAttribute(&info.shared_memory_sm, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
    info.tensor_maps = HasKernelMaps();
    // Cluster code is there only if this binary was compiled for a device that has clusters.
    cudaFuncAttributes code{};
    cudaFuncGetAttributes(&code, EmptyKernel);
    for (int size = 1; code.ptxVersion >= 90 && size <= kMaxSplits; ++size)
      info.clusters[size] = CountClusters(size, info);
  }
  return info;
}

}  // namespace jsc
