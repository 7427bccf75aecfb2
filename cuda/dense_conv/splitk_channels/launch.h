// Launches the engine splitk_channels, which is for float32. The template is instantiated in cuda/instantiate.cu.in.
#ifndef JSC_CUDA_DENSE_CONV_SPLITK_CHANNELS_LAUNCH_H_
#define JSC_CUDA_DENSE_CONV_SPLITK_CHANNELS_LAUNCH_H_

#include <cuda_runtime_api.h>

#include "cuda/dense_conv/splitk_channels/maps.h"

namespace jsc {

// call.args: as FlattenedArgs gives them
template <typename T>
Error LaunchSplitKChannelsPlan(const DeviceCall& call, const SplitKChannelsPlan& plan, const SplitKChannelsMaps& maps,
                               cudaStream_t stream);

}  // namespace jsc

#endif  // JSC_CUDA_DENSE_CONV_SPLITK_CHANNELS_LAUNCH_H_
