// One task of ECR / PECR: sparse windows times packed kernel slices, then bias, residual, ReLU and pool.
//
// What: sums[block][window][channel] += value * slice[kernel row][channel] over each window's list, chunk by chunk.
// Layout: a slice is [chunk rows + 1, block] in the accumulator's type, contiguous. HWIO rows lie K elements apart, a
//   power of two as a rule, and would share a few cache sets. Packing also widens 16-bit kernels and pads K to whole
//   vectors, so that the loop below has no tails. It appends the row of zeros that list padding points at.
// Why this tiling: the loop issues one multiply-add with a memory operand for each vector, two a cycle at best, and
//   only L1 delivers that. So the slice should fit there; sums stay in L2. A narrow block holds more channels a chunk,
//   which gives longer lists per load of the sums. Where lists stay short even so, a slice beyond L1 wins
//   (plan/window_plan.cc).
// Order of each sum: a chunk's entries from 0 on, then the chunks (core/simd.h, AddTo).
// Bound by: the two 512-bit load ports (a weight per multiply-add and a broadcast per entry) at 85 % zeros; reading the
//   kernel from the outer cache, at about 20 GB/s a core, and building lists at 95 %.
// Lost: prefetching the next slice during the loop (the line fill buffers are the limit either way); 3 or 4 windows a
//   group instead of 2; blocks of 8 vectors (lists too short), of 3 and of 1; slices of 8 channels.
#ifndef JSC_CPU_LOOPS_WINDOW_KERNEL_H_
#define JSC_CPU_LOOPS_WINDOW_KERNEL_H_

#include <type_traits>

#include "cpu/loops/epilogue.h"
#include "cpu/loops/packed_row.h"
#include "cpu/loops/window_lists.h"

namespace jsc {
namespace JSC_ISA {
namespace {

// Where the rows of a slice lie in the kernel: [taps * kw, channels] rows of `width` elements.
template <typename T>
struct KernelSlice {
  const Stored<T>* first;
  int64_t taps, channels;              // taps counts ky and kx
  int64_t tap_stride, channel_stride;  // in elements
  int64_t apart;                       // the two channels of a pair, in elements
  bool lone;                           // the last pair has one channel
  int64_t width;                       // valid output channels, at most the block
};

template <typename T>
KernelSlice<T> SliceAt(const ConvTask& task, const Chunk& chunk, int64_t block) {
  const ConvArgs& a = task.call->args;
  const int64_t out_channels = a.out_channels / a.groups, first = block * task.plan->block;
  const int64_t taps_before = (task.stack * a.kernel_size[0] + chunk.tap_begin) * a.kernel_size[1];
  KernelSlice<T> slice{};
  slice.apart = a.out_channels;
  slice.lone = task.call->lone_channel && chunk.channel_begin + chunk.channels == a.group_channels;
  slice.channel_stride = kChannelsOf<T> * a.out_channels;
  slice.tap_stride = (kChannelsOf<T> * a.group_channels - task.call->lone_channel) * a.out_channels;
  slice.first = static_cast<const Stored<T>*>(task.call->kernel) + taps_before * slice.tap_stride +
                chunk.channel_begin * slice.channel_stride + task.group * out_channels + first;
  slice.taps = chunk.taps * a.kernel_size[1];
  slice.channels = chunk.channels;
  slice.width = Min(task.plan->block, out_channels - first);
  return slice;
}

// packed: [taps * channels + 1, block]
template <typename T, typename F>
[[gnu::noinline]] void Pack(const KernelSlice<T>& slice, int64_t block, F* packed) {
  for (int64_t tap = 0; tap < slice.taps; ++tap) {
    const Stored<T>* row = slice.first + tap * slice.tap_stride;  // [width]
    for (int64_t c = 0; c < slice.channels; ++c, row += slice.channel_stride, packed += block) {
      const bool lone = slice.lone && c + 1 == slice.channels;
      PackRow<T>(row, lone ? 0 : slice.apart, slice.width, block, packed);
    }
  }
  for (int64_t k = 0; k < block; ++k) packed[k] = F{};
}

// Elements that packed kernels have: float32, and pairs of bfloat16.
template <typename T>
constexpr bool kIsPacked = std::is_same_v<T, float> || std::is_same_v<T, BFloat16Pair>;

// Where weights of one chunk of a block lie: in the packed kernel if there is one, whose rows follow each other, else
// in the kernel, a row of output channels for each tap and channel. Pairs are in a packed kernel alone.
template <typename T>
struct Weights {
  static constexpr int64_t kMostVectors = 4;  // of a block that is not read in the packed kernel
  const T* first[kMostVectors];               // of each vector
  int64_t vectors, tap_stride, channel_stride;
  int64_t width;  // of all vectors: those of a packed kernel are whole
};

template <typename T>
Weights<T> WeightsOf(const ConvTask& task, const Chunk& chunk, int64_t block) {
  const ConvArgs& a = task.call->args;
  if constexpr (std::is_same_v<T, float>) {
    if (task.call->packed == nullptr) {
      const KernelSlice<T> slice = SliceAt<T>(task, chunk, block);
      Weights<T> weights{{}, CeilDiv(slice.width, kLanes<T>), slice.tap_stride, slice.channel_stride, slice.width};
      for (int64_t v = 0; v < weights.vectors; ++v) weights.first[v] = slice.first + v * kLanes<T>;
      return weights;
    }
  }
  // [S, groups, blocks, C / groups, kh * kw, whole]
  const int64_t out_channels = a.out_channels / a.groups, whole = PackedBlock(a, kChannelsOf<T> == 2);
  const int64_t blocks = CeilDiv(out_channels, whole);
  const int64_t first = block * task.plan->block, channel_stride = a.kernel_size[0] * a.kernel_size[1] * whole;
  const int64_t vectors = CeilDiv(Min(task.plan->block, out_channels - first), kLanes<T>);
  Weights<T> weights{{}, vectors, whole, channel_stride, vectors * kLanes<T>};
  for (int64_t v = 0; v < vectors; ++v) {
    const int64_t k = first + v * kLanes<T>;
    const int64_t row = ((task.stack * a.groups + task.group) * blocks + k / whole) * a.group_channels;
    weights.first[v] = static_cast<const T*>(task.call->packed) + (row + chunk.channel_begin) * channel_stride +
                       chunk.tap_begin * a.kernel_size[1] * whole + k % whole;
  }
  return weights;
}

// A chunk of a block, from the packed kernel where the call has one, else from the kernel. packed: as of Pack, but for
// the row of zeros, which dense loops do not read.
template <typename T>
void PackBlock(const ConvTask& task, const Chunk& chunk, int64_t block, Factor<T>* packed) {
  const int64_t stride = task.plan->block;
  if constexpr (kIsPacked<T>) {
    if (task.call->packed != nullptr) {
      const Weights<T> weights = WeightsOf<T>(task, chunk, block);
      for (int64_t tap = 0; tap < chunk.taps * task.call->args.kernel_size[1]; ++tap) {
        for (int64_t c = 0; c < chunk.channels; ++c, packed += stride) {
          const int64_t row = tap * weights.tap_stride + c * weights.channel_stride;
          for (int64_t v = 0; v < weights.vectors; ++v) Store(packed + v * kLanes<T>, Load(weights.first[v] + row));
        }
      }
      return;
    }
  }
  Pack(SliceAt<T>(task, chunk, block), stride, packed);
}

// sums: [windows + 1, stride]; packed: [rows, stride]. kVectors of each row are used.
template <int kVectors, int kWindows, typename A>
[[gnu::noinline]] void Multiply(const WindowLists<A>& lists, int64_t stride, const A* packed, A* sums) {
  const A* values = lists.values;
  const uint32_t* offsets = lists.offsets;
  const char* slice = reinterpret_cast<const char*>(packed);
  for (int64_t group = 0; group < lists.groups; ++group) {
    const int64_t length = lists.lengths[group];
    A* rows[kWindows];
    Vector<A> sum[kWindows][kVectors];
    for (int w = 0; w < kWindows; ++w) {
      rows[w] = sums + lists.order[group * kWindows + w] * stride;
      for (int v = 0; v < kVectors; ++v) sum[w][v] = Vector<A>{};
    }
    for (int64_t i = 0; i < length; ++i) {
#pragma GCC unroll 8
      for (int w = 0; w < kWindows; ++w) {
        const A value = values[w * length + i];
        const A* row = reinterpret_cast<const A*>(slice + offsets[w * length + i]);
        asm("" : "+r"(row));  // one register: indexed operands would be split into two micro-operations
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) sum[w][v] += value * Load(row + v * kLanes<A>);
      }
    }
    values += kWindows * length;
    offsets += kWindows * length;
    for (int w = 0; w < kWindows; ++w) {
      for (int v = 0; v < kVectors; ++v) AddTo(rows[w] + v * kLanes<A>, sum[w][v]);
    }
  }
}

// The instantiation for a plan of `vectors` and a block that needs `used` of them.
template <typename A>
void MultiplyBlock(int64_t vectors, int64_t used, const WindowLists<A>& lists, int64_t stride, const A* packed,
                   A* sums) {
  switch (vectors * 8 + used) {
    case 1 * 8 + 1:
      return Multiply<1, 8>(lists, stride, packed, sums);
    case 2 * 8 + 1:
      return Multiply<1, 4>(lists, stride, packed, sums);
    case 2 * 8 + 2:
      return Multiply<2, 4>(lists, stride, packed, sums);
    case 3 * 8 + 1:
    case 4 * 8 + 1:
      return Multiply<1, 2>(lists, stride, packed, sums);
    case 3 * 8 + 2:
    case 4 * 8 + 2:
      return Multiply<2, 2>(lists, stride, packed, sums);
    case 3 * 8 + 3:
    case 4 * 8 + 3:
      return Multiply<3, 2>(lists, stride, packed, sums);
    default:
      return Multiply<4, 2>(lists, stride, packed, sums);
  }
}

template <typename A>
struct ConvBuffers {
  TileImage* images;  // [tile images]
  A* packed;          // [chunk rows + 1, block]
  A* sums;            // [task blocks, windows + 1, block]
  PixelLists<A> pixels;
  WindowLists<A> lists;
  int64_t bytes;
};

template <typename A>
ConvBuffers<A> TakeBuffers(const ConvTask& task, const Tile& tile, char* scratch) {
  const ConvPlan& p = *task.plan;
  const int64_t rows = p.chunk_taps * task.call->args.kernel_size[1] * p.chunk_channels;
  Arena arena(scratch);
  ConvBuffers<A> buffers{};
  buffers.images = arena.Take<TileImage>(tile.images);
  buffers.packed = arena.Take<A>((rows + 1) * p.block);
  buffers.sums = arena.Take<A>((task.block_end - task.block_begin) * (tile.windows + 1) * p.block);
  buffers.pixels = TakePixelLists<A>(arena, task, tile, p.block * sizeof(A), true);
  buffers.lists = TakeWindowLists<A>(arena, task, tile);
  buffers.bytes = arena.used();
  return buffers;
}

// One chunk: lists once, then every block of the task.
template <typename T, typename A>
void RunChunk(const ConvTask& task, const Tile& tile, const Chunk& chunk, ConvBuffers<A>& buffers) {
  const ConvPlan& p = *task.plan;
  const PixelList<A> pixels = buffers.pixels.At(chunk.channel_begin / p.chunk_channels);
  CountRows(tile, pixels, buffers.lists);
  OrderWindows(task.call->args, tile, chunk, buffers.lists);
  FillWindows(task, tile, chunk, pixels, buffers.lists);
  if (buffers.lists.groups == 0) return;
  for (int64_t block = task.block_begin; block < task.block_end; ++block) {
    const KernelSlice<T> slice = SliceAt<T>(task, chunk, block);
    Pack(slice, p.block, buffers.packed);
    A* sums = buffers.sums + (block - task.block_begin) * (tile.windows + 1) * p.block;
    MultiplyBlock(p.vectors, CeilDiv(slice.width, kLanes<A>), buffers.lists, p.block, buffers.packed, sums);
  }
}

inline Chunk ChunkAt(const ConvTask& task, int64_t index, int64_t channel_chunks) {
  const ConvArgs& a = task.call->args;
  const ConvPlan& p = *task.plan;
  Chunk chunk{};
  chunk.channel_begin = index % channel_chunks * p.chunk_channels;
  chunk.channels = Min(p.chunk_channels, a.group_channels - chunk.channel_begin);
  chunk.tap_begin = index / channel_chunks * p.chunk_taps;
  chunk.taps = Min(p.chunk_taps, a.kernel_size[0] - chunk.tap_begin);
  return chunk;
}

template <typename T>
int64_t ConvBytes(const ConvTask& task) {
  return TakeBuffers<Accumulator<T>>(task, MakeTile(task, nullptr), nullptr).bytes;
}

template <typename T>
void RunConv(const ConvTask& task, char* scratch) {
  using A = Accumulator<T>;
  const IeeeScope ieee;
  const ConvArgs& a = task.call->args;
  Tile tile = MakeTile(task, nullptr);
  ConvBuffers<A> buffers = TakeBuffers<A>(task, tile, scratch);
  MakeTile(task, buffers.images);
  LocateWindows(a, tile, buffers.images, buffers.lists, buffers.pixels);
  CompressPixels<T>(task, tile, buffers.images, buffers.pixels);
  const int64_t blocks = task.block_end - task.block_begin;
  __builtin_memset(buffers.sums, 0, blocks * (tile.windows + 1) * task.plan->block * sizeof(A));
  const int64_t channel_chunks = CeilDiv(a.group_channels, task.plan->chunk_channels);
  const int64_t chunks = channel_chunks * CeilDiv(a.kernel_size[0], task.plan->chunk_taps);
  for (int64_t i = 0; i < chunks && tile.windows > 0; ++i) {
    RunChunk<T>(task, tile, ChunkAt(task, i, channel_chunks), buffers);
  }
  for (int64_t block = task.block_begin; block < task.block_end; ++block) {
    A* sums = buffers.sums + (block - task.block_begin) * (tile.windows + 1) * task.plan->block;
    WriteBlock<T>(task, tile, buffers.images, block, sums);
  }
}

}  // namespace
}  // namespace JSC_ISA
}  // namespace jsc

#endif  // JSC_CPU_LOOPS_WINDOW_KERNEL_H_
