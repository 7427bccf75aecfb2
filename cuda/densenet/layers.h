// The layers of a DenseNet block of many images: two kernels each, which read and write slices of one map.
#ifndef JSC_CUDA_DENSENET_LAYERS_H_
#define JSC_CUDA_DENSENET_LAYERS_H_

#include "cuda/dense_conv/plan/wgmma_plan.h"
#include "cuda/densenet/block.h"
#include "cuda/ffi/kernels.h"

namespace jsc {

constexpr int kTapOutChannels = 3 * kGrowth;               // of a row of a 3x3 kernel: of its taps side by side
constexpr int kFirstPiece = kMiddle * kRowBytes;           // bytes of a 1x1 kernel's chunk, 128 bytes of channels
constexpr int kSecondPiece = kTapOutChannels * kRowBytes;  // the same of a row of a 3x3 kernel

// Chunks of C channels: of x's first, then of what the layers before have added.
struct DenseChunks {
  int of_x, all;
  constexpr DenseChunks(int first_channels, int channels, int chunk)
      : of_x((first_channels + chunk - 1) / chunk), all(of_x + (channels - first_channels + chunk - 1) / chunk) {}
};

// Bytes of a 3x3 kernel's pieces for elements of so many bytes, and of the kernels of all layers up to one. tf32x3:
// each piece is followed by its low parts.
constexpr int SecondBytes(int element_bytes, bool tf32x3) {
  return kMiddle * element_bytes / kRowBytes * 3 * kSecondPiece * (tf32x3 ? 2 : 1);
}
constexpr int64_t PreparedBytes(int element_bytes, bool tf32x3, int first_channels, int layers) {
  int64_t bytes = 0;
  for (int i = 0; i < layers; ++i) {
    const DenseChunks chunks(first_channels, first_channels + i * kGrowth, kRowBytes / element_bytes);
    bytes += int64_t{chunks.all} * kFirstPiece * (tf32x3 ? 2 : 1) + SecondBytes(element_bytes, tf32x3);
  }
  return bytes;
}

// How the kernels of a layer are cut. groups: warpgroups of a block, each with 64 rows of a product.
struct DenseLayersPlan {
  int first_groups, first_out_channels;  // 1x1: pixels / 64 and middle channels of a tile
  int second_groups;                     // 3x3
};

// Bytes of workspace: the middle map, and kernels as products take them.
int64_t DenseLayersBytes(int element_bytes, bool precise, int64_t pixels, int64_t channels, int64_t layers);

DenseLayersPlan ChooseDenseLayersPlan(const DenseBlockCall& call, int multiprocessors);

// by wgmma, on Hopper.
Error DenseLayers(const DenseBlockCall& call, Workspace workspace, int device, cudaStream_t stream);

// densenet/layers.cu, code for sm_90a alone; memory: so many bytes, from a multiple of kSwizzleBytes on.
Error LaunchDenseLayers(const DenseBlockCall& call, const DenseLayersPlan& plan, unsigned char* memory,
                        const DeviceInfo& device, cudaStream_t stream);

}  // namespace jsc

#endif  // JSC_CUDA_DENSENET_LAYERS_H_
