// A call as the engine wgmma gets it, and where in it a block is.
#ifndef JSC_CUDA_DENSE_CONV_WGMMA_TASK_CUH_
#define JSC_CUDA_DENSE_CONV_WGMMA_TASK_CUH_

#include "cuda/core/density.cuh"
#include "cuda/dense_conv/plan/wgmma_plan.h"

namespace jsc {

// How blocks at 3xTF32 send each other sums, in kernels of their own. kNone: not at all. kSpilled: what is found early
// is kept in shared memory, as registers are short. kDoubleAccumulators: it stays in registers, of which such tiles
// have enough.
enum class Tf32x3Slots { kNone, kSpilled, kDoubleAccumulators };

// A block's tile and threads. kStepChannels: channels of a step, kBox: weights of a box of the kernel, both 128 bytes.
// kTf32x3: float32-accurate products (dense_conv/wgmma/tf32x3.cuh). kCopiesLow: pixels' low parts are in memory; else
// kMakesLow: a block makes them. kConsumerGroups: of warps, each with its share of the block's steps and pipelines of
// its own; their sums are added in the first one's registers, which writes. So a block alone on its SM keeps it as busy
// as two.
template <typename T, int kOutChannels_, int kPixels_, bool kTf32x3_ = false,
          Tf32x3Slots kTf32x3Slots = Tf32x3Slots::kNone, bool kCopiesSmall_ = false, int kConsumerGroups_ = 1>
struct WgmmaTile {
  static constexpr int kOutChannels = kOutChannels_, kPixels = kPixels_;
  static constexpr bool kTf32x3 = kTf32x3_, kDoubleAccumulators = kTf32x3Slots == Tf32x3Slots::kDoubleAccumulators;
  static constexpr bool kCopiesLow = kCopiesSmall_, kMakesLow = kTf32x3 && !kCopiesLow;
  static constexpr bool kHasSlots = kTf32x3 ? kTf32x3Slots != Tf32x3Slots::kNone : HasSlots(kPixels);
  static constexpr bool kSpillsSlots = kTf32x3Slots == Tf32x3Slots::kSpilled;
  static constexpr int kGroups = kOutChannels / 64;  // warpgroups, each with 64 output channels and all pixels
  static constexpr int kConsumerGroups = kConsumerGroups_;
  static_assert(kConsumerGroups == 1 || (kConsumerGroups == 2 && kGroups == 1));
  static constexpr int kConsumers = kGroups * 128;  // threads of a consumer group that multiply
  // Then comes a producer warp for each consumer group.
  static constexpr int kMultipliers = kConsumerGroups * kConsumers;
  static constexpr int kThreads = kMultipliers + kConsumerGroups * kWarp;
  static constexpr int kStepChannels = kRowBytes / static_cast<int>(sizeof(T)), kBox = kStepChannels;
  static constexpr int kBoxBytes = kStepChannels * kRowBytes,
                       kWeightBytes = kOutChannels / kBox * kBoxBytes;  // of a stage
  static constexpr int kResident =
      kConsumerGroups > 1
          ? 1
          : WgmmaResident(kOutChannels, kPixels, static_cast<int>(sizeof(T)), kTf32x3, kDoubleAccumulators);
  static constexpr int kSumStride = kOutChannels + 4;  // words between pixels' sums, for distinct banks
};

template <typename T>
struct WgmmaTask {
  const T* bias;      // [S, K] or null
  const T* residual;  // [N, Ho, Wo, K] or null
  T* out;             // [N, Ho, Wo, K], pooled
  CountTask counts;
  Gate gate;
  int images_per_stack, height, width, out_channels;  // of the convolution's result
  int pixels;                                         // of a stack: images_per_stack * height * width
  int stride[2], pad_low[2], dilation[2];
  int steps, steps_per_split, splits, taps, kernel_width, out_channel_tiles;
  int tiles, residents;  // of a persistent kernel: of a stack, and blocks of an SM
  int group_channels;    // of x, that a tile's weights see
  int pixel_stages, weight_stages, pixel_bytes, copied_bytes;  // of a stage of pixels: its room, and what comes
  int consumer_group_bytes;                                    // of the pipelines of a consumer group
  int slots_at;  // bytes from the first stage to the slots, where there are any; 0: in the stages'
                 // place
  int spill_at;  // bytes from the first stage to what the threads of a kSpillsSlots tile keep
  int group_bytes, next_column, next_row;  // of staged pixels: between groups of eight, and from step to step
  int stage_steps, row_steps;  // of a patch, and of a row of its window; else both the stages of the pipeline
  int new_patch, patches;      // steps left in a new one, else -1; stages of them, else 1
  uint32_t end_offset;         // of the tap behind the last one, see StageCopies
  bool whole_weights;          // one copy brings a step's
  bool patch, uses_slots, relu;
  Pool pool;  // of pairs of rows and columns, see PoolsPairs
  int pooled_height, pooled_width;
  Divider by_splits, by_out_channel_tiles, by_tiles_high, by_tiles_wide, by_height, by_width, by_taps, by_kernel_width,
      by_group_out_channels;
};

// 3xTF32: where low parts of the results go, and where they find what they compute again.
struct Tf32x3Task : WgmmaTask<float> {
  float* low_out;       // as out, or null
  const float* x;       // [N, H, W, C]
  const float* kernel;  // [S, kh, kw, C / groups, K]
  int in_height, in_width, channels;
};

template <class U, typename T>
using WgmmaTaskOf = std::conditional_t<U::kTf32x3, Tf32x3Task, WgmmaTask<T>>;

template <typename T>
WgmmaTask<T> MakeWgmmaTask(const DeviceCall& call, const WgmmaPlan& plan) {
  const ConvArgs& a = call.args;
  WgmmaTask<T> t{};
  t.bias = static_cast<const T*>(call.bias);
  t.residual = static_cast<const T*>(call.residual);
  t.out = static_cast<T*>(call.out);
  t.gate = call.gate;
  t.images_per_stack = static_cast<int>(a.images / a.stacks);
  t.height = static_cast<int>(a.conv_size[0]);
  t.width = static_cast<int>(a.conv_size[1]);
  t.out_channels = static_cast<int>(a.out_channels);
  t.pixels = t.images_per_stack * t.height * t.width;
  t.kernel_width = static_cast<int>(a.kernel_size[1]);
  for (int i = 0; i < 2; ++i) {
    t.stride[i] = static_cast<int>(a.stride[i]);
    t.pad_low[i] = static_cast<int>(a.pad_low[i]);
    t.dilation[i] = static_cast<int>(a.dilation[i]);
  }
  t.steps = plan.steps;
  t.steps_per_split = plan.steps_per_split;
  t.splits = plan.splits;
  t.taps = plan.taps;
  t.out_channel_tiles = plan.out_channel_tiles;
  t.tiles = plan.pixel_tiles * plan.out_channel_tiles;
  t.residents = plan.scheduler.residents;
  t.group_channels = static_cast<int>(a.group_channels);
  t.pixel_stages = plan.pixel_stages;
  t.weight_stages = plan.weight_stages;
  t.pixel_bytes = plan.pixel_bytes;
  t.copied_bytes = (plan.patch ? plan.patch_high * plan.patch_wide : plan.pixels) * kRowBytes;
  t.consumer_group_bytes = plan.pipeline_bytes();
  t.uses_slots = plan.uses_slots;
  t.slots_at = plan.slots_at;
  t.spill_at = plan.spill_at;
  t.group_bytes = (plan.patch ? plan.patch_wide : 8) * kRowBytes;
  t.row_steps = plan.patch ? t.kernel_width : plan.pixel_stages;
  t.next_column = plan.patch ? t.dilation[1] * kRowBytes : plan.pixel_bytes;
  t.next_row = plan.patch ? t.dilation[0] * t.group_bytes - (t.row_steps - 1) * t.next_column : 0;
  t.stage_steps = plan.patch ? plan.taps : plan.pixel_stages;
  t.new_patch = plan.patch ? plan.taps : -1;
  t.patches = plan.patch ? plan.pixel_stages : 1;
  t.end_offset = static_cast<uint32_t>(a.kernel_size[0]) * static_cast<uint32_t>(a.dilation[0]) << 16;
  t.whole_weights = HasWholeWeights(a, static_cast<int>(sizeof(T)));
  t.patch = plan.patch;
  t.relu = a.activation == Activation::kRelu;
  t.pool = a.pool;
  t.pooled_height = static_cast<int>(a.out_size[0]);
  t.pooled_width = static_cast<int>(a.out_size[1]);
  t.by_splits = Divider(plan.splits);
  t.by_out_channel_tiles = Divider(plan.out_channel_tiles);
  t.by_tiles_high = Divider(plan.tiles_high);
  t.by_tiles_wide = Divider(plan.tiles_wide);
  t.by_height = Divider(t.height);
  t.by_width = Divider(t.width);
  t.by_taps = Divider(plan.taps);
  t.by_kernel_width = Divider(t.kernel_width);
  t.by_group_out_channels = Divider(a.out_channels / a.groups);
  return t;
}

inline void AddOperands(const DeviceCall& call, Tf32x3Task* t) {
  t->low_out = static_cast<float*>(call.low.out);
  t->x = static_cast<const float*>(call.x);
  t->kernel = static_cast<const float*>(call.kernel);
  t->in_height = static_cast<int>(call.args.size[0]);
  t->in_width = static_cast<int>(call.args.size[1]);
  t->channels = static_cast<int>(call.args.channels);
}

// What a block does: its tile's first result, and of the steps those from first_step to end_step.
struct WgmmaPlace {
  int out_channel, pixel;  // pixel: of the stack; where tiles are patches, 0
  int image, y, x;         // image: of the stack
  int split, first_step, end_step;
};

template <class U, typename T>
__device__ __forceinline__ WgmmaPlace FindWgmmaPlace(const WgmmaTask<T>& task, int block) {
  const Quotient member = Divide(block, task.by_splits), tile = Divide(member.quotient, task.by_out_channel_tiles);
  WgmmaPlace at;
  at.out_channel = tile.remainder * U::kOutChannels;
  at.split = member.remainder;
  at.first_step = at.split * task.steps_per_split;
  at.end_step = min(at.first_step + task.steps_per_split, task.steps);
  if (task.patch) {
    const Quotient row = Divide(tile.quotient, task.by_tiles_wide), image = Divide(row.quotient, task.by_tiles_high);
    at.pixel = 0;
    at.image = image.quotient;
    at.y = image.remainder * (U::kPixels / kPatchWidth);
    at.x = row.remainder * kPatchWidth;
  } else {
    at.pixel = tile.quotient * U::kPixels;
    const Quotient row = Divide(at.pixel, task.by_width), image = Divide(row.quotient, task.by_height);
    at.image = image.quotient;
    at.y = image.remainder;
    at.x = row.remainder;
  }
  return at;
}

// The same for a consumer group of a block's warps: its share of the steps, which may be none.
template <class U>
__device__ __forceinline__ WgmmaPlace PlaceOfConsumerGroup(WgmmaPlace at, int consumer_group) {
  if constexpr (U::kConsumerGroups > 1) {
    const int middle = at.first_step + (at.end_step - at.first_step + 1) / 2;
    if (consumer_group == 0) at.end_step = middle;
    if (consumer_group == 1) at.first_step = middle;
  }
  return at;
}

}  // namespace jsc

#endif  // JSC_CUDA_DENSE_CONV_WGMMA_TASK_CUH_
