// Kernels of one call that overlap (programmatic dependent launch, sm_90): the next one starts while this one runs, and
// waits for its end.
#ifndef JSC_CUDA_CORE_PROGRAMMATIC_LAUNCH_CUH_
#define JSC_CUDA_CORE_PROGRAMMATIC_LAUNCH_CUH_

#include <algorithm>

#include "cuda/core/launch.cuh"

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

// Brings the calling block's share of what the next kernel of a chain reads to the L2 cache; by one thread.
__device__ inline void FetchAhead(const Gate& gate) {
#if __CUDA_ARCH__ >= 900
  constexpr uint32_t kLine = 128, kPiece = 8192;
  const uint32_t blocks = gridDim.x * gridDim.y * gridDim.z;
  const uint32_t block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  const uint32_t share = (gate.ahead_bytes / blocks / kLine + 1) * kLine;
  const uint32_t end = min((block + 1) * share, gate.ahead_bytes);
#pragma unroll 1
  for (uint32_t at = block * share; at < end; at += kPiece) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(static_cast<const char*>(gate.ahead) + at),
                 "r"(min(kPiece, end - at))
                 : "memory");
  }
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

// In a chain: whether a kernel may start while the one in front runs. It may where each SM has room for its share of
// the blocks of both kernels. It also may where no SM has room for more than its share of this kernel's blocks, which
// then start where blocks in front leave. Otherwise the few free SMs would be given all blocks of the kernel while
// others idle. For the same reason a block is given its share of half an SM's shared memory, whatever it needs; with
// fills_sm its share of all of it, where several blocks come to an SM.
template <auto kKernel>
bool MayOverlap(cudaLaunchConfig_t* config, Footprint* in_front, bool fills_sm = false) {
  constexpr int64_t kRegisters = 65536, kThreads = 2048, kReserved = 1024;
  int ordinal = 0;
  if (in_front == nullptr || cudaGetDevice(&ordinal) != cudaSuccess) return false;
  static const int64_t registers = [] {  // of a thread, in whole eights
    cudaFuncAttributes code{};
    return cudaFuncGetAttributes(&code, kKernel) == cudaSuccess ? (code.numRegs + 7) / 8 * 8 : kRegisters;
  }();
  const DeviceInfo& device = GetDeviceInfo(ordinal);
  const auto on_one = [&](const Footprint& kernel) {
    return (kernel.blocks + device.multiprocessors - 1) / device.multiprocessors;
  };
  Footprint own;
  own.blocks = static_cast<int64_t>(config->gridDim.x) * config->gridDim.y * config->gridDim.z;
  own.threads = config->blockDim.x;
  own.shared = static_cast<int64_t>(config->dynamicSmemBytes) + 2 * kReserved;  // the system's and the kernel's own
  own.registers = registers * own.threads;
  const int64_t share = device.shared_memory_sm / (fills_sm && on_one(own) > 1 ? 1 : 2) / on_one(own);
  if (config->dynamicSmemBytes > 0 && own.shared < share) {
    config->dynamicSmemBytes += static_cast<size_t>(share - own.shared);
    own.shared = share;
  }
  const Footprint front = *in_front;
  *in_front = own;
  if (device.clusters[1] == 0 || front.blocks == 0) return false;
  const int64_t beside = on_one(front);
  const bool has_room = beside * front.shared + own.shared <= device.shared_memory_sm &&
                        beside * front.registers + own.registers <= kRegisters &&
                        beside * front.threads + own.threads <= kThreads;
  const int64_t most =
      std::min({device.shared_memory_sm / own.shared, kRegisters / own.registers, kThreads / own.threads});
  return has_room || (most > 0 && most <= on_one(own));
}

}  // namespace jsc

#endif  // JSC_CUDA_CORE_PROGRAMMATIC_LAUNCH_CUH_
