// A direct convolution by warpgroup products as its kernel gets it, and where in it a block is.
#ifndef JSC_CUDA_DENSE_CONV_WGMMA_TASK_CUH_
#define JSC_CUDA_DENSE_CONV_WGMMA_TASK_CUH_

#include "cuda/core/density.cuh"
#include "cuda/dense_conv/plan/wgmma_plan.h"

namespace jsc {

// How blocks whose products are in parts send each other sums, in kernels of their own: not at all; with what is found
// early kept in shared memory, as registers are short; or in registers, of which roomy tiles have enough.
enum class PartsMail { kNone, kKept, kRoomy };

// A block's tile and threads. kDeep: channels of a step, kBox: filters of a box of the kernel, both 128 bytes. kParts:
// float32-accurate products (dense_conv/wgmma/parts.cuh). kCopiesSmall: pixels' small parts are in memory; else
// kSplits: a block makes them. kTeams: of warps, each with its share of the block's steps and rings of its own; their
// sums are added in the first one's registers, which writes. So a block alone on its multiprocessor keeps it as busy as
// two.
template <typename T, int kFilters_, int kPixels_, bool kParts_ = false, PartsMail kPartsMail = PartsMail::kNone,
          bool kCopiesSmall_ = false, int kTeams_ = 1>
struct WarpgroupTile {
  static constexpr int kFilters = kFilters_, kPixels = kPixels_;
  static constexpr bool kParts = kParts_, kRoomy = kPartsMail == PartsMail::kRoomy;
  static constexpr bool kCopiesSmall = kCopiesSmall_, kSplits = kParts && !kCopiesSmall;
  static constexpr bool kMail = kParts ? kPartsMail != PartsMail::kNone : HasMail(kPixels);
  static constexpr bool kKeepsMail = kPartsMail == PartsMail::kKept;
  static constexpr int kGroups = kFilters / 64;  // warpgroups, each with 64 filters and all pixels
  static constexpr int kTeams = kTeams_;
  static_assert(kTeams == 1 || (kTeams == 2 && kGroups == 1));
  static constexpr int kConsumers = kGroups * 128;          // threads of a team that multiply
  static constexpr int kMultipliers = kTeams * kConsumers;  // then comes a warp for each team that asks for copies
  static constexpr int kThreads = kMultipliers + kTeams * kWarp;
  static constexpr int kDeep = kRowBytes / static_cast<int>(sizeof(T)), kBox = kDeep;
  static constexpr int kBoxBytes = kDeep * kRowBytes, kFilterBytes = kFilters / kBox * kBoxBytes;  // of a stage
  static constexpr int kResident =
      kTeams > 1 ? 1 : WarpgroupResident(kFilters, kPixels, static_cast<int>(sizeof(T)), kParts, kRoomy);
  static constexpr int kSumStride = kFilters + 4;  // words between pixels' sums, for distinct banks
};

template <typename T>
struct WarpgroupTask {
  const T* bias;      // [S, K] or null
  const T* residual;  // [N, Ho, Wo, K] or null
  T* out;             // [N, Ho, Wo, K], pooled
  CountTask counts;
  Gate gate;
  int images_per_stack, height, width, features;  // of the convolution's result
  int pixels;                                     // of a stack: images_per_stack * height * width
  int stride[2], pad_low[2], dilation[2];
  int steps, steps_per_split, splits, taps, kernel_width, feature_tiles;
  int tiles, residents;  // where blocks take tiles in turns: of a stack, and blocks of a multiprocessor
  int group_channels;    // of x, that a tile's filters see
  int pixel_stages, filter_stages, pixel_bytes, copied_bytes;  // of a stage of pixels: its room, and what comes
  int team_bytes;                                              // of the rings of a team
  int mail_at;  // bytes from the first stage to the mailbox, where blocks meet by mail; 0: in the stages' place
  int kept_at;  // bytes from the first stage to what the threads of a kKeepsMail tile keep
  int group_bytes, next_column, next_row;  // of staged pixels: between groups of eight, and from step to step
  int stage_steps, row_steps;              // of a patch, and of a row of its window; else both the stages of the ring
  int new_patch, patches;                  // steps left in a new one, else -1; stages of them, else 1
  uint32_t end_offset;                     // of the tap behind the last one, see StageCopies
  bool whole_filters;                      // one copy brings a step's
  bool patch, by_mail, relu;
  Pool pool;  // of pairs of rows and columns, see PoolsPairs
  int pooled_height, pooled_width;
  Divider by_splits, by_feature_tiles, by_tiles_high, by_tiles_wide, by_height, by_width, by_taps, by_kernel_width,
      by_group_features;
};

// Products in parts: where small parts of the results go, and where they find what they compute again.
struct PartsTask : WarpgroupTask<float> {
  float* small_out;     // as out, or null
  const float* x;       // [N, H, W, C]
  const float* kernel;  // [S, kh, kw, C / groups, K]
  int in_height, in_width, channels;
};

template <class U, typename T>
using WarpgroupTaskOf = std::conditional_t<U::kParts, PartsTask, WarpgroupTask<T>>;

template <typename T>
WarpgroupTask<T> MakeWarpgroupTask(const DeviceCall& call, const WarpgroupPlan& plan) {
  const ConvArgs& a = call.args;
  WarpgroupTask<T> t{};
  t.bias = static_cast<const T*>(call.bias);
  t.residual = static_cast<const T*>(call.residual);
  t.out = static_cast<T*>(call.out);
  t.gate = call.gate;
  t.images_per_stack = static_cast<int>(a.images / a.stacks);
  t.height = static_cast<int>(a.conv_size[0]);
  t.width = static_cast<int>(a.conv_size[1]);
  t.features = static_cast<int>(a.features);
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
  t.feature_tiles = plan.feature_tiles;
  t.tiles = plan.pixel_tiles * plan.feature_tiles;
  t.residents = plan.turns.residents;
  t.group_channels = static_cast<int>(a.group_channels);
  t.pixel_stages = plan.pixel_stages;
  t.filter_stages = plan.filter_stages;
  t.pixel_bytes = plan.pixel_bytes;
  t.copied_bytes = (plan.patch ? plan.patch_high * plan.patch_wide : plan.pixels) * kRowBytes;
  t.team_bytes = plan.ring_bytes();
  t.by_mail = plan.by_mail;
  t.mail_at = plan.mail_at;
  t.kept_at = plan.kept_at;
  t.group_bytes = (plan.patch ? plan.patch_wide : 8) * kRowBytes;
  t.row_steps = plan.patch ? t.kernel_width : plan.pixel_stages;
  t.next_column = plan.patch ? t.dilation[1] * kRowBytes : plan.pixel_bytes;
  t.next_row = plan.patch ? t.dilation[0] * t.group_bytes - (t.row_steps - 1) * t.next_column : 0;
  t.stage_steps = plan.patch ? plan.taps : plan.pixel_stages;
  t.new_patch = plan.patch ? plan.taps : -1;
  t.patches = plan.patch ? plan.pixel_stages : 1;
  t.end_offset = static_cast<uint32_t>(a.kernel_size[0]) * static_cast<uint32_t>(a.dilation[0]) << 16;
  t.whole_filters = HasWholeFilters(a, static_cast<int>(sizeof(T)));
  t.patch = plan.patch;
  t.relu = a.activation == Activation::kRelu;
  t.pool = a.pool;
  t.pooled_height = static_cast<int>(a.out_size[0]);
  t.pooled_width = static_cast<int>(a.out_size[1]);
  t.by_splits = Divider(plan.splits);
  t.by_feature_tiles = Divider(plan.feature_tiles);
  t.by_tiles_high = Divider(plan.tiles_high);
  t.by_tiles_wide = Divider(plan.tiles_wide);
  t.by_height = Divider(t.height);
  t.by_width = Divider(t.width);
  t.by_taps = Divider(plan.taps);
  t.by_kernel_width = Divider(t.kernel_width);
  t.by_group_features = Divider(a.features / a.groups);
  return t;
}

inline void AddOperands(const DeviceCall& call, PartsTask* t) {
  t->small_out = static_cast<float*>(call.small.out);
  t->x = static_cast<const float*>(call.x);
  t->kernel = static_cast<const float*>(call.kernel);
  t->in_height = static_cast<int>(call.args.size[0]);
  t->in_width = static_cast<int>(call.args.size[1]);
  t->channels = static_cast<int>(call.args.channels);
}

// What a block does: its tile's first result, and of the steps those from first_step to end_step.
struct WarpgroupPlace {
  int feature, pixel;  // pixel: of the stack; where tiles are patches, 0
  int image, y, x;     // image: of the stack
  int split, first_step, end_step;
};

template <class U, typename T>
__device__ __forceinline__ WarpgroupPlace FindWarpgroupPlace(const WarpgroupTask<T>& task, int block) {
  const Quotient part = Divide(block, task.by_splits), tile = Divide(part.quotient, task.by_feature_tiles);
  WarpgroupPlace at;
  at.feature = tile.remainder * U::kFilters;
  at.split = part.remainder;
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

// The same for a team of a block's warps: its share of the steps, which may be none.
template <class U>
__device__ __forceinline__ WarpgroupPlace PlaceOfTeam(WarpgroupPlace at, int team) {
  if constexpr (U::kTeams > 1) {
    const int middle = at.first_step + (at.end_step - at.first_step + 1) / 2;
    if (team == 0) at.end_step = middle;
    if (team == 1) at.first_step = middle;
  }
  return at;
}

}  // namespace jsc

#endif  // JSC_CUDA_DENSE_CONV_WGMMA_TASK_CUH_
