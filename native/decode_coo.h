// Custom calls of CooStar and of its lists, decoded and checked.
#ifndef JSC_NATIVE_DECODE_COO_H_
#define JSC_NATIVE_DECODE_COO_H_

#include <cstdint>

#include "native/coo_lists.h"
#include "native/coo_star_args.h"
#include "native/decode.h"

namespace jsc {

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

// attributes: as of MakeConvCall, and map[3], int64: H, W and C.
inline ffi::ErrorOr<CooListsCall> MakeCooListsCall(ffi::AnyBuffer values, ffi::AnyBuffer positions,
                                                   ffi::AnyBuffer counts, ffi::AnyBuffer kernel,
                                                   ffi::RemainingArgs optional, ffi::Result<ffi::AnyBuffer> out,
                                                   ffi::Dictionary attributes) {
  const auto map = attributes.get<ffi::Span<const int64_t>>("map");
  const auto tile = attributes.get<ffi::Span<const int64_t>>("tile");
  if (!map.has_value() || map->size() != 3 || !tile.has_value() || tile->size() != 3 ||
      counts.dimensions().size() != 4) {
    return ffi::Unexpected(ffi::Error(ffi::ErrorCode::kInvalidArgument,
                                      "attributes map and tile must have 3 int64 each, and counts be [N, tH, tW, tC]"));
  }
  int64_t dimensions[4] = {counts.dimensions()[0], (*map)[0], (*map)[1], (*map)[2]};
  XLA_FFI_Buffer described{};  // the dense map, which is nowhere
  described.struct_size = XLA_FFI_Buffer_STRUCT_SIZE;
  described.dtype = static_cast<XLA_FFI_DataType>(values.element_type());
  described.rank = 4;
  described.dims = dimensions;
  const ffi::AnyBuffer x(&described);
  const ffi::ErrorOr<CooStarArgs> args = MakeCooStarArgs(x, values, positions, counts, *tile);
  if (args.has_error()) return ffi::Unexpected(args.error());
  const ffi::ErrorOr<ConvCall> call = MakeConvCall(x, kernel, optional, out, attributes);
  if (call.has_error()) return ffi::Unexpected(call.error());
  return CooListsCall{
      *call,
      {*args, values.untyped_data(), positions.untyped_data(), static_cast<const int32_t*>(counts.untyped_data())}};
}

}  // namespace jsc

#endif  // JSC_NATIVE_DECODE_COO_H_
