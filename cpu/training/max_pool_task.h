// Derivatives of a max pool: one call, and one thread's part of it.
#ifndef JSC_CPU_TRAINING_MAX_POOL_TASK_H_
#define JSC_CPU_TRAINING_MAX_POOL_TASK_H_

#include "native/call.h"

namespace jsc {

// What is read and written, all of one dtype. Of `args` the sizes of x, of the results and of the pool are set.
struct MaxPoolCall {
  ConvArgs args;
  const void* x;       // [N, H, W, C], before the pool
  const void* linear;  // what the call is linear in: the cotangent [N, Ho, Wo, C] of a gradient, the tangent [N, H, W,
                       // C] of a tangent
  void* out;           // [N, H, W, C] of a gradient, [N, Ho, Wo, C] of a tangent
};

// Rows [row_begin, row_end) and channels [channel_begin, channel_end) of `out` in one image.
struct MaxPoolTask {
  const MaxPoolCall* call;
  int64_t image;
  int64_t row_begin, row_end;
  int64_t channel_begin, channel_end;
};

}  // namespace jsc

#endif  // JSC_CPU_TRAINING_MAX_POOL_TASK_H_
