// The operands of the 1x1 convolution of a DenseNet layer: pixels from a stage, scaled, shifted and cut off, in the
// registers that products take them from.
#ifndef JSC_CUDA_DENSENET_LAYERS_OPERANDS_CUH_
#define JSC_CUDA_DENSENET_LAYERS_OPERANDS_CUH_

#include "cuda/core/vectors.cuh"
#include "cuda/densenet/layers_products.cuh"
#include "cuda/densenet/layers_task.cuh"

namespace jsc {

// kTf32x3: float32-accurate products, of a high and a low TF32 part of each operand.
template <typename T_, int kGroups_, int kSplit_, int kOutChannels_, bool kTf32x3_ = false>
struct FirstTile {
  using T = T_;
  static constexpr int kGroups = kGroups_, kSplit = kSplit_, kOutChannels = kOutChannels_;
  static constexpr bool kTf32x3 = kTf32x3_;
  static constexpr int kPlanes = kTf32x3 ? 2 : 1;
  static constexpr int kConsumers = kGroups * kSplit * 128, kThreads = kConsumers + 2 * kWarp;
  static constexpr int kPixels = kGroups * 64, kShares = kMiddle / kOutChannels;  // of middle channels
  static constexpr int kPixelBytes = kPixels * kRowBytes, kPlaneBytes = kOutChannels * kRowBytes;
  static constexpr int kStageBytes = kPixelBytes + kPlanes * kPlaneBytes;
  static constexpr int kTableBytes = 256;  // of a chunk: what a thread needs of scale and shift, side by side
  static constexpr int kSumBytes = (kSplit - 1) * 128 * kOutChannels / 2 * 4;
  static_assert(kGroups == 1 || kSplit == 1);
};

struct FirstBarriers {
  uint64_t full[kMaxPipelineStages], empty[kMaxPipelineStages];
};

// Two values of 16 bits or one float32, and as the tensor cores take it.
template <typename T, bool kTf32x3>
__device__ __forceinline__ uint32_t ScaleShiftRelu(uint32_t word, uint32_t scale, uint32_t shift) {
  if constexpr (sizeof(T) == 4) {
    const float sum = fmaf(__uint_as_float(word), __uint_as_float(scale), __uint_as_float(shift));
    const float y = AtLeast(sum, 0.f);
    if constexpr (kTf32x3) return __float_as_uint(y);
    return __viaddmin_u32(__float_as_uint(y), 0x1000u, 0x7ffff000u);  // half of what is dropped; NaN stays NaN
  } else {
    using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
    const auto as_pair = [](uint32_t bits) { return *reinterpret_cast<const Pair*>(&bits); };
    const Pair y = __hfma2_relu(as_pair(word), as_pair(scale), as_pair(shift));
    return *reinterpret_cast<const uint32_t*>(&y);
  }
}

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void LoadFour(uint32_t address, uint32_t* v) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "r"(address)
               : "memory");
}

// 64 pixels x 128 bytes of channels as four products take them. pixels: of the row and slot of the calling thread for
// ldmatrix; table: of the chunk, of the calling thread.
template <typename T, bool kTf32x3>
__device__ __forceinline__ void MakeOperands(uint32_t pixels, uint32_t table, uint32_t (&a)[16]) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[4 * k]), "=r"(a[4 * k + 1]), "=r"(a[4 * k + 2]), "=r"(a[4 * k + 3])
                 : "r"(pixels ^ (k << 5))
                 : "memory");
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t scale[4], shift[4];
    LoadFour(table + half * 64, scale);
    LoadFour(table + 128 + half * 64, shift);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        uint32_t& word = a[half * 8 + i * 2 + row];
        word = ScaleShiftRelu<T, kTf32x3>(word, scale[i], shift[i]);
      }
    }
  }
}

// For each chunk and each lane of a quad, four times four words of scale and of shift. Lane t has the chunk's words 8k
// + t and 8k + t + 4.
template <class U>
__device__ __forceinline__ void MakeTable(const FirstTask<typename U::T>& task, const DenseChunks& chunks,
                                          unsigned char* table) {
  using T = typename U::T;
  constexpr int kElements = 4 / static_cast<int>(sizeof(T));
  for (int i = static_cast<int>(threadIdx.x); i < chunks.all * 64; i += U::kThreads) {
    const int chunk = i / 64, vector = i / 16 % 4, lane = i / 4 % 4, element = i % 4;
    const int k = vector % 2 * 2 + element / 2, word = 8 * k + lane + element % 2 * 4;
    const bool of_x = chunk < chunks.of_x;
    const int channel =
        (of_x ? chunk * kChunk<T> : task.first_channels + (chunk - chunks.of_x) * kChunk<T>)+word * kElements;
    const T* from = vector < 2 ? task.scale : task.shift;
    uint32_t value = 0;
    if (channel < (of_x ? task.first_channels : task.channels)) {
      value = *reinterpret_cast<const uint32_t*>(from + channel);
    }
    reinterpret_cast<uint32_t*>(table)[i] = value;
  }
}
#endif

}  // namespace jsc

#endif  // JSC_CUDA_DENSENET_LAYERS_OPERANDS_CUH_
