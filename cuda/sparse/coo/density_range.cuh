// Which of several kernels on the stream runs, by the density of x: a range for each, which together are all densities.
#ifndef JSC_CUDA_SPARSE_COO_DENSITY_RANGE_CUH_
#define JSC_CUDA_SPARSE_COO_DENSITY_RANGE_CUH_

#include "cuda/core/density.cuh"
#include "cuda/sparse/coo/task.cuh"

namespace jsc {

// Whether the density of x lies in the range: the first thing that a kernel asks, with all threads of its warps. The
// answer is the same for the whole grid. Neighbouring ranges compare the same two floats, and so does PassesGate, which
// adds up in this order.
__device__ inline bool InDensityRange(const DensityRange& range) {
  if (range.nonzeros == nullptr) return true;
  const auto* rows = reinterpret_cast<const int2*>(range.nonzeros);
  float nonzeros = 0.f, elements = 0.f;
#pragma unroll 1
  for (int i = threadIdx.x % kWarp; i < range.rows; i += kWarp) {
    const int2 row = rows[i];
    nonzeros += static_cast<float>(row.x);
    elements += static_cast<float>(row.y);
  }
  nonzeros = WarpSum(nonzeros), elements = WarpSum(elements);
  const bool closed = (range.has_above && !(nonzeros > range.above * elements)) ||
                      (range.has_at_most && nonzeros > range.at_most * elements);
  return !__any_sync(0xffffffffu, closed);  // by a vote: see PassesGate
}

}  // namespace jsc

#endif  // JSC_CUDA_SPARSE_COO_DENSITY_RANGE_CUH_
