// Times the COO* convolution with its micro-kernel (cuda/sparse/coo/micro.cuh) and with a direct translation of the
// loops of cuSNN's Listing 1 in its place, and prints a JSON object a line for each. Built and run by
// benchmarks/paper/cusnn/microkernel.py.
//
// Both share everything else: lists, weights that stream through shared memory, and the sums' way out. The plain loops
// index the sums by the entry's position, so that the compiler keeps them in local memory, as the paper says it does.
#include "benchmarks/suites/ablation.cuh"
#include "cuda/sparse/coo/kernel.cuh"

namespace jsc {
namespace {

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
    WithWeights<float, kVariant>(task, m, first, [&](int channel, const float* weights) {
      const CooEntry* list = m.lists + channel * CooMemory<float, kVariant>::kPitch;
      PlainRun<kVariant>(list, m.totals[channel], weights, sums);
    });
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

template <int kVariant, bool kPlain>
void Launch(const Buffers& b, const CooPlan& plan, int input, cudaStream_t stream) {
  const CooTask<float> task = MakeCooTask<float>(b.Call(input), plan, nullptr);
  if constexpr (kPlain) {
    Check(cudaFuncSetAttribute(PlainKernel<kVariant>, cudaFuncAttributeMaxDynamicSharedMemorySize, plan.shared_bytes),
          "cudaFuncSetAttribute");
    PlainKernel<kVariant><<<static_cast<unsigned>(plan.blocks), kWarp * plan.out_channel_warps * plan.slices,
                            plan.shared_bytes, stream>>>(task);
    Check(cudaGetLastError(), "PlainKernel");
  } else {
    Check(LaunchCoo<float, kVariant, false>(task, stream));
  }
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
  const auto launch = [&](int input) { Launch<kVariant, kPlain>(b, plan, input, stream); };
  const double error = ErrorOf(b, launch, stream);
  std::printf(
      "{\"layer\": \"%s\", \"zeros_percent\": %d, \"kernel\": \"%s\", \"tile\": \"%dx%dx%d\", "
      "\"out_channel_warps\": %d, \"slices\": %d, \"local_bytes\": %d, \"registers\": %d, \"us\": %.4f, "
      "\"error\": %.3e}\n",
      l.name, l.zeros, kPlain ? "plain" : "micro-kernel", kShape.height, kShape.width, kShape.out_channels,
      plan.out_channel_warps, plan.slices, static_cast<int>(found.localSizeBytes), found.numRegs, Time(launch, stream),
      error);
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
    const jsc::Buffers buffers(1, layer.size, layer.size, layer.channels, layer.out_channels, 3, /*has_bias=*/false,
                               /*low=*/0.f, /*width=*/1.f, layer.zeros / 100.f);
    jsc::Both<0>(layer, buffers, stream);
    jsc::Both<1>(layer, buffers, stream);
    jsc::Both<2>(layer, buffers, stream);
    jsc::Both<3>(layer, buffers, stream);
  }
  return 0;
}
