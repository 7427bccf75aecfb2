// The third warpgroup of the gradient of a kernel (training/kernel_gradient.cu): it issues TMA copies, and transposes
// the cotangent of each step.
#ifndef JSC_CUDA_TRAINING_KERNEL_GRADIENT_COPIES_CUH_
#define JSC_CUDA_TRAINING_KERNEL_GRADIENT_COPIES_CUH_

#include "cuda/core/low_parts.cuh"
#include "cuda/training/kernel_gradient_task.cuh"

namespace jsc {

#if __CUDA_ARCH__ >= 900
// Copies and transposes, by the third warpgroup.
struct KernelGradientProducer {
  const KernelGradientTask& task;
  const KernelGradientMaps& maps;
  const KernelGradientPlace& at;
  KernelGradientBarriers& barriers;
  uint32_t stages;
  StagePlace next{0, 1};  // to be copied; its barrier `free` passes at once in the first round

  // By one lane of each warp, which has every fourth box of channels.
  __device__ __forceinline__ void Copy(int step) {
    WaitForBytes(barriers.free + next.stage, next.parity);
    const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) % kWarpgroup / kWarp, 0);
    if (IsElected()) {
      const KernelGradientStage stage(task, stages, next.stage);
      const uint32_t full = SharedAddress(barriers.full + next.stage);
      if (warp == 0) {
        ExpectBytes(full, task.rows * (task.x_boxes * task.x_columns + 2 * task.columns) * kRowBytes);
      }
      const Quotient place = Divide(step, task.by_column_boxes);
      const int column = place.remainder * task.columns;
      const int x_column = column * task.column_step - task.pad_low[1] + at.column * task.dilation[1];
      const int x_row = at.row * task.dilation[0] - task.pad_low[0];
      const int box_bytes = task.rows * task.x_pitch * kRowBytes;
#pragma unroll 1
      for (int row = 0; row < task.rows; ++row) {
        const Quotient in = Divide(place.quotient * task.rows + row, task.by_rows);  // which image, and its row
        uint32_t to = stage.x + row * task.x_pitch * kRowBytes + warp * box_bytes;
        int box = warp;
#pragma unroll 1
        for (; box < task.x_boxes; box += kWarpgroup / kWarp, to += kWarpgroup / kWarp * box_bytes) {
          CopyBox(to, &maps.x, at.channel + box * kGradientBoxChannels, x_column, in.remainder * task.stride[0] + x_row,
                  in.quotient, full);
        }
        box -= task.x_boxes;
        if (box < 2) {
          CopyBox(stage.cotangent + box * kCotangentBoxBytes + row * task.columns * kRowBytes, &maps.cotangent,
                  at.out_channel + box * kGradientBoxChannels, column, in.remainder, in.quotient, full);
        }
      }
    }
    __syncwarp();
    next.Advance(task.stages);
  }

  // A thread transposes four results of four output channels.
  __device__ __forceinline__ void Transpose(const KernelGradientStage& stage) const {
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroup, quad = thread % 8, slot = thread / 8 % 8;
    const int box = thread / 64, half = slot % 2, apart = task.column_step == 2 ? 1 : 2;
    const int first = slot / 2 * 8 + (apart == 2 ? half : 4 * half), count = task.rows * task.columns;
    float4 v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int result = first + i * apart;
      v[i] = {0.f, 0.f, 0.f, 0.f};
      if (result < count) {
        v[i] = LoadShared(stage.cotangent + box * kCotangentBoxBytes + result * kRowBytes + quad * 16);
      }
    }
    const float4 transposed[4] = {{v[0].x, v[1].x, v[2].x, v[3].x},
                                  {v[0].y, v[1].y, v[2].y, v[3].y},
                                  {v[0].z, v[1].z, v[2].z, v[3].z},
                                  {v[0].w, v[1].w, v[2].w, v[3].w}};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t to =
          stage.transposed + (box * kGradientBoxChannels + i * 8 + quad) * kRowBytes + ((slot ^ quad) << 4);
      StoreShared(to, transposed[i], true);
      StoreShared(to + kTransposedBytes, LowPart(transposed[i]), true);
    }
  }

  __device__ __forceinline__ void Run() {
    // A warpgroup frees a step's stage when it has the next of its steps.
    const int ahead = task.stages - (task.shares_channels ? 3 : 2);
    for (int step = at.first_step; step < min(at.first_step + ahead, at.end_step); ++step) Copy(step);
    StagePlace now;
    for (int step = at.first_step; step < at.end_step; ++step) {
      if (step + ahead < at.end_step) Copy(step + ahead);
      WaitForBytes(barriers.full + now.stage, now.parity);
      Transpose(KernelGradientStage(task, stages, now.stage));
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      __syncwarp();
      if (threadIdx.x % kWarp == 0) Arrive(SharedAddress(barriers.transposed + now.stage));
      now.Advance(task.stages);
    }
  }
};
#endif

}  // namespace jsc

#endif  // JSC_CUDA_TRAINING_KERNEL_GRADIENT_COPIES_CUH_
