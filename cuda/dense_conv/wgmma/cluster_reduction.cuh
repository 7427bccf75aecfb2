// The cluster reduction of the engine wgmma, for three or more blocks that split the steps of a tile. Each block owns
// some of the tile's results. It gets the sums of all blocks for them in its DSMEM slots, adds them in the order of the
// blocks, and writes.
//
// Layout: a slot holds a warp's sums of a row of kPatchWidth pixels, a float4 of each lane, just as the products leave
//   them: sums[4 * row + 2 * h + e], of output channels h and pixels e (core/wgmma.cuh). Rows are dealt to the blocks
//   one after another, two together where 2x2 windows are pooled. Slots are [row, block, lane].
// Why: st.async stores to another block's shared memory and counts at a barrier there. So sums need not be staged in
//   own shared memory, nor released to the cluster. A warp sends what it has when its products are done. A block leaves
//   when its own results are written. A cluster barrier at which nobody waits says that all blocks have started. Where
//   the slots take the place of the pipeline stages, it says that all are done with those.
// Why so little code: it runs once, so it is fetched while all wait for it. What can be found before the products is,
//   and the places of a warp's rows by a lane each.
// Lost: the same with 23 KB of code (0.7 us slower than reading, instead of 0.4 faster); sums staged and sent by TMA, a
//   lane for each row (0.1 us slower); two blocks, each with half of the tile to write (0.3 to 1 us slower than
//   reading); at 3xTF32 places found late (2 % slower), or 48 bytes a thread kept instead of 20, which costs a pipeline
//   stage.
#ifndef JSC_CUDA_DENSE_CONV_WGMMA_CLUSTER_REDUCTION_CUH_
#define JSC_CUDA_DENSE_CONV_WGMMA_CLUSTER_REDUCTION_CUH_

#include "cuda/dense_conv/wgmma/reduction.cuh"

namespace jsc {

// From two output channels of two pixels to four output channels of one pixel. Neighbouring output channels (float32)
// are swapped by lanes four apart, output channels eight apart by four lanes.
template <typename T>
__device__ __forceinline__ float4 TransposeQuad(float4 v) {
  const bool odd = threadIdx.x / 4 % 2 != 0, high = threadIdx.x / 8 % 2 != 0;
  const float keep[2] = {odd ? v.y : v.x, odd ? v.w : v.z};
  const float got[2] = {__shfl_xor_sync(0xffffffffu, odd ? v.x : v.y, 4),
                        __shfl_xor_sync(0xffffffffu, odd ? v.z : v.w, 4)};
  if constexpr (sizeof(T) == 4) {
    return odd ? make_float4(got[0], got[1], keep[0], keep[1]) : make_float4(keep[0], keep[1], got[0], got[1]);
  }
  const float2 pair[2] = {odd ? make_float2(got[0], keep[0]) : make_float2(keep[0], got[0]),
                          odd ? make_float2(got[1], keep[1]) : make_float2(keep[1], got[1])};
  const float2 mine = high ? pair[1] : pair[0], give = high ? pair[0] : pair[1];
  const float2 other = {__shfl_xor_sync(0xffffffffu, give.x, 8), __shfl_xor_sync(0xffffffffu, give.y, 8)};
  return high ? make_float4(other.x, other.y, mine.x, mine.y) : make_float4(mine.x, mine.y, other.x, other.y);
}

// What a warp sends, and which results it completes: a thread one column of a row and four output channels.
template <class U, typename T>
struct SlotReduction {
  static constexpr int kWarps = U::kConsumers / kWarp, kRows = U::kPixels / kPatchWidth, kSlotBytes = kWarp * 16;
  const WgmmaTaskOf<U, T>& task;
  int warp, split, pairs;        // pairs: 1 where two rows go together, else 0
  int rows, count;               // rows that are sent, and slots of this block
  uint32_t to, full;             // of row `lane` of this warp: where it goes, and the barrier there
  int column, out_channel, end;  // end: of rows in which the thread's column has results
  int64_t first;                 // the thread's element of row 0
  float4 bias;
  Tally tally;

  __device__ __forceinline__ explicit SlotReduction(const WgmmaTaskOf<U, T>& task) : task(task) {}

  __device__ __forceinline__ void FindRows(const WgmmaPlace& at) {
    split = at.split;
    pairs = task.pool != Pool::kNone ? 1 : 0;
    rows = task.patch ? task.height - at.y : (task.pixels - at.pixel + kPatchWidth - 1) / kPatchWidth;
    rows = (min(rows, kRows) + pairs) & ~pairs;
    const int pieces = (rows >> pairs) * kWarps;
    count = Divide(max(0, pieces - split + task.splits - 1), task.by_splits).quotient;
  }
  __device__ __forceinline__ int RowStep() const { return (task.patch ? task.width : kPatchWidth) * task.out_channels; }
  // The row, or pair of rows, of this block's piece.
  __device__ __forceinline__ int Row(int piece) const { return (split + piece * task.splits) / kWarps; }

#if __CUDA_ARCH__ >= 900
  // Made by one thread.
  __device__ __forceinline__ void Init(const WgmmaPlace& at, uint64_t* barrier) {
    FindRows(at);
    OpenSlots(barrier, (count << pairs) * task.splits * kSlotBytes);
  }
  // slots, barrier: of this block
  __device__ __forceinline__ void Find(const WgmmaPlace& at, int of_warp, uint32_t slots, uint32_t barrier) {
    FindRows(at);
    warp = of_warp;
    const int lane = threadIdx.x % kWarp;
    const Quotient place = Divide((lane >> pairs) * kWarps + warp, task.by_splits);
    const uint32_t slot = slots + (((place.quotient << pairs) + (lane & pairs)) * task.splits + split) * kSlotBytes;
    to = InBlock(slot, place.remainder);
    full = InBlock(barrier, place.remainder);
    const int sender = (split + warp * task.splits) % kWarps;  // whose sums this warp completes
    column = lane % 4 * 2 + lane / 4 % 2;
    if constexpr (sizeof(T) == 4) {
      out_channel =
          at.out_channel + sender / 4 * 64 + sender / 2 % 2 * 32 + (sender % 2 * 2 + lane / 16 + lane / 8 % 2 * 4) * 4;
    } else {
      out_channel = at.out_channel + sender * 16 + lane / 8 % 2 * 8 + lane / 16 * 4;
    }
    const int stack = static_cast<int>(blockIdx.z), image = stack * task.images_per_stack + at.image;
    if (pairs != 0) {
      const int x = at.x / 2 + column / 2;
      first = (static_cast<int64_t>(image) * task.pooled_height + at.y / 2) * task.pooled_width + x;
      end = column % 2 == 0 && x < task.pooled_width ? task.pooled_height - at.y / 2 : 0;
    } else if (task.patch) {
      first = (static_cast<int64_t>(image) * task.height + at.y) * task.width + at.x + column;
      end = at.x + column < task.width ? rows : 0;
    } else {
      first = static_cast<int64_t>(stack) * task.pixels + at.pixel + column;
      end = min(rows, (task.pixels - at.pixel - column + kPatchWidth - 1) / kPatchWidth);
    }
    first = first * task.out_channels + out_channel;
    if (out_channel >= task.out_channels) end = 0;
    if constexpr (!U::kSpillsSlots) LoadBias();
  }
  // What has been found, kept in shared memory (kSpillBytes a thread) where registers are short.
  __device__ __forceinline__ void Spill(uint32_t spill) const {
    const int tile_end = min(max(end, 0), kRows);  // that of pooled rows is the map's
    const auto numbers = static_cast<uint32_t>(rows | tile_end << 5 | split << 10 | pairs << 14 | count << 15);
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(spill + threadIdx.x * 16), "r"(to), "r"(numbers),
                 "r"(static_cast<uint32_t>(first)), "r"(static_cast<uint32_t>(first >> 32))
                 : "memory");
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(spill + U::kConsumers * 16 + threadIdx.x * 4), "r"(out_channel)
                 : "memory");
  }
  // The same again, but for the bias. barrier: as in Find
  __device__ __forceinline__ void Reload(int of_warp, uint32_t barrier, uint32_t spill) {
    uint32_t numbers, low, high;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to), "=r"(numbers), "=r"(low), "=r"(high)
                 : "r"(spill + threadIdx.x * 16)
                 : "memory");
    asm volatile("ld.shared.b32 %0, [%1];"
                 : "=r"(out_channel)
                 : "r"(spill + U::kConsumers * 16 + threadIdx.x * 4)
                 : "memory");
    warp = of_warp;
    rows = static_cast<int>(numbers & 31), end = static_cast<int>(numbers >> 5 & 31);
    split = static_cast<int>(numbers >> 10 & 15), pairs = static_cast<int>(numbers >> 14 & 1);
    count = static_cast<int>(numbers >> 15);
    first = static_cast<int64_t>(static_cast<uint64_t>(high) << 32 | low);
    uint32_t rank;
    asm volatile("getctarank.shared::cluster.u32 %0, %1;" : "=r"(rank) : "r"(to));
    full = InBlock(barrier, rank);
  }
  __device__ __forceinline__ void LoadBias() {
    bias = {0.f, 0.f, 0.f, 0.f};
    if (task.bias && out_channel < task.out_channels) {
      bias = Load4(task.bias + static_cast<int64_t>(blockIdx.z) * task.out_channels + out_channel);
    }
  }
  __device__ __forceinline__ void Send(const float (&sums)[U::kPixels / 2]) const {
    constexpr int kBatch = 7;  // whose places are at hand together
    static_assert(kRows % kBatch == 0);
    const uint32_t lane = threadIdx.x % kWarp * 16;
#pragma unroll
    for (int from = 0; from < kRows; from += kBatch) {
      uint32_t slot[kBatch], barrier[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        slot[i] = __shfl_sync(0xffffffffu, to, from + i) + lane;
        barrier[i] = __shfl_sync(0xffffffffu, full, from + i);
        asm volatile("" : "+r"(slot[i]), "+r"(barrier[i]));
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const float* v = sums + (from + i) * 4;
        SendIfBelow(slot[i], {v[0], v[1], v[2], v[3]}, barrier[i], from + i, rows);
      }
    }
  }
  // All of the warp's pieces.
  __device__ __forceinline__ void Write(const unsigned char* slots, uint64_t* barrier) {
    if (pairs != 0) {
      WaitForBytes(barrier, 0);
      WritePooled(slots);
      return;
    }
    WriteRows(slots, barrier);
  }
#endif

 private:
#if __CUDA_ARCH__ >= 900
  // Of results that are not pooled: a warp's pieces are `splits` rows apart.
  __device__ __forceinline__ void WriteRows(const unsigned char* slots, uint64_t* barrier) {
    const int64_t step = static_cast<int64_t>(RowStep()) * task.splits;
    int row = Row(warp);
    const int64_t at = first + static_cast<int64_t>(row) * RowStep();
    T* out = task.out + at;
    const T* residual = task.residual ? task.residual + at : nullptr;
    const bool counts = task.counts.rows != nullptr;
    const auto load = [&](int of_row) {
      float4 v = {0.f, 0.f, 0.f, 0.f};
      if (residual) {
        if (of_row < end) v = Load4(residual);
        residual += step;
      }
      return v;
    };
    float4 extra = load(row), next = load(row + task.splits);
    WaitForBytes(barrier, 0);
#pragma unroll 1
    for (int piece = warp; piece < count; piece += kWarps) {
      const float4 result = Finish(SumOfRow(slots, piece), bias + extra, task.relu);
      if (row < end) Store(out, result, counts);
      out += step;
      row += task.splits;
      extra = next;
      next = load(row + task.splits);
    }
  }
#endif
  __device__ __forceinline__ float4 SumOfRow(const unsigned char* slots, int row) const {
    const auto* from = reinterpret_cast<const float4*>(slots) + row * task.splits * kWarp + threadIdx.x % kWarp;
    return TransposeQuad<T>(AddParts(from, kWarp, task.splits));
  }
  __device__ __forceinline__ void Store(T* to, float4 result, bool counts) {
    StoreResults<U>(task, to, result);
    if (counts) tally.template Add<T>(result, 4);
  }
  // Pairs of rows; lanes four apart have a pair of columns, of which the even one's writes.
  __device__ __forceinline__ void WritePooled(const unsigned char* slots) {
#pragma unroll 1
    for (int piece = warp; piece < count; piece += kWarps) {
      const float4 result = Pooled(SumOfRow(slots, piece * 2), SumOfRow(slots, piece * 2 + 1));
      const int row = Row(piece);
      T* to = task.out + first + static_cast<int64_t>(row) * (task.pooled_width * task.out_channels);
      if (row < end) Store(to, result, task.counts.rows);
    }
  }
  // Of a column's two sums the result of a window.
  __device__ __forceinline__ float4 Pooled(float4 top, float4 low) const {
    const auto beside = [](float4 v) {
      const auto other = [](float of) { return __shfl_xor_sync(0xffffffffu, of, 4); };
      return float4{other(v.x), other(v.y), other(v.z), other(v.w)};
    };
    const WindowPool pool(task.pool, task.relu, bias);
    top = pool.Before(top, bias), low = pool.Before(low, bias);
    if (task.pool == Pool::kAverage) return 0.25f * ((top + beside(top)) + (low + beside(low)));
    const float4 of_column = MaxOrNan(top, low);
    return pool.After(MaxOrNan(of_column, beside(of_column)), bias);
  }
};

}  // namespace jsc

#endif  // JSC_CUDA_DENSE_CONV_WGMMA_CLUSTER_REDUCTION_CUH_
