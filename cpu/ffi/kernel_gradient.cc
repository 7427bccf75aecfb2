#include <algorithm>

#include "cpu/ffi/host.h"
#include "cpu/ffi/tasks.h"
#include "cpu/ffi/turned_kernel.h"
#include "cpu/plan/ceil_div.h"

namespace jsc {
namespace {

ffi::Error RunAsGiven(Team& team, const Isa& isa, int dtype, const KernelGradientCall& call) {
  const ConvArgs& a = call.args;
  const int64_t threads = team.threads();
  // Two tasks a thread, of input channels and then of output channels: each part of those lists x again, and each part
  // of input channels copies the cotangent.
  const int64_t out_channels = a.out_channels / a.groups, wanted = CeilDiv(2 * threads, call.chunks);
  const int64_t most = std::clamp<int64_t>(CeilDiv(a.group_channels * a.groups, wanted), 16, 64);
  const int64_t parts = CeilDiv(a.group_channels, most), channels = CeilDiv(a.group_channels, parts);
  const int64_t out_parts = std::clamp<int64_t>(wanted / (parts * a.groups), 1, CeilDiv(out_channels, 64));
  const int64_t columns = CeilDiv(CeilDiv(out_channels, out_parts), 32) * 32;
  const int64_t cuts = CeilDiv(out_channels, columns);
  const auto make = [&](Taken taken, int64_t) {
    const int64_t cut = taken.begin % cuts, part = taken.begin / cuts % parts, rest = taken.begin / cuts / parts;
    const int64_t first = part * channels, column = cut * columns;
    return KernelGradientTask{&call,
                              rest / a.groups,
                              rest % a.groups,
                              std::min(first, a.group_channels),
                              std::min(first + channels, a.group_channels),
                              column,
                              std::min(column + columns, out_channels)};
  };
  return RunTasks(team, threads, call.chunks * a.groups * parts * cuts, make, isa.kernel_gradient_bytes[dtype],
                  isa.kernel_gradient[dtype]);
}

// With x and the cotangent in each other's place: kernel[t][c][k] is then found at [taps - 1 - t][k][c].
KernelGradientCall Swapped(const KernelGradientCall& call, void* out) {
  KernelGradientCall swapped{call.args, call.cotangent, call.x, call.chunks, out};
  ConvArgs& a = swapped.args;
  std::swap(a.channels, a.out_channels);
  a.group_channels = a.channels;
  for (int i = 0; i < 2; ++i) {
    std::swap(a.size[i], a.conv_size[i]);
    a.pad_low[i] = (a.kernel_size[i] - 1) * a.dilation[i] - a.pad_low[i];
  }
  return swapped;
}

// Whether the cotangent has so many more zeros than x that its non-zeros are the ones to go through.
bool IsToBeSwapped(const Isa& isa, int dtype, const KernelGradientCall& call) {
  constexpr int64_t kMostColumns = 4096;  // as of x (primitive/cpu_gradient.py)
  constexpr double kGain = 0.8, kTurning = 0.25;
  const ConvArgs& a = call.args;
  if (a.groups != 1 || a.stride[0] != 1 || a.stride[1] != 1 || a.conv_size[1] > kMostColumns) return false;
  const int64_t pixels = a.images * a.size[0] * a.size[1], results = a.images * a.conv_size[0] * a.conv_size[1];
  // Vectors of a tap: each non-zero meets those of the other side's channels, at least two of 16.
  const auto vectors = [](int64_t channels) { return static_cast<double>(CeilDiv(channels, 32) * 2); };
  const double of_x = SampledDensity(isa, dtype, call.x, pixels * a.channels);
  const double of_cotangent = SampledDensity(isa, dtype, call.cotangent, results * a.out_channels);
  const double as_given = of_x * static_cast<double>(pixels * a.channels) * vectors(a.out_channels);
  const double swapped = of_cotangent * static_cast<double>(results * a.out_channels) * vectors(a.channels);
  const double turned = kTurning * static_cast<double>(call.chunks * a.channels * a.out_channels);
  return swapped + turned < kGain * as_given;
}

// out[chunk][t][c][k] = sums[chunk][taps - 1 - t][k][c]
TurnedKernelCall Turned(const KernelGradientCall& call, const void* sums, int64_t element_bytes) {
  const ConvArgs& a = call.args;
  TurnedKernelCall turned{};
  turned.stacks = call.chunks;
  for (int i = 0; i < 2; ++i) {
    turned.size[i] = turned.count[i] = a.kernel_size[i];
    turned.first[i] = a.kernel_size[i] - 1;
    turned.step[i] = -1;
  }
  turned.groups = 1;
  turned.channels = a.out_channels;
  turned.out_channels = a.channels;
  turned.element_bytes = element_bytes;
  turned.kernel = sums;
  turned.out = call.out;
  return turned;
}

}  // namespace

ffi::Error RunKernelGradientCall(ffi::ThreadPool& pool, DataType data_type, const KernelGradientCall& call) {
  const int dtype = IndexOf(data_type);
  if (dtype < 0) return UnsupportedDtype();
  const Isa& isa = CurrentIsa();
  Team team(pool);
  if (!IsToBeSwapped(isa, dtype, call)) return RunAsGiven(team, isa, dtype, call);
  const ConvArgs& a = call.args;
  const int64_t element = data_type == DataType::F64 ? 8 : 4;
  const int64_t bytes = element * call.chunks * a.kernel_size[0] * a.kernel_size[1] * a.channels * a.out_channels;
  static thread_local KeptMemory memory;
  bool kept;
  char* sums = memory.Take(bytes, kept);
  if (sums == nullptr) return RunAsGiven(team, isa, dtype, call);
  const ffi::Error error = RunAsGiven(team, isa, dtype, Swapped(call, sums));
  if (error.failure()) return error;
  RunTurnedKernelCall(team, Turned(call, sums, element));
  return ffi::Error::Success();
}

}  // namespace jsc
