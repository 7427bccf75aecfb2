// From global to shared memory: a chunk of the reduction axis, for a tile's pixels and for its weights.
//
// Layout: pixels [tile pixel, cached_pixels] and weights [cached_pixels, tile's output channel]. They lie as NHWC and
// HWIO have them, so copies are asynchronous and 16 bytes wide. The 16-byte slots of a row are permuted by the row's
// number; without that the rows of a fragment would share banks.
#ifndef JSC_CUDA_DENSE_CONV_MMA_LOAD_CUH_
#define JSC_CUDA_DENSE_CONV_MMA_LOAD_CUH_

#include "cuda/core/copies.cuh"
#include "cuda/dense_conv/mma/task.cuh"
#include "cuda/dense_conv/plan/mma_tuning.h"

namespace jsc {

// Byte offset of byte `column` of row `row`. kPairs: for warps that read 4 rows x 2 slots at once, else 8 rows x 1.
template <int kRowBytes, bool kPairs>
__device__ __forceinline__ int SharedAt(int row, int column) {
  constexpr int kSlots = kRowBytes / 16;
  const int swap = kPairs && kSlots >= 8 ? (row & 3) * 2 : kSlots >= 8 ? row & 7 : (row * kSlots / 8) & (kSlots - 1);
  return row * kRowBytes + ((column / 16) ^ swap) * 16 + column % 16;
}

template <class U, typename T>
struct StageLayout {
  static constexpr int kPixelRow = U::kCachedPixels * static_cast<int>(sizeof(T));  // bytes
  static constexpr int kWeightRow = U::kOutChannels * static_cast<int>(sizeof(T));
  static constexpr bool kPairs = U::kTensor && sizeof(T) == 4;
  static __device__ __forceinline__ int Pixel(int pixel, int k) {
    return SharedAt<kPixelRow, false>(pixel, k * static_cast<int>(sizeof(T)));
  }
  static __device__ __forceinline__ int Weight(int k, int out_channel) {
    return SharedAt<kWeightRow, kPairs>(k, out_channel * static_cast<int>(sizeof(T)));
  }
  static constexpr int kWeightsAt = U::kPixels * kPixelRow;  // where the weights of a stage begin
};

// How the threads of a block share the copies of [kRows, kColumns] elements: each keeps one column of copies.
template <class U, typename T, int kRows, int kColumns>
struct Share {
  static constexpr int kElements = U::kVector ? 16 / static_cast<int>(sizeof(T)) : 1;  // of a copy
  static constexpr int kPerRow = kColumns / kElements;
  static_assert(kColumns % kElements == 0 && (U::kThreads % kPerRow == 0), "a thread keeps one column of copies");
  static constexpr int kRowStep = U::kThreads / kPerRow;
  static constexpr int kCopies = (kRows + kRowStep - 1) / kRowStep;  // of a thread
  static constexpr bool kEven = kRows % kRowStep == 0;
  static __device__ __forceinline__ int Column() { return static_cast<int>(threadIdx.x) % kPerRow * kElements; }
  static __device__ __forceinline__ int Row(int copy) {
    return static_cast<int>(threadIdx.x) / kPerRow + copy * kRowStep;
  }
};

// One copy of 16 bytes or of one element; of two-byte elements through a register, there is no asynchronous one.
template <class U, typename T>
__device__ __forceinline__ void CopyPiece(unsigned char* shared, const T* source, bool valid) {
  CopyAsync<U::kVector ? 16 : 0>(shared, source, static_cast<int>(sizeof(T)), valid);
}

// Where the window of a pixel begins: pixel (y, x) of its image, which may lie outside, and its address.
template <typename T>
struct WindowStart {
  const T* first;
  int y, x;
};

constexpr int kOutside = -(1 << 30);  // row of a window that lies nowhere

template <typename T>
__device__ __forceinline__ WindowStart<T> FindWindow(const MmaTask<T>& task, const T* x, int pixel) {
  const Quotient row = Divide(pixel, task.by_out_width), image = Divide(row.quotient, task.by_out_height);
  WindowStart<T> start;
  start.y = image.remainder * task.stride[0] - task.pad_low[0];
  start.x = row.remainder * task.stride[1] - task.pad_low[1];
  const int64_t at = (static_cast<int64_t>(image.quotient) * task.height + start.y) * task.width + start.x;
  start.first = x + at * task.channels;
  if (pixel >= task.pixels) start.y = kOutside;
  return start;
}

template <typename T>
__device__ __forceinline__ bool Inside(const MmaTask<T>& task, int y, int x) {
  return static_cast<unsigned>(y) < static_cast<unsigned>(task.height) &&
         static_cast<unsigned>(x) < static_cast<unsigned>(task.width);
}

// A value that the compiler does not recognise, so that what follows from it is computed again.
__device__ __forceinline__ int Opaque(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

// What a thread knows of the pixels it copies; what it is depends on Addresses.
template <class U, typename T>
struct PixelSource {
  using Copies = Share<U, T, U::kPixels, U::kCachedPixels>;
  const T* x;  // of the stack, at the group's channels
  int first;   // pixel of the tile
  WindowStart<T> windows[U::kAddresses == Addresses::kReduced ? Copies::kCopies : 1];
  const int* table;  // [taps, tile pixels] in shared memory, with kTable
};

// table[tap][pixel]: index in the stack of the input pixel under a tap, or -1. A thread keeps a pixel, so that it
// divides once.
template <class U, typename T>
__device__ void FillTable(const MmaTask<T>& task, int first, int* table) {
  constexpr int kLanes = U::kThreads < U::kPixels ? U::kThreads : U::kPixels;
  for (int i = threadIdx.x % kLanes; i < U::kPixels; i += kLanes) {
    const int pixel = first + i;
    const Quotient row = Divide(pixel, task.by_out_width), image = Divide(row.quotient, task.by_out_height);
    const int y0 = image.remainder * task.stride[0] - task.pad_low[0];
    const int x0 = row.remainder * task.stride[1] - task.pad_low[1];
    for (int tap = threadIdx.x / kLanes; tap < task.taps; tap += U::kThreads / kLanes) {
      const Quotient at = Divide(tap, task.by_kernel_width);
      const int y = y0 + at.quotient * task.dilation[0], x = x0 + at.remainder * task.dilation[1];
      const bool inside = pixel < task.pixels && Inside(task, y, x);
      table[tap * U::kPixels + i] = inside ? (image.quotient * task.height + y) * task.width + x : -1;
    }
  }
}

template <class U, typename T>
__device__ __forceinline__ PixelSource<U, T> FindPixels(const MmaTask<T>& task, const MmaPlace& at, int* table) {
  using Copies = typename PixelSource<U, T>::Copies;
  PixelSource<U, T> source;
  source.x = task.x + at.stack * task.images_per_stack * task.height * task.width * task.channels +
             at.group * task.group_channels;
  source.first = at.pixel;
  source.table = table;
  if constexpr (U::kAddresses == Addresses::kReduced) {
#pragma unroll
    for (int i = 0; i < Copies::kCopies; ++i) {
      source.windows[i] = FindWindow(task, source.x, at.pixel + Copies::Row(i));
    }
  } else if constexpr (U::kAddresses == Addresses::kTable) {
    FillTable<U>(task, at.pixel, table);
  }
  return source;
}

// Where in a window, and how far from the window's start, row k of the reduction axis lies.
struct Reach {
  int tap, channel, dy, dx;
  int64_t offset;
};

template <typename T>
__device__ __forceinline__ Reach FindReach(const MmaTask<T>& task, int k) {
  const Quotient tap = Divide(k, task.by_group_channels), place = Divide(tap.quotient, task.by_kernel_width);
  const int dy = place.quotient * task.dilation[0], dx = place.remainder * task.dilation[1];
  const int64_t offset = (static_cast<int64_t>(dy) * task.width + dx) * task.channels + tap.remainder;
  return {tap.quotient, tap.remainder, dy, dx, offset};
}

// Chunk number `chunk` of the tile's pixels. Without kChecked every copy is known to lie inside.
template <class U, typename T, bool kChecked>
__device__ __forceinline__ void CopyPixels(const MmaTask<T>& task, const PixelSource<U, T>& from, int chunk,
                                           unsigned char* stage) {
  using Copies = typename PixelSource<U, T>::Copies;
  const int column = Copies::Column(), k = chunk * U::kCachedPixels + column;
  const bool is_beyond = kChecked && k >= task.depth;
  const Reach once = FindReach(task, k);
#pragma unroll
  for (int i = 0; i < Copies::kCopies; ++i) {
    const int row = Copies::Row(i);
    if (!Copies::kEven && row >= U::kPixels) continue;
    const T* source;
    bool valid;
    if constexpr (U::kAddresses == Addresses::kTable) {
      const int pixel = is_beyond ? -1 : from.table[once.tap * U::kPixels + row];
      valid = !kChecked || pixel >= 0;
      source = from.x + static_cast<int64_t>(pixel) * task.channels + once.channel;
    } else if constexpr (U::kAddresses == Addresses::kReduced) {
      const WindowStart<T>& window = from.windows[i];
      valid = !kChecked || (!is_beyond && Inside(task, window.y + once.dy, window.x + once.dx));
      source = window.first + once.offset;
    } else {
      const Reach reach = FindReach(task, Opaque(k));
      const WindowStart<T> window = FindWindow(task, from.x, Opaque(from.first + row));
      valid = !kChecked || (!is_beyond && Inside(task, window.y + reach.dy, window.x + reach.dx));
      source = window.first + reach.offset;
    }
    CopyPiece<U>(stage + StageLayout<U, T>::Pixel(row, column), source, valid);
  }
}

// The same of the tile's weights; kernel: [depth, K] of the stack at the tile's first output channel.
template <class U, typename T, bool kChecked>
__device__ __forceinline__ void CopyWeights(const MmaTask<T>& task, const T* kernel, int out_channels, int chunk,
                                            unsigned char* stage) {
  using Copies = Share<U, T, U::kCachedPixels, U::kOutChannels>;
  const int column = Copies::Column();
  const bool wide = kChecked && column >= out_channels;
#pragma unroll
  for (int i = 0; i < Copies::kCopies; ++i) {
    const int row = Copies::Row(i), k = chunk * U::kCachedPixels + row;
    if (!Copies::kEven && row >= U::kCachedPixels) continue;
    CopyPiece<U>(stage + StageLayout<U, T>::kWeightsAt + StageLayout<U, T>::Weight(row, column),
                 kernel + static_cast<int64_t>(k) * task.out_channels + column, !kChecked || (!wide && k < task.depth));
  }
}

// Whether no copy of the tile needs a check: all pixels and weights are there, all windows inside, all chunks whole.
template <class U, typename T>
__device__ __forceinline__ bool AllInside(const MmaTask<T>& task, const MmaPlace& at) {
  bool inside = task.depth % U::kCachedPixels == 0 && at.out_channel + U::kOutChannels <= task.group_out_channels;
  for (int i = threadIdx.x; i < U::kPixels; i += U::kThreads) {
    const WindowStart<T> window = FindWindow(task, task.x, at.pixel + i);
    const Quotient last = Divide(task.taps - 1, task.by_kernel_width);
    inside &= Inside(task, window.y, window.x) &&
              Inside(task, window.y + last.quotient * task.dilation[0], window.x + last.remainder * task.dilation[1]);
  }
  return __syncthreads_and(inside);
}

}  // namespace jsc

#endif  // JSC_CUDA_DENSE_CONV_MMA_LOAD_CUH_
