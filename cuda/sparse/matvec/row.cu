// Chooses the tiles of dense layers of one row (sparse/matvec/row.cuh), as sparse/matvec/rows.cu does of several rows,
// and launches them.
#include "cuda/sparse/matvec/row.h"

#include <algorithm>

#include "cuda/sparse/matvec/row.cuh"

namespace jsc {
namespace {

// Segments of 2^lane_shift lanes, and blocks of a cluster to share the channels.
template <typename T>
int64_t CompleteRowTask(int lane_shift, int part_shift, DenseRowTask<T>* task) {
  const int out_channels = kLaneOutChannels<T> << lane_shift, groups = kWarp >> lane_shift;
  const int batch = kDenseRun * groups, parts = 1 << part_shift;
  task->lane_shift = lane_shift;
  task->part_shift = part_shift;
  const int pieces = (task->channels + (1 << kPieceShift) - 1) >> kPieceShift;
  const int share = (pieces + parts - 1) / parts << kPieceShift;  // channels of a block at most
  const int of_warp = (std::min(share, task->channels) + kDenseWarps - 1) / kDenseWarps;
  task->first = std::min(batch, (of_warp + kDenseRun - 1) / kDenseRun * kDenseRun);
  task->ring = kWarp;
  while (task->ring < batch + kRowRuns * kWarp) task->ring *= 2;
  task->x_at = kDenseWarps * task->ring * kRowEntryBytes;
  task->partials_at = task->x_at + share * static_cast<int>(sizeof(T));
  const int partials = kDenseWarps * groups * (out_channels + 4) * static_cast<int>(sizeof(float));
  task->barriers_at = task->partials_at + (task->pixels > 0 ? std::max(partials, kAverageBytes) : partials);
  return (task->out_channels + out_channels - 1) / out_channels;
}

template <typename T>
size_t SharedBytes(const DenseRowTask<T>& task) {
  const int out_channels = kLaneOutChannels<T> << task.lane_shift;
  return task.barriers_at + kRowBarrierBytes + out_channels * static_cast<int>(sizeof(float));
}

// As ChooseTiles. What averages its input reads its share of a map, so the largest clusters share the channels, if all
// run at once (AverageParts). Behind a dense layer, where a few scattered kernel rows are read, segments of float32 are
// whole lines of the cache. In 16 bits that gained nothing, and without zeros cost 8 us of VGG-19's 226: 16 blocks had
// its last layer.
template <typename T>
int64_t ChooseRowTiles(const DeviceInfo& device, int64_t stacks, bool behind_dense, DenseRowTask<T>* task) {
  constexpr int kMostPartShift = 3, kLeast = DenseRows<1>::kMinLaneShift;
  static_assert(kMaxParts == 1 << kMostPartShift);
  for (int shift = kLeast; task->pixels > 0 && shift <= kMaxLaneShift; ++shift) {
    const int64_t tiles = CompleteRowTask<T>(shift, kMostPartShift, task);
    if (tiles <= device.clusters[kMaxParts]) return tiles;
  }
  const int64_t bytes = static_cast<int64_t>(task->channels) * task->out_channels * sizeof(T);
  for (int lines = bytes >= kVeryLongStream ? 1 : 0; bytes >= kLongStream && lines >= 0; --lines) {
    const int shift = kLineShift + lines;
    const int64_t tiles = CompleteRowTask<T>(shift, 0, task);
    int part_shift = 0;
    while (2 << part_shift <= kMaxParts && tiles * stacks <= device.clusters[2 << part_shift]) ++part_shift;
    const int64_t blocks = tiles * stacks << part_shift;
    CompleteRowTask<T>(shift, part_shift, task);
    if (blocks <= device.multiprocessors && 10 * blocks >= 9 * device.multiprocessors) return tiles;
  }
  for (int shift = behind_dense && sizeof(T) == 4 ? kLineShift : kLeast; shift <= kMaxLaneShift; ++shift) {
    const int64_t tiles = CompleteRowTask<T>(shift, 0, task);
    if (tiles * stacks <= device.multiprocessors) return tiles;
  }
  return CompleteRowTask<T>(kMaxLaneShift, 0, task);
}

template <typename T, bool kInChain>
Error LaunchDenseRow(const DeviceCall& call, const ChainRow& row, const DeviceInfo& device, cudaStream_t stream) {
  constexpr auto kKernel = DenseRowKernel<T, kInChain>;
  const ConvArgs& a = call.args;
  DenseRowTask<T> task{};
  task.x = static_cast<const T*>(call.x);
  task.kernel = static_cast<const T*>(call.kernel);
  task.bias = static_cast<const T*>(call.bias);
  task.residual = static_cast<const T*>(call.residual);
  task.out = static_cast<T*>(call.out);
  task.channels = static_cast<int>(a.channels);
  task.out_channels = static_cast<int>(a.out_channels);
  task.row_pieces = static_cast<int>(a.out_channels / kLaneOutChannels<T>);
  task.relu = a.activation == Activation::kRelu;
  task.pixels = row.averaged > 1 ? static_cast<int>(row.averaged) : 0;
  const int64_t tiles = ChooseRowTiles<T>(device, a.stacks, row.behind_dense, &task);
  if (row.behind_dense) task.first = 0;  // most of them would be of zeros, and x would wait for them
  Error error = Prepare<kKernel>("DenseRowKernel");
  if (error.failure()) return error;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(tiles << task.part_shift), static_cast<unsigned>(a.stacks));
  config.blockDim = dim3(kRowThreads);
  config.dynamicSmemBytes = SharedBytes<T>(task);
  config.stream = stream;
  Gate gate;
  gate.overlaps = kInChain && MayOverlap<kKernel>(&config, call.in_front);
  LaunchAttributes attributes(task.part_shift > 0 ? 1 << task.part_shift : 0, gate);
  config.attrs = attributes.list;
  config.numAttrs = attributes.count;
  return CheckCuda(cudaLaunchKernelEx(&config, kKernel, task), "DenseRowKernel");
}

}  // namespace

bool IsDenseRow(const DeviceCall& call, const DeviceInfo& device) {
  constexpr int64_t kMostStacks = 65535;
  const ConvArgs& a = call.args;
  const int64_t bytes = static_cast<int64_t>(ByteWidth(call.dtype));
  return device.clusters[1] > 0 && a.images == a.stacks && a.stacks <= kMostStacks &&
         HasWholePieces(a.channels, a.out_channels, bytes) && FitsRow(a.channels, bytes, device.shared_memory) &&
         reinterpret_cast<uintptr_t>(call.x) % kLaneBytes == 0;
}

Error DenseRow(const DeviceCall& call, const DeviceInfo& device, cudaStream_t stream) {
  constexpr ChainRow kAsItIs{1, false};
  return DispatchDtype(call.dtype, [&](auto element) {
    return LaunchDenseRow<decltype(element), false>(call, kAsItIs, device, stream);
  });
}

Error DenseRowInChain(const DeviceCall& call, const ChainRow& row, const DeviceInfo& device, cudaStream_t stream) {
  return DispatchDtype(
      call.dtype, [&](auto element) { return LaunchDenseRow<decltype(element), true>(call, row, device, stream); });
}

}  // namespace jsc
