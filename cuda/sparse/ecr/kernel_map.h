// The kernel and x of ECR and PECR as TMA reads them: tensor maps.
#ifndef JSC_CUDA_SPARSE_ECR_KERNEL_MAP_H_
#define JSC_CUDA_SPARSE_ECR_KERNEL_MAP_H_

#include <cuda.h>

#include "cuda/sparse/ecr/plan.h"

namespace jsc {

// Passed to a kernel by value.
struct TensorMaps {
  CUtensorMap kernel;  // [S * kh * kw, C / groups, K], boxes [chunk taps, chunk channels, tile output channels]
  CUtensorMap x;       // [N, H, W, C], boxes [tile images, patch rows, patch columns, chunk channels]
};

// Fills the maps that the plan uses, whose boxes are one stage of it. False where the driver refuses.
bool MakeTensorMaps(const DeviceCall& call, const EcrPlan& plan, TensorMaps* maps);

}  // namespace jsc

#endif  // JSC_CUDA_SPARSE_ECR_KERNEL_MAP_H_
