// Sparse-input matrix product: out [M, K] = activation(x [M, C] x kernel [C, K] + bias + residual), reading only the
// kernel rows of inputs that are not zero.
//
// A block owns 128 output features and one part of the channels for up to 8 rows of x. It compresses its part of x into
// a list (row, values) in shared memory, channels of which any of the rows of x is non-zero; then each warp streams
// its runs of 8 (or 4) kernel rows, 512 bytes each, all loads of a run in flight before the first use. The warps' sums
// meet in shared memory, those of the parts in a cluster's distributed shared memory or in the workspace, in fixed
// order.
//
// Parts take 32-channel runs in turn (part p: runs p, p + parts, ...) because zeros come in clumps: after a pool, the
// channels of one pixel lie together. Parts are as many as can run at once: a second wave of clusters cost 7 us at
// 25088 -> 4096. What bounds it: device memory, 4 K bytes per non-zero channel in float32.
#include <cooperative_groups.h>

#include "conv_task.cuh"
#include "kernels.h"

namespace jsc {
namespace {

constexpr int kFeatures = kWarp * 4;  // of a block: one 16-byte load a lane
constexpr int kMaxParts = kMaxSplits;

// The block for kImages rows of x. Registers for sums (4 kImages a lane) leave room for fewer loads in flight a warp.
template <int kImages>
struct Block {
  static constexpr int kWarps = kImages == 8 ? 8 : kImages == 4 ? 10 : 14;
  static constexpr int kThreads = kWarps * kWarp;
  static constexpr int kRun = kImages == 4 ? 4 : 8;    // kernel rows a warp loads at a time
  static constexpr int kLoads = kImages == 1 ? 8 : 4;  // elements of each row of x that a thread lists at a time
  static constexpr int kResident = 2;                  // blocks of a multiprocessor
  static constexpr int kListed = kLoads * kThreads;    // channels listed at a time
};

template <int kImages>
struct List {
  float values[Block<kImages>::kListed + Block<kImages>::kRun][kImages];
  int rows[Block<kImages>::kListed + Block<kImages>::kRun];
  int warp_counts[Block<kImages>::kWarps];
};

// What a block keeps in shared memory: the list first, the sums after it.
template <int kImages>
union DenseMemory {
  List<kImages> list;
  float4 warp_sums[Block<kImages>::kWarps][kImages][kWarp];
};

struct DenseShape {
  int64_t images_per_stack, image_tiles;
  int channels, features, parts, feature_tiles;
  bool vector, cluster;
};

// Lists the non-zero channels among runs [first_run, first_run + kLoads * kWarps) of this block's part. Returns the
// count, padded to a multiple of kRun by zeros under the last row.
template <typename T, int kImages>
__device__ int CompressRows(const DenseShape& shape, const T* x, int images, int part, int first_run,
                            List<kImages>& list) {
  constexpr int kLoads = Block<kImages>::kLoads, kWarps = Block<kImages>::kWarps, kRun = Block<kImages>::kRun;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  float value[kLoads][kImages];
  unsigned kept[kLoads];
  int count = 0;
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int channel = ((first_run + warp * kLoads + i) * shape.parts + part) * kWarp + lane;
#pragma unroll
    for (int m = 0; m < kImages; ++m) {
      const bool inside = channel < shape.channels && m < images;
      value[i][m] = inside ? ToFloat(x[static_cast<int64_t>(m) * shape.channels + channel]) : 0.f;
    }
  }
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    bool keep = false;
#pragma unroll
    for (int m = 0; m < kImages; ++m) keep |= value[i][m] != 0.f;
    kept[i] = __ballot_sync(0xffffffffu, keep);
    count += __popc(kept[i]);
  }
  if (lane == 0) list.warp_counts[warp] = count;
  __syncthreads();
  int slot = 0, total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    if (w == warp) slot = total;
    total += list.warp_counts[w];
  }
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int channel = ((first_run + warp * kLoads + i) * shape.parts + part) * kWarp + lane;
    if (kept[i] >> lane & 1) {
      const int at = slot + __popc(kept[i] & ((1u << lane) - 1));
      list.rows[at] = channel;
#pragma unroll
      for (int m = 0; m < kImages; ++m) list.values[at][m] = value[i][m];
    }
    slot += __popc(kept[i]);
  }
  __syncthreads();
  const int padded = (total + kRun - 1) / kRun * kRun;
  if (static_cast<int>(threadIdx.x) < padded - total) {
    list.rows[total + threadIdx.x] = list.rows[total - 1];
#pragma unroll
    for (int m = 0; m < kImages; ++m) list.values[total + threadIdx.x][m] = 0.f;
  }
  __syncthreads();
  return padded;
}

// sums[image] += values x kernel rows, over every kWarps-th run of the list. kVector: rows take 4-element loads.
template <typename T, int kImages, bool kVector>
__device__ void StreamRows(const List<kImages>& list, int count, const T* kernel, int features, int valid,
                           float (&sums)[kImages][4]) {
  constexpr int kWarps = Block<kImages>::kWarps, kRun = Block<kImages>::kRun;
  for (int i = threadIdx.x / kWarp * kRun; i < count; i += kWarps * kRun) {
    float4 weight[kRun];
#pragma unroll
    for (int e = 0; e < kRun; ++e) {
      const T* row = kernel + static_cast<int64_t>(list.rows[i + e]) * features;
      weight[e] = kVector ? Load4(row) : LoadUpTo4(row, valid, false);
    }
#pragma unroll
    for (int e = 0; e < kRun; ++e) {
#pragma unroll
      for (int m = 0; m < kImages; ++m) {
        const float v = list.values[i + e][m];
        sums[m][0] = fmaf(v, weight[e].x, sums[m][0]);
        sums[m][1] = fmaf(v, weight[e].y, sums[m][1]);
        sums[m][2] = fmaf(v, weight[e].z, sums[m][2]);
        sums[m][3] = fmaf(v, weight[e].w, sums[m][3]);
      }
    }
  }
}

// out for element (image m, lane) of a tile: the sums of all parts, bias, residual and activation.
template <typename T>
__device__ void WriteDense(const ConvTask<T>& task, float4 sum, int64_t image, int stack, int feature, bool vector) {
  const int valid = min(task.features - feature, 4);
  if (valid <= 0) return;
  const int64_t at = image * task.features + feature;
  if (task.bias)
    sum = sum + LoadUpTo4(task.bias + static_cast<int64_t>(stack) * task.features + feature, valid, vector);
  if (task.residual) sum = sum + LoadUpTo4(task.residual + at, valid, vector);
  if (task.relu) sum = {Relu(sum.x), Relu(sum.y), Relu(sum.z), Relu(sum.w)};
  StoreUpTo4(task.out + at, sum, valid, vector);
}

// Which tile of out a block works on: images [image, image + images) and 4 features of each lane from `feature`.
struct DensePlace {
  int feature, stack, images;
  int64_t image;
};

template <int kImages>
__device__ __forceinline__ DensePlace FindPlace(const DenseShape& shape, int block) {
  const int image_tile = block / shape.feature_tiles;
  const int stack = static_cast<int>(image_tile / shape.image_tiles);
  const int64_t in_stack = image_tile % shape.image_tiles * kImages;
  return {block % shape.feature_tiles * kFeatures + static_cast<int>(threadIdx.x % kWarp) * 4, stack,
          static_cast<int>(min(static_cast<int64_t>(kImages), shape.images_per_stack - in_stack)),
          stack * shape.images_per_stack + in_stack};
}

// Brings together the warps' sums, in memory, and then those of the parts; writes the outputs.
template <typename T, int kImages>
__device__ __forceinline__ void FinishDense(const ConvTask<T>& task, const DenseShape& shape, const DensePlace& at,
                                            int part, const DenseMemory<kImages>& memory, float4 (*tile)[kWarp]) {
  constexpr int kWarps = Block<kImages>::kWarps;
  float4* partial =  // [kImages, kWarp] of this block
      reinterpret_cast<float4*>(task.partial) + static_cast<int64_t>(blockIdx.x) * kImages * kWarp;
  for (int i = threadIdx.x; i < kImages * kWarp; i += Block<kImages>::kThreads) {
    float4 sum = memory.warp_sums[0][i / kWarp][i % kWarp];
    for (int w = 1; w < kWarps; ++w) sum = sum + memory.warp_sums[w][i / kWarp][i % kWarp];
    if (shape.parts == 1) {
      if (i / kWarp < at.images) WriteDense(task, sum, at.image + i / kWarp, at.stack, at.feature, shape.vector);
    } else if (shape.cluster) {
      tile[i / kWarp][i % kWarp] = sum;
    } else {
      partial[i] = sum;
    }
  }
#if __CUDA_ARCH__ >= 900
  if (shape.parts > 1 && shape.cluster) {
    auto cluster = cooperative_groups::this_cluster();
    const int lane = threadIdx.x % kWarp;
    cluster.sync();
    // Image m of the tile belongs to the block of part m % parts; a warp takes one.
    for (int m = part + threadIdx.x / kWarp * shape.parts; m < at.images; m += shape.parts * kWarps) {
      float4 sum = *cluster.map_shared_rank(&tile[m][lane], 0);
      for (int p = 1; p < shape.parts; ++p) sum = sum + *cluster.map_shared_rank(&tile[m][lane], p);
      WriteDense(task, sum, at.image + m, at.stack, at.feature, shape.vector);
    }
    cluster.sync();  // a block's sums stay until all have read them
  }
#endif
}

template <typename T, int kImages>
__global__ void __launch_bounds__(Block<kImages>::kThreads, Block<kImages>::kResident)
    DenseKernel(const __grid_constant__ ConvTask<T> task, const DenseShape shape) {
  constexpr int kWarps = Block<kImages>::kWarps;
  extern __shared__ __align__(16) unsigned char shared[];
  auto& memory = *reinterpret_cast<DenseMemory<kImages>*>(shared);
  __shared__ float4 tile[kImages][kWarp];
  const int part = blockIdx.x % shape.parts;
  const DensePlace at = FindPlace<kImages>(shape, blockIdx.x / shape.parts);
  const T* x = task.x + at.image * shape.channels;  // [images, C]
  const T* kernel =                                 // [C, K] from this lane's features on
      task.kernel + static_cast<int64_t>(at.stack) * shape.channels * shape.features + at.feature;
  const int valid = min(shape.features - at.feature, 4);

  float sums[kImages][4] = {};
  const int runs = (shape.channels + kWarp * shape.parts - 1) / (kWarp * shape.parts);
  for (int first_run = 0; first_run < runs; first_run += Block<kImages>::kLoads * kWarps) {
    if (first_run > 0) __syncthreads();
    const int count = CompressRows<T, kImages>(shape, x, at.images, part, first_run, memory.list);
    if (valid == 4 && shape.vector) {
      StreamRows<T, kImages, true>(memory.list, count, kernel, shape.features, valid, sums);
    } else {
      StreamRows<T, kImages, false>(memory.list, count, kernel, shape.features, valid, sums);
    }
  }
  __syncthreads();  // the list becomes the sums of the warps
#pragma unroll
  for (int m = 0; m < kImages; ++m) {
    memory.warp_sums[threadIdx.x / kWarp][m][threadIdx.x % kWarp] =
        make_float4(sums[m][0], sums[m][1], sums[m][2], sums[m][3]);
  }
  __syncthreads();
  FinishDense(task, shape, at, part, memory, tile);
}

// The second step where there are no clusters: one block per tile.
template <typename T, int kImages>
__global__ void __launch_bounds__(kWarp* kImages)
    DenseReduceKernel(const __grid_constant__ ConvTask<T> task, const DenseShape shape) {
  const int m = threadIdx.x / kWarp;
  const DensePlace at = FindPlace<kImages>(shape, blockIdx.x);
  if (m >= at.images) return;
  const float4* partial =  // [part, kImages, kWarp]
      reinterpret_cast<const float4*>(task.partial) + static_cast<int64_t>(blockIdx.x) * shape.parts * kImages * kWarp;
  float4 sum = partial[threadIdx.x];
  for (int p = 1; p < shape.parts; ++p) sum = sum + partial[p * kImages * kWarp + threadIdx.x];
  WriteDense(task, sum, at.image + m, at.stack, at.feature, shape.vector);
}

// The most parts whose blocks still run all at once, as long as each has 8 runs of channels to list.
template <int kImages>
int ChooseParts(const DenseShape& shape, int64_t tiles, size_t workspace_bytes, const DeviceInfo& device) {
  constexpr int64_t kResident = Block<kImages>::kResident, kTileBytes = sizeof(float4) * kImages * kWarp;
  int parts = kMaxParts;
  for (; parts > 1; --parts) {
    if (parts * 8 * kWarp > shape.channels) continue;
    const bool fits = shape.cluster ? tiles <= kResident * device.clusters[parts]
                                    : tiles * parts <= kResident * device.multiprocessors &&
                                          tiles * parts * kTileBytes <= static_cast<int64_t>(workspace_bytes);
    if (fits) break;
  }
  return parts;
}

template <typename T, int kImages>
ffi::Error LaunchDense(const ConvCall& call, Workspace workspace, const DeviceInfo& device, cudaStream_t stream) {
  const ConvArgs& a = call.args;
  DenseShape shape{};
  shape.images_per_stack = a.images / a.stacks;
  shape.image_tiles = (shape.images_per_stack + kImages - 1) / kImages;
  shape.channels = static_cast<int>(a.channels);
  shape.features = static_cast<int>(a.features);
  shape.feature_tiles = (shape.features + kFeatures - 1) / kFeatures;
  shape.vector = a.features % 4 == 0;
  shape.cluster = device.clusters[1] > 0;
  const int64_t tiles = shape.image_tiles * a.stacks * shape.feature_tiles;
  shape.parts = ChooseParts<kImages>(shape, tiles, workspace.bytes, device);
  constexpr auto kKernel = DenseKernel<T, kImages>;
  ffi::Error error = Prepare<kKernel>("DenseKernel");
  if (error.failure()) return error;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(tiles * shape.parts));
  config.blockDim = dim3(Block<kImages>::kThreads);
  config.dynamicSmemBytes = sizeof(DenseMemory<kImages>);
  config.stream = stream;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = shape.parts;
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  config.attrs = &attribute;
  config.numAttrs = shape.cluster && shape.parts > 1 ? 1 : 0;
  const ConvTask<T> task = MakeConvTask<T>(call, ConvPlan{}, workspace.data);
  error = CheckCuda(cudaLaunchKernelEx(&config, kKernel, task, shape), "DenseKernel");
  if (error.failure() || shape.parts == 1 || shape.cluster) return error;
  DenseReduceKernel<T, kImages><<<static_cast<unsigned>(tiles), kWarp * kImages, 0, stream>>>(task, shape);
  return CheckCuda(cudaGetLastError(), "DenseReduceKernel");
}

bool IsMatrixProduct(const ConvArgs& a) {
  for (int i = 0; i < 2; ++i) {
    if (a.size[i] != 1 || a.kernel_size[i] != 1 || a.pad_low[i] != 0 || a.out_size[i] != 1) return false;
  }
  return a.groups == 1 && a.pool == Pool::kNone;
}

}  // namespace

ffi::Error Dense(const ConvCall& call, Workspace workspace, int device, cudaStream_t stream) {
  if (call.args.pool != Pool::kNone) return Pecr(call, workspace, device, stream);
  if (!IsMatrixProduct(call.args)) return Ecr(call, workspace, device, stream);
  return DispatchDtype(call.dtype, [&](auto element) {
    using T = decltype(element);
    const DeviceInfo& info = GetDeviceInfo(device);
    const int64_t images = call.args.images / call.args.stacks;
    if (images == 1) return LaunchDense<T, 1>(call, workspace, info, stream);
    if (images <= 4) return LaunchDense<T, 4>(call, workspace, info, stream);
    return LaunchDense<T, 8>(call, workspace, info, stream);
  });
}

size_t DenseWorkspaceBytes(int64_t images, int64_t features) {
  const int64_t tiles = (images + 7) / 8 * ((features + kFeatures - 1) / kFeatures);
  if (tiles >= 256) return 0;
  return static_cast<size_t>(std::min<int64_t>(kMaxParts, 512 / std::max<int64_t>(tiles, 1)) * tiles) * 8 * kWarp *
         sizeof(float4);
}

}  // namespace jsc
