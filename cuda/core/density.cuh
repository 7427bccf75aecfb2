// The density of a map on the device. Kernels that make the map count its non-zeros; kernels that it decides about read
// the counts.
//
// Layout: kCountRows rows of (non-zeros, elements), each of one block's results. The counted blocks are spread evenly
//   over the grid. A row is (0, 0) where there are fewer blocks, or where its block has no results.
// Why: counting takes no atomics and no pass over the map. It is the same in every run and costs a reader two loads a
//   lane.
// Two kernels with opposite gates stand in one custom call, and one of them returns at once. The second is launched by
//   PDL, so it may start when all blocks of the first have. Where the first is to run, the second has read the counts
//   and waits. Where it is not, both read them at the same time.
// Lost: counting by reading the results again (0.6 to 2.5 us); rows chosen by 64-bit divisions. A return that depends
//   on data, without the vote, costs every later instruction its uniform registers: 8 to 32 bytes of spills in
//   ConvKernel, 10 to 20 registers in MmaKernel.
#ifndef JSC_CUDA_CORE_DENSITY_CUH_
#define JSC_CUDA_CORE_DENSITY_CUH_

#include <algorithm>
#include <limits>

#include "cuda/core/programmatic_launch.cuh"
#include "cuda/core/vectors.cuh"

namespace jsc {

// Where a kernel's blocks write counts. rows [kCountRows, 2] int32, or null.
struct CountTask {
  int2* rows = nullptr;
  int blocks = 0;   // that write results
  Divider by_step;  // of each so many blocks one writes a row
};

inline CountTask CountsOf(int32_t* rows, int64_t blocks) {
  CountTask task;
  task.rows = reinterpret_cast<int2*>(rows);
  task.blocks = static_cast<int>(std::min<int64_t>(blocks, std::numeric_limits<int32_t>::max()));
  task.by_step = Divider((task.blocks + kCountRows - 1) / kCountRows);
  return task;
}

template <typename T>
__device__ T WarpSum(T v) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) v += __shfl_xor_sync(0xffffffffu, v, distance);
  return v;
}

__device__ inline int2 WarpSum(int2 v) {
#if __CUDA_ARCH__ >= 800
  return make_int2(__reduce_add_sync(0xffffffffu, v.x), __reduce_add_sync(0xffffffffu, v.y));
#else
  return make_int2(WarpSum<int>(v.x), WarpSum<int>(v.y));
#endif
}

// (non-zeros, elements) of a map, from rows of counts. All threads of a warp have the same floats, added in one order:
// so gates and ranges of neighbours agree.
__device__ __forceinline__ float2 NonzerosOf(const int32_t* nonzeros, int count) {
  const auto* rows = reinterpret_cast<const int2*>(nonzeros);
  const int lane = threadIdx.x % kWarp;
  auto row = [&](int i) { return i < count ? rows[i] : make_int2(0, 0); };
  const int2 low = row(lane), high = row(lane + kWarp);
  float some = static_cast<float>(low.x) + static_cast<float>(high.x);
  float all = static_cast<float>(low.y) + static_cast<float>(high.y);
#pragma unroll 1
  for (int i = lane + 2 * kWarp; i < count; i += kWarp) {
    some += static_cast<float>(rows[i].x);
    all += static_cast<float>(rows[i].y);
  }
  return {WarpSum(some), WarpSum(all)};
}

// Whether this kernel is to run: the first thing that a kernel asks, with all threads of its warps. The answer is the
// same for the whole grid. A kernel that is not to run must return; the second of two calls LeaveGate in the end.
__device__ inline bool PassesGate(const Gate& gate) {
  if (gate.nonzeros == nullptr) return true;
  LetNextKernelStart();
  const float2 found = NonzerosOf(gate.nonzeros, gate.rows);
  const bool closed = (found.x > gate.threshold * found.y) != gate.above;
  // By a vote the compiler sees that whole warps leave, and keeps using uniform registers in what follows.
  if (!__any_sync(0xffffffffu, closed)) return true;
  WaitForKernelBefore();
  return false;
}

// What comes after both kernels waits for the second one alone, which therefore is not done before the first.
__device__ inline void LeaveGate(const Gate& gate) {
  if (gate.overlaps) WaitForKernelBefore();
}

// Writes the row that block number `block` of those that write results has, if it has one, from what each of its
// threads has written: non-zeros and elements. `scratch` is shared memory for an int2 a warp that no other block
// touches; all threads of the block call. Which of a row's blocks it is changes from row to row, so that their places
// among output channel tiles and splits differ.
__device__ __forceinline__ void WriteCounts(const CountTask& task, uint64_t block, int2 written, int2* scratch) {
  if (task.rows == nullptr || block >= static_cast<uint64_t>(task.blocks)) return;
  const Quotient row = Divide(static_cast<int>(block), task.by_step);
  const int step = task.by_step.divisor, first = static_cast<int>(block) - row.remainder;
  const int chosen = min(Divide(row.quotient * 11, task.by_step).remainder, task.blocks - 1 - first);
  if (row.remainder != chosen) return;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  int2 sum = WarpSum(written);
  __syncthreads();  // scratch is free
  if (lane == 0) scratch[warp] = sum;
  __syncthreads();
  if (warp > 0) return;
  sum = WarpSum(lane < blockDim.x / kWarp ? scratch[lane] : make_int2(0, 0));
  if (lane == 0) task.rows[row.quotient] = sum;
  if (row.quotient > 0) return;
  for (int i = (task.blocks + step - 1) / step + lane; i < kCountRows; i += kWarp) task.rows[i] = make_int2(0, 0);
}

// The number of this block in its grid.
__device__ inline uint64_t GridBlock() {
  return blockIdx.x + gridDim.x * (blockIdx.y + static_cast<uint64_t>(gridDim.y) * blockIdx.z);
}

}  // namespace jsc

#endif  // JSC_CUDA_CORE_DENSITY_CUH_
