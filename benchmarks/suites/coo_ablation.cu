// Times the COO* convolution with its micro-kernel (cuda/sparse/coo/micro.cuh) and with a direct translation of the
// loops of cuSNN's Listing 1 in its place, and prints a JSON object a line for each. Built and run by coo_ablation.py.
//
// Both share everything else: lists, weights that stream through shared memory, and the sums' way out. The plain loops
// index the sums by the entry's position, so that the compiler keeps them in local memory, as the paper says it does.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "cuda/sparse/coo/kernel.cuh"

namespace jsc {
namespace {

constexpr int kInputs = 4, kCalls = 20, kRepeats = 15;

void Check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(status));
  std::exit(1);
}

// Listing 1, lines 14 to 20: every entry of a list times the weights of its channel, into sums [pixel][out channel].
template <int kVariant>
__device__ __forceinline__ void PlainRun(const CooEntry* list, int entries, const float* weights, float* sums) {
  constexpr CooVariant kShape = kCooVariants[kVariant];
  constexpr int kR = kShape.kernel;
#pragma unroll 1
  for (int i = 0; i < entries; ++i) {
    const float value = list[i].value;
    const int position = static_cast<int>(list[i].position);
    const int h = position / kShape.patch_width(), w = position % kShape.patch_width();
#pragma unroll 1
    for (int y = max(0, h - kR + 1); y <= min(h, kShape.height - 1); ++y) {
#pragma unroll 1
      for (int x = max(0, w - kR + 1); x <= min(w, kShape.width - 1); ++x) {
        const float* tap = weights + (((h - y) * kR + w - x) * kWarp + threadIdx.x % kWarp) * kShape.out_channels;
        float* sum = sums + (y * kShape.width + x) * kShape.out_channels;
#pragma unroll
        for (int k = 0; k < kShape.out_channels; ++k) sum[k] += value * tap[k];
      }
    }
  }
}

// As MultiplyChunk, with the plain loops.
template <int kVariant>
__device__ __forceinline__ void PlainChunk(const CooTask<float>& task, const CooMemory<float, kVariant>& m, int first,
                                           float* sums) {
  using Memory = CooMemory<float, kVariant>;
  constexpr CooVariant kShape = kCooVariants[kVariant];
  const CooPlace b = LocateCoo<float, kVariant>(task);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, column = warp & (task.plan.out_channel_warps - 1);
  const int out_channel = b.out_channel + (column * kWarp + lane) * kShape.out_channels,
            valid = task.group_out_channels - out_channel;
  const float* rows = task.kernel + b.group * task.group_out_channels + out_channel +
                      (static_cast<int64_t>(b.stack) * kShape.taps() * task.group_channels + first) * task.out_channels;
  unsigned to_copy = ChannelsOfSlice(m.totals, warp / task.plan.out_channel_warps, task.plan.slices), to_run = to_copy;
#pragma unroll 1
  for (int step = -1; to_run != 0; ++step) {
    if (to_copy != 0) {
      const int channel = __ffs(to_copy) - 1;
      to_copy &= to_copy - 1;
      CopyCooWeights<float, kVariant>(task, m.weights + ((step + 1) & 1) * Memory::kStage,
                                      rows + static_cast<int64_t>(channel) * task.out_channels, valid);
    }
    CommitCopies();
    if (step >= 0) {
      WaitForCopies<1>();
      const int channel = __ffs(to_run) - 1;
      to_run &= to_run - 1;
      PlainRun<kVariant>(m.lists + channel * Memory::kPitch, m.totals[channel], m.weights + (step & 1) * Memory::kStage,
                         sums);
    }
  }
}

// CooKernel with sums of its own, of one split.
template <int kVariant>
__global__ void __launch_bounds__(kWarp* kCooVariants[kVariant].max_warps(), kCooVariants[kVariant].min_blocks())
    PlainKernel(const __grid_constant__ CooTask<float> task) {
  extern __shared__ __align__(128) unsigned char shared[];
  constexpr CooVariant kShape = kCooVariants[kVariant];
  constexpr int kSums = kShape.pixels() * kShape.out_channels;
  const CooMemory<float, kVariant> m(shared, blockDim.x / kWarp);
  float sums[kSums];
  for (int i = 0; i < kSums; ++i) sums[i] = 0.f;
  const CooPlace b = LocateCoo<float, kVariant>(task);
  int first = b.channel;
  if (first < b.channels_end) StageCooPatch<float, kVariant>(task, m.patch, first);
  CommitCopies();
#pragma unroll 1
  for (; first < b.channels_end; first += kCooChunk) {
    WaitForCopies<0>();
    __syncthreads();
    ConvertCoo<float, kVariant>(m);
    if (first + kCooChunk < b.channels_end) StageCooPatch<float, kVariant>(task, m.patch, first + kCooChunk);
    CommitCopies();
    PlainChunk<kVariant>(task, m, first, sums);
  }
  __syncthreads();
  auto* all = reinterpret_cast<float*>(shared);
  float* own = all + threadIdx.x / kWarp * kSums * kWarp + threadIdx.x % kWarp * kShape.out_channels;
  for (int i = 0; i < kSums; ++i) {
    own[i / kShape.out_channels * kWarp * kShape.out_channels + i % kShape.out_channels] = sums[i];
  }
  __syncthreads();
  const int slice_sums = task.plan.out_channel_warps * kSums * kWarp;
  FinishCoo<float, kVariant>(task, 0, 1, task.plan.slices,
                             [&](int slice, int i) { return Load4(all + slice * slice_sums + i); });
}

struct Layer {
  const char* name;
  int64_t size, channels, out_channels;
  int zeros;  // percent
};

// x[i] in (0, 1], or 0 for a share of them, by a hash of i and the seed; signed where the share is negative.
__global__ void Fill(float* values, int64_t count, unsigned seed, int zeros) {
  for (int64_t i = blockIdx.x * 256 + threadIdx.x; i < count; i += gridDim.x * 256) {
    unsigned h = static_cast<unsigned>(i) * 2654435761u ^ seed;
    h = (h ^ (h >> 16)) * 0x7feb352du;
    h = (h ^ (h >> 15)) * 0x846ca68bu;
    const float u = static_cast<float>((h ^ (h >> 16)) >> 8) / 16777216.f;
    values[i] = zeros < 0 ? u - 0.5f : u < zeros / 100.f ? 0.f : u;
  }
}

// sums[0] += |out - result|^2 and sums[1] += |result|^2, the result in float64 and with ReLU.
__global__ void Compare(Layer l, const float* x, const float* kernel, const float* out, double* sums) {
  const int64_t total = l.size * l.size * l.out_channels;
  for (int64_t i = blockIdx.x * 128 + threadIdx.x; i < total; i += gridDim.x * 128) {
    const int64_t k = i % l.out_channels, ox = i / l.out_channels % l.size, oy = i / l.out_channels / l.size;
    double sum = 0;
    for (int64_t tap = 0; tap < 9; ++tap) {
      const int64_t y = oy - 1 + tap / 3, at = ox - 1 + tap % 3;
      if (y < 0 || y >= l.size || at < 0 || at >= l.size) continue;
      for (int64_t c = 0; c < l.channels; ++c) {
        sum += static_cast<double>(x[(y * l.size + at) * l.channels + c]) *
               kernel[(tap * l.channels + c) * l.out_channels + k];
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
  float *kernel, *out;
  double* sums;
};

float* Allocate(int64_t count, unsigned seed, int zeros) {
  float* p = nullptr;
  Check(cudaMalloc(&p, count * sizeof(float)), "cudaMalloc");
  Fill<<<256, 256>>>(p, count, seed, zeros);
  return p;
}

Buffers MakeBuffers(const Layer& l) {
  Buffers b{};
  ConvArgs& a = b.args;
  a.images = a.stacks = a.groups = 1;
  a.channels = a.group_channels = l.channels;
  a.out_channels = l.out_channels;
  a.activation = Activation::kRelu;
  for (int i = 0; i < 2; ++i) {
    a.size[i] = a.conv_size[i] = a.out_size[i] = l.size;
    a.kernel_size[i] = 3;
    a.stride[i] = a.dilation[i] = a.window[i] = a.window_stride[i] = a.pad_low[i] = 1;
  }
  for (int i = 0; i < kInputs; ++i) b.x.push_back(Allocate(l.size * l.size * l.channels, 1 + i, l.zeros));
  b.kernel = Allocate(9 * l.channels * l.out_channels, 77, -1);
  b.out = Allocate(l.size * l.size * l.out_channels, 0, 0);
  Check(cudaMalloc(&b.sums, 2 * sizeof(double)), "cudaMalloc");
  return b;
}

template <int kVariant, bool kPlain>
void Launch(const Buffers& b, const CooPlan& plan, int input, cudaStream_t stream) {
  DeviceCall call{};
  call.args = b.args;
  call.dtype = ffi::DataType::F32;
  call.x = b.x[input];
  call.kernel = b.kernel;
  call.out = b.out;
  const CooTask<float> task = MakeCooTask<float>(call, plan, nullptr);
  if constexpr (kPlain) {
    Check(cudaFuncSetAttribute(PlainKernel<kVariant>, cudaFuncAttributeMaxDynamicSharedMemorySize, plan.shared_bytes),
          "cudaFuncSetAttribute");
    PlainKernel<kVariant><<<static_cast<unsigned>(plan.blocks), kWarp * plan.out_channel_warps * plan.slices,
                            plan.shared_bytes, stream>>>(task);
    Check(cudaGetLastError(), "PlainKernel");
  } else {
    const ffi::Error error = LaunchCoo<float, kVariant, false>(task, stream);
    if (error.failure()) {
      std::fprintf(stderr, "%s\n", error.message().c_str());
      std::exit(1);
    }
  }
}

// Microseconds of a call, the median over replays of a graph of kCalls calls on inputs in turn.
template <int kVariant, bool kPlain>
double Time(const Buffers& b, const CooPlan& plan, cudaStream_t stream) {
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  Check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  for (int i = 0; i < kCalls; ++i) Launch<kVariant, kPlain>(b, plan, i % kInputs, stream);
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

template <int kVariant, bool kPlain>
double Error(const Layer& l, const Buffers& b, const CooPlan& plan, cudaStream_t stream) {
  Check(cudaMemsetAsync(b.out, 0xff, l.size * l.size * l.out_channels * sizeof(float), stream), "poison");
  Check(cudaMemsetAsync(b.sums, 0, 2 * sizeof(double), stream), "cudaMemset");
  Launch<kVariant, kPlain>(b, plan, 0, stream);
  Compare<<<1024, 128, 0, stream>>>(l, b.x[0], b.kernel, b.out, b.sums);
  double sums[2];
  Check(cudaMemcpyAsync(sums, b.sums, sizeof(sums), cudaMemcpyDeviceToHost, stream), "cudaMemcpy");
  Check(cudaStreamSynchronize(stream), "check");
  return std::sqrt(sums[0] / sums[1]);
}

template <int kVariant, bool kPlain>
void Report(const Layer& l, const Buffers& b, const CooPlan& plan, cudaStream_t stream) {
  constexpr CooVariant kShape = kCooVariants[kVariant];
  cudaFuncAttributes found;
  if constexpr (kPlain) {
    Check(cudaFuncGetAttributes(&found, PlainKernel<kVariant>), "cudaFuncGetAttributes");
  } else {
    Check(cudaFuncGetAttributes(&found, CooKernel<float, kVariant, false>), "cudaFuncGetAttributes");
  }
  const double error = Error<kVariant, kPlain>(l, b, plan, stream);
  std::printf(
      "{\"layer\": \"%s\", \"zeros_percent\": %d, \"kernel\": \"%s\", \"tile\": \"%dx%dx%d\", "
      "\"out_channel_warps\": %d, \"slices\": %d, \"local_bytes\": %d, \"registers\": %d, \"us\": %.4f, "
      "\"error\": %.3e}\n",
      l.name, l.zeros, kPlain ? "plain" : "micro-kernel", kShape.height, kShape.width, kShape.out_channels,
      plan.out_channel_warps, plan.slices, static_cast<int>(found.localSizeBytes), found.numRegs,
      Time<kVariant, kPlain>(b, plan, stream), std::isfinite(error) ? error : 1e30);
  std::fflush(stdout);
}

template <int kVariant>
void Both(const Layer& l, const Buffers& b, cudaStream_t stream) {
  for (const int warps : {1, 2}) {
    for (const int slices : {1, 4}) {
      CooPlan plan{};
      plan.variant = kVariant;
      plan.out_channel_warps = warps;
      plan.slices = slices;
      plan.splits = 1;
      if (!CompleteCooPlan(b.args, sizeof(float), 0, GetDeviceInfo(0), &plan).empty()) continue;
      Report<kVariant, false>(l, b, plan, stream);
      Report<kVariant, true>(l, b, plan, stream);
    }
  }
}

}  // namespace
}  // namespace jsc

int main() {
  // The 3x3 layers of DenseNet-201 and ResNet-152, with the zeros that their maps have.
  const jsc::Layer layers[] = {
      {"DenseNet block 1", 56, 128, 32, 50}, {"DenseNet block 2", 28, 128, 32, 70},
      {"DenseNet block 3", 14, 128, 32, 80}, {"DenseNet block 4", 7, 128, 32, 90},
      {"ResNet conv2", 56, 64, 64, 50},      {"ResNet conv3", 28, 128, 128, 70},
      {"ResNet conv4", 14, 256, 256, 80},    {"ResNet conv5", 7, 512, 512, 90},
  };
  cudaStream_t stream;
  jsc::Check(cudaStreamCreate(&stream), "cudaStreamCreate");
  for (const jsc::Layer& layer : layers) {
    const jsc::Buffers buffers = jsc::MakeBuffers(layer);
    jsc::Both<0>(layer, buffers, stream);
    jsc::Both<1>(layer, buffers, stream);
    jsc::Both<2>(layer, buffers, stream);
    jsc::Both<3>(layer, buffers, stream);
  }
  return 0;
}
