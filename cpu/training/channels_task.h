// Sums over the pixels of each channel of a map, a scale and a shift of each channel, and their gradients: what batch
// norms in training are made of. One call, and one thread's part of its pass over the map.
#ifndef JSC_CPU_TRAINING_CHANNELS_TASK_H_
#define JSC_CPU_TRAINING_CHANNELS_TASK_H_

#include <cstdint>

namespace jsc {

// Maps are [pixels, channels] and of one dtype; what a pass does not have is null. The result of an affine call, and
// its cotangent, may be columns of a map that has more channels: pixels lie `pixel_stride` elements apart there. So may
// its x where it has no residual, by `x_stride`, which no other pass reads. It may also have sums of 2x2 pixels of x,
// whose images then have an even number of rows, and of `columns`; else that is 0.
struct ChannelsCall {
  int64_t pixels, channels, x_stride, pixel_stride, columns;
  bool relu;
  const void* x;
  const void* residual;   // added behind scale and shift
  const void* y;          // the result, where a ReLU follows a residual: its zeros are the ReLU's
  const void* cotangent;  // of the result, or of x from elsewhere
  const void* added;      // cotangent of x from elsewhere, beside that of the result
  void* out;              // the result, or the gradient of x
  void* masked;           // the gradient of the residual in front of a ReLU: the cotangent with the ReLU's zeros
};

// One number for each channel, of the dtype of sums, and zeros up to PaddedChannels().
//   sums:              of x - center and of its squares
//   affine:            relu((x - center) * scale + shift + residual)
//   gradient of sums:  cotangent + (x - center) * scale + shift
struct ChannelRows {
  const void *center, *scale, *shift;
};

// Elements of a row: channels in whole vectors of any instruction set.
inline int64_t PaddedChannels(int64_t channels) { return (channels + 15) / 16 * 16; }

// Pixels [begin, end).
struct ChannelsTask {
  const ChannelsCall* call;
  const ChannelRows* rows;
  int64_t begin, end;
  double* sums;  // two rows, of passes that make sums
};

}  // namespace jsc

#endif  // JSC_CPU_TRAINING_CHANNELS_TASK_H_
