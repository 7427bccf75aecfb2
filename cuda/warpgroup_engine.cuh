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
  static __device__ __forceinline__ uint32_t Offset() { return 0; }
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
  uint32_t slice[4];  // one of a step's four

  static __device__ __forceinline__ int Slot() {
    const int row = threadIdx.x % kWarp / 4, warp = threadIdx.x / kWarp % 4;
    return warp % 2 * 2 + row / 4 + row / 2 % 2 * 4;
  }
  static __device__ __forceinline__ int Half() { return threadIdx.x / 4 % 2; }
  static __device__ __forceinline__ int Box() { return threadIdx.x / 64 % 2; }  // of the warpgroup's two
  // Of the calling thread's first filter, from the warpgroup's stage on.
  static __device__ __forceinline__ uint32_t Offset() {
    const int channel = threadIdx.x % 4;
    return Box() * U::kBoxBytes + Half() * 8 + channel * kRowBytes + ((Slot() ^ channel) << 4);
  }
  static __device__ __forceinline__ void LoadPair(uint32_t address, uint32_t& first, uint32_t& second) {
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(first), "=r"(second) : "r"(address) : "memory");
  }
  // Slice k; filters: the warpgroup's stage plus Offset()
  __device__ __forceinline__ void Load(uint32_t filters, int k) {
    LoadPair(filters + k * 1024, slice[0], slice[1]);
    LoadPair((filters ^ 64) + 4 * kRowBytes + k * 1024, slice[2], slice[3]);  // four channels on
  }
  // sums (+)= filters x pixels, asked for
  template <typename Sums>
  __device__ __forceinline__ void Multiply(Sums& sums, uint64_t pixels, bool add) const {
    BeginProducts();
    Wgmma<float, U::kPixels>::Multiply(sums, slice, pixels, add);
    CommitProducts();
  }
  // The calling thread's first sum in a tile.
  template <typename Sum>
  static __device__ __forceinline__ Sum* First(Sum* tile) {
    const int lane = threadIdx.x % kWarp, group = threadIdx.x / 128;
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
    Begin(at);
  }
  // The steps of a tile.
  __device__ __forceinline__ void Begin(const WarpgroupPlace& at) {
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
  // All products of a tile are done, and another tile follows.
  __device__ __forceinline__ void End() {
    FreeStages();
    read_filters = read_pixels = 0;
    new_pixels = true;
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
__device__ __forceinline__ void MultiplySteps(StepWalk<U, T>& walk, int steps, float (&sums)[U::kPixels / 2]) {
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

// The same with filters in registers, a slice of eight channels at a time: two slices' products are under way while
// the next is at hand and the one after it is loaded.
template <class U>
__device__ __forceinline__ void MultiplySteps(StepWalk<U, float>& walk, int steps, float (&sums)[U::kPixels / 2]) {
  using Filters = StepFilters<U, float>;
  Filters slices[4];
  const uint32_t offset = Filters::Offset();
  walk.WaitForFilters();
  slices[0].Load(walk.Filters() + offset, 0);
  slices[1].Load(walk.Filters() + offset, 1);
  bool add = false;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    walk.WaitForPixels();
    const uint64_t pixels = walk.Pixels();
    const uint32_t filters = walk.Filters() + offset;
    slices[0].Multiply(sums, pixels, add);
    add = true;
    WaitForProducts<2>();
    slices[2].Load(filters, 2);
    slices[1].Multiply(sums, pixels + 2, true);
    WaitForProducts<2>();  // all of the step before
    walk.FreeStages();
    slices[3].Load(filters, 3);
    slices[2].Multiply(sums, pixels + 4, true);
    walk.Advance();
    if (step + 1 < steps) walk.WaitForFilters();
    WaitForProducts<2>();
    slices[0].Load(walk.Filters() + offset, 0);  // after the last step of anything
    slices[3].Multiply(sums, pixels + 6, true);
    WaitForProducts<2>();
    slices[1].Load(walk.Filters() + offset, 1);
  }
  WaitForProducts<0>();
  PinSums(sums);
}
#endif

}  // namespace jsc

#endif  // JSC_CUDA_WARPGROUP_ENGINE_CUH_
