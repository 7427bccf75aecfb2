// Kernels of one call that overlap (programmatic dependent launch, sm_90): the next one starts while this one runs, and
// waits for its end.
#ifndef JSC_CUDA_OVERLAP_CUH_
#define JSC_CUDA_OVERLAP_CUH_

#include "common.cuh"

namespace jsc {

// Waits for the kernel before this one to be done, where this one was launched to overlap it.
__device__ inline void WaitForKernelBefore() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel start where there is room, if it was launched to overlap this one; it waits for this one's end.
__device__ inline void LetNextKernelStart() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// How a kernel is launched: by clusters of `cluster` blocks unless that is 0, and as its gate wants it.
struct LaunchAttributes {
  cudaLaunchAttribute list[2] = {};
  unsigned count = 0;

  LaunchAttributes(int cluster, const Gate& gate) {
    if (cluster > 0) {
      list[count].id = cudaLaunchAttributeClusterDimension;
      list[count].val.clusterDim.x = cluster;
      list[count].val.clusterDim.y = list[count].val.clusterDim.z = 1;
      ++count;
    }
    if (gate.overlaps) {
      list[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
      list[count++].val.programmaticStreamSerializationAllowed = 1;
    }
  }
};

// In a chain: whether a kernel may start while the one in front runs, because each multiprocessor has room for one of
// its blocks beside theirs. (Where only some have, those are given several blocks each, and the rest idles later.)
template <auto kKernel>
bool MayOverlap(const cudaLaunchConfig_t& config, Footprint* in_front) {
  constexpr int64_t kRegisters = 65536, kThreads = 2048, kReserved = 1024;
  int ordinal = 0;
  if (in_front == nullptr || cudaGetDevice(&ordinal) != cudaSuccess) return false;
  static const int64_t registers = [] {  // of a thread, in whole eights
    cudaFuncAttributes code{};
    return cudaFuncGetAttributes(&code, kKernel) == cudaSuccess ? (code.numRegs + 7) / 8 * 8 : kRegisters;
  }();
  const DeviceInfo& device = GetDeviceInfo(ordinal);
  Footprint own;
  own.blocks = static_cast<int64_t>(config.gridDim.x) * config.gridDim.y * config.gridDim.z;
  own.threads = config.blockDim.x;
  own.shared = static_cast<int64_t>(config.dynamicSmemBytes) + 2 * kReserved;  // the system's and the kernel's own
  own.registers = registers * own.threads;
  const Footprint front = *in_front;
  *in_front = own;
  const int64_t beside = (front.blocks + device.multiprocessors - 1) / device.multiprocessors;
  return device.clusters[1] > 0 && front.blocks > 0 && beside * front.shared + own.shared <= device.shared_memory_sm &&
         beside * front.registers + own.registers <= kRegisters && beside * front.threads + own.threads <= kThreads;
}

}  // namespace jsc

#endif  // JSC_CUDA_OVERLAP_CUH_
