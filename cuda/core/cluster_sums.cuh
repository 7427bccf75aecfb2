// Room: how the blocks of a cluster bring partial sums together, through each other's shared memory (DSMEM). Two ways:
// - Read: sums stay where they are between two barriers of the cluster, and each block reads those of all for its share
//   of the results. The least code: mma, COO, and two blocks of wgmma.
// - Send: a block sends sums to slots of the block that completes the results, which counts them at its own barrier.
//   Nothing is staged, and nobody waits for the cluster in the end: wgmma from three blocks on, splitk_channels, pairs,
//   DenseNet, ECR, matvec.
// Either way who completes a result adds in the order of the blocks (AddParts in core/vectors.cuh).
// May change: anything that leaves results bitwise as they are. Tests: on a GPU all of tests/cuda/ and
// tests/primitive/test_kernels.py.
#ifndef JSC_CUDA_CORE_CLUSTER_SUMS_CUH_
#define JSC_CUDA_CORE_CLUSTER_SUMS_CUH_

#include <cooperative_groups.h>

#include "cuda/core/copies.cuh"
#include "cuda/core/vectors.cuh"

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

// What any block stored before is there for all after.
__device__ __forceinline__ void SyncCluster() { cooperative_groups::this_cluster().sync(); }

// Read: the place in shared memory of another block. What is loaded has to be used: no load may be in flight when the
// cluster leaves.
template <typename V>
__device__ __forceinline__ const V* OfBlock(const V* shared, int block) {
  return cooperative_groups::this_cluster().map_shared_rank(shared, block);
}

// Four sums at such a place, by another address: fewer instructions in COO and mma, but one tile of mma then spills.
__device__ __forceinline__ float4 Load4OfBlock(const float* shared, int block) {
  float4 v;
  asm volatile(
      "{\n .reg .b32 there;\n mapa.shared::cluster.u32 there, %4, %5;\n"
      " ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there];\n}"
      : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
      : "r"(SharedAddress(shared)), "r"(block)
      : "memory");
  return v;
}

// Four sums of any block, where `yes`; without a branch.
__device__ __forceinline__ void LoadIf(float4& v, const float* from, bool yes) {
  asm volatile("{\n .reg .pred yes;\n setp.ne.b32 yes, %5, 0;\n @yes ld.v4.f32 {%0, %1, %2, %3}, [%4];\n}"
               : "+f"(v.x), "+f"(v.y), "+f"(v.z), "+f"(v.w)
               : "l"(from), "r"(static_cast<int>(yes))
               : "memory");
}

// Send. By one thread, before the block arrives at the cluster: its slots are open, for so many bytes in all.
__device__ __forceinline__ void OpenSlots(uint64_t* full, int bytes) {
  InitBarrier(full);
  FenceBarriers();
  ExpectBytes(full, bytes);
}

// An address in shared memory as block `block` of the cluster has it.
__device__ inline uint32_t InBlock(uint32_t address, int block) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(block));
  return there;
}

// Writes v to a slot without waiting; counted at the slot's barrier. Addresses are as InBlock gives them.
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
__device__ inline void SendTo(uint32_t to, float v, uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to),
               "r"(__float_as_uint(v)), "r"(barrier)
               : "memory");
}
// The same where i < end, without a branch.
__device__ __forceinline__ void SendIfBelow(uint32_t to, float4 v, uint32_t barrier, int i, int end) {
  asm volatile(
      "{\n .reg .pred yes;\n setp.lt.s32 yes, %6, %7;\n"
      " @yes st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];\n}" ::"r"(to),
      "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(barrier), "r"(i), "r"(end)
      : "memory");
}

// To where block `block` of the cluster has what is at `to` here, and its barrier.
template <typename V>
__device__ __forceinline__ void SendToBlock(int block, V* to, V v, uint64_t* barrier) {
  SendTo(InBlock(SharedAddress(to), block), v, InBlock(SharedAddress(barrier), block));
}
#endif

}  // namespace jsc

#endif  // JSC_CUDA_CORE_CLUSTER_SUMS_CUH_
