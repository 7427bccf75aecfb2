// COO* convolution of a CooStar: step 3 of sparse/coo/coo.cu on lists that are stored. A translation unit of its own,
// so that both compile in parallel.
#include "cuda/sparse/coo/kernel.cuh"

namespace jsc {

Error CooOfLists(const DeviceCall& call, const CooChoice& choice, const CooLists& lists, Workspace workspace,
                 int device, cudaStream_t stream) {
  return DispatchDtype(call.dtype, [&](auto element) {
    return LaunchCooVariants<decltype(element), true>(call, choice, &lists, workspace, device, stream);
  });
}

}  // namespace jsc
