// The direct convolution's entry: chooses a kernel (direct_kernel.cuh, direct_deep.cuh, direct_slice.cuh,
// direct_warpgroup.cuh, direct_image.cuh) and its plan, then the file of the element type.
#include <map>
#include <mutex>
#include <vector>

#include "direct_image.h"
#include "direct_launch.cuh"
#include "direct_slice.h"
#include "direct_warpgroup.h"
#include "kernels.h"

namespace jsc {
namespace {

constexpr double kMostPooledParts = 1.25e8;  // products of a call: one image's 7x7 stem

// Of the kernels; that of few channels is taken wherever it has a plan, and warpgroups have one only where they are
// expected to be faster, the only one with the pool, or asked for by their tile.
struct Plans {
  ImagePlan image;
  DirectPlan direct;
  WarpgroupPlan warpgroup;
  SlicePlan slice;  // where it is expected to be faster than either
};

Plans ChoosePlans(const ConvArgs& a, int element_bytes, size_t workspace_bytes, bool in_chain, const TileChoice& tile,
                  const DeviceInfo& info) {
  Plans plans{};
  plans.image = ChooseImagePlan(a, element_bytes, info);
  if (plans.image.filters > 0) return plans;
  if (a.pool == Pool::kNone) plans.direct = ChooseDirectPlan(a, element_bytes, workspace_bytes, !in_chain, info);
  if (!info.warpgroups) return plans;
  plans.warpgroup = WarpgroupPlanOf(tile, a, element_bytes, in_chain, info);
  if (plans.warpgroup.filters > 0) return plans;
  plans.warpgroup = ChooseWarpgroupPlan(a, element_bytes, in_chain, info);
  // The other model knows no bound by memory: of calls where it expects up to a tenth less or more, warpgroups took as
  // long on an H200 (at most 5 % more) or up to a quarter less. At HIGHEST small layers take 0.85 of what it expects,
  // those of 20 us and more as long.
  // In a chain they fetch their first data earlier. Of the tiles that are small in all ways, with which 2 to 5 us are
  // compared, choices by these lose 0.9 % on average (12 % at most, but for one layer of 5x5 in 16 bits).
  constexpr double kSmall = 30000;  // cycles
  const bool parts = plans.warpgroup.parts;
  const double of_parts = plans.warpgroup.cycles < kSmall ? 1.2 : 1;
  const double of_large = in_chain ? 0.6 : parts ? of_parts : 0.9;
  const double of_deep = parts ? 0.95 : element_bytes == 2 ? 0.85 : 0.75;
  if (IsDeep(plans.direct.tile)) {
    const DirectPlan large = ChooseDirectPlan(a, element_bytes, workspace_bytes, false, info);
    if (large.cycles / of_large < plans.direct.cycles / of_deep) plans.direct = large;
  }
  const double margin = IsDeep(plans.direct.tile) ? of_deep : of_large;
  const bool is_faster = plans.direct.cycles < margin * plans.warpgroup.cycles;
  if (plans.direct.tile != DirectTile::kNone && is_faster) plans.warpgroup = {};
  if (in_chain) return plans;
  plans.slice = ChooseSlicePlan(FlattenedArgs(a), element_bytes, info);
  // By the times of 78 small layers on an H200 in each precision; models are 8 % off (rms), on either side.
  const double other = plans.warpgroup.filters > 0 ? plans.warpgroup.cycles : plans.direct.cycles / margin;
  if (plans.slice.cycles > (plans.slice.parts ? 0.9 : 0.7) * other) plans.slice = {};
  return plans;
}

Plans CachedPlans(const ConvCall& call, int element_bytes, size_t workspace_bytes, int device) {
  const ConvArgs& a = call.args;
  const TileChoice& tile = call.tile;
  const bool in_chain = call.gate.in_chain;
  static std::mutex mutex;
  static std::map<std::vector<int64_t>, Plans> known;
  const int64_t kind = static_cast<int64_t>(a.precision) * 8 + static_cast<int64_t>(a.pool) * 2 + in_chain;
  std::vector<int64_t> key = {a.images,         a.size[0],      a.size[1],
                              a.channels,       a.stacks,       a.kernel_size[0],
                              a.kernel_size[1], a.features,     a.groups,
                              a.conv_size[0],   a.conv_size[1], a.stride[0],
                              a.stride[1],      a.pad_low[0],   a.pad_low[1],
                              a.dilation[0],    a.dilation[1],  kind,
                              element_bytes,    device,         static_cast<int64_t>(workspace_bytes)};
  key.insert(key.end(), {tile.filters, tile.pixels, tile.patch, tile.splits});
  for (int i = 0; i < 2; ++i) {
    key.insert(key.end(), {a.window[i], a.window_stride[i], a.window_pad_low[i], a.out_size[i]});
  }
  const DeviceInfo& info = GetDeviceInfo(device);
  const std::lock_guard<std::mutex> lock(mutex);
  auto [entry, fresh] = known.try_emplace(key);
  if (fresh) entry->second = ChoosePlans(a, element_bytes, workspace_bytes, in_chain, tile, info);
  return entry->second;
}

// Without code for warpgroups no device has them, and no plan.
ffi::Error LaunchWarpgroupPlan(const ConvCall& call, const WarpgroupPlan& plan, const PartsMaps& maps,
                               cudaStream_t stream) {
#ifdef JSC_WARPGROUP
  if (plan.parts) return WarpgroupHighest(call, plan, maps, stream);
  if (call.dtype == ffi::DataType::F32) return WarpgroupFloat32(call, plan, maps, stream);
  const auto launch = call.dtype == ffi::DataType::BF16 ? WarpgroupBfloat16 : WarpgroupFloat16;
  return launch(call, plan, maps, stream);
#else
  (void)call, (void)plan, (void)maps, (void)stream;
  return ffi::Error(ffi::ErrorCode::kInternal, "WarpgroupKernel: not in this build");
#endif
}

}  // namespace

bool DirectPools(const ConvCall& call, int device) {
  const int bytes = call.dtype == ffi::DataType::F32 ? 4 : 2;
  if (call.args.pool == Pool::kNone) return false;
  const Plans plans = CachedPlans(call, bytes, 0, device);
  // At HIGHEST what tiles compute twice costs more than a pool behind many images.
  const ConvArgs& a = call.args;
  const double products =
      1.0 * a.images * a.conv_size[0] * a.conv_size[1] * a.features * a.kernel_size[0] * a.kernel_size[1] * a.channels;
  const bool image = plans.image.filters > 0 && (!plans.image.parts || products <= kMostPooledParts);
  return image || plans.warpgroup.filters > 0;
}

ffi::Error Direct(const ConvCall& call, Workspace workspace, int device, cudaStream_t stream) {
  return DispatchDtype(call.dtype, [&](auto element) {
    using T = decltype(element);
    const Plans plans = CachedPlans(call, sizeof(T), workspace.bytes, device);
    if (plans.image.filters > 0) return LaunchImagePlan<T>(call, plans.image, stream);
    if (plans.slice.filters > 0) {
      ConvCall flat = call;
      flat.args = FlattenedArgs(call.args);
      SliceMaps of_slices;
      if (MakeSliceMaps(flat, plans.slice, &of_slices)) return LaunchSlicePlan(flat, plans.slice, of_slices, stream);
    }
    PartsMaps maps;
    // The driver refuses buffers that do not begin at 16 bytes.
    if (plans.warpgroup.filters > 0 && MakeWarpgroupMaps(call, plans.warpgroup, &maps)) {
      return LaunchWarpgroupPlan(call, plans.warpgroup, maps, stream);
    }
    if (plans.direct.tile == DirectTile::kNone) return PerOutput(call, stream, false);
    return LaunchDirectPlan<T>(call, plans.direct, workspace.data, stream);
  });
}

}  // namespace jsc
