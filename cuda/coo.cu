// COO* convolution (Xiang et al. 2022, section 3.4): convolution, bias, residual and ReLU over lists of the non-zeros
// of each tile and channel of x.
//
// What: a block computes TH x TW results for 32 * feature_warps * KT output channels, KT of them per thread, and keeps
// all their sums in registers (output stationary).
//
// How, per chunk of 32 input channels of the block:
//   1. The tile's patch of x with its halo comes to shared memory by cp.async, during the chunk before.
//   2. Convert: a lane owns a channel, each warp a run of positions; they count, meet, and write (value, position) to
//      the channel's list, in the order of position. Every list has room for all positions, so there is no prefix sum
//      over lists and no atomic: input stationary in shared memory.
//   3. Multiply: the warps of a slice take the channels whose share of the chunk's non-zeros falls to it, so that work
//      and not channels is what slices share. A channel's weights stream through two buffers of a warp by cp.async,
//      each lane its own, and are in registers while coo_micro.cuh runs over the list.
// Then the slices' sums meet in shared memory in a fixed order, and the block writes results, or with splits > 1 its
// partial sums meet again: blocks of a cluster read each other's shared memory; without clusters they go through the
// workspace and CooReduceKernel; in a fixed order either way. No atomics: results repeat bit for
// bit.
//
// Layout: x NHWC, kernel HWIO; threads along output channels, so weights, sums and results are coalesced.
//
// What bounds it: an entry costs 8 instructions around its FFMAs (16 inside a 4x4 tile with KT = 4, 11 inside 7x7 with
// KT = 2) and some 80 cycles of latency, which other warps hide; at high sparsity weights: R * R words for each
// tile, channel and output channel, whatever the non-zeros.
#include "coo_micro.cuh"
#include "coo_task.cuh"
#include "kernels.h"

namespace jsc {
namespace {

// Where a block works.
struct CooPlace {
  int64_t image;
  int stack, group, feature;  // first output channel, within the group
  int out[2];                 // first result
  int split, channel, channels_end;
};

// Found again wherever it is needed: the volatile read keeps the compiler from holding it in registers instead, of
// which the sums leave few.
template <typename T, int kVariant>
__device__ CooPlace LocateCoo(const CooTask<T>& task) {
  constexpr CooVariant kShape = kCooVariants[kVariant];
  int block;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
  const Quotient split = Divide(block, task.by_splits);  // first: the splits of a tile are a cluster
  const Quotient feature = Divide(split.quotient, task.by_feature_tiles);
  const Quotient x = Divide(feature.quotient, task.by_tiles[1]);
  const Quotient y = Divide(x.quotient, task.by_tiles[0]);
  const Quotient group = Divide(y.quotient, task.by_groups);
  CooPlace b;
  b.image = group.quotient;
  b.stack = group.quotient / task.images_per_stack;
  b.group = group.remainder;
  b.feature = feature.remainder * (kWarp * kShape.features * task.plan.feature_warps);
  b.out[0] = y.remainder * kShape.height;
  b.out[1] = x.remainder * kShape.width;
  b.split = split.remainder;
  b.channel = split.remainder * task.split_channels;
  b.channels_end = min(b.channel + task.split_channels, task.group_channels);
  return b;
}

// Shared memory of a block; the sums take its place at the end.
template <typename T, int kVariant>
struct CooMemory {
  static constexpr CooVariant kShape = kCooVariants[kVariant];
  static constexpr int kPitch = (kShape.positions() + 2) | 1;  // odd: lanes' lists begin in different banks
  static constexpr int kStage = kShape.taps() * kWarp * kShape.features;

  CooEntry* lists;  // [chunk channel, kPitch]
  T* weights;       // [stage, tap, lane, feature] of this warp
  T* patch;         // [position, chunk channel]
  int* totals;      // [chunk channel]
  int* counts;      // [warp, chunk channel]

  __device__ CooMemory(unsigned char* shared, int warps) {
    lists = reinterpret_cast<CooEntry*>(shared);
    shared += kCooChunk * kPitch * sizeof(CooEntry);
    weights = reinterpret_cast<T*>(shared) + threadIdx.x / kWarp * 2 * kStage;
    shared += warps * 2 * kStage * sizeof(T);
    patch = reinterpret_cast<T*>(shared);
    shared += kShape.positions() * kCooChunk * sizeof(T);
    totals = reinterpret_cast<int*>(shared);
    counts = totals + kCooChunk;
  }
};

// Asks for the patch of channels [first, first + kCooChunk), with zeros outside the image and the block's channels.
template <typename T, int kVariant>
__device__ void StageCooPatch(const CooTask<T>& task, T* patch, int first) {
  constexpr CooVariant kShape = kCooVariants[kVariant];
  const CooPlace b = LocateCoo<T, kVariant>(task);
  const int shift = task.copy_x_shift, units_shift = 5 - shift;
  const int origin[2] = {b.out[0] * task.stride[0] - task.pad_low[0], b.out[1] * task.stride[1] - task.pad_low[1]};
  const T* corner = task.x + b.image * task.height * task.width * static_cast<int64_t>(task.channels) +
                    b.group * task.group_channels + first;
  for (int i = threadIdx.x; i < kShape.positions() << units_shift; i += blockDim.x) {
    const int position = i >> units_shift, channel = (i & ((1 << units_shift) - 1)) << shift;
    const int y = origin[0] + position / kShape.patch_width() * task.step[0];
    const int x = origin[1] + position % kShape.patch_width() * task.step[1];
    const bool valid = static_cast<unsigned>(y) < task.height && static_cast<unsigned>(x) < task.width &&
                       first + channel < b.channels_end;
    const T* source = corner + (y * task.width + x) * static_cast<int64_t>(task.channels) + channel;
    CopyAsync<0>(patch + (i << shift), valid ? source : task.x, static_cast<int>(sizeof(T)) << shift, valid);
  }
}

// The patch as lists, all warps together; ends with the lists visible to all.
template <typename T, int kVariant>
__device__ void ConvertCoo(const CooMemory<T, kVariant>& m) {
  constexpr int kPositions = kCooVariants[kVariant].positions();
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  const int first = warp * kPositions / warps, last = (warp + 1) * kPositions / warps;
  int count = 0;
#pragma unroll 4
  for (int p = first; p < last; ++p) count += ToFloat(m.patch[p * kCooChunk + lane]) != 0.f;
  m.counts[warp * kCooChunk + lane] = count;
  __syncthreads();
  int slot = 0;
  for (int w = 0; w < warp; ++w) slot += m.counts[w * kCooChunk + lane];
  CooEntry* list = m.lists + lane * CooMemory<T, kVariant>::kPitch;
#pragma unroll 4
  for (int p = first; p < last; ++p) {
    const float value = ToFloat(m.patch[p * kCooChunk + lane]);
    if (value != 0.f) list[slot++] = {value, static_cast<uint32_t>(p)};
  }
  if (warp == warps - 1) {
    list[slot] = {0.f, kPositions};
    m.totals[lane] = slot;
  }
  __syncthreads();
}

// The chunk's channels whose non-zeros fall to this warp's slice, as bits.
__device__ inline unsigned ChannelsOfSlice(const int* totals, int slice, int slices) {
  const int lane = threadIdx.x % kWarp, count = totals[lane];
  int upto = count;
#pragma unroll
  for (int distance = 1; distance < kWarp; distance *= 2) {
    const int before = __shfl_up_sync(0xffffffffu, upto, distance);
    if (lane >= distance) upto += before;
  }
  const int all = __shfl_sync(0xffffffffu, upto, kWarp - 1);
  const int middle = 2 * upto - count;  // of the channel's part of [0, 2 * all)
  return __ballot_sync(0xffffffffu, count > 0 && middle * slices / (2 * all) == slice);
}

// Asks for one channel's weights for this lane's output channels, with zeros for those that do not exist.
template <typename T, int kVariant>
__device__ __forceinline__ void CopyCooWeights(const CooTask<T>& task, T* stage, const T* row, int valid) {
  constexpr CooVariant kShape = kCooVariants[kVariant];
  constexpr int kBytes = kShape.features * sizeof(T), kWidth = kBytes < 16 ? kBytes : 16;
  constexpr int kElements = kWidth / static_cast<int>(sizeof(T));
  const int64_t tap_stride = static_cast<int64_t>(task.group_channels) * task.features;
  T* target = stage + threadIdx.x % kWarp * kShape.features;
  if (task.vector_kernel) {
    const int64_t stride = valid > 0 ? tap_stride : 0;
    const T* source = valid > 0 ? row : task.kernel;
#pragma unroll
    for (int tap = 0; tap < kShape.taps(); ++tap, source += stride) {
#pragma unroll
      for (int k = 0; k < kShape.features; k += kElements) {
        CopyAsync<kWidth == 16 ? 16 : 0>(target + tap * kWarp * kShape.features + k, source + k, kWidth, valid > 0);
      }
    }
    return;
  }
#pragma unroll 1
  for (int i = 0; i < kShape.taps() * kShape.features; ++i) {
    const int tap = i / kShape.features, k = i % kShape.features;
    CopyAsync<0>(target + tap * kWarp * kShape.features + k, k < valid ? row + tap * tap_stride + k : task.kernel,
                 sizeof(T), k < valid);
  }
}

template <typename T, int kCount>
__device__ __forceinline__ void LoadRow(const T* p, float (&row)[kCount]) {
  if constexpr (kCount % 4 == 0) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const float4 v = Load4(p + i);
      row[i] = v.x, row[i + 1] = v.y, row[i + 2] = v.z, row[i + 3] = v.w;
    }
  } else if constexpr (kCount == 2) {
    struct alignas(2 * sizeof(T)) Two {
      T a, b;
    };
    const Two v = *reinterpret_cast<const Two*>(p);
    row[0] = ToFloat(v.a), row[1] = ToFloat(v.b);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) row[i] = ToFloat(p[i]);
  }
}

template <typename T, int kVariant, int kTap, int... kFeature>
__device__ __forceinline__ void SetTap(const T* stage, std::integer_sequence<int, kFeature...>) {
  constexpr int kCount = sizeof...(kFeature);
  float row[kCount];
  LoadRow<T, kCount>(stage + (kTap * kWarp + threadIdx.x % kWarp) * kCount, row);
  (CooMicro<kVariant>::template SetWeight<kTap * kCount + kFeature>(row[kFeature]), ...);
}

template <typename T, int kVariant, int... kTap>
__device__ __forceinline__ void SetWeights(const T* stage, std::integer_sequence<int, kTap...>) {
  (SetTap<T, kVariant, kTap>(stage, std::make_integer_sequence<int, kCooVariants[kVariant].features>{}), ...);
}

// Adds this warp's share of the lists of the chunk that begins at channel `first` to the sums.
template <typename T, int kVariant>
__device__ __forceinline__ void MultiplyChunk(const CooTask<T>& task, const CooMemory<T, kVariant>& m, int first) {
  using Memory = CooMemory<T, kVariant>;
  constexpr CooVariant kShape = kCooVariants[kVariant];
  const CooPlace b = LocateCoo<T, kVariant>(task);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, column = warp & (task.plan.feature_warps - 1);
  const int feature = b.feature + (column * kWarp + lane) * kShape.features, valid = task.group_features - feature;
  const T* rows = task.kernel + b.group * task.group_features + feature +
                  (static_cast<int64_t>(b.stack) * kShape.taps() * task.group_channels + first) * task.features;
  unsigned to_copy = ChannelsOfSlice(m.totals, warp / task.plan.feature_warps, task.plan.slices), to_run = to_copy;
  const auto lists = static_cast<uint32_t>(__cvta_generic_to_shared(m.lists));
  // Weights come one channel ahead of the list that is worked off.
#pragma unroll 1
  for (int step = -1; to_run != 0; ++step) {
    if (to_copy != 0) {
      const int channel = __ffs(to_copy) - 1;
      to_copy &= to_copy - 1;
      CopyCooWeights<T, kVariant>(task, m.weights + ((step + 1) & 1) * Memory::kStage,
                                  rows + static_cast<int64_t>(channel) * task.features, valid);
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
  constexpr int kFeatures = kCooVariants[kVariant].features;
  ((sums[kIndex / kFeatures * kWarp * kFeatures + threadIdx.x % kWarp * kFeatures + kIndex % kFeatures] =
        CooMicro<kVariant>::template Sum<kIndex>()),
   ...);
}

template <typename T>
__device__ void FinishResult(const CooTask<T>& task, int stack, int64_t at, int feature, float4 sum, int valid) {
  if (task.bias) {
    sum = sum + LoadUpTo4(task.bias + static_cast<int64_t>(stack) * task.features + feature, valid, task.vector_out);
  }
  if (task.residual) sum = sum + LoadUpTo4(task.residual + at, valid, task.vector_out);
  if (task.relu) sum = make_float4(Relu(sum.x), Relu(sum.y), Relu(sum.z), Relu(sum.w));
  StoreUpTo4(task.out + at, sum, valid, task.vector_out);
}

#if __CUDA_ARCH__ >= 900
__device__ inline int ClusterRank() {
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ inline void ClusterSync() {
  asm volatile("barrier.cluster.arrive.release;\n\tbarrier.cluster.wait.acquire;" ::: "memory");
}

// Four floats of another block of the cluster.
__device__ inline float4 LoadOfCluster(const float* shared, int rank) {
  const auto own = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  float4 v;
  asm volatile(
      "{\n\t.reg .b32 there;\n\tmapa.shared::cluster.u32 there, %4, %5;\n\t"
      "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there];\n\t}"
      : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
      : "r"(own), "r"(rank)
      : "memory");
  return v;
}
#endif

// Adds up the slices' sums [slice, feature warp, pixel, warp feature] in the place of the first.
template <int kVariant>
__device__ void AddSlices(float* sums, int warps, int slices) {
  constexpr int kWarpSums = CooMicro<kVariant>::kSums * kWarp;
  for (int i = threadIdx.x * 4; i < warps * kWarpSums; i += blockDim.x * 4) {
    float4 sum = Load4(sums + i);
    for (int slice = 1; slice < slices; ++slice) sum = sum + Load4(sums + i + slice * warps * kWarpSums);
    *reinterpret_cast<float4*>(sums + i) = sum;
  }
}

// Adds up the sums [feature warp, pixel, warp feature] of `parts` parts, part(p, i) being four at i, always in the same
// order, and writes this block's share of the results, or of its partial sums.
template <typename T, int kVariant, typename Part>
__device__ void FinishCoo(const CooTask<T>& task, int share, int shares, int parts, Part part) {
  constexpr CooVariant kShape = kCooVariants[kVariant];
  constexpr int kWarpFeatures = kWarp * kShape.features, kWarpSums = kShape.pixels() * kWarpFeatures;
  const CooPlace b = LocateCoo<T, kVariant>(task);
  const int warps = task.plan.feature_warps;
  const int64_t results = static_cast<int64_t>(task.by_image.divisor) * task.features;  // of an image
  for (int i = share * blockDim.x + threadIdx.x; i < warps * kWarpSums / 4; i += blockDim.x * shares) {
    const int in_warp = i * 4 % kWarpFeatures, rest = i * 4 / kWarpFeatures;
    const int warp = rest & (warps - 1), pixel = rest / warps;
    const int y = b.out[0] + pixel / kShape.width, x = b.out[1] + pixel % kShape.width;
    const int feature = b.feature + warp * kWarpFeatures + in_warp;  // within the group
    const int valid = min(task.group_features - feature, 4);
    if (valid <= 0 || y >= task.out_size[0] || x >= task.out_size[1]) continue;
    const int from = warp * kWarpSums + pixel * kWarpFeatures + in_warp;
    float4 sum = part(0, from);
#pragma unroll 8
    for (int p = 1; p < parts; ++p) sum = sum + part(p, from);
    const int all = b.group * task.group_features + feature;
    const int64_t at = b.image * results + (y * task.out_size[1] + x) * static_cast<int64_t>(task.features) + all;
    if (task.plan.splits == 1 || task.plan.cluster) {
      FinishResult(task, b.stack, at, all, sum, valid);
    } else {
      StoreUpTo4(task.partial + b.split * results * task.images + at, sum, valid, task.vector_out);
    }
  }
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
    if (task.plan.slices > 1) AddSlices<kVariant>(sums, task.plan.feature_warps, task.plan.slices);
    ClusterSync();
    FinishCoo<T, kVariant>(task, ClusterRank(), task.plan.splits, task.plan.splits,
                           [&](int split, int i) { return LoadOfCluster(sums + i, split); });
    ClusterSync();  // a block's sums stay until all have read them
    return;
  }
#endif
  const int slice_sums = task.plan.feature_warps * Micro::kSums * kWarp;
  FinishCoo<T, kVariant>(task, 0, 1, task.plan.slices,
                         [&](int slice, int i) { return Load4(sums + slice * slice_sums + i); });
}

// Adds up the splits of every four results.
template <typename T>
__global__ void __launch_bounds__(256) CooReduceKernel(const __grid_constant__ CooTask<T> task, int total) {
  const unsigned first = (blockIdx.x * 256 + threadIdx.x) * 4;  // beyond 2^31 in the last block of a full workspace
  if (first >= static_cast<unsigned>(total)) return;
  const int at = static_cast<int>(first);
  const int valid = min(total - at, 4);
  float4 sum = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 4
  for (int split = 0; split < task.plan.splits; ++split) {
    sum = sum + LoadUpTo4(task.partial + static_cast<int64_t>(split) * total + at, valid, task.vector_out);
  }
  if (task.vector_out) {
    const Quotient pixel = Divide(at, task.by_features);
    const int stack = Divide(pixel.quotient, task.by_image).quotient / task.images_per_stack;
    FinishResult(task, stack, at, pixel.remainder, sum, valid);
    return;
  }
  const float each[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i >= valid) break;
    const Quotient pixel = Divide(at + i, task.by_features);
    const int stack = Divide(pixel.quotient, task.by_image).quotient / task.images_per_stack;
    FinishResult(task, stack, at + i, pixel.remainder, {each[i], 0.f, 0.f, 0.f}, 1);
  }
}

template <typename T, int kVariant>
ffi::Error LaunchCoo(const CooTask<T>& task, cudaStream_t stream) {
  ffi::Error error = Prepare<CooKernel<T, kVariant>>("CooKernel");
  if (error.failure()) return error;
  const CooPlan& plan = task.plan;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(plan.blocks));
  config.blockDim = dim3(kWarp * plan.feature_warps * plan.slices);
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

ffi::Error Coo(const ConvCall& call, CooPlan plan, Workspace workspace, int device, cudaStream_t stream) {
  return DispatchDtype(call.dtype, [&](auto element) {
    using T = decltype(element);
    const std::string wrong = CompleteCooPlan(call.args, sizeof(T), workspace.bytes, GetDeviceInfo(device), &plan);
    if (!wrong.empty()) return ffi::Error(ffi::ErrorCode::kInvalidArgument, "jsc_coo: " + wrong);
    const CooTask<T> task = MakeCooTask<T>(call, plan, workspace.data);
    ffi::Error error = LauncherOf<T>(plan.variant, std::make_integer_sequence<int, kCooVariantCount>{})(task, stream);
    if (error.failure() || plan.splits == 1 || plan.cluster) return error;
    const int64_t total = call.args.images * call.args.conv_size[0] * call.args.conv_size[1] * call.args.features;
    CooReduceKernel<T><<<static_cast<unsigned>((total + 1023) / 1024), 256, 0, stream>>>(task, static_cast<int>(total));
    return CheckCuda(cudaGetLastError(), "CooReduceKernel");
  });
}

}  // namespace jsc
