// From global to shared memory: pieces of the reduction axis, 128 bytes of a pixel's channels deep, for a tile's pixels
// and for its filters.
//
// Layout of a stage: pieces one after the other, each pixels [tile pixel, 128 bytes] and filters [128 bytes of filters]
// [deep, 128 bytes]. 16-byte slots of a row are permuted by the row's number, as the copy engine does it: without it
// the rows of a fragment would share banks. The copy engine finds the pixels under a tap itself (im2col), fills what
// lies outside with zeros, and rounds float32 to TF32 on the way.
#ifndef JSC_CUDA_SEGMENT_LOAD_CUH_
#define JSC_CUDA_SEGMENT_LOAD_CUH_

#include "direct_engine.cuh"
#include "segment_task.cuh"

namespace jsc {

// What a block does of a layer. A block without work has no pieces.
struct SegmentPlace {
  int layer;           // of the phase; -1: none
  int pixel, feature;  // first of the tile
  int image, y, x;     // where the first pixel's window begins
  int split, first_piece, pieces;
};

template <typename T>
constexpr int kDeep = kPieceBytes / static_cast<int>(sizeof(T));  // elements of a piece

// Numbers that follow from a layer's tile.
struct SegmentTile {
  int pixels, filters, sub_log, sub, pixel_bytes, filter_bytes, piece_bytes, stages;
  template <typename Layer>
  __device__ __forceinline__ explicit SegmentTile(const Layer& layer) {
    pixels = kWarpSide << layer.warps_p;
    filters = kWarpSide << layer.warps_f;
    sub_log = max(layer.warps_k, 1);
    sub = 1 << sub_log;  // pieces of a stage
    pixel_bytes = pixels * kPieceBytes;
    filter_bytes = filters * kPieceBytes;
    piece_bytes = pixel_bytes + filter_bytes;
    const int stage = sub * piece_bytes;
    stages = stage > kRingBytes / 4 ? 3 : stage > kRingBytes / 6 ? 4 : kSegmentStages;
  }
};

// Where in a window, and in which channel, a row of the reduction axis lies.
template <typename T>
struct SegmentReach {
  int channel, dy, dx;

  __device__ __forceinline__ void Find(const SegmentLayer<T>& layer, int k) {
    const Quotient tap = Divide(k, layer.by_channels), row = Divide(tap.quotient, layer.by_kernel_width);
    channel = tap.remainder;
    dy = row.quotient * layer.dilation[0];
    dx = row.remainder * layer.dilation[1];
  }
  // Takes channels beyond the last to the taps that follow.
  __device__ __forceinline__ void NextTap(const SegmentLayer<T>& layer) {
    do {
      channel -= layer.channels;
      dx += layer.dilation[1];
      if (dx >= layer.reach[1]) {
        dx = 0;
        dy += layer.dilation[0];
      }
    } while (channel >= layer.channels);
  }
};

// Where a result's window begins: its element of x, which may lie outside, and row << 16 | column.
template <typename T>
__device__ __forceinline__ int2 FindSegmentWindow(const SegmentLayer<T>& layer, int pixel) {
  constexpr int kOutsideRow = -(1 << 14);
  const Quotient row = Divide(pixel, layer.by_out_width), image = Divide(row.quotient, layer.by_out_height);
  const int y = image.remainder * layer.stride[0] - layer.pad_low[0];
  const int x = row.remainder * layer.stride[1] - layer.pad_low[1];
  return make_int2(((image.quotient * layer.height + y) * layer.width + x) * layer.channels,
                   (pixel < layer.pixels ? y : kOutsideRow) << 16 | (x & 0xffff));
}

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void CopyWindows(void* shared, const CUtensorMap* map, int channel, int x, int y, int image,
                                            int dx, int dy, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, "
      "%5}], "
      "[%6], {%7, %8};" ::"r"(SharedAddress(shared)),
      "l"(map), "r"(channel), "r"(x), "r"(y), "r"(image), "r"(SharedAddress(barrier)), "h"(static_cast<short>(dx)),
      "h"(static_cast<short>(dy))
      : "memory");
}

// A unit's boxes of pieces [from, end): the pixels, the filters or both. Every warp asks for some, because each takes
// a warp some 80 cycles. Stages repeat every tile.stages; whoever asks for filters tells the barrier of a stage how
// many bytes to expect of both.
template <typename T>
__device__ __forceinline__ void AskForPieces(const SegmentLayer<T>& layer, const SegmentMaps& maps,
                                             const SegmentPlace& at, const SegmentTile& tile, int from, int end,
                                             bool with_filters, bool with_pixels, unsigned char* stage,
                                             uint64_t* barrier) {
  if (threadIdx.x % 32 != 0) return;
  constexpr int kBlock = kPieceBytes / static_cast<int>(sizeof(T));  // filters of a box
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int blocks = with_filters ? tile.filters / kBlock : 0, each = blocks + (with_pixels ? 1 : 0);
  // Warps take whole pieces, or boxes of one piece where there are more warps.
  const int lanes_log = end - from <= kSegmentWarps / 4 ? 2 : end - from <= kSegmentWarps / 2 ? 1 : 0;
  const int first_box = warp & ((1 << lanes_log) - 1);
#pragma unroll 1
  for (int p = from + (warp >> lanes_log); p < end; p += kSegmentWarps >> lanes_log) {
    const int number = (p - from) >> tile.sub_log, of_stage = (p - from) & (tile.sub - 1);
    unsigned char* piece = stage + (number * tile.sub + of_stage) * tile.piece_bytes;
    if (with_filters && of_stage == 0 && first_box == 0) {
      ExpectBytes(barrier + number, min(tile.sub, end - p) * (layer.narrow ? tile.filter_bytes : tile.piece_bytes));
    }
    const Quotient tap = Divide(at.first_piece + p, layer.by_tap_pieces);
    const int channel = tap.remainder * kDeep<T>;
#pragma unroll 1
    for (int box = first_box; box < each; box += 1 << lanes_log) {
      if (box < blocks) {
        CopyBox(piece + tile.pixel_bytes + box * (kBlock * kPieceBytes), &maps.kernel, at.feature + box * kBlock,
                channel, tap.quotient, barrier + number);
      } else {
        const Quotient reach = Divide(tap.quotient, layer.by_kernel_width);
        CopyWindows(piece, &maps.x, channel, at.x, at.y, at.image, reach.remainder * layer.dilation[1],
                    reach.quotient * layer.dilation[0], barrier + number);
      }
    }
  }
}
#endif

// The same for channels that do not come in whole slots: an element at a time, every thread one column of the piece.
// windows: [tile pixel] of FindSegmentWindow, in shared memory
template <typename T, bool kPrecise>
__device__ __noinline__ SegmentReach<T> CopyNarrow(const SegmentLayer<T>& layer, const int2* windows,
                                                   unsigned char* piece, SegmentReach<T> at) {
  constexpr int kBatch = 16, kStep = kSegmentThreads / kDeep<T>;  // pixels between a thread's
  const int byte = static_cast<int>(threadIdx.x) % kDeep<T> * static_cast<int>(sizeof(T));
  const int first = static_cast<int>(threadIdx.x) / kDeep<T>, count = kWarpSide << layer.warps_p;
  const T* const from = layer.x + (at.dy * layer.width + at.dx) * layer.channels + at.channel;
  const int height = at.dy < layer.reach[0] ? layer.height : 0, width = layer.width;
  unsigned char* to = piece + first * kPieceBytes + (byte & 15);
  const int slot = byte >> 4;
#pragma unroll 1
  for (int row = first; row < count; row += kBatch * kStep) {
    T values[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      values[i] = FromFloat<T>(0.f);
      if (row + i * kStep >= count) break;
      const int2 window = windows[row + i * kStep];
      const bool inside = static_cast<unsigned>((window.y >> 16) + at.dy) < static_cast<unsigned>(height) &&
                          static_cast<unsigned>(static_cast<short>(window.y) + at.dx) < static_cast<unsigned>(width);
      if (inside) values[i] = __ldcg(from + window.x);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (row + i * kStep >= count) break;
      if constexpr (sizeof(T) == 4 && !kPrecise) values[i] = __uint_as_float(RoundToTf32(__float_as_uint(values[i])));
      const int swap = (first + i * kStep) & 7;  // a batch is a multiple of 8 pixels
      *reinterpret_cast<T*>(to + i * (kStep * kPieceBytes) + ((slot ^ swap) << 4)) = values[i];
    }
    to += kBatch * kStep * kPieceBytes;
  }
  at.channel += kDeep<T>;
  if (at.channel >= layer.channels) at.NextTap(layer);
  return at;
}

}  // namespace jsc

#endif  // JSC_CUDA_SEGMENT_LOAD_CUH_
