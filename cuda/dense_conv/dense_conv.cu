// The dense convolution's entry: has an engine and its plan chosen (dense_conv/plan/choice.cc), then calls the
// instantiation for the element type.
#include <map>
#include <mutex>
#include <vector>

#include "cuda/dense_conv/few_channels/launch.h"
#include "cuda/dense_conv/grouped/launch.h"
#include "cuda/dense_conv/mma/launch.h"
#include "cuda/dense_conv/plan/choice.h"
#include "cuda/dense_conv/splitk_channels/launch.h"
#include "cuda/dense_conv/wgmma/launch.h"
#include "cuda/ffi/kernels.h"

namespace jsc {
namespace {

DenseConvChoice CachedChoice(const DeviceCall& call, int element_bytes, size_t workspace_bytes, int device) {
  const ConvArgs& a = call.args;
  const bool in_chain = call.gate.in_chain;
  static std::mutex mutex;
  static std::map<std::vector<int64_t>, DenseConvChoice> known;
  const int64_t kind =
      static_cast<int64_t>(a.precision) * 8 + static_cast<int64_t>(a.pool) * 2 + in_chain + 64 * a.has_residual;
  std::vector<int64_t> key = {a.images,         a.size[0],      a.size[1],
                              a.channels,       a.stacks,       a.kernel_size[0],
                              a.kernel_size[1], a.out_channels, a.groups,
                              a.conv_size[0],   a.conv_size[1], a.stride[0],
                              a.stride[1],      a.pad_low[0],   a.pad_low[1],
                              a.dilation[0],    a.dilation[1],  kind,
                              element_bytes,    device,         static_cast<int64_t>(workspace_bytes)};
  key.push_back(static_cast<int64_t>(call.candidate.family));
  key.insert(key.end(), std::begin(call.candidate.tile), std::end(call.candidate.tile));
  for (int i = 0; i < 2; ++i) {
    key.insert(key.end(), {a.window[i], a.window_stride[i], a.window_pad_low[i], a.out_size[i]});
  }
  const DeviceInfo& info = GetDeviceInfo(device);
  const std::lock_guard<std::mutex> lock(mutex);
  auto [entry, fresh] = known.try_emplace(key);
  if (fresh) entry->second = ChooseKernel(a, element_bytes, workspace_bytes, in_chain, call.candidate, info);
  return entry->second;
}

// A build without wgmma has no device with it, and no such plan.
template <typename T>
Error LaunchWgmmaKernel(const DeviceCall& call, const WgmmaPlan& plan, const Tf32x3Maps& maps, cudaStream_t stream) {
#ifdef JSC_WGMMA
  return plan.tf32x3 ? LaunchWgmmaHighest(call, plan, maps, stream) : LaunchWgmmaPlan<T>(call, plan, maps, stream);
#else
  (void)call, (void)plan, (void)maps, (void)stream;
  return Error(ErrorCode::kInternal, "WgmmaKernel: not in this build");
#endif
}

// Whether every buffer begins at 16 bytes, as copies and results of several elements ask for.
bool IsAligned(const DeviceCall& call) {
  for (const void* p : {call.x, call.kernel, call.bias, call.residual, static_cast<const void*>(call.out)}) {
    if (reinterpret_cast<uintptr_t>(p) % kUnitBytes != 0) return false;
  }
  return true;
}

}  // namespace

bool DirectPools(const DeviceCall& call, int device) {
  const int bytes = call.dtype == DataType::F32 ? 4 : 2;
  return call.args.pool != Pool::kNone && PoolsInKernel(CachedChoice(call, bytes, 0, device), call.args);
}

Error Direct(const DeviceCall& call, Workspace workspace, int device, cudaStream_t stream) {
  return DispatchDtype(call.dtype, [&](auto element) {
    using T = decltype(element);
    const DenseConvChoice choice = CachedChoice(call, sizeof(T), workspace.bytes, device);
    const Family family = call.candidate.family;
    const bool is_told = family != Family::kByModel && family != Family::kPerOutput && !call.gate.in_chain;
    if (is_told && !choice.has_plan()) return NoSuchTile();
    if (choice.few_channels.out_channels > 0) return LaunchFewChannelsPlan<T>(call, choice.few_channels, stream);
    if (choice.splitk_channels.out_channels > 0) {
      DeviceCall flat = call;
      flat.args = FlattenedArgs(call.args);
      SplitKChannelsMaps of_splitk_channels;
      if (MakeSplitKChannelsMaps(flat, choice.splitk_channels, &of_splitk_channels))
        return LaunchSplitKChannelsPlan<float>(flat, choice.splitk_channels, of_splitk_channels, stream);
    }
    if (choice.grouped.tiles > 0 && IsAligned(call)) return LaunchGroupedPlan<T>(call, choice.grouped, stream);
    Tf32x3Maps maps;
    // The driver refuses buffers that do not begin at 16 bytes.
    if (choice.wgmma.out_channels > 0 && MakeWgmmaMaps(call, choice.wgmma, &maps)) {
      return LaunchWgmmaKernel<T>(call, choice.wgmma, maps, stream);
    }
    if (choice.mma.tile == MmaTile::kNone) return PerOutput(call, stream, false);
    return LaunchMmaPlan<T>(call, choice.mma, workspace.data, stream);
  });
}

}  // namespace jsc
