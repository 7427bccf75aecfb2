// Room: tensor maps, by which TMA reads and writes boxes of an array. The one place that asks the driver to encode
// them. May change: what a map can say; kernels lie on its boxes, swizzle and zeros beyond the array's edges. Tests:
// tests/cuda/test_devices.py; on a GPU all of tests/primitive/test_kernels.py.
#ifndef JSC_CUDA_CORE_TENSOR_MAP_H_
#define JSC_CUDA_CORE_TENSOR_MAP_H_

#include <cuda.h>

#include <initializer_list>

#include "native/call.h"

namespace jsc {

// Whether the driver can encode tensor maps.
bool HasTensorMaps();

// float32 that is multiplied as TF32, which is not `precise`, is rounded while it is copied.
CUtensorMapDataType TensorMapType(DataType dtype, bool precise);

// What is copied, and how it lies in shared memory.
struct MapFormat {
  CUtensorMapDataType type;
  CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B;
  CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B;

  int64_t element_bytes() const;
};

using AxisList = std::initializer_list<int64_t>;  // a number of each axis, the innermost first

// A map of boxes of an array, with zeros beyond its edges. stride: bytes of all axes but the innermost, which need not
// grow from axis to axis. These functions return false where the driver refuses, as it does data that does not begin at
// 16 bytes.
bool EncodeTiledMap(const void* data, const MapFormat& format, AxisList size, AxisList stride, AxisList box,
                    CUtensorMap* map);

// The same of a dense array.
bool EncodeDenseMap(const void* data, const MapFormat& format, AxisList size, AxisList box, CUtensorMap* map);

// A map of convolution windows (im2col) of a dense array [N, H, W, C]. lower, upper: where the first window begins, and
// from the last pixel the last one; columns, then rows. A copy has `box[0]` channels of box[1] windows, `step` apart.
bool EncodeWindowMap(const void* data, const MapFormat& format, AxisList size, const int (&lower)[2],
                     const int (&upper)[2], AxisList box, AxisList step, CUtensorMap* map);

// A map of kernels [taps, depth, output channels]. Its boxes are 128 bytes of output channels by as many rows of depth
// as a square has, in the 128-byte swizzle.
bool EncodeKernelPieces(const void* kernel, CUtensorMapDataType type, int64_t out_channels, int64_t depth, int64_t taps,
                        CUtensorMap* map);

// What a launch says whose maps the driver refuses.
Error MapsRefused(const char* kernel);

}  // namespace jsc

#endif  // JSC_CUDA_CORE_TENSOR_MAP_H_
