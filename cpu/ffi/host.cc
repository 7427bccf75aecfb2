#include "cpu/ffi/host.h"

#include <algorithm>
#include <atomic>

#include "cpu/core/amx.h"
#include "cpu/core/caches.h"
#include "cpu/ffi/tasks.h"
#include "cpu/plan/ceil_div.h"
#include "cpu/plan/plan.h"
#include "cpu/plan/plan_cache.h"

namespace jsc {
namespace {

#ifdef JSC_X86
bool Supported(const Isa& isa) {
  if (&isa == &kAvx512) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512cd");
  }
  // f16c and the bit instructions came with or before AVX2 in every processor that has it.
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
}
#endif

// Best first.
std::vector<const Isa*> Available() {
  std::vector<const Isa*> found;
#ifdef JSC_X86
  for (const Isa* isa : {&kAvx512, &kAvx2}) {
    if (Supported(*isa)) found.push_back(isa);
  }
#endif
  found.push_back(&kPortable);
  return found;
}

std::atomic<const Isa*>& Current() {
  static std::atomic<const Isa*> current{Available().front()};
  return current;
}

Machine ThisMachine(const Isa& isa, int64_t threads) {
  static const int64_t l1 = CacheBytesOfThread(1), l2 = CacheBytesOfThread(2);
  return {l1, l2, isa.vector_bytes, threads, isa.many_registers, MultipliesPairs(), MultipliesTiles()};
}

// That of a map that is scaled when it is read: of some channels of some pixels.
double ScaledDensity(const ConvCall& call) {
  constexpr int64_t kPixels = 64, kChannels = 16;
  const ConvArgs& a = call.args;
  const Scaled& scaled = call.scaled;
  const auto *x = static_cast<const float*>(call.x), *scale = static_cast<const float*>(scaled.scale),
             *shift = static_cast<const float*>(scaled.shift);
  const int64_t pixels = a.images * a.size[0] * a.size[1], step = pixels / kPixels + 1;
  const int64_t channels = std::min(kChannels, a.group_channels);
  int64_t some = 0, all = 0;
  for (int64_t pixel = 0, first = 0; pixel < pixels; pixel += step, first += channels) {
    if (first + channels > a.group_channels) first = 0;
    const int64_t image = pixel / (a.size[0] * a.size[1]), row = pixel / a.size[1] % a.size[0];
    const float* const corner =
        x + ((image * scaled.size[0] + row * scaled.window) * scaled.size[1] + pixel % a.size[1] * scaled.window) *
                a.channels;
    for (int64_t c = first; c < first + channels; ++c, ++all) {
      bool positive = false;
      for (int64_t y = 0; y < scaled.window; ++y) {
        for (int64_t column = 0; column < scaled.window; ++column) {
          const float value = corner[(y * scaled.size[1] + column) * a.channels + c];
          positive |= !(value * scale[c] + shift[c] <= 0);
        }
      }
      some += positive;
    }
  }
  return static_cast<double>(some) / static_cast<double>(std::max<int64_t>(1, all));
}

// Fraction of non-zeros of a call's map.
double SampleDensity(const Isa& isa, int dtype, const ConvCall& call) {
  if (call.scaled.scale != nullptr) return ScaledDensity(call);
  const ConvArgs& a = call.args;
  return SampledDensity(isa, dtype, call.x, a.images * a.size[0] * a.size[1] * a.channels);
}

bool IsDepthwise(const ConvArgs& a) { return a.groups > 1 && a.group_channels == 1 && a.out_channels == a.groups; }

// Tasks of `rows` rows of the result, four a thread: bands of no fewer rows than `least`, as neighbours choose in the
// windows that they share, and channels in parts where images and bands are few.
ffi::Error RunMaxPool(ffi::ThreadPool& pool, const MaxPoolCall& call, int64_t rows, int64_t least,
                      int64_t (*bytes)(const MaxPoolTask&), void (*run)(const MaxPoolTask&, char*)) {
  constexpr int64_t kElements = 1 << 14;  // of x, for each thread: below that waking it takes longer
  const ConvArgs& a = call.args;
  if (a.images * rows * a.channels == 0) return ffi::Error::Success();
  Team team(pool);
  const int64_t size = a.images * a.size[0] * a.size[1] * a.channels;
  const int64_t threads = std::clamp<int64_t>(size / kElements, 1, team.threads());
  const int64_t wanted = CeilDiv(threads == 1 ? 1 : 4 * threads, a.images);
  const int64_t bands = std::clamp<int64_t>(rows / least, 1, wanted), height = CeilDiv(rows, bands);
  const int64_t parts = std::clamp<int64_t>(wanted / bands, 1, CeilDiv(a.channels, 64));
  const int64_t channels = CeilDiv(CeilDiv(a.channels, parts), 64) * 64;
  const int64_t cuts = std::max<int64_t>(1, a.channels / channels), cuts_of_rows = CeilDiv(rows, height);
  const auto make = [&](Taken taken, int64_t) {
    const int64_t cut = taken.begin % cuts, rest = taken.begin / cuts, row = rest % cuts_of_rows * height;
    return MaxPoolTask{&call,
                       rest / cuts_of_rows,
                       row,
                       std::min(row + height, rows),
                       cut * channels,
                       cut + 1 < cuts ? (cut + 1) * channels : a.channels};
  };
  return RunTasks(team, threads, a.images * cuts_of_rows * cuts, make, bytes, run);
}

bool Empty(const ConvArgs& a) { return a.images * a.out_size[0] * a.out_size[1] * a.out_channels == 0; }

}  // namespace

const Isa& CurrentIsa() { return *Current(); }

bool MultipliesPairs() {
#ifdef JSC_X86
  static const bool supported = __builtin_cpu_supports("avx512bf16");
  return supported && CurrentIsa().pairs.pixels != nullptr;
#else
  return false;
#endif
}

bool MultipliesTiles() { return MultipliesPairs() && HasAmx(); }

std::vector<std::string> AvailableIsas() {
  std::vector<std::string> names;
  for (const Isa* isa : Available()) names.push_back(isa->name);
  return names;
}

bool SetIsa(const std::string& name) {
  for (const Isa* isa : Available()) {
    if (isa->name == name) {
      Current() = isa;
      return true;
    }
  }
  return false;
}

ffi::Error RunConvCall(ffi::ThreadPool& pool, const ConvCall& call) {
  Team team(pool);
  return RunConvCall(team, call);
}

ffi::Error RunConvCall(Team& team, const ConvCall& call) {
  const int dtype = IndexOf(call.dtype);
  if (dtype < 0) return UnsupportedDtype();
  if (Empty(call.args)) return ffi::Error::Success();
  const Isa& isa = CurrentIsa();
  const Machine machine = ThisMachine(isa, team.threads());
  const int64_t accumulator_bytes = dtype == kFloat64 ? 8 : 4;
  if (IsDepthwise(call.args)) {
    ConvCall flat = call;  // all channels as one group whose kernel has one input channel
    flat.args.groups = 1;
    const ConvPlan plan = MakePlan(flat.args, machine, accumulator_bytes, 1);
    const auto make = [&](Taken taken, int64_t) { return TaskAt(flat, plan, taken.begin); };
    return RunTasks(team, machine.threads, plan.tasks, make, isa.depthwise_bytes[dtype], isa.depthwise[dtype]);
  }
  const PlanKey key(call, machine, accumulator_bytes);
  team.Invite(ExpectedThreads(key) - 1);
  const ConvPlan plan = CachedPlan(key, call, machine, accumulator_bytes, SampleDensity(isa, dtype, call));
  const ConvCall planned = plan.pairs ? AsPairs(call) : WithoutPairs(call);
  const auto make = [&](Taken taken, int64_t previous) {
    ConvTask task = TaskAt(planned, plan, taken.begin);
    task.block_end = TaskAt(planned, plan, taken.end - 1).block_end;
    task.lists_ready = previous >= 0 && previous / plan.block_tiles == taken.begin / plan.block_tiles;
    return task;
  };
  const PairLoops singles = {isa.pixel_bytes[dtype], isa.pixels[dtype],       isa.phase_bytes[dtype],
                             isa.phases[dtype],      isa.direct_bytes[dtype], isa.direct[dtype]};
  const PairLoops& of = plan.pairs ? isa.pairs : singles;
  switch (plan.loop) {
    case ConvLoop::kScatter:
      return RunTasks(team, machine.threads, plan.tasks, make, isa.scatter_bytes[dtype], isa.scatter[dtype]);
    case ConvLoop::kDirect:
      return RunTasks(team, machine.threads, plan.tasks, make, of.direct_bytes, of.direct);
    case ConvLoop::kDots:
      return RunTasks(team, machine.threads, plan.tasks, make, isa.dot_bytes[dtype], isa.dots[dtype]);
    case ConvLoop::kPhases:
      return RunTasks(team, machine.threads, plan.tasks, make, of.phase_bytes, of.phases);
    case ConvLoop::kAmx:
      return RunTasks(team, machine.threads, plan.tasks, make, of.amx_bytes, of.amx);
    case ConvLoop::kEmulatedAmx:
      return RunTasks(team, machine.threads, plan.tasks, make, of.amx_bytes, of.emulated_amx);
    case ConvLoop::kWinograd:
      return RunTasks(team, machine.threads, plan.tasks, make, isa.winograd_bytes, isa.winograd);
    case ConvLoop::kPixels:
      return RunTasks(team, machine.threads, plan.tasks, make, of.pixel_bytes, of.pixels,
                      {CeilDiv(plan.sweep_blocks, plan.task_blocks), plan.block_tiles});
    default:
      return RunTasks(team, machine.threads, plan.tasks, make, isa.conv_bytes[dtype], isa.conv[dtype]);
  }
}

ffi::Error RunCooCall(ffi::ThreadPool& pool, const ConvCall& call, const CooLists* lists) {
  const int dtype = IndexOf(call.dtype);
  if (dtype < 0) return UnsupportedDtype();
  const ConvArgs& a = call.args;
  if (Empty(a)) return ffi::Error::Success();
  const CooVariant* shape = nullptr;
  for (const CooVariant& variant : kCooVariants) {
    if (shape == nullptr && CooCovers(variant, a)) shape = &variant;
  }
  if (shape == nullptr) {
    return ffi::Error(ffi::ErrorCode::kInvalidArgument,
                      "jsc_coo has no variant for this kernel, stride, dilation or pool");
  }
  const Isa& isa = CurrentIsa();
  Team team(pool);
  const int64_t threads = team.threads();
  const int64_t rows = (a.conv_size[0] + shape->height - 1) / shape->height;
  // Output channels are cut only where there are fewer rows of tiles than threads: each part lists x again.
  const int64_t out_channels = a.out_channels / a.groups, wholes = a.images * a.groups * rows;
  const int64_t wanted = std::clamp<int64_t>(2 * threads / wholes, 1, 64);
  const int64_t part = std::max<int64_t>(64, (out_channels / wanted + 63) / 64 * 64);
  const int64_t parts = (out_channels + part - 1) / part;
  const auto make = [&](Taken taken, int64_t) {
    int64_t index = taken.begin;
    CooRow row{&call, shape, lists, 0, 0, 0, 0, 0, 0};
    const auto take = [&index](int64_t count) {
      const int64_t digit = index % count;
      index /= count;
      return digit;
    };
    row.out_channel_begin = take(parts) * part;
    row.out_channel_end = std::min(row.out_channel_begin + part, out_channels);
    row.tile_row = take(rows);
    row.group = take(a.groups);
    row.image = index;
    row.stack = row.image / (a.images / a.stacks);
    return row;
  };
  return RunTasks(team, threads, wholes * parts, make, isa.coo_bytes[dtype], isa.coo[dtype]);
}

ffi::Error RunDirectCall(ffi::ThreadPool& pool, const ConvCall& call) {
  const int dtype = IndexOf(call.dtype);
  if (dtype < 0) return UnsupportedDtype();
  if (Empty(call.args)) return ffi::Error::Success();
  const Isa& isa = CurrentIsa();
  Team team(pool);
  const Machine machine = ThisMachine(isa, team.threads());
  const bool depthwise = IsDepthwise(call.args);
  ConvCall flat = WithoutPairs(call);
  if (depthwise) flat.args.groups = 1;  // all channels as one group whose kernel has one input channel
  const ConvPlan plan = MakeDirectPlan(flat, machine, dtype == kFloat64 ? 8 : 4);
  const auto make = [&](Taken taken, int64_t) { return TaskAt(flat, plan, taken.begin); };
  return RunTasks(team, machine.threads, plan.tasks, make, (depthwise ? isa.depthwise_bytes : isa.direct_bytes)[dtype],
                  (depthwise ? isa.direct_depthwise : isa.direct)[dtype]);
}

ffi::Error RunDenseCall(ffi::ThreadPool& pool, const ConvCall& call) {
  const int dtype = IndexOf(call.dtype);
  if (dtype < 0) return UnsupportedDtype();
  const ConvArgs& a = call.args;
  if (Empty(a)) return ffi::Error::Success();
  const bool one_pixel =
      a.size[0] * a.size[1] * a.kernel_size[0] * a.kernel_size[1] * a.out_size[0] * a.out_size[1] == 1;
  constexpr int64_t kMaxRows = 32;
  if (!one_pixel || a.groups != 1 || a.pool != Pool::kNone || a.pad_low[0] != 0 || a.pad_low[1] != 0 ||
      a.images / a.stacks > kMaxRows) {
    return RunConvCall(pool, call);
  }
  const Isa& isa = CurrentIsa();
  Team team(pool);
  const Machine machine = ThisMachine(isa, team.threads());
  // Columns in whole cache lines of 16 elements; two tasks a thread even out what else runs on the machine.
  const int64_t wanted = (a.out_channels + 2 * machine.threads - 1) / (2 * machine.threads);
  const int64_t columns = std::clamp<int64_t>((wanted + 63) / 64 * 64, 256, 4096);
  const int64_t parts = (a.out_channels + columns - 1) / columns;
  const auto make = [&](Taken taken, int64_t) {
    const int64_t begin = taken.begin % parts * columns;
    return DenseTask{&call, taken.begin / parts, begin, std::min(begin + columns, a.out_channels)};
  };
  return RunTasks(team, machine.threads, a.stacks * parts, make, isa.dense_bytes[dtype], isa.dense[dtype]);
}

ffi::Error RunMaxPoolGradientCall(ffi::ThreadPool& pool, DataType data_type, const MaxPoolCall& call) {
  const int dtype = IndexOf(data_type);
  if (dtype < 0) return UnsupportedDtype();
  const ConvArgs& a = call.args;
  const Isa& isa = CurrentIsa();
  const int64_t least = std::max<int64_t>(8, 2 * a.window[0]);
  return RunMaxPool(pool, call, a.size[0], least, isa.max_pool_gradient_bytes[dtype], isa.max_pool_gradient[dtype]);
}

ffi::Error RunMaxPoolTangentCall(ffi::ThreadPool& pool, DataType data_type, const MaxPoolCall& call) {
  const int dtype = IndexOf(data_type);
  if (dtype < 0) return UnsupportedDtype();
  const Isa& isa = CurrentIsa();
  return RunMaxPool(pool, call, call.args.out_size[0], 1, isa.max_pool_tangent_bytes[dtype],
                    isa.max_pool_tangent[dtype]);
}

}  // namespace jsc
