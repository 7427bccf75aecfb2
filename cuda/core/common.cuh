// Room: what every CUDA kernel needs: element types and their one dispatch, vector access, asynchronous copies,
//   barriers, TMA, DSMEM, launch checks.
// Beside this file: device description, counts of non-zeros, programmatic launch (PDL), wgmma, tensor maps.
// May change: anything that leaves the kernels' machine code and results as they are.
// Tests: tests/cuda/test_devices.py; on a GPU all of tests/primitive/test_kernels.py.
#ifndef JSC_CUDA_CORE_COMMON_CUH_
#define JSC_CUDA_CORE_COMMON_CUH_

#include <cuda.h>
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
ffi::Error DispatchDtype(ffi::DataType dtype, Body&& body) {
  switch (dtype) {
    case ffi::DataType::F32:
      return body(float{});
    case ffi::DataType::BF16:
      return body(__nv_bfloat16{});
    case ffi::DataType::F16:
      return body(__half{});
    default:
      break;
  }
  const std::string name = dtype == ffi::DataType::F64 ? "float64" : "code " + std::to_string(static_cast<int>(dtype));
  return ffi::Error(ffi::ErrorCode::kUnimplemented,
                    "dtype " + name + " is not implemented on CUDA; float32, bfloat16 and float16 are");
}

inline ffi::Error CheckCuda(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kInternal, std::string(what) + ": " + cudaGetErrorString(status));
}

// Lets kKernel take all the shared memory of a block and clusters of more than 8 blocks. Once per device, because a
// handler runs again whenever a command buffer is recorded, and each of these calls costs the host about a microsecond.
template <auto kKernel>
ffi::Error Prepare(const char* name) {
  static std::atomic<uint64_t> prepared{0};  // a bit per device; devices beyond 63 are prepared at every call
  int device = 0;
  if (const cudaError_t status = cudaGetDevice(&device)) return CheckCuda(status, name);
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  if (prepared & bit) return ffi::Error::Success();
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

// n = quotient * divisor + remainder
struct Quotient {
  int quotient, remainder;
};

__device__ inline Quotient Divide(int n, const Divider& by) {
  const int quotient = static_cast<int>((__umulhi(n, by.multiplier) + n) >> by.shift);
  return {quotient, n - quotient * static_cast<int>(by.divisor)};
}

__device__ inline float ToFloat(float v) { return v; }
__device__ inline float ToFloat(__half v) { return __half2float(v); }
__device__ inline float ToFloat(__nv_bfloat16 v) { return __bfloat162float(v); }

template <typename T>
__device__ inline T FromFloat(float v) {
  if constexpr (std::is_same_v<T, float>) {
    return v;
  } else if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(v);
  } else {
    return __float2bfloat16_rn(v);
  }
}

__device__ inline float Relu(float v) { return v < 0.f ? 0.f : v; }  // keeps NaN
__device__ inline float MaxOrNan(float a, float b) {
#if __CUDA_ARCH__ >= 800
  float most;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(a), "f"(b));
  return most;
#else
  return b > a || b != b ? b : a;
#endif
}

// Whether the greatest of sums stays so when a bias has been added: an infinite one makes NaN of some.
__device__ inline bool KeepsOrder(float bias) { return bias * 0.f == 0.f; }

// Four consecutive elements of p as float32; p aligned to four elements.
__device__ inline float4 Load4(const float* p) { return *reinterpret_cast<const float4*>(p); }

__device__ inline float4 Load4(const __half* p) {
  const uint2 raw = *reinterpret_cast<const uint2*>(p);
  const float2 low = __half22float2(reinterpret_cast<const __half2&>(raw.x));
  const float2 high = __half22float2(reinterpret_cast<const __half2&>(raw.y));
  return {low.x, low.y, high.x, high.y};
}

__device__ inline float4 Load4(const __nv_bfloat16* p) {
  const uint2 raw = *reinterpret_cast<const uint2*>(p);
  return {__uint_as_float(raw.x << 16), __uint_as_float(raw.x & 0xffff0000u), __uint_as_float(raw.y << 16),
          __uint_as_float(raw.y & 0xffff0000u)};
}

// The first `valid` (0..4) of four consecutive elements, zeros after them; one load where `vector` says p is aligned.
template <typename T>
__device__ inline float4 LoadUpTo4(const T* p, int valid, bool vector) {
  if (vector && valid == 4) return Load4(p);
  float4 v = {0.f, 0.f, 0.f, 0.f};
  if (valid > 0) v.x = ToFloat(p[0]);
  if (valid > 1) v.y = ToFloat(p[1]);
  if (valid > 2) v.z = ToFloat(p[2]);
  if (valid > 3) v.w = ToFloat(p[3]);
  return v;
}

template <typename T>
__device__ inline void StoreUpTo4(T* p, float4 v, int valid, bool vector) {
  const T element[4] = {FromFloat<T>(v.x), FromFloat<T>(v.y), FromFloat<T>(v.z), FromFloat<T>(v.w)};
  if (vector && valid == 4) {
    if constexpr (sizeof(T) == 4) {
      *reinterpret_cast<float4*>(p) = v;
    } else {
      *reinterpret_cast<uint2*>(p) = *reinterpret_cast<const uint2*>(element);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i < valid) p[i] = element[i];
  }
}

__device__ inline float4 operator+(float4 a, float4 b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }

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

// A place in a ring of stages: which, and the parity of its barrier's phase.
struct RingPlace {
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
__device__ inline void InitBarrier(uint64_t* barrier) { InitBarrier(SharedAddress(barrier)); }

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

// barrier, shared: addresses in shared memory, here and below
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

// Copies the box of a tensor map that starts at {output channel, channel, tap}, with zeros outside the tensor.
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

#endif  // JSC_CUDA_CORE_COMMON_CUH_
