// Sparse-input matrix product: out [M, K] = activation(x [M, C] x kernel [C, K] + bias + residual). Only kernel rows of
// inputs that are not zero are read. Details: docs/design/kernels/matvec.md.
//
// The operation is a stream of the kernel from device memory, 4 K bytes per channel in float32. So every SM must have
// some 60 KB asked for at any time, from the first microsecond to the last. A block owns a segment of every kernel row,
// 2 to 32 lanes of 16 bytes, for up to 8 rows of x. Its warps share the channels. They add their sums once, at the end,
// and until then no warp waits for another:
// - A warp asks for the kernel rows of its first channels before it knows x. A small layer is over by the time that a
//   list of non-zeros could be there.
// - Of all other channels it keeps a list (row, values) in a ring in shared memory. It holds channels where any row of
//   x is non-zero, in runs of 32 channels whose values were asked for one round earlier.
// - It takes kDenseRun loads a lane from the list. A register that has been used is at once loaded for the next round.
// - Runs are dealt out cyclically (worker w: runs w, w + workers, ...), because zeros come in clumps: after a pool the
//   channels of one pixel lie together.
//
// Segments are as narrow as gives each SM at most one block. So a small layer is one block after all its channels, and
// nothing has to be reduced. Long streams want whole lines. Where that leaves SMs idle, the blocks of a cluster share
// the channels and send each other their sums, added in a fixed order.
//
// One row of x whose kernel rows start 16 bytes has a kernel of its own on Hopper (sparse/matvec/row.cu). It does the
// same in fewer instructions. What follows is of the other one, and of tiles that both have.
//
// Lost on an H200, us of 25088 to 4096 in float32 without zeros (99.2 with 256-byte segments, cuBLAS 95.6): no kernel
// rows before x is known (102.1), 12 loads a lane (101.0), 24 warps with 6 (99.9), 8 warps with 16 (118), loads that
// bring the next line to L2 (103). Bound by: device memory; more rows of x by FFMA and by reading their lists.
#include <algorithm>

#include "cuda/core/cluster_sums.cuh"
#include "cuda/ffi/kernels.h"
#include "cuda/sparse/matvec/row.h"
#include "cuda/sparse/matvec/stream.cuh"

namespace jsc {
namespace {

constexpr int kBarrierBytes = 16;

// Up to four results of a row, which a thread writes at the end: none, or with kVector all four.
template <typename T, bool kVector>
struct Result {
  int64_t at;  // in out
  int stack, out_channel, valid;
  float4 bias, residual;

  __device__ void AskForAddends(const DenseTask<T>& task) {
    if (valid <= 0) return;
    const int count = kVector ? 4 : valid;
    if (task.bias) {
      bias = LoadUpTo4(task.bias + static_cast<int64_t>(stack) * task.out_channels + out_channel, count, kVector);
    }
    if (task.residual) residual = LoadUpTo4(task.residual + at, count, kVector);
  }

  __device__ void Write(const DenseTask<T>& task, float4 sum) const {
    if (valid <= 0) return;
    if (task.bias) sum = sum + bias;
    if (task.residual) sum = sum + residual;
    if (task.relu) sum = Relu(sum);
    StoreQuad<kVector>(task.out + at, sum, valid, false);
  }
};

template <typename T, bool kVector>
__device__ __forceinline__ Result<T, kVector> FindResult(const DenseTask<T>& task, const DensePlace& at) {
  const int quad_shift = task.lane_shift + (kLaneOutChannels<T> == 8 ? 1 : 0);
  const int image = static_cast<int>(threadIdx.x) >> quad_shift;
  const int quad = static_cast<int>(threadIdx.x) & ((1 << quad_shift) - 1);
  const int block_out_channel = at.out_channel - (at.lane & ((1 << task.lane_shift) - 1)) * kLaneOutChannels<T>;
  const bool own = task.parts == 1 || threadIdx.x % task.parts == at.part;
  Result<T, kVector> result{};
  result.stack = at.stack;
  result.out_channel = block_out_channel + quad * 4;
  result.valid = own && image < at.images ? min(task.out_channels - result.out_channel, 4) : 0;
  result.at = (at.image + image) * task.out_channels + result.out_channel;
  return result;
}

// The sums of a warp's groups of lanes, in all of them.
template <int kImages, int kOutChannels>
__device__ __forceinline__ void AddGroups(float (&sums)[kImages][kOutChannels], int lane_shift) {
  for (int step = kWarp / 2; step >> lane_shift; step /= 2) {
#pragma unroll
    for (int m = 0; m < kImages; ++m) {
#pragma unroll
      for (int i = 0; i < kOutChannels; ++i) sums[m][i] += __shfl_xor_sync(0xffffffffu, sums[m][i], step);
    }
  }
}

#if __CUDA_ARCH__ >= 900
// The cluster reduction: blocks that have parts of the channels send each other their sums, one way. Thread i of block
// i % parts adds the sums of thread i of all blocks, in their order.
struct Slots {
  uint64_t* full;  // barrier
  float4* sums;    // [parts, slots]
  int part, parts, slots;

  __device__ Slots(unsigned char* memory, const DensePlace& at, int all_parts, int results)
      : full(reinterpret_cast<uint64_t*>(memory)),
        sums(reinterpret_cast<float4*>(memory + kBarrierBytes)),
        part(static_cast<int>(at.part)),
        parts(all_parts),
        slots((results + parts - 1) / parts) {
    if (parts == 1) return;
    if (threadIdx.x == 0) {
      const int own = (results - part + parts - 1) / parts;
      OpenSlots(full, own * (parts - 1) * static_cast<int>(sizeof(float4)));
    }
    ArriveAtCluster();
  }

  // The sum over the blocks, in the threads that own one; `valid`: this thread has a sum.
  __device__ float4 Exchange(float4 own, bool valid) const {
    WaitForCluster();
    const int owner = static_cast<int>(threadIdx.x) % parts, slot = static_cast<int>(threadIdx.x) / parts;
    if (!valid) return own;
    if (owner != part) {
      SendToBlock(owner, &sums[part * slots + slot], own, full);
      return own;
    }
    WaitForBytes(full, 0);
    float4 sum = part == 0 ? own : sums[slot];
#pragma unroll 1
    for (int p = 1; p < parts; ++p) sum = sum + (p == part ? own : sums[p * slots + slot]);
    return sum;
  }
};
#endif

template <typename T, int kImages, bool kVector>
__global__ void __launch_bounds__(kDenseThreads, 1) DenseKernel(const __grid_constant__ DenseTask<T> task) {
  constexpr int kOutChannels = kLaneOutChannels<T>, kQuads = kOutChannels / 4;
  extern __shared__ __align__(16) unsigned char shared[];
  const DensePlace at = FindDensePlace<T, kImages>(task);
  const int lanes = 1 << task.lane_shift, quads = lanes * kQuads;  // quads: float4 of a row of a block's results
  const T* kernel =                                                // [C, K] from this lane's output channels on
      task.kernel + static_cast<int64_t>(at.stack) * task.channels * task.out_channels + at.out_channel;
  const Unseen unseen = FindUnseen(task, at);
  uint4 weight[kDenseRun];
  LoadUnseen<T, kVector>(task, at, unseen, kernel, weight);
#if __CUDA_ARCH__ >= 900
  const Slots slots(shared + task.slots_at, at, static_cast<int>(task.parts), kImages * quads);
#endif
  Result<T, kVector> result;
  if constexpr (kImages == 1) {  // with more rows registers are short
    result = FindResult<T, kVector>(task, at);
    result.AskForAddends(task);
  }

  DenseRing<kImages> ring;
  ring.values = reinterpret_cast<float*>(shared) + at.warp * task.ring * kImages;
  ring.rows = reinterpret_cast<int*>(shared) + kDenseWarps * task.ring * kImages + at.warp * task.ring;
  ring.mask = task.ring - 1;
  float sums[kImages][kOutChannels] = {};
  SumRows<T, kImages, kVector>(task, at, unseen, kernel, ring, weight, sums);
  if constexpr (kImages > 1) {
    result = FindResult<T, kVector>(task, at);
    result.AskForAddends(task);
  }
  AddGroups<kImages, kOutChannels>(sums, task.lane_shift);

  float4* warp_sums = reinterpret_cast<float4*>(shared);  // [kDenseWarps, kImages, quads], in the place of the rings
  __syncthreads();
  if (at.group == 0) {
#pragma unroll
    for (int m = 0; m < kImages; ++m) {
#pragma unroll
      for (int q = 0; q < kQuads; ++q) {
        warp_sums[(at.warp * kImages + m) * quads + at.lane * kQuads + q] =
            make_float4(sums[m][4 * q], sums[m][4 * q + 1], sums[m][4 * q + 2], sums[m][4 * q + 3]);
      }
    }
  }
  __syncthreads();
  const int results = kImages * quads, thread = threadIdx.x;
  if (thread >= results && task.parts == 1) return;
  float4 sum = {0.f, 0.f, 0.f, 0.f};
  if (thread < results) {
    sum = AddParts<kDenseWarps>(warp_sums + thread, results);
  }
#if __CUDA_ARCH__ >= 900
  if (task.parts > 1) sum = slots.Exchange(sum, thread < results);
#endif
  result.Write(task, sum);
}

// Entries of a ring that holds two rounds of loads and what one round of the lister adds.
template <int kImages>
int RingEntries(int lane_shift) {
  const int wanted = 2 * kDenseRun * (kWarp >> lane_shift) + DenseRows<kImages>::kListed;
  int entries = kWarp;
  while (entries < wanted) entries *= 2;
  return entries;
}

template <typename T, int kImages>
size_t SharedBytes(const DenseTask<T>& task) {
  const size_t results = kImages * (kLaneOutChannels<T> << task.lane_shift) / 4 + task.parts;
  return task.slots_at + (task.parts > 1 ? kBarrierBytes + results * sizeof(float4) : 0);
}

// Completes a task whose lane_shift and parts are set.
template <typename T, int kImages>
void CompleteTask(DenseTask<T>* task) {
  const int out_channels = kLaneOutChannels<T> << task->lane_shift;
  task->out_channel_tiles = static_cast<unsigned>((task->out_channels + out_channels - 1) / out_channels);
  const int workers = kDenseWarps * static_cast<int>(task->parts);
  task->first = std::min(kDenseRun * (kWarp >> task->lane_shift), (task->channels + workers - 1) / workers);
  task->ring = RingEntries<kImages>(task->lane_shift);
  const int rings = kDenseWarps * task->ring * (kImages + 1) * static_cast<int>(sizeof(float));
  const int sums = kDenseWarps * kImages * out_channels * static_cast<int>(sizeof(float));
  task->slots_at = std::max(rings, sums);
}

// Segments of 2^lane_shift lanes, and as many blocks of a cluster to share the channels as run at once.
template <typename T, int kImages>
int64_t CompleteWithParts(int lane_shift, const DeviceInfo& device, int64_t tiles_of_images, DenseTask<T>* task) {
  task->lane_shift = lane_shift;
  task->parts = 1;
  CompleteTask<T, kImages>(task);
  const int64_t tiles = task->out_channel_tiles * tiles_of_images;
  while (task->parts < kMaxParts && tiles <= device.clusters[2 * task->parts]) task->parts *= 2;
  CompleteTask<T, kImages>(task);
  return tiles * task->parts;
}

// The narrowest segments with at most a block for each SM; a long stream's are whole lines of the cache, a very long
// one's two lines, where clusters make as many blocks of them.
template <typename T, int kImages>
void ChooseTiles(const DeviceInfo& device, int64_t tiles_of_images, DenseTask<T>* task) {
  const int64_t bytes = static_cast<int64_t>(task->channels) * task->out_channels * sizeof(T);
  for (int lines = bytes >= kVeryLongStream ? 1 : 0; bytes >= kLongStream && lines >= 0; --lines) {
    const int64_t blocks = CompleteWithParts<T, kImages>(kLineShift + lines, device, tiles_of_images, task);
    if (blocks <= device.multiprocessors && 10 * blocks >= 9 * device.multiprocessors) return;
  }
  task->parts = 1;
  int chosen = kLineShift;
  for (int shift = DenseRows<kImages>::kMinLaneShift; shift <= kMaxLaneShift; ++shift) {
    task->lane_shift = shift;
    CompleteTask<T, kImages>(task);
    if (SharedBytes<T, kImages>(*task) > static_cast<size_t>(device.shared_memory)) continue;
    chosen = shift;
    if (task->out_channel_tiles * tiles_of_images <= device.multiprocessors) break;
  }
  task->lane_shift = chosen;
  CompleteTask<T, kImages>(task);
}

template <typename T, int kImages, bool kVector>
Error LaunchTask(const DenseTask<T>& task, int64_t tiles_of_images, cudaStream_t stream) {
  constexpr auto kKernel = DenseKernel<T, kImages, kVector>;
  Error error = Prepare<kKernel>("DenseKernel");
  if (error.failure()) return error;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(tiles_of_images * task.out_channel_tiles * task.parts));
  config.blockDim = dim3(kDenseThreads);
  config.dynamicSmemBytes = SharedBytes<T, kImages>(task);
  config.stream = stream;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = task.parts;
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  config.attrs = &attribute;
  config.numAttrs = task.parts > 1 ? 1 : 0;
  return CheckCuda(cudaLaunchKernelEx(&config, kKernel, task), "DenseKernel");
}

template <typename T, int kImages>
Error LaunchDense(const DeviceCall& call, const DeviceInfo& device, cudaStream_t stream) {
  const ConvArgs& a = call.args;
  DenseTask<T> task{};
  task.x = static_cast<const T*>(call.x);
  task.kernel = static_cast<const T*>(call.kernel);
  task.bias = static_cast<const T*>(call.bias);
  task.residual = static_cast<const T*>(call.residual);
  task.out = static_cast<T*>(call.out);
  task.stack_images = a.images / a.stacks;
  task.image_tiles = static_cast<unsigned>((task.stack_images + kImages - 1) / kImages);
  task.channels = static_cast<int>(a.channels);
  task.out_channels = static_cast<int>(a.out_channels);
  task.relu = a.activation == Activation::kRelu;
  const int64_t tiles_of_images = task.image_tiles * a.stacks;
  ChooseTiles<T, kImages>(device, tiles_of_images, &task);
  if (task.out_channels % kLaneOutChannels<T> == 0) return LaunchTask<T, kImages, true>(task, tiles_of_images, stream);
  return LaunchTask<T, kImages, false>(task, tiles_of_images, stream);
}

bool IsMatrixProduct(const ConvArgs& a) {
  for (int i = 0; i < 2; ++i) {
    if (a.size[i] != 1 || a.kernel_size[i] != 1 || a.pad_low[i] != 0 || a.out_size[i] != 1) return false;
  }
  return a.groups == 1 && a.pool == Pool::kNone;
}

}  // namespace

Error Dense(const DeviceCall& call, Workspace workspace, int device, cudaStream_t stream) {
  if (call.args.pool != Pool::kNone) return Pecr(call, workspace, device, stream);
  if (!IsMatrixProduct(call.args)) return Ecr(call, workspace, device, stream);
  const DeviceInfo& info = GetDeviceInfo(device);
  if (IsDenseRow(call, info)) return DenseRow(call, info, stream);
  return DispatchDtype(call.dtype, [&](auto element) {
    using T = decltype(element);
    const int64_t images = call.args.images / call.args.stacks;
    if (images == 1) return LaunchDense<T, 1>(call, info, stream);
    if (images <= 4) return LaunchDense<T, 4>(call, info, stream);
    return LaunchDense<T, 8>(call, info, stream);
  });
}

}  // namespace jsc
