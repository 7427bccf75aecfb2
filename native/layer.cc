#include "native/layer.h"

#include <algorithm>
#include <stdexcept>

namespace jsc {

ConvArgs ArgsOfLayer(const std::vector<int64_t>& layer, const std::vector<int64_t>& pool, bool precise) {
  constexpr size_t kLayer = 16, kPool = 8;
  if ((layer.size() != kLayer && layer.size() != kLayer + 1) ||
      (!pool.empty() && pool.size() != kPool && pool.size() != kPool + 1)) {
    throw std::invalid_argument("layer must have 16 or 17 entries and pool 8, 9 or none");
  }
  ConvArgs a{};
  a.images = layer[0];
  a.channels = layer[3];
  a.out_channels = layer[6];
  a.groups = layer[15];
  a.stacks = 1;
  a.has_residual = layer.size() > kLayer && layer[kLayer] != 0;
  const auto size_of = [](int64_t size, int64_t reach, int64_t stride) {
    const int64_t span = size - reach;
    if (span < 0) throw std::invalid_argument("a window is larger than its map");
    return span / stride + 1;
  };
  for (int64_t field : {a.images, a.channels, a.out_channels, a.groups}) {
    if (field < 1 || field > kMaxElements)
      throw std::invalid_argument("images, channels, output channels and groups must be 1 or more");
  }
  for (int i = 0; i < 2; ++i) {
    const int64_t size = layer[1 + i], window = layer[4 + i], stride = layer[7 + i], dilation = layer[13 + i];
    for (int64_t field : {size, window, stride, dilation}) {
      if (field < 1 || field > kFar) throw std::invalid_argument("sizes and strides must be 1 to 8192");
    }
    const int64_t low = layer[9 + 2 * i], high = layer[10 + 2 * i];
    if (std::min(low, high) < -kFar || std::max(low, high) > kFar)
      throw std::invalid_argument("padding is at most 8192");
    a.size[i] = size;
    a.kernel_size[i] = window;
    a.stride[i] = stride;
    a.dilation[i] = dilation;
    a.pad_low[i] = low;
    a.conv_size[i] = a.out_size[i] = size_of(size + low + high, (window - 1) * dilation + 1, stride);
    a.window[i] = a.window_stride[i] = 1;
    if (pool.empty()) continue;
    const int64_t pads[] = {pool[4 + 2 * i], pool[5 + 2 * i]};
    for (int64_t field : {pool[i], pool[2 + i], pads[0] + 1, pads[1] + 1}) {
      if (field < 1 || field > kFar) throw std::invalid_argument("a pool's windows and strides must be 1 to 8192");
    }
    a.window[i] = pool[i];
    a.window_stride[i] = pool[2 + i];
    a.window_pad_low[i] = pads[0];
    a.out_size[i] = size_of(a.conv_size[i] + pads[0] + pads[1], pool[i], pool[2 + i]);
  }
  if (a.channels % a.groups != 0 || a.out_channels % a.groups != 0) {
    throw std::invalid_argument("groups must divide channels and output channels");
  }
  a.group_channels = a.channels / a.groups;
  const int64_t deep = a.kernel_size[0] * a.kernel_size[1], results = a.conv_size[0] * a.conv_size[1];
  if (a.size[0] * a.size[1] > kMaxElements / a.images / a.channels ||
      results > kMaxElements / a.images / a.out_channels || deep > kMaxElements / a.group_channels / a.out_channels) {
    throw std::invalid_argument("maps and kernel must have at most 2^31 - 1 elements");
  }
  if (!pool.empty()) a.pool = pool.size() > kPool && pool[kPool] == 2 ? Pool::kAverage : Pool::kMax;
  a.precision = precise ? Precision::kHighest : Precision::kDefault;
  return a;
}

}  // namespace jsc
