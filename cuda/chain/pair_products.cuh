// The products of a pair (chain/pair.cuh): sums in registers.
#ifndef JSC_CUDA_CHAIN_PAIR_PRODUCTS_CUH_
#define JSC_CUDA_CHAIN_PAIR_PRODUCTS_CUH_

#include "cuda/chain/pair_copies.cuh"

namespace jsc {

#if __CUDA_ARCH__ >= 900
// The first product: sums of the block's 64 output channels and all pixels over the warpgroup's half of each step's
// channels.
template <class U, typename T>
struct FirstProduct {
  static __device__ __forceinline__ void Multiply(PairStages<U>& stages, PairBarriers& barriers, uint32_t pixels,
                                                  int steps, int group, float (&sums)[U::kPixels / 2]) {
    uint32_t read = 0;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      stages.Wait();
      WaitForBytes(barriers.pixels_full + step, 0);
      const uint32_t slot = stages.Slot();
      const uint64_t columns = SwizzledMatrix(pixels + step * U::kStageBytes, kSwizzleBytes);
      BeginProducts();
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int k = group * 2 + i;
        Wgmma<T, U::kPixels>::Multiply(sums, SwizzledMatrix(slot + k * 2048, 1024), columns + k * 2, step > 0 || i > 0);
      }
      CommitProducts();
      WaitForProducts<1>();
      PairStages<U>::Free(read);
      read = stages.Empty();
      stages.Advance();
    }
    WaitForProducts<0>();
    PinSums(sums);
    PairStages<U>::Free(read);
  }
};

template <class U>
struct FirstProduct<U, float> {
  static __device__ __forceinline__ void Multiply(PairStages<U>& stages, PairBarriers& barriers, uint32_t pixels,
                                                  int steps, int group, float (&sums)[U::kPixels / 2]) {
    using Weights = StepWeights<U, float>;
    Weights slices[2][2];
    const uint32_t offset = Weights::Offset();
#pragma unroll 1
    for (int step = 0; step < steps; step += 2) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        stages.Wait();
        const uint32_t weights = stages.Slot() + offset;
#pragma unroll
        for (int i = 0; i < 2; ++i) slices[half][i].Load(weights, group * 2 + i);
        WaitForBytes(barriers.pixels_full + step + half, 0);
        const uint64_t columns = SwizzledMatrix(pixels + (step + half) * U::kStageBytes, kSwizzleBytes) + group * 4;
        BeginProducts();
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          Wgmma<float, U::kPixels>::Multiply(sums, slices[half][i].slice, columns + i * 2, step + half + i > 0);
        }
        CommitProducts();
        WaitForProducts<1>();
        PairStages<U>::Free(stages.Empty());
        stages.Advance();
      }
    }
    WaitForProducts<0>();
    PinSums(sums);
  }
};

// The next product: sums of 64 output channels and all pixels over the block's middle channels.
template <class U, typename T>
struct NextProduct {
  static __device__ __forceinline__ void Multiply(PairStages<U>& stages, uint32_t middle,
                                                  float (&sums)[U::kPixels / 2]) {
    stages.Wait();
    const uint32_t slot = stages.Slot();
    const uint64_t columns = SwizzledMatrix(middle, kSwizzleBytes);
    BeginProducts();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      Wgmma<T, U::kPixels>::Multiply(sums, SwizzledMatrix(slot + k * 2048, 1024), columns + k * 2, k > 0);
    }
    CommitProducts();
    WaitForProducts<0>();
    PinSums(sums);
    PairStages<U>::Free(stages.Empty());
    stages.Advance();
  }
};

template <class U>
struct NextProduct<U, float> {
  static __device__ __forceinline__ void Multiply(PairStages<U>& stages, uint32_t middle,
                                                  float (&sums)[U::kPixels / 2]) {
    using Weights = StepWeights<U, float>;
    Weights slices[2][4];
    const uint32_t offset = Weights::Offset();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      stages.Wait();
#pragma unroll
      for (int k = 0; k < 4; ++k) slices[half][k].Load(stages.Slot() + offset, k);
      const uint64_t columns = SwizzledMatrix(middle + half * U::kStageBytes, kSwizzleBytes);
      BeginProducts();
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        Wgmma<float, U::kPixels>::Multiply(sums, slices[half][k].slice, columns + k * 2, half + k > 0);
      }
      CommitProducts();
      PairStages<U>::Free(stages.Empty());
      stages.Advance();
    }
    WaitForProducts<0>();
    PinSums(sums);
  }
};

// Both products by 3xTF32. The tensor cores sum products of 32 channels, which FADD then adds. split: the low parts of
// pixels are made here, else they come with the pixels.
template <class U>
__device__ __forceinline__ void MultiplyFirstTf32x3(PairStages<U>& stages, PairBarriers& barriers, uint32_t pixels,
                                                    int steps, bool split, int group, float (&sums)[U::kPixels / 2]) {
  const uint32_t low = steps * U::kStageBytes;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {  // low parts of the warpgroup's half of the step's channels
    WaitForBytes(barriers.pixels_full + step, 0);
    if (!split) continue;
#pragma unroll
    for (int i = 0; i < (U::kPixels * 4 + 127) / 128; ++i) {
      const int slot = static_cast<int>(threadIdx.x) % 128 + i * 128, row = slot / 4;
      if (row >= U::kPixels) break;
      const uint32_t at = pixels + step * U::kStageBytes + row * kRowBytes + ((group * 4 + slot % 4) ^ (row & 7)) * 16;
      uint32_t v[4];
      LoadSlot(at, v);
      StoreLow(at + low, v);
    }
  }
  if (split) {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    if (group == 0) {
      asm volatile("bar.sync 3, 128;" ::: "memory");
    } else {
      asm volatile("bar.sync 4, 128;" ::: "memory");
    }
  }
  HighLowWeights<U> weights[2];
  LowWeights low_weights;
  float partial[U::kPixels / 2];
  const uint32_t offset = StepWeights<U, float>::Offset() + group * 2048;
#pragma unroll
  for (float& sum : sums) sum = 0.f;
#pragma unroll 1
  for (int step = 0; step < steps; step += 2) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      stages.Wait();
      weights[half].Load(stages.Slot() + offset);
      const uint64_t columns = SwizzledMatrix(pixels + (step + half) * U::kStageBytes, kSwizzleBytes) + group * 4;
      weights[half].Multiply(partial, columns, low >> 4, half > 0);
      low_weights.Meet(weights[half].low[0][0]);
      PairStages<U>::Free(stages.Empty());
      stages.Advance();
    }
    WaitForProducts<0>();
    AddPartial(sums, partial);
  }
  RestoreSums(sums, low_weights.Share(4 * kTruncatedByWarpgroups));
}

template <class U>
__device__ __forceinline__ void MultiplyNextTf32x3(PairStages<U>& stages, uint32_t middle,
                                                   float (&sums)[U::kPixels / 2]) {
  HighLowWeights<U> weights[2];
  LowWeights low_weights;
  float partial[U::kPixels / 2];
  const uint32_t offset = StepWeights<U, float>::Offset();
#pragma unroll
  for (float& sum : sums) sum = 0.f;
#pragma unroll
  for (int block = 0; block < U::kBlocks; ++block) {
    stages.Wait();
    const uint64_t columns = SwizzledMatrix(middle + block * U::kStageBytes, kSwizzleBytes);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      weights[half].Load(stages.Slot() + offset + half * 2048);
      weights[half].Multiply(partial, columns + half * 4, U::kBlocks * U::kStageBytes >> 4, half > 0);
      low_weights.Meet(weights[half].low[0][0]);
    }
    PairStages<U>::Free(stages.Empty());
    stages.Advance();
    WaitForProducts<0>();
    AddPartial(sums, partial);
  }
  RestoreSums(sums, low_weights.Share(4 * kTruncatedByWarpgroups));
}
#endif

}  // namespace jsc

#endif  // JSC_CUDA_CHAIN_PAIR_PRODUCTS_CUH_
