// Times variants of the direct convolution's kernel (cuda/dense_conv/mma/kernel.cuh) that the extension does not
// compile, and prints a JSON object a line for each. Built and run by direct_ablation.py.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <type_traits>
#include <vector>

#include "cuda/dense_conv/mma/kernel.cuh"

namespace jsc {

// direct_parts.cu: shares of loading and of computing, of images with 3 features.
void ReportParts(const char* layer, int images, int height, int width, int filters, int size, cudaStream_t stream);

namespace {

constexpr int kInputs = 4, kCalls = 20, kRepeats = 15;

void Check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(status));
  std::exit(1);
}

struct Layer {
  const char* name;
  int64_t images, height, width, channels, out_channels, kernel;
};

ConvArgs ArgsOf(const Layer& l) {
  ConvArgs a{};
  a.images = l.images;
  a.channels = a.group_channels = l.channels;
  a.out_channels = l.out_channels;
  a.stacks = a.groups = 1;
  a.activation = Activation::kRelu;
  a.has_bias = true;
  const int64_t size[2] = {l.height, l.width};
  for (int i = 0; i < 2; ++i) {
    a.size[i] = size[i];
    a.kernel_size[i] = l.kernel;
    a.stride[i] = a.dilation[i] = a.window[i] = a.window_stride[i] = 1;
    a.pad_low[i] = l.kernel / 2;  // as in the paper, where results are as large as images
    a.conv_size[i] = a.out_size[i] = size[i];
  }
  return a;
}

// values[i] in [-scale, scale), by a hash of i and the seed.
__global__ void Fill(float* values, int64_t count, unsigned seed, float scale) {
  for (int64_t i = blockIdx.x * 256 + threadIdx.x; i < count; i += gridDim.x * 256) {
    unsigned h = static_cast<unsigned>(i) * 2654435761u ^ seed;
    h = (h ^ (h >> 16)) * 0x7feb352du;
    h = (h ^ (h >> 15)) * 0x846ca68bu;
    values[i] = (static_cast<float>((h ^ (h >> 16)) >> 8) / 8388608.f - 1.f) * scale;
  }
}

// sums[0] += |out - result|^2 and sums[1] += |result|^2, the result in float64; x [N, H, W, C], kernel [kh, kw, C, K].
__global__ void Compare(ConvArgs a, const float* x, const float* kernel, const float* bias, const float* out,
                        double* sums) {
  const int64_t total = a.images * a.conv_size[0] * a.conv_size[1] * a.out_channels;
  for (int64_t i = blockIdx.x * 128 + threadIdx.x; i < total; i += gridDim.x * 128) {
    const int64_t k = i % a.out_channels, pixel = i / a.out_channels, ox = pixel % a.conv_size[1];
    const int64_t oy = pixel / a.conv_size[1] % a.conv_size[0], n = pixel / a.conv_size[1] / a.conv_size[0];
    double sum = bias[k];
    for (int64_t ky = 0; ky < a.kernel_size[0]; ++ky) {
      for (int64_t kx = 0; kx < a.kernel_size[1]; ++kx) {
        const int64_t y = oy - a.pad_low[0] + ky, at = ox - a.pad_low[1] + kx;
        if (y < 0 || y >= a.size[0] || at < 0 || at >= a.size[1]) continue;
        const float* pixels = x + ((n * a.size[0] + y) * a.size[1] + at) * a.channels;
        const float* row = kernel + (ky * a.kernel_size[1] + kx) * a.channels * a.out_channels + k;
        for (int64_t c = 0; c < a.channels; ++c) sum += static_cast<double>(pixels[c]) * row[c * a.out_channels];
      }
    }
    sum = sum > 0 ? sum : 0;
    const double difference = static_cast<double>(out[i]) - sum;
    atomicAdd(sums, difference * difference);
    atomicAdd(sums + 1, sum * sum);
  }
}

struct Buffers {
  ConvArgs args;
  std::vector<float*> x;
  float *kernel, *bias, *out;
  int64_t outputs;
  double* sums;
};

float* Allocate(int64_t count, unsigned seed, float scale) {
  float* p = nullptr;
  Check(cudaMalloc(&p, count * sizeof(float)), "cudaMalloc");
  Fill<<<256, 256>>>(p, count, seed, scale);
  return p;
}

Buffers MakeBuffers(const Layer& l) {
  Buffers b{};
  b.args = ArgsOf(l);
  for (int i = 0; i < kInputs; ++i) b.x.push_back(Allocate(l.images * l.height * l.width * l.channels, 1 + i, 1.f));
  b.kernel = Allocate(l.kernel * l.kernel * l.channels * l.out_channels, 77, 0.1f);
  b.bias = Allocate(l.out_channels, 99, 1.f);
  b.outputs = l.images * b.args.conv_size[0] * b.args.conv_size[1] * l.out_channels;
  b.out = Allocate(b.outputs, 0, 0.f);
  Check(cudaMalloc(&b.sums, 2 * sizeof(double)), "cudaMalloc");
  return b;
}

template <class U>
void Launch(const Buffers& b, int input, cudaStream_t stream) {
  const ConvArgs& a = b.args;
  DeviceCall call{};
  call.args = a;
  call.dtype = ffi::DataType::F32;
  call.x = b.x[input];
  call.kernel = b.kernel;
  call.bias = b.bias;
  call.out = b.out;
  MmaPlan plan{};
  plan.splits = 1;
  plan.reduction = Reduction::kNone;
  const int64_t pixels = a.images * a.conv_size[0] * a.conv_size[1],
                depth = a.kernel_size[0] * a.kernel_size[1] * a.channels;
  plan.pixel_tiles = static_cast<int>((pixels + U::kPixels - 1) / U::kPixels);
  plan.out_channel_tiles = static_cast<int>((a.out_channels + U::kOutChannels - 1) / U::kOutChannels);
  plan.chunks = plan.chunks_per_split = static_cast<int>((depth + U::kCachedPixels - 1) / U::kCachedPixels);
  const ffi::Error error = LaunchMma<U, float>(call, plan, nullptr, stream);
  if (error.failure()) {
    std::fprintf(stderr, "%s\n", error.message().c_str());
    std::exit(1);
  }
}

// Microseconds of a call, the median over replays of a graph of kCalls calls on inputs in turn.
template <class U>
double Time(const Buffers& b, cudaStream_t stream) {
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  Check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  for (int i = 0; i < kCalls; ++i) Launch<U>(b, i % kInputs, stream);
  Check(cudaStreamEndCapture(stream, &graph), "capture");
  Check(cudaGraphInstantiate(&replay, graph, 0), "cudaGraphInstantiate");
  cudaEvent_t begin, end;
  Check(cudaEventCreate(&begin), "cudaEventCreate");
  Check(cudaEventCreate(&end), "cudaEventCreate");
  std::vector<float> times;
  for (int i = 0; i < kRepeats + 2; ++i) {
    Check(cudaEventRecord(begin, stream), "cudaEventRecord");
    Check(cudaGraphLaunch(replay, stream), "cudaGraphLaunch");
    Check(cudaEventRecord(end, stream), "cudaEventRecord");
    Check(cudaEventSynchronize(end), "cudaEventSynchronize");
    float milliseconds = 0;
    Check(cudaEventElapsedTime(&milliseconds, begin, end), "cudaEventElapsedTime");
    if (i >= 2) times.push_back(milliseconds);
  }
  cudaGraphExecDestroy(replay);
  cudaGraphDestroy(graph);
  std::sort(times.begin(), times.end());
  return times[times.size() / 2] * 1000.0 / kCalls;
}

template <class U>
double Error(const Buffers& b, cudaStream_t stream) {
  Check(cudaMemsetAsync(b.out, 0xff, b.outputs * sizeof(float), stream), "poison");  // NaN where nothing is written
  Check(cudaMemsetAsync(b.sums, 0, 2 * sizeof(double), stream), "cudaMemset");
  Launch<U>(b, 0, stream);
  Compare<<<1024, 128, 0, stream>>>(b.args, b.x[0], b.kernel, b.bias, b.out, b.sums);
  double sums[2];
  Check(cudaMemcpyAsync(sums, b.sums, sizeof(sums), cudaMemcpyDeviceToHost, stream), "cudaMemcpy");
  Check(cudaStreamSynchronize(stream), "check");
  return std::sqrt(sums[0] / sums[1]);
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
  const double error = Error<U>(b, stream);
  std::printf(
      "{\"layer\": \"%s\", \"step\": \"%s\", \"engine\": \"%s\", \"addresses\": \"%s\", \"hoisted_checks\": %s, "
      "\"images_per_thread\": %d, \"filters_per_thread\": %d, \"threads_x\": %d, \"threads_y\": %d, "
      "\"cached_pixels\": %d, \"stages\": %d, \"copy_bytes\": %d, \"us\": %.4f, \"error\": %.3e}\n",
      layer.name, step, NameOf(U::kEngine), NameOf(U::kAddresses), U::kChecks == Checks::kHoisted ? "true" : "false",
      U::kImagesPerThread, U::kOutChannelsPerThread, U::kThreadsX, U::kThreadsY, U::kCachedPixels, U::kStages,
      U::kVector ? 16 : 4, Time<U>(b, stream), std::isfinite(error) ? error : 1e30);
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
  Report<Paper<Engine::kOuterProduct, Addresses::kTable, kOut>>("figure 34", layer, b, stream);
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
