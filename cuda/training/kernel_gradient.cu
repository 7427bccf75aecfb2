// The gradient of a kernel at HIGHEST, by Hopper's warpgroup products.
//
// Computes out[tap][channel][output channel] = sum over results of x under the tap * cotangent, in 3xTF32
//   (docs/design/kernels/highest.md), float32 without groups.
// Layout: channels are the rows of a product, output channels its columns, and results what it sums over. TF32 products
//   take both operands along the sum, but NHWC has it across. So x goes to registers, from where a tap is a shift of
//   rows. The cotangent has no shifts: a third warpgroup turns each step's box of it, once for all taps.
// Why this tiling: three taps of a row meet the same x and cotangent, which are copied once for them. Two warpgroups
//   with 64 channels each, or with every other step, share the turned cotangent.
// Order of results in a product: what a thread reads of x lies in rows 2 apart (1 apart with stride 2), which the
//   swizzle keeps in banks of their own. The turned cotangent has the same order. Its rows are output channels 0, 4, 8,
//   ... then 1, 5, ...: so quads are turned without bank conflicts, and a thread has four neighbours of each result.
// Deterministic: each split of the steps has sums of its own, which a second kernel adds in order.
// Not finite: infinities, and values that round up to one, leave NaN; the second kernel computes those again.
// Bound by: tensor cores, at 75 to 95 % of what shared memory can bring.
#include "cuda/core/copies.cuh"
#include "cuda/core/elements.cuh"
#include "cuda/core/launch.cuh"
#include "cuda/core/low_parts.cuh"
#include "cuda/core/vectors.cuh"
#include "cuda/core/wgmma.cuh"
#include "cuda/training/kernel_gradient.h"

namespace jsc {
namespace {

constexpr int kWarpgroup = 128;
constexpr int kGroups = 2;  // that multiply; a third one copies and turns
constexpr int kThreads = (kGroups + 1) * kWarpgroup;
constexpr int kMultiplyingRegisters = 208, kTurningRegisters = 88;  // of a thread
constexpr int kBoxBytes = kGradientPixels * kGradientRowBytes;      // of the cotangent, 32 output channels
constexpr int kTurnedBytes = kGradientSide * kGradientRowBytes;     // of either part of the turned cotangent
constexpr int kAdders = 256;                                        // threads of a block that adds slots
constexpr int kManySlots = 8;                                       // from which on threads share them

struct KernelGradientTask {
  const float *x, *cotangent;
  float *slots, *out;  // the same where there is one slot
  int channels, out_channels, images, size[2], conv_size[2], kernel_size[2], stride[2], pad_low[2], dilation[2];
  int columns, rows, x_columns, x_pitch, x_boxes, stages, stage_bytes, column_step;
  int steps, splits, channel_blocks, out_channel_blocks, taps_across;  // the last: blocks of taps in a row
  int slot_count;
  bool by_taps, shares_channels;
  Divider by_kinds, by_channel_blocks, by_out_channel_blocks, by_taps_across, by_splits, by_column_boxes, by_rows,
      by_columns;
};

#if __CUDA_ARCH__ >= 900

struct Barriers {
  uint64_t full[kMostGradientStages], turned[kMostGradientStages], free[kMostGradientStages];
};

// What a block computes, and of which steps.
struct Place {
  int channel, out_channel, row, column, split;  // the first ones, and taps
  int first_step, end_step;
};

__device__ __forceinline__ Place FindPlace(const KernelGradientTask& task, int tiles) {
  const Quotient split = Divide(static_cast<int>(blockIdx.x), task.by_kinds);
  const Quotient out = Divide(split.remainder, task.by_out_channel_blocks);
  const Quotient channel = Divide(out.quotient, task.by_channel_blocks);
  const Quotient tap = Divide(channel.quotient, task.by_taps_across);
  Place at;
  at.channel = channel.remainder * task.x_boxes * kGradientBoxChannels;
  at.out_channel = out.remainder * kGradientSide;
  at.row = tap.quotient;
  at.column = tap.remainder * tiles;
  at.split = split.quotient;
  const int each = task.steps / task.splits, more = task.steps % task.splits;
  at.first_step = at.split * each + min(at.split, more);
  at.end_step = at.first_step + each + (at.split < more ? 1 : 0);
  return at;
}

// A stage of the pipeline: of x [box][row][column], of the cotangent [box][result], and its parts turned.
struct Stage {
  uint32_t x, cotangent, turned;
  __device__ __forceinline__ Stage(const KernelGradientTask& task, uint32_t stages, int index) {
    x = stages + index * task.stage_bytes;
    turned = x + task.stage_bytes - 2 * kTurnedBytes;
    cotangent = turned - kTurnedBytes;
  }
};

// Copies and turns, by the third warpgroup.
struct Producer {
  const KernelGradientTask& task;
  const KernelGradientMaps& maps;
  const Place& at;
  Barriers& barriers;
  uint32_t stages;
  StagePlace next{0, 1};  // to be copied; its barrier `free` passes at once in the first round

  // By one lane of each warp, which has every fourth box of channels.
  __device__ __forceinline__ void Copy(int step) {
    WaitForBytes(barriers.free + next.stage, next.parity);
    const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) % kWarpgroup / kWarp, 0);
    if (IsElected()) {
      const Stage stage(task, stages, next.stage);
      const uint32_t full = SharedAddress(barriers.full + next.stage);
      if (warp == 0) {
        ExpectBytes(full, task.rows * (task.x_boxes * task.x_columns + 2 * task.columns) * kGradientRowBytes);
      }
      const Quotient place = Divide(step, task.by_column_boxes);
      const int column = place.remainder * task.columns;
      const int x_column = column * task.column_step - task.pad_low[1] + at.column * task.dilation[1];
      const int x_row = at.row * task.dilation[0] - task.pad_low[0];
      const int box_bytes = task.rows * task.x_pitch * kGradientRowBytes;
#pragma unroll 1
      for (int row = 0; row < task.rows; ++row) {
        const Quotient in = Divide(place.quotient * task.rows + row, task.by_rows);  // which image, and its row
        uint32_t to = stage.x + row * task.x_pitch * kGradientRowBytes + warp * box_bytes;
        int box = warp;
#pragma unroll 1
        for (; box < task.x_boxes; box += kWarpgroup / kWarp, to += kWarpgroup / kWarp * box_bytes) {
          CopyBox(to, &maps.x, at.channel + box * kGradientBoxChannels, x_column, in.remainder * task.stride[0] + x_row,
                  in.quotient, full);
        }
        box -= task.x_boxes;
        if (box < 2) {
          CopyBox(stage.cotangent + box * kBoxBytes + row * task.columns * kGradientRowBytes, &maps.cotangent,
                  at.out_channel + box * kGradientBoxChannels, column, in.remainder, in.quotient, full);
        }
      }
    }
    __syncwarp();
    next.Advance(task.stages);
  }

  // A thread turns four results of four output channels.
  __device__ __forceinline__ void Turn(const Stage& stage) const {
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroup, quad = thread % 8, slot = thread / 8 % 8;
    const int box = thread / 64, half = slot % 2, apart = task.column_step == 2 ? 1 : 2;
    const int first = slot / 2 * 8 + (apart == 2 ? half : 4 * half), count = task.rows * task.columns;
    float4 v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int result = first + i * apart;
      v[i] = {0.f, 0.f, 0.f, 0.f};
      if (result < count) {
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(v[i].x), "=f"(v[i].y), "=f"(v[i].z), "=f"(v[i].w)
                     : "r"(stage.cotangent + box * kBoxBytes + result * kGradientRowBytes + quad * 16)
                     : "memory");
      }
    }
    const float4 turned[4] = {{v[0].x, v[1].x, v[2].x, v[3].x},
                              {v[0].y, v[1].y, v[2].y, v[3].y},
                              {v[0].z, v[1].z, v[2].z, v[3].z},
                              {v[0].w, v[1].w, v[2].w, v[3].w}};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t to =
          stage.turned + (box * kGradientBoxChannels + i * 8 + quad) * kGradientRowBytes + ((slot ^ quad) << 4);
      StoreShared(to, turned[i], true);
      StoreShared(to + kTurnedBytes, LowPart(turned[i]), true);
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
      Turn(Stage(task, stages, now.stage));
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      __syncwarp();
      if (threadIdx.x % kWarp == 0) Arrive(SharedAddress(barriers.turned + now.stage));
      now.Advance(task.stages);
    }
  }

  static __device__ __forceinline__ void Arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
  }
};

// Two slices of 8 results of x, in high and low parts: a thread's part of 64 channels.
struct Slices {
  uint32_t high[2][4], low[2][4];

  // rows: from `base` to the rows of the thread's results of both slices; swizzled: what the swizzle makes of its
  // channels
  __device__ __forceinline__ void Load(uint32_t base, const int (&rows)[8], int first, int shift, int channels) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = rows[(first + k) * 2 + half] + shift;
        asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
                     : "=r"(high[k][2 * half]), "=r"(high[k][2 * half + 1])
                     : "r"(base + row + ((row >> 3 & 0x70) ^ channels))
                     : "memory");
      }
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float value = __uint_as_float(high[k][i]);
        high[k][i] += 0x1000u;  // half of what is dropped
        low[k][i] = __float_as_uint(value - __uint_as_float(high[k][i] & 0xffffe000u));
      }
    }
  }

  // sums (+)= x * cotangent, the low products first
  __device__ __forceinline__ void Multiply(float (&sums)[kGradientSide / 2], uint64_t turned, bool add) const {
    using Products = Wgmma<float, kGradientSide>;
    constexpr uint64_t kLow = kTurnedBytes >> 4;
    BeginProducts();
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      Products::Multiply(sums, low[k], turned + k * 2, add || k > 0);
      Products::Multiply(sums, high[k], turned + kLow + k * 2, true);
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) Products::Multiply(sums, high[k], turned + k * 2, true);
    CommitProducts();
  }
};

// Multiplies, and writes a slot's sums, by one of the first two warpgroups.
template <int kTiles>
struct Consumer {
  const KernelGradientTask& task;
  const Place& at;
  Barriers& barriers;
  uint32_t stages;
  int group;
  StagePlace now;
  int rows[8], channels, box_bytes, tile_shift, tile_bytes;
  uint32_t first_box;
  float sums[kTiles][kGradientSide / 2] = {};

  __device__ __forceinline__ Consumer(const KernelGradientTask& task, const Place& at, Barriers& barriers,
                                      uint32_t stages)
      : task(task), at(at), barriers(barriers), stages(stages) {
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroup, lane = thread % kWarp, warp = thread / kWarp;
    group = static_cast<int>(threadIdx.x) / kWarpgroup;
    const int count = task.rows * task.columns;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int half = i % 2, quarter = lane % 4;
      const int result = i / 2 * 8 + (task.column_step == 2 ? quarter + 4 * half : 2 * quarter + half);
      const Quotient place = Divide(min(result, count - 1), task.by_columns);  // x where the cotangent has zeros
      rows[i] = (place.quotient * task.x_pitch + place.remainder * task.column_step) * kGradientRowBytes;
    }
    channels = (warp % 2 * 4 + lane / 8) << 4;
    box_bytes = task.rows * task.x_pitch * kGradientRowBytes;
    tile_shift = task.by_taps ? task.dilation[1] * kGradientRowBytes : 0;
    tile_bytes = task.by_taps ? 0 : 2 * box_bytes;
    const int group_boxes = task.shares_channels ? 0 : group * 2 * (task.by_taps ? 1 : kTiles);
    first_box = (group_boxes + warp / 2) * box_bytes + lane / 4 % 2 * 8;
  }

  __device__ __forceinline__ void Wait() const {
    WaitForBytes(barriers.full + now.stage, now.parity);
    WaitForBytes(barriers.turned + now.stage, now.parity);
  }
  __device__ __forceinline__ void Load(Slices& slices, int first, int tile) const {
    const Stage stage(task, stages, now.stage);
    slices.Load(stage.x + first_box + tile * tile_bytes, rows, first, tile * tile_shift, channels);
  }

  __device__ __forceinline__ void Run() {
    const int step_by = task.shares_channels ? 2 : 1;
    int step = at.first_step + (task.shares_channels ? group : 0);
    if (task.shares_channels && group == 1) now.Advance(task.stages);
    if (step < at.end_step) {
      Slices first, second;
      float partial[kGradientSide / 2];
      Wait();
      Load(first, 0, 0);
#pragma unroll 1
      while (step < at.end_step) {
        const uint64_t turned = SwizzledMatrix(Stage(task, stages, now.stage).turned, 8 * kGradientRowBytes);
        const uint32_t free = SharedAddress(barriers.free + now.stage);
        step += step_by;
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          first.Multiply(partial, turned, false);
          Load(second, 2, tile);
          second.Multiply(partial, turned + 4, true);
          if (tile == kTiles - 1) {
            for (int i = 0; i < step_by; ++i) now.Advance(task.stages);
            if (step < at.end_step) Wait();
          }
          WaitForProducts<1>();
          Load(first, 0, (tile + 1) % kTiles);  // after the last step of anything
          WaitForProducts<0>();
          if (tile == kTiles - 1 && threadIdx.x % kWarp == 0) Producer::Arrive(free);
          PinSums(partial);
#pragma unroll
          for (int i = 0; i < kGradientSide / 2; ++i) sums[tile][i] += partial[i];
        }
      }
    }
    Write();
  }

  // From a thread's sums to its slot, four output channels at a time.
  __device__ __forceinline__ void Write() const {
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroup, lane = thread % kWarp, warp = thread / kWarp;
    const int slot = task.shares_channels ? at.split * 2 + group : at.split;
    const int of_group = task.shares_channels ? 0 : group * (task.by_taps ? 1 : kTiles);
    const int taps = task.kernel_size[0] * task.kernel_size[1];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const int column = at.column + (task.by_taps ? tile : 0);
      const int tile_channel = at.channel + (of_group + (task.by_taps ? 0 : tile)) * kGradientSide;
      if (column >= task.kernel_size[1]) continue;
      const int64_t tap = int64_t{slot} * taps + at.row * task.kernel_size[1] + column;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int channel = tile_channel + 16 * warp + lane / 4 * 2 + half;
        if (channel >= task.channels) continue;
        float* to = task.slots + (tap * task.channels + channel) * task.out_channels;
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

template <int kTiles>
__global__ void __launch_bounds__(kThreads, 1) KernelGradientKernel(const __grid_constant__ KernelGradientTask task,
                                                                    const __grid_constant__ KernelGradientMaps maps) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ unsigned char shared[];
  __shared__ Barriers barriers;
  constexpr uint32_t kSwizzleRepeats = 1024;
  const uint32_t stages = (SharedAddress(shared) + kSwizzleRepeats - 1) & ~(kSwizzleRepeats - 1);
  if (threadIdx.x == 0) {
    const int readers = kWarpgroup / kWarp * (task.shares_channels ? 1 : kGroups);
    for (int i = 0; i < kMostGradientStages; ++i) {
      InitBarrier(barriers.full + i);
      InitBarrier(barriers.turned + i, kWarpgroup / kWarp);
      InitBarrier(barriers.free + i, readers);
    }
    FenceBarriers();
    PrefetchMap(maps.x);
    PrefetchMap(maps.cotangent);
  }
  __syncthreads();
  const Place at = FindPlace(task, task.by_taps ? kTiles : 1);
  if (threadIdx.x >= kGroups * kWarpgroup) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kTurningRegisters));
    Producer{task, maps, at, barriers, stages}.Run();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kMultiplyingRegisters));
    Consumer<kTiles>(task, at, barriers, stages).Run();
  }
#endif
}

// Four results again, in float64, from memory.
__device__ __noinline__ float4 SumAgain(const KernelGradientTask& task, int tap, int channel, int out_channel) {
  const int row = tap / task.kernel_size[1] * task.dilation[0] - task.pad_low[0];
  const int column = tap % task.kernel_size[1] * task.dilation[1] - task.pad_low[1];
  double sum[4] = {};
#pragma unroll 1
  for (int image = 0; image < task.images; ++image) {
    if (isnan(sum[0]) && isnan(sum[1]) && isnan(sum[2]) && isnan(sum[3])) break;  // as they stay
#pragma unroll 1
    for (int y = 0; y < task.conv_size[0]; ++y) {
      const int in_y = y * task.stride[0] + row;
      if (in_y < 0 || in_y >= task.size[0]) continue;
#pragma unroll 1
      for (int x = 0; x < task.conv_size[1]; ++x) {
        const int in_x = x * task.stride[1] + column;
        if (in_x < 0 || in_x >= task.size[1]) continue;
        const double value =
            task.x[((int64_t{image} * task.size[0] + in_y) * task.size[1] + in_x) * task.channels + channel];
        const float4 by = *reinterpret_cast<const float4*>(
            task.cotangent + ((int64_t{image} * task.conv_size[0] + y) * task.conv_size[1] + x) * task.out_channels +
            out_channel);
        sum[0] += value * by.x, sum[1] += value * by.y, sum[2] += value * by.z, sum[3] += value * by.w;
      }
    }
  }
  return {static_cast<float>(sum[0]), static_cast<float>(sum[1]), static_cast<float>(sum[2]),
          static_cast<float>(sum[3])};
}

// out = the sum of all slots. A thread has four results; kReducers of them share their slots.
template <int kReducers>
__global__ void __launch_bounds__(kAdders) AddSlotsKernel(const __grid_constant__ KernelGradientTask task) {
  constexpr int kQuads = kAdders / kReducers;
  __shared__ float4 parts[kReducers][kQuads];
  const int64_t quads = int64_t{task.kernel_size[0]} * task.kernel_size[1] * task.channels * task.out_channels / 4;
  const int64_t quad = int64_t{blockIdx.x} * kQuads + threadIdx.x;
  float4 sum = {0.f, 0.f, 0.f, 0.f};
  if (quad < quads) {
    const auto* from = reinterpret_cast<const float4*>(task.slots) + quad;
#pragma unroll 4
    for (int slot = static_cast<int>(threadIdx.y); slot < task.slot_count; slot += kReducers) {
      sum = sum + from[slot * quads];
    }
  }
  if constexpr (kReducers > 1) {
    parts[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y > 0) return;
#pragma unroll
    for (int i = 1; i < kReducers; ++i) sum = sum + parts[i][threadIdx.x];
  }
  if (quad >= quads) return;
  if (!IsFinite(sum)) {
    const int width = task.out_channels / 4, rest = static_cast<int>(quad / width);
    sum = SumAgain(task, rest / task.channels, rest % task.channels, static_cast<int>(quad % width) * 4);
  }
  reinterpret_cast<float4*>(task.out)[quad] = sum;
}

KernelGradientTask MakeTask(const ConvArgs& a, const KernelGradientPlan& plan, const KernelGradientBuffers& buffers) {
  KernelGradientTask t;
  t.x = buffers.x;
  t.cotangent = buffers.cotangent;
  t.out = buffers.out;
  t.slots = plan.slots() > 1 ? static_cast<float*>(buffers.workspace) : buffers.out;
  t.channels = static_cast<int>(a.channels);
  t.out_channels = static_cast<int>(a.out_channels);
  t.images = static_cast<int>(a.images);
  for (int i = 0; i < 2; ++i) {
    t.size[i] = static_cast<int>(a.size[i]);
    t.conv_size[i] = static_cast<int>(a.conv_size[i]);
    t.kernel_size[i] = static_cast<int>(a.kernel_size[i]);
    t.stride[i] = static_cast<int>(a.stride[i]);
    t.pad_low[i] = static_cast<int>(a.pad_low[i]);
    t.dilation[i] = static_cast<int>(a.dilation[i]);
  }
  t.columns = plan.columns;
  t.rows = plan.rows;
  t.x_columns = plan.x_columns;
  t.x_pitch = plan.x_pitch;
  t.x_boxes = plan.x_boxes;
  t.stages = plan.stages;
  t.stage_bytes = plan.stage_bytes;
  t.column_step = a.kernel_size[1] == 1 ? 1 : static_cast<int>(a.stride[1]);
  t.steps = static_cast<int>(plan.steps);
  t.splits = plan.splits;
  t.channel_blocks = plan.channel_blocks;
  t.out_channel_blocks = plan.out_channel_blocks;
  t.taps_across = plan.tap_blocks / t.kernel_size[0];
  t.slot_count = static_cast<int>(plan.slots());
  t.by_taps = plan.by_taps;
  t.shares_channels = plan.shares_channels;
  t.by_kinds = Divider(int64_t{plan.channel_blocks} * plan.out_channel_blocks * plan.tap_blocks);
  t.by_channel_blocks = Divider(plan.channel_blocks);
  t.by_out_channel_blocks = Divider(plan.out_channel_blocks);
  t.by_taps_across = Divider(t.taps_across);
  t.by_column_boxes = Divider(DivideUp(a.conv_size[1], plan.columns));
  t.by_rows = Divider(a.conv_size[0]);
  t.by_columns = Divider(plan.columns);
  return t;
}

template <int kTiles>
Error LaunchTiles(const KernelGradientTask& task, const KernelGradientMaps& maps, int64_t blocks, int shared,
                  cudaStream_t stream) {
  if (Error error = Prepare<KernelGradientKernel<kTiles>>("the gradient of a kernel"); error.failure()) return error;
  cudaFuncAttributes code{};  // warpgroups take registers from each other, so there must be so many
  if (const cudaError_t status = cudaFuncGetAttributes(&code, KernelGradientKernel<kTiles>)) {
    return CheckCuda(status, "the gradient of a kernel");
  }
  if (code.numRegs * (kGroups + 1) < kMultiplyingRegisters * kGroups + kTurningRegisters) {
    return Error(ErrorCode::kInternal, "the gradient of a kernel was compiled with too few registers");
  }
  KernelGradientKernel<kTiles><<<static_cast<unsigned>(blocks), kThreads, shared, stream>>>(task, maps);
  return CheckCuda(cudaGetLastError(), "the gradient of a kernel");
}

}  // namespace

Error LaunchKernelGradient(const ConvArgs& a, const KernelGradientPlan& plan, const KernelGradientBuffers& buffers,
                           const KernelGradientMaps& maps, cudaStream_t stream) {
  const KernelGradientTask task = MakeTask(a, plan, buffers);
  const int64_t blocks = int64_t{plan.channel_blocks} * plan.out_channel_blocks * plan.tap_blocks * plan.splits;
  const auto launch = plan.tiles == 1 ? LaunchTiles<1> : plan.tiles == 2 ? LaunchTiles<2> : LaunchTiles<3>;
  const int shared = plan.stages * plan.stage_bytes + 1024;
  if (Error error = launch(task, maps, blocks, shared, stream); error.failure()) return error;
  const int64_t quads = a.kernel_size[0] * a.kernel_size[1] * a.channels * a.out_channels / 4;
  constexpr int kSharers = 8;
  if (task.slot_count > kManySlots) {
    const dim3 block(kAdders / kSharers, kSharers);
    AddSlotsKernel<kSharers><<<static_cast<unsigned>(DivideUp(quads, block.x)), block, 0, stream>>>(task);
  } else {
    AddSlotsKernel<1><<<static_cast<unsigned>(DivideUp(quads, kAdders)), kAdders, 0, stream>>>(task);
  }
  return CheckCuda(cudaGetLastError(), "the sums of a kernel's gradient");
}

}  // namespace jsc
