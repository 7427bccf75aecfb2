// The warpgroups that multiply: sums of 64 filters x a tile's pixels in registers, over a block's steps.
//
// Filters lie in shared memory with the filters of a channel side by side, where pixels have their channels side by
// side. 16-bit products take both as they lie. TF32 products want channels side by side, of both: there filters go
// through registers, where a thread's may come from anywhere, so each takes pairs of neighbouring filters.
#ifndef JSC_CUDA_WARPGROUP_ENGINE_CUH_
#define JSC_CUDA_WARPGROUP_ENGINE_CUH_

#include "warpgroup_copies.cuh"
#include "wgmma.cuh"

namespace jsc {

// Filters of a step as the product takes them, and which rows of the product they are.
template <class U, typename T>
struct StepFilters {
  uint32_t stage;
  // Slice k is 16 channels; between groups of eight channels 1024 bytes.
  template <typename Sums>
  __device__ __forceinline__ void Multiply(Sums& sums, int k, uint64_t pixels, bool add) const {
    Wgmma<T, U::kPixels>::Multiply(sums, SwizzledMatrix(stage + k * 2048, 1024), pixels, add);
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

// Of a warpgroup's 64 filters, two boxes of 32, a warp takes four slots of four filters: two neighbours and their
// neighbours four slots on, so that the eight bytes that each of 16 lanes loads are in distinct banks.
template <class U>
struct StepFilters<U, float> {
  static constexpr int kHeld = 2;  // slices, of a step's four
  uint32_t part[kHeld][4];

  static __device__ __forceinline__ int Slot() {
    const int row = threadIdx.x % kWarp / 4, warp = threadIdx.x / kWarp % 4;
    return warp % 2 * 2 + row / 4 + row / 2 % 2 * 4;
  }
  static __device__ __forceinline__ int Half() { return threadIdx.x / 4 % 2; }
  static __device__ __forceinline__ int Box() { return threadIdx.x / 64 % 2; }  // of the warpgroup's two

  __device__ __forceinline__ void Load(uint32_t address) {
    const int channel = threadIdx.x % 4;
    const uint32_t box = address + Box() * U::kBoxBytes + Half() * 8;
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
#pragma unroll
      for (int high = 0; high < 2; ++high) {
        const int row = channel + high * 4;
        asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
                     : "=r"(part[k][high * 2]), "=r"(part[k][high * 2 + 1])
                     : "r"(box + k * 1024 + row * kRowBytes + ((Slot() ^ row) << 4))
                     : "memory");
      }
    }
  }
  template <typename Sums>
  __device__ __forceinline__ void Multiply(Sums& sums, int k, uint64_t pixels, bool add) const {
    Wgmma<float, U::kPixels>::Multiply(sums, part[k], pixels, add);
  }
  static __device__ __forceinline__ void Store(const float (&sums)[U::kPixels / 2], float* tile) {
    const int lane = threadIdx.x % kWarp, group = threadIdx.x / 128;
    float* first = tile + lane % 4 * 2 * U::kSumStride + group * 64 + Box() * 32 + Slot() * 4 + Half() * 2;
#pragma unroll
    for (int i = 0; i < U::kPixels / 2; i += 4) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        *reinterpret_cast<float2*>(first + (i * 2 + e) * U::kSumStride) = make_float2(sums[i + e], sums[i + 2 + e]);
      }
    }
  }
};

#if __CUDA_ARCH__ >= 900
// Where a block is in its steps: in both rings, and in the window.
template <class U, typename T>
struct StepWalk {
  const WarpgroupTask<T>& task;
  WarpgroupBarriers& barriers;
  uint32_t pixels, filters;  // the first stages, of filters at the warpgroup's
  RingPlace of_pixels, of_filters;
  int tap, column, offset;  // offset: bytes from the first pixel of a patch to the first under the tap
  bool new_pixels = true;
  uint32_t read_pixels = 0, read_filters = 0;  // barriers of stages that the step before has read, or 0

  __device__ __forceinline__ StepWalk(const WarpgroupTask<T>& task, const WarpgroupPlace& at, uint32_t pixels,
                                      uint32_t filters, WarpgroupBarriers& barriers)
      : task(task), barriers(barriers), pixels(pixels), filters(filters + threadIdx.x / 128 * (64 * kRowBytes)) {
    tap = Divide(at.first_step, task.by_taps).remainder;
    const Quotient place = Divide(tap, task.by_kernel_width);
    column = place.remainder;
    offset = place.quotient * task.next_row + (place.quotient * (task.kernel_width - 1) + column) * task.next_column;
  }
  __device__ __forceinline__ void WaitForFilters() {
    WaitForBytes(barriers.filters_full + of_filters.stage, of_filters.parity);
  }
  __device__ __forceinline__ void WaitForPixels() {
    if (new_pixels) WaitForBytes(barriers.pixels_full + of_pixels.stage, of_pixels.parity);
  }
  __device__ __forceinline__ uint32_t Filters() const { return filters + of_filters.stage * U::kFilterBytes; }
  __device__ __forceinline__ uint64_t Pixels() const {
    return SwizzledMatrix(pixels + of_pixels.stage * task.pixel_bytes + offset, task.group_bytes);
  }
  // All that the step before has read may be filled again.
  __device__ __forceinline__ void FreeStages() const {
    if (threadIdx.x % kWarp != 0) return;
    if (read_filters != 0) Arrive(read_filters);
    if (read_pixels != 0) Arrive(read_pixels);
  }
  __device__ __forceinline__ void Advance() {
    if (++column == task.kernel_width) {
      column = 0;
      offset += task.next_row;
    } else {
      offset += task.next_column;
    }
    if (++tap == task.taps) tap = column = offset = 0;
    new_pixels = !task.patch || tap == 0;
    read_filters = SharedAddress(barriers.filters_empty + of_filters.stage);
    read_pixels = new_pixels ? SharedAddress(barriers.pixels_empty + of_pixels.stage) : 0;
    of_filters.Advance(task.filter_stages);
    if (new_pixels) of_pixels.Advance(task.pixel_stages);
  }
};

// Multiplies all of a block's steps; every thread of the warpgroups. There are always products under way: a step's are
// asked for before those of the step before are waited for.
template <class U, typename T>
__device__ __forceinline__ void MultiplySteps(StepWalk<U, T> walk, int steps, float (&sums)[U::kPixels / 2]) {
  bool add = false;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    walk.WaitForFilters();
    walk.WaitForPixels();
    const StepFilters<U, T> filters{walk.Filters()};
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
    walk.Advance();
  }
  WaitForProducts<0>();
  PinSums(sums);
}

// The same with filters in registers: half of a step's are loaded while the other half are multiplied.
template <class U>
__device__ __forceinline__ void MultiplySteps(StepWalk<U, float> walk, int steps, float (&sums)[U::kPixels / 2]) {
  StepFilters<U, float> low, high;
  bool add = false;
  walk.WaitForFilters();
  low.Load(walk.Filters());
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    walk.WaitForPixels();
    const uint64_t pixels = walk.Pixels();
    BeginProducts();
    low.Multiply(sums, 0, pixels, add);
    low.Multiply(sums, 1, pixels + 2, true);
    CommitProducts();
    add = true;
    WaitForProducts<1>();  // of the step before
    walk.FreeStages();
    high.Load(walk.Filters() + 2048);
    BeginProducts();
    high.Multiply(sums, 0, pixels + 4, true);
    high.Multiply(sums, 1, pixels + 6, true);
    CommitProducts();
    walk.Advance();
    if (step + 1 < steps) walk.WaitForFilters();
    WaitForProducts<1>();
    low.Load(walk.Filters());  // after the last step of anything
  }
  WaitForProducts<0>();
  PinSums(sums);
}
#endif

}  // namespace jsc

#endif  // JSC_CUDA_WARPGROUP_ENGINE_CUH_
