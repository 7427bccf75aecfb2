// Dense layers of one row of x (sparse/matvec/rows.cu) on GPUs that have clusters and TMA.
//
// Sixteen warps of a thousand instructions before and behind the stream take as long as 8 MB of it. So do inputs that
// every warp waits for by itself: loads of x and of kernel rows are counted by the same scoreboard, so a warp that
// waited for x waited for its kernel rows too. So here:
// - A seventeenth warp has TMA bring the block's share of x to shared memory. Lists are made from there.
// - A lane has eight channels one after another in a round. Four 16-byte loads get their entries. Only the last round
//   is tested: what would be a round of fewer is filled up with entries that load nothing.
// - Loads take the registers of the round before in place. Entries of the next round are there before the weights of
//   this one are waited for.
// - Sums of all warps and groups of lanes come together in shared memory once, and every thread adds a part. At the end
// of a chain (chain/chain.cu) the kernel rows that are asked for unseen come while the kernel in front runs. x may be
// the average of a map's pixels. All warps take it, of the channels of a block, and the cluster shares them all. Behind
// another dense layer nothing is asked for unseen. Most of it would be of zeros, and x would wait behind it (VGG-19's
// last two layers take 10 us so, and took 14).
#ifndef JSC_CUDA_SPARSE_MATVEC_ROW_CUH_
#define JSC_CUDA_SPARSE_MATVEC_ROW_CUH_

#include "cuda/core/cluster_sums.cuh"
#include "cuda/core/programmatic_launch.cuh"
#include "cuda/sparse/matvec/stream.cuh"

namespace jsc {

constexpr int kRowThreads = kDenseThreads + kWarp;  // a warp copies x
constexpr int kRowRuns = 4;                         // of 32 channels, listed at a time
constexpr int kRowBarrierBytes = 16;                // two of them
constexpr int kAverageBytes = kDenseThreads * 16;   // where warps add pixels of the same channels

// A call and its blocks: blockIdx.x has tiles of output channels, of each `parts` blocks of a cluster, blockIdx.y
// stacks.
template <typename T>
struct DenseRowTask {
  const T* x;         // [S, C]
  const T* kernel;    // [S, C, K]
  const T* bias;      // [S, K] or null
  const T* residual;  // [S, K] or null
  T* out;             // [S, K]
  int channels, out_channels;
  int row_pieces;                      // 16-byte pieces of a kernel row
  int lane_shift;                      // logarithm of the lanes that read a segment of one kernel row
  int part_shift;                      // logarithm of the blocks of a cluster, which share the channels
  int first;                           // channels at most that a warp asks for before it knows x, in eights
  int ring;                            // entries of a warp's list, a power of two
  int x_at, partials_at, barriers_at;  // in shared memory
  bool relu;
  int pixels;  // of x, [pixels, C], that are averaged; 0: x is [S, C]
};

// What a warp's list holds of a channel: where its kernel row starts, in pieces of 16 bytes, and the input.
constexpr uint32_t kNoRow = ~0u;
constexpr int kRowEntryBytes = 8;

__device__ __forceinline__ void PutEntry(uint32_t to, uint32_t row, float value, bool yes) {
  asm volatile("{\n .reg .pred yes;\n setp.ne.b32 yes, %0, 0;\n @yes st.shared.v2.b32 [%1], {%2, %3};\n}" ::"r"(
                   static_cast<int>(yes)),
               "r"(to), "r"(row), "r"(__float_as_uint(value))
               : "memory");
}

__device__ __forceinline__ void GetTwoEntries(uint32_t from, uint32_t (&row)[kDenseRun], float (&value)[kDenseRun],
                                              int at) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(row[at]), "=f"(value[at]), "=r"(row[at + 1]), "=f"(value[at + 1])
               : "r"(from)
               : "memory");
}

// Loads where `yes`, and leaves the weight as it is elsewhere. That keeps it in its registers. The compiler would load
// into others, and wait for the load to move it.
__device__ __forceinline__ void LoadInPlace(uint4& weight, const char* p, bool yes) {
  asm volatile(
      "{\n .reg .pred yes;\n setp.ne.b32 yes, %5, 0;\n"
      " @yes ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
      : "+r"(weight.x), "+r"(weight.y), "+r"(weight.z), "+r"(weight.w)
      : "l"(p), "r"(static_cast<int>(yes)));
}

// The channels of x that a block has, [channels] in its shared memory, as pieces of all of them.
struct RowShare {
  int part, part_shift, channels;

  __device__ RowShare(int in_part, int shift, int all_channels) : part(in_part), part_shift(shift) {
    const int pieces = (all_channels + (1 << kPieceShift) - 1) >> kPieceShift, parts = 1 << shift;
    channels = ((pieces - part + parts - 1) >> shift) << kPieceShift;
    if (((pieces - 1) & (parts - 1)) == part) channels -= (pieces << kPieceShift) - all_channels;
  }

  // The channel of x that is at `channel` here.
  __device__ int InX(int channel) const {
    constexpr int kPiece = 1 << kPieceShift;
    return ((((channel >> kPieceShift) << part_shift) + part) << kPieceShift) + (channel & (kPiece - 1));
  }
};

// A warp's list of the channels that it has not asked for unseen: a ring, filled by runs of 32 channels, of which every
// sixteenth is this warp's.
template <typename T>
struct RowList {
  static constexpr int kStep = kDenseWarps * kWarp;
  static_assert(kStep % (1 << kPieceShift) == 0);  // so rows of successive runs are equally far from each other
  const T* x;                                      // [channels]
  int channels, next;                              // next: channel of this lane in the first run that is not listed
  uint32_t row, step;   // its kernel row and what lies between rows of runs, in pieces of 16 bytes
  uint32_t ring, mask;  // address of the ring; of bytes in it
  int produced = 0;

  // Uniform in a warp: whether there are runs left.
  __device__ __forceinline__ bool Left(int lane) const { return next - lane < channels; }

  __device__ __forceinline__ void Append(int lane) {
    float value[kRowRuns];
#pragma unroll
    for (int i = 0; i < kRowRuns; ++i) value[i] = next + i * kStep < channels ? ToFloat(x[next + i * kStep]) : 0.f;
    __syncwarp();  // what it overwrites has been read
#pragma unroll
    for (int i = 0; i < kRowRuns; ++i) {
      const uint32_t kept = __ballot_sync(0xffffffffu, value[i] != 0.f);
      const uint32_t entry = produced + __popc(kept & ((1u << lane) - 1));
      PutEntry(ring + (entry * kRowEntryBytes & mask), row, value[i], value[i] != 0.f);
      produced += __popc(kept);
      row += step;
    }
    next += kRowRuns * kStep;
    __syncwarp();
  }

  // Fills a round up to entry `end` with nothing.
  __device__ __forceinline__ void FillUp(int lane, int end) const {
#pragma unroll 1
    for (int entry = produced + lane; entry < end; entry += kWarp) {
      PutEntry(ring + (static_cast<uint32_t>(entry) * kRowEntryBytes & mask), kNoRow, 0.f, true);
    }
    __syncwarp();
  }
};

// Kernel row segments in registers, and the inputs that they are multiplied by.
template <typename T>
struct RowRound {
  static constexpr int kOutChannels = kLaneOutChannels<T>;
  uint4 weight[kDenseRun];
  float value[kDenseRun];

  // Weights of inputs that are zero, or of no channel, are nothing, whatever they are.
  __device__ __forceinline__ void DropZeros() {
#pragma unroll
    for (int e = 0; e < kDenseRun; ++e) {
      if (value[e] == 0.f) weight[e] = make_uint4(0, 0, 0, 0);
    }
  }

  __device__ __forceinline__ void Add(int e, float (&sums)[kOutChannels]) const {
    float w[kOutChannels];
    Unpack(weight[e], w, T{});
#pragma unroll
    for (int i = 0; i < kOutChannels; ++i) sums[i] = fmaf(value[e], w[i], sums[i]);
  }
};

// sums[output channel] of a lane's part of the channels. A group of lanes that reads a segment has eight channels one
// after another in each round of its warp. The first round's are loaded before x is known.
template <typename T>
__device__ __forceinline__ void SumRow(const char* kernel, bool inside, int lane, int lane_shift, RowRound<T>& round,
                                       RowList<T>& list, float (&sums)[kLaneOutChannels<T>]) {
  const int batch = kDenseRun * kWarp >> lane_shift;
  bool dirty = true;  // some of the round's weights are not to be added
  uint32_t from = (lane >> lane_shift) * kDenseRun * kRowEntryBytes;
#pragma unroll 1
  for (int end = batch;; end += batch) {
#pragma unroll 1
    while (list.produced < end && list.Left(lane)) list.Append(lane);
    if (list.produced <= end - batch) break;
    if (list.produced < end) list.FillUp(lane, end);
    uint32_t row[kDenseRun];
    float value[kDenseRun];
    const uint32_t entries = list.ring + (from & list.mask);
#pragma unroll
    for (int e = 0; e < kDenseRun; e += 2) GetTwoEntries(entries + e * kRowEntryBytes, row, value, e);
    if (dirty) round.DropZeros();
#pragma unroll
    for (int e = 0; e < kDenseRun; ++e) {
      round.Add(e, sums);
      round.value[e] = value[e];
      LoadInPlace(round.weight[e], kernel + static_cast<uint64_t>(row[e]) * 16, row[e] != kNoRow && inside);
    }
    dirty = row[kDenseRun - 1] == kNoRow;
    from += batch * kRowEntryBytes;
  }
  if (dirty) round.DropZeros();
#pragma unroll
  for (int e = 0; e < kDenseRun; ++e) round.Add(e, sums);
}

#if __CUDA_ARCH__ >= 900
// The block's share of x, by a warp.
template <typename T>
__device__ __forceinline__ void CopyRow(const T* x, const RowShare& share, T* to, uint64_t* barrier, int lane) {
  constexpr int kPiece = 1 << kPieceShift;
  if (lane == 0) ExpectBytes(barrier, share.channels * static_cast<int>(sizeof(T)));
  __syncwarp();
#pragma unroll 1
  for (int at = lane * kPiece; at < share.channels; at += kWarp * kPiece) {
    const int bytes = min(kPiece, share.channels - at) * static_cast<int>(sizeof(T));
    CopyBytes(to + at, x + share.InX(at), bytes, barrier);
  }
}
#endif

#if __CUDA_ARCH__ >= 900
// The block's share of x as the average of its pixels, by all warps but the one that copies. `sums`: shared memory of
// kAverageBytes.
template <typename T>
__device__ __forceinline__ void AverageRow(const DenseRowTask<T>& task, const RowShare& share, T* to, float* sums) {
  constexpr int kPiece = 1 << kPieceShift, kQuads = kPiece / 4, kGroups = kDenseThreads / kQuads,
                kAtOnce = kAveragedAtOnce;
  const int quad = static_cast<int>(threadIdx.x) % kQuads, group = static_cast<int>(threadIdx.x) / kQuads;
  const float scale = 1.f / static_cast<float>(task.pixels);
#pragma unroll 1
  for (int piece = 0; piece < share.channels; piece += kPiece) {
    float4 sum = {0.f, 0.f, 0.f, 0.f};
    if (piece + quad * 4 < share.channels) {
      const T* from = task.x + share.InX(piece + quad * 4);
#pragma unroll 1
      for (int first = group; first < task.pixels; first += kGroups * kAtOnce) {
        float4 v[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const int pixel = first + i * kGroups;
          v[i] = make_float4(0.f, 0.f, 0.f, 0.f);
          if (pixel < task.pixels) v[i] = Load4(from + static_cast<int64_t>(pixel) * task.channels);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          sum = {fmaf(v[i].x, scale, sum.x), fmaf(v[i].y, scale, sum.y), fmaf(v[i].z, scale, sum.z),
                 fmaf(v[i].w, scale, sum.w)};
        }
      }
    }
    *reinterpret_cast<float4*>(sums + group * kPiece + quad * 4) = sum;
    asm volatile("bar.sync 1, %0;" ::"n"(kDenseThreads) : "memory");
    const int channel = static_cast<int>(threadIdx.x);
    if (channel < kPiece && piece + channel < share.channels) {
      float all = 0.f;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) all += sums[g * kPiece + channel];
      to[piece + channel] = FromFloat<T>(all);
    }
    asm volatile("bar.sync 1, %0;" ::"n"(kDenseThreads) : "memory");
  }
}
#endif

// For sm_90 and later. kInChain: as a kernel of a chain, of one stack.
template <typename T, bool kInChain>
__global__ void __launch_bounds__(kRowThreads, 1) DenseRowKernel(const __grid_constant__ DenseRowTask<T> task) {
#if __CUDA_ARCH__ >= 900
  constexpr int kOutChannels = kLaneOutChannels<T>, kOutChannelShift = kOutChannels == 8 ? 3 : 2;
  constexpr int kThreadShift = 9;
  static_assert(kDenseThreads == 1 << kThreadShift);
  extern __shared__ __align__(16) unsigned char shared[];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int parts = 1 << task.part_shift, part = blockIdx.x & (parts - 1), tile = blockIdx.x >> task.part_shift;
  const int64_t stack = blockIdx.y, row_bytes = static_cast<int64_t>(task.row_pieces) * 16;
  const RowShare share_of_x(part, task.part_shift, task.channels);
  T* const x = reinterpret_cast<T*>(shared + task.x_at);
  uint64_t* const full = reinterpret_cast<uint64_t*>(shared + task.barriers_at);  // of the DSMEM slots; then of x
  const int out_channel_shift = task.lane_shift + kOutChannelShift, slot_shift = out_channel_shift - task.part_shift;
  if (__any_sync(0xffffffffu, warp == kDenseWarps)) {  // a vote, so that the compiler sees whole warps part
    if (lane == 0) {
      InitBarrier(full);
      InitBarrier(full + 1);
      FenceBarriers();
    }
    __syncwarp();
    if (lane == 0 && parts > 1) ExpectBytes(full, ((parts - 1) << slot_shift) * static_cast<int>(sizeof(float)));
    if constexpr (kInChain) {
      WaitForKernelBefore();
      LetNextKernelStart();
    }
    if (!kInChain || task.pixels == 0) CopyRow<T>(task.x + stack * task.channels, share_of_x, x, full + 1, lane);
    if (parts > 1) ArriveAtCluster();
    __syncthreads();
    return;
  }
  const int group_shift = 5 - task.lane_shift, group = lane >> task.lane_shift;
  const int column = (lane & ((1 << task.lane_shift) - 1)) * kOutChannels;
  const int tile_out_channel = (tile << task.lane_shift) * kOutChannels;
  const bool inside = tile_out_channel + column < task.out_channels;
  const char* kernel =
      reinterpret_cast<const char*>(task.kernel + tile_out_channel + column) + stack * task.channels * row_bytes;

  RowRound<T> round;
  const int unseen = warp * task.first + group * kDenseRun;
  const int count = min(min(share_of_x.channels, (warp + 1) * task.first) - unseen, kDenseRun);
  const char* p = kernel + share_of_x.InX(unseen) * row_bytes;
#pragma unroll
  for (int e = 0; e < kDenseRun; ++e) {
    round.weight[e] = make_uint4(0, 0, 0, 0);
    LoadInPlace(round.weight[e], p, e < count && inside);
    p += row_bytes;
  }
  // Which result is this thread's in the end: 2^share_shift threads add the sums of an output channel.
  const int share_shift = min(5, kThreadShift - out_channel_shift), share = 1 << share_shift;
  const int in_tile = threadIdx.x >> share_shift, sub = threadIdx.x & (share - 1),
            out_channel = tile_out_channel + in_tile;
  const int owner = in_tile >> slot_shift, slot = in_tile & ((1 << slot_shift) - 1);
  const bool writes = sub == 0 && owner == part && in_tile >> out_channel_shift == 0 && out_channel < task.out_channels;
  const int64_t at = stack * task.out_channels + out_channel;
  T bias = FromFloat<T>(0.f), residual = FromFloat<T>(0.f);
  if (writes && task.bias) bias = task.bias[at];
  if (writes && task.residual) residual = task.residual[at];

  RowList<T> list;
  list.x = x;
  list.channels = share_of_x.channels;
  list.next = kDenseWarps * task.first + warp * kWarp + lane;
  list.row = static_cast<uint32_t>(share_of_x.InX(list.next)) * task.row_pieces;
  list.step = static_cast<uint32_t>(RowList<T>::kStep * parts) * task.row_pieces;
  list.ring = SharedAddress(shared) + warp * task.ring * kRowEntryBytes;
  list.mask = task.ring * kRowEntryBytes - 1;
  if (parts > 1) ArriveAtCluster();
  __syncthreads();
  if (kInChain && task.pixels > 0) {
    WaitForKernelBefore();  // which wrote x
    AverageRow<T>(task, share_of_x, x, reinterpret_cast<float*>(shared + task.partials_at));
  } else {
    WaitForBytes(full + 1, 0);
  }
#pragma unroll
  for (int e = 0; e < kDenseRun; ++e) round.value[e] = e < count ? ToFloat(x[unseen + e]) : 0.f;

  float sums[kOutChannels] = {};
  SumRow<T>(kernel, inside, lane, task.lane_shift, round, list, sums);

  // The sums of all groups of lanes are added in [groups of the block, pitch].
  const int pitch = (1 << out_channel_shift) + 4;
  float* partials = reinterpret_cast<float*>(shared + task.partials_at);
  float* own = partials + ((warp << group_shift) + group) * pitch + column;
#pragma unroll
  for (int i = 0; i < kOutChannels; i += 4) {
    *reinterpret_cast<float4*>(own + i) = make_float4(sums[i], sums[i + 1], sums[i + 2], sums[i + 3]);
  }
  asm volatile("bar.sync 1, %0;" ::"n"(kDenseThreads) : "memory");
  if (in_tile >> out_channel_shift) return;
  float sum = 0.f;
#pragma unroll 4
  for (int row = sub; row < kDenseWarps << group_shift; row += share) sum += partials[row * pitch + in_tile];
#pragma unroll 1
  for (int step = share / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if (sub != 0) return;
  if (parts > 1) {
    float* slots = reinterpret_cast<float*>(full + 2);           // [parts, slots]
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");  // some threads of a warp
    if (owner != part) {
      SendToBlock(owner, slots + (part << slot_shift) + slot, sum, full);
      return;
    }
    WaitForBytes(full, 0);
    float all = 0.f;
#pragma unroll 1
    for (int p = 0; p < parts; ++p) all += p == part ? sum : slots[(p << slot_shift) + slot];
    sum = all;
  }
  if (!writes) return;
  if (task.bias) sum += ToFloat(bias);
  if (task.residual) sum += ToFloat(residual);
  if (task.relu) sum = Relu(sum);
  task.out[at] = FromFloat<T>(sum);
#endif
}

}  // namespace jsc

#endif  // JSC_CUDA_SPARSE_MATVEC_ROW_CUH_
