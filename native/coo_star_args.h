// CooStar, the COO* format of a feature map (Xiang et al. 2022, section 3.4, Figure 6), shared by cpu/ and cuda/.
// native/decode_coo.h checks every buffer of a call.
//
//   x          [N, H, W, C]             2-, 4- or 8-byte elements; N is all leading axes together
//   values     [N, tH, tW, tC, slots]   the non-zeros of a tile in the order of position, then zeros
//   positions  [N, tH, tW, tC, slots]   uint8 or uint16: (th * TW + tw) * TC + tc, then zeros
//   counts     [N, tH, tW, tC]          int32
#ifndef JSC_NATIVE_COO_STAR_ARGS_H_
#define JSC_NATIVE_COO_STAR_ARGS_H_

#include <cstdint>

namespace jsc {

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

}  // namespace jsc

#endif  // JSC_NATIVE_COO_STAR_ARGS_H_
