// A batch norm in training: one call, and one thread's part of a pass over its map.
#ifndef JSC_CPU_TRAINING_BATCH_NORM_TASK_H_
#define JSC_CPU_TRAINING_BATCH_NORM_TASK_H_

#include <cstdint>

namespace jsc {

// Maps are [pixels, channels] and of one dtype; what is not there is null.
struct BatchNormCall {
  int64_t pixels, channels;
  bool relu;
  const void* x;          // in front of the batch norm
  const void* residual;   // added behind it
  const void* y;          // the result, where a ReLU follows a residual: its zeros are the ReLU's
  const void* cotangent;  // of y
  void* out;              // y, or the gradient of x
  void* masked;           // the gradient of the residual behind a ReLU: the cotangent with the ReLU's zeros
};

// Rows of numbers of channels, each of PaddedChannels() elements and of the dtype of sums.
//   y = relu((x - mean) * scale + shift + residual)
//   gradient of x = scale * g + slope * (x - mean) + offset, with g the cotangent behind the ReLU
struct BatchNormRows {
  const void *mean, *scale, *shift, *slope, *offset;
};

// Elements of a row: channels in whole vectors of any instruction set.
inline int64_t PaddedChannels(int64_t channels) { return (channels + 15) / 16 * 16; }

// Pixels [begin, end).
struct BatchNormTask {
  const BatchNormCall* call;
  const BatchNormRows* rows;
  int64_t begin, end;
  double* sums;  // two rows that a pass of sums writes
};

}  // namespace jsc

#endif  // JSC_CPU_TRAINING_BATCH_NORM_TASK_H_
