// Eight registers of AMX, each a tile of up to 16 rows of 64 bytes, and the same for processors that have none.
//
// What: sums[row][column] += x[row] * weights[column] over up to 16 pairs of bfloat16 channels. Registers 0 to 3 are
//   sums, 4 and 5 rows of pixels, 6 and 7 weights, a row of 16 output channels for each pair.
// Why text: only processors with AMX may run it, and no other code here may need that (core/simd.h, MultiplyAdd).
// Emulated: in memory, by vdpbf16ps. So tests run the loop on processors without AMX, too.
#ifndef JSC_CPU_CORE_AMX_TILES_H_
#define JSC_CPU_CORE_AMX_TILES_H_

#include "cpu/core/simd.h"
#include "cpu/plan/amx_cut.h"

namespace jsc {
namespace JSC_ISA {
namespace {

#if defined(__AVX512F__)

constexpr int64_t kTileBytes = 64;  // of a row

// As ldtilecfg reads it.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

inline TileShapes ShapesOf(int64_t pixels, int64_t pairs) {
  TileShapes shapes;
  for (int tile = 0; tile < 8; ++tile) {
    const bool is_pixels = tile == 4 || tile == 5, is_weights = tile >= 6;
    shapes.rows[tile] = static_cast<uint8_t>(is_weights ? pairs : pixels);
    shapes.row_bytes[tile] = static_cast<uint16_t>(is_pixels ? pairs * sizeof(BFloat16Pair) : kTileBytes);
  }
  return shapes;
}

// The processor's. Tiles have their shape, and are zero, from Shape on; others may use them after the object's life.
struct AmxTiles {
  ~AmxTiles() { asm volatile("tilerelease" ::: "memory"); }

  void Shape(int64_t pixels, int64_t pairs) {
    const TileShapes shapes = ShapesOf(pixels, pairs);
    asm volatile("ldtilecfg %0" : : "m"(shapes));
  }

  template <int kTile>
  [[gnu::always_inline]] void Zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
  }

  // stride: bytes from one row to the next.
  template <int kTile>
  [[gnu::always_inline]] void Load(const void* rows, int64_t stride) {
    asm volatile("tileloadd (%1,%2,1), %%tmm%c0" : : "i"(kTile), "r"(rows), "r"(stride) : "memory");
  }

  template <int kTile>
  [[gnu::always_inline]] void Store(void* rows, int64_t stride) {
    asm volatile("tilestored %%tmm%c0, (%1,%2,1)" : : "i"(kTile), "r"(rows), "r"(stride) : "memory");
  }

  template <int kSums, int kPixels, int kWeights>
  [[gnu::always_inline]] void MultiplyAdd() {
    asm volatile("tdpbf16ps %%tmm%c0, %%tmm%c1, %%tmm%c2" : : "i"(kWeights), "i"(kPixels), "i"(kSums));
  }
};

struct EmulatedTiles {
  void Shape(int64_t pixels, int64_t pairs) {
    shapes_ = ShapesOf(pixels, pairs);
    __builtin_memset(rows_, 0, sizeof(rows_));
  }

  template <int kTile>
  void Zero() {
    __builtin_memset(rows_[kTile], 0, sizeof(rows_[kTile]));
  }

  template <int kTile>
  void Load(const void* rows, int64_t stride) {
    for (int64_t row = 0; row < shapes_.rows[kTile]; ++row) {
      __builtin_memcpy(rows_[kTile][row], static_cast<const char*>(rows) + row * stride, shapes_.row_bytes[kTile]);
    }
  }

  template <int kTile>
  void Store(void* rows, int64_t stride) {
    for (int64_t row = 0; row < shapes_.rows[kTile]; ++row) {
      __builtin_memcpy(static_cast<char*>(rows) + row * stride, rows_[kTile][row], shapes_.row_bytes[kTile]);
    }
  }

  template <int kSums, int kPixels, int kWeights>
  void MultiplyAdd() {
    for (int64_t row = 0; row < shapes_.rows[kSums]; ++row) {
      Vector<float> sum = BitCast<Vector<float>>(LoadAs<Word32>(rows_[kSums][row]));
      for (int64_t pair = 0; pair < shapes_.rows[kWeights]; ++pair) {
        MultiplyAddAt(sum, BFloat16Pair{rows_[kPixels][row][pair]},
                      reinterpret_cast<const BFloat16Pair*>(rows_[kWeights][pair]));
      }
      StoreAs(rows_[kSums][row], sum);
    }
  }

 private:
  TileShapes shapes_;
  alignas(64) uint32_t rows_[8][kAmxRows][kTileBytes / sizeof(uint32_t)];
};

#endif

}  // namespace
}  // namespace JSC_ISA
}  // namespace jsc

#endif  // JSC_CPU_CORE_AMX_TILES_H_
