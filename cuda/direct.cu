// The direct convolution's entry: chooses a plan, then the file of the element type. See direct_kernel.cuh.
#include <map>
#include <mutex>
#include <vector>

#include "direct_launch.cuh"
#include "kernels.h"

namespace jsc {
namespace {

DirectPlan CachedDirectPlan(const ConvArgs& a, int element_bytes, size_t workspace_bytes, int device) {
  static std::mutex mutex;
  static std::map<std::vector<int64_t>, DirectPlan> known;
  const std::vector<int64_t> key = {a.images,         a.size[0],      a.size[1],
                                    a.channels,       a.stacks,       a.kernel_size[0],
                                    a.kernel_size[1], a.features,     a.groups,
                                    a.conv_size[0],   a.conv_size[1], static_cast<int64_t>(a.precision),
                                    element_bytes,    device,         static_cast<int64_t>(workspace_bytes)};
  const DeviceInfo& info = GetDeviceInfo(device);
  const std::lock_guard<std::mutex> lock(mutex);
  auto [entry, fresh] = known.try_emplace(key);
  if (fresh) entry->second = ChooseDirectPlan(a, element_bytes, workspace_bytes, info);
  return entry->second;
}

}  // namespace

ffi::Error Direct(const ConvCall& call, Workspace workspace, int device, cudaStream_t stream) {
  return DispatchDtype(call.dtype, [&](auto element) {
    using T = decltype(element);
    const DirectPlan plan = CachedDirectPlan(call.args, sizeof(T), workspace.bytes, device);
    if (plan.tile == DirectTile::kNone) return PerOutput(call, stream, false);
    return LaunchDirectPlan<T>(call, plan, workspace.data, stream);
  });
}

}  // namespace jsc
