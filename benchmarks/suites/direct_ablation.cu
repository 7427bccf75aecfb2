// Times variants of the direct convolution's kernel (cuda/dense_conv/mma/kernel.cuh) that the extension does not
// compile, and prints a JSON object a line for each. Built and run by direct_ablation.py.
#include <type_traits>

#include "benchmarks/suites/ablation.cuh"
#include "cuda/dense_conv/mma/kernel.cuh"

namespace jsc {

// direct_parts.cu: shares of loading and of computing, of images with 3 features.
void ReportParts(const char* layer, int images, int height, int width, int filters, int size, cudaStream_t stream);

namespace {

struct Layer {
  const char* name;
  int64_t images, height, width, channels, out_channels, kernel;
};

// Results are as large as images, as in the paper.
Buffers MakeBuffers(const Layer& l) {
  return Buffers(l.images, l.height, l.width, l.channels, l.out_channels, l.kernel, /*has_bias=*/true, -1.f, 2.f);
}

template <class U>
void Launch(const Buffers& b, int input, cudaStream_t stream) {
  const ConvArgs& a = b.args;
  MmaPlan plan{};
  plan.splits = 1;
  plan.reduction = Reduction::kNone;
  const int64_t pixels = a.images * a.conv_size[0] * a.conv_size[1],
                depth = a.kernel_size[0] * a.kernel_size[1] * a.channels;
  plan.pixel_tiles = static_cast<int>((pixels + U::kPixels - 1) / U::kPixels);
  plan.out_channel_tiles = static_cast<int>((a.out_channels + U::kOutChannels - 1) / U::kOutChannels);
  plan.chunks = plan.chunks_per_split = static_cast<int>((depth + U::kCachedPixels - 1) / U::kCachedPixels);
  Check(LaunchMma<U, float>(b.Call(input), plan, nullptr, stream));
}

const char* NameOf(Engine engine) {
  return engine == Engine::kLocalSums      ? "local sums"
         : engine == Engine::kInnerProduct ? "inner products"
         : engine == Engine::kOuterProduct ? "outer products"
                                           : "tensor cores";
}

const char* NameOf(Addresses addresses) {
  return addresses == Addresses::kRecomputed ? "recomputed" : addresses == Addresses::kReduced ? "reduced" : "table";
}

template <class U>
void Report(const char* step, const Layer& layer, const Buffers& b, cudaStream_t stream) {
  const auto launch = [&](int input) { Launch<U>(b, input, stream); };
  const double error = ErrorOf(b, launch, stream);
  std::printf(
      "{\"layer\": \"%s\", \"step\": \"%s\", \"engine\": \"%s\", \"addresses\": \"%s\", \"hoisted_checks\": %s, "
      "\"images_per_thread\": %d, \"filters_per_thread\": %d, \"threads_x\": %d, \"threads_y\": %d, "
      "\"cached_pixels\": %d, \"stages\": %d, \"copy_bytes\": %d, \"us\": %.4f, \"error\": %.3e}\n",
      layer.name, step, NameOf(U::kEngine), NameOf(U::kAddresses), U::kChecks == Checks::kHoisted ? "true" : "false",
      U::kImagesPerThread, U::kOutChannelsPerThread, U::kThreadsX, U::kThreadsY, U::kCachedPixels, U::kStages,
      U::kVector ? 16 : 4, Time(launch, stream), error);
  std::fflush(stdout);
}

// The paper's parameters: 4 x 4 sums a thread, 16 x 4 threads, chunks of 4, one stage, copies of one element.
template <Engine kEngine, Addresses kAddresses, Checks kChecks, bool kVector = false, int kStages = 1>
using Paper = Tuning<kEngine, 4, 4, 16, 4, 4, kStages, kVector, kAddresses, kChecks>;
// As near as fragments of tensor cores come to them.
template <Engine kEngine, bool kVector = false>
using Fragments = Tuning<kEngine, 4, 8, 16, 4, 8, 1, kVector, Addresses::kReduced, Checks::kHoisted>;
// The extension's own, around which one parameter at a time changes.
template <int kImages, int kOutChannels, int kX, int kY, int kCached, int kStages = 3>
using Ours = Tuning<Engine::kOuterProduct, kImages, kOutChannels, kX, kY, kCached, kStages>;
template <int kImages, int kOutChannels, int kX, int kY, int kCached, int kStages = 3>
using OursTensor = Tuning<Engine::kTensorCores, kImages, kOutChannels, kX, kY, kCached, kStages>;

void Techniques(const Layer& layer, const Buffers& b, cudaStream_t stream) {
  constexpr Addresses kOld = Addresses::kRecomputed, kNew = Addresses::kReduced;
  constexpr Checks kEvery = Checks::kEveryCopy, kOut = Checks::kHoisted;
  Report<Paper<Engine::kLocalSums, kOld, kEvery>>("baseline", layer, b, stream);
  Report<Paper<Engine::kOuterProduct, kOld, kEvery>>("figure 14", layer, b, stream);
  Report<Paper<Engine::kInnerProduct, kOld, kEvery>>("figure 20", layer, b, stream);
  Report<Paper<Engine::kOuterProduct, kNew, kEvery>>("figure 28", layer, b, stream);
  Report<Paper<Engine::kOuterProduct, kNew, kOut>>("figure 31", layer, b, stream);
  if (layer.kernel * layer.kernel <= kMaxTableTaps) {  // else the table is larger than shared memory
    Report<Paper<Engine::kOuterProduct, Addresses::kTable, kOut>>("figure 34", layer, b, stream);
  }
  Report<Fragments<Engine::kOuterProduct>>("figure 24, without", layer, b, stream);
  Report<Fragments<Engine::kTensorCores>>("figure 24", layer, b, stream);
}

void Parameters(const Layer& layer, const Buffers& b, cudaStream_t stream) {
  Report<Paper<Engine::kOuterProduct, Addresses::kReduced, Checks::kEveryCopy, true>>("copies", layer, b, stream);
  Report<Paper<Engine::kOuterProduct, Addresses::kReduced, Checks::kEveryCopy, true, 3>>("stages", layer, b, stream);
  Report<Ours<8, 4, 8, 16, 32>>("ours", layer, b, stream);
  Report<Ours<1, 4, 8, 16, 32>>("images_per_thread", layer, b, stream);
  Report<Ours<2, 4, 8, 16, 32>>("images_per_thread", layer, b, stream);
  Report<Ours<4, 4, 8, 16, 32>>("images_per_thread", layer, b, stream);
  Report<Ours<8, 1, 8, 16, 32>>("filters_per_thread", layer, b, stream);
  Report<Ours<8, 2, 8, 16, 32>>("filters_per_thread", layer, b, stream);
  Report<Ours<8, 8, 8, 16, 32>>("filters_per_thread", layer, b, stream);
  Report<Ours<8, 4, 8, 8, 32>>("threads", layer, b, stream);
  Report<Ours<8, 4, 16, 16, 32>>("threads", layer, b, stream);
  Report<Ours<8, 4, 8, 16, 4>>("cached_pixels", layer, b, stream);
  Report<Ours<8, 4, 8, 16, 8>>("cached_pixels", layer, b, stream);
  Report<Ours<8, 4, 8, 16, 16>>("cached_pixels", layer, b, stream);
  Report<Ours<8, 4, 8, 16, 32, 1>>("stages", layer, b, stream);
  Report<OursTensor<4, 8, 16, 8, 32>>("ours, tensor cores", layer, b, stream);
  Report<OursTensor<4, 8, 16, 8, 8>>("cached_pixels", layer, b, stream);
  Report<OursTensor<4, 8, 16, 8, 16>>("cached_pixels", layer, b, stream);
  Report<OursTensor<4, 8, 16, 8, 32, 1>>("stages", layer, b, stream);
}

}  // namespace
}  // namespace jsc

int main() {
  using jsc::Layer;
  const Layer paper = {"the paper's", 128, 6, 5, 3, 32, 5};
  const Layer printed = {"Table 1 as printed, filters of 32x32", 128, 6, 5, 3, 32, 32};
  const Layer today = {"ResNet-50 conv3 3x3, batch 8", 8, 28, 28, 128, 128, 3};
  cudaStream_t stream;
  jsc::Check(cudaStreamCreate(&stream), "cudaStreamCreate");
  for (const Layer& layer : {paper, printed}) {
    jsc::Techniques(layer, jsc::MakeBuffers(layer), stream);
    jsc::ReportParts(layer.name, 128, 6, 5, 32, static_cast<int>(layer.kernel), stream);
  }
  const jsc::Buffers buffers = jsc::MakeBuffers(today);
  jsc::Techniques(today, buffers, stream);
  jsc::Parameters(today, buffers, stream);
  return 0;
}
