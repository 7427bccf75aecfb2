// 3xTF32 for wgmma: a high and a low TF32 part of each operand, and three products. Details:
// docs/design/kernels/highest.md.
//
// Pixels: high(x) is what tensor cores keep of x as TMA brought it, since they drop the last 13 bits. low(x) = x -
//   high(x), rounded to TF32, lies beside the stage in the same layout, once a block of channels for all taps of a
//   patch. In a chain TMA brings it too, from where the kernel in front has written it (core/low_parts.cuh). Else the
//   consumers write it while the products of the step before are in flight.
// Weights: split in registers when they are loaded, high(w) rounded.
// Accuracy: tensor cores truncate when they add. So the products of a step, 32 channels, are summed from zero there and
//   then added to the tile's accumulators by FADD. What is lost all the same is given back at the end
//   (core/truncation.cuh).
// Not finite: infinities, and values that round up to one, leave NaN in the sums that they reach. Those are computed
//   again (wgmma/recompute.cuh).
// Bound by: the tensor cores on large maps, where two or three warpgroups of an SM cover for each other's additions.
//   Windows under a tap have new pixels in every step and are bound by shared memory: a step of 64 x 56 is 336 cycles
//   of products, 408 of bytes there, and 56 more where it splits. A block alone on its SM is bound by its additions and
//   by what lies between products, unless it has double accumulators (in chains) or a second consumer group.
// Lost: low parts by warps of their own, since registers that warps hand to each other leave kernels beside them no
//   room; tiles of 128 x 56; two partial sums of half of a step's pixels each (35.3 against 33.9 us for 128->128
//   112x112, 17.0 against 16.3 us for 512->512 14x14); partial sums of half of a step's channels, or across the loop's
//   turn, for which ptxas 13.0 serializes the products (C7514) or copies accumulators that are in flight; weights
//   loaded and split among the products of the step before, or slice by slice; two consumer groups in chains.
#ifndef JSC_CUDA_DENSE_CONV_WGMMA_TF32X3_CUH_
#define JSC_CUDA_DENSE_CONV_WGMMA_TF32X3_CUH_

#include "cuda/core/low_parts.cuh"
#include "cuda/core/tf32x3.cuh"
#include "cuda/core/truncation.cuh"
#include "cuda/dense_conv/wgmma/steps.cuh"

namespace jsc {

// Two slices of a step's weights, of its four; which weights a thread has is as in StepWeights<U, float>.
template <class U>
struct HighLowWeights : HighLowSlices {
  using Whole = StepWeights<U, float>;

  // address: of a slice in a stage, plus Whole::Offset()
  __device__ __forceinline__ void Load(uint32_t address) {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      Whole::LoadPair(address + k * 1024, high[k][0], high[k][1]);
      Whole::LoadPair((address ^ 64) + 4 * kRowBytes + k * 1024, high[k][2], high[k][3]);  // four channels on
    }
    Split();
  }
};

// 16 bytes of pixels.
__device__ __forceinline__ void LoadSlot(uint32_t address, uint32_t (&v)[4]) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void StoreLow(uint32_t address, const uint32_t (&v)[4]) {
  uint32_t low[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) low[i] = __float_as_uint(LowPart(__uint_as_float(v[i])));
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(low[0]), "r"(low[1]), "r"(low[2]),
               "r"(low[3])
               : "memory");
}

#if __CUDA_ARCH__ >= 900
// Gives back what truncation took of a tile's sums, when all steps are done.
template <int kCount>
__device__ __forceinline__ void Restore(float (&sums)[kCount], const LowWeights& weights, int group_channels) {
  RestoreSums(sums, weights.Share(TruncatedShare(kTruncatedByWarpgroups, group_channels, 4)));
}

// The walk of a block whose pixels have low parts: in the second half of a stage.
template <class U>
struct Tf32x3Walk : StepWalk<U, float> {
  using Base = StepWalk<U, float>;
  using Base::task, Base::of_pixels;

  __device__ __forceinline__ Tf32x3Walk(const WgmmaTask<float>& task, const WgmmaPlace& at, uint32_t pixels,
                                        uint32_t weights, const BarriersOf<U>& barriers)
      : Base(task, at, pixels, weights, barriers) {}
  __device__ __forceinline__ uint32_t LowBytes() const { return static_cast<uint32_t>(task.pixel_bytes) / 2; }
  // Writes the low parts of the stage that comes next, by all threads of a consumer group, kBatch 16-byte slots at a
  // time.
  template <int kBatch>
  __device__ __forceinline__ void SplitPixels() const {
    Full().WaitForFull();
    const uint32_t block = of_pixels.barrier & ~kMatrixStarts;  // the block's place in a cluster's shared memory
    const uint32_t stage = block | StartOfMatrix(task.patch ? of_pixels.stage : Base::pixels), low = LowBytes();
    const auto end = static_cast<uint32_t>(task.copied_bytes);
    const uint32_t thread = U::kConsumerGroups > 1 ? threadIdx.x % U::kConsumers : threadIdx.x;
#pragma unroll 1
    for (uint32_t at = thread * 16; at < end; at += kBatch * U::kConsumers * 16) {
      uint32_t v[kBatch][4];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (at + i * U::kConsumers * 16 < end) LoadSlot(stage + at + i * U::kConsumers * 16, v[i]);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (at + i * U::kConsumers * 16 < end) StoreLow(stage + low + at + i * U::kConsumers * 16, v[i]);
      }
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();
    if (threadIdx.x % kWarp == 0) Arrive(Full().barrier + Ready());
  }
  // To the first step, and to the next one, all of whose operands are then there. They are waited for while products
  // are in flight, as none are when a step begins.
  __device__ __forceinline__ void Start() {
    if constexpr (U::kMakesLow) {
      SplitPixels<6>();
      WaitForSplit();
    } else {
      Base::WaitForFirstPixels();
    }
    Base::WaitForWeights();
  }
  __device__ __forceinline__ void Next(bool is_last) {
    Base::NextWeights();
    Base::NextPixels();
    if (is_last) return;
    if constexpr (U::kMakesLow) {
      const bool is_new = HasNewPixels();
      if (is_new) SplitPixels<U::kPixels <= 64 ? 2 : 1>();  // as many as there are registers for
      Base::WaitForWeights();
      if (is_new) WaitForSplit();
    } else {
      Base::WaitForWeights();
      Base::WaitForNewPixels();
    }
  }

 private:
  __device__ __forceinline__ bool HasNewPixels() const { return !task.patch || Base::stage_left == task.stage_steps; }
  __device__ __forceinline__ void WaitForSplit() const { WaitForBytes(Full().barrier + Ready(), Full().parity); }
  // Whose barriers stages of pixels have, and from that of a full stage to that of a split one.
  __device__ __forceinline__ const StageCursor& Full() const { return task.patch ? Base::of_pixels : Base::of_weights; }
  __device__ __forceinline__ uint32_t Ready() const {
    // Behind these come the barriers of split stages.
    static_assert(sizeof(WgmmaBarriers) == 4 * kMaxPipelineStages * sizeof(uint64_t));
    constexpr uint32_t kReady = sizeof(WgmmaBarriers), kWeights = offsetof(WgmmaBarriers, weights_full);
    return task.patch ? kReady : kReady - kWeights;
  }
};

// Multiplies all steps of a consumer group; every thread of its warpgroups. No products are in flight when a step ends,
// but by then those of the next have all they need.
template <class U>
__device__ __forceinline__ void MultiplyOneByOne(Tf32x3Walk<U>& walk, int steps, float (&sums)[U::kPixels / 2]) {
  HighLowWeights<U> first_half, second_half;  // halves of a step's channels
  float partial[U::kPixels / 2];
  LowWeights low_weights;
  const uint64_t low = walk.LowBytes() >> 4;
  first_half.Load(walk.Weights());
#pragma unroll 1
  for (int left = steps; left > 0; --left) {
    const uint64_t pixels = walk.Pixels();
    first_half.Multiply(partial, pixels, low, false);
    walk.FreeStages();
    second_half.Load(walk.Weights() + 2048);
    second_half.Multiply(partial, pixels + 4, low, true);
    low_weights.Meet(second_half.low[0][0]);
    walk.Next(left == 1);
    WaitForProducts<1>();
    first_half.Load(walk.Weights());  // after the last step of anything
    WaitForProducts<0>();
    AddPartial(sums, partial);
  }
  Restore(sums, low_weights, walk.task.group_channels);
}

// The same with double accumulators: registers for the sums of two steps, so that one step's are added during the
// other's products. Four steps of straight code, since the compiler serializes products that are in flight at the end
// of a loop's body (C7514).
template <class U>
struct DoubleAccumulators {
  using Sums = float[U::kPixels / 2];
  Tf32x3Walk<U>& walk;
  Sums& sums;
  int left;  // steps
  const uint64_t low;
  HighLowWeights<U> first_half, second_half;  // halves of a step's channels
  LowWeights low_weights;

  __device__ __forceinline__ DoubleAccumulators(Tf32x3Walk<U>& walk, int steps, Sums& sums)
      : walk(walk), sums(sums), left(steps), low(walk.LowBytes() >> 4) {
    first_half.Load(walk.Weights());
  }
  __device__ __forceinline__ void Begin(Sums& partial) { first_half.Multiply(partial, walk.Pixels(), low, false); }
  // The step's other half, and what the next one needs.
  __device__ __forceinline__ void End(Sums& partial) {
    const uint64_t pixels = walk.Pixels();
    walk.FreeStages();
    second_half.Load(walk.Weights() + 2048);
    second_half.Multiply(partial, pixels + 4, low, true);
    low_weights.Meet(second_half.low[0][0]);
    walk.Next(--left == 0);
    WaitForProducts<1>();
    first_half.Load(walk.Weights());  // after the last step of anything
  }
  __device__ __forceinline__ void Alternate(Sums& done, Sums& partial) {
    Begin(partial);
    WaitForProducts<1>();
    AddPartial(sums, done);
    End(partial);
  }
  __device__ __forceinline__ void Finish(Sums& done) {
    WaitForProducts<0>();
    AddPartial(sums, done);
  }
  __device__ __forceinline__ void MultiplyFour() {
    float even[U::kPixels / 2], odd[U::kPixels / 2];
    Begin(even);
    End(even);
    if (left == 0) return Finish(even);
    Alternate(even, odd);
    if (left == 0) return Finish(odd);
    Alternate(odd, even);
    if (left == 0) return Finish(even);
    Alternate(even, odd);
    Finish(odd);
  }
};

template <class U>
__device__ __forceinline__ void MultiplySteps(Tf32x3Walk<U>& walk, int steps, float (&sums)[U::kPixels / 2]) {
#pragma unroll
  for (float& sum : sums) sum = 0.f;
  if (U::kConsumerGroups > 1 && steps == 0) return;
  walk.Start();
  if constexpr (U::kDoubleAccumulators) {
    DoubleAccumulators<U> accumulators(walk, steps, sums);
#pragma unroll 1
    while (accumulators.left > 0) accumulators.MultiplyFour();
    Restore(sums, accumulators.low_weights, walk.task.group_channels);
  } else {
    MultiplyOneByOne(walk, steps, sums);
  }
}

template <class U, typename T>
using WalkOf = std::conditional_t<U::kTf32x3, Tf32x3Walk<U>, StepWalk<U, T>>;
#endif

}  // namespace jsc

#endif  // JSC_CUDA_DENSE_CONV_WGMMA_TF32X3_CUH_
