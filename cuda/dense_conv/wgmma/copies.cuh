// The producer warp of the engine wgmma, which issues TMA copies of pixels and weights, and the pipelines that they go
// to.
//
// Layout: a stage of weights is boxes [channel, 128 bytes of output channels]. A stage of pixels is [pixel, 128 bytes
// of channels]: a patch of x with its halo, or the pixels under one tap of consecutive results (im2col). 16-byte slots
// of a row are permuted by the row's address. At 3xTF32 the second half of a stage has the low parts, in the same
// layout.
#ifndef JSC_CUDA_DENSE_CONV_WGMMA_COPIES_CUH_
#define JSC_CUDA_DENSE_CONV_WGMMA_COPIES_CUH_

#include <cstddef>

#include "cuda/core/copies.cuh"
#include "cuda/core/launch.cuh"
#include "cuda/dense_conv/wgmma/maps.h"
#include "cuda/dense_conv/wgmma/task.cuh"

namespace jsc {

// Barriers of both pipelines of a consumer group. full: bytes have come; empty: all of its warps that multiply are done
// with a stage. Where every step has its own pixels, a stage of them has the barriers of its weights.
struct WgmmaBarriers {
  uint64_t pixels_full[kMaxPipelineStages], pixels_empty[kMaxPipelineStages], weights_full[kMaxPipelineStages],
      weights_empty[kMaxPipelineStages];
};

// ready: the low parts of a stage's pixels have been made beside it.
struct Tf32x3Barriers : WgmmaBarriers {
  uint64_t pixels_ready[kMaxPipelineStages];
};

template <class U>
using BarriersOf = std::conditional_t<U::kMakesLow, Tf32x3Barriers, WgmmaBarriers>;
template <class U>
using MapsOf = std::conditional_t<U::kCopiesLow, Tf32x3Maps, WgmmaMaps>;

#if __CUDA_ARCH__ >= 900
// By one thread. (By a lane each they would be made one after the other all the same, 1 us later.) readers: warps of
// the consumer group that multiply.
__device__ __forceinline__ void InitBarriers(WgmmaBarriers& barriers, int readers) {
#pragma unroll
  for (int i = 0; i < kMaxPipelineStages; ++i) {
    InitBarrier(barriers.pixels_full + i);
    InitBarrier(barriers.weights_full + i);
    InitBarrier(barriers.pixels_empty + i, readers);
    InitBarrier(barriers.weights_empty + i, readers);
  }
  FenceBarriers();
}

__device__ __forceinline__ void InitBarriers(Tf32x3Barriers& barriers, int readers) {
#pragma unroll
  for (int i = 0; i < kMaxPipelineStages; ++i) {
    InitBarrier(barriers.pixels_ready + i, readers);
  }
  InitBarriers(static_cast<WgmmaBarriers&>(barriers), readers);
}

// The box of an im2col map's windows that begin at pixel (x, y) of an image, under the tap that lies `offset` further:
// dx, and dy in the upper half.
__device__ __forceinline__ void CopyUnderTap(uint32_t shared, const CUtensorMap* map, int channel, int x, int y,
                                             int image, uint32_t offset, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%2, %3, %4, %5}], [%6], {%7, %8};" ::"r"(shared),
      "l"(map), "r"(channel), "r"(x), "r"(y), "r"(image), "r"(barrier), "h"(static_cast<short>(offset & 0xffff)),
      "h"(static_cast<short>(offset >> 16))
      : "memory");
}

// A value that is kept in a register, where the compiler would find it again in every step.
__device__ __forceinline__ uint32_t Kept(uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}

// A pipeline as a warp goes through it: the address of the stage, or a word of a product's operand, and the address of
// its full barrier. Both wrap by one comparison.
struct StageCursor {
  static constexpr uint32_t kBarrierBytes = sizeof(uint64_t);
  // From the barrier of a full stage to the empty one's.
  static constexpr uint32_t kEmpty = kMaxPipelineStages * kBarrierBytes;
  static_assert(offsetof(WgmmaBarriers, pixels_empty) - offsetof(WgmmaBarriers, pixels_full) == kEmpty);
  static_assert(offsetof(WgmmaBarriers, weights_empty) - offsetof(WgmmaBarriers, weights_full) == kEmpty);
  const uint32_t first_stage, first_barrier, end;  // end: behind the last barrier
  uint32_t stage, barrier, parity;

  // parity: of the first phase that is waited for
  __device__ __forceinline__ StageCursor(uint32_t stages, const uint64_t* full, int count, uint32_t parity)
      : first_stage(stages),
        first_barrier(Kept(SharedAddress(full))),
        end(Kept(first_barrier + count * kBarrierBytes)),
        stage(stages),
        barrier(first_barrier),
        parity(parity) {}
  __device__ __forceinline__ void WaitForFull() const { WaitForBytes(barrier, parity); }
  __device__ __forceinline__ void WaitForEmpty() const { WaitForBytes(barrier + kEmpty, parity); }
  __device__ __forceinline__ void Restart(uint32_t first_parity) {
    stage = first_stage, barrier = first_barrier, parity = first_parity;
  }
  __device__ __forceinline__ void Advance(uint32_t stage_bytes) {
    stage += stage_bytes;
    barrier += kBarrierBytes;
    if (barrier == end) {
      barrier = first_barrier;
      stage = first_stage;
      parity ^= 1;
    }
  }
};

template <class U>
__device__ __forceinline__ void PrefetchMapsOf(const MapsOf<U>& maps) {
  PrefetchMap(maps.x);
  PrefetchMap(maps.kernel);
  if constexpr (U::kCopiesLow) PrefetchMap(maps.low);
}

// The producer of a consumer group: one lane of a warp issues all its copies.
template <class U, typename T>
struct StageCopies {
  const WgmmaTask<T>& task;
  const MapsOf<U>& maps;
  StageCursor to_weights, to_pixels;
  int image, x, y, of_pixels;     // of_pixels: channel of x
  int column;                     // of the window, where pixels are under a tap
  uint32_t offset;                // of the tap, as CopyUnderTap takes it
  int out_channel, channel, tap;  // of the next weights; channel of the group, tap of all stacks'
  int end_tap;

  __device__ __forceinline__ StageCopies(const WgmmaTask<T>& task, const MapsOf<U>& maps, unsigned char* pixels,
                                         unsigned char* weights, const WgmmaBarriers& barriers)
      : task(task),
        maps(maps),
        to_weights(SharedAddress(weights), barriers.weights_full, task.weight_stages, 1),
        to_pixels(SharedAddress(pixels), barriers.pixels_full, task.pixel_stages, 1) {}

  // All copies of a tile. early, for the first tile: as many weights as there is room for are copied before the kernel
  // in front is done.
  __device__ __forceinline__ void AskForTile(const WgmmaPlace& at, bool early) {
    const Quotient start = Divide(at.first_step, task.by_taps);
    const int first_row = Divide(start.remainder, task.by_kernel_width).quotient;
    const int stack = static_cast<int>(blockIdx.z);
    image = stack * task.images_per_stack + at.image;
    y = at.y * task.stride[0] - task.pad_low[0];
    x = at.x * task.stride[1] - task.pad_low[1];
    channel = start.quotient * U::kStepChannels;
    of_pixels = Divide(at.out_channel, task.by_group_out_channels).quotient * task.group_channels + channel;
    column = start.remainder - first_row * task.kernel_width;
    offset = static_cast<uint32_t>(first_row * task.dilation[0]) << 16 | column * task.dilation[1];
    out_channel = at.out_channel;
    end_tap = (stack + 1) * task.taps;
    tap = end_tap - task.taps + start.remainder;
    const int steps = at.end_step - at.first_step, early_steps = early ? min(task.weight_stages, steps) : 0;
    if (task.patch) {
      AskForPatches(steps, early_steps, task.taps - start.remainder);
    } else {
      AskForWindows(steps, early_steps);
    }
  }

 private:
  // A stage of pixels for all taps. first_taps: of them that the first one has steps for.
  __device__ __forceinline__ void AskForPatches(int steps, int early_steps, int first_taps) {
#pragma unroll 1
    for (int i = 0; i < early_steps; ++i) AskForWeights();
    if (early_steps > 0) WaitForPixels();
    int taps = first_taps;
#pragma unroll 1
    for (int left = steps; left > 0;) {
      to_pixels.WaitForEmpty();
      if (IsElected()) {
        ExpectBytes(to_pixels.barrier, PixelBytes());
        CopyBox(to_pixels.stage, &maps.x, of_pixels, x, y, image, to_pixels.barrier);
        if constexpr (U::kCopiesLow) {
          CopyBox(to_pixels.stage + task.pixel_bytes / 2, &maps.low, of_pixels, x, y, image, to_pixels.barrier);
        }
      }
      of_pixels += U::kStepChannels;
      to_pixels.Advance(task.pixel_bytes);
      int wanted = min(taps, left);
      left -= wanted;
      const int asked = min(early_steps, wanted);
      early_steps -= asked;
#pragma unroll 1
      for (wanted -= asked; wanted > 0; --wanted) AskForWeights();
      taps = task.taps;
    }
  }
  __device__ __forceinline__ void AskForWeights() {
    to_weights.WaitForEmpty();
    if (IsElected()) {
      ExpectBytes(to_weights.barrier, U::kWeightBytes);
      CopyWeights();
    }
    NextWeightTap();
    to_weights.Advance(U::kWeightBytes);
  }
  // A stage of pixels for every tap. It and the stage of weights have one barrier, the weights'.
  __device__ __forceinline__ void AskForWindows(int steps, int early_steps) {
    if (early_steps > 0) {
#pragma unroll 1
      for (int i = 0; i < early_steps; ++i) {
        if (IsElected()) {
          ExpectMoreBytes(to_weights.barrier, U::kWeightBytes);
          CopyWeights();
        }
        NextWeightTap();
        to_weights.Advance(U::kWeightBytes);
      }
      to_weights.Restart(1);
      WaitForPixels();
#pragma unroll 1
      for (int i = 0; i < early_steps; ++i) {
        if (IsElected()) {
          ExpectBytes(to_weights.barrier, PixelBytes());
          CopyWindows();
        }
        NextStages();
        NextPixelTap();
      }
    }
#pragma unroll 1
    for (int left = steps - early_steps; left > 0; --left) {
      to_weights.WaitForEmpty();
      if (IsElected()) {
        ExpectBytes(to_weights.barrier, PixelBytes() + U::kWeightBytes);
        CopyWindows();
        CopyWeights();
      }
      NextWeightTap();
      NextStages();
      NextPixelTap();
    }
  }
  __device__ __forceinline__ void CopyWindows() const {
    CopyUnderTap(to_pixels.stage, &maps.x, of_pixels, x, y, image, offset, to_weights.barrier);
    if constexpr (U::kCopiesLow) {
      CopyUnderTap(to_pixels.stage + task.pixel_bytes / 2, &maps.low, of_pixels, x, y, image, offset,
                   to_weights.barrier);
    }
  }
  __device__ __forceinline__ int PixelBytes() const {
    return U::kCopiesLow ? 2 * task.copied_bytes : task.copied_bytes;
  }
  // In a chain, where the kernel in front may still write them.
  __device__ __forceinline__ void WaitForPixels() const {
    if (IsElected()) FetchAhead(task.gate);
    if (task.gate.x_is_older) return;
    WaitForKernelBefore();
    LetNextKernelStart();
  }
  // Those of one step, by one lane.
  __device__ __forceinline__ void CopyWeights() const {
    if (task.whole_weights) {
      CopyBox(to_weights.stage, &maps.kernel, 0, channel, out_channel / U::kBox, tap, to_weights.barrier);
      return;
    }
#pragma unroll
    for (int box = 0; box < U::kOutChannels / U::kBox; ++box) {
      CopyBox(to_weights.stage + box * U::kBoxBytes, &maps.kernel, out_channel + box * U::kBox, channel, tap,
              to_weights.barrier);
    }
  }
  __device__ __forceinline__ void NextWeightTap() {
    if (++tap == end_tap) {
      tap -= task.taps;
      channel += U::kStepChannels;
    }
  }
  // Of both pipelines, where they have the weights' barriers.
  __device__ __forceinline__ void NextStages() {
    to_weights.Advance(U::kWeightBytes);
    to_pixels.stage += task.pixel_bytes;
    if (to_weights.barrier == to_weights.first_barrier) to_pixels.stage = to_pixels.first_stage;
  }
  __device__ __forceinline__ void NextPixelTap() {
    if (++column < task.kernel_width) {
      offset += task.dilation[1];
      return;
    }
    column = 0;
    offset = (offset & 0xffff0000u) + (static_cast<uint32_t>(task.dilation[0]) << 16);
    if (offset == task.end_offset) {  // behind the last row
      offset = 0;
      of_pixels += U::kStepChannels;
    }
  }
};
#endif

}  // namespace jsc

#endif  // JSC_CUDA_DENSE_CONV_WGMMA_COPIES_CUH_
