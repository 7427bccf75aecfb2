// What the programs of ablations share: buffers of a convolution, its error against float64, and the time of a call.
#ifndef JSC_BENCHMARKS_SUITES_ABLATION_CUH_
#define JSC_BENCHMARKS_SUITES_ABLATION_CUH_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "cuda/core/device_call.h"

namespace jsc {

constexpr int kInputs = 4, kCalls = 20, kRepeats = 15;

inline void Check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(status));
  std::exit(1);
}

inline void Check(const Error& error) {
  if (!error.failure()) return;
  std::fprintf(stderr, "%s\n", error.message().c_str());
  std::exit(1);
}

// In [0, 1), by a hash of i and the seed.
__device__ inline float Hashed(int64_t i, unsigned seed) {
  unsigned h = static_cast<unsigned>(i) * 2654435761u ^ seed;
  h = (h ^ (h >> 16)) * 0x7feb352du;
  h = (h ^ (h >> 15)) * 0x846ca68bu;
  return static_cast<float>((h ^ (h >> 16)) >> 8) / 16777216.f;
}

// values[i] in [low, low + width), and 0 instead where the hash is below `zeros`.
static __global__ void Fill(float* values, int64_t count, unsigned seed, float low, float width, float zeros) {
  for (int64_t i = blockIdx.x * 256 + threadIdx.x; i < count; i += gridDim.x * 256) {
    const float u = Hashed(i, seed);
    values[i] = u < zeros ? 0.f : low + u * width;
  }
}

inline float* Allocate(int64_t count, unsigned seed, float low, float width, float zeros = 0.f) {
  float* p = nullptr;
  Check(cudaMalloc(&p, count * sizeof(float)), "cudaMalloc");
  Fill<<<256, 256>>>(p, count, seed, low, width, zeros);
  return p;
}

// sums[0] += |out - result|^2 and sums[1] += |result|^2, the result in float64 with ReLU; x [N, H, W, C], kernel [kh,
// kw, C, K], bias [K] or null.
static __global__ void Compare(ConvArgs a, const float* x, const float* kernel, const float* bias, const float* out,
                               double* sums) {
  const int64_t total = a.images * a.conv_size[0] * a.conv_size[1] * a.out_channels;
  for (int64_t i = blockIdx.x * 128 + threadIdx.x; i < total; i += gridDim.x * 128) {
    const int64_t k = i % a.out_channels, pixel = i / a.out_channels, ox = pixel % a.conv_size[1];
    const int64_t oy = pixel / a.conv_size[1] % a.conv_size[0], n = pixel / a.conv_size[1] / a.conv_size[0];
    double sum = bias == nullptr ? 0 : bias[k];
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

// A convolution with ReLU of float32, stride 1 and results as large as its images.
struct Buffers {
  ConvArgs args{};
  std::vector<float*> x;
  float *kernel = nullptr, *bias = nullptr, *out = nullptr;
  int64_t outputs = 0;
  double* sums = nullptr;

  // x in [low, low + width), or 0 for a share of `zeros`. The buffers stay until the program ends.
  Buffers(int64_t images, int64_t height, int64_t width_of, int64_t channels, int64_t out_channels, int64_t window,
          bool has_bias, float low, float width, float zeros = 0.f) {
    args.images = images;
    args.channels = args.group_channels = channels;
    args.out_channels = out_channels;
    args.stacks = args.groups = 1;
    args.activation = Activation::kRelu;
    args.has_bias = has_bias;
    const int64_t size[2] = {height, width_of};
    for (int i = 0; i < 2; ++i) {
      args.size[i] = args.conv_size[i] = args.out_size[i] = size[i];
      args.kernel_size[i] = window;
      args.stride[i] = args.dilation[i] = args.window[i] = args.window_stride[i] = 1;
      args.pad_low[i] = window / 2;
    }
    outputs = images * height * width_of * out_channels;
    for (int i = 0; i < kInputs; ++i) {
      x.push_back(Allocate(images * height * width_of * channels, 1 + i, low, width, zeros));
    }
    kernel = Allocate(window * window * channels * out_channels, 77, -0.1f, 0.2f);
    if (has_bias) bias = Allocate(out_channels, 99, -1.f, 2.f);
    out = Allocate(outputs, 0, 0.f, 0.f);
    Check(cudaMalloc(&sums, 2 * sizeof(double)), "cudaMalloc");
  }
  DeviceCall Call(int input) const {
    DeviceCall call{};
    call.args = args;
    call.dtype = DataType::F32;
    call.x = x[input];
    call.kernel = kernel;
    call.bias = bias;
    call.out = out;
    return call;
  }
};

// Microseconds of launch(input), the median over replays of a graph of kCalls calls on inputs in turn.
template <typename Launch>
double Time(const Launch& launch, cudaStream_t stream) {
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  Check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  for (int i = 0; i < kCalls; ++i) launch(i % kInputs);
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
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  cudaGraphExecDestroy(replay);
  cudaGraphDestroy(graph);
  std::sort(times.begin(), times.end());
  return times[times.size() / 2] * 1000.0 / kCalls;
}

// Of launch(0), relative to the result's norm; 1e30 where it is not finite.
template <typename Launch>
double ErrorOf(const Buffers& b, const Launch& launch, cudaStream_t stream) {
  Check(cudaMemsetAsync(b.out, 0xff, b.outputs * sizeof(float), stream), "poison");  // NaN where nothing is written
  Check(cudaMemsetAsync(b.sums, 0, 2 * sizeof(double), stream), "cudaMemset");
  launch(0);
  Compare<<<1024, 128, 0, stream>>>(b.args, b.x[0], b.kernel, b.bias, b.out, b.sums);
  double sums[2];
  Check(cudaMemcpyAsync(sums, b.sums, sizeof(sums), cudaMemcpyDeviceToHost, stream), "cudaMemcpy");
  Check(cudaStreamSynchronize(stream), "check");
  const double error = std::sqrt(sums[0] / sums[1]);
  return std::isfinite(error) ? error : 1e30;
}

}  // namespace jsc

#endif  // JSC_BENCHMARKS_SUITES_ABLATION_CUH_
