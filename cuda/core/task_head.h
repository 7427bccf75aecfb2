// What most kernels' descriptions of a call begin with; the host fills it in.
#ifndef JSC_CUDA_CORE_TASK_HEAD_H_
#define JSC_CUDA_CORE_TASK_HEAD_H_

#include "cuda/core/device_call.h"

namespace jsc {

// The buffers of a call, by the names that tasks give them.
template <typename Task>
void SetBuffers(const DeviceCall& call, Task* t) {
  t->x = static_cast<decltype(t->x)>(call.x);
  t->kernel = static_cast<decltype(t->kernel)>(call.kernel);
  t->bias = static_cast<decltype(t->bias)>(call.bias);
  t->residual = static_cast<decltype(t->residual)>(call.residual);
  t->out = static_cast<decltype(t->out)>(call.out);
}

// Its sizes, which fit into 32 bits.
template <typename Task>
void SetSizes(const ConvArgs& a, Task* t) {
  t->height = static_cast<int>(a.size[0]);
  t->width = static_cast<int>(a.size[1]);
  t->channels = static_cast<int>(a.channels);
  t->group_channels = static_cast<int>(a.group_channels);
  t->out_channels = static_cast<int>(a.out_channels);
  t->group_out_channels = static_cast<int>(a.out_channels / a.groups);
  for (int i = 0; i < 2; ++i) {
    t->stride[i] = static_cast<int>(a.stride[i]);
    t->pad_low[i] = static_cast<int>(a.pad_low[i]);
  }
}

}  // namespace jsc

#endif  // JSC_CUDA_CORE_TASK_HEAD_H_
