// ECR's two steps for a warp: compress the windows of a group of results into a list, multiply the list by kernel rows.
#ifndef JSC_CUDA_WINDOW_LISTS_CUH_
#define JSC_CUDA_WINDOW_LISTS_CUH_

#include "conv_task.cuh"

namespace jsc {

// A list is read in runs: each of the kParts parts of a warp takes kRun entries of a run, part p those at p, p + kParts
// and so on, so that values read at the same time lie side by side. Their row offsets are stored part by part for one
// load.
template <int kLanes>
struct ListOrder {
  static constexpr int kParts = kWarp / kLanes;
  static constexpr int kRun = kParts == 2 ? 4 : kListMultiple / kParts;  // 4, 4, 2
  static constexpr int kMultiple = kParts * kRun;

  // Where the row offset of entry number `slot` goes.
  __device__ static int RowSlot(int slot) {
    const int in_run = slot % kMultiple;
    return slot - in_run + in_run % kParts * kRun + in_run / kParts;
  }
};

// Writes a group's list for kernel rows [first, first + rows) and returns its length, a multiple of
// ListOrder::kMultiple: the tail is zeros times the row of zeros behind the stage's kernel rows, so that it adds
// nothing whatever the kernel holds. All candidates are read before the first ballot: one latency for the list, not one
// for each ballot.
template <typename T, int kLanes>
__device__ int Compress(const T* patch, const int* row_offset, int4 base, int first, int rows, int zero_row,
                        float4* values, uint32_t* list) {
  using Order = ListOrder<kLanes>;
  constexpr uint32_t kRowBytes = kLanes * kLaneChannels * sizeof(T);
  constexpr int kBallots = kMaxChunkRows / kWarp;
  const int lane = threadIdx.x % kWarp;
  float4 v[kBallots];
#pragma unroll
  for (int i = 0; i < kBallots; ++i) {
    if (i * kWarp >= rows) break;
    const T* corner = patch + row_offset[first + min(i * kWarp + lane, rows - 1)];
    v[i] = {ToFloat(corner[base.x]), ToFloat(corner[base.y]), ToFloat(corner[base.z]), ToFloat(corner[base.w])};
  }
  int count = 0;
#pragma unroll
  for (int i = 0; i < kBallots; ++i) {
    if (i * kWarp >= rows) break;
    const int row = i * kWarp + lane;
    const bool kept = row < rows && (v[i].x != 0.f || v[i].y != 0.f || v[i].z != 0.f || v[i].w != 0.f);
    const unsigned mask = __ballot_sync(0xffffffffu, kept);
    if (kept) {
      const int slot = count + __popc(mask & ((1u << lane) - 1));
      values[slot] = v[i];
      list[Order::RowSlot(slot)] = (first + row) * kRowBytes;
    }
    count += __popc(mask);
  }
  __syncwarp();
  const int padded = (count + Order::kMultiple - 1) / Order::kMultiple * Order::kMultiple;
  if (count + lane < padded) {
    values[count + lane] = {0.f, 0.f, 0.f, 0.f};
    list[Order::RowSlot(count + lane)] = zero_row * kRowBytes;
  }
  __syncwarp();
  return padded;
}

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
#pragma unroll 1
  for (int i = 0; i < count; i += Order::kMultiple) {
    uint32_t rows[4];
    if constexpr (Order::kRun == 4) {
      *reinterpret_cast<uint4*>(rows) = *reinterpret_cast<const uint4*>(list + i + part * 4);
    } else {
      *reinterpret_cast<uint2*>(rows) = *reinterpret_cast<const uint2*>(list + i + part * 2);
    }
#pragma unroll
    for (int e = 0; e < Order::kRun; ++e) {
      MultiplyAdd(values[i + e * Order::kParts + part], Load4(reinterpret_cast<const T*>(low + rows[e])),
                  Load4(reinterpret_cast<const T*>(high + rows[e])), sums);
    }
  }
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

#endif  // JSC_CUDA_WINDOW_LISTS_CUH_
