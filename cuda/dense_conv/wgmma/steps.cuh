// The steps of a block's products in the engine wgmma: where its warps are in both pipelines and in the window, and the
// main loops.
//
// Why so few instructions: a block alone on its SM has one warp a scheduler, which waits for each of them. With some 95
// in a step of four products a step took 475 to 530 cycles whatever its tile, where the products of 64 x 112 are 224.
// Here most steps have some 66 in TF32 and 56 in 16 bits. Pipelines are addresses that wrap by one comparison. A stage
// is freed by predicate, without a branch. What follows a patch's last tap, or a pipeline's last stage, is behind the
// only branch.
#ifndef JSC_CUDA_DENSE_CONV_WGMMA_STEPS_CUH_
#define JSC_CUDA_DENSE_CONV_WGMMA_STEPS_CUH_

#include "cuda/dense_conv/wgmma/engine.cuh"

namespace jsc {

#if __CUDA_ARCH__ >= 900
// Where a block is in its steps, in the form that the next step's instructions take. Where every step has its own
// pixels, their pipeline is walked through like the taps of a patch. The weights of a step are then what is waited for
// and freed.
template <class U, typename T>
struct StepWalk {
  const WgmmaTask<T>& task;
  const uint32_t mine;  // all bits in the lane of a warp that frees stages, none in others
  const uint32_t high;  // word of the matrices of pixels; of stages of pixels and what is under a tap, the low one
  StageCursor of_weights, of_pixels;           // of weights: at those of the calling thread
  uint32_t pixels;                             // of the step
  int row_left, stage_left;                    // steps of the window's row, and of the stage, from this one on
  uint32_t read_weights = 0, read_pixels = 0;  // barriers of stages that the step before has read, or 0
  uint32_t next_read = 0;  // of the step that is issued: what the step before it has read is freed first

  __device__ __forceinline__ StepWalk(const WgmmaTask<T>& task, const WgmmaPlace& at, uint32_t pixels, uint32_t weights,
                                      const WgmmaBarriers& barriers)
      : task(task),
        mine(Kept(threadIdx.x % kWarp == 0 ? ~0u : 0u)),
        high(Kept(static_cast<uint32_t>(SwizzledMatrix(0, task.group_bytes) >> 32))),
        of_weights(StepWeights<U, T>::FirstStage(weights), barriers.weights_full, task.weight_stages, 0),
        of_pixels(static_cast<uint32_t>(SwizzledMatrix(pixels, 0)), barriers.pixels_full, task.patches, 0),
        pixels(of_pixels.stage),
        row_left(task.row_steps),
        stage_left(task.stage_steps) {
    Begin(at);
  }
  // The steps of a tile.
  __device__ __forceinline__ void Begin(const WgmmaPlace& at) {
    if (!task.patch) return;
    const int tap = Divide(at.first_step, task.by_taps).remainder;
    const Quotient place = Divide(tap, task.by_kernel_width);
    const int row = task.next_row + (task.row_steps - 1) * task.next_column;
    row_left = task.row_steps - place.remainder;
    stage_left = task.stage_steps - tap;
    pixels = of_pixels.stage + ((place.quotient * row + place.remainder * task.next_column) >> 4);
  }
  // For what the step reads; of a patch's pixels, where they are not those of the step before.
  __device__ __forceinline__ void WaitForWeights() const { of_weights.WaitForFull(); }
  __device__ __forceinline__ void WaitForFirstPixels() const {
    if (task.patch) of_pixels.WaitForFull();
  }
  __device__ __forceinline__ void WaitForNewPixels() const {
    if (stage_left == task.new_patch) of_pixels.WaitForFull();
  }
  __device__ __forceinline__ uint32_t Weights() const { return of_weights.stage; }
  __device__ __forceinline__ uint64_t Pixels() const { return uint64_t{high} << 32 | pixels; }
  // All that the step before has read may be filled again.
  __device__ __forceinline__ void FreeStages() {
    ArriveIf(read_weights);
    ArriveIf(read_pixels);
    read_pixels = 0;
  }
  // All products of a tile are done, and another tile follows.
  __device__ __forceinline__ void End() {
    FreeStages();
    read_weights = 0;
  }
  // To the next step's weights, and its pixels, which may be the first of a stage.
  __device__ __forceinline__ void NextWeights() {
    next_read = of_weights.barrier + StageCursor::kEmpty & mine;
    of_weights.Advance(StepWeights<U, T>::kStage);
  }
  __device__ __forceinline__ void NextPixels() {
    read_weights = next_read;
    const bool row_ends = --row_left == 0;
    pixels += static_cast<uint32_t>(row_ends ? task.next_row : task.next_column) >> 4;
    if (row_ends) row_left = task.row_steps;
    if (--stage_left == 0) NextStage();
  }

 private:
  __device__ __forceinline__ void NextStage() {
    __syncwarp();  // so that the compiler leaves this behind its branch
    if (task.patch) read_pixels = of_pixels.barrier + StageCursor::kEmpty & mine;
    of_pixels.Advance(static_cast<uint32_t>(task.pixel_bytes) >> 4);
    pixels = of_pixels.stage;
    row_left = task.row_steps;
    stage_left = task.stage_steps;
  }
  static __device__ __forceinline__ void ArriveIf(uint32_t barrier) {
    asm volatile(
        "{\n .reg .pred yes;\n setp.ne.u32 yes, %0, 0;\n @yes mbarrier.arrive.shared::cta.b64 _, [%0];\n}" ::"r"(
            barrier)
        : "memory");
  }
};

// Multiplies all of a block's steps; every thread of the warpgroups. Products are always in flight: a step's are issued
// before those of the step before are waited for.
template <class U, typename T>
__device__ __forceinline__ void MultiplySteps(StepWalk<U, T>& walk, int steps, float (&sums)[U::kPixels / 2]) {
  bool add = false;
  walk.WaitForWeights();
  walk.WaitForFirstPixels();
#pragma unroll 1
  for (int left = steps; left > 0; --left) {
    const StepWeights<U, T> weights{walk.Weights()};
    const uint64_t pixels = walk.Pixels();
    BeginProducts();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      weights.Multiply(sums, k, pixels + k * 2, add);
      add = true;
    }
    CommitProducts();
    WaitForProducts<1>();
    walk.FreeStages();
    walk.NextWeights();
    walk.NextPixels();
    if (left > 1) {
      walk.WaitForWeights();
      walk.WaitForNewPixels();
    }
  }
  WaitForProducts<0>();
  PinSums(sums);
}

// The same with weights in registers, a slice of eight channels at a time. Products of two slices are in flight while
// the next slice is at hand and the one after it is loaded.
template <class U>
__device__ __forceinline__ void MultiplySteps(StepWalk<U, float>& walk, int steps, float (&sums)[U::kPixels / 2]) {
  using Weights = StepWeights<U, float>;
  if (U::kConsumerGroups > 1 && steps == 0) {
#pragma unroll
    for (float& sum : sums) sum = 0.f;
    return;
  }
  Weights slices[4];
  walk.WaitForWeights();
  slices[0].Load(walk.Weights(), 0);
  slices[1].Load(walk.Weights(), 1);
  walk.WaitForFirstPixels();
  bool add = false;
#pragma unroll 1
  for (int left = steps; left > 0; --left) {
    const uint64_t pixels = walk.Pixels();
    const uint32_t weights = walk.Weights();
    slices[0].Multiply(sums, pixels, add);
    add = true;
    walk.NextWeights();
    WaitForProducts<2>();
    slices[2].Load(weights, 2);
    slices[1].Multiply(sums, pixels + 2, true);
    WaitForProducts<2>();  // all of the step before
    walk.FreeStages();
    slices[3].Load(weights, 3);
    walk.NextPixels();
    slices[2].Multiply(sums, pixels + 4, true);
    if (left > 1) walk.WaitForWeights();
    WaitForProducts<2>();
    slices[0].Load(walk.Weights(), 0);  // after the last step of anything
    slices[3].Multiply(sums, pixels + 6, true);
    if (left > 1) walk.WaitForNewPixels();
    WaitForProducts<2>();
    slices[1].Load(walk.Weights(), 1);
  }
  WaitForProducts<0>();
  PinSums(sums);
}
#endif

}  // namespace jsc

#endif  // JSC_CUDA_DENSE_CONV_WGMMA_STEPS_CUH_
