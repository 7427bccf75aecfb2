// ECR's two steps for a warp: compress the windows of a group of results into a list, multiply the list by kernel rows.
#ifndef JSC_CUDA_SPARSE_ECR_WINDOW_LISTS_CUH_
#define JSC_CUDA_SPARSE_ECR_WINDOW_LISTS_CUH_

#include "cuda/core/elements.cuh"
#include "cuda/sparse/ecr/window_place.cuh"

namespace jsc {

// A list is read in runs. Each of the kParts parts of a warp takes kRun entries of a run, and the row offsets of a part
// lie side by side for one load. The last run may be half a run. With two parts, a part's values lie side by side too.
// With more, values read at the same time do, so that they come from different banks.
template <int kLanes>
struct ListOrder {
  static constexpr int kParts = kWarp / kLanes;
  static constexpr int kRun = kParts == 2 ? 4 : kListMultiple / kParts;  // 4, 4, 2
  static constexpr int kMultiple = kParts * kRun;
  static constexpr int kHalf = kMultiple / 2;
  static constexpr int kStep = kParts == 2 ? 1 : kParts;  // between the values of a part

  // Where the row offset of entry number `slot` goes.
  __device__ static int RowSlot(int slot) {
    if (kParts == 2) return slot;
    const int in_run = slot % kMultiple;
    return slot - in_run + in_run % kParts * kRun + in_run / kParts;
  }
};

// Zeros of either sign are no reason to keep an entry; NaN is.
__device__ inline bool AnyNonzero(float4 v) {
  return ((__float_as_uint(v.x) | __float_as_uint(v.y) | __float_as_uint(v.z) | __float_as_uint(v.w)) & 0x7fffffffu) !=
         0;
}

// Writes the list of an item for rows [item.first_row, item.first_row + rows) of the chunk. Returns its length, a
// multiple of ListOrder::kHalf. The tail is zeros times the row of zeros behind the stage's kernel rows, so it adds
// nothing whatever the kernel holds. Several candidates are read before the first ballot: one latency for all of them.
template <typename T, int kLanes>
__device__ int Compress(const T* patch, const int* row_offset, const WarpItem& item, int rows, int zero_row,
                        float4* values, uint32_t* list) {
  using Order = ListOrder<kLanes>;
  constexpr uint32_t kRowBytes = kLanes * kLaneChannels * sizeof(T);
  constexpr int kBallots = 3;  // whose candidates are in registers at a time
  const int lane = threadIdx.x % kWarp, first = item.first_row + lane;
  const auto* corner = reinterpret_cast<const char*>(patch);
  const char* const pixels[kPixels] = {corner + item.base.x, corner + item.base.y, corner + item.base.z,
                                       corner + item.base.w};
  const uint32_t to_value = SharedAddress(values), to_row = SharedAddress(list), lower_lanes = (1u << lane) - 1;
  int count = 0;
#pragma unroll 1
  for (int start = 0; start < rows; start += kBallots * kWarp) {
    float4 v[kBallots];
#pragma unroll
    for (int i = 0; i < kBallots; ++i) {
      if (i > 0 && start + i * kWarp >= rows) break;
      const int at = row_offset[first + start + i * kWarp];
      auto load = [&](int p) { return ToFloat(*reinterpret_cast<const T*>(pixels[p] + at)); };
      v[i] = {load(0), load(1), load(2), load(3)};
    }
#pragma unroll
    for (int i = 0; i < kBallots; ++i) {
      const int row = start + i * kWarp;
      if (i > 0 && row >= rows) break;
      const bool kept = lane + row < rows && AnyNonzero(v[i]);
      const unsigned mask = __ballot_sync(0xffffffffu, kept);
      const int slot = count + __popc(mask & lower_lanes);
      StoreShared(to_value + slot * 16, v[i], kept);
      StoreShared(to_row + Order::RowSlot(slot) * 4, (first + row) * kRowBytes, kept);
      count += __popc(mask);
    }
  }
  const int padded = (count + Order::kHalf - 1) & -Order::kHalf, slot = count + lane;
  StoreShared(to_value + slot * 16, float4{0.f, 0.f, 0.f, 0.f}, slot < padded);
  StoreShared(to_row + Order::RowSlot(slot) * 4, zero_row * kRowBytes, slot < padded);
  __syncwarp();
  return padded;
}

// The row offsets of one part in one run.
template <int kRun>
struct RunRows {
  uint32_t row[kRun];

  __device__ void Load(const uint32_t* from) {
    if constexpr (kRun == 4) {
      const uint4 v = *reinterpret_cast<const uint4*>(from);
      row[0] = v.x, row[1] = v.y, row[2] = v.z, row[3] = v.w;
    } else if constexpr (kRun == 2) {
      const uint2 v = *reinterpret_cast<const uint2*>(from);
      row[0] = v.x, row[1] = v.y;
    } else {
      row[0] = *from;
    }
  }
};

__device__ inline void MultiplyAdd(float4 value, float4 low, float4 high, float (&sums)[kPixels][kLaneChannels]) {
  const float v[kPixels] = {value.x, value.y, value.z, value.w};
  const float w[kLaneChannels] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
  for (int p = 0; p < kPixels; ++p) {
#pragma unroll
    for (int k = 0; k < kLaneChannels; ++k) sums[p][k] = fmaf(v[p], w[k], sums[p][k]);
  }
}

// With 4 lanes over 32 channels two parts of the warp read weights in one shared-memory pass. Odd parts read the upper
// half of a row first, so that the two meet in different banks; their sums are swapped back at the end.
template <int kLanes>
__device__ bool SwapsHalves() {
  return kLanes == 4 && (threadIdx.x / kLanes) % 2 != 0;
}

// sums[pixel][channel] += values x kernel rows of a list, for channels 4 * lane + k and, with k >= 4, as many again
// behind the lower half of the row.
template <typename T, int kLanes>
__device__ void Accumulate(const T* kernel, const float4* values, const uint32_t* list, int count,
                           float (&sums)[kPixels][kLaneChannels]) {
  using Order = ListOrder<kLanes>;
  const int lane = threadIdx.x % kWarp, part = lane / kLanes;
  const int swap = SwapsHalves<kLanes>() ? kLanes * 4 : 0;
  const auto* low = reinterpret_cast<const char*>(kernel + lane % kLanes * 4 + swap);
  const auto* high = reinterpret_cast<const char*>(kernel + lane % kLanes * 4 + kLanes * 4 - swap);
  auto multiply = [&](const uint32_t* rows, const float4* of_part, int steps) {
#pragma unroll
    for (int e = 0; e < steps; ++e) {
      MultiplyAdd(of_part[e * Order::kStep], Load4(reinterpret_cast<const T*>(low + rows[e])),
                  Load4(reinterpret_cast<const T*>(high + rows[e])), sums);
    }
  };
  const int whole = count & -Order::kMultiple;
  // Of this part in a run and, where there are two parts, in half a run.
  const int in_run = part * (Order::kParts == 2 ? Order::kRun : 1);
  const int in_half = part * (Order::kParts == 2 ? Order::kRun / 2 : 1);
  RunRows<Order::kRun> next;
  if (whole > 0) next.Load(list + part * Order::kRun);
#pragma unroll 1
  for (int i = 0; i < whole; i += Order::kMultiple) {
    const RunRows<Order::kRun> rows = next;
    if (i + Order::kMultiple < whole) next.Load(list + i + Order::kMultiple + part * Order::kRun);
    multiply(rows.row, values + i + in_run, Order::kRun);
  }
  if (whole == count) return;
  RunRows<Order::kRun / 2> rows;
  rows.Load(list + whole + part * (Order::kParts == 2 ? Order::kRun / 2 : Order::kRun));
  multiply(rows.row, values + whole + in_half, Order::kRun / 2);
}

// Adds up the parts of a warp. Parts exchange halves: of the four pixels, then of the two that are left, then (8 parts)
// of the channels, so that each ends with its own share in front.
template <int kLanes>
__device__ void MergeParts(float (&s)[kPixels][kLaneChannels]) {
  constexpr int kParts = kWarp / kLanes;
  const int lane = threadIdx.x % kWarp;
  // Keeps one of a pair and adds the partner's.
  auto exchange = [&](float low, float high, int distance) {
    const bool upper = lane & distance;
    return (upper ? high : low) + __shfl_xor_sync(0xffffffffu, upper ? low : high, distance);
  };
#pragma unroll
  for (int i = 0; i < kPixels * 4; ++i) {
    const float low = s[i / 4][i % 4], high = s[i / 4][i % 4 + 4];
    s[i / 4][i % 4] = SwapsHalves<kLanes>() ? high : low;
    s[i / 4][i % 4 + 4] = SwapsHalves<kLanes>() ? low : high;
  }
#pragma unroll
  for (int k = 0; k < kLaneChannels; ++k) {
    s[0][k] = exchange(s[0][k], s[2][k], kWarp / 2);
    s[1][k] = exchange(s[1][k], s[3][k], kWarp / 2);
    if (kParts >= 4) s[0][k] = exchange(s[0][k], s[1][k], kWarp / 4);
  }
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    if (kParts >= 8) s[0][k] = exchange(s[0][k], s[0][k + 4], kWarp / 8);
  }
}

}  // namespace jsc

#endif  // JSC_CUDA_SPARSE_ECR_WINDOW_LISTS_CUH_
