// One thread's part of a COO* convolution: one row of tiles and a range of a group's output channels.
#ifndef JSC_CPU_LOOPS_COO_TASK_H_
#define JSC_CPU_LOOPS_COO_TASK_H_

#include "native/call.h"
#include "native/coo_lists.h"
#include "native/coo_variants.h"

namespace jsc {

struct CooRow {
  const ConvCall* call;
  const CooVariant* shape;
  const CooLists* lists;  // what is read in x's place, or null
  int64_t stack, image, group;
  int64_t tile_row;
  int64_t out_channel_begin, out_channel_end;  // within the group
};

}  // namespace jsc

#endif  // JSC_CPU_LOOPS_COO_TASK_H_
