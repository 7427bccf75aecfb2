// Launches a planned direct convolution of few channels; a file for each element type, so that they compile apart.
#ifndef JSC_CUDA_DIRECT_IMAGE_H_
#define JSC_CUDA_DIRECT_IMAGE_H_

#include "common.cuh"
#include "direct_image_plan.h"

namespace jsc {

template <typename T>
ffi::Error LaunchImagePlan(const ConvCall& call, const ImagePlan& plan, cudaStream_t stream);

template <>
ffi::Error LaunchImagePlan<float>(const ConvCall&, const ImagePlan&, cudaStream_t);
template <>
ffi::Error LaunchImagePlan<__nv_bfloat16>(const ConvCall&, const ImagePlan&, cudaStream_t);
template <>
ffi::Error LaunchImagePlan<__half>(const ConvCall&, const ImagePlan&, cudaStream_t);

}  // namespace jsc

#endif  // JSC_CUDA_DIRECT_IMAGE_H_
