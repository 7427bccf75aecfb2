// The compile-time parameters of the engines mma and small_map (dense_conv/mma/kernel.cuh,
// dense_conv/mma/small_map.cuh).
//
// They are those of Cheng et al. 2018 ("Software and Hardware Enhancement of Convolutional Neural Networks on GPGPUs"),
// section 2.2, and their techniques, sections 3 and 4. A pixel is one result position of one image. The paper
// parallelises over 128 images; at batch 1 a map's own pixels take their place. The paper's filters are output
// channels.
#ifndef JSC_CUDA_DENSE_CONV_PLAN_MMA_TUNING_H_
#define JSC_CUDA_DENSE_CONV_PLAN_MMA_TUNING_H_

namespace jsc {

// What multiplies a staged chunk of pixels by a staged chunk of weights.
enum class Engine {
  kLocalSums,     // outer products by FFMA; loops not unrolled, so that the sums lie in local memory (section 3.1.1)
  kInnerProduct,  // FFMA in the order of section 3.2: for each pixel and output channel, over the chunk
  kOuterProduct,  // FFMA, unrolled: the sums are registers (section 3.1.2)
  kTensorCores,   // the outer product unit of section 3.3 as mma.sync has it: TF32, bfloat16 or float16
  kTf32x3,        // the same of float32 by 3xTF32: float32-accurate (dense_conv/mma/tf32x3.cuh)
};

// How the address of each copied piece of the input is found.
enum class Addresses {
  kRecomputed,  // divisions and multiplications for every copy
  kReduced,     // divisions once per thread and once per chunk, additions for every copy (section 4.1)
  kTable,       // a table in shared memory of the pixel under every tap, -1 outside the map: the index converter of
                // section 4.3 without hardware for it
};

// Whether a block whose pixels, output channels and chunks all lie inside runs a loop without bounds checks (section
// 4.2).
enum class Checks { kEveryCopy, kHoisted };

// kImagesPerThread x kOutChannelsPerThread sums a thread, kThreadsX x kThreadsY threads a block, kCachedPixels rows of
// the reduction axis (taps x channels, flattened) a chunk. On tensor cores kThreadsX and kThreadsY are multiples of 8
// and 4, the shape of a warp's fragments. kStages: chunks in shared memory at once; 1 waits for each as the paper's
// kernel does. kVector: copies of 16 bytes, else of one element.
template <Engine kEngine_, int kImagesPerThread_, int kOutChannelsPerThread_, int kThreadsX_, int kThreadsY_,
          int kCachedPixels_, int kStages_, bool kVector_ = true, Addresses kAddresses_ = Addresses::kReduced,
          Checks kChecks_ = Checks::kEveryCopy>
struct Tuning {
  static constexpr Engine kEngine = kEngine_;
  static constexpr int kImagesPerThread = kImagesPerThread_, kOutChannelsPerThread = kOutChannelsPerThread_;
  static constexpr int kThreadsX = kThreadsX_, kThreadsY = kThreadsY_;
  static constexpr int kCachedPixels = kCachedPixels_, kStages = kStages_;
  static constexpr bool kVector = kVector_;
  static constexpr Addresses kAddresses = kAddresses_;
  static constexpr Checks kChecks = kChecks_;

  static constexpr int kThreads = kThreadsX * kThreadsY;
  static constexpr int kPixels = kImagesPerThread * kThreadsX;            // of a block's tile
  static constexpr int kOutChannels = kOutChannelsPerThread * kThreadsY;  // of a block's tile
  static constexpr bool kTf32x3 = kEngine == Engine::kTf32x3;
  static constexpr bool kTensor = kEngine == Engine::kTensorCores || kTf32x3;
  // The same tile and chunks by FFMA in few instructions, for what 3xTF32 cannot do.
  using Plain = Tuning<Engine::kInnerProduct, kImagesPerThread_, kOutChannelsPerThread_, kThreadsX_, kThreadsY_,
                       kCachedPixels_, kStages_, kVector_, kAddresses_, kChecks_>;
  // Words between the end of one pixel's sums and the next pixel's, so that a warp's stores meet distinct banks.
  static constexpr int kSumStride = kOutChannels + 4;

  template <typename T>
  static constexpr int StageBytes() {
    return (kPixels + kOutChannels) * kCachedPixels * static_cast<int>(sizeof(T));
  }
  static constexpr int SumBytes() { return kPixels * kSumStride * static_cast<int>(sizeof(float)); }
  // Shared memory of a block: the stages, which the sums of the tile replace, then the table.
  template <typename T>
  static constexpr int TableAt() {
    const int stages = kStages * StageBytes<T>();
    return stages > SumBytes() ? stages : SumBytes();
  }
  template <typename T>
  static constexpr int SharedBytes(int taps) {
    return TableAt<T>() + (kAddresses == Addresses::kTable ? kPixels * taps * static_cast<int>(sizeof(int)) : 0);
  }
};

// A tile of the engine small_map (dense_conv/mma/small_map.cuh). Output channels are a multiple of 16 and pixels of 8.
// kTf32x3: float32 at HIGHEST. kVector: copies of 16 bytes, else of one element.
template <typename T, int kOutChannels_, int kPixels_, bool kTf32x3_, bool kVector_ = true>
struct SmallMapTuning {
  static constexpr int kOutChannels = kOutChannels_, kPixels = kPixels_;
  static constexpr bool kTf32x3 = kTf32x3_, kVector = kVector_;
  static constexpr int kWarps = 8, kThreads = 32 * kWarps;
  static constexpr int kDepth = 64 / static_cast<int>(sizeof(T));  // of a step
  static constexpr int kStages = 4;                                // of a warp's pipeline
  // Bytes of a row in shared memory, so that what a warp reads at once lies in distinct banks.
  static constexpr int kPixelRow = 64 + 16;
  static constexpr int kWeightRow = kOutChannels * static_cast<int>(sizeof(T)) + (sizeof(T) == 4 ? 32 : 16);
  static constexpr int kStageBytes = kPixels * kPixelRow + kDepth * kWeightRow;
  static constexpr int kSumStride = kOutChannels + 4;
  static constexpr int kSumBytes = kWarps * kPixels * kSumStride * static_cast<int>(sizeof(float));
  static constexpr int kPipelineBytes = kWarps * kStages * kStageBytes;
  static constexpr int kSharedBytes = kPipelineBytes > kSumBytes ? kPipelineBytes : kSumBytes;

  // Where in a stage an element of the pixels [kPixels, kDepth] and of the weights [kDepth, kOutChannels] is.
  static constexpr int Pixel(int pixel, int k) { return pixel * kPixelRow + k * static_cast<int>(sizeof(T)); }
  static constexpr int Weight(int k, int out_channel) {
    return kPixels * kPixelRow + k * kWeightRow + out_channel * static_cast<int>(sizeof(T));
  }
};

}  // namespace jsc

#endif  // JSC_CUDA_DENSE_CONV_PLAN_MMA_TUNING_H_
