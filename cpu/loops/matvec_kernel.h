// A dense layer on sparse rows: out[m] = activation(sum over non-zeros of x[m] of value * kernel row + bias).
//
// What: reads only the kernel rows whose input is not zero. For one row of x that is the whole cost, a memory stream.
// Layout: kernel [C, K] as it lies in memory. A task owns a range of columns, so each kernel row is a contiguous piece
//   of some kilobytes and the sums of the range stay in L1.
// Why this tiling: four kernel rows go into each pass over the sums, which divides the traffic on the sums by four. The
//   four rows after them are prefetched line by line. With several rows of x, passes go through the kernel in steps of
//   kStep rows, so a row wanted by several of them comes from memory once.
// Order of each sum: kSum products from 0 on at most, then such sums.
// Bound by: memory bandwidth of the cores that take part.
#ifndef JSC_CPU_LOOPS_MATVEC_KERNEL_H_
#define JSC_CPU_LOOPS_MATVEC_KERNEL_H_

#include "cpu/core/isa.h"
#include "cpu/loops/epilogue.h"

namespace jsc {
namespace JSC_ISA {
namespace {

constexpr int64_t kStep = 128;  // kernel rows per step when x has several rows
constexpr int kRows = 4;        // kernel rows per pass over the sums
constexpr int64_t kSum = 256;   // products of a sum, then sums are added up (core/simd.h, AddTo)

template <typename A>
struct DenseBuffers {
  A* sums;          // [M, columns], rows padded to whole vectors
  A* part;          // [columns] of up to kSum products
  A* values;        // [M, C + slack] non-zeros of each row of x
  uint32_t* rows;   // [M, C + slack] their kernel rows
  int64_t* counts;  // [M]
  int64_t* places;  // [M] entries used up
  int64_t stride, capacity, bytes;
};

template <typename A>
DenseBuffers<A> TakeDenseBuffers(const DenseTask& task, char* scratch) {
  const ConvArgs& a = task.call->args;
  const int64_t images = a.images / a.stacks;
  Arena arena(scratch);
  DenseBuffers<A> buffers{};
  buffers.stride = CeilDiv(task.col_end - task.col_begin, kLanes<A>) * kLanes<A>;
  buffers.capacity = a.channels + kListSlack;
  buffers.sums = arena.Take<A>(images * buffers.stride);
  buffers.part = arena.Take<A>(buffers.stride);
  buffers.values = arena.Take<A>(images * buffers.capacity);
  buffers.rows = arena.Take<uint32_t>(images * buffers.capacity);
  buffers.counts = arena.Take<int64_t>(images);
  buffers.places = arena.Take<int64_t>(images);
  buffers.bytes = arena.used();
  return buffers;
}

// sums[0, width) += sum over kUsed entries of values[i] * kernel row rows[i]; the rows at `ahead` are prefetched.
template <int kUsed, typename T, typename A>
inline void AddRows(const T* kernel, int64_t out_channels, int64_t width, const A* values, const uint32_t* rows,
                    const uint32_t* ahead, A* sums) {
  const T* row[kUsed];
  const T* next[kUsed];
  for (int i = 0; i < kUsed; ++i) {
    row[i] = kernel + rows[i] * out_channels;
    next[i] = kernel + ahead[i] * out_channels;
  }
  int64_t k = 0;
  for (; k + kLanes<A> <= width; k += kLanes<A>) {
    Vector<A> sum = Load(sums + k);
    for (int i = 0; i < kUsed; ++i) {
      __builtin_prefetch(next[i] + k);
      sum += values[i] * Load(row[i] + k);
    }
    Store(sums + k, sum);
  }
  for (; k < width; ++k) {
    for (int i = 0; i < kUsed; ++i) sums[k] += values[i] * Widen(row[i][k]);
  }
}

// Up to kSum entries of one row of x, from the next one on, whose kernel row is below `row_end`.
template <typename T, typename A>
void AddEntries(const DenseTask& task, const T* kernel, int64_t row_end, int64_t m, DenseBuffers<A>& buffers) {
  const int64_t out_channels = task.call->args.out_channels, width = task.col_end - task.col_begin;
  const A* values = buffers.values + m * buffers.capacity;
  const uint32_t* rows = buffers.rows + m * buffers.capacity;
  int64_t i = buffers.places[m], end = i;
  const int64_t count = buffers.counts[m], most = Min(count, i + kSum);
  while (end < most && rows[end] < row_end) ++end;
  if (i == end) return;
  __builtin_memset(buffers.part, 0, buffers.stride * sizeof(A));
  for (; i + kRows <= end; i += kRows) {
    AddRows<kRows>(kernel, out_channels, width, values + i, rows + i, rows + Min(i + kRows, Max(count - kRows, 0)),
                   buffers.part);
  }
  for (; i < end; ++i)
    AddRows<1>(kernel, out_channels, width, values + i, rows + i, rows + Min(i + 1, count - 1), buffers.part);
  A* sums = buffers.sums + m * buffers.stride;
  for (int64_t k = 0; k < buffers.stride; k += kLanes<A>) AddTo(sums + k, Load(buffers.part + k));
  buffers.places[m] = end;
}

template <typename T>
int64_t DenseBytes(const DenseTask& task) {
  return TakeDenseBuffers<Accumulator<T>>(task, nullptr).bytes;
}

template <typename T>
void RunDense(const DenseTask& task, char* scratch) {
  using A = Accumulator<T>;
  const IeeeScope ieee;
  const ConvArgs& a = task.call->args;
  const int64_t images = a.images / a.stacks, first_image = task.stack * images;
  const int64_t width = task.col_end - task.col_begin;
  DenseBuffers<A> buffers = TakeDenseBuffers<A>(task, scratch);
  __builtin_memset(buffers.sums, 0, images * buffers.stride * sizeof(A));
  const T* x = static_cast<const T*>(task.call->x) + first_image * a.channels;  // [M, C]
  for (int64_t m = 0; m < images; ++m) {
    buffers.places[m] = 0;
    buffers.counts[m] = Append(x + m * a.channels, a.channels, 0, 1, buffers.values + m * buffers.capacity,
                               buffers.rows + m * buffers.capacity);
  }
  const T* kernel =
      static_cast<const T*>(task.call->kernel) + task.stack * a.channels * a.out_channels + task.col_begin;
  if (images == 1) {
    while (buffers.places[0] < buffers.counts[0]) AddEntries<T>(task, kernel, a.channels, 0, buffers);
  }
  for (int64_t row = 0; images > 1 && row < a.channels; row += kStep) {
    for (int64_t m = 0; m < images; ++m) AddEntries<T>(task, kernel, row + kStep, m, buffers);
  }
  ConvTask whole{};  // the epilogue's view: the stack, for its bias
  whole.call = task.call;
  whole.stack = task.stack;
  T* out = static_cast<T*>(task.call->out);  // [N, K]
  for (int64_t m = 0; m < images; ++m) {
    for (int64_t k = 0; k < width; k += kLanes<A>) {
      const ChannelRange range = {task.col_begin + k, Min(kLanes<A>, width - k)};
      const Vector<A> value = Activate<T>(whole, Load(buffers.sums + m * buffers.stride + k), range, first_image + m);
      StoreFirst(out + (first_image + m) * task.call->out_stride + range.channel, value, range.width);
    }
  }
}

}  // namespace
}  // namespace JSC_ISA
}  // namespace jsc

#endif  // JSC_CPU_LOOPS_MATVEC_KERNEL_H_
