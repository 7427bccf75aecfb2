// A call as the engine few_channels gets it.
#ifndef JSC_CUDA_DENSE_CONV_FEW_CHANNELS_TASK_CUH_
#define JSC_CUDA_DENSE_CONV_FEW_CHANNELS_TASK_CUH_

#include <algorithm>
#include <limits>

#include "cuda/core/density.cuh"
#include "cuda/core/task_head.h"
#include "cuda/dense_conv/plan/few_channels_plan.h"

namespace jsc {

// kTf32x3: float32 in a high and a low part, each of which is staged; kPaired: see FewChannelsPlan.
template <int kOutChannels_, bool kTf32x3_, bool kPaired_>
struct FewChannelsTile {
  static constexpr int kOutChannels = kOutChannels_;  // of a warp
  static constexpr bool kTf32x3 = kTf32x3_, kPaired = kPaired_;
  static constexpr int kFragments = kOutChannels / 16;
  static constexpr int kMostThreads = kFewChannelsWarps * kWarp, kResident = kTf32x3 || kOutChannels > 32 ? 1 : 2;
};

// Where a tile's results go: to memory in whole pieces; to shared memory, in front of a pool; or what else there is:
// residuals, counts, output channels in no whole pieces.
enum class FewChannelsTarget { kPlain, kPool, kOther };

template <typename T>
struct FewChannelsTask {
  const T* x;         // [N, H, W, C]
  const T* kernel;    // [S, kh, kw, C, K]
  const T* bias;      // [S, K] or null
  const T* residual;  // [N, Ho, Wo, K] or null
  T* out;             // [N, Ho, Wo, K]
  T* low_out;         // at 3xTF32: as out, or null
  CountTask counts;
  Gate gate;
  int images;                                               // of a stack
  int height, width, channels, row_elements, out_channels;  // row_elements: of x
  int kernel_size[2], window_elements;                      // of a row of the window
  int stride[2], pad_low[2], conv_size[2], out_size[2];
  int window[2], window_stride[2], window_pad_low[2], step[2];  // step: from a tile to the next, in the convolution
  int tile_out_channels;                                        // of a block
  int pool_stride;  // words from one staged result to the next, so that lanes meet distinct banks
  int tile_out[2], tile[2], lead, pairs, patch_rows, pitch, tiles;
  int pieces_log;  // of a row of the block's weights, 16 bytes each
  int table_at, bias_at, raw_at, patch_at, pool_at;
  bool pools;
  // The widest of 16, 8, 4 and 2 bytes that rows of x, of the kernel and of the results are made of, and lie at.
  int in_bytes, kernel_bytes, out_bytes;
  float least;  // of a result: 0 with ReLU
  FewChannelsTarget target;
  Divider by_tiles_high, by_tiles_wide, by_row_pairs, by_runs, by_out_columns;
};

template <typename T>
FewChannelsTask<T> MakeFewChannelsTask(const DeviceCall& call, const FewChannelsPlan& plan) {
  constexpr int kPiece = 16 / static_cast<int>(sizeof(T));
  const ConvArgs& a = call.args;
  FewChannelsTask<T> t{};
  SetBuffers(call, &t);
  t.low_out = static_cast<T*>(call.low.out);
  t.gate = call.gate;
  t.images = static_cast<int>(a.images / a.stacks);
  t.height = static_cast<int>(a.size[0]);
  t.width = static_cast<int>(a.size[1]);
  t.channels = static_cast<int>(a.channels);
  t.row_elements = t.width * t.channels;
  t.out_channels = static_cast<int>(a.out_channels);
  t.window_elements = static_cast<int>(a.kernel_size[1] * a.channels);
  t.pools = a.pool != Pool::kNone;
  for (int i = 0; i < 2; ++i) {
    t.kernel_size[i] = static_cast<int>(a.kernel_size[i]);
    t.stride[i] = static_cast<int>(a.stride[i]);
    t.pad_low[i] = static_cast<int>(a.pad_low[i]);
    t.conv_size[i] = static_cast<int>(a.conv_size[i]);
    t.out_size[i] = static_cast<int>(a.out_size[i]);
    t.window[i] = static_cast<int>(a.window[i]);
    t.window_stride[i] = static_cast<int>(a.window_stride[i]);
    t.window_pad_low[i] = t.pools ? static_cast<int>(a.window_pad_low[i]) : 0;
    t.tile_out[i] = plan.tile_out[i];
    t.tile[i] = plan.tile[i];
    t.step[i] = plan.tile_out[i] * (t.pools ? t.window_stride[i] : 1);
  }
  t.tile_out_channels = plan.out_channels;
  t.pool_stride = t.tile_out_channels + 4;
  t.lead = plan.lead;
  t.pairs = plan.pairs;
  t.patch_rows = plan.patch_rows;
  t.pitch = plan.pitch;
  t.tiles = t.images * plan.tiles[0] * plan.tiles[1];
  t.table_at = plan.table_at;
  t.bias_at = plan.bias_at;
  t.raw_at = plan.raw_at;
  t.patch_at = plan.patch_at;
  t.pieces_log = 0;
  while (kPiece << t.pieces_log < t.tile_out_channels) ++t.pieces_log;
  t.pool_at = plan.pool_at;
  t.least = a.activation == Activation::kRelu ? 0.f : -std::numeric_limits<float>::infinity();
  const auto widest = [](uintptr_t all) { return static_cast<int>(std::min<uintptr_t>(16, all & (~all + 1))); };
  const auto address = [](const void* p) { return reinterpret_cast<uintptr_t>(p) | 16; };
  t.in_bytes = widest(t.row_elements * sizeof(T) | address(t.x));
  t.kernel_bytes = widest(t.out_channels * sizeof(T) | address(t.kernel));
  t.out_bytes = widest(t.out_channels * sizeof(T) | address(t.out) | address(t.residual));
  t.by_tiles_high = Divider(plan.tiles[0]);
  t.by_tiles_wide = Divider(plan.tiles[1]);
  t.by_row_pairs = Divider(plan.row_pairs);
  t.by_runs = Divider(plan.tile[1] / kFewChannelsRun);
  t.by_out_columns = Divider(plan.tile_out[1]);
  return t;
}

// Which tile a block is at; y, x: of the convolution's results, negative in a pool's padding.
struct FewChannelsPlace {
  int image, stack_image, tile_y, tile_x, y, x;
  int first;  // element of a row of x where a staged row begins, a multiple of 16 bytes
  int shift;  // elements from there to the tile's first pair
};

__device__ __forceinline__ int FloorTo(int v, int power_of_two) { return v & -power_of_two; }

template <typename T>
__device__ __forceinline__ FewChannelsPlace FindFewChannelsPlace(const FewChannelsTask<T>& task, int tile) {
  const Quotient row = Divide(tile, task.by_tiles_wide), image = Divide(row.quotient, task.by_tiles_high);
  FewChannelsPlace at;
  at.image = image.quotient;
  at.stack_image = static_cast<int>(blockIdx.z) * task.images + at.image;
  at.tile_y = image.remainder;
  at.tile_x = row.remainder;
  at.y = at.tile_y * task.step[0] - task.window_pad_low[0];
  at.x = at.tile_x * task.step[1] - task.window_pad_low[1];
  const int begin = (at.x * task.stride[1] - task.pad_low[1]) * task.channels - task.lead;
  at.first = FloorTo(begin, 16 / static_cast<int>(sizeof(T)));
  at.shift = begin - at.first;
  return at;
}

}  // namespace jsc

#endif  // JSC_CUDA_DENSE_CONV_FEW_CHANNELS_TASK_CUH_
