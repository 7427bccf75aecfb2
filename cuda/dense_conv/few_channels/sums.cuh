// What multiplies in the engine few_channels: a warp's sums in registers, by mma.sync.
//
// Output channels are the rows of a product and results its columns. What a lane loads of a pair, 8 bytes of TF32, is
// then registers side by side, as the products take them. With results as rows each register was moved up to four
// times: 60 instructions beside 8 products. Operands are loaded a step before they are multiplied.
#ifndef JSC_CUDA_DENSE_CONV_FEW_CHANNELS_SUMS_CUH_
#define JSC_CUDA_DENSE_CONV_FEW_CHANNELS_SUMS_CUH_

#include "cuda/core/truncation.cuh"
#include "cuda/dense_conv/few_channels/stage.cuh"

namespace jsc {

// Sums of a warp: fragments of 16 output channels by runs of eight results.
template <class U, typename T>
struct FewChannelsSums {
  static constexpr int kSteps = kFewChannelsChunkPairs * static_cast<int>(sizeof(T)) / 16;  // of mma.sync, in a chunk
  static constexpr int kHalves = sizeof(T) == 4 ? 1 : 2;                                    // fours of pairs in a step
  // Neighbouring output channels of a lane.
  static constexpr int kCount = sizeof(T) == 2 && U::kOutChannels > 32 ? 8 : 4;
  static constexpr int kQuads = U::kOutChannels / (8 * kCount);
  float sums[U::kFragments][kFewChannelsWarpRuns][4] = {};
  LowWeights low_weights;  // at 3xTF32

  // What a step multiplies; low: at 3xTF32.
  struct Operands {
    uint32_t weights[U::kFragments][4], low_weights[U::kFragments][4];
    uint32_t pixels[kFewChannelsWarpRuns][2], low_pixels[kFewChannelsWarpRuns][2];
  };

  static __device__ __forceinline__ void LoadWeights(uint32_t (&to)[U::kFragments][4], const uint4* slots) {
#pragma unroll
    for (int i = 0; i < U::kFragments; ++i) {
      const uint4 v = slots[i * kWarp];
      to[i][0] = v.x, to[i][1] = v.y, to[i][2] = v.z, to[i][3] = v.w;
    }
  }
  // A pair of elements; low_pixels: bytes from the high parts to the low parts, where they are apart.
  static __device__ __forceinline__ void LoadPair(Operands& to, int run, int half, const unsigned char* at,
                                                  int low_pixels) {
    uint32_t (&v)[2] = to.pixels[run];
    if constexpr (U::kTf32x3 && U::kPaired) {
      const uint4 words = *reinterpret_cast<const uint4*>(at);
      v[0] = words.x, v[1] = words.y, to.low_pixels[run][0] = words.z, to.low_pixels[run][1] = words.w;
    } else if constexpr (sizeof(T) == 4 && U::kPaired) {
      const uint2 words = *reinterpret_cast<const uint2*>(at);
      v[0] = words.x, v[1] = words.y;
    } else if constexpr (sizeof(T) == 4) {
      const auto* words = reinterpret_cast<const uint32_t*>(at);
      v[0] = words[0], v[1] = words[1];
      if constexpr (U::kTf32x3) {
        const auto* low = reinterpret_cast<const uint32_t*>(at + low_pixels);
        to.low_pixels[run][0] = low[0], to.low_pixels[run][1] = low[1];
      }
    } else if constexpr (U::kPaired) {
      v[half] = *reinterpret_cast<const uint32_t*>(at);
    } else {
      const auto* elements = reinterpret_cast<const uint16_t*>(at);
      v[half] = elements[0] | static_cast<uint32_t>(elements[1]) << 16;
    }
  }
  // offset: of this lane's pair in each four of the step.
  static __device__ __forceinline__ void Load(Operands& to, const int (&offset)[kHalves], const uint4* slots,
                                              int low_offset,
                                              const unsigned char* const (&pixels)[kFewChannelsWarpRuns],
                                              int low_pixels) {
    LoadWeights(to.weights, slots);
    if constexpr (U::kTf32x3) LoadWeights(to.low_weights, slots + low_offset);
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
#pragma unroll
      for (int run = 0; run < kFewChannelsWarpRuns; ++run)
        LoadPair(to, run, half, pixels[run] + offset[half], low_pixels);
    }
  }
  static __device__ __forceinline__ void LoadOffsets(int (&offset)[kHalves], const int* table) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) offset[half] = table[half * 4];
  }
  static __device__ __forceinline__ void MultiplyAll(float (&d)[U::kFragments][kFewChannelsWarpRuns][4],
                                                     const uint32_t (&weights)[U::kFragments][4],
                                                     const uint32_t (&pixels)[kFewChannelsWarpRuns][2]) {
#pragma unroll
    for (int i = 0; i < U::kFragments; ++i) {
#pragma unroll
      for (int run = 0; run < kFewChannelsWarpRuns; ++run) {
        MultiplyFragment(d[i][run], weights[i], pixels[run][0], pixels[run][1], T{});
      }
    }
  }

  // Operands are loaded a step ahead and offsets two, so beyond the end too.
  __device__ __forceinline__ void Multiply(const FewChannelsTask<T>& task, const unsigned char* shared,
                                           const unsigned char* const (&pixels)[kFewChannelsWarpRuns]) {
    constexpr int kStepPairs = 4 * kHalves, kStepSlots = U::kFragments * kWarp;
    const int lane = threadIdx.x % kWarp;
    const int* table = reinterpret_cast<const int*>(shared + task.table_at) + lane % 4;
    const int low_offset = task.pairs / kStepPairs * kStepSlots;  // in 16 bytes
    const uint4* slots = reinterpret_cast<const uint4*>(shared) + lane;
    const int low_pixels = task.patch_rows * task.pitch * static_cast<int>(sizeof(T));
    Operands operands[2];
    int offset[2][kHalves];
    LoadOffsets(offset[0], table);
    LoadOffsets(offset[1], table + kStepPairs);
    Load(operands[0], offset[0], slots, low_offset, pixels, low_pixels);
#pragma unroll 1
    for (int pair = 0; pair < task.pairs; pair += kFewChannelsChunkPairs) {
      float chunk[U::kFragments][kFewChannelsWarpRuns][4] = {};
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        LoadOffsets(offset[step % 2], table + (step + 2) * kStepPairs);
        const Operands& now = operands[step % 2];
        Load(operands[(step + 1) % 2], offset[(step + 1) % 2], slots + (step + 1) * kStepSlots, low_offset, pixels,
             low_pixels);
        if constexpr (U::kTf32x3) {
          MultiplyAll(chunk, now.weights, now.low_pixels);
          MultiplyAll(chunk, now.low_weights, now.pixels);
          MultiplyAll(chunk, now.weights, now.pixels);
          low_weights.Meet(now.low_weights[0][0]);
        } else {
          MultiplyAll(sums, now.weights, now.pixels);
        }
      }
      if constexpr (U::kTf32x3) {
#pragma unroll
        for (int i = 0; i < U::kFragments; ++i) {
#pragma unroll
          for (int run = 0; run < kFewChannelsWarpRuns; ++run) {
#pragma unroll
            for (int v = 0; v < 4; ++v) sums[i][run][v] += chunk[i][run][v];
          }
        }
      }
      table += kFewChannelsChunkPairs;
      slots += kSteps * kStepSlots;
    }
    if constexpr (U::kTf32x3)
      RestoreSums(sums, low_weights.Share(
                            TruncatedShare(kTruncatedByWarps, task.kernel_size[0] * task.window_elements, kSteps)));
  }

  __device__ __forceinline__ bool Finite() const {
    float all[4] = {};  // zero times a sum is zero, or NaN
#pragma unroll
    for (int i = 0; i < U::kFragments; ++i) {
#pragma unroll
      for (int run = 0; run < kFewChannelsWarpRuns; ++run) {
#pragma unroll
        for (int v = 0; v < 4; ++v) all[v] = fmaf(sums[i][run][v], 0.f, all[v]);
      }
    }
    return all[0] + all[1] + all[2] + all[3] == 0.f;
  }

  // The neighbouring output channels of quad q that the lane has, of its first or second result of a run.
  __device__ __forceinline__ void Results(int run, int second, int q, float (&v)[kCount]) const {
#pragma unroll
    for (int c = 0; c < kCount; ++c) v[c] = sums[q * kCount / 2 + c / 2][run][c % 2 * 2 + second];
  }
};

}  // namespace jsc

#endif  // JSC_CUDA_DENSE_CONV_FEW_CHANNELS_SUMS_CUH_
