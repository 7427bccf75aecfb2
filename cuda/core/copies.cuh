// Room: copies that nobody waits for (cp.async, TMA), the barriers that count them, and pipelines of stages.
// Beside this file: the cluster's barrier and shared memory (core/cluster_sums.cuh).
// May change: anything that leaves the kernels' machine code and results as they are.
// Tests: tests/cuda/test_devices.py; on a GPU all of tests/primitive/test_kernels.py.
#ifndef JSC_CUDA_CORE_COPIES_CUH_
#define JSC_CUDA_CORE_COPIES_CUH_

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace jsc {

// Copies `width` bytes (kWidth, or any of 16, 8, 4 and 2 where kWidth is 0) to shared memory without waiting, or writes
// zeros where `valid` is false. Both addresses are aligned to width. CommitCopies closes a group of the calling
// thread's copies and WaitForCopies awaits all but the latest kPending groups.
template <int kWidth>
__device__ inline void CopyAsync(void* shared, const void* global, int width, bool valid) {
  const auto target = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  if (kWidth == 16 || width == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(global), "r"(valid ? 16 : 0));
  } else if (width == 8) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(target), "l"(global), "r"(valid ? 8 : 0));
  } else if (width == 4) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(target), "l"(global), "r"(valid ? 4 : 0));
  } else {
    *static_cast<uint16_t*>(shared) = valid ? *static_cast<const uint16_t*>(global) : uint16_t{0};
  }
}

__device__ inline void CommitCopies() { asm volatile("cp.async.commit_group;"); }

template <int kPending>
__device__ inline void WaitForCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");  // no load of what came moves before it
}

__device__ inline uint32_t SharedAddress(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// Stores at an address of shared memory where `yes`, without a branch.
__device__ inline void StoreShared(uint32_t to, float4 v, bool yes) {
  asm volatile("{\n .reg .pred yes;\n setp.ne.b32 yes, %0, 0;\n @yes st.shared.v4.f32 [%1], {%2, %3, %4, %5};\n}" ::"r"(
                   static_cast<int>(yes)),
               "r"(to), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
               : "memory");
}

__device__ inline void StoreShared(uint32_t to, uint32_t v, bool yes) {
  asm volatile(
      "{\n .reg .pred yes;\n setp.ne.b32 yes, %0, 0;\n @yes st.shared.b32 [%1], %2;\n}" ::"r"(static_cast<int>(yes)),
      "r"(to), "r"(v)
      : "memory");
}

__device__ inline float4 LoadShared(uint32_t from) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(from)
               : "memory");
  return v;
}

// A place in a pipeline: which stage, and the parity of its barrier's phase.
struct StagePlace {
  int stage = 0;
  unsigned parity = 0;
  __device__ __forceinline__ void Advance(int stages) {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// TMA and mbarriers (Hopper and later). One thread issues a copy, and TMA counts the bytes of a stage at a barrier in
// shared memory. Phases of a barrier alternate in parity, from 0.
#if __CUDA_ARCH__ >= 900
// One lane of a warp whose lanes are all there: the compiler then knows that what the lane uses is the same in all.
__device__ inline bool IsElected() {
  uint32_t elected;
  asm volatile("{\n .reg .pred yes;\n elect.sync _|yes, 0xffffffff;\n selp.b32 %0, 1, 0, yes;\n}" : "=r"(elected));
  return elected != 0;
}

// arrivals: of a phase.
__device__ inline void InitBarrier(uint32_t barrier, int arrivals = 1) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}
__device__ inline void InitBarrier(uint64_t* barrier, int arrivals = 1) {
  InitBarrier(SharedAddress(barrier), arrivals);
}

// Barriers made by the calling thread are ready for TMA.
__device__ inline void FenceBarriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Counts up to `last` and starts again at 0; returns the count before. Orders what came before and comes after.
__device__ inline uint32_t CountRelease(uint32_t* count, uint32_t last) {
  uint32_t before;
  asm volatile("atom.acq_rel.cta.shared::cta.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "r"(SharedAddress(count)), "r"(last)
               : "memory");
  return before;
}

// barrier, shared: addresses in shared memory, here and below
__device__ __forceinline__ void Arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ inline void ExpectBytes(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ inline void ExpectBytes(uint64_t* barrier, int bytes) { ExpectBytes(SharedAddress(barrier), bytes); }
// The same without arriving there.
__device__ inline void ExpectMoreBytes(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// TMA is to know a map before the first copy by it.
__device__ inline void PrefetchMap(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Copies `bytes`, a multiple of 16; both addresses are too.
__device__ inline void CopyBytes(void* shared, const void* global, int bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   SharedAddress(shared)),
               "l"(global), "r"(bytes), "r"(SharedAddress(barrier))
               : "memory");
}

// The box of a tensor map of two axes that starts at {channel, pixel}, with zeros outside the tensor; and back.
__device__ inline void CopyBox(void* shared, const CUtensorMap* map, int channel, int pixel, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::
          "r"(SharedAddress(shared)),
      "l"(map), "r"(channel), "r"(pixel), "r"(SharedAddress(barrier))
      : "memory");
}
__device__ inline void StoreBox(const CUtensorMap* map, int channel, int pixel, const void* shared) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map),
               "r"(channel), "r"(pixel), "r"(SharedAddress(shared))
               : "memory");
}

// The same of three, that starts at {output channel, channel, tap}.
__device__ inline void CopyBox(uint32_t shared, const CUtensorMap* map, int out_channel, int channel, int tap,
                               uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
      "[%5];" ::"r"(shared),
      "l"(map), "r"(out_channel), "r"(channel), "r"(tap), "r"(barrier)
      : "memory");
}
__device__ inline void CopyBox(void* shared, const CUtensorMap* map, int out_channel, int channel, int tap,
                               uint64_t* barrier) {
  CopyBox(SharedAddress(shared), map, out_channel, channel, tap, SharedAddress(barrier));
}

// The same for a map of four axes, as that of an image batch from {channel, x, y, image}, which may be negative.
__device__ inline void CopyBox(uint32_t shared, const CUtensorMap* map, int channel, int x, int y, int image,
                               uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
      "[%6];" ::"r"(shared),
      "l"(map), "r"(channel), "r"(x), "r"(y), "r"(image), "r"(barrier)
      : "memory");
}
__device__ inline void CopyBox(void* shared, const CUtensorMap* map, int channel, int x, int y, int image,
                               uint64_t* barrier) {
  CopyBox(SharedAddress(shared), map, channel, x, y, image, SharedAddress(barrier));
}

// And of a map of five, from {element, x, y, image, slice}.
__device__ inline void CopyBox(uint32_t shared, const CUtensorMap* map, int element, int x, int y, int image, int slice,
                               uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5, "
      "%6}], [%7];" ::"r"(shared),
      "l"(map), "r"(element), "r"(x), "r"(y), "r"(image), "r"(slice), "r"(barrier)
      : "memory");
}
__device__ inline void CopyBox(void* shared, const CUtensorMap* map, int element, int x, int y, int image, int slice,
                               uint64_t* barrier) {
  CopyBox(SharedAddress(shared), map, element, x, y, image, slice, SharedAddress(barrier));
}

// At the scope of the block, for DSMEM slots too. What comes lies in the block's shared memory, and a wait at the
// cluster's scope would empty the L1 cache as well.
__device__ inline void WaitForBytes(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n .reg .pred done;\n $wait_%=:\n mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n @!done bra "
      "$wait_%=;\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
__device__ inline void WaitForBytes(uint64_t* barrier, uint32_t parity) {
  WaitForBytes(SharedAddress(barrier), parity);
}
#endif

}  // namespace jsc

#endif  // JSC_CUDA_CORE_COPIES_CUH_
