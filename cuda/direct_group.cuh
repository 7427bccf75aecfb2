// The direct convolution of groups of few channels: a block has a tile of pixels and the channels of some neighbouring
// groups, all of which it copies once; dense.
//
//   out[pixel][filter] = relu(sum over taps and a group's channels of x * kernel + bias + residual)
//
// Why: the other kernels' tiles are of one group and have 64 or 128 features, of which groups of 16 or 24 fill a part;
//   and they copy the pixels of a tile again under every tap. Maps of such layers are most of what they read and write,
//   so here a block's pixels, with the rim that windows reach, and filters lie in shared memory until it is done.
// A unit is 16 bytes of a pixel's channels under a tap, and a step of tensor cores is two units, wherever they lie: a
//   table has each unit's distance from its window's start. Fragments of pixels are the rows of the products, one
//   ldmatrix each, and a warp's features of one group their columns.
// Layout of shared memory: distances of units; where each pixel of the tile reads and writes; filters [tap, channel,
//   feature of the block]; pixels [image, row, column, channel of the block], rows of both an odd number of 16 bytes
//   (float32 filters: of 32) apart, so that they share no banks.
// Bound by: launch and first copies where there are few blocks, else mma.sync or, in float32, rounding.
#ifndef JSC_CUDA_DIRECT_GROUP_CUH_
#define JSC_CUDA_DIRECT_GROUP_CUH_

#include "direct_deep.cuh"
#include "group_plan.h"

namespace jsc {

template <typename T, int kTiles_, bool kSplit_>
struct GroupTuning {
  static constexpr int kTiles = kTiles_;                   // of eight features of a warp
  static constexpr bool kSplit = kSplit_;                  // float32-accurate products
  static constexpr int kRows = GroupRows(kTiles, kSplit);  // fragments of 16 pixels
  static constexpr int kThreads = kGroupWarps * kWarp;
  static constexpr int kUnit = kUnitBytes / static_cast<int>(sizeof(T));  // channels
  static constexpr bool kWide = sizeof(T) == 4;
  // A thread's results of a pixel: runs of neighbouring features.
  static constexpr int kRuns = kWide ? 1 : kTiles, kRun = kWide ? 2 * kTiles : 2;
};

// Places and sizes in shared memory are in bytes.
template <typename T>
struct GroupTask {
  DeepTask<T> deep;
  int out_high, out_wide;
  int tile_images, tile_high, tile_wide, tile_pixels;  // results of a block
  int box_high, box_wide, box_rows;                    // rows: of all images of a tile
  int units;                                           // of a window
  int pixel_bytes, filter_bytes, places_at, filters_at, pixels_at;
  int all_groups, groups, group_bytes, columns;  // groups: of a block; group_bytes: of a pixel's channels
  int span_copies, filter_copies, filter_rows;   // 16 bytes of a pixel, and of a row of filters
  int step_pixels, step_copies;                  // from a lane's copy of pixels to its next
  Divider by_across, by_down, by_image_tiles, by_parts, by_of_group, by_columns, by_span, by_filter_copies,
      by_tile_wide, by_tile_pixels, by_box_high, by_unit_span, by_kernel_width;
};

struct GroupPlace {
  int stack, image;    // first of the tile, in its stack
  int y, x;            // first result
  int group, feature;  // first of the block; feature: of all
};

template <class U, typename T>
__device__ __forceinline__ GroupPlace FindGroupPlace(const GroupTask<T>& group) {
  const Quotient across = Divide(static_cast<int>(blockIdx.x), group.by_across);
  const Quotient down = Divide(across.quotient, group.by_down);
  const Quotient image = Divide(down.quotient, group.by_image_tiles);
  const Quotient bundle = Divide(static_cast<int>(blockIdx.y), group.by_parts);
  const int first = bundle.quotient * group.groups;
  return {image.quotient,
          image.remainder * group.tile_images,
          down.remainder * group.tile_high,
          across.remainder * group.tile_wide,
          first,
          first * group.deep.direct.group_features + bundle.remainder * group.columns * (8 * U::kTiles)};
}

// How far a unit is from the window's start.
template <class U, typename T>
__device__ __forceinline__ void FillOffsets(const GroupTask<T>& group, int* offsets) {
  const DirectTask<T>& task = group.deep.direct;
  for (int unit = static_cast<int>(threadIdx.x); unit < group.units; unit += U::kThreads) {
    const Quotient tap = Divide(unit, group.by_unit_span), place = Divide(tap.quotient, group.by_kernel_width);
    const int pixel = place.quotient * task.dilation[0] * group.box_wide + place.remainder * task.dilation[1];
    offsets[unit] = pixel * group.pixel_bytes + tap.remainder * kUnitBytes;
  }
}

template <class U, typename T>
__device__ __forceinline__ void CopyGroupFilters(const GroupTask<T>& group, const GroupPlace& at, unsigned char* to) {
  const DirectTask<T>& task = group.deep.direct;
  const T* from = task.kernel + at.stack * group.deep.stack_kernel + at.feature;
  const int features = task.features - at.feature;  // the last block may have fewer groups
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < group.filter_rows * group.filter_copies; i += U::kThreads) {
    const Quotient row = Divide(i, group.by_filter_copies);
    const int column = row.remainder * U::kUnit;
    CopyAsync<16>(to + row.quotient * group.filter_bytes + row.remainder * kUnitBytes,
                  from + static_cast<int64_t>(row.quotient) * task.features + column, 16, column < features);
  }
}

// Pixels outside the map are zeros.
template <class U, typename T>
__device__ __forceinline__ void CopyGroupPixels(const GroupTask<T>& group, const GroupPlace& at, unsigned char* to) {
  const DirectTask<T>& task = group.deep.direct;
  const int lane = static_cast<int>(threadIdx.x % kWarp), channel = at.group * task.group_channels;
  const int y0 = at.y * task.stride[0] - task.pad_low[0], x0 = at.x * task.stride[1] - task.pad_low[1];
  const T* from = task.x + at.stack * group.deep.stack_x + channel;
  const Quotient first = Divide(lane, group.by_span);  // pixel, and which of its copies
  const int there = (task.channels - channel) / U::kUnit;
  const int span = group.span_copies, copies = group.box_wide * span;
#pragma unroll 1
  for (int row = static_cast<int>(threadIdx.x / kWarp); row < group.box_rows; row += kGroupWarps) {
    const Quotient image = Divide(row, group.by_box_high);
    const int y = y0 + image.remainder, number = at.image + image.quotient;
    const bool inside = number < task.images_per_stack && static_cast<unsigned>(y) < static_cast<unsigned>(task.height);
    const T* line = from + static_cast<int64_t>((number * task.height + y) * task.width + x0) * task.channels;
    int x = x0 + first.quotient, copy = first.remainder;
    int source = first.quotient * task.channels + copy * U::kUnit;
    unsigned char* target = to + (row * group.box_wide + first.quotient) * group.pixel_bytes + copy * kUnitBytes;
#pragma unroll 2
    for (int i = lane; i < copies; i += kWarp) {
      const bool valid = inside && static_cast<unsigned>(x) < static_cast<unsigned>(task.width) && copy < there;
      CopyAsync<16>(target, line + source, 16, valid);
      x += group.step_pixels, copy += group.step_copies;
      source += group.step_pixels * task.channels + group.step_copies * U::kUnit;
      target += group.step_pixels * group.pixel_bytes + group.step_copies * kUnitBytes;
      if (copy >= span) {
        ++x, copy -= span;
        source += task.channels - span * U::kUnit;
        target += group.pixel_bytes - span * kUnitBytes;
      }
    }
  }
}

// Of a pixel of the tile: where its window starts in shared memory, and its number in the stack, or -1.
struct PixelPlace {
  int start, number;
};

// With pixels that there are not behind the last, up to whole fragments of a warp.
template <class U, typename T>
__device__ __forceinline__ void FillPlaces(const GroupTask<T>& group, const GroupPlace& at, PixelPlace* places) {
  constexpr int kPixels = U::kRows * 16;
  const DirectTask<T>& task = group.deep.direct;
  const int pixels = group.tile_images * group.tile_pixels, whole = (pixels + kPixels - 1) / kPixels * kPixels;
#pragma unroll 1
  for (int pixel = static_cast<int>(threadIdx.x); pixel < whole; pixel += U::kThreads) {
    const Quotient image = Divide(pixel, group.by_tile_pixels), row = Divide(image.remainder, group.by_tile_wide);
    const int n = at.image + image.quotient, y = at.y + row.quotient, x = at.x + row.remainder;
    const int line = image.quotient * group.box_high + row.quotient * task.stride[0];
    const int start = (line * group.box_wide + row.remainder * task.stride[1]) * group.pixel_bytes;
    const bool valid = pixel < pixels && n < task.images_per_stack && y < group.out_high && x < group.out_wide;
    places[pixel] = {valid ? start : 0, valid ? (n * group.out_high + y) * group.out_wide + x : -1};
  }
}

// A warp's sums of kRows fragments of pixels and kTiles of features, as mma.sync has them.
template <class U, typename T>
struct GroupEngine {
  static constexpr int kRows = U::kRows, kTiles = U::kTiles;
  static constexpr int kStepRows = 2 * U::kUnit;  // of filters
  static constexpr int kChunkSteps = 4;           // of 32 products, as SplitEngine
  float sums[kRows][kTiles][4] = {};

  static __device__ __forceinline__ int Lane() { return static_cast<int>(threadIdx.x % kWarp); }

  // float32: of tile j, column n of a fragment is feature n * kTiles + j, so that a thread's results are neighbours.
  static __device__ __forceinline__ void LoadFilters(const unsigned char* from, int row_bytes,
                                                     uint32_t (&b)[kTiles][2]) {
    if constexpr (U::kWide) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const unsigned char* row = from + (half * 4 + Lane() % 4) * row_bytes + Lane() / 4 * (kTiles * 4);
        if constexpr (kTiles % 4 == 0) {
#pragma unroll
          for (int j = 0; j < kTiles; j += 4) {
            const uint4 v = *reinterpret_cast<const uint4*>(row + j * 4);
            b[j][half] = v.x, b[j + 1][half] = v.y, b[j + 2][half] = v.z, b[j + 3][half] = v.w;
          }
        } else if constexpr (kTiles % 2 == 0) {
#pragma unroll
          for (int j = 0; j < kTiles; j += 2) {
            const uint2 v = *reinterpret_cast<const uint2*>(row + j * 4);
            b[j][half] = v.x, b[j + 1][half] = v.y;
          }
        } else {
#pragma unroll
          for (int j = 0; j < kTiles; ++j) b[j][half] = *reinterpret_cast<const uint32_t*>(row + j * 4);
        }
      }
    } else {
      const unsigned char* row = from + Lane() % 16 * row_bytes;
#pragma unroll
      for (int j = 0; j + 1 < kTiles; j += 2) {
        uint32_t v[4];
        LoadMatricesTransposed(v, row + (j + Lane() / 16) * 16);
        b[j][0] = v[0], b[j][1] = v[1], b[j + 1][0] = v[2], b[j + 1][1] = v[3];
      }
      if constexpr (kTiles % 2 == 1) LoadMatrixPairTransposed(b[kTiles - 1], row + (kTiles - 1) * 16);
    }
  }

  // pixels: of the group, starts: of the lane's windows; filters: of the warp's features.
  __device__ __forceinline__ void MultiplyAll(int units, const int* offsets, const unsigned char* pixels,
                                              const int (&starts)[kRows], const unsigned char* filters, int row_bytes) {
    const int half = Lane() / 16, steps = units / 2;
    float chunk[U::kSplit ? kRows : 1][U::kSplit ? kTiles : 1][4] = {};
    offsets += half;
#pragma unroll 2
    for (int step = 0; step < steps; ++step) {
      const unsigned char* from = pixels + offsets[step * 2];
      uint32_t b[kTiles][2];
      LoadFilters(filters + step * (kStepRows * row_bytes), row_bytes, b);
      Multiply<false>(from, starts, b, chunk);
      if constexpr (U::kSplit) {
        if (step % kChunkSteps == kChunkSteps - 1) AddChunk(chunk);
      }
    }
    if (units % 2 == 1) {  // a unit alone, with zeros for the other: what is not finite stays out
      const unsigned char* from = pixels + offsets[steps * 2 - half];
      uint32_t b[kTiles][2];
      // The rows of the other would lie behind the last.
      LoadFilters(filters + (steps * kStepRows - U::kUnit) * row_bytes, row_bytes, b);
#pragma unroll
      for (int j = 0; j < kTiles; ++j) b[j][0] = b[j][1], b[j][1] = 0;
      Multiply<true>(from, starts, b, chunk);
    }
    if constexpr (U::kSplit) AddChunk(chunk);
  }

  // alone: of the fragments' two units there is the first.
  template <bool kAlone, int kA, int kB>
  __device__ __forceinline__ void Multiply(const unsigned char* from, const int (&starts)[kRows],
                                           uint32_t (&b)[kTiles][2], float (&chunk)[kA][kB][4]) {
    uint32_t small_b[U::kSplit ? kTiles : 1][2];
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      if constexpr (U::kSplit) {
        SplitInParts(b[j], small_b[j]);
      } else if constexpr (U::kWide) {
        b[j][0] = RoundToTf32(b[j][0]), b[j][1] = RoundToTf32(b[j][1]);
      }
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      uint32_t a[4];
      LoadMatrices(a, from + starts[i]);
      if constexpr (kAlone) a[2] = a[3] = 0;
      if constexpr (U::kSplit) {
        uint32_t small_a[4];
        SplitInParts(a, small_a);
#pragma unroll
        for (int j = 0; j < kTiles; ++j) MultiplyFragment(chunk[i][j], small_a, b[j][0], b[j][1], 0.f);
#pragma unroll
        for (int j = 0; j < kTiles; ++j) MultiplyFragment(chunk[i][j], a, small_b[j][0], small_b[j][1], 0.f);
#pragma unroll
        for (int j = 0; j < kTiles; ++j) MultiplyFragment(chunk[i][j], a, b[j][0], b[j][1], 0.f);
      } else {
        if constexpr (U::kWide) {
#pragma unroll
          for (int e = 0; e < 4; ++e) a[e] = RoundToTf32(a[e]);
        }
#pragma unroll
        for (int j = 0; j < kTiles; ++j) MultiplyFragment(sums[i][j], a, b[j][0], b[j][1], T{});
      }
    }
  }

  template <int kA, int kB>
  __device__ __forceinline__ void AddChunk(float (&chunk)[kA][kB][4]) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[i][j][e] += chunk[i][j][e], chunk[i][j][e] = 0.f;
      }
    }
  }

  // The run of the lane's results of a fragment's pixel Lane() / 4 + 8 * half.
  __device__ __forceinline__ void Run(int i, int half, int run, float (&v)[U::kRun]) const {
    if constexpr (U::kWide) {
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) v[e * kTiles + j] = sums[i][j][half * 2 + e];
      }
    } else {
      v[0] = sums[i][run][half * 2], v[1] = sums[i][run][half * 2 + 1];
    }
  }
};

// kCount neighbouring elements as float32, and back; p aligned to two, or float32 to four where they come in fours.
template <int kCount, typename T>
__device__ __forceinline__ void LoadRun(const T* p, float (&v)[kCount]) {
#pragma unroll
  for (int k = 0; k < kCount; k += 2) {
    if constexpr (sizeof(T) == 2) {
      const auto raw = *reinterpret_cast<const uint32_t*>(p + k);
      v[k] = ToFloat(reinterpret_cast<const T*>(&raw)[0]), v[k + 1] = ToFloat(reinterpret_cast<const T*>(&raw)[1]);
    } else if constexpr (kCount % 4 == 0) {
      if (k % 4 > 0) continue;
      const float4 u = Load4(p + k);
      v[k] = u.x, v[k + 1] = u.y, v[k + 2] = u.z, v[k + 3] = u.w;
    } else {
      const float2 u = *reinterpret_cast<const float2*>(p + k);
      v[k] = u.x, v[k + 1] = u.y;
    }
  }
}

__device__ __forceinline__ uint32_t Pack(__nv_bfloat16, float low, float high) {
  const __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(v);
}
__device__ __forceinline__ uint32_t Pack(__half, float low, float high) {
  const __half2 v = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(v);
}

template <int kCount, typename T>
__device__ __forceinline__ void StoreRun(T* p, const float (&v)[kCount]) {
#pragma unroll
  for (int k = 0; k < kCount; k += 2) {
    if constexpr (sizeof(T) == 2) {
      *reinterpret_cast<uint32_t*>(p + k) = Pack(T{}, v[k], v[k + 1]);
    } else if constexpr (kCount % 4 == 0) {
      if (k % 4 == 0) *reinterpret_cast<float4*>(p + k) = make_float4(v[k], v[k + 1], v[k + 2], v[k + 3]);
    } else {
      *reinterpret_cast<float2*>(p + k) = make_float2(v[k], v[k + 1]);
    }
  }
}

// One sum again by FFMA (SumAgain has four at a time), where that of parts is not finite.
template <typename T>
__device__ __noinline__ float GroupSumAgain(const DeepTask<T>& deep, int stack, int group, int pixel, int filter) {
  const float4 sum = SumAgain(deep, {0, 0, group, stack, 0, 0, 0}, pixel, filter & ~3);
  return filter % 4 == 0 ? sum.x : filter % 4 == 1 ? sum.y : filter % 4 == 2 ? sum.z : sum.w;
}

// From a warp's sums to results. Bias is asked for when the writer is made.
template <class U, typename T>
struct GroupWriter {
  const GroupTask<T>& group;
  int stack, number, filter;  // number: of the group; filter: the lane's first in it
  T* out;                     // of the stack, at the lane's first feature
  float least;
  float bias[U::kRuns][U::kRun] = {};

  __device__ __forceinline__ GroupWriter(const GroupTask<T>& group, int stack, int number, int first)
      : group(group), stack(stack), number(number) {
    const DirectTask<T>& task = group.deep.direct;
    filter = first + static_cast<int>(threadIdx.x % 4) * U::kRun;
    const int feature = number * task.group_features + filter;
    out = task.out + static_cast<int64_t>(stack) * task.pixels * task.features + feature;
    least = task.relu ? 0.f : __int_as_float(static_cast<int>(0xff800000u));
    if (!task.bias) return;
    const T* from = task.bias + static_cast<int64_t>(stack) * task.features + feature;
#pragma unroll
    for (int run = 0; run < U::kRuns; ++run) LoadRun(from + run * 8, bias[run]);
  }

  // places: of the warp's pixels. kPlain: there is no residual, and counts are not asked for. Returns how many results
  // are not zero, and how many there are.
  template <bool kPlain>
  __device__ __forceinline__ int2 Write(const GroupEngine<U, T>& engine, const PixelPlace* places) const {
    const DirectTask<T>& task = group.deep.direct;
    int2 written = make_int2(0, 0);
#pragma unroll
    for (int i = 0; i < U::kRows; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int pixel = places[i * 16 + half * 8 + threadIdx.x % kWarp / 4].number;
        if (pixel < 0) continue;
        T* to = out + static_cast<int64_t>(pixel) * task.features;
#pragma unroll
        for (int run = 0; run < U::kRuns; ++run) {
          float v[U::kRun];
          engine.Run(i, half, run, v);
          if constexpr (U::kSplit) Repair(pixel, v);
#pragma unroll
          for (int k = 0; k < U::kRun; ++k) v[k] += bias[run][k];
          if constexpr (!kPlain) {
            if (task.residual) {
              float residual[U::kRun];
              LoadRun(task.residual + (to - task.out) + run * 8, residual);
#pragma unroll
              for (int k = 0; k < U::kRun; ++k) v[k] += residual[k];
            }
          }
#pragma unroll
          for (int k = 0; k < U::kRun; ++k) {
            v[k] = MaxOrNan(v[k], least);
            if constexpr (!kPlain) written.x += ToFloat(FromFloat<T>(v[k])) != 0.f;
          }
          StoreRun(to + run * 8, v);
        }
        written.y += U::kRuns * U::kRun;
      }
    }
    return written;
  }

  __device__ __forceinline__ void Repair(int pixel, float (&v)[U::kRun]) const {
    float all = 0.f;  // zero times a sum is zero, or NaN
#pragma unroll
    for (int k = 0; k < U::kRun; ++k) all = fmaf(v[k], 0.f, all);
    if (all == 0.f) return;
#pragma unroll
    for (int k = 0; k < U::kRun; ++k) v[k] = GroupSumAgain(group.deep, stack, number, pixel, filter + k);
  }
};

template <class U, typename T>
__global__ void __launch_bounds__(U::kThreads, kGroupBlocks) GroupKernel(const __grid_constant__ GroupTask<T> group) {
  extern __shared__ __align__(128) unsigned char shared[];
  const DirectTask<T>& task = group.deep.direct;
  if (!PassesGate(task.gate)) return;
  const GroupPlace at = FindGroupPlace<U>(group);
  int* offsets = reinterpret_cast<int*>(shared);
  auto* places = reinterpret_cast<PixelPlace*>(shared + group.places_at);
  CopyGroupFilters<U>(group, at, shared + group.filters_at);
  FillOffsets<U>(group, offsets);
  if (task.gate.in_chain) {  // filters are there before the kernel in front is done
    if (threadIdx.x == 0) FetchAhead(task.gate);
    WaitForKernelBefore();
    LetNextKernelStart();
  }
  CopyGroupPixels<U>(group, at, shared + group.pixels_at);
  CommitCopies();
  FillPlaces<U>(group, at, places);
  WaitForCopies<0>();
  __syncthreads();
  const int pixels = group.tile_images * group.tile_pixels;
  const bool is_plain = task.residual == nullptr && task.counts.rows == nullptr;
  int2 written = make_int2(0, 0);
#pragma unroll 1
  for (int item = static_cast<int>(threadIdx.x / kWarp);; item += kGroupWarps) {
    const Quotient part = Divide(item, group.by_columns), column = Divide(part.remainder, group.by_of_group);
    const int first = part.quotient * (U::kRows * 16), number = at.group + column.quotient;
    if (first >= pixels) break;
    if (number >= group.all_groups) continue;
    int starts[U::kRows];
#pragma unroll
    for (int i = 0; i < U::kRows; ++i) starts[i] = places[first + i * 16 + threadIdx.x % 16].start;
    const int in_group = at.feature - at.group * task.group_features + column.remainder * (8 * U::kTiles);
    const GroupWriter<U, T> writer(group, at.stack, number, in_group);
    GroupEngine<U, T> engine;
    engine.MultiplyAll(group.units, offsets, shared + group.pixels_at + column.quotient * group.group_bytes, starts,
                       shared + group.filters_at + part.remainder * (8 * U::kTiles * static_cast<int>(sizeof(T))),
                       group.filter_bytes);
    if (is_plain) {
      writer.template Write<true>(engine, places + first);
    } else {
      const int2 count = writer.template Write<false>(engine, places + first);
      written.x += count.x, written.y += count.y;
    }
  }
  if (task.counts.rows) WriteCountsApart(task.counts, written, reinterpret_cast<int2*>(shared));
  LeaveGate(task.gate);
}

template <typename T>
GroupTask<T> MakeGroupTask(const ConvCall& call, const GroupPlan& plan) {
  const ConvArgs& a = call.args;
  DirectPlan direct{};
  direct.splits = direct.pixel_tiles = direct.feature_tiles = 1;
  GroupTask<T> t{};
  t.deep.direct = MakeDirectTask<T>(call, direct, nullptr);
  const DirectTask<T>& d = t.deep.direct;
  t.deep.stack_x = d.images_per_stack * a.size[0] * a.size[1] * a.channels;
  t.deep.stack_kernel = static_cast<int64_t>(d.depth) * a.features;
  t.out_high = static_cast<int>(a.conv_size[0]), t.out_wide = static_cast<int>(a.conv_size[1]);
  t.tile_images = plan.tile_images, t.tile_high = plan.tile_high, t.tile_wide = plan.tile_wide;
  t.tile_pixels = plan.tile_high * plan.tile_wide;
  t.box_high = plan.box_high, t.box_wide = plan.box_wide, t.box_rows = plan.tile_images * plan.box_high;
  t.units = plan.units;
  t.pixel_bytes = plan.pixel_bytes, t.filter_bytes = plan.filter_bytes;
  t.places_at = plan.places_at, t.filters_at = plan.filters_at, t.pixels_at = plan.pixels_at;
  t.all_groups = static_cast<int>(a.groups), t.groups = plan.groups, t.columns = plan.columns;
  t.group_bytes = d.group_channels * static_cast<int>(sizeof(T));
  t.span_copies = plan.groups * t.group_bytes / kUnitBytes;
  t.filter_copies = plan.columns * 8 * plan.tiles * static_cast<int>(sizeof(T)) / kUnitBytes;
  t.filter_rows = d.depth;
  t.step_pixels = kWarp / t.span_copies, t.step_copies = kWarp % t.span_copies;
  t.by_across = Divider(plan.tiles_across), t.by_down = Divider(plan.tiles_down);
  t.by_image_tiles = Divider(plan.image_tiles), t.by_parts = Divider(plan.feature_parts);
  t.by_of_group = Divider(plan.columns / plan.groups), t.by_columns = Divider(plan.columns);
  t.by_span = Divider(t.span_copies), t.by_filter_copies = Divider(t.filter_copies);
  t.by_tile_wide = Divider(plan.tile_wide), t.by_tile_pixels = Divider(t.tile_pixels);
  t.by_box_high = Divider(plan.box_high), t.by_unit_span = Divider(t.group_bytes / kUnitBytes);
  t.by_kernel_width = Divider(a.kernel_size[1]);
  return t;
}

template <class U, typename T>
ffi::Error LaunchGroup(const ConvCall& call, const GroupPlan& plan, cudaStream_t stream) {
  constexpr auto kKernel = GroupKernel<U, T>;
  const ffi::Error error = Prepare<kKernel>("GroupKernel");
  if (error.failure()) return error;
  GroupTask<T> group = MakeGroupTask<T>(call, plan);
  const int64_t tiles = call.args.stacks * plan.image_tiles * plan.tiles_down * plan.tiles_across;
  DirectTask<T>& task = group.deep.direct;
  task.counts = CountsOf(call.counts, tiles * plan.bundles);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(tiles), static_cast<unsigned>(plan.bundles));
  config.blockDim = dim3(U::kThreads);
  config.dynamicSmemBytes = plan.shared_bytes;
  config.stream = stream;
  if (MayOverlap<kKernel>(&config, call.in_front)) task.gate.overlaps = true;
  LaunchAttributes attributes(0, task.gate);
  config.attrs = attributes.list;
  config.numAttrs = attributes.count;
  return CheckCuda(cudaLaunchKernelEx(&config, kKernel, group), "GroupKernel");
}

// The kernel of a plan's tiles, one of those of GroupTiles in group_plan.cc.
template <typename T, bool kSplit>
ffi::Error LaunchGroupTiles(const ConvCall& call, const GroupPlan& plan, cudaStream_t stream) {
  switch (plan.tiles) {
    case 1:
      return LaunchGroup<GroupTuning<T, 1, kSplit>, T>(call, plan, stream);
    case 2:
      return LaunchGroup<GroupTuning<T, 2, kSplit>, T>(call, plan, stream);
    case 3:
      return LaunchGroup<GroupTuning<T, 3, kSplit>, T>(call, plan, stream);
    case 4:
      return LaunchGroup<GroupTuning<T, 4, kSplit>, T>(call, plan, stream);
    case 5:
      return LaunchGroup<GroupTuning<T, 5, kSplit>, T>(call, plan, stream);
    case 7:
      return LaunchGroup<GroupTuning<T, 7, kSplit>, T>(call, plan, stream);
    default:
      return ffi::Error(ffi::ErrorCode::kInternal, "GroupKernel: no such tiles");
  }
}

}  // namespace jsc

#endif  // JSC_CUDA_DIRECT_GROUP_CUH_
