// The COO* micro-kernel: one list of non-zeros times the weights of its channel, into sums that stay in registers.
//
// What: for every entry (value, position) of a list, sums[y - i][x - j][k] += value * weight[i][j][k]. This runs over
// all taps (i, j) whose result lies in the tile; (y, x) is the position within the tile's patch. Which sums those are
// depends on the position alone. So each position has its own piece of straight code, and an entry is a jump to it.
//
// Why PTX text: registers cannot be indexed, so the jump has to be to code that names them. A C++ switch over positions
// becomes a tree of six compares and branches (nvcc 13.0); `brx.idx` is one table load and one jump. Templates put the
// PTX together, a line of assembly at a time. "%0" prints a template argument, so registers, labels and the table of
// targets get their names from constants. Everything that the text defines begins with "coo_".
//
// What keeps that sound: sums and weights are registers of the text, which the C++ compiler does not know. Control only
// enters at Run's first line and leaves at its last. Between the two there are no operands, so the compiler has nothing
// to place there. Run stands in a conditional block of its own, in one place of a kernel. A copy of it would define
// labels twice, which does not assemble. No sum ever goes to local memory (cuobjdump -sass: no LDL, no STL).
#ifndef JSC_CUDA_SPARSE_COO_MICRO_CUH_
#define JSC_CUDA_SPARSE_COO_MICRO_CUH_

#include <utility>

#include "cuda/core/launch.cuh"
#include "native/coo_variants.h"

// "coo_at0, coo_at1, ..., coo_at255": a directive has to be one piece of text. A name ends where the next begins with a
// comma, and decimal digits paste in order.
#define JSC_COO_LABELS_10(tens)                                                                      \
  "coo_at" tens "0, coo_at" tens "1, coo_at" tens "2, coo_at" tens "3, coo_at" tens "4, coo_at" tens \
  "5, "                                                                                              \
  "coo_at" tens "6, coo_at" tens "7, coo_at" tens "8, coo_at" tens "9"
#define JSC_COO_LABELS_50(a, b, c, d, e) \
  JSC_COO_LABELS_10(a)                   \
  ", " JSC_COO_LABELS_10(b) ", " JSC_COO_LABELS_10(c) ", " JSC_COO_LABELS_10(d) ", " JSC_COO_LABELS_10(e)
#define JSC_COO_LABELS_256                  \
  JSC_COO_LABELS_50("", "1", "2", "3", "4") \
  ", " JSC_COO_LABELS_50("5", "6", "7", "8", "9") ", " JSC_COO_LABELS_50("10", "11", "12", "13", "14") ", "     \
  JSC_COO_LABELS_50("15", "16", "17", "18", "19") ", " JSC_COO_LABELS_50("20", "21", "22", "23", "24") ", "     \
  "coo_at250, coo_at251, coo_at252, coo_at253, coo_at254, coo_at255"

namespace jsc {

// An entry of a list in shared memory. A list ends with position = positions(); one entry behind it may be read.
struct __align__(8) CooEntry {
  float value;
  uint32_t position;
};

template <int kVariant>
class CooMicro {
 public:
  static constexpr CooVariant kShape = kCooVariants[kVariant];
  static constexpr int kSums = kShape.pixels() * kShape.out_channels;   // [pixel][output channel]
  static constexpr int kWeights = kShape.taps() * kShape.out_channels;  // [tap][output channel]
  static constexpr int kPositions = kShape.positions();

  // Declares the registers and clears the sums; first of all, and once in a kernel.
  __device__ __forceinline__ static void Begin() {
    asm volatile(
        ".reg .f32 coo_sum<%0>;\n\t.reg .f32 coo_weight<%1>;\n\t.reg .f32 coo_value, coo_next_value;\n\t"
        ".reg .b32 coo_position, coo_next_position, coo_entry;" ::"n"(kSums),
        "n"(kWeights));
    Clear(std::make_integer_sequence<int, kSums>{});
  }

  template <int kIndex>
  __device__ __forceinline__ static void SetWeight(float weight) {
    asm volatile("mov.f32 coo_weight%0, %1;" ::"n"(kIndex), "f"(weight));
  }

  template <int kIndex>
  __device__ __forceinline__ static float Sum() {
    float sum;
    asm volatile("mov.f32 %0, coo_sum%1;" : "=f"(sum) : "n"(kIndex));
    return sum;
  }

  // Adds a list, at a shared-memory address, the same for all lanes of the warp.
  __device__ __forceinline__ static void Run(uint32_t list) {
    asm volatile("mov.u32 coo_entry, %0;" ::"r"(list) : "memory");
    asm volatile("ld.shared.v2.b32 {coo_next_value, coo_next_position}, [coo_entry];");
    asm volatile("coo_targets: .branchtargets " JSC_COO_LABELS_256 ";");
    asm volatile(
        "coo_dispatch:\n\tmov.f32 coo_value, coo_next_value;\n\tmov.b32 coo_position, coo_next_position;\n\t"
        "ld.shared.v2.b32 {coo_next_value, coo_next_position}, [coo_entry + 8];\n\tadd.u32 coo_entry, coo_entry, 8;\n\t"
        "brx.idx coo_position, coo_targets;");
    Positions(std::make_integer_sequence<int, kPositions>{});
    Ends(std::make_integer_sequence<int, 256 - kPositions>{});
    asm volatile("" ::: "memory");
  }

 private:
  template <int kIndex>
  __device__ __forceinline__ static void ClearOne() {
    asm volatile("mov.f32 coo_sum%0, 0f00000000;" ::"n"(kIndex));
  }

  template <int... kIndex>
  __device__ __forceinline__ static void Clear(std::integer_sequence<int, kIndex...>) {
    (ClearOne<kIndex>(), ...);
  }

  // The labels of the table that are no position of this tile: the end of a list.
  template <int kPosition>
  __device__ __forceinline__ static void End() {
    asm volatile("coo_at%0:" ::"n"(kPosition));
  }

  template <int... kPosition>
  __device__ __forceinline__ static void Ends(std::integer_sequence<int, kPosition...>) {
    (End<kPositions + kPosition>(), ...);
  }

  // What an entry at a position adds: weights, and the sums they go to. Taps whose result lies outside the tile add
  // nothing.
  struct Products {
    int count = 0;
    int sum[kWeights] = {};
    int weight[kWeights] = {};
  };

  static constexpr Products ProductsAt(int position) {
    Products found;
    for (int tap = 0; tap < kShape.taps(); ++tap) {
      const int row = position / kShape.patch_width() - tap / kShape.kernel;
      const int column = position % kShape.patch_width() - tap % kShape.kernel;
      if (row < 0 || column < 0 || row % kShape.stride != 0 || column % kShape.stride != 0) continue;
      const int y = row / kShape.stride, x = column / kShape.stride;
      if (y >= kShape.height || x >= kShape.width) continue;
      for (int k = 0; k < kShape.out_channels; ++k) {
        found.sum[found.count] = (y * kShape.width + x) * kShape.out_channels + k;
        found.weight[found.count++] = tap * kShape.out_channels + k;
      }
    }
    return found;
  }

  // Eight at a time: the compiler's time goes with the number of statements, of which there are thousands.
  template <int kPosition, int kFirst = 0>
  __device__ __forceinline__ static void Multiply() {
    constexpr Products kAll = ProductsAt(kPosition);
#define JSC_COO_FMA(sum, weight) "fma.rn.f32 coo_sum%" #sum ", coo_value, coo_weight%" #weight ", coo_sum%" #sum ";\n\t"
#define JSC_COO_PAIR(i) "n"(kAll.sum[kFirst + i]), "n"(kAll.weight[kFirst + i])
    if constexpr (kFirst + 8 <= kAll.count) {
      asm volatile(JSC_COO_FMA(0, 1) JSC_COO_FMA(2, 3) JSC_COO_FMA(4, 5) JSC_COO_FMA(6, 7) JSC_COO_FMA(8, 9)
                       JSC_COO_FMA(10, 11) JSC_COO_FMA(12, 13) JSC_COO_FMA(14, 15)::JSC_COO_PAIR(0),
                   JSC_COO_PAIR(1), JSC_COO_PAIR(2), JSC_COO_PAIR(3), JSC_COO_PAIR(4), JSC_COO_PAIR(5), JSC_COO_PAIR(6),
                   JSC_COO_PAIR(7));
      Multiply<kPosition, kFirst + 8>();
    } else if constexpr (kFirst + 2 <= kAll.count) {
      asm volatile(JSC_COO_FMA(0, 1) JSC_COO_FMA(2, 3)::JSC_COO_PAIR(0), JSC_COO_PAIR(1));
      Multiply<kPosition, kFirst + 2>();
    } else if constexpr (kFirst < kAll.count) {
      asm volatile(JSC_COO_FMA(0, 1)::JSC_COO_PAIR(0));
    }
#undef JSC_COO_PAIR
#undef JSC_COO_FMA
  }

  template <int kPosition>
  __device__ __forceinline__ static void Position() {
    asm volatile("coo_at%0:" ::"n"(kPosition));
    Multiply<kPosition>();
    asm volatile("bra coo_dispatch;");
  }

  template <int... kPosition>
  __device__ __forceinline__ static void Positions(std::integer_sequence<int, kPosition...>) {
    (Position<kPosition>(), ...);
  }
};

}  // namespace jsc

#endif  // JSC_CUDA_SPARSE_COO_MICRO_CUH_
