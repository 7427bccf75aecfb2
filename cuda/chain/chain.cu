// A fused chain as a run of kernels, one per layer: those of the dense engines, a kernel for max pools, and at the end
// those of dense layers of one row (sparse/matvec/row.cuh). Details: docs/design/kernels/chain.md.
//
// Each kernel is launched by PDL, so it may start while the one in front runs, if all its blocks find room beside that
// one's, or where that one's leave (core/programmatic_launch.cuh). It makes its barriers and asks for its weights,
// which nothing before it writes. Then it waits for the end of the one in front before it reads a map or writes one.
// That one has waited likewise, so all before it are done too. A kernel that reads nothing of the one in front starts
// to multiply at once and waits before it writes. XLA orders whole calls, so only kernels of one call can overlap so.
//
// Bound by: each layer's own kernel. Lost: kernels that start whatever room there is (ResNet-50 at HIGHEST 359 us
// instead of 340: the few free SMs get most blocks of the next layer); kernels that let the next one start before they
// have waited themselves. Tests: tests/fusion/test_chains.py, tests/fusion/test_network_chains.py.
#include <algorithm>
#include <limits>
#include <optional>
#include <set>
#include <string>

#include "cuda/chain/pair.h"
#include "cuda/core/elements.cuh"
#include "cuda/core/low_parts.cuh"
#include "cuda/core/programmatic_launch.cuh"
#include "cuda/core/vectors.cuh"
#include "cuda/ffi/kernels.h"
#include "cuda/sparse/matvec/row.h"

namespace jsc {
namespace {

constexpr int kPoolThreads = 128, kPoolBytes = 16;  // of channels, a thread

template <typename T>
struct PoolTask {
  const T* x;                 // [N, H, W, C]
  T* out;                     // [N, Ho, Wo, C]
  T* low_out;                 // float32: as out, or null
  int height, width, pieces;  // of x, whose channels are so many pieces of kPoolBytes
  int window[2], stride[2], pad_low[2];
  int results;  // N * Ho * Wo * pieces
  Divider by_pieces, by_out_height, by_out_width;
};

// The maximum of each window, its padding left out; a thread has one piece of a pixel.
template <typename T>
__global__ void __launch_bounds__(kPoolThreads) MaxPoolKernel(const __grid_constant__ PoolTask<T> task) {
  constexpr int kValues = kPoolBytes / static_cast<int>(sizeof(T));
  WaitForKernelBefore();
  LetNextKernelStart();
  const int index = static_cast<int>(blockIdx.x) * kPoolThreads + static_cast<int>(threadIdx.x);
  if (index >= task.results) return;
  const Quotient pixel = Divide(index, task.by_pieces), row = Divide(pixel.quotient, task.by_out_width);
  const Quotient image = Divide(row.quotient, task.by_out_height);
  const int top = image.remainder * task.stride[0] - task.pad_low[0];
  const int left = row.remainder * task.stride[1] - task.pad_low[1];
  const int64_t channel = static_cast<int64_t>(pixel.remainder) * kValues;
  const int64_t row_pixels = task.width, channels = static_cast<int64_t>(task.pieces) * kValues;
  float most[kValues];
#pragma unroll
  for (float& v : most) v = -INFINITY;
  for (int y = max(top, 0); y < min(top + task.window[0], task.height); ++y) {
    for (int x = max(left, 0); x < min(left + task.window[1], task.width); ++x) {
      const int64_t at =
          ((static_cast<int64_t>(image.quotient) * task.height + y) * row_pixels + x) * channels + channel;
      const uint4 words = *reinterpret_cast<const uint4*>(task.x + at);
      const T* value = reinterpret_cast<const T*>(&words);
#pragma unroll
      for (int i = 0; i < kValues; ++i) most[i] = MaxOrNan(most[i], ToFloat(value[i]));
    }
  }
  T result[kValues];
#pragma unroll
  for (int i = 0; i < kValues; ++i) result[i] = FromFloat<T>(most[i]);
  const int64_t to = static_cast<int64_t>(index) * kValues;
  *reinterpret_cast<uint4*>(task.out + to) = *reinterpret_cast<const uint4*>(result);
  if constexpr (kValues == 4) {
    if (task.low_out) {
      *reinterpret_cast<float4*>(task.low_out + to) = LowPart(float4{most[0], most[1], most[2], most[3]});
    }
  }
}

template <typename T>
Error MaxPool(const ChainStep& step, void* low_out, Gate gate, Footprint* in_front, cudaStream_t stream) {
  constexpr int64_t kValues = kPoolBytes / static_cast<int64_t>(sizeof(T));
  PoolTask<T> task{};
  task.x = static_cast<const T*>(step.x.data);
  task.out = static_cast<T*>(step.out.data);
  task.low_out = static_cast<T*>(low_out);
  task.height = static_cast<int>(step.x.size[1]);
  task.width = static_cast<int>(step.x.size[2]);
  task.pieces = static_cast<int>(step.x.size[3] / kValues);
  for (int i = 0; i < 2; ++i) {
    task.window[i] = static_cast<int>(step.window[i]);
    task.stride[i] = static_cast<int>(step.stride[i]);
    task.pad_low[i] = static_cast<int>(step.pad_low[i]);
  }
  task.results = static_cast<int>(step.out.size[0] * step.out.size[1] * step.out.size[2] * task.pieces);
  task.by_pieces = Divider(task.pieces);
  task.by_out_height = Divider(step.out.size[1]);
  task.by_out_width = Divider(step.out.size[2]);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>((task.results + kPoolThreads - 1) / kPoolThreads));
  config.blockDim = dim3(kPoolThreads);
  config.stream = stream;
  gate.overlaps = MayOverlap<MaxPoolKernel<T>>(&config, in_front);
  LaunchAttributes attributes(0, gate);
  config.attrs = attributes.list;
  config.numAttrs = attributes.count;
  return CheckCuda(cudaLaunchKernelEx(&config, MaxPoolKernel<T>, task), "MaxPoolKernel");
}

DeviceCall CallOf(const ChainCall& call, const ChainStep& step) {
  DeviceCall conv{};
  ConvArgs& a = conv.args;
  a.images = step.x.size[0];
  a.channels = step.x.size[3];
  a.groups = step.groups;
  a.group_channels = a.channels / a.groups;
  a.stacks = 1;
  a.out_channels = step.out.size[3];
  for (int i = 0; i < 2; ++i) {
    a.size[i] = step.x.size[1 + i];
    a.kernel_size[i] = step.window[i];
    a.stride[i] = step.stride[i];
    a.pad_low[i] = step.pad_low[i];
    a.dilation[i] = step.dilation[i];
    a.conv_size[i] = a.out_size[i] = step.out.size[1 + i];
    a.window[i] = a.window_stride[i] = 1;
  }
  a.activation = step.relu ? Activation::kRelu : Activation::kNone;
  a.has_bias = step.bias != nullptr;
  a.has_residual = step.residual != nullptr;
  a.precision = call.precise ? Precision::kHighest : Precision::kDefault;
  conv.dtype = call.dtype;
  conv.x = step.x.data;
  conv.kernel = step.kernel;
  conv.bias = step.bias;
  conv.residual = step.residual;
  conv.out = step.out.data;
  conv.candidate = step.tile;
  return conv;
}

// The dense layer `index`, of one row.
Error DenseOf(const ChainCall& call, size_t index, int device, Footprint* in_front, cudaStream_t stream) {
  const ChainStep& step = call.steps[index];
  DeviceCall dense = CallOf(call, step);
  ConvArgs& a = dense.args;
  ChainRow row;
  row.averaged = step.window[0] * step.window[1];
  const ChainStep* before = index > 0 ? &call.steps[index - 1] : nullptr;
  row.behind_dense = before && before->kind == ChainKind::kDense && before->out.data == step.x.data;
  a.channels = a.group_channels = step.x.size[1] * step.x.size[2] * step.x.size[3] / row.averaged;
  for (int i = 0; i < 2; ++i) a.size[i] = a.kernel_size[i] = a.conv_size[i] = a.out_size[i] = a.stride[i] = 1;
  dense.in_front = in_front;
  const DeviceInfo& info = GetDeviceInfo(device);
  if (!IsDenseRow(dense, info)) {
    return Error(ErrorCode::kFailedPrecondition,
                 "layer " + std::to_string(index) + ": a dense layer of " + std::to_string(a.channels) + " to " +
                     std::to_string(a.out_channels) + " output channels has no kernel in chains on device " +
                     std::to_string(device));
  }
  return DenseRowInChain(dense, row, info, stream);
}

// Whether the convolution's kernel takes the pool that follows it; then `conv` has it. ChainTakesPool (chain/plans.cc)
// asks DirectPools the same before there are buffers, so that no more may count here than it is told.
bool TakePool(const ChainStep& pool, int device, DeviceCall* conv) {
  DeviceCall pooled = *conv;
  ConvArgs& a = pooled.args;
  const int64_t result[] = {a.images, a.conv_size[0], a.conv_size[1], a.out_channels};
  if (pool.kind != ChainKind::kMaxPool || pool.x.data != conv->out || a.has_residual ||
      !std::equal(result, result + 4, pool.x.size)) {
    return false;
  }
  a.pool = Pool::kMax;
  for (int i = 0; i < 2; ++i) {
    a.window[i] = pool.window[i];
    a.window_stride[i] = pool.stride[i];
    a.window_pad_low[i] = pool.pad_low[i];
    a.out_size[i] = pool.out.size[1 + i];
  }
  pooled.out = pool.out.data;
  if (!DirectPools(pooled, device)) return false;
  *conv = pooled;
  return true;
}

// What of the convolution that comes next, from steps[next] on, is to be in the L2 cache when it starts.
void LookAhead(const ChainCall& call, size_t next, Gate* gate) {
  constexpr uintptr_t kWhole = 16;  // bytes, of which TMA wants multiples
  while (next < call.steps.size() && call.steps[next].kind != ChainKind::kConv) ++next;
  if (next == call.steps.size()) return;
  const ChainStep& step = call.steps[next];
  const int64_t elements = step.window[0] * step.window[1] * (step.x.size[3] / step.groups) * step.out.size[3];
  const int64_t bytes = elements * static_cast<int64_t>(ByteWidth(call.dtype));
  if (reinterpret_cast<uintptr_t>(step.kernel) % kWhole != 0 || bytes > std::numeric_limits<int32_t>::max()) return;
  gate->ahead = step.kernel;
  gate->ahead_bytes = static_cast<uint32_t>(bytes / kWhole * kWhole);
}

bool IsPointwise(const ChainStep& step) {
  bool is = step.kind == ChainKind::kConv && step.groups == 1;
  for (int i = 0; i < 2; ++i) {
    is = is && step.window[i] == 1 && step.stride[i] == 1 && step.pad_low[i] == 0 && step.pad_high[i] == 0;
  }
  return is;
}

// Two layers as one kernel gets them, where both are 1x1 and the second multiplies the first's result.
std::optional<PairCall> PairOf(const ChainCall& call, size_t first) {
  if (first + 1 >= call.steps.size()) return std::nullopt;
  const ChainStep &step = call.steps[first], &next = call.steps[first + 1];
  if (!IsPointwise(step) || !IsPointwise(next) || next.residual != nullptr || step.out.data == nullptr ||
      next.out.data == nullptr || next.x.data != step.out.data ||
      !std::equal(next.x.size, next.x.size + 4, step.out.size)) {
    return std::nullopt;
  }
  PairCall pair{};
  pair.dtype = call.dtype;
  pair.precise = call.precise;
  pair.shape = {step.x.size[0] * step.x.size[1] * step.x.size[2], step.x.size[3], step.out.size[3], next.out.size[3]};
  pair.x = step.x.data;
  pair.kernel = step.kernel;
  pair.bias = step.bias;
  pair.residual = step.residual;
  pair.next_kernel = next.kernel;
  pair.next_bias = next.bias;
  pair.middle = step.out.data;
  pair.out = next.out.data;
  pair.low_x = step.x.low;  // where it is, if it is written
  pair.low_middle = step.out.low;
  pair.low_out = next.out.low;
  pair.relu = step.relu;
  pair.next_relu = next.relu;
  return SuitsPair(pair) ? std::optional(pair) : std::nullopt;
}

PairPlan PlanOf(const PairCall& pair, int device) {
  const bool tf32x3 = pair.dtype == DataType::F32 && pair.precise;
  return ChoosePairPlan(pair.shape, static_cast<int>(ByteWidth(pair.dtype)), tf32x3, GetDeviceInfo(device));
}

// Maps whose low parts are in memory, by where the maps are.
class Split {
 public:
  // Of a kernel's results, whether it writes their low parts.
  void Set(const void* map, bool is_split) {
    if (is_split) {
      maps_.insert(map);
    } else {
      maps_.erase(map);
    }
  }
  const void* LowOf(const ChainValue& x) const { return x.low && maps_.count(x.data) > 0 ? x.low : nullptr; }

 private:
  std::set<const void*> maps_;
};

}  // namespace

Error Chain(const ChainCall& call, int device, cudaStream_t stream) {
  Gate gate;
  gate.in_chain = true;
  Footprint in_front;
  Split split;
  const bool reads_low = GetDeviceInfo(device).wgmma;  // other kernels split what they read
  const auto low_of = [&](const ChainValue& out) { return reads_low ? out.low : nullptr; };
  const void *written = nullptr, *also_written = nullptr;  // by the kernel in front
  for (size_t i = 0; i < call.steps.size(); ++i) {
    const ChainStep& step = call.steps[i];
    Error error = Error::Success();
    if (step.kind == ChainKind::kMaxPool) {
      error = DispatchDtype(call.dtype, [&](auto element) {
        return MaxPool<decltype(element)>(step, low_of(step.out), gate, &in_front, stream);
      });
      written = also_written = step.out.data;
      split.Set(written, low_of(step.out) != nullptr);
    } else if (step.kind == ChainKind::kDense) {
      error = DenseOf(call, i, device, &in_front, stream);
      written = also_written = step.out.data;
      split.Set(written, false);
#ifdef JSC_WGMMA
    } else if (std::optional<PairCall> pair = PairOf(call, i); pair && PlanOf(*pair, device).blocks > 0) {
      ++i;
      pair->gate = gate;
      pair->in_front = &in_front;
      LookAhead(call, i + 1, &pair->gate);
      written = pair->middle, also_written = pair->out;
      pair->low_x = split.LowOf(step.x);
      error = LaunchPair(*pair, PlanOf(*pair, device), stream);
      split.Set(written, pair->low_middle != nullptr);
      split.Set(also_written, pair->low_out != nullptr);
#endif
    } else {
      DeviceCall conv = CallOf(call, step);
      conv.gate = gate;
      // Nothing but its pool reads the result of a convolution that has one: fusion/schedule.py makes two steps of
      // them.
      if (i + 1 < call.steps.size() && TakePool(call.steps[i + 1], device, &conv)) {
        ++i;
      } else if (conv.out == nullptr) {
        return Error(ErrorCode::kFailedPrecondition,
                     "layer " + std::to_string(i) + ": its kernel does not take the pool behind it on device " +
                         std::to_string(device) + ", and the call, which is for a device where it does, has no " +
                         "place for the map between them");
      }
      LookAhead(call, i + 1, &conv.gate);
      conv.gate.x_is_older = written != nullptr && written != conv.x && also_written != conv.x;
      written = also_written = conv.out;
      conv.in_front = &in_front;
      bool is_split = false;
      conv.low = {split.LowOf(step.x), low_of(call.steps[i].out), &is_split};
      error = Direct(conv, Workspace{nullptr, 0}, device, stream);
      split.Set(conv.out, is_split && conv.low.out != nullptr);
    }
    if (error.failure()) return error;
  }
  return Error::Success();
}

}  // namespace jsc
