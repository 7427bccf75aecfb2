// One row of pixels times one slice of the kernel, summed in registers.
//
// What: the sums of a window of kRows x kCols places stay in registers while it moves along the row. For each pixel,
//   each of its entries and each tap: sums += value * slice[channel][element]. Then the window's first column is added
//   to its sums in memory, and a new last one begins at 0. So each sum is of a row of pixels and a chunk of channels,
//   and those are added up: no long chain loses digits (core/simd.h, AddTo).
// Layout: a slice is [channels, kernel rows, kCols, kPitch], so that all rows of an entry follow each other. Sums are
//   rows of places, [columns, kPitch], the one of kernel row ky below that of ky + 1. Entries are bits, see
//   loops/pixel_entries.h: their channels are counted from below, and each takes its value from x or from a copy.
// Why this order: a pixel alone would load and store its kRows * kCols sums, which took a fifth of the whole loop at 85
//   % zeros and a third at 95. In a row it is one column of them. The end of a list is a branch miss, which other work
//   does not hide, unless the predictor has met the same lists just before: see loops/pixel_kernel.h.
// Bound by: loads, a multiply-add with its weight from L1 every 0.6 cycles where nothing else is read with it.
#ifndef JSC_CPU_LOOPS_PIXEL_ROWS_H_
#define JSC_CPU_LOOPS_PIXEL_ROWS_H_

#include <type_traits>

#include "cpu/loops/pixel_entries.h"

namespace jsc {
namespace JSC_ISA {
namespace {

// Memory to bring closer, some lines with each pixel, while sums keep the core busy.
struct Ahead {
  const char* line;
  int64_t lines;  // still to fetch
  int64_t each;   // of them with each pixel

  [[gnu::always_inline]] void Fetch() {
    for (int64_t i = Min(each, lines); i > 0; --i, --lines, line += 64) __builtin_prefetch(line, 0, 2);
  }
};

// What SweepRow reads and writes. F is what it multiplies: elements, or pairs of channels, which are as one.
template <typename F>
struct RowWork {
  const uint64_t* bits;  // [rows, pixels]: of the channels that are not zero; null: to be found in x
  const F* values;       // of the first pixel: its channels or, where copied, its non-zeros and those behind it, ...
  int64_t values_step;   // ... not copied: from a pixel to the next one, in elements, ...
  int64_t values_row;    // ... and from a row to the next one
  int64_t channels;      // of a pixel
  bool copied;
  int64_t rows;
  int64_t pixels;        // of a row
  int64_t kernel_rows;   // that count; 0: nothing is to be added
  const F* slice;        // [channels, kernel rows, kCols, kPitch] from the first kernel row that counts on
  int64_t pitch;         // kPitch, or where that is 0
  Accumulator<F>* sums;  // what the first pixel adds to through that row and the last kernel column
  int64_t row_bytes;     // from there to the sums of the next kernel row, upwards
  int64_t sums_step;     // ... and of the next row's first pixel, in elements
  bool trim_left;        // the first pixel has no result through the last kernel column, ...
  bool trim_right;       // ... and the last one none through the first
  Ahead* ahead;          // of the kernel
  const char* out;       // lines of the result that are written soon, or null: one per pixel, ...
  int64_t out_step;      // ... so many bytes apart
  int64_t out_row;       // from a row's first one to the next row's
};

// Goes through pixels. What it reads, a copy or x, see loops/pixel_entries.h.
template <bool kCopied, typename F>
struct PixelReader {
  static constexpr bool kFindsBits = kFindsBitsFast && !kCopied;

  explicit PixelReader(const RowWork<F>& work) : bits(work.bits), values(work.values), channels(work.channels) {
    if (kFindsBits) found = NonZeroBits(values, channels);
  }

  // The bits of the pixel at hand; `step` elements on is the one that follows, or the same where there is none.
  [[gnu::always_inline]] uint64_t TakeBits(int64_t step) {
    if (!kFindsBits) return *bits++;
    const uint64_t taken = found;
    found = NonZeroBits(values + step, channels);
    return taken;
  }

  [[gnu::always_inline]] F Value(int64_t channel) { return kCopied ? *values++ : values[channel]; }

  [[gnu::always_inline]] void Move(int64_t step) {
    if (!kCopied) values += step;
  }

  const uint64_t* bits;
  const F* values;  // of the pixel at hand
  int64_t channels;
  uint64_t found = 0;  // bits of the pixel at hand
};

// The entries of one pixel of a 1x1 kernel, two at a time: each vector has two sums, as a chain of one would wait for
// its additions. Where their number is odd the last one's partner is 0 times a row of zeros that nothing is read for.
template <int kVectors, bool kCopied, typename F>
[[gnu::always_inline]] inline void AddTwoByTwo(const RowWork<F>& work, PixelReader<kCopied, F>& reader, int64_t step,
                                               Vector<float> (&sum)[kVectors]) {
  const int64_t row_bytes = work.pitch * static_cast<int64_t>(sizeof(F));
  const char* const slice = reinterpret_cast<const char*>(work.slice);
  Vector<float> other[kVectors] = {};
  for (uint64_t rest = reader.TakeBits(step); rest != 0;) {
    const int64_t channel = __builtin_ctzll(rest);
    rest &= rest - 1;
    const bool is_pair = rest != 0;
    const int64_t next = is_pair ? __builtin_ctzll(rest) : channel;
    rest &= rest - 1;
    const F* row = reinterpret_cast<const F*>(slice + channel * row_bytes);
    const F* next_row = reinterpret_cast<const F*>(slice + next * row_bytes);
    asm("" : "+r"(row), "+r"(next_row));
    const F value = reader.Value(channel);
    const F read = kCopied ? *reader.values : reader.values[next];
    const F next_value = is_pair ? read : F{};
    if (kCopied) reader.values += is_pair;
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      MultiplyAddAt(sum[v], value, row + v * kLanes<F>);
      MultiplyAdd(other[v], next_value, LoadIf(is_pair, next_row + v * kLanes<F>));
    }
  }
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) sum[v] += other[v];
  reader.Move(step);
}

// The entries of one pixel, to columns [kFirst, kLast) of the window; column j is kernel column kCols - 1 - j. step: to
// the next pixel, which is at hand then.
template <int kRows, int kCols, int kVectors, int kPitch, int kFirst, int kLast, bool kCopied, typename F>
[[gnu::always_inline]] inline void AddEntries(const RowWork<F>& work, PixelReader<kCopied, F>& reader, int64_t step,
                                              Vector<Accumulator<F>> (&sum)[kRows][kCols][kVectors]) {
  constexpr bool kLoadsIf = kVectorBytes == 64;  // without a branch
  if constexpr (kRows * kCols == 1 && kLoadsIf && sizeof(F) == sizeof(float)) {
    return AddTwoByTwo(work, reader, step, sum[0][0]);
  }
  const int64_t row_bytes = kCols * kCols * (kPitch == 0 ? work.pitch : kPitch) * static_cast<int64_t>(sizeof(F));
  const char* const slice = reinterpret_cast<const char*>(work.slice);
  for (uint64_t rest = reader.TakeBits(step); rest != 0; rest &= rest - 1) {
    const int64_t channel = __builtin_ctzll(rest);
    const F value = reader.Value(channel);
    const F* row = reinterpret_cast<const F*>(slice + channel * row_bytes);
    asm("" : "+r"(row));  // one register: indexed operands would be split into two micro-operations
#pragma GCC unroll 16
    for (int ky = 0; ky < kRows; ++ky) {
#pragma GCC unroll 16
      for (int j = kLast - 1; j >= kFirst; --j) {
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
          MultiplyAddAt(sum[ky][j][v], value, row + (ky * kCols + kCols - 1 - j) * kPitch + v * kLanes<F>);
        }
      }
    }
  }
  reader.Move(step);
}

// One row. sums: of its first pixel; row_step: from its last pixel to the next row's first one.
template <int kRows, int kCols, int kVectors, int kPitch, bool kCopied, typename F>
[[gnu::always_inline]] inline void SweepRow(const RowWork<F>& work, PixelReader<kCopied, F>& reader, int64_t row_step,
                                            Accumulator<F>* sums, const char* out, Ahead& ahead) {
  using A = Accumulator<F>;
  const int64_t pitch = kPitch == 0 ? work.pitch : kPitch;
  Vector<A> sum[kRows][kCols][kVectors];
  char* place = reinterpret_cast<char*>(sums);
  const int64_t row_bytes = work.row_bytes;
  const auto at = [&](int ky, int column) { return reinterpret_cast<A*>(place - ky * row_bytes) + column * pitch; };
#pragma GCC unroll 16
  for (int ky = 0; ky < kRows; ++ky) {
#pragma GCC unroll 16
    for (int j = 0; j < kCols; ++j) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sum[ky][j][v] = Vector<A>{};
    }
  }
  const auto next = [&] {
#pragma GCC unroll 16
    for (int ky = 0; ky < kRows; ++ky) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        AddTo(at(ky, 0) + v * kLanes<A>, sum[ky][0][v]);
#pragma GCC unroll 16
        for (int j = 1; j < kCols; ++j) sum[ky][j - 1][v] = sum[ky][j][v];
        sum[ky][kCols - 1][v] = Vector<A>{};
      }
    }
    place += pitch * sizeof(A);
    ahead.Fetch();
    if (out != nullptr) {
      __builtin_prefetch(out, 1);
      out += work.out_step;
    }
  };
  int64_t x = 0;
  if (kCols > 1 && work.trim_left) {
    AddEntries<kRows, kCols, kVectors, kPitch, 1, kCols>(work, reader, work.values_step, sum);
    next();
    x = 1;
  }
  const int64_t last = work.pixels - 1, whole = work.pixels - (kCols > 1 && work.trim_right ? 1 : 0);
  for (; x < whole; ++x) {
    const int64_t step = x < last ? work.values_step : row_step;
    AddEntries<kRows, kCols, kVectors, kPitch, 0, kCols>(work, reader, step, sum);
    next();
  }
  if (x < work.pixels) {
    AddEntries<kRows, kCols, kVectors, kPitch, 0, kCols - 1>(work, reader, row_step, sum);
    next();
  }
#pragma GCC unroll 16
  for (int ky = 0; ky < kRows; ++ky) {
#pragma GCC unroll 16
    for (int j = 0; j + 1 < kCols; ++j) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) AddTo(at(ky, j) + v * kLanes<A>, sum[ky][j][v]);
    }
  }
}

template <int kRows, int kCols, int kVectors, int kPitch, bool kCopied, typename F>
[[gnu::noinline]] void SweepRowsOf(const RowWork<F>& given, int64_t k) {
  RowWork<F> work = given;  // whose fields stay in registers while sums are stored
  work.slice += k;
  if (k > 0) work.out = nullptr;
  Ahead ahead = *work.ahead;
  PixelReader<kCopied, F> reader(work);
  const char* out = work.out;
  Accumulator<F>* sums = work.sums + k;
  const int64_t row_step = work.values_row - (work.pixels - 1) * work.values_step;
  for (int64_t row = 1; row <= work.rows; ++row) {
    SweepRow<kRows, kCols, kVectors, kPitch>(work, reader, row < work.rows ? row_step : 0, sums, out, ahead);
    sums += work.sums_step;
    if (out != nullptr) out += work.out_row;
  }
  *work.ahead = ahead;
}

// The kVectors vectors of slice and sums from channel k of the block on, through kRows kernel rows.
template <int kRows, int kCols, int kVectors, int kPitch, typename F>
inline void SweepRows(const RowWork<F>& work, int64_t k) {
  if (work.copied) return SweepRowsOf<kRows, kCols, kVectors, kPitch, true>(work, k);
  SweepRowsOf<kRows, kCols, kVectors, kPitch, false>(work, k);
}

}  // namespace
}  // namespace JSC_ISA
}  // namespace jsc

#endif  // JSC_CPU_LOOPS_PIXEL_ROWS_H_
