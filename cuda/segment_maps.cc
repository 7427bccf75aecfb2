#include "segment_maps.h"

#include "driver.h"

namespace jsc {
namespace {

bool MapKernel(const SegmentStep& step, const SegmentWork& work, CUtensorMapDataType type, int64_t bytes,
               CUtensorMap* map) {
  const int64_t features = step.out.size[3], channels = step.x.size[3], taps = step.window[0] * step.window[1];
  return work.narrow ? MapKernelPieces(step.kernel, features, taps * channels, 1, type, bytes, map)
                     : MapKernelPieces(step.kernel, features, channels, taps, type, bytes, map);
}

bool MapWindows(const SegmentStep& step, const SegmentWork& work, CUtensorMapDataType type, cuuint64_t bytes,
                CUtensorMap* map) {
  static const auto encode = FindDriverFunction<decltype(&cuTensorMapEncodeIm2col)>("cuTensorMapEncodeIm2col");
  cuuint64_t size[4], stride[4];  // of channels, columns, rows, images; bytes of all before
  for (int i = 0; i < 4; ++i) {
    size[i] = static_cast<cuuint64_t>(step.x.size[3 - i]);
    stride[i] = size[i] * (i > 0 ? stride[i - 1] : bytes);
  }
  int lower[2], upper[2];  // where the first and, from the last pixel, the last window begin; columns, then rows
  for (int i = 0; i < 2; ++i) {
    lower[i] = static_cast<int>(-step.pad_low[1 - i]);
    upper[i] = static_cast<int>(step.pad_high[1 - i] - (step.window[1 - i] - 1) * step.dilation[1 - i]);
  }
  const cuuint32_t step_of[] = {1, static_cast<cuuint32_t>(step.stride[1]), static_cast<cuuint32_t>(step.stride[0]), 1};
  const auto pixels = static_cast<cuuint32_t>(kWarpSide << work.cut.warps_p);
  return encode &&
         encode(map, type, 4, step.x.data, size, stride, lower, upper, static_cast<cuuint32_t>(kPieceBytes / bytes),
                pixels, step_of, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace

bool MakeSegmentMaps(const SegmentStep& step, const SegmentWork& work, ffi::DataType dtype, bool precise,
                     SegmentMaps* maps) {
  const CUtensorMapDataType type = TensorMapType(dtype, precise);
  const cuuint64_t bytes = dtype == ffi::DataType::F32 ? 4 : 2;
  if (!MapKernel(step, work, type, bytes, &maps->kernel)) return false;
  return work.narrow || MapWindows(step, work, type, bytes, &maps->x);
}

}  // namespace jsc
