// Engine splitk_channels: the blocks of a cluster, and the warps of a block, split the channels of a small tile
// (split-K); float32. Details: docs/design/kernels/splitk_channels.md.
//
// Computes out[pixel][output channel] = relu(sum over taps and channels of x * kernel + bias + residual).
// Layout: a tile is 16 or 32 output channels by up to 56 pixels. A slice is 32 bytes of channels, what a tensor core
//   takes at once. A warp has some of a block's slices under all taps, so every warp has partial sums of the whole
//   tile. They are added in the order of the warps, then sent to a DSMEM slot of the block that owns the results. That
//   block adds them in the order of the blocks, those beyond the eighth apart: bitwise repeatable.
// Why: tiles of 64 and more output channels give small maps to few SMs. small_map has blocks enough, but each of its
//   threads finds addresses for what it copies, and pixels come once for each tap. Here one TMA copy brings the pixels
//   and one each row of taps. All that a block multiplies stays in shared memory: no pipeline.
// Bound by, of 4,000 to 9,000 cycles: starting a block and issuing copies (some 1,000), their way from L2 (700), 150 to
//   300 a step of a warp that is alone on its scheduler, and sums on their way to their block (1,200).
// Lost: 12 warps with a row of taps each; sums of each warp sent as they are (0.2 to 0.5 us slower, four times the
//   traffic); steps found in a table, or without branches, or two of them with operands of their own; pixels in rows of
//   128 bytes or of no common banks; tensor maps prefetched; tiles of 16 x 56, and of 32 x 56 with eight warps.
// Tests: tests/cuda/test_splitk_channels.py.
#ifndef JSC_CUDA_DENSE_CONV_SPLITK_CHANNELS_KERNEL_CUH_
#define JSC_CUDA_DENSE_CONV_SPLITK_CHANNELS_KERNEL_CUH_

#include "cuda/core/cluster_sums.cuh"
#include "cuda/core/epilogue.cuh"
#include "cuda/dense_conv/mma/small_map.cuh"
#include "cuda/dense_conv/splitk_channels/engine.cuh"
#include "cuda/dense_conv/splitk_channels/launch.h"

namespace jsc {

// Places and sizes in shared memory are in bytes.
template <typename T>
struct SplitKChannelsTask {
  // What copies are issued by, in the first lines of the parameters.
  Divider by_out_channel_tiles, by_tiles_across, by_tiles_down, by_images;
  int stride_y, stride_x, first_y, first_x;  // pixels of x from result to result, and where the first's begin
  int splits, slices_of_block, slices_of_group, group_out_channels;
  int row_bytes, pixel_bytes, pixels_at;  // of a block: weights of a row of taps, pixels, and where those are
  SplitKChannelsSteps steps;
  bool has_gate;
  // What products and results are found by.
  int wide, high, out_wide, out_high;  // of a tile, and of the convolution
  int pixel_down, pixel_across;        // from a result's pixel to the next
  int sums_at, slots_at;               // a warp's partial sums are [unit, lane], a unit's slots [block, lane]
  Divider by_tile_wide, by_splits;
  SmallMapTask<T> small_map;
};

struct SplitKChannelsPlace {
  int stack, image, image_of_all;  // image: of the stack
  int y, x;                        // first result
  int group, out_channel;          // first of the tile, in its group
};

// The results of a unit: of a lane one pixel and kVector weights, all of them or none (the plan sees to it).
template <class U, typename T>
struct SplitKChannelsWriter {
  using Vector = typename U::Vector;
  const SplitKChannelsTask<T>& slice;
  const SplitKChannelsPlace at;
  int pixel, tile_out_channel;  // of the stack, and of the tile
  bool valid;
  int64_t element;
  Vector bias = {}, residual = {};
  Tally tally;

  __device__ __forceinline__ SplitKChannelsWriter(const SplitKChannelsTask<T>& slice, const SplitKChannelsPlace& at)
      : slice(slice), at(at) {
    tile_out_channel = static_cast<int>(threadIdx.x % kWarp / 4) * U::kVector;
  }
  // Bias and residual are asked for here.
  __device__ __forceinline__ void Find(int unit) {
    const MmaTask<T>& task = slice.small_map.mma;
    const Quotient place = Divide(unit / 2 * 8 + threadIdx.x % 4 * 2 + unit % 2, slice.by_tile_wide);
    const int y = at.y + place.quotient, x = at.x + place.remainder;
    const int in_group = at.out_channel + tile_out_channel, out_channel = at.group * task.group_out_channels + in_group;
    valid =
        place.quotient < slice.high && y < slice.out_high && x < slice.out_wide && in_group < task.group_out_channels;
    pixel = (at.image * slice.out_high + y) * slice.out_wide + x;
    element = (static_cast<int64_t>(at.stack) * task.pixels + pixel) * task.out_channels + out_channel;
    if (!valid) return;
    if (task.bias)
      bias = *reinterpret_cast<const Vector*>(task.bias + static_cast<int64_t>(at.stack) * task.out_channels +
                                              out_channel);
    if (task.residual) residual = *reinterpret_cast<const Vector*>(task.residual + element);
  }
  __device__ __forceinline__ void Write(Vector sum) {
    if (!valid) return;
    const MmaTask<T>& task = slice.small_map.mma;
    if constexpr (U::kTf32x3) {
      if (!IsFinite(sum)) {
        const float4 again =
            SumAgain(slice.small_map, {0, 0, at.group, at.stack, 0, 0, 0}, pixel, at.out_channel + tile_out_channel);
        sum = reinterpret_cast<const Vector&>(again);
      }
    }
    sum = Finish(sum, bias + residual, task.relu);
    *reinterpret_cast<Vector*>(task.out + element) = sum;
    if (task.counts.rows) tally.Add<T>(sum, U::kVector);
  }
};

// A block's tile. A cluster is all blocks along x.
template <class U, typename T>
__device__ __forceinline__ SplitKChannelsPlace FindSplitKChannelsPlace(const SplitKChannelsTask<T>& slice) {
  const Quotient out_channel = Divide(blockIdx.y, slice.by_out_channel_tiles);
  const Quotient across = Divide(blockIdx.z, slice.by_tiles_across);
  const Quotient down = Divide(across.quotient, slice.by_tiles_down);
  const Quotient image = Divide(down.quotient, slice.by_images);
  return {image.quotient,
          image.remainder,
          down.quotient,
          down.remainder * slice.high,
          across.remainder * slice.wide,
          out_channel.quotient,
          out_channel.remainder * U::kOutChannels};
}

#if __CUDA_ARCH__ >= 900
// By one lane of a warp: its share of a block's copies, one of the pixels and one of each row of taps. A copy and its
// barrier are one lane's. shared, full: addresses of what is copied, weights first, and of the barriers
template <class U, typename T>
__device__ __forceinline__ void AskForOperands(const SplitKChannelsTask<T>& slice, const SplitKChannelsMaps& maps,
                                               const SplitKChannelsPlace& at, int warp, uint32_t shared,
                                               uint32_t full) {
  const int rows = slice.steps.kernel_rows, first = static_cast<int>(blockIdx.x) * slice.slices_of_block;
#pragma unroll 1
  for (int copy = warp; copy <= rows; copy += U::kWarps) {
    const uint32_t barrier = full + copy * 8;
    InitBarrier(barrier);
    FenceBarriers();
    if (copy == 0) {
      ExpectBytes(barrier, slice.pixel_bytes);
      CopyBox(shared + slice.pixels_at, &maps.x, 0, at.x * slice.stride_x + slice.first_x,
              at.y * slice.stride_y + slice.first_y, at.image_of_all, at.group * slice.slices_of_group + first,
              barrier);
    } else {
      ExpectBytes(barrier, slice.row_bytes);
      CopyBox(shared + (copy - 1) * slice.row_bytes, &maps.kernel, at.group * slice.group_out_channels + at.out_channel,
              first * U::kChannels, (at.stack * rows + copy - 1) * slice.steps.kernel_columns, barrier);
    }
  }
}
#endif

// Up to kSlotsAtOnce sums of a unit, asked for together and added in their order. step: bytes
constexpr int kSlotsAtOnce = 8;
template <typename Vector>
__device__ __forceinline__ Vector AddSlots(const unsigned char* first, int step, int count) {
  Vector sums[kSlotsAtOnce] = {};
#pragma unroll
  for (int i = 0; i < kSlotsAtOnce; ++i) {
    if (i < count) sums[i] = *reinterpret_cast<const Vector*>(first + i * step);
  }
#pragma unroll
  for (int i = 1; i < kSlotsAtOnce; ++i) sums[0] = sums[0] + sums[i];
  return sums[0];
}

template <class U, typename T>
__global__ void __launch_bounds__(U::kThreads) SplitKChannelsKernel(const __grid_constant__ SplitKChannelsTask<T> slice,
                                                                    const __grid_constant__ SplitKChannelsMaps maps) {
#if __CUDA_ARCH__ >= 900
  using Vector = typename U::Vector;
  static_assert(U::kWarps <= kSlotsAtOnce && kMaxChannelSplits <= 2 * kSlotsAtOnce, "a unit's sums are read at once");
  constexpr int kUnits = U::kUnits;
  extern __shared__ __align__(1024) unsigned char shared[];
  __shared__ uint64_t barriers[1 + kMostKernelRows], slots_full;
  const MmaTask<T>& task = slice.small_map.mma;
  if (__builtin_expect(slice.has_gate, false) && !PassesGateApart(task.gate)) return;
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarp, 0);
  const int rank = static_cast<int>(blockIdx.x);
  const SplitKChannelsPlace at = FindSplitKChannelsPlace<U>(slice);
  const uint32_t operands = SharedAddress(shared), full = SharedAddress(barriers);
  if (IsElected()) {
    if (warp == U::kWarps - 1 && slice.splits > 1) {
      const int units = Divide(kUnits - rank + slice.splits - 1, slice.by_splits).quotient;
      OpenSlots(&slots_full, units * slice.splits * kWarp * static_cast<int>(sizeof(Vector)));
    }
    AskForOperands<U>(slice, maps, at, warp, operands, full);
  }
  __syncthreads();
  if (slice.splits > 1) ArriveAtCluster();
  const int lane = threadIdx.x % kWarp;
  constexpr int kUnitBytes = kWarp * static_cast<int>(sizeof(Vector)), kWarpBytes = kUnits * kUnitBytes;
  constexpr int kRounds = (kUnits + U::kWarps - 1) / U::kWarps;
  uint32_t slots[kRounds], slot_barriers[kRounds];  // of this warp's units: where their sums go, and the barriers there
  if (slice.splits > 1) {
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      const Quotient to = Divide(warp + i * U::kWarps, slice.by_splits);
      const uint32_t slot = operands + slice.slots_at + (to.quotient * slice.splits + rank) * kUnitBytes;
      slots[i] = InBlock(slot + lane * sizeof(Vector), to.remainder);
      slot_barriers[i] = InBlock(SharedAddress(&slots_full), to.remainder);
    }
  }
  SplitKChannelsEngine<U, T> engine(slice, warp);
  SplitKChannelsWriter<U, T> writer(slice, at);
  writer.Find(warp * slice.splits + rank);
  engine.MultiplyAll(slice.steps, shared, full);
  unsigned char* from = shared + slice.sums_at + lane * sizeof(Vector);
  engine.Store(reinterpret_cast<Vector*>(from + warp * kWarpBytes));
  __syncthreads();
  int count = U::kWarps, step = kWarpBytes, slot_step = kUnitBytes;
  if (slice.splits > 1) {
    WaitForCluster();
    Vector sums[kRounds];
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      if (warp + i * U::kWarps >= kUnits) continue;
      const unsigned char* of_unit = from + (warp + i * U::kWarps) * kUnitBytes;
      sums[i] = AddParts<U::kWarps>(reinterpret_cast<const Vector*>(of_unit), kUnits * kWarp);
    }
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      if (warp + i * U::kWarps < kUnits) SendTo(slots[i], sums[i], slot_barriers[i]);
    }
    from = shared + slice.slots_at + lane * sizeof(Vector);
    count = slice.splits, step = kUnitBytes, slot_step = slice.splits * kUnitBytes;
    WaitForBytes(&slots_full, 0);
  }
#pragma unroll 1
  for (int own = warp; own * slice.splits + rank < kUnits; own += U::kWarps) {
    if (own != warp) writer.Find(own * slice.splits + rank);
    const unsigned char* of_slot = from + own * slot_step;
    Vector sum = AddSlots<Vector>(of_slot, step, count);
    if (count > kSlotsAtOnce) sum = sum + AddSlots<Vector>(of_slot + kSlotsAtOnce * step, step, count - kSlotsAtOnce);
    writer.Write(sum);
  }
  if (task.counts.rows) {
    WriteCountsApart(task.counts, writer.tally.Row(), reinterpret_cast<int2*>(shared));
  }
#endif
}

template <typename T>
SplitKChannelsTask<T> MakeSplitKChannelsTask(const DeviceCall& call, const SplitKChannelsPlan& plan) {
  const ConvArgs& a = call.args;
  SplitKChannelsTask<T> t{};
  t.small_map = MakeSmallMapTask<T>(call);
  const MmaTask<T>& d = t.small_map.mma;
  const int64_t channels = kSliceBytes / static_cast<int64_t>(sizeof(T)), box = plan.box_high * plan.box_wide;
  t.by_out_channel_tiles = Divider(plan.out_channel_tiles);
  t.by_tiles_across = Divider(plan.tiles_across);
  t.by_tiles_down = Divider(plan.tiles_down);
  t.by_images = Divider(d.images_per_stack);
  t.stride_y = d.stride[0], t.stride_x = d.stride[1];
  t.first_y = -d.pad_low[0], t.first_x = -d.pad_low[1];
  t.splits = plan.splits, t.slices_of_block = plan.slices * plan.warps;
  t.steps.slices = plan.slices;
  t.steps.kernel_rows = static_cast<int>(a.kernel_size[0]), t.steps.kernel_columns = static_cast<int>(a.kernel_size[1]);
  t.steps.slice_bytes = static_cast<int>(box * kSliceBytes);
  const int weight_bytes = static_cast<int>(channels * plan.out_channels * sizeof(T));  // of a slice under a tap
  const int tap_bytes = t.slices_of_block * weight_bytes, of_warp = plan.slices;
  t.steps.weights_on = tap_bytes - of_warp * weight_bytes;
  t.steps.pixels_on = d.dilation[1] * kSliceBytes - of_warp * t.steps.slice_bytes;
  t.steps.down = d.dilation[0] * plan.box_wide * kSliceBytes;
  t.row_bytes = t.steps.kernel_columns * tap_bytes;
  t.pixels_at = t.steps.kernel_rows * t.row_bytes;
  t.pixel_bytes = t.slices_of_block * t.steps.slice_bytes;
  t.slices_of_group = static_cast<int>(a.group_channels / channels), t.group_out_channels = d.group_out_channels;
  t.has_gate = call.gate.nonzeros != nullptr;
  t.wide = plan.tile_wide, t.high = plan.tile_high;
  t.out_wide = static_cast<int>(a.conv_size[1]), t.out_high = static_cast<int>(a.conv_size[0]);
  t.pixel_down = d.stride[0] * plan.box_wide * kSliceBytes, t.pixel_across = d.stride[1] * kSliceBytes;
  t.sums_at = plan.sums_at, t.slots_at = plan.slots_at;
  t.by_tile_wide = Divider(plan.tile_wide);
  t.by_splits = Divider(plan.splits);
  return t;
}

template <class U, typename T>
Error LaunchSplitKChannels(const DeviceCall& call, const SplitKChannelsPlan& plan, const SplitKChannelsMaps& maps,
                           cudaStream_t stream) {
  constexpr auto kKernel = SplitKChannelsKernel<U, T>;
  const Error error = Prepare<kKernel>("SliceKernel");
  if (error.failure()) return error;
  SplitKChannelsTask<T> task = MakeSplitKChannelsTask<T>(call, plan);
  const ConvArgs& a = call.args;
  const int64_t tiles = a.images * plan.tiles_down * plan.tiles_across,
                out_channels = plan.out_channel_tiles * a.groups;
  cudaLaunchConfig_t config{};
  config.gridDim =
      dim3(static_cast<unsigned>(plan.splits), static_cast<unsigned>(out_channels), static_cast<unsigned>(tiles));
  config.blockDim = dim3(U::kThreads);
  config.dynamicSmemBytes = plan.shared_bytes;
  config.stream = stream;
  task.small_map.mma.counts = CountsOf(call.counts, tiles * out_channels * plan.splits);
  LaunchAttributes attributes(plan.splits > 1 ? plan.splits : 0, task.small_map.mma.gate);
  config.attrs = attributes.list;
  config.numAttrs = attributes.count;
  return CheckCuda(cudaLaunchKernelEx(&config, kKernel, task, maps), "SliceKernel");
}

// The kernel of a plan's tile, one of those in dense_conv/plan/splitk_channels_plan.cc.
template <typename T, bool kTf32x3>
Error LaunchSplitKChannelsTile(const DeviceCall& call, const SplitKChannelsPlan& plan, const SplitKChannelsMaps& maps,
                               cudaStream_t stream) {
  const bool wide = plan.warps == 8;
  if (plan.out_channels == 16)
    return LaunchSplitKChannels<SplitKChannelsTuning<T, 16, 4, 4, kTf32x3>, T>(call, plan, maps, stream);
  if (plan.columns == 7)
    return LaunchSplitKChannels<SplitKChannelsTuning<T, 32, 7, 4, kTf32x3>, T>(call, plan, maps, stream);
  if (plan.columns == 2) {
    return wide ? LaunchSplitKChannels<SplitKChannelsTuning<T, 32, 2, 8, kTf32x3>, T>(call, plan, maps, stream)
                : LaunchSplitKChannels<SplitKChannelsTuning<T, 32, 2, 4, kTf32x3>, T>(call, plan, maps, stream);
  }
  return wide ? LaunchSplitKChannels<SplitKChannelsTuning<T, 32, 4, 8, kTf32x3>, T>(call, plan, maps, stream)
              : LaunchSplitKChannels<SplitKChannelsTuning<T, 32, 4, 4, kTf32x3>, T>(call, plan, maps, stream);
}

template <typename T>
Error LaunchSplitKChannelsPlan(const DeviceCall& call, const SplitKChannelsPlan& plan, const SplitKChannelsMaps& maps,
                               cudaStream_t stream) {
  const auto launch = plan.tf32x3 ? LaunchSplitKChannelsTile<T, true> : LaunchSplitKChannelsTile<T, false>;
  return launch(call, plan, maps, stream);
}

}  // namespace jsc

#endif  // JSC_CUDA_DENSE_CONV_SPLITK_CHANNELS_KERNEL_CUH_
