// Plans of earlier calls, by device. The planners know no devices, so they cannot keep them.
#include <map>
#include <mutex>
#include <vector>

#include "cuda/sparse/ecr/plan.h"

namespace jsc {

EcrPlan CachedEcrPlan(const DeviceCall& call, int element_bytes, size_t workspace_bytes, int device) {
  constexpr size_t kMostPlans = 4096;  // of different calls: beyond that all are forgotten
  static std::mutex mutex;
  static std::map<std::vector<int64_t>, EcrPlan> known;
  const ConvArgs& a = call.args;
  const std::vector<int64_t> key = {
      a.images,      a.size[0],        a.size[1],          a.channels,
      a.stacks,      a.kernel_size[0], a.kernel_size[1],   a.out_channels,
      a.groups,      a.stride[0],      a.stride[1],        a.dilation[0],
      a.dilation[1], a.conv_size[0],   a.conv_size[1],     static_cast<int64_t>(a.pool),
      a.window[0],   a.window[1],      a.window_stride[0], a.window_stride[1],
      a.out_size[0], a.out_size[1],    element_bytes,      static_cast<int64_t>(workspace_bytes),
      device};
  const DeviceInfo& info = GetDeviceInfo(device);
  if (call.candidate.family == Family::kEcr) return EcrPlanOf(call.candidate, a, element_bytes, workspace_bytes, info);
  const std::lock_guard<std::mutex> lock(mutex);
  if (known.size() >= kMostPlans && known.find(key) == known.end()) known.clear();
  auto [entry, fresh] = known.try_emplace(key);
  if (fresh) entry->second = ChooseEcrPlan(a, element_bytes, workspace_bytes, info);
  return entry->second;
}

}  // namespace jsc
