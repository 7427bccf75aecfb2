// What calls on channels of maps (channels.h, joined_channels.h) share: the checks of their buffers, and passes on all
// threads.
#ifndef JSC_CPU_FFI_CHANNELS_CALL_H_
#define JSC_CPU_FFI_CHANNELS_CALL_H_

#include <exception>
#include <initializer_list>
#include <string>
#include <vector>

#include "cpu/ffi/host.h"
#include "cpu/ffi/tasks.h"
#include "cpu/training/channels_task.h"
#include "xla/ffi/api/ffi.h"

namespace jsc {

using Pass = void (*)(const ChannelsTask&);

ffi::Error InvalidChannels(const std::string& what);

// Whether the others have x's shape and dtype.
bool AreLike(ffi::AnyBuffer x, std::initializer_list<ffi::AnyBuffer> others);

// A call on x, where maps are like it, and rows have a number for each of its channels.
ffi::ErrorOr<ChannelsCall> MakeChannelsCall(ffi::AnyBuffer x, std::initializer_list<ffi::AnyBuffer> maps,
                                            std::initializer_list<ffi::AnyBuffer> rows);

// A pass over one map, and where its sums begin in those of all maps.
struct MapPass {
  ChannelsCall call;
  ChannelRows rows;
  int64_t first_sum;
};

// A pass over maps of as many pixels; of one that makes sums, both rows of each map, of PaddedChannels().
std::vector<double> RunPass(ffi::ThreadPool& pool, const std::vector<MapPass>& maps, Pass pass, bool has_sums);

// run(A{}) with the type of sums.
template <typename Body>
ffi::Error WithSums(ffi::AnyBuffer x, const Body& body) {
  return TypeOf(x) == DataType::F64 ? body(double{}) : body(float{});
}

template <typename Body>
ffi::Error Caught(const Body& body) {
  try {
    return body();
  } catch (const std::exception& error) {
    return ffi::Error(ffi::ErrorCode::kInternal, error.what());
  }
}

}  // namespace jsc

#endif  // JSC_CPU_FFI_CHANNELS_CALL_H_
