// The 128-byte swizzle of shared memory, in which TMA writes and warpgroup products read: rows of 128 bytes, whose
// 16-byte slots are permuted by the row. For planners and kernels.
#ifndef JSC_CUDA_CORE_SWIZZLE_H_
#define JSC_CUDA_CORE_SWIZZLE_H_

namespace jsc {

constexpr int kRowBytes = 128;
constexpr int kSwizzleBytes = 1024;  // after which it repeats: where a stage may begin

}  // namespace jsc

#endif  // JSC_CUDA_CORE_SWIZZLE_H_
