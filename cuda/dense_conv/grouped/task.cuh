// A call as the engine grouped gets it.
#ifndef JSC_CUDA_DENSE_CONV_GROUPED_TASK_CUH_
#define JSC_CUDA_DENSE_CONV_GROUPED_TASK_CUH_

#include "cuda/dense_conv/mma/small_map.cuh"
#include "cuda/dense_conv/plan/grouped_plan.h"

namespace jsc {

template <typename T, int kTiles_, bool kTf32x3_>
struct GroupedTuning {
  static constexpr int kTiles = kTiles_;                      // of eight output channels of a warp
  static constexpr bool kTf32x3 = kTf32x3_;                   // float32-accurate products
  static constexpr int kRows = GroupedRows(kTiles, kTf32x3);  // fragments of 16 pixels
  static constexpr int kThreads = kGroupedWarps * kWarp;
  static constexpr int kUnit = kUnitBytes / static_cast<int>(sizeof(T));  // channels
  static constexpr bool kWide = sizeof(T) == 4;
  // A thread's results of a pixel: runs of neighbouring output channels.
  static constexpr int kRuns = kWide ? 1 : kTiles, kRun = kWide ? 2 * kTiles : 2;
};

// Places and sizes in shared memory are in bytes.
template <typename T>
struct GroupedTask {
  SmallMapTask<T> small_map;
  int out_high, out_wide;
  int tile_images, tile_high, tile_wide, tile_pixels;  // results of a block
  int box_high, box_wide, box_rows;                    // rows: of all images of a tile
  int units;                                           // of a window
  int pixel_bytes, weight_bytes, places_at, weights_at, pixels_at;
  int all_groups, groups, group_bytes, columns;  // groups: of a block; group_bytes: of a pixel's channels
  int span_copies, weight_copies, weight_rows;   // 16 bytes of a pixel, and of a row of weights
  int step_pixels, step_copies;                  // from a lane's copy of pixels to its next
  Divider by_across, by_down, by_image_tiles, by_out_channel_splits, by_of_group, by_columns, by_span, by_weight_copies,
      by_tile_wide, by_tile_pixels, by_box_high, by_unit_span, by_kernel_width;
};

template <typename T>
GroupedTask<T> MakeGroupedTask(const DeviceCall& call, const GroupedPlan& plan) {
  const ConvArgs& a = call.args;
  GroupedTask<T> t{};
  t.small_map = MakeSmallMapTask<T>(call);
  const MmaTask<T>& d = t.small_map.mma;
  t.out_high = static_cast<int>(a.conv_size[0]), t.out_wide = static_cast<int>(a.conv_size[1]);
  t.tile_images = plan.tile_images, t.tile_high = plan.tile_high, t.tile_wide = plan.tile_wide;
  t.tile_pixels = plan.tile_high * plan.tile_wide;
  t.box_high = plan.box_high, t.box_wide = plan.box_wide, t.box_rows = plan.tile_images * plan.box_high;
  t.units = plan.units;
  t.pixel_bytes = plan.pixel_bytes, t.weight_bytes = plan.weight_bytes;
  t.places_at = plan.places_at, t.weights_at = plan.weights_at, t.pixels_at = plan.pixels_at;
  t.all_groups = static_cast<int>(a.groups), t.groups = plan.groups, t.columns = plan.columns;
  t.group_bytes = d.group_channels * static_cast<int>(sizeof(T));
  t.span_copies = plan.groups * t.group_bytes / kUnitBytes;
  t.weight_copies = plan.columns * 8 * plan.tiles * static_cast<int>(sizeof(T)) / kUnitBytes;
  t.weight_rows = d.depth;
  t.step_pixels = kWarp / t.span_copies, t.step_copies = kWarp % t.span_copies;
  t.by_across = Divider(plan.tiles_across), t.by_down = Divider(plan.tiles_down);
  t.by_image_tiles = Divider(plan.image_tiles), t.by_out_channel_splits = Divider(plan.out_channel_splits);
  t.by_of_group = Divider(plan.columns / plan.groups), t.by_columns = Divider(plan.columns);
  t.by_span = Divider(t.span_copies), t.by_weight_copies = Divider(t.weight_copies);
  t.by_tile_wide = Divider(plan.tile_wide), t.by_tile_pixels = Divider(t.tile_pixels);
  t.by_box_high = Divider(plan.box_high), t.by_unit_span = Divider(t.group_bytes / kUnitBytes);
  t.by_kernel_width = Divider(a.kernel_size[1]);
  return t;
}

}  // namespace jsc

#endif  // JSC_CUDA_DENSE_CONV_GROUPED_TASK_CUH_
