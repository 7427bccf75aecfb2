// CooStar to and from a dense map, in native code: one pass over x or over the lists, tiles in parallel.
#ifndef JSC_CPU_FFI_COO_STAR_H_
#define JSC_CPU_FFI_COO_STAR_H_

#include "native/decode_coo.h"

namespace jsc {

ffi::Error CooFromDense(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> values,
                        ffi::Result<ffi::AnyBuffer> positions, ffi::Result<ffi::AnyBuffer> counts,
                        ffi::Span<const int64_t> tile);

ffi::Error CooToDense(ffi::ThreadPool pool, ffi::AnyBuffer values, ffi::AnyBuffer positions, ffi::AnyBuffer counts,
                      ffi::Result<ffi::AnyBuffer> x, ffi::Span<const int64_t> tile);

}  // namespace jsc

#endif  // JSC_CPU_FFI_COO_STAR_H_
