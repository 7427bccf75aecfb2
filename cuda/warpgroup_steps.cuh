// The steps of warpgroup_engine.cuh in fewer instructions, where kShortSteps (warpgroup_task.cuh) is set.
//
// Why: a block alone on its multiprocessor has one warp a scheduler, which waits for each of its instructions. With
// some 95 of them in a step of four products a block took 475 to 530 cycles a step whatever its tile, where the
// products of 64 x 112 are 224 (benchmarks/NOTES.md). Here a step has some 65, spread over its products: rings are
// addresses, which wrap by one comparison; a stage is freed by predicate, without a branch; and what follows when a
// stage's last tap is done, a new stage of pixels, is behind the one branch that there is.
#ifndef JSC_CUDA_WARPGROUP_STEPS_CUH_
#define JSC_CUDA_WARPGROUP_STEPS_CUH_

#include "warpgroup_engine.cuh"

namespace jsc {

#if __CUDA_ARCH__ >= 900
// Where a block is in its steps, as what the next step's instructions take: a warp that multiplies alone on its
// scheduler waits for each of them, so there are few, and what most steps do not need is behind one branch.
template <class U, typename T>
struct ShortWalk {
  const WarpgroupTask<T>& task;
  const uint32_t mine;  // all bits in the lane of a warp that frees stages, none in others
  const int stage_taps;
  const uint32_t high;  // word of the matrices of pixels; of stages of pixels and what is under a tap, the low one
  // The rings, by stages and by addresses of barriers that say they are full.
  const uint32_t first_filters, first_pixels, filters_full, pixels_full, filters_end;
  uint32_t stage_filters, filters_barrier, filters_parity = 0;  // of the calling thread's filters in the stage
  uint32_t stage_pixels, pixels_barrier, pixels_parity = 0;
  uint32_t pixels;                             // under the tap
  int columns, taps;                           // of the window's row, and of the stage, from this step on
  uint32_t read_filters = 0, read_pixels = 0;  // barriers of stages that the step before has read, or 0
  uint32_t next_read = 0;

  // filters: the thread's part of the first stage
  __device__ __forceinline__ ShortWalk(const WarpgroupTask<T>& task, const WarpgroupPlace& at, uint32_t pixels,
                                       uint32_t filters, WarpgroupBarriers& barriers)
      : task(task),
        mine(Kept(threadIdx.x % kWarp == 0 ? ~0u : 0u)),
        stage_taps(task.patch ? task.taps : 1),
        high(Kept(static_cast<uint32_t>(SwizzledMatrix(0, task.group_bytes) >> 32))),
        first_filters(filters + threadIdx.x / 128 * (64 * kRowBytes) + StepFilters<U, T>::Offset()),
        first_pixels(static_cast<uint32_t>(SwizzledMatrix(pixels, 0))),
        filters_full(Kept(SharedAddress(barriers.filters_full))),
        pixels_full(Kept(SharedAddress(barriers.pixels_full))),
        filters_end(Kept(filters_full + task.filter_stages * kBarrierBytes)),
        stage_filters(first_filters),
        filters_barrier(filters_full),
        stage_pixels(first_pixels),
        pixels_barrier(pixels_full) {
    Begin(at);
  }
  // The steps of a tile.
  __device__ __forceinline__ void Begin(const WarpgroupPlace& at) {
    const int tap = task.patch ? Divide(at.first_step, task.by_taps).remainder : 0;
    const Quotient place = Divide(tap, task.by_kernel_width);
    const int row = task.next_row + (task.kernel_width - 1) * task.next_column;
    columns = task.kernel_width - place.remainder;
    taps = stage_taps - tap;
    pixels = stage_pixels + ((place.quotient * row + place.remainder * task.next_column) >> 4);
  }
  // For what the step reads; of pixels, where they are not those of the step before.
  __device__ __forceinline__ void WaitForFilters() const { WaitAt(filters_barrier, filters_parity); }
  __device__ __forceinline__ void WaitForPixels() const { WaitAt(pixels_barrier, pixels_parity); }
  __device__ __forceinline__ void WaitForNewPixels() const {
    if (taps == stage_taps) WaitForPixels();
  }
  __device__ __forceinline__ uint64_t Pixels() const { return uint64_t{high} << 32 | pixels; }
  // All that the step before has read may be filled again.
  __device__ __forceinline__ void FreeStages() {
    ArriveIf(read_filters);
    ArriveIf(read_pixels);
    read_pixels = 0;
  }
  // All products of a tile are done, and another tile follows.
  __device__ __forceinline__ void End() {
    FreeStages();
    read_filters = 0;
  }
  // To the next step's filters, and its tap, which may be the first of other pixels.
  __device__ __forceinline__ void NextFilters() {
    next_read = filters_barrier + kEmpty & mine;
    stage_filters += U::kFilterBytes;
    filters_barrier += kBarrierBytes;
    if (filters_barrier == filters_end) {
      filters_barrier = filters_full;
      stage_filters = first_filters;
      filters_parity ^= 1;
    }
  }
  __device__ __forceinline__ void NextTap() {
    read_filters = next_read;
    const bool row_ends = --columns == 0;
    pixels += static_cast<uint32_t>(row_ends ? task.next_row : task.next_column) >> 4;
    if (row_ends) columns = task.kernel_width;
    if (--taps == 0) NextPixels();
  }

 private:
  static constexpr uint32_t kBarrierBytes = sizeof(uint64_t);
  static constexpr uint32_t kEmpty = kMaxRing * kBarrierBytes;  // from the barrier of a full stage to the empty one's

  // A value that is kept in a register, where the compiler would find it again in every step.
  static __device__ __forceinline__ uint32_t Kept(uint32_t value) {
    asm volatile("" : "+r"(value));
    return value;
  }

  __device__ __forceinline__ void NextPixels() {
    __syncwarp();  // so that the compiler leaves this behind its branch
    read_pixels = pixels_barrier + kEmpty & mine;
    stage_pixels += static_cast<uint32_t>(task.pixel_bytes) >> 4;
    pixels_barrier += kBarrierBytes;
    if (pixels_barrier == pixels_full + task.pixel_stages * kBarrierBytes) {
      pixels_barrier = pixels_full;
      stage_pixels = first_pixels;
      pixels_parity ^= 1;
    }
    pixels = stage_pixels;
    columns = task.kernel_width;
    taps = stage_taps;
  }
  static __device__ __forceinline__ void WaitAt(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{\n .reg .pred done;\n $wait_%=:\n mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n @!done bra "
        "$wait_%=;\n}" ::"r"(barrier),
        "r"(parity)
        : "memory");
  }
  static __device__ __forceinline__ void ArriveIf(uint32_t barrier) {
    asm volatile(
        "{\n .reg .pred yes;\n setp.ne.u32 yes, %0, 0;\n @yes mbarrier.arrive.shared::cta.b64 _, [%0];\n}" ::"r"(
            barrier)
        : "memory");
  }
};

// Multiplies all of a block's steps; every thread of the warpgroups. There are always products under way: a step's are
// asked for before those of the step before are waited for.
template <class U, typename T>
__device__ __forceinline__ void MultiplySteps(ShortWalk<U, T>& walk, int steps, float (&sums)[U::kPixels / 2]) {
  bool add = false;
  walk.WaitForFilters();
  walk.WaitForPixels();
#pragma unroll 1
  for (int left = steps; left > 0; --left) {
    const StepFilters<U, T> filters{walk.stage_filters};
    const uint64_t pixels = walk.Pixels();
    BeginProducts();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      filters.Multiply(sums, k, pixels + k * 2, add);
      add = true;
    }
    CommitProducts();
    WaitForProducts<1>();
    walk.FreeStages();
    walk.NextFilters();
    walk.NextTap();
    if (left > 1) {
      walk.WaitForFilters();
      walk.WaitForNewPixels();
    }
  }
  WaitForProducts<0>();
  PinSums(sums);
}

// The same with filters in registers, a slice of eight channels at a time: two slices' products are under way while
// the next is at hand and the one after it is loaded.
template <class U>
__device__ __forceinline__ void MultiplySteps(ShortWalk<U, float>& walk, int steps, float (&sums)[U::kPixels / 2]) {
  using Filters = StepFilters<U, float>;
  Filters slices[4];
  walk.WaitForFilters();
  slices[0].Load(walk.stage_filters, 0);
  slices[1].Load(walk.stage_filters, 1);
  walk.WaitForPixels();
  bool add = false;
#pragma unroll 1
  for (int left = steps; left > 0; --left) {
    const uint64_t pixels = walk.Pixels();
    const uint32_t filters = walk.stage_filters;
    slices[0].Multiply(sums, pixels, add);
    add = true;
    walk.NextFilters();
    WaitForProducts<2>();
    slices[2].Load(filters, 2);
    slices[1].Multiply(sums, pixels + 2, true);
    WaitForProducts<2>();  // all of the step before
    walk.FreeStages();
    slices[3].Load(filters, 3);
    walk.NextTap();
    slices[2].Multiply(sums, pixels + 4, true);
    if (left > 1) walk.WaitForFilters();
    WaitForProducts<2>();
    slices[0].Load(walk.stage_filters, 0);  // after the last step of anything
    slices[3].Multiply(sums, pixels + 6, true);
    if (left > 1) walk.WaitForNewPixels();
    WaitForProducts<2>();
    slices[1].Load(walk.stage_filters, 1);
  }
  WaitForProducts<0>();
  PinSums(sums);
}

template <class U, typename T>
using StepsOf = std::conditional_t<kShortSteps, ShortWalk<U, T>, StepWalk<U, T>>;
#endif

}  // namespace jsc

#endif  // JSC_CUDA_WARPGROUP_STEPS_CUH_
