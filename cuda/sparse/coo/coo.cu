// COO* convolution (Xiang et al. 2022, section 3.4): convolution, bias, residual and ReLU over lists of the non-zeros
// of each tile and channel of x. Details: docs/design/kernels/coo_star.md.
//
// What: a block computes TH x TW results for 32 * out_channel_warps * KT output channels, KT of them per thread. All
// their sums stay in registers (output stationary).
//
// How, per chunk of 32 input channels of the block (1 and 2 in sparse/coo/lists.cuh):
//   1. The tile's patch of x with its halo comes to shared memory by cp.async, during the chunk before.
//   2. Convert: a lane owns a channel, each warp a run of positions. They count, synchronise, and write (value,
//      position) to the channel's list, in the order of position. Every list has room for all positions, so there is no
//      prefix sum over lists and no atomic.
//   3. Multiply: the warps of a slice take the channels whose share of the chunk's non-zeros falls to it. So slices
//      share work and not channels. A channel's weights stream through two buffers of a warp by cp.async, each lane its
//      own. They are in registers while sparse/coo/micro.cuh runs over the list.
// Then (sparse/coo/sums.cuh) the slices' sums are added in shared memory and the block writes results. With splits > 1
// its partial sums are reduced once more: blocks of a cluster read each other's shared memory; without clusters sums go
// through the workspace and CooReduceKernel. The order is fixed either way and there are no atomics, so results repeat
// bit for bit.
//
// Layout: x NHWC, kernel HWIO. Threads lie along output channels, so weights, sums and results are coalesced.
//
// Bound by: an entry costs 8 instructions around its FFMAs (16 inside a 4x4 tile with KT = 4, 11 inside 7x7 with KT =
// 2) and some 80 cycles of latency, which other warps hide. At high sparsity by weights: R * R words for each tile,
// channel and output channel, whatever the non-zeros.
#include "cuda/ffi/kernels.h"
#include "cuda/sparse/coo/lists.cuh"
#include "cuda/sparse/coo/sums.cuh"

namespace jsc {
namespace {

// Asks for one channel's weights for this lane's output channels, with zeros for those that do not exist.
template <typename T, int kVariant>
__device__ __forceinline__ void CopyCooWeights(const CooTask<T>& task, T* stage, const T* row, int valid) {
  constexpr CooVariant kShape = kCooVariants[kVariant];
  constexpr int kBytes = kShape.out_channels * sizeof(T), kWidth = kBytes < 16 ? kBytes : 16;
  constexpr int kElements = kWidth / static_cast<int>(sizeof(T));
  const int64_t tap_stride = static_cast<int64_t>(task.group_channels) * task.out_channels;
  T* target = stage + threadIdx.x % kWarp * kShape.out_channels;
  if (task.vector_kernel) {
    const int64_t stride = valid > 0 ? tap_stride : 0;
    const T* source = valid > 0 ? row : task.kernel;
#pragma unroll
    for (int tap = 0; tap < kShape.taps(); ++tap, source += stride) {
#pragma unroll
      for (int k = 0; k < kShape.out_channels; k += kElements) {
        CopyAsync<kWidth == 16 ? 16 : 0>(target + tap * kWarp * kShape.out_channels + k, source + k, kWidth, valid > 0);
      }
    }
    return;
  }
#pragma unroll 1
  for (int i = 0; i < kShape.taps() * kShape.out_channels; ++i) {
    const int tap = i / kShape.out_channels, k = i % kShape.out_channels;
    CopyAsync<0>(target + tap * kWarp * kShape.out_channels + k, k < valid ? row + tap * tap_stride + k : task.kernel,
                 sizeof(T), k < valid);
  }
}

template <typename T, int kVariant, int kTap, int... kOutChannel>
__device__ __forceinline__ void SetTap(const T* stage, std::integer_sequence<int, kOutChannel...>) {
  constexpr int kCount = sizeof...(kOutChannel);
  float row[kCount];
  constexpr int kBytes = (kCount % 4 == 0 ? 4 : kCount % 2 == 0 ? 2 : 1) * static_cast<int>(sizeof(T));
  LoadRun<kBytes>(stage + (kTap * kWarp + threadIdx.x % kWarp) * kCount, row);
  (CooMicro<kVariant>::template SetWeight<kTap * kCount + kOutChannel>(row[kOutChannel]), ...);
}

template <typename T, int kVariant, int... kTap>
__device__ __forceinline__ void SetWeights(const T* stage, std::integer_sequence<int, kTap...>) {
  (SetTap<T, kVariant, kTap>(stage, std::make_integer_sequence<int, kCooVariants[kVariant].out_channels>{}), ...);
}

// Adds this warp's share of the lists of the chunk that begins at channel `first` to the sums.
template <typename T, int kVariant>
__device__ __forceinline__ void MultiplyChunk(const CooTask<T>& task, const CooMemory<T, kVariant>& m, int first) {
  using Memory = CooMemory<T, kVariant>;
  constexpr CooVariant kShape = kCooVariants[kVariant];
  const CooPlace b = LocateCoo<T, kVariant>(task);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, column = warp & (task.plan.out_channel_warps - 1);
  const int out_channel = b.out_channel + (column * kWarp + lane) * kShape.out_channels,
            valid = task.group_out_channels - out_channel;
  const T* rows = task.kernel + b.group * task.group_out_channels + out_channel +
                  (static_cast<int64_t>(b.stack) * kShape.taps() * task.group_channels + first) * task.out_channels;
  unsigned to_copy = ChannelsOfSlice(m.totals, warp / task.plan.out_channel_warps, task.plan.slices), to_run = to_copy;
  const auto lists = static_cast<uint32_t>(__cvta_generic_to_shared(m.lists));
  // Weights come one channel ahead of the list that is worked off.
#pragma unroll 1
  for (int step = -1; to_run != 0; ++step) {
    if (to_copy != 0) {
      const int channel = __ffs(to_copy) - 1;
      to_copy &= to_copy - 1;
      CopyCooWeights<T, kVariant>(task, m.weights + ((step + 1) & 1) * Memory::kStage,
                                  rows + static_cast<int64_t>(channel) * task.out_channels, valid);
    }
    CommitCopies();
    if (step >= 0) {
      WaitForCopies<1>();
      SetWeights<T, kVariant>(m.weights + (step & 1) * Memory::kStage,
                              std::make_integer_sequence<int, kShape.taps()>{});
      const int channel = __ffs(to_run) - 1;
      to_run &= to_run - 1;
      CooMicro<kVariant>::Run(lists + channel * Memory::kPitch * static_cast<int>(sizeof(CooEntry)));
    }
  }
}

template <int kVariant, int... kIndex>
__device__ __forceinline__ void StoreSums(float* sums, std::integer_sequence<int, kIndex...>) {
  constexpr int kOutChannels = kCooVariants[kVariant].out_channels;
  ((sums[kIndex / kOutChannels * kWarp * kOutChannels + threadIdx.x % kWarp * kOutChannels + kIndex % kOutChannels] =
        CooMicro<kVariant>::template Sum<kIndex>()),
   ...);
}

template <typename T, int kVariant>
__global__ void __launch_bounds__(kWarp* kCooVariants[kVariant].max_warps(), kCooVariants[kVariant].min_blocks())
    CooKernel(const __grid_constant__ CooTask<T> task) {
  extern __shared__ __align__(128) unsigned char shared[];
  using Micro = CooMicro<kVariant>;
  const CooMemory<T, kVariant> m(shared, blockDim.x / kWarp);
  Micro::Begin();
  const CooPlace b = LocateCoo<T, kVariant>(task);
  const int last = b.channels_end;
  int first = b.channel;
  if (first < last) StageCooPatch<T, kVariant>(task, m.patch, first);
  CommitCopies();
#pragma unroll 1
  for (; first < last; first += kCooChunk) {
    WaitForCopies<0>();
    __syncthreads();  // the patch is there, the lists before have been used
    ConvertCoo<T, kVariant>(m);
    if (first + kCooChunk < last) StageCooPatch<T, kVariant>(task, m.patch, first + kCooChunk);
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

template <typename T, int kVariant>
ffi::Error LaunchCoo(const CooTask<T>& task, cudaStream_t stream) {
  ffi::Error error = Prepare<CooKernel<T, kVariant>>("CooKernel");
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
  constexpr auto kKernel = CooKernel<T, kVariant>;
  return CheckCuda(cudaLaunchKernelEx(&config, kKernel, task), "CooKernel");
}

template <typename T>
using CooLauncher = ffi::Error (*)(const CooTask<T>&, cudaStream_t);

template <typename T, int... kVariant>
CooLauncher<T> LauncherOf(int variant, std::integer_sequence<int, kVariant...>) {
  static constexpr CooLauncher<T> kLaunchers[] = {&LaunchCoo<T, kVariant>...};
  return kLaunchers[variant];
}

}  // namespace

ffi::Error Coo(const DeviceCall& call, CooPlan plan, Workspace workspace, int device, cudaStream_t stream) {
  return DispatchDtype(call.dtype, [&](auto element) {
    using T = decltype(element);
    const std::string wrong = CompleteCooPlan(call.args, sizeof(T), workspace.bytes, GetDeviceInfo(device), &plan);
    if (!wrong.empty()) return ffi::Error(ffi::ErrorCode::kInvalidArgument, "jsc_coo: " + wrong);
    const CooTask<T> task = MakeCooTask<T>(call, plan, workspace.data);
    ffi::Error error = LauncherOf<T>(plan.variant, std::make_integer_sequence<int, kCooVariantCount>{})(task, stream);
    if (error.failure() || plan.splits == 1 || plan.cluster) return error;
    const int64_t total = call.args.images * call.args.conv_size[0] * call.args.conv_size[1] * call.args.out_channels;
    CooReduceKernel<T><<<static_cast<unsigned>((total + 1023) / 1024), 256, 0, stream>>>(task, static_cast<int>(total));
    return CheckCuda(cudaGetLastError(), "CooReduceKernel");
  });
}

}  // namespace jsc
