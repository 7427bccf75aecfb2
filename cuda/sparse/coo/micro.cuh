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

  template <int kSum, int kWeight>
  __device__ __forceinline__ static void MultiplyAdd() {
    asm volatile("fma.rn.f32 coo_sum%0, coo_value, coo_weight%1, coo_sum%0;" ::"n"(kSum), "n"(kWeight));
  }

  template <int kSum, int kWeight, int... kOutChannel>
  __device__ __forceinline__ static void MultiplyAdds(std::integer_sequence<int, kOutChannel...>) {
    (MultiplyAdd<kSum + kOutChannel, kWeight + kOutChannel>(), ...);
  }

  // The part of tap kTap in what an entry at kPosition adds; none where the result lies outside the tile.
  template <int kPosition, int kTap>
  __device__ __forceinline__ static void Tap() {
    constexpr int kRow = kPosition / kShape.patch_width() - kTap / kShape.kernel;
    constexpr int kColumn = kPosition % kShape.patch_width() - kTap % kShape.kernel;
    constexpr int kY = kRow / kShape.stride, kX = kColumn / kShape.stride;
    if constexpr (kRow >= 0 && kColumn >= 0 && kRow % kShape.stride == 0 && kColumn % kShape.stride == 0 &&
                  kY < kShape.height && kX < kShape.width) {
      MultiplyAdds<(kY * kShape.width + kX) * kShape.out_channels, kTap * kShape.out_channels>(
          std::make_integer_sequence<int, kShape.out_channels>{});
    }
  }

  template <int kPosition, int... kTap>
  __device__ __forceinline__ static void Position(std::integer_sequence<int, kTap...>) {
    asm volatile("coo_at%0:" ::"n"(kPosition));
    (Tap<kPosition, kTap>(), ...);
    asm volatile("bra coo_dispatch;");
  }

  template <int... kPosition>
  __device__ __forceinline__ static void Positions(std::integer_sequence<int, kPosition...>) {
    (Position<kPosition>(std::make_integer_sequence<int, kShape.taps()>{}), ...);
  }
};

}  // namespace jsc

#endif  // JSC_CUDA_SPARSE_COO_MICRO_CUH_
