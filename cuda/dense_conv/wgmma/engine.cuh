// The weights of a step as consumer warpgroups take them, for sums of 64 output channels x a tile's pixels in
// registers.
//
// Weights lie in shared memory with output channels side by side, pixels with input channels side by side. 16-bit
// products take both as they lie. TF32 products want input channels side by side, of both. So there weights go through
// registers, where a thread's values may come from anywhere. Each thread takes pairs of neighbouring output channels.
#ifndef JSC_CUDA_DENSE_CONV_WGMMA_ENGINE_CUH_
#define JSC_CUDA_DENSE_CONV_WGMMA_ENGINE_CUH_

#include "cuda/core/wgmma.cuh"
#include "cuda/dense_conv/wgmma/copies.cuh"

namespace jsc {

// Weights of a step as the product takes them, and which rows of the product they are.
template <class U, typename T>
struct StepWeights {
  static constexpr uint32_t kStage = U::kWeightBytes >> 4;  // from stage to stage, of words of operands
  uint32_t word;  // of the calling warpgroup's weights in a stage, the low one
  // In the first of the stages at an address.
  static __device__ __forceinline__ uint32_t FirstStage(uint32_t stages) {
    const uint32_t group = U::kGroups > 1 ? __shfl_sync(0xffffffffu, threadIdx.x / 128, 0) : 0;  // the same in a warp
    return static_cast<uint32_t>(SwizzledMatrix(stages + group * (64 * kRowBytes), 0));
  }
  // Slice k is 16 channels; between groups of eight channels 1024 bytes.
  template <typename Sums>
  __device__ __forceinline__ void Multiply(Sums& sums, int k, uint64_t pixels, bool add) const {
    constexpr uint32_t kSlice = 2048 >> 4;
    const uint64_t weights = SwizzledMatrix(0, 1024) >> 32 << 32 | word;
    Wgmma<T, U::kPixels>::Multiply(sums, weights + k * kSlice, pixels, add);
  }
  static __device__ __forceinline__ void Store(const float (&sums)[U::kPixels / 2], float* tile) {
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    float* first = tile + lane % 4 * 2 * U::kSumStride + warp * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < U::kPixels / 2; ++i) {
      first[(i / 4 * 8 + i % 2) * U::kSumStride + i / 2 % 2 * 8] = sums[i];
    }
  }
};

// Of a warpgroup's 64 output channels, two boxes of 32, a warp takes four 16-byte slots of four output channels: two
// neighbours, and two more four slots on. The eight bytes that each of 16 lanes loads are then in distinct banks.
template <class U>
struct StepWeights<U, float> {
  static constexpr uint32_t kStage = U::kWeightBytes;  // from stage to stage, of addresses
  uint32_t slice[4];                                   // one of a step's four

  // Of the calling thread's first output channel in the first of the stages at an address.
  static __device__ __forceinline__ uint32_t FirstStage(uint32_t stages) {
    return stages + (U::kGroups > 1 ? threadIdx.x / 128 * (64 * kRowBytes) : 0) + Offset();
  }

  static __device__ __forceinline__ int Slot() {
    const int row = threadIdx.x % kWarp / 4, warp = threadIdx.x / kWarp % 4;
    return warp % 2 * 2 + row / 4 + row / 2 % 2 * 4;
  }
  static __device__ __forceinline__ int Half() { return threadIdx.x / 4 % 2; }
  static __device__ __forceinline__ int Box() { return threadIdx.x / 64 % 2; }  // of the warpgroup's two
  // Of the calling thread's first output channel, from the warpgroup's stage on.
  static __device__ __forceinline__ uint32_t Offset() {
    const int channel = threadIdx.x % 4;
    return Box() * U::kBoxBytes + Half() * 8 + channel * kRowBytes + ((Slot() ^ channel) << 4);
  }
  static __device__ __forceinline__ void LoadPair(uint32_t address, uint32_t& first, uint32_t& second) {
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(first), "=r"(second) : "r"(address) : "memory");
  }
  // Slice k; weights: the warpgroup's stage plus Offset()
  __device__ __forceinline__ void Load(uint32_t weights, int k) {
    LoadPair(weights + k * 1024, slice[0], slice[1]);
    LoadPair((weights ^ 64) + 4 * kRowBytes + k * 1024, slice[2], slice[3]);  // four channels on
  }
  // sums (+)= weights x pixels, issued
  template <typename Sums>
  __device__ __forceinline__ void Multiply(Sums& sums, uint64_t pixels, bool add) const {
    BeginProducts();
    Wgmma<float, U::kPixels>::Multiply(sums, slice, pixels, add);
    CommitProducts();
  }
  // The calling thread's first sum in a tile.
  template <typename Sum>
  static __device__ __forceinline__ Sum* First(Sum* tile) {
    const int lane = threadIdx.x % kWarp, group = U::kGroups > 1 ? threadIdx.x / 128 : 0;
    return tile + lane % 4 * 2 * U::kSumStride + group * 64 + Box() * 32 + Slot() * 4 + Half() * 2;
  }
  static __device__ __forceinline__ void Store(const float (&sums)[U::kPixels / 2], float* tile) {
    float* first = First(tile);
#pragma unroll
    for (int i = 0; i < U::kPixels / 2; i += 4) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        *reinterpret_cast<float2*>(first + (i * 2 + e) * U::kSumStride) = make_float2(sums[i + e], sums[i + 2 + e]);
      }
    }
  }
  // What Store has stored.
  static __device__ __forceinline__ void LoadBack(float (&sums)[U::kPixels / 2], const float* tile) {
    const float* first = First(tile);
#pragma unroll
    for (int i = 0; i < U::kPixels / 2; i += 4) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float2 v = *reinterpret_cast<const float2*>(first + (i * 2 + e) * U::kSumStride);
        sums[i + e] = v.x, sums[i + 2 + e] = v.y;
      }
    }
  }
};

}  // namespace jsc

#endif  // JSC_CUDA_DENSE_CONV_WGMMA_ENGINE_CUH_
