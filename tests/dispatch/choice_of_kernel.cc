// What test_kernel_choice.py calls: the choice between the kernels of the direct convolution on an H200.
#include <algorithm>
#include <cstdint>
#include <iterator>

#include "direct_choice.h"

// layer: N, H, W, C, kh, kw, K, then rows and columns of strides, padding (low, high of H, then of W) and dilation, and
// groups, and 1 if pairs of rows and columns are pooled. tile: filters of a tile of warpgroups, then the blocks that
// share its steps, the teams of their warps, and 1 or 2 where they meet by mail, in the stages' place or apart; of
// slices filters, the blocks that share its channels, columns and warps. The result: 0 for the kernel that has no
// tiles, 1 images, 2 slices, 3 warpgroups, 4 products of a warp, 5 those of a small tile, 6 groups of few channels.
extern "C" int ChosenKernel(const int64_t* layer, int element_bytes, bool highest, int* tile) {
  jsc::ConvArgs a{};
  a.images = layer[0], a.channels = layer[3], a.features = layer[6], a.groups = layer[15], a.stacks = 1;
  a.group_channels = a.channels / a.groups;
  for (int i = 0; i < 2; ++i) {
    const int64_t low = layer[9 + 2 * i], high = layer[10 + 2 * i];
    a.size[i] = layer[1 + i], a.kernel_size[i] = layer[4 + i], a.stride[i] = layer[7 + i];
    a.dilation[i] = layer[13 + i], a.pad_low[i] = low;
    const int64_t reach = (a.kernel_size[i] - 1) * a.dilation[i] + 1;
    a.conv_size[i] = a.out_size[i] = (a.size[i] + low + high - reach) / a.stride[i] + 1;
    a.window[i] = a.window_stride[i] = 1;
    if (layer[16] != 0) a.window[i] = a.window_stride[i] = 2, a.out_size[i] /= 2;
  }
  if (layer[16] != 0) a.pool = jsc::Pool::kMax;
  a.precision = highest ? jsc::Precision::kHighest : jsc::Precision::kDefault;
  jsc::DeviceInfo h200{};
  h200.multiprocessors = 132, h200.shared_memory = 232448, h200.shared_memory_sm = 233472;
  h200.tensor_maps = h200.fast_tf32 = h200.warpgroups = true;
  constexpr int kClusters[] = {0, 132, 66, 39, 30, 22, 17, 15, 15, 7, 7, 7, 7, 7, 7, 7, 7};
  std::copy(std::begin(kClusters), std::end(kClusters), h200.clusters);
  constexpr size_t kWorkspace = size_t{1} << 31;
  const jsc::DirectChoice choice = jsc::ChooseKernel(a, element_bytes, kWorkspace, false, {}, h200);
  tile[0] = choice.warpgroup.filters, tile[1] = choice.warpgroup.splits, tile[2] = choice.warpgroup.teams;
  tile[3] = !choice.warpgroup.by_mail ? 0 : choice.warpgroup.mail_at == 0 ? 1 : 2;
  if (choice.image.filters > 0) return 1;
  if (choice.slice.filters > 0) {
    tile[0] = choice.slice.filters, tile[1] = choice.slice.splits;
    tile[2] = choice.slice.columns, tile[3] = choice.slice.warps;
    return 2;
  }
  if (choice.group.tiles > 0) return 6;
  if (choice.warpgroup.filters > 0) return 3;
  if (choice.direct.tile == jsc::DirectTile::kNone) return 0;
  return jsc::IsDeep(choice.direct.tile) ? 5 : 4;
}
