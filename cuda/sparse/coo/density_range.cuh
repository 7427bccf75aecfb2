// Which of several kernels on the stream runs, by the density of x: a range for each, which together are all densities.
#ifndef JSC_CUDA_SPARSE_COO_DENSITY_RANGE_CUH_
#define JSC_CUDA_SPARSE_COO_DENSITY_RANGE_CUH_

#include "cuda/core/density.cuh"
#include "cuda/sparse/coo/task.cuh"

namespace jsc {

// Whether the density of x lies in the range: the first thing that a kernel asks, with all threads of its warps. The
// answer is the same for the whole grid.
__device__ inline bool InDensityRange(const DensityRange& range) {
  if (range.nonzeros == nullptr) return true;
  const float2 found = NonzerosOf(range.nonzeros, range.rows);
  const bool closed = (range.has_above && !(found.x > range.above * found.y)) ||
                      (range.has_at_most && found.x > range.at_most * found.y);
  return !__any_sync(0xffffffffu, closed);  // by a vote: see PassesGate
}

}  // namespace jsc

#endif  // JSC_CUDA_SPARSE_COO_DENSITY_RANGE_CUH_
