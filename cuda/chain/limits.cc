#include "cuda/chain/limits.h"

#include <algorithm>
#include <stdexcept>

#include "cuda/dense_conv/plan/choice.h"
#include "cuda/sparse/matvec/row_limits.h"

namespace jsc {
namespace {

constexpr int64_t kCopyBytes = 16;
// Of a group: half a tile of 64. With fewer most of it is empty, unless the kernel of groups takes the layer.
constexpr int64_t kLeastGroupOutChannels = 32;

std::string Text(int64_t number) { return std::to_string(number); }

Family FamilyOf(const ConvArgs& a, int element_bytes, const DeviceInfo& device) {
  constexpr size_t kWorkspace = size_t{1} << 31;
  return CandidateOf(ChooseKernel(a, element_bytes, kWorkspace, true, {}, device)).family;
}

std::string WhyNot(ConvArgs a, int element_bytes, const DeviceInfo& device) {
  for (int i = 0; i < 2; ++i) {
    if ((a.kernel_size[i] - 1) * a.dilation[i] > kFar) return "its window is too large";
  }
  if (a.out_channels * element_bytes % kCopyBytes != 0) {
    return "K=" + Text(a.out_channels) + " does not come in whole " + Text(kCopyBytes) + " bytes";
  }
  if (a.pool == Pool::kAverage) return "its pool is an average";
  const ConvArgs with_pool = a;
  Family family = FamilyOf(a, element_bytes, device);
  if (family == Family::kPerOutput && a.pool != Pool::kNone) {  // the pool is then a step of its own
    a.pool = Pool::kNone;
    for (int i = 0; i < 2; ++i) a.out_size[i] = a.conv_size[i], a.window[i] = a.window_stride[i] = 1;
    family = FamilyOf(a, element_bytes, device);
  }
  if (family == Family::kPerOutput) return "no dense kernel takes its channels and groups";
  if (a.group_channels * element_bytes % kCopyBytes != 0 && family != Family::kFewChannels) {
    return "its channels do not come in whole " + Text(kCopyBytes) + " bytes, and are copied one by one";
  }
  const bool is_narrow = a.groups > 1 && a.out_channels / a.groups < kLeastGroupOutChannels;
  if (is_narrow && !(device.wgmma && ChooseGroupedPlan(with_pool, element_bytes, device).tiles > 0)) {
    return "its " + Text(a.groups) + " groups are too narrow";
  }
  return "";
}

}  // namespace

std::string WhyNotInChain(const std::vector<int64_t>& layer, const std::vector<int64_t>& pool, int element_bytes,
                          bool precise, const DeviceInfo& device) {
  ConvArgs args;
  for (const size_t size : {0, 1, 2, 3, 6}) {
    if (size < layer.size() && layer[size] < 1) return "it has nothing to compute";
  }
  try {
    args = ArgsOfLayer(layer, pool, precise);
  } catch (const std::invalid_argument& wrong) {
    return wrong.what();
  }
  return WhyNot(args, element_bytes, device);
}

std::string WhyNotInChain(const ChainDense& dense, int element_bytes, int64_t shared_memory) {
  const int64_t channels = dense.channels, out_channels = dense.out_channels;
  if (dense.rows != 1 || dense.kernels != 1) {
    return "it is a product of " + Text(dense.rows) + " rows and " + Text(dense.kernels) + " kernels, not of one";
  }
  if (dense.has_residual || std::min(channels, out_channels) < 1) return "it has a residual, or nothing to compute";
  if (!HasWholePieces(channels, out_channels, element_bytes)) {
    return "C=" + Text(channels) + " or K=" + Text(out_channels) + " does not come in whole " + Text(kLaneBytes) +
           " bytes";
  }
  if (shared_memory > 0 && !FitsRow(channels, element_bytes, shared_memory)) {
    return "its C=" + Text(channels) + " inputs do not fit shared memory";
  }
  return channels <= kMaxElements / out_channels ? "" : "its kernel is too large";
}

}  // namespace jsc
