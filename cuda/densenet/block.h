// Room: DenseNet blocks (Huang et al. 2017), whose layers each read the maps of all before them, in one custom call.
//   y = relu(scale * x + shift); mid = relu(y * kernel1 + bias1), 1x1; x = concatenate(x, mid * kernel2), 3x3
// block*: few images, one kernel per layer. limits.h: which blocks they take. layers*: many images, two kernels per
// layer, on Hopper alone. May change: tiles and pipelines, while results stay bitwise repeatable. Details:
// docs/design/kernels/dense_block.md. Tests: tests/fusion/test_dense_blocks.py.
#ifndef JSC_CUDA_DENSENET_BLOCK_H_
#define JSC_CUDA_DENSENET_BLOCK_H_

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <vector>

#include "cuda/densenet/limits.h"
#include "native/types.h"

namespace jsc {

struct DenseLayerArgs {
  const void* scale;    // [C]
  const void* shift;    // [C]
  const void* kernel1;  // [1, 1, C, kMiddle]
  const void* bias1;    // [kMiddle]
  const void* kernel2;  // [3, 3, kMiddle, kGrowth]
};

// What follows a block: relu(scale * x + shift), 1x1 convolution and the average of 2x2 pixels.
struct DenseTransitionArgs {
  const void* scale = nullptr;   // [C]; null: nothing follows
  const void* shift = nullptr;   // [C]
  const void* kernel = nullptr;  // [1, 1, C, output channels]
  void* out = nullptr;           // [N, H / 2, W / 2, output channels]
  int64_t out_channels = 0;
};

struct DenseBlockCall {
  DataType dtype;
  bool precise;  // float32 is multiplied as float32
  int64_t images, height, width, channels;
  const void* x;  // [N, H, W, C0]
  void* out;      // [N, H, W, C0 + layers * kGrowth]; without the first C0 where a transition follows
  std::vector<DenseLayerArgs> layers;
  DenseTransitionArgs transition;
};

// How a layer's map is cut: a tile of results for each cluster, of one of the kernel's shapes.
struct DensePlan {
  int shape;  // of DenseShapes, from the smallest
  int tile_height, tile_width;
  int tiles_y, tiles_x;  // of an image
};

DensePlan ChooseDensePlan(const DenseBlockCall& call);

Error DenseBlock(const DenseBlockCall& call, int device, cudaStream_t stream);  // densenet/block.cu

}  // namespace jsc

#endif  // JSC_CUDA_DENSENET_BLOCK_H_
