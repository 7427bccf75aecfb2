// The gradient of a kernel at HIGHEST, by Hopper's warpgroup products.
//
// Computes out[tap][channel][output channel] = sum over results of x under the tap * cotangent, in 3xTF32
//   (docs/design/kernels/highest.md), float32 without groups.
// Layout: channels are the rows of a product, output channels its columns, and results what it sums over. TF32 products
//   take both operands along the sum, but NHWC has it across. So x goes to registers, from where a tap is a shift of
//   rows. The cotangent has no shifts: a third warpgroup transposes each step's box of it, once for all taps.
// Why this tiling: three taps of a row meet the same x and cotangent, which are copied once for them. Two warpgroups
//   with 64 channels each, or with every other step, share the transposed cotangent.
// Order of results in a product: what a thread reads of x lies in rows 2 apart (1 apart with stride 2), which the
//   swizzle keeps in banks of their own. The transposed cotangent has the same order. Its rows are output channels 0,
//   4, 8 and so on, then 1, 5 and so on: so it is written without bank conflicts, and a thread has four neighbours of
//   each result.
// Deterministic: each split of the steps has partial sums, which a second kernel adds in order.
// Not finite: infinities, and values that round up to one, leave NaN; the second kernel computes those again.
// Bound by: shared memory, which is busy nearly as long as the tensor cores.
#include "cuda/core/launch.cuh"
#include "cuda/training/kernel_gradient_copies.cuh"
#include "cuda/training/kernel_gradient_partials.cuh"
#include "cuda/training/kernel_gradient_products.cuh"

namespace jsc {
namespace {

template <int kTiles>
__global__ void __launch_bounds__(kGradientThreads, 1)
    KernelGradientKernel(const __grid_constant__ KernelGradientTask task,
                         const __grid_constant__ KernelGradientMaps maps) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ unsigned char shared[];
  __shared__ KernelGradientBarriers barriers;
  const uint32_t stages = (SharedAddress(shared) + kSwizzleBytes - 1) & ~(uint32_t{kSwizzleBytes} - 1);
  if (threadIdx.x == 0) {
    const int readers = kWarpgroup / kWarp * (task.shares_channels ? 1 : kMultiplyingGroups);
    for (int i = 0; i < kMostGradientStages; ++i) {
      InitBarrier(barriers.full + i);
      InitBarrier(barriers.transposed + i, kWarpgroup / kWarp);
      InitBarrier(barriers.free + i, readers);
    }
    FenceBarriers();
    PrefetchMap(maps.x);
    PrefetchMap(maps.cotangent);
  }
  __syncthreads();
  const KernelGradientPlace at = FindPlace(task, task.by_taps ? kTiles : 1);
  if (threadIdx.x >= kMultiplyingGroups * kWarpgroup) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCopyingRegisters));
    KernelGradientProducer{task, maps, at, barriers, stages}.Run();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kMultiplyingRegisters));
    KernelGradientConsumer<kTiles>(task, at, barriers, stages).Run();
  }
#endif
}

template <int kTiles>
Error LaunchTiles(const KernelGradientTask& task, const KernelGradientMaps& maps, int64_t blocks, int shared,
                  cudaStream_t stream) {
  if (Error error = Prepare<KernelGradientKernel<kTiles>>("the gradient of a kernel"); error.failure()) return error;
  cudaFuncAttributes code{};  // warpgroups take registers from each other, so there must be so many
  if (const cudaError_t status = cudaFuncGetAttributes(&code, KernelGradientKernel<kTiles>)) {
    return CheckCuda(status, "the gradient of a kernel");
  }
  if (code.numRegs * (kMultiplyingGroups + 1) < kMultiplyingRegisters * kMultiplyingGroups + kCopyingRegisters) {
    return Error(ErrorCode::kInternal, "the gradient of a kernel was compiled with too few registers");
  }
  KernelGradientKernel<kTiles><<<static_cast<unsigned>(blocks), kGradientThreads, shared, stream>>>(task, maps);
  return CheckCuda(cudaGetLastError(), "the gradient of a kernel");
}

}  // namespace

Error LaunchKernelGradient(const ConvArgs& a, const KernelGradientPlan& plan, const KernelGradientBuffers& buffers,
                           const KernelGradientMaps& maps, cudaStream_t stream) {
  const KernelGradientTask task = MakeKernelGradientTask(a, plan, buffers);
  const int64_t blocks = plan.kinds() * plan.splits;
  const auto launch = plan.tiles == 1 ? LaunchTiles<1> : plan.tiles == 2 ? LaunchTiles<2> : LaunchTiles<3>;
  const int shared = plan.stages * plan.stage_bytes + kSwizzleBytes;
  if (Error error = launch(task, maps, blocks, shared, stream); error.failure()) return error;
  const int64_t quads = a.kernel_size[0] * a.kernel_size[1] * a.channels * a.out_channels / 4;
  constexpr int kSharers = 8;
  if (task.partial_count > kManyPartials) {
    const dim3 block(kAdders / kSharers, kSharers);
    AddPartialsKernel<kSharers><<<static_cast<unsigned>(DivideUp(quads, block.x)), block, 0, stream>>>(task);
  } else {
    AddPartialsKernel<1><<<static_cast<unsigned>(DivideUp(quads, kAdders)), kAdders, 0, stream>>>(task);
  }
  return CheckCuda(cudaGetLastError(), "the partial sums of a kernel's gradient");
}

}  // namespace jsc
