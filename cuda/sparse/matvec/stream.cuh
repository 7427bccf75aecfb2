// The stream of sparse/matvec/rows.cu: which kernel rows a warp reads, its list of non-zero inputs, and the sums of
// their products.
#ifndef JSC_CUDA_SPARSE_MATVEC_STREAM_CUH_
#define JSC_CUDA_SPARSE_MATVEC_STREAM_CUH_

#include "cuda/core/elements.cuh"
#include "cuda/core/launch.cuh"
#include "cuda/core/vectors.cuh"
#include "cuda/sparse/matvec/row_limits.h"

namespace jsc {

constexpr int kDenseRun = 8;  // kernel rows, or parts of them, that a lane has asked for at a time

// Of tiles: segments of 2^shift lanes, and what makes them wide.
constexpr int kLineShift = 3;             // lanes of a line of the cache, 128 bytes
constexpr int64_t kLongStream = 1 << 25;  // bytes of a kernel
constexpr int64_t kVeryLongStream = 1 << 27;

// What depends on the rows of x that a block serves.
template <int kImages>
struct DenseRows {
  static constexpr int kRuns = kImages == 1 ? 4 : kImages == 4 ? 2 : 1;  // of 32 channels, listed at a time
  static constexpr int kListed = kRuns * kWarp;
  static constexpr int kMinLaneShift = kImages == 8 ? 2 : 1;  // narrower segments need longer rings
  static constexpr int kUnseen = kDenseRun >> kMinLaneShift;  // channels of a lane that are not listed
};

template <typename T>
constexpr int kLaneOutChannels = kLaneBytes / static_cast<int>(sizeof(T));  // of a lane: one load

// A call and its blocks, as small as can be: a kernel's first read of each line of its parameters takes long.
template <typename T>
struct DenseTask {
  const T* x;         // [M, C]
  const T* kernel;    // [S, C, K]
  const T* bias;      // [S, K] or null
  const T* residual;  // [M, K] or null
  T* out;             // [M, K]
  int64_t stack_images;
  unsigned image_tiles, out_channel_tiles, parts;  // of a stack; of K; blocks of a cluster
  int channels, out_channels;
  int lane_shift;  // logarithm of the lanes that read a segment of one kernel row
  int first;       // channels at most that a warp asks for before it knows x
  int ring;        // entries of a warp's list, a power of two
  int slots_at;    // in shared memory
  bool relu;
};

// A warp's list: entries [used, produced) of a ring.
template <int kImages>
struct DenseRing {
  int* rows;      // [ring]
  float* values;  // [ring, kImages]
  int mask;
  int produced = 0;

  __device__ void Put(int entry, unsigned row, const float (&value)[kImages]) {
    const int at = entry & mask;
    rows[at] = static_cast<int>(row);
#pragma unroll
    for (int m = 0; m < kImages; ++m) values[at * kImages + m] = value[m];
  }

  __device__ void Get(int entry, float (&value)[kImages]) const {
    const float* from = values + (entry & mask) * kImages;
    if constexpr (kImages % 4 == 0) {
#pragma unroll
      for (int m = 0; m < kImages; m += 4) {
        const float4 four = *reinterpret_cast<const float4*>(from + m);
        value[m] = four.x, value[m + 1] = four.y, value[m + 2] = four.z, value[m + 3] = four.w;
      }
    } else {
#pragma unroll
      for (int m = 0; m < kImages; ++m) value[m] = from[m];
    }
  }
};

// Which part of the operation a thread works on.
struct DensePlace {
  int warp, lane, group, out_channel, valid;  // group: of the rows that a warp loads at a time
  int worker, workers;                        // warps that share the channels
  unsigned part;
  int stack, images;
  int64_t image;
};

template <typename T, int kImages>
__device__ DensePlace FindDensePlace(const DenseTask<T>& task) {
  DensePlace at;
  at.warp = threadIdx.x / kWarp;
  at.lane = threadIdx.x % kWarp;
  unsigned tile = blockIdx.x, image_tile = 0;
  at.part = 0;
  if (task.parts > 1) {
    at.part = tile % task.parts;
    tile /= task.parts;
  }
  if (tile >= task.out_channel_tiles) {
    image_tile = tile / task.out_channel_tiles;
    tile %= task.out_channel_tiles;
  }
  at.stack = image_tile >= task.image_tiles ? static_cast<int>(image_tile / task.image_tiles) : 0;
  const int64_t in_stack = static_cast<int64_t>(image_tile - at.stack * task.image_tiles) * kImages;
  at.image = at.stack * task.stack_images + in_stack;
  at.images = static_cast<int>(min(static_cast<int64_t>(kImages), task.stack_images - in_stack));
  at.group = at.lane >> task.lane_shift;
  const int column = at.lane & ((1 << task.lane_shift) - 1);
  at.out_channel = static_cast<int>((tile << task.lane_shift) + column) * kLaneOutChannels<T>;
  at.valid = max(0, min(task.out_channels - at.out_channel, kLaneOutChannels<T>));
  at.worker = static_cast<int>(at.part) * kDenseWarps + at.warp;
  at.workers = static_cast<int>(task.parts) * kDenseWarps;
  return at;
}

// `valid` elements of p, zeros after them. kVector: p is aligned and valid is 0 or all of them.
template <typename T, bool kVector>
__device__ __forceinline__ uint4 LoadWeights(const T* p, int valid) {
  uint4 raw = {0, 0, 0, 0};
  if constexpr (kVector) {
    if (valid > 0) {
      asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(raw.x), "=r"(raw.y), "=r"(raw.z), "=r"(raw.w)
                   : "l"(p));
    }
  } else {
    T element[kLaneOutChannels<T>];
#pragma unroll
    for (int i = 0; i < kLaneOutChannels<T>; ++i) element[i] = i < valid ? p[i] : FromFloat<T>(0.f);
    raw = *reinterpret_cast<const uint4*>(element);
  }
  return raw;
}

__device__ __forceinline__ void Unpack(uint4 raw, float (&weight)[4], float) {
  weight[0] = __uint_as_float(raw.x), weight[1] = __uint_as_float(raw.y);
  weight[2] = __uint_as_float(raw.z), weight[3] = __uint_as_float(raw.w);
}

__device__ __forceinline__ void Unpack(uint4 raw, float (&weight)[8], __nv_bfloat16) {
  const uint32_t pair[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    weight[2 * i] = __uint_as_float(pair[i] << 16);
    weight[2 * i + 1] = __uint_as_float(pair[i] & 0xffff0000u);
  }
}

__device__ __forceinline__ void Unpack(uint4 raw, float (&weight)[8], __half) {
  const uint32_t pair[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 both = __half22float2(reinterpret_cast<const __half2&>(pair[i]));
    weight[2 * i] = both.x;
    weight[2 * i + 1] = both.y;
  }
}

template <typename T, int kImages>
__device__ void LoadValues(const T* x, int channels, unsigned channel, bool inside, int images,
                           float (&value)[kImages]) {
#pragma unroll
  for (int m = 0; m < kImages; ++m) {
    value[m] = inside && m < images ? ToFloat(x[static_cast<int64_t>(m) * channels + channel]) : 0.f;
  }
}

template <int kImages>
__device__ bool AnyNonZero(const float (&value)[kImages]) {
  bool any = false;
#pragma unroll
  for (int m = 0; m < kImages; ++m) any |= value[m] != 0.f;
  return any;
}

// The channels beyond those that are loaded unseen: lists them run by run, with values loaded one round ahead.
template <typename T, int kImages>
struct DenseLister {
  static constexpr int kRuns = DenseRows<kImages>::kRuns;
  const T* x;  // [images, C] from this block's first row of x
  int channels, images;
  unsigned run_stride;  // channels from one of this warp's runs to the next
  unsigned next;        // channel of this lane, in the first run whose values are there
  float value[kRuns][kImages];

  __device__ void Ask() {
#pragma unroll
    for (int i = 0; i < kRuns; ++i) {
      const unsigned channel = next + i * run_stride;
      LoadValues<T, kImages>(x, channels, channel, channel < static_cast<unsigned>(channels), images, value[i]);
    }
  }

  // Uniform in a warp: whether there is a round left.
  __device__ bool Left(int lane) const { return next - lane < static_cast<unsigned>(channels); }

  __device__ void Append(DenseRing<kImages>& ring, int lane) {
    __syncwarp();  // what it overwrites has been read
#pragma unroll
    for (int i = 0; i < kRuns; ++i) {
      const bool keep = AnyNonZero(value[i]);
      const unsigned kept = __ballot_sync(0xffffffffu, keep);
      if (keep) ring.Put(ring.produced + __popc(kept & ((1u << lane) - 1)), next + i * run_stride, value[i]);
      ring.produced += __popc(kept);
    }
    next += kRuns * run_stride;
    Ask();
    __syncwarp();
  }
};

// The channels that a warp asks for before it knows x.
struct Unseen {
  int first, count;
};

template <typename T>
__device__ Unseen FindUnseen(const DenseTask<T>& task, const DensePlace& at) {
  const int first = at.worker * task.first;
  return {first, max(0, min(task.first, task.channels - first))};
}

template <typename T, bool kVector>
__device__ __forceinline__ void LoadUnseen(const DenseTask<T>& task, const DensePlace& at, const Unseen& unseen,
                                           const T* kernel, uint4 (&weight)[kDenseRun]) {
  const int groups = kWarp >> task.lane_shift;
  const T* row = kernel + static_cast<int64_t>(unseen.first + at.group) * task.out_channels;
  const int64_t step = static_cast<int64_t>(groups) * task.out_channels;
#pragma unroll
  for (int e = 0; e < kDenseRun; ++e) {
    weight[e] = LoadWeights<T, kVector>(row, e * groups + at.group < unseen.count ? at.valid : 0);
    row += step;
  }
}

// Lists the values of the unseen channels and drops the weights of those that are zero, whatever they are.
template <int kImages>
__device__ __forceinline__ void ListUnseen(const float (&value)[DenseRows<kImages>::kUnseen][kImages], int lane,
                                           int group, int groups, DenseRing<kImages>& ring,
                                           uint4 (&weight)[kDenseRun]) {
#pragma unroll
  for (int i = 0; i < DenseRows<kImages>::kUnseen; ++i) {
    if (i * kWarp < groups * kDenseRun) ring.Put(i * kWarp + lane, 0, value[i]);
  }
  ring.produced = groups * kDenseRun;
  __syncwarp();
#pragma unroll
  for (int e = 0; e < kDenseRun; ++e) {
    float found[kImages];
    ring.Get(e * groups + group, found);
    if (!AnyNonZero(found)) weight[e] = {0, 0, 0, 0};
  }
}

// What fills the last round up to entry `end` adds nothing.
template <int kImages>
__device__ __forceinline__ void FillUp(DenseRing<kImages>& ring, int lane, int end) {
  const float none[kImages] = {};
  __syncwarp();
  for (int entry = ring.produced + lane; entry < end; entry += kWarp) ring.Put(entry, 0, none);
  __syncwarp();
}

// sums[image][output channel] of a warp's channels, of the rows that this thread's group loads; the weights of the
// unseen ones are on their way.
template <typename T, int kImages, bool kVector>
__device__ __forceinline__ void SumRows(const DenseTask<T>& task, const DensePlace& at, const Unseen& unseen,
                                        const T* kernel, DenseRing<kImages>& ring, uint4 (&weight)[kDenseRun],
                                        float (&sums)[kImages][kLaneOutChannels<T>]) {
  const int groups = kWarp >> task.lane_shift, batch = groups * kDenseRun;
  const T* x = task.x + at.image * task.channels;
  float value[DenseRows<kImages>::kUnseen][kImages];
#pragma unroll
  for (int i = 0; i < DenseRows<kImages>::kUnseen; ++i) {
    const int entry = i * kWarp + at.lane;
    LoadValues<T, kImages>(x, task.channels, unseen.first + entry, entry < unseen.count, at.images, value[i]);
  }
  DenseLister<T, kImages> lister{x,
                                 task.channels,
                                 at.images,
                                 static_cast<unsigned>(at.workers) * kWarp,
                                 static_cast<unsigned>(at.workers * task.first + at.worker * kWarp + at.lane),
                                 {}};
  lister.Ask();
  ListUnseen<kImages>(value, at.lane, at.group, groups, ring, weight);

  for (int base = 0;; base += batch) {
    const int end = base + 2 * batch;
    while (ring.produced < end && lister.Left(at.lane)) lister.Append(ring, at.lane);
    if (ring.produced < end) FillUp<kImages>(ring, at.lane, end);
#pragma unroll
    for (int e = 0; e < kDenseRun; ++e) {
      const int entry = base + e * groups + at.group, later = entry + batch;
      float w[kLaneOutChannels<T>], v[kImages];
      Unpack(weight[e], w, T{});
      ring.Get(entry, v);
#pragma unroll
      for (int m = 0; m < kImages; ++m) {
#pragma unroll
        for (int i = 0; i < kLaneOutChannels<T>; ++i) sums[m][i] = fmaf(v[m], w[i], sums[m][i]);
      }
      const T* row = kernel + static_cast<int64_t>(ring.rows[later & ring.mask]) * task.out_channels;
      weight[e] = LoadWeights<T, kVector>(row, later < ring.produced ? at.valid : 0);
    }
    if (base + batch >= ring.produced) return;
  }
}

}  // namespace jsc

#endif  // JSC_CUDA_SPARSE_MATVEC_STREAM_CUH_
