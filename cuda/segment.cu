// A segment's entry: cuts its layers, describes them to the kernel and launches it. See segment_kernel.cuh.
#include <memory>

#include "kernels.h"
#include "segment_kernel.cuh"

namespace jsc {
namespace {

template <typename T>
SegmentLayer<T> MakeLayer(const SegmentStep& step, const SegmentWork& work) {
  SegmentLayer<T> layer{};
  layer.x = static_cast<const T*>(step.x.data);
  layer.kernel = static_cast<const T*>(step.kernel);
  layer.bias = static_cast<const T*>(step.bias);
  layer.residual = static_cast<const T*>(step.residual);
  layer.out = static_cast<T*>(step.out.data);
  layer.kind = step.kind;
  layer.relu = step.relu;
  layer.pixels = static_cast<int>(step.out.size[0] * step.out.size[1] * step.out.size[2]);
  layer.height = static_cast<int>(step.x.size[1]);
  layer.width = static_cast<int>(step.x.size[2]);
  layer.channels = static_cast<int>(step.x.size[3]);
  layer.features = static_cast<int>(step.out.size[3]);
  for (int i = 0; i < 2; ++i) {
    layer.stride[i] = static_cast<int>(step.stride[i]);
    layer.pad_low[i] = static_cast<int>(step.pad_low[i]);
    layer.dilation[i] = static_cast<int>(step.dilation[i]);
    layer.reach[i] = static_cast<int>(step.window[i] * step.dilation[i]);
  }
  layer.by_out_height = Divider(step.out.size[1]);
  layer.by_out_width = Divider(step.out.size[2]);
  layer.by_kernel_width = Divider(step.window[1]);
  if (step.kind != SegmentKind::kConv) return layer;
  layer.narrow = work.narrow;
  layer.warps_p = work.cut.warps_p;
  layer.warps_f = work.cut.warps_f;
  layer.warps_k = work.cut.warps_k;
  layer.splits_log = work.cut.splits_log;
  layer.pieces_per_split = work.per_split;
  layer.pieces = work.pieces;
  layer.tiles = work.tiles;
  layer.units = work.units;
  layer.by_feature_tiles = Divider(work.feature_tiles);
  layer.by_channels = Divider(step.x.size[3]);
  layer.by_tap_pieces = Divider(work.tap_pieces);
  return layer;
}

template <typename T, bool kPrecise>
ffi::Error Launch(const SegmentCall& call, int clusters, cudaStream_t stream) {
  constexpr auto kKernel = SegmentKernel<T, kPrecise>;
  ffi::Error error = Prepare<kKernel>("SegmentKernel");
  if (error.failure()) return error;
  const auto task = std::make_unique<SegmentTask<T>>();
  task->arrivals = static_cast<unsigned*>(call.counter);
  task->clusters = clusters;
  for (size_t i = 0; i < call.steps.size(); ++i) {
    const SegmentStep& step = call.steps[i];
    SegmentWork work{};
    if (step.kind == SegmentKind::kConv) {
      work = ChooseSegmentCut(step, sizeof(T), kPrecise, clusters);
      if (!MakeSegmentMaps(step, work, call.dtype, kPrecise, &task->maps[i])) {
        return ffi::Error(ffi::ErrorCode::kInternal, "the driver made no tensor map of layer " + std::to_string(i));
      }
    }
    task->layers[i] = MakeLayer<T>(step, work);
    SegmentPhase& phase = task->phases[step.phase];
    if (phase.count == 0) phase.first = static_cast<short>(i);
    ++phase.count;
    phase.units += work.units;
    task->phase_count = step.phase + 1;
  }
  error = CheckCuda(cudaMemsetAsync(call.counter, 0, sizeof(unsigned), stream), "cudaMemsetAsync");
  if (error.failure()) return error;
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = kSegmentCluster;
  attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
  attributes[1].id = cudaLaunchAttributeCooperative;  // all blocks run at once, or none: they wait for each other
  attributes[1].val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(clusters) * kSegmentCluster);
  config.blockDim = dim3(kSegmentThreads);
  config.dynamicSmemBytes = kSegmentShared;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 2;
  return CheckCuda(cudaLaunchKernelEx(&config, kKernel, *task), "SegmentKernel");
}

}  // namespace

ffi::Error Segment(const SegmentCall& call, int device, cudaStream_t stream) {
  const DeviceInfo& info = GetDeviceInfo(device);
  if (const std::string why = WhyNoSegment(call, info); !why.empty()) {
    return ffi::Error(ffi::ErrorCode::kUnimplemented, "jsc_segment cannot run this call: " + why);
  }
  const int clusters = info.clusters[kSegmentCluster];
  return DispatchDtype(call.dtype, [&](auto element) {
    using T = decltype(element);
    if constexpr (sizeof(T) == 4) {
      if (call.precise) return Launch<T, true>(call, clusters, stream);
    }
    return Launch<T, false>(call, clusters, stream);
  });
}

}  // namespace jsc
