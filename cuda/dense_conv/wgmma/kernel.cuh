// Engine wgmma: dense convolution by Hopper's warpgroup products, for layers that are bound by multiplication. Details:
// docs/design/kernels/wgmma.md.
//
// Computes out[pixel][output channel] = pool(relu(sum over taps and channels of x * kernel + bias + residual)).
// Layout: output channels are the rows of a product and pixels its columns, of which wgmma takes any multiple of 8.
//   NHWC and HWIO are read as they lie. TMA brings both operands to pipeline stages (wgmma/copies.cuh).
// Why this tiling: tiles of 56, 112 and 224 pixels cut the maps of the common networks without rest. Tiles of 96 and
//   192 make as many tiles of large batches as an H100 or H200 has SMs (132). Tiles of 64, at 3xTF32, do so for 56 to
//   224 rows. With stride 1 a tile is a patch 8 results wide. Its pixels are staged once for all taps, and a tap is a
//   shift of the address where a product begins to read. Copies of pixels are then a quarter to a ninth of im2col's.
//   Elsewhere TMA brings the pixels under each tap (im2col).
// Pools: a 2x2 window is taken of the sums of a patch of 14 or 28 rows, which no window crosses.
// float32 at HIGHEST: 3xTF32, wgmma/tf32x3.cuh.
// Small maps: blocks of a cluster split the steps of a tile and add their sums in a fixed order. Three or more blocks
//   use DSMEM slots (wgmma/cluster_reduction.cuh); two read each other's sums (wgmma/reduction.cuh).
// Two consumer groups: a float32 block of 64 output channels that has an SM to itself, outside of chains, may split its
//   steps between two consumer groups. Each has a pipeline of its own, so a scheduler has two warps. At HIGHEST from a
//   few steps on; in TF32 with 112 pixels, where the model expects less time (from 36 steps on).
// Large maps: a persistent kernel with a static tile scheduler. Results leave from registers while the next tile's
//   copies come.
// Bound by: the tensor cores on large maps, else launch, first copies and the cluster reduction.
// Lost: barriers made by a lane each; TF32 weights waited for before every product; pairs of blocks that share copies
//   of weights or pixels (multicast).
// May change: tiles, pipelines and epilogues, while results stay bitwise repeatable. Tests: tests/cuda/test_direct.py,
// tests/cuda/test_groups.py.
#ifndef JSC_CUDA_DENSE_CONV_WGMMA_KERNEL_CUH_
#define JSC_CUDA_DENSE_CONV_WGMMA_KERNEL_CUH_

#include "cuda/dense_conv/wgmma/cluster_reduction.cuh"
#include "cuda/dense_conv/wgmma/launch.h"
#include "cuda/dense_conv/wgmma/recompute.cuh"
#include "cuda/dense_conv/wgmma/reduction.cuh"
#include "cuda/dense_conv/wgmma/results.cuh"
#include "cuda/dense_conv/wgmma/tf32x3.cuh"

namespace jsc {

#if __CUDA_ARCH__ >= 900
// Whether threads find the places of their results while the first copies come, rather than when all is multiplied. At
// 3xTF32 registers are scarce before.
template <class U>
constexpr bool kFindsEarly = !U::kTf32x3;

// From a block's sums in its shared memory to results, alone or with the blocks that share the tile. All threads.
// early: where they are and go, if that was found early.
template <class U, typename T, typename Task>
__device__ __forceinline__ int2 FinishTile(const Task& task, float4 bias, float* tile, const WgmmaPlace& early,
                                           const WgmmaWriter<U, T>& early_writer) {
  int block = blockIdx.x;
  asm volatile("" : "+r"(block));  // the place is found again, not kept in registers
  const WgmmaPlace at = kFindsEarly<U> ? early : FindWgmmaPlace<U>(task, block);
  if constexpr (U::kTf32x3) bias = WgmmaWriter<U, T>::LoadBias(task, at);  // registers are scarce before
  WgmmaWriter<U, T> writer = kFindsEarly<U> ? early_writer : WgmmaWriter<U, T>(task, at);
  constexpr int kBatch = U::kPixels == 64 ? 8 : 7;  // rows
  if (task.splits == 1) {
    __syncthreads();
    if (task.pool == Pool::kNone) {
      writer.template WriteRows<kBatch, 1>(0, bias, {tile});
    } else {
      writer.template WritePooledRows<2, 1>(0, bias, {tile});
    }
  } else if (task.splits == 2 || U::kHasSlots) {  // more blocks of a kHasSlots tile come together through DSMEM slots
    WriteAsPair<4>(writer, at.split, bias, tile);
  } else if (task.splits <= 4) {
    WriteTogether<2, 4>(writer, at.split, task.splits, bias, tile);
  } else {
    WriteTogether<1, 8>(writer, at.split, task.splits, bias, tile);
  }
  return writer.tally.Row();
}
#endif

#if __CUDA_ARCH__ >= 900
// Adds the second consumer group's sums to the first's. stages: the second consumer group's pipelines, which have room
// for its sums. joined: a barrier that counts the second consumer group's threads. (A named barrier and a count of
// warps do too, but racecheck reports a race there.)
template <class U>
__device__ __forceinline__ void JoinConsumerGroups(int consumer_group, float (&sums)[U::kPixels / 2],
                                                   unsigned char* stages, uint32_t joined) {
  constexpr int kQuads = U::kPixels / 8;
  static_assert(kConsumerGroupSumsBytes * U::kPixels == U::kConsumers * static_cast<int>(sizeof(sums)));
  auto* shared = reinterpret_cast<float4*>(stages) + threadIdx.x % U::kConsumers;
  if (consumer_group == 1) {
    asm volatile("bar.sync 3, %0;" ::"n"(U::kConsumers) : "memory");  // all stages are read
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      shared[i * U::kConsumers] = {sums[i * 4], sums[i * 4 + 1], sums[i * 4 + 2], sums[i * 4 + 3]};
    }
    Arrive(joined);
    return;
  }
  WaitForBytes(joined, 0);
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    const float4 v = shared[i * U::kConsumers];
    sums[i * 4] += v.x, sums[i * 4 + 1] += v.y, sums[i * 4 + 2] += v.z, sums[i * 4 + 3] += v.w;
  }
  PinSums(sums);  // read before others' sums may come in their place
}
#endif

template <class U, typename T>
__global__ void __launch_bounds__(U::kThreads, U::kResident)
    WgmmaKernel(const __grid_constant__ WgmmaTaskOf<U, T> task, const __grid_constant__ MapsOf<U> maps) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ unsigned char shared[];
  __shared__ BarriersOf<U> all_barriers[U::kConsumerGroups];
  __shared__ int2 scratch[U::kThreads / kWarp];
  __shared__ uint64_t slots_full, joined;  // the latter by two consumer groups only
  if (!PassesGate(task.gate)) return;
  unsigned char* stages = shared + (-SharedAddress(shared) & (kSwizzleBytes - 1));
  unsigned char* slots = stages + task.slots_at;
  auto* tile = reinterpret_cast<float*>(stages);  // sums take the stages' place
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarp, 0);
  constexpr int kMultiplying = U::kMultipliers / kWarp;  // warps
  const bool copies_stages = warp >= kMultiplying;
  const int consumer_group = U::kConsumerGroups == 1 ? 0
                             : copies_stages         ? warp - kMultiplying
                                                     : warp / (U::kConsumers / kWarp);
  unsigned char *pixels = stages + consumer_group * task.consumer_group_bytes,
                *weights = pixels + task.pixel_stages * task.pixel_bytes;
  BarriersOf<U>& barriers = all_barriers[consumer_group];
  WgmmaPlace at = FindWgmmaPlace<U>(task, blockIdx.x);
  const WgmmaPlace mine = PlaceOfConsumerGroup<U>(at, consumer_group);
  const bool uses_slots = U::kSpillsSlots || (U::kHasSlots && task.uses_slots),
             slots_apart = uses_slots && task.slots_at > 0;
  int2 counted = {0, 0};
  float4 bias = {};
  [[maybe_unused]] WgmmaWriter<U, T> writer(task);
  if constexpr (!U::kTf32x3) bias = WgmmaWriter<U, T>::LoadBias(task, at);
  if (copies_stages) {
    if (IsElected()) {
      PrefetchMapsOf<U>(maps);
      InitBarriers(barriers, U::kConsumers / kWarp);
      if (U::kConsumerGroups > 1 && consumer_group == 0) InitBarrier(&joined, U::kConsumers);  // for threads alone
    }
    __syncwarp();
    asm volatile("bar.arrive 1, %0;" ::"n"(U::kThreads) : "memory");  // the first copies wait for nobody
    if (slots_apart) ArriveAtCluster();
    StageCopies<U, T> copies(task, maps, pixels, weights, barriers);
    copies.AskForTile(mine, task.gate.in_chain);
    __syncwarp();
    if (uses_slots && !slots_apart) ArriveAtCluster();
    if (uses_slots) WaitForCluster();
  } else {
    asm volatile("bar.sync 1, %0;" ::"n"(U::kThreads) : "memory");
    float sums[U::kPixels / 2];
    WalkOf<U, T> walk(task, mine, SharedAddress(pixels), SharedAddress(weights), barriers);
    if constexpr (kFindsEarly<U>) {
      if (!uses_slots) writer.Find(at);  // while the first copies come
    }
    if constexpr (U::kHasSlots) {
      SlotReduction<U, T> reduction(task);
      if (uses_slots) {  // while the first copies come
        if (threadIdx.x == 0) reduction.Init(at, &slots_full);
        if (consumer_group == 0) reduction.Find(at, warp, SharedAddress(slots), SharedAddress(&slots_full));
        if (U::kSpillsSlots && consumer_group == 0) reduction.Spill(SharedAddress(stages + task.spill_at));
        if (slots_apart) ArriveAtCluster();
      }
      MultiplySteps(walk, mine.end_step - mine.first_step, sums);
      if constexpr (U::kConsumerGroups > 1)
        JoinConsumerGroups<U>(consumer_group, sums, stages + task.consumer_group_bytes, SharedAddress(&joined));
      if (uses_slots && consumer_group != 0) {
        if (!slots_apart) ArriveAtCluster();
        WaitForCluster();
      } else if (uses_slots) {
        if constexpr (U::kTf32x3) RecomputeNonFinite<U>(task, sums, tile);
        if (!slots_apart) ArriveAtCluster();  // done with the stages
        WaitForCluster();
        if constexpr (U::kSpillsSlots)
          reduction.Reload(warp, SharedAddress(&slots_full), SharedAddress(stages + task.spill_at));
        reduction.Send(sums);
        if constexpr (U::kSpillsSlots) reduction.LoadBias();
        WaitToWrite(task.gate);
        reduction.Write(slots, &slots_full);
        counted = reduction.tally.Row();
      }
    } else {
      MultiplySteps(walk, mine.end_step - mine.first_step, sums);
      if constexpr (U::kConsumerGroups > 1)
        JoinConsumerGroups<U>(consumer_group, sums, stages + task.consumer_group_bytes, SharedAddress(&joined));
    }
    if constexpr (U::kTf32x3) {
      if (!uses_slots && consumer_group == 0) StoreTf32x3<U>(task, sums, tile);
    } else if (!uses_slots && consumer_group == 0) {
      asm volatile("bar.sync 2, %0;" ::"n"(U::kConsumers) : "memory");  // all stages are read
      StepWeights<U, T>::Store(sums, tile);
    }
  }
  if (!uses_slots) {
    WaitToWrite(task.gate);
    counted = FinishTile<U, T>(task, bias, tile, at, writer);
  }
  WriteCounts(task.counts, GridBlock(), counted, scratch);
  LeaveGate(task.gate);
#endif
}

// The persistent kernel. Only some blocks have a tile in the last round. The scheduler gives those to one block of each
// SM first, whether an SM has blocks with neighbouring numbers or those that are a round apart.
template <class U, typename T>
__global__ void __launch_bounds__(U::kThreads, U::kResident)
    PersistentWgmmaKernel(const __grid_constant__ WgmmaTask<T> task, const __grid_constant__ WgmmaMaps maps) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ unsigned char shared[];
  __shared__ WgmmaBarriers barriers;
  __shared__ int2 scratch[U::kThreads / kWarp];
  if (!PassesGate(task.gate)) return;
  unsigned char* stages = shared + (-SharedAddress(shared) & (kSwizzleBytes - 1));
  unsigned char* weights = stages + task.pixel_stages * task.pixel_bytes;
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarp, 0);
  const int blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x), round = blocks / task.residents;
  const int first = (block + block / round) % task.residents * round + block / task.residents;
  int2 counted = {0, 0};
  if (warp == U::kConsumers / kWarp) {
    if (IsElected()) {
      PrefetchMapsOf<U>(maps);
      InitBarriers(barriers, U::kConsumers / kWarp);
    }
    __syncwarp();
    asm volatile("bar.arrive 1, %0;" ::"n"(U::kThreads) : "memory");
    StageCopies<U, T> copies(task, maps, stages, weights, barriers);
#pragma unroll 1
    for (int tile = first; tile < task.tiles; tile += blocks) {
      copies.AskForTile(FindWgmmaPlace<U>(task, tile), task.gate.in_chain && tile == first);
    }
    __syncwarp();
  } else {
    WgmmaPlace at = FindWgmmaPlace<U>(task, first);
    ResultWriter<U, T> writer(task);
    asm volatile("bar.sync 1, %0;" ::"n"(U::kThreads) : "memory");
    StepWalk<U, T> walk(task, at, SharedAddress(stages), SharedAddress(weights), barriers);
#pragma unroll 1
    for (int tile = first; tile < task.tiles; tile += blocks) {
      at = FindWgmmaPlace<U>(task, tile);
      const float2 bias = ResultWriter<U, T>::LoadBias(task, at);
      walk.Begin(at);
      float sums[U::kPixels / 2];
      MultiplySteps(walk, at.end_step - at.first_step, sums);
      walk.End();
      WaitToWrite(task.gate);
      writer.Write(FindWgmmaPlace<U>(task, tile), bias, sums);
    }
    counted = writer.tally.Row();
  }
  WriteCounts(task.counts, GridBlock(), counted, scratch);
  LeaveGate(task.gate);
#endif
}

// Launches either kernel on a grid of `blocks` for each stack.
template <class U, typename Task, auto kKernel>
Error LaunchKernel(const DeviceCall& call, const WgmmaPlan& plan, int blocks, Task task, const MapsOf<U>& maps,
                   cudaStream_t stream) {
  Error error = Prepare<kKernel>("WarpgroupKernel");
  if (error.failure()) return error;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks), 1, static_cast<unsigned>(call.args.stacks));
  config.blockDim = dim3(U::kThreads);
  config.dynamicSmemBytes = plan.shared_bytes;
  config.stream = stream;
  task.counts = CountsOf(call.counts, static_cast<int64_t>(config.gridDim.x) * config.gridDim.z);
  if (MayOverlap<kKernel>(&config, call.in_front)) task.gate.overlaps = true;
  LaunchAttributes attributes(plan.splits > 1 ? plan.splits : 0, task.gate);
  config.attrs = attributes.list;
  config.numAttrs = attributes.count;
  return CheckCuda(cudaLaunchKernelEx(&config, kKernel, task, maps), "WarpgroupKernel");
}

template <class U, typename T>
Error LaunchWgmma(const DeviceCall& call, const WgmmaPlan& plan, const Tf32x3Maps& maps, cudaStream_t stream) {
  using Task = WgmmaTaskOf<U, T>;
  Task task{MakeWgmmaTask<T>(call, plan)};
  if constexpr (U::kTf32x3) AddOperands(call, &task);
  if constexpr (!U::kTf32x3 && U::kConsumerGroups == 1) {
    if (plan.scheduler.blocks > 0) {
      return LaunchKernel<U, Task, PersistentWgmmaKernel<U, T>>(call, plan, plan.scheduler.blocks, task, maps, stream);
    }
  }
  const int blocks = plan.pixel_tiles * plan.out_channel_tiles * plan.splits;
  return LaunchKernel<U, Task, WgmmaKernel<U, T>>(call, plan, blocks, task, maps, stream);
}

// A call of elements T by the tile that its plan has, of those whose pixels are listed.
template <typename T, int kOutChannels, int kPixels, int... kMorePixels>
Error LaunchWgmmaPixels(const DeviceCall& call, const WgmmaPlan& plan, const Tf32x3Maps& maps, cudaStream_t stream) {
  if constexpr (sizeof...(kMorePixels) > 0) {
    if (plan.pixels != kPixels) {
      return LaunchWgmmaPixels<T, kOutChannels, kMorePixels...>(call, plan, maps, stream);
    }
  }
  return LaunchWgmma<WgmmaTile<T, kOutChannels, kPixels>, T>(call, plan, maps, stream);
}

template <typename T>
Error LaunchWgmmaTile(const DeviceCall& call, const WgmmaPlan& plan, const Tf32x3Maps& maps, cudaStream_t stream) {
  const auto launch = plan.out_channels == 64 ? LaunchWgmmaPixels<T, 64, 56, 96, 112, 224>
                                              : LaunchWgmmaPixels<T, 128, 56, 96, 112, 192, 224>;
  return launch(call, plan, maps, stream);
}

template <typename T>
Error LaunchWgmmaPlan(const DeviceCall& call, const WgmmaPlan& plan, const Tf32x3Maps& maps, cudaStream_t stream) {
  if constexpr (sizeof(T) == 4) {
    using SlicedK = WgmmaTile<T, 64, 112, false, Tf32x3Slots::kNone, false, 2>;
    if (plan.consumer_groups > 1) return LaunchWgmma<SlicedK, T>(call, plan, maps, stream);
  }
  return LaunchWgmmaTile<T>(call, plan, maps, stream);
}

}  // namespace jsc

#endif  // JSC_CUDA_DENSE_CONV_WGMMA_KERNEL_CUH_
