// A COO* convolution whose x comes as the stored lists of a CooStar (native/coo_star_args.h), shared by cpu/ and cuda/.
// Every buffer of a call is checked here; what the lists hold is not: who reads them takes nothing that lies outside of
// the map, and no more entries than there is room for.
#ifndef JSC_NATIVE_COO_LISTS_H_
#define JSC_NATIVE_COO_LISTS_H_

#include <cstdint>

#include "native/call.h"
#include "native/coo_star_args.h"

namespace jsc {

// Lists [N, tH, tW, tC, slots] of tiles; positions of one byte or two.
struct CooLists {
  CooStarArgs args;
  const void* values;
  const void* positions;
  const int32_t* counts;  // [N, tH, tW, tC]
};

struct CooListsCall {
  ConvCall call;  // its x is null
  CooLists lists;
};

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

#endif  // JSC_NATIVE_COO_LISTS_H_
