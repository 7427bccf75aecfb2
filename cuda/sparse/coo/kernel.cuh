// The kernel of the COO* convolution (sparse/coo/coo.cu) and its launch, for x and for stored lists alike.
#ifndef JSC_CUDA_SPARSE_COO_KERNEL_CUH_
#define JSC_CUDA_SPARSE_COO_KERNEL_CUH_

#include "cuda/ffi/kernels.h"
#include "cuda/sparse/coo/density_range.cuh"
#include "cuda/sparse/coo/products.cuh"
#include "cuda/sparse/coo/stored.cuh"
#include "cuda/sparse/coo/sums.cuh"

namespace jsc {

// kStored: the lists come from a CooStar (sparse/coo/stored.cuh), else they are made of x.
template <typename T, int kVariant, bool kStored>
__global__ void __launch_bounds__(kWarp* kCooVariants[kVariant].max_warps(), kCooVariants[kVariant].min_blocks())
    CooKernel(const __grid_constant__ CooTask<T> task) {
  if (!InDensityRange(task.range)) return;
  extern __shared__ __align__(128) unsigned char shared[];
  using Micro = CooMicro<kVariant>;
  const CooMemory<T, kVariant> m(shared, blockDim.x / kWarp);
  Micro::Begin();
  const CooPlace b = LocateCoo<T, kVariant>(task);
  const int last = b.channels_end;
  int first = b.channel;
  if (!kStored && first < last) StageCooPatch<T, kVariant>(task, m.patch, first);
  CommitCopies();
#pragma unroll 1
  for (; first < last; first += kCooChunk) {
    WaitForCopies<0>();
    __syncthreads();  // the patch is there, the lists before have been used
    if constexpr (kStored) {
      TakeStoredLists<T, kVariant>(task, m, first);
    } else {
      ConvertCoo<T, kVariant>(m);
      if (first + kCooChunk < last) StageCooPatch<T, kVariant>(task, m.patch, first + kCooChunk);
    }
    CommitCopies();
    MultiplyChunk<T, kVariant>(task, m, first);
  }
  __syncthreads();
  auto* sums = reinterpret_cast<float*>(shared);
  StoreSums<kVariant>(sums + threadIdx.x / kWarp * Micro::kSums * kWarp,
                      std::make_integer_sequence<int, Micro::kSums>{});
  __syncthreads();
#if __CUDA_ARCH__ >= 900
  if (task.plan.cluster) {
    if (task.plan.slices > 1) AddSlices<kVariant>(sums, task.plan.out_channel_warps, task.plan.slices);
    SyncCluster();
    FinishCoo<T, kVariant>(task, static_cast<int>(cooperative_groups::this_cluster().block_rank()), task.plan.splits,
                           task.plan.splits, [&](int split, int i) { return Load4OfBlock(sums + i, split); });
    SyncCluster();  // a block's sums stay until all have read them
    return;
  }
#endif
  const int slice_sums = task.plan.out_channel_warps * Micro::kSums * kWarp;
  FinishCoo<T, kVariant>(task, 0, 1, task.plan.slices,
                         [&](int slice, int i) { return Load4(sums + slice * slice_sums + i); });
}

template <typename T, int kVariant, bool kStored>
Error LaunchCoo(const CooTask<T>& task, cudaStream_t stream) {
  Error error = Prepare<CooKernel<T, kVariant, kStored>>("CooKernel");
  if (error.failure()) return error;
  const CooPlan& plan = task.plan;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(plan.blocks));
  config.blockDim = dim3(kWarp * plan.out_channel_warps * plan.slices);
  config.dynamicSmemBytes = plan.shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = plan.splits;
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  config.attrs = &attribute;
  config.numAttrs = plan.cluster ? 1 : 0;
  constexpr auto kKernel = CooKernel<T, kVariant, kStored>;
  return CheckCuda(cudaLaunchKernelEx(&config, kKernel, task), "CooKernel");
}

template <typename T>
using CooLauncher = Error (*)(const CooTask<T>&, cudaStream_t);

template <typename T, bool kStored, int... kVariant>
CooLauncher<T> LauncherOf(int variant, std::integer_sequence<int, kVariant...>) {
  static constexpr CooLauncher<T> kLaunchers[] = {&LaunchCoo<T, kVariant, kStored>...};
  return kLaunchers[variant];
}

// The variants of a call one after the other, of which the one runs that is for the density of x.
template <typename T, bool kStored>
Error LaunchCooVariants(const DeviceCall& call, const CooChoice& choice, const CooLists* lists, Workspace workspace,
                        int device, cudaStream_t stream) {
  for (int i = 0; i < choice.count; ++i) {
    CooPlan plan = choice.plans[i];
    const std::string wrong = CompleteCooPlan(call.args, sizeof(T), workspace.bytes, GetDeviceInfo(device), &plan);
    if (!wrong.empty()) return Error(ErrorCode::kInvalidArgument, "jsc_coo: " + wrong);
    CooTask<T> task = MakeCooTask<T>(call, plan, workspace.data);
    task.range = RangeOf(choice, i);
    if constexpr (kStored) task.stored = MakeCooStored<T>(*lists);
    Error error =
        LauncherOf<T, kStored>(plan.variant, std::make_integer_sequence<int, kCooVariantCount>{})(task, stream);
    if (error.failure()) return error;
    if (plan.splits == 1 || plan.cluster) continue;
    const int64_t total = call.args.images * call.args.conv_size[0] * call.args.conv_size[1] * call.args.out_channels;
    CooReduceKernel<T><<<static_cast<unsigned>((total + 1023) / 1024), 256, 0, stream>>>(task, static_cast<int>(total));
    error = CheckCuda(cudaGetLastError(), "CooReduceKernel");
    if (error.failure()) return error;
  }
  return Error::Success();
}

}  // namespace jsc

#endif  // JSC_CUDA_SPARSE_COO_KERNEL_CUH_
