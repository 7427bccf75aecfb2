// The warpgroups of the gradient of a kernel that multiply (training/kernel_gradient.cu).
#ifndef JSC_CUDA_TRAINING_KERNEL_GRADIENT_PRODUCTS_CUH_
#define JSC_CUDA_TRAINING_KERNEL_GRADIENT_PRODUCTS_CUH_

#include "cuda/core/tf32x3.cuh"
#include "cuda/training/kernel_gradient_task.cuh"

namespace jsc {

#if __CUDA_ARCH__ >= 900
// Two slices of 8 results of x: a thread's part of 64 channels.
struct XSlices : HighLowSlices {
  // rows: from `base` to the rows of the thread's results, of all four slices; shift: of a tap; channels: what the
  // thread's channels are of a row's slots, before the swizzle.
  __device__ __forceinline__ void Load(uint32_t base, const int (&rows)[8], int first, int shift, int channels) {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = rows[(first + k) * 2 + half] + shift;
        asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
                     : "=r"(high[k][2 * half]), "=r"(high[k][2 * half + 1])
                     : "r"(base + row + ((row >> 3 & 0x70) ^ channels))
                     : "memory");
      }
    }
    Split();
  }
};

// Multiplies, and writes partial sums, by one of the first two warpgroups.
template <int kTiles>
struct KernelGradientConsumer {
  const KernelGradientTask& task;
  const KernelGradientPlace& at;
  KernelGradientBarriers& barriers;
  uint32_t stages;
  int group;
  StagePlace now;
  int rows[8], channels, box_bytes, tile_shift, tile_bytes;
  uint32_t first_box;
  float sums[kTiles][kGradientSide / 2] = {};

  __device__ __forceinline__ KernelGradientConsumer(const KernelGradientTask& task, const KernelGradientPlace& at,
                                                    KernelGradientBarriers& barriers, uint32_t stages)
      : task(task), at(at), barriers(barriers), stages(stages) {
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroup, lane = thread % kWarp, warp = thread / kWarp;
    group = static_cast<int>(threadIdx.x) / kWarpgroup;
    const int count = task.rows * task.columns;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int half = i % 2, quarter = lane % 4;
      const int result = i / 2 * 8 + (task.column_step == 2 ? quarter + 4 * half : 2 * quarter + half);
      const Quotient place = Divide(min(result, count - 1), task.by_columns);  // x where the cotangent has zeros
      rows[i] = (place.quotient * task.x_pitch + place.remainder * task.column_step) * kRowBytes;
    }
    channels = (warp % 2 * 4 + lane / 8) << 4;
    box_bytes = task.rows * task.x_pitch * kRowBytes;
    tile_shift = task.by_taps ? task.dilation[1] * kRowBytes : 0;
    tile_bytes = task.by_taps ? 0 : 2 * box_bytes;
    const int group_boxes = task.shares_channels ? 0 : group * 2 * (task.by_taps ? 1 : kTiles);
    first_box = (group_boxes + warp / 2) * box_bytes + lane / 4 % 2 * 8;
  }

  __device__ __forceinline__ void Wait() const {
    WaitForBytes(barriers.full + now.stage, now.parity);
    WaitForBytes(barriers.transposed + now.stage, now.parity);
  }
  __device__ __forceinline__ void Load(XSlices& slices, int first, int tile) const {
    const KernelGradientStage stage(task, stages, now.stage);
    slices.Load(stage.x + first_box + tile * tile_bytes, rows, first, tile * tile_shift, channels);
  }

  __device__ __forceinline__ void Run() {
    const int step_by = task.shares_channels ? 2 : 1;
    int step = at.first_step + (task.shares_channels ? group : 0);
    if (task.shares_channels && group == 1) now.Advance(task.stages);
    if (step < at.end_step) {
      constexpr uint64_t kLow = kTransposedBytes >> 4;
      XSlices first, second;
      float step_sums[kGradientSide / 2];
      Wait();
      Load(first, 0, 0);
#pragma unroll 1
      while (step < at.end_step) {
        const uint64_t transposed =
            SwizzledMatrix(KernelGradientStage(task, stages, now.stage).transposed, 8 * kRowBytes);
        const uint32_t free = SharedAddress(barriers.free + now.stage);
        step += step_by;
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          first.Multiply(step_sums, transposed, kLow, false);
          Load(second, 2, tile);
          second.Multiply(step_sums, transposed + 4, kLow, true);
          if (tile == kTiles - 1) {
            for (int i = 0; i < step_by; ++i) now.Advance(task.stages);
            if (step < at.end_step) Wait();
          }
          WaitForProducts<1>();
          Load(first, 0, (tile + 1) % kTiles);  // after the last step of anything
          WaitForProducts<0>();
          if (tile == kTiles - 1 && threadIdx.x % kWarp == 0) Arrive(free);
          AddPartial(sums[tile], step_sums);
        }
      }
    }
    Write();
  }

  // From a thread's sums to memory, four output channels at a time.
  __device__ __forceinline__ void Write() const {
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroup, lane = thread % kWarp, warp = thread / kWarp;
    const int partial = task.shares_channels ? at.split * 2 + group : at.split;
    const int of_group = task.shares_channels ? 0 : group * (task.by_taps ? 1 : kTiles);
    const int taps = task.kernel_size[0] * task.kernel_size[1];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const int column = at.column + (task.by_taps ? tile : 0);
      const int tile_channel = at.channel + (of_group + (task.by_taps ? 0 : tile)) * kGradientSide;
      if (column >= task.kernel_size[1]) continue;
      const int64_t tap = int64_t{partial} * taps + at.row * task.kernel_size[1] + column;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int channel = tile_channel + 16 * warp + lane / 4 * 2 + half;
        if (channel >= task.channels) continue;
        float* to = task.partials + (tap * task.channels + channel) * task.out_channels;
#pragma unroll
        for (int box = 0; box < 2; ++box) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int out_channel = at.out_channel + box * kGradientBoxChannels + lane % 4 * 8 + i * 4;
            if (out_channel >= task.out_channels) continue;
            const int from = 16 * box + 2 * half + i;
            *reinterpret_cast<float4*>(to + out_channel) = {sums[tile][from], sums[tile][from + 4],
                                                            sums[tile][from + 8], sums[tile][from + 12]};
          }
        }
      }
    }
  }
};
#endif

}  // namespace jsc

#endif  // JSC_CUDA_TRAINING_KERNEL_GRADIENT_PRODUCTS_CUH_
