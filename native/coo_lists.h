// A COO* convolution whose x comes as the stored lists of a CooStar (native/coo_star_args.h), shared by cpu/ and cuda/.
// native/decode_coo.h checks every buffer of a call, but not what the lists hold: who reads them takes nothing that
// lies outside of the map, and no more entries than there is room for.
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

}  // namespace jsc

#endif  // JSC_NATIVE_COO_LISTS_H_
