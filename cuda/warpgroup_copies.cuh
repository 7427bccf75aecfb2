// The warp that asks the copy engine for pixels and filters, and the rings of stages that they lie in.
//
// Layout: a stage of filters is boxes of 128 bytes of filters [channels, 128 bytes]; a stage of pixels is
// [pixel, 128 bytes of channels], of a patch of x with the pixels around it that windows reach, or of the pixels under
// one tap of consecutive results (im2col). 16-byte slots of a row are permuted by the row's address. Of products in
// parts a stage's second half is the same of small parts.
#ifndef JSC_CUDA_WARPGROUP_COPIES_CUH_
#define JSC_CUDA_WARPGROUP_COPIES_CUH_

#include "warpgroup_maps.h"
#include "warpgroup_task.cuh"

namespace jsc {

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

// Barriers of both rings. full: bytes have come; empty: all warps that multiply are done with a stage.
struct WarpgroupBarriers {
  uint64_t pixels_full[kMaxRing], pixels_empty[kMaxRing], filters_full[kMaxRing], filters_empty[kMaxRing];
};

// ready: the small parts of a stage's pixels have been made beside it.
struct PartsBarriers : WarpgroupBarriers {
  uint64_t pixels_ready[kMaxRing];
};

template <class U>
using BarriersOf = std::conditional_t<U::kSplits, PartsBarriers, WarpgroupBarriers>;
template <class U>
using MapsOf = std::conditional_t<U::kCopiesSmall, PartsMaps, WarpgroupMaps>;

#if __CUDA_ARCH__ >= 900
// By one thread. (By a lane each they would be made one after the other all the same, 1 us later.)
// readers: warps that multiply.
__device__ __forceinline__ void InitBarriers(WarpgroupBarriers& barriers, int readers) {
#pragma unroll
  for (int i = 0; i < kMaxRing; ++i) {
    InitBarrier(barriers.pixels_full + i);
    InitBarrier(barriers.filters_full + i);
    for (uint64_t* empty : {barriers.pixels_empty + i, barriers.filters_empty + i}) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(SharedAddress(empty)), "r"(readers));
    }
  }
  FenceBarriers();
}

__device__ __forceinline__ void InitBarriers(PartsBarriers& barriers, int readers) {
#pragma unroll
  for (int i = 0; i < kMaxRing; ++i) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(SharedAddress(barriers.pixels_ready + i)),
                 "r"(readers));
  }
  InitBarriers(static_cast<WarpgroupBarriers&>(barriers), readers);
}

__device__ __forceinline__ void Arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// The box of an im2col map's windows that begin at pixel (x, y) of an image, under the tap that lies (dx, dy) further.
__device__ __forceinline__ void CopyUnderTap(void* shared, const CUtensorMap* map, int channel, int x, int y, int image,
                                             int dx, int dy, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%2, %3, %4, %5}], [%6], {%7, %8};" ::"r"(SharedAddress(shared)),
      "l"(map), "r"(channel), "r"(x), "r"(y), "r"(image), "r"(SharedAddress(barrier)), "h"(static_cast<short>(dx)),
      "h"(static_cast<short>(dy))
      : "memory");
}

// One lane of a warp whose lanes are all there: the compiler then knows that what the lane uses is the same in all.
__device__ __forceinline__ bool IsElected() {
  uint32_t elected;
  asm volatile("{\n .reg .pred yes;\n elect.sync _|yes, 0xffffffff;\n selp.b32 %0, 1, 0, yes;\n}" : "=r"(elected));
  return elected != 0;
}

// Where a block's next copies go.
struct NextStages {
  RingPlace pixels, filters;
};

// All copies of a block's tile, by a warp. early: as many filters as there is room for are asked for before the kernel
// in front is done.
template <class U, typename T>
__device__ __forceinline__ void AskForStages(const WarpgroupTask<T>& task, const MapsOf<U>& maps,
                                             const WarpgroupPlace& at, unsigned char* pixels, unsigned char* filters,
                                             WarpgroupBarriers& barriers, NextStages& next, bool early) {
  const int stack = static_cast<int>(blockIdx.z), image = stack * task.images_per_stack + at.image;
  const int y = at.y * task.stride[0] - task.pad_low[0], x = at.x * task.stride[1] - task.pad_low[1];
  const Quotient start = Divide(at.first_step, task.by_taps);
  const int first_channel = Divide(at.feature, task.by_group_features).quotient * task.group_channels;  // the group's
  int channel = start.quotient * U::kDeep, tap = start.remainder;  // channel: of the group
  RingPlace &to_pixels = next.pixels, &to_filters = next.filters;
  const auto ask_for_filters = [&](int channel, int tap) {
    uint64_t* full = barriers.filters_full + to_filters.stage;
    WaitForBytes(barriers.filters_empty + to_filters.stage, to_filters.parity ^ 1);
    if (IsElected()) {
      ExpectBytes(full, U::kFilterBytes);
#pragma unroll
      for (int box = 0; box < U::kFilters / U::kBox; ++box) {
        CopyBox(filters + to_filters.stage * U::kFilterBytes + box * U::kBoxBytes, &maps.kernel,
                at.feature + box * U::kBox, channel, stack * task.taps + tap, full);
      }
    }
    to_filters.Advance(task.filter_stages);
  };
  int asked = at.first_step;  // steps before this one have their filters asked for
  if (early) {
    int early_channel = channel, early_tap = tap;
#pragma unroll 1
    for (; asked < min(at.first_step + task.filter_stages, at.end_step); ++asked) {
      ask_for_filters(early_channel, early_tap);
      if (++early_tap == task.taps) {
        early_tap = 0;
        early_channel += U::kDeep;
      }
    }
    if (IsElected()) FetchAhead(task.gate);
    if (!task.gate.x_is_older) {
      WaitForKernelBefore();
      LetNextKernelStart();
    }
  }
#pragma unroll 1
  for (int step = at.first_step; step < at.end_step; ++step) {
    if (!task.patch || tap == 0 || step == at.first_step) {
      uint64_t* full = barriers.pixels_full + to_pixels.stage;
      WaitForBytes(barriers.pixels_empty + to_pixels.stage, to_pixels.parity ^ 1);
      unsigned char* stage = pixels + to_pixels.stage * task.pixel_bytes;
      const Quotient place = Divide(tap, task.by_kernel_width);
      if (IsElected()) {
        const auto copy = [&](unsigned char* to, const CUtensorMap* map) {
          if (task.patch) {
            CopyBox(to, map, first_channel + channel, x, y, image, full);
          } else {
            CopyUnderTap(to, map, first_channel + channel, x, y, image, place.remainder * task.dilation[1],
                         place.quotient * task.dilation[0], full);
          }
        };
        ExpectBytes(full, U::kCopiesSmall ? 2 * task.copied_bytes : task.copied_bytes);
        copy(stage, &maps.x);
        if constexpr (U::kCopiesSmall) copy(stage + task.pixel_bytes / 2, &maps.small);
      }
      to_pixels.Advance(task.pixel_stages);
    }
    if (step >= asked) ask_for_filters(channel, tap);
    if (++tap == task.taps) {
      tap = 0;
      channel += U::kDeep;
    }
  }
}
#endif

}  // namespace jsc

#endif  // JSC_CUDA_WARPGROUP_COPIES_CUH_
