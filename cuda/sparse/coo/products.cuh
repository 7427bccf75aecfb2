// Step 3 of the COO* convolution (sparse/coo/coo.cu): the lists of a chunk times their channels' weights, which stream
// through two buffers of a warp.
#ifndef JSC_CUDA_SPARSE_COO_PRODUCTS_CUH_
#define JSC_CUDA_SPARSE_COO_PRODUCTS_CUH_

#include "cuda/sparse/coo/lists.cuh"

namespace jsc {

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

// Calls run(channel of the chunk, its weights) for this warp's share of the chunk that begins at channel `first`.
// Weights come one channel ahead of the list that is worked off.
template <typename T, int kVariant, typename Run>
__device__ __forceinline__ void WithWeights(const CooTask<T>& task, const CooMemory<T, kVariant>& m, int first,
                                            const Run& run) {
  using Memory = CooMemory<T, kVariant>;
  constexpr CooVariant kShape = kCooVariants[kVariant];
  const CooPlace b = LocateCoo<T, kVariant>(task);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, column = warp & (task.plan.out_channel_warps - 1);
  const int out_channel = b.out_channel + (column * kWarp + lane) * kShape.out_channels,
            valid = task.group_out_channels - out_channel;
  const T* rows = task.kernel + b.group * task.group_out_channels + out_channel +
                  (static_cast<int64_t>(b.stack) * kShape.taps() * task.group_channels + first) * task.out_channels;
  unsigned to_copy = ChannelsOfSlice(m.totals, warp / task.plan.out_channel_warps, task.plan.slices), to_run = to_copy;
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
      const int channel = __ffs(to_run) - 1;
      to_run &= to_run - 1;
      run(channel, m.weights + (step & 1) * Memory::kStage);
    }
  }
}

// Adds the products of those lists to the sums.
template <typename T, int kVariant>
__device__ __forceinline__ void MultiplyChunk(const CooTask<T>& task, const CooMemory<T, kVariant>& m, int first) {
  using Memory = CooMemory<T, kVariant>;
  const auto lists = static_cast<uint32_t>(__cvta_generic_to_shared(m.lists));
  WithWeights<T, kVariant>(task, m, first, [&](int channel, const T* weights) {
    SetWeights<T, kVariant>(weights, std::make_integer_sequence<int, kCooVariants[kVariant].taps()>{});
    CooMicro<kVariant>::Run(lists + channel * Memory::kPitch * static_cast<int>(sizeof(CooEntry)));
  });
}

template <int kVariant, int... kIndex>
__device__ __forceinline__ void StoreSums(float* sums, std::integer_sequence<int, kIndex...>) {
  constexpr int kOutChannels = kCooVariants[kVariant].out_channels;
  ((sums[kIndex / kOutChannels * kWarp * kOutChannels + threadIdx.x % kWarp * kOutChannels + kIndex % kOutChannels] =
        CooMicro<kVariant>::template Sum<kIndex>()),
   ...);
}

}  // namespace jsc

#endif  // JSC_CUDA_SPARSE_COO_PRODUCTS_CUH_
