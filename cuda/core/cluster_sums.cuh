// Room: a cluster's blocks and each other's shared memory (DSMEM).
// May change: anything that leaves the kernels' machine code and results as they are.
// Tests: tests/cuda/test_devices.py; on a GPU all of tests/primitive/test_kernels.py.
#ifndef JSC_CUDA_CORE_CLUSTER_SUMS_CUH_
#define JSC_CUDA_CORE_CLUSTER_SUMS_CUH_

#include "cuda/core/copies.cuh"

namespace jsc {

#if __CUDA_ARCH__ >= 900
// The cluster's barrier in two steps, for whole warps: what FenceBarriers covers before a thread arrives is there for
// all that waited.
__device__ inline void ArriveAtCluster() {
  __syncwarp();
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ inline void WaitForCluster() {
  __syncwarp();
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Writes v where block `block` of the cluster has what is at `to` here, without waiting; counted at its `barrier`.
__device__ inline void SendToBlock(int block, float4* to, float4 v, uint64_t* barrier) {
  asm volatile(
      "{\n .reg .b32 to, full;\n mapa.shared::cluster.u32 to, %0, %2;\n mapa.shared::cluster.u32 full, %1, %2;\n"
      " st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [to], {%3, %4, %5, %6}, [full];\n}" ::"r"(
          SharedAddress(to)),
      "r"(SharedAddress(barrier)), "r"(block), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
      : "memory");
}

// An address in shared memory as block `block` of the cluster has it.
__device__ inline uint32_t InBlock(uint32_t address, int block) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(block));
  return there;
}

// The same as SendToBlock, with addresses in that block.
__device__ inline void SendTo(uint32_t to, float4 v, uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
               "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(barrier)
               : "memory");
}
__device__ inline void SendTo(uint32_t to, float2 v, uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(to), "f"(v.x),
               "f"(v.y), "r"(barrier)
               : "memory");
}

#endif

}  // namespace jsc

#endif  // JSC_CUDA_CORE_CLUSTER_SUMS_CUH_
