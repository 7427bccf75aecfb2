// Steps 1 and 2 of the COO* convolution (sparse/coo/coo.cu): where a block works, what its shared memory holds, and how
// a chunk of x becomes one list of non-zeros per channel.
#ifndef JSC_CUDA_SPARSE_COO_LISTS_CUH_
#define JSC_CUDA_SPARSE_COO_LISTS_CUH_

#include "cuda/core/copies.cuh"
#include "cuda/core/elements.cuh"
#include "cuda/sparse/coo/micro.cuh"
#include "cuda/sparse/coo/task.cuh"

namespace jsc {

// Where a block works.
struct CooPlace {
  int64_t image;
  int stack, group, out_channel;  // first output channel, within the group
  int out[2];                     // first result
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
  const Quotient out_channel = Divide(split.quotient, task.by_out_channel_tiles);
  const Quotient x = Divide(out_channel.quotient, task.by_tiles[1]);
  const Quotient y = Divide(x.quotient, task.by_tiles[0]);
  const Quotient group = Divide(y.quotient, task.by_groups);
  CooPlace b;
  b.image = group.quotient;
  b.stack = group.quotient / task.images_per_stack;
  b.group = group.remainder;
  b.out_channel = out_channel.remainder * (kWarp * kShape.out_channels * task.plan.out_channel_warps);
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
  static constexpr int kStage = kShape.taps() * kWarp * kShape.out_channels;

  CooEntry* lists;  // [chunk channel, kPitch]
  T* weights;       // [stage, tap, lane, output channel] of this warp
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

}  // namespace jsc

#endif  // JSC_CUDA_SPARSE_COO_LISTS_CUH_
