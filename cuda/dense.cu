// Sparse-input matrix product: out [M, K] = activation(x [M, C] x kernel [C, K] + bias + residual), reading only the
// kernel rows of inputs that are not zero.
//
// The operation is a stream of the kernel from device memory, 4 K bytes per channel in float32, so what counts is that
// every multiprocessor has some 60 KB asked for at any time, from the first microsecond to the last. A block owns a
// segment of every kernel row, 2 to 32 lanes of 16 bytes, for up to 8 rows of x. Its warps share the channels and meet
// once, at the end; until then no warp waits for another:
// - a warp asks for the kernel rows of its first channels before it knows x, because a small layer is over by the time
//   that a list of non-zeros could be there;
// - of all other channels it keeps a list (row, values) in a ring in shared memory: those of which any of the rows of x
//   is non-zero, appended by 32-channel runs whose values were asked for one turn earlier;
// - it takes kRun loads a lane from the list, and each register that has been used is at once loaded for the next turn.
// Runs are dealt out in turns (worker w: runs w, w + workers, ...) because zeros come in clumps: after a pool, the
// channels of one pixel lie together.
//
// Segments are as narrow as gives each multiprocessor at most one block, so a small layer is one block after all its
// channels and nothing meets. Long streams want whole lines (64-byte segments of 25088 x 4096 in bfloat16: 3.9 TB/s
// where 128-byte ones of float32 have 4.4); where that leaves multiprocessors idle, blocks of a cluster share the
// channels and send each other their sums, added in fixed order.
#include <algorithm>

#include "common.cuh"
#include "kernels.h"

namespace jsc {
namespace {

constexpr int kWarps = 16;
constexpr int kThreads = kWarps * kWarp;
constexpr int kRun = 8;  // kernel rows, or parts of them, that a lane has asked for at a time
constexpr int kMaxLaneShift = 5;
constexpr int kLineShift = 3;             // lanes of a line of the cache, 128 bytes
constexpr int64_t kLongStream = 1 << 25;  // bytes of a kernel
constexpr int64_t kVeryLongStream = 1 << 27;
constexpr int kMaxParts = 8;  // blocks of a cluster
constexpr int kBarrierBytes = 16;

// What depends on the rows of x that a block serves.
template <int kImages>
struct Rows {
  static constexpr int kRuns = kImages == 1 ? 4 : kImages == 4 ? 2 : 1;  // of 32 channels, listed at a time
  static constexpr int kListed = kRuns * kWarp;
  static constexpr int kMinLaneShift = kImages == 8 ? 2 : 1;  // narrower segments need longer rings
  static constexpr int kUnseen = kRun >> kMinLaneShift;       // channels of a lane that are not listed
};

template <typename T>
constexpr int kLaneFeatures = 16 / static_cast<int>(sizeof(T));  // of a lane: one 16-byte load

// A call and its blocks, as small as can be: a kernel's first read of each line of its parameters takes long.
template <typename T>
struct DenseTask {
  const T* x;         // [M, C]
  const T* kernel;    // [S, C, K]
  const T* bias;      // [S, K] or null
  const T* residual;  // [M, K] or null
  T* out;             // [M, K]
  int64_t stack_images;
  unsigned image_tiles, feature_tiles, parts;  // of a stack; of K; blocks of a cluster
  int channels, features;
  int lane_shift;  // logarithm of the lanes that read a segment of one kernel row
  int first;       // channels at most that a warp asks for before it knows x
  int ring;        // entries of a warp's list, a power of two
  int inbox_at;    // in shared memory
  bool relu;
};

// A warp's list: entries [used, produced) of a ring.
template <int kImages>
struct Ring {
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
struct Place {
  int warp, lane, group, feature, valid;  // group: of the rows that a warp loads at a time
  int worker, workers;                    // warps that share the channels
  unsigned part;
  int stack, images;
  int64_t image;
};

template <typename T, int kImages>
__device__ Place FindPlace(const DenseTask<T>& task) {
  Place at;
  at.warp = threadIdx.x / kWarp;
  at.lane = threadIdx.x % kWarp;
  unsigned tile = blockIdx.x, image_tile = 0;
  at.part = 0;
  if (task.parts > 1) {
    at.part = tile % task.parts;
    tile /= task.parts;
  }
  if (tile >= task.feature_tiles) {
    image_tile = tile / task.feature_tiles;
    tile %= task.feature_tiles;
  }
  at.stack = image_tile >= task.image_tiles ? static_cast<int>(image_tile / task.image_tiles) : 0;
  const int64_t in_stack = static_cast<int64_t>(image_tile - at.stack * task.image_tiles) * kImages;
  at.image = at.stack * task.stack_images + in_stack;
  at.images = static_cast<int>(min(static_cast<int64_t>(kImages), task.stack_images - in_stack));
  at.group = at.lane >> task.lane_shift;
  const int column = at.lane & ((1 << task.lane_shift) - 1);
  at.feature = static_cast<int>((tile << task.lane_shift) + column) * kLaneFeatures<T>;
  at.valid = max(0, min(task.features - at.feature, kLaneFeatures<T>));
  at.worker = static_cast<int>(at.part) * kWarps + at.warp;
  at.workers = static_cast<int>(task.parts) * kWarps;
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
    T element[kLaneFeatures<T>];
#pragma unroll
    for (int i = 0; i < kLaneFeatures<T>; ++i) element[i] = i < valid ? p[i] : FromFloat<T>(0.f);
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

// The channels beyond those that are loaded unseen: lists them run by run, values asked for one turn ahead.
template <typename T, int kImages>
struct Lister {
  static constexpr int kRuns = Rows<kImages>::kRuns;
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

  // Uniform in a warp: whether there is a turn left.
  __device__ bool Left(int lane) const { return next - lane < static_cast<unsigned>(channels); }

  __device__ void Append(Ring<kImages>& ring, int lane) {
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
__device__ Unseen FindUnseen(const DenseTask<T>& task, const Place& at) {
  const int first = at.worker * task.first;
  return {first, max(0, min(task.first, task.channels - first))};
}

template <typename T, bool kVector>
__device__ __forceinline__ void LoadUnseen(const DenseTask<T>& task, const Place& at, const Unseen& unseen,
                                           const T* kernel, uint4 (&weight)[kRun]) {
  const int groups = kWarp >> task.lane_shift;
  const T* row = kernel + static_cast<int64_t>(unseen.first + at.group) * task.features;
  const int64_t step = static_cast<int64_t>(groups) * task.features;
#pragma unroll
  for (int e = 0; e < kRun; ++e) {
    weight[e] = LoadWeights<T, kVector>(row, e * groups + at.group < unseen.count ? at.valid : 0);
    row += step;
  }
}

// Lists the values of the unseen channels and drops the weights of those that are zero, whatever they are.
template <int kImages>
__device__ __forceinline__ void ListUnseen(const float (&value)[Rows<kImages>::kUnseen][kImages], int lane, int group,
                                           int groups, Ring<kImages>& ring, uint4 (&weight)[kRun]) {
#pragma unroll
  for (int i = 0; i < Rows<kImages>::kUnseen; ++i) {
    if (i * kWarp < groups * kRun) ring.Put(i * kWarp + lane, 0, value[i]);
  }
  ring.produced = groups * kRun;
  __syncwarp();
#pragma unroll
  for (int e = 0; e < kRun; ++e) {
    float found[kImages];
    ring.Get(e * groups + group, found);
    if (!AnyNonZero(found)) weight[e] = {0, 0, 0, 0};
  }
}

// What fills the last turn up to entry `end` adds nothing.
template <int kImages>
__device__ __forceinline__ void FillUp(Ring<kImages>& ring, int lane, int end) {
  const float none[kImages] = {};
  __syncwarp();
  for (int entry = ring.produced + lane; entry < end; entry += kWarp) ring.Put(entry, 0, none);
  __syncwarp();
}

// sums[image][feature] of a warp's channels, of the rows that this thread's group loads; the weights of the unseen
// ones are on their way.
template <typename T, int kImages, bool kVector>
__device__ __forceinline__ void SumRows(const DenseTask<T>& task, const Place& at, const Unseen& unseen,
                                        const T* kernel, Ring<kImages>& ring, uint4 (&weight)[kRun],
                                        float (&sums)[kImages][kLaneFeatures<T>]) {
  const int groups = kWarp >> task.lane_shift, batch = groups * kRun;
  const T* x = task.x + at.image * task.channels;
  float value[Rows<kImages>::kUnseen][kImages];
#pragma unroll
  for (int i = 0; i < Rows<kImages>::kUnseen; ++i) {
    const int entry = i * kWarp + at.lane;
    LoadValues<T, kImages>(x, task.channels, unseen.first + entry, entry < unseen.count, at.images, value[i]);
  }
  Lister<T, kImages> lister{x,
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
    for (int e = 0; e < kRun; ++e) {
      const int entry = base + e * groups + at.group, later = entry + batch;
      float w[kLaneFeatures<T>], v[kImages];
      Unpack(weight[e], w, T{});
      ring.Get(entry, v);
#pragma unroll
      for (int m = 0; m < kImages; ++m) {
#pragma unroll
        for (int i = 0; i < kLaneFeatures<T>; ++i) sums[m][i] = fmaf(v[m], w[i], sums[m][i]);
      }
      const T* row = kernel + static_cast<int64_t>(ring.rows[later & ring.mask]) * task.features;
      weight[e] = LoadWeights<T, kVector>(row, later < ring.produced ? at.valid : 0);
    }
    if (base + batch >= ring.produced) return;
  }
}

// Up to four results of a row, which a thread writes at the end: none, or with kVector all four.
template <typename T, bool kVector>
struct Result {
  int64_t at;  // in out
  int stack, feature, valid;
  float4 bias, residual;

  __device__ void AskForAddends(const DenseTask<T>& task) {
    if (valid <= 0) return;
    const int count = kVector ? 4 : valid;
    if (task.bias) bias = LoadUpTo4(task.bias + static_cast<int64_t>(stack) * task.features + feature, count, kVector);
    if (task.residual) residual = LoadUpTo4(task.residual + at, count, kVector);
  }

  __device__ void Write(const DenseTask<T>& task, float4 sum) const {
    if (valid <= 0) return;
    if (task.bias) sum = sum + bias;
    if (task.residual) sum = sum + residual;
    if (task.relu) sum = {Relu(sum.x), Relu(sum.y), Relu(sum.z), Relu(sum.w)};
    StoreUpTo4(task.out + at, sum, kVector ? 4 : valid, kVector);
  }
};

template <typename T, bool kVector>
__device__ __forceinline__ Result<T, kVector> FindResult(const DenseTask<T>& task, const Place& at) {
  const int quad_shift = task.lane_shift + (kLaneFeatures<T> == 8 ? 1 : 0);
  const int image = static_cast<int>(threadIdx.x) >> quad_shift;
  const int quad = static_cast<int>(threadIdx.x) & ((1 << quad_shift) - 1);
  const int block_feature = at.feature - (at.lane & ((1 << task.lane_shift) - 1)) * kLaneFeatures<T>;
  const bool own = task.parts == 1 || threadIdx.x % task.parts == at.part;
  Result<T, kVector> result{};
  result.stack = at.stack;
  result.feature = block_feature + quad * 4;
  result.valid = own && image < at.images ? min(task.features - result.feature, 4) : 0;
  result.at = (at.image + image) * task.features + result.feature;
  return result;
}

// The sums of a warp's groups of lanes, in all of them.
template <int kImages, int kFeatures>
__device__ __forceinline__ void AddGroups(float (&sums)[kImages][kFeatures], int lane_shift) {
  for (int step = kWarp / 2; step >> lane_shift; step /= 2) {
#pragma unroll
    for (int m = 0; m < kImages; ++m) {
#pragma unroll
      for (int i = 0; i < kFeatures; ++i) sums[m][i] += __shfl_xor_sync(0xffffffffu, sums[m][i], step);
    }
  }
}

#if __CUDA_ARCH__ >= 900
// Where the blocks of a cluster, which have parts of the channels, send each other their sums, one way: thread i of
// block i % parts adds the sums of thread i of all blocks, in their order.
struct Inbox {
  uint64_t* full;  // barrier
  float4* sums;    // [parts, slots]
  int part, parts, slots;

  __device__ Inbox(unsigned char* memory, const Place& at, int all_parts, int results)
      : full(reinterpret_cast<uint64_t*>(memory)),
        sums(reinterpret_cast<float4*>(memory + kBarrierBytes)),
        part(static_cast<int>(at.part)),
        parts(all_parts),
        slots((results + parts - 1) / parts) {
    if (parts == 1) return;
    if (threadIdx.x == 0) {
      InitBarrier(full);
      FenceBarriers();
      const int own = (results - part + parts - 1) / parts;
      ExpectBytes(full, own * (parts - 1) * static_cast<int>(sizeof(float4)));
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
__global__ void __launch_bounds__(kThreads, 1) DenseKernel(const __grid_constant__ DenseTask<T> task) {
  constexpr int kFeatures = kLaneFeatures<T>, kQuads = kFeatures / 4;
  extern __shared__ __align__(16) unsigned char shared[];
  const Place at = FindPlace<T, kImages>(task);
  const int lanes = 1 << task.lane_shift, quads = lanes * kQuads;  // quads: float4 of a row of a block's results
  const T* kernel =                                                // [C, K] from this lane's features on
      task.kernel + static_cast<int64_t>(at.stack) * task.channels * task.features + at.feature;
  const Unseen unseen = FindUnseen(task, at);
  uint4 weight[kRun];
  LoadUnseen<T, kVector>(task, at, unseen, kernel, weight);
#if __CUDA_ARCH__ >= 900
  const Inbox inbox(shared + task.inbox_at, at, static_cast<int>(task.parts), kImages * quads);
#endif
  Result<T, kVector> result;
  if constexpr (kImages == 1) {  // with more rows registers are short
    result = FindResult<T, kVector>(task, at);
    result.AskForAddends(task);
  }

  Ring<kImages> ring;
  ring.values = reinterpret_cast<float*>(shared) + at.warp * task.ring * kImages;
  ring.rows = reinterpret_cast<int*>(shared) + kWarps * task.ring * kImages + at.warp * task.ring;
  ring.mask = task.ring - 1;
  float sums[kImages][kFeatures] = {};
  SumRows<T, kImages, kVector>(task, at, unseen, kernel, ring, weight, sums);
  if constexpr (kImages > 1) {
    result = FindResult<T, kVector>(task, at);
    result.AskForAddends(task);
  }
  AddGroups<kImages, kFeatures>(sums, task.lane_shift);

  float4* warp_sums = reinterpret_cast<float4*>(shared);  // [kWarps, kImages, quads], in the place of the rings
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
    sum = warp_sums[thread];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) sum = sum + warp_sums[w * results + thread];
  }
#if __CUDA_ARCH__ >= 900
  if (task.parts > 1) sum = inbox.Exchange(sum, thread < results);
#endif
  result.Write(task, sum);
}

// Entries of a ring that holds two turns of loads and what one turn of the lister adds.
template <int kImages>
int RingEntries(int lane_shift) {
  const int wanted = 2 * kRun * (kWarp >> lane_shift) + Rows<kImages>::kListed;
  int entries = kWarp;
  while (entries < wanted) entries *= 2;
  return entries;
}

template <typename T, int kImages>
size_t SharedBytes(const DenseTask<T>& task) {
  const size_t results = kImages * (kLaneFeatures<T> << task.lane_shift) / 4 + task.parts;
  return task.inbox_at + (task.parts > 1 ? kBarrierBytes + results * sizeof(float4) : 0);
}

// Completes a task whose lane_shift and parts are set.
template <typename T, int kImages>
void CompleteTask(DenseTask<T>* task) {
  const int features = kLaneFeatures<T> << task->lane_shift;
  task->feature_tiles = static_cast<unsigned>((task->features + features - 1) / features);
  const int workers = kWarps * static_cast<int>(task->parts);
  task->first = std::min(kRun * (kWarp >> task->lane_shift), (task->channels + workers - 1) / workers);
  task->ring = RingEntries<kImages>(task->lane_shift);
  const int rings = kWarps * task->ring * (kImages + 1) * static_cast<int>(sizeof(float));
  const int sums = kWarps * kImages * features * static_cast<int>(sizeof(float));
  task->inbox_at = std::max(rings, sums);
}

// Segments of 2^lane_shift lanes, and as many blocks of a cluster to share the channels as run at once.
template <typename T, int kImages>
int64_t CompleteWithParts(int lane_shift, const DeviceInfo& device, int64_t tiles_of_images, DenseTask<T>* task) {
  task->lane_shift = lane_shift;
  task->parts = 1;
  CompleteTask<T, kImages>(task);
  const int64_t tiles = task->feature_tiles * tiles_of_images;
  while (task->parts < kMaxParts && tiles <= device.clusters[2 * task->parts]) task->parts *= 2;
  CompleteTask<T, kImages>(task);
  return tiles * task->parts;
}

// The narrowest segments with at most a block for each multiprocessor; a long stream's are whole lines of the cache, a
// very long one's two lines, where clusters make as many blocks of them.
template <typename T, int kImages>
void ChooseTiles(const DeviceInfo& device, int64_t tiles_of_images, DenseTask<T>* task) {
  const int64_t bytes = static_cast<int64_t>(task->channels) * task->features * sizeof(T);
  for (int lines = bytes >= kVeryLongStream ? 1 : 0; bytes >= kLongStream && lines >= 0; --lines) {
    const int64_t blocks = CompleteWithParts<T, kImages>(kLineShift + lines, device, tiles_of_images, task);
    if (blocks <= device.multiprocessors && 10 * blocks >= 9 * device.multiprocessors) return;
  }
  task->parts = 1;
  int chosen = kLineShift;
  for (int shift = Rows<kImages>::kMinLaneShift; shift <= kMaxLaneShift; ++shift) {
    task->lane_shift = shift;
    CompleteTask<T, kImages>(task);
    if (SharedBytes<T, kImages>(*task) > static_cast<size_t>(device.shared_memory)) continue;
    chosen = shift;
    if (task->feature_tiles * tiles_of_images <= device.multiprocessors) break;
  }
  task->lane_shift = chosen;
  CompleteTask<T, kImages>(task);
}

template <typename T, int kImages, bool kVector>
ffi::Error LaunchTask(const DenseTask<T>& task, int64_t tiles_of_images, cudaStream_t stream) {
  constexpr auto kKernel = DenseKernel<T, kImages, kVector>;
  ffi::Error error = Prepare<kKernel>("DenseKernel");
  if (error.failure()) return error;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(tiles_of_images * task.feature_tiles * task.parts));
  config.blockDim = dim3(kThreads);
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
ffi::Error LaunchDense(const ConvCall& call, const DeviceInfo& device, cudaStream_t stream) {
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
  task.features = static_cast<int>(a.features);
  task.relu = a.activation == Activation::kRelu;
  const int64_t tiles_of_images = task.image_tiles * a.stacks;
  ChooseTiles<T, kImages>(device, tiles_of_images, &task);
  if (task.features % kLaneFeatures<T> == 0) return LaunchTask<T, kImages, true>(task, tiles_of_images, stream);
  return LaunchTask<T, kImages, false>(task, tiles_of_images, stream);
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
    if (images == 1) return LaunchDense<T, 1>(call, info, stream);
    if (images <= 4) return LaunchDense<T, 4>(call, info, stream);
    return LaunchDense<T, 8>(call, info, stream);
  });
}

}  // namespace jsc
