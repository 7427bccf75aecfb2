// CooStar, the COO* format of a feature map (Xiang et al. 2022, section 3.4, Figure 6), shared by cpu/ and cuda/. Every
// buffer of a call is checked here.
//
//   x          [N, H, W, C]             2-, 4- or 8-byte elements; N is all leading axes together
//   values     [N, tH, tW, tC, slots]   the non-zeros of a tile in the order of position, then zeros
//   positions  [N, tH, tW, tC, slots]   uint8 or uint16: (th * TW + tw) * TC + tc, then zeros
//   counts     [N, tH, tW, tC]          int32
#ifndef JSC_NATIVE_COO_STAR_ARGS_H_
#define JSC_NATIVE_COO_STAR_ARGS_H_

#include <cstdint>
#include <string>

#include "xla/ffi/api/ffi.h"

namespace jsc {

namespace ffi = xla::ffi;

struct CooStarArgs {
  int64_t images, size[2], channels;
  int64_t tile[3];   // TH, TW, TC
  int64_t tiles[3];  // tH, tW, tC
  int element_bytes, position_bytes;

  constexpr int64_t slots() const { return tile[0] * tile[1] * tile[2]; }
  constexpr int64_t all_tiles() const { return images * tiles[0] * tiles[1] * tiles[2]; }
};

// Where tile number `index` begins and how much of it lies in the map.
struct CooStarTile {
  int64_t origin;  // element of x
  int64_t size[3];
};

constexpr CooStarTile CooStarTileAt(const CooStarArgs& a, int64_t index) {
  CooStarTile tile{};
  const int64_t limits[3] = {a.size[0], a.size[1], a.channels};
  int64_t first[3] = {};
  for (int i = 2; i >= 0; --i) {
    first[i] = index % a.tiles[i] * a.tile[i];
    index /= a.tiles[i];
    const int64_t left = limits[i] - first[i];
    tile.size[i] = left < a.tile[i] ? left : a.tile[i];
  }
  tile.origin = ((index * a.size[0] + first[0]) * a.size[1] + first[1]) * a.channels + first[2];
  return tile;
}

inline ffi::ErrorOr<CooStarArgs> MakeCooStarArgs(ffi::AnyBuffer x, ffi::AnyBuffer values, ffi::AnyBuffer positions,
                                                 ffi::AnyBuffer counts, ffi::Span<const int64_t> tile) {
  const auto wrong = [](const char* sentence) {
    return ffi::Unexpected(ffi::Error(ffi::ErrorCode::kInvalidArgument, sentence));
  };
  CooStarArgs a{};
  const auto x_dims = x.dimensions(), lists = values.dimensions(), index = positions.dimensions();
  const auto count_dims = counts.dimensions();
  const size_t rank = x_dims.size();
  if (rank < 4 || lists.size() != rank + 1 || index.size() != rank + 1 || count_dims.size() != rank ||
      tile.size() != 3) {
    return wrong(
        "x must be [..., H, W, C], values and positions [..., tH, tW, tC, slots], counts [..., tH, tW, tC], tile [3]");
  }
  a.images = 1;
  for (size_t i = 0; i + 3 < rank; ++i) {
    a.images *= x_dims[i];
    if (lists[i] != x_dims[i] || index[i] != x_dims[i] || count_dims[i] != x_dims[i]) {
      return wrong("x, values, positions and counts must have the same leading axes");
    }
  }
  a.size[0] = x_dims[rank - 3];
  a.size[1] = x_dims[rank - 2];
  a.channels = x_dims[rank - 1];
  const int64_t limits[3] = {a.size[0], a.size[1], a.channels};
  for (int i = 0; i < 3; ++i) {
    a.tile[i] = tile[i];
    if (tile[i] < 1 || tile[i] > 65536) return wrong("tile must have entries of 1 to 65536");
    a.tiles[i] = (limits[i] + tile[i] - 1) / tile[i];
    const size_t axis = rank - 3 + i;
    if (lists[axis] != a.tiles[i] || index[axis] != a.tiles[i] || count_dims[axis] != a.tiles[i]) {
      return wrong("values, positions and counts must have an entry for each tile of x");
    }
  }
  a.element_bytes = static_cast<int>(ffi::ByteWidth(x.element_type()));
  a.position_bytes = positions.element_type() == ffi::DataType::U8 ? 1 : 2;
  if (values.element_type() != x.element_type() || counts.element_type() != ffi::DataType::S32 ||
      (positions.element_type() != ffi::DataType::U8 && positions.element_type() != ffi::DataType::U16) ||
      (a.element_bytes != 2 && a.element_bytes != 4 && a.element_bytes != 8)) {
    return wrong("x and values must have one dtype of 2, 4 or 8 bytes, positions be uint8 or uint16, counts int32");
  }
  if (lists[rank] != a.slots() || index[rank] != a.slots() || a.slots() > (a.position_bytes == 1 ? 256 : 65536)) {
    return wrong(
        "values and positions must have a slot for every element of a tile, and positions room for its number");
  }
  return a;
}

}  // namespace jsc

#endif  // JSC_NATIVE_COO_STAR_ARGS_H_
