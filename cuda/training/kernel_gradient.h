// Room: gradients of kernels in training, float32 at HIGHEST. This header launches one.
// Beside this file: the planner (kernel_gradient_plan.h), maps and checks (kernel_gradient_call.cc) and the kernels
// (kernel_gradient.cu), code for sm_90a alone.
// May change: tiles and pipelines, while results stay bitwise repeatable.
// Tests: tests/gradients/test_gpu_gradient.py.
#ifndef JSC_CUDA_TRAINING_KERNEL_GRADIENT_H_
#define JSC_CUDA_TRAINING_KERNEL_GRADIENT_H_

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "cuda/training/kernel_gradient_plan.h"

namespace jsc {

struct KernelGradientBuffers {
  const float* x;          // [N, H, W, C]
  const float* cotangent;  // [N, Ho, Wo, K]
  float* out;              // [kh, kw, C, K]
  void* workspace;
  size_t workspace_bytes;
};

Error KernelGradient(const ConvArgs& args, const KernelGradientPlan& plan, const KernelGradientBuffers& buffers,
                     cudaStream_t stream);

struct KernelGradientMaps {
  CUtensorMap x, cotangent;
};
Error LaunchKernelGradient(const ConvArgs& args, const KernelGradientPlan& plan, const KernelGradientBuffers& buffers,
                           const KernelGradientMaps& maps, cudaStream_t stream);

}  // namespace jsc

#endif  // JSC_CUDA_TRAINING_KERNEL_GRADIENT_H_
