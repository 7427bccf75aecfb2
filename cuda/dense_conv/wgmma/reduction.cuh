// The epilogue of the engine wgmma from shared memory: of a block alone whose registers do not suffice for more, or of
// two blocks of a cluster that read each other's sums. More blocks send them (wgmma/cluster_reduction.cuh). Sums are
// added in the order of the splits.
//
// Blocks of a cluster share the rows of their tile. A thread keeps four output channels, and its column of a row.
#ifndef JSC_CUDA_DENSE_CONV_WGMMA_REDUCTION_CUH_
#define JSC_CUDA_DENSE_CONV_WGMMA_REDUCTION_CUH_

#include "cuda/core/cluster_sums.cuh"
#include "cuda/core/epilogue.cuh"
#include "cuda/dense_conv/wgmma/engine.cuh"

namespace jsc {

// Four results, and of 3xTF32 products their low parts where another kernel wants them. to: in task.out
template <class U, typename T>
__device__ __forceinline__ void StoreResults(const WgmmaTaskOf<U, T>& task, T* to, float4 v) {
  Store4(to, v);
  if constexpr (U::kTf32x3) {
    if (task.low_out) Store4(to + (task.low_out - task.out), LowPart(v));
  }
}

// Completes a tile's rows of kPatchWidth pixels rank, rank + ranks, ...: bias, residual and ReLU. A thread keeps four
// output channels, and its column of the row.
template <class U, typename T>
struct WgmmaWriter {
  static constexpr int kQuads = U::kOutChannels / 4, kPooledWidth = kPatchWidth / 2;
  static_assert(U::kConsumers / kQuads == kPatchWidth, "a thread keeps its column");
  const WgmmaTaskOf<U, T>& task;
  int column, tile_out_channel, rows, row_step;  // rows: in which this thread's column has results
  int64_t first;                                 // element of out, of row 0
  Tally tally;

  static __device__ __forceinline__ int OutChannel() { return static_cast<int>(threadIdx.x) % kQuads * 4; }
  // The bias of the calling thread's output channels.
  static __device__ __forceinline__ float4 LoadBias(const WgmmaTask<T>& task, const WgmmaPlace& at) {
    const int out_channel = at.out_channel + OutChannel();
    if (task.bias == nullptr || out_channel >= task.out_channels) return {0.f, 0.f, 0.f, 0.f};
    return Load4(task.bias + static_cast<int64_t>(blockIdx.z) * task.out_channels + out_channel);
  }
  // Without results; those of a place come by Find.
  __device__ __forceinline__ explicit WgmmaWriter(const WgmmaTaskOf<U, T>& task)
      : task(task), column(0), tile_out_channel(0), rows(0), row_step(0), first(0) {}
  __device__ __forceinline__ void Find(const WgmmaPlace& at) {
    const WgmmaWriter found(task, at);
    column = found.column, tile_out_channel = found.tile_out_channel, rows = found.rows, row_step = found.row_step,
    first = found.first;
  }
  __device__ __forceinline__ WgmmaWriter(const WgmmaTaskOf<U, T>& task, const WgmmaPlace& at) : task(task) {
    constexpr int kRows = U::kPixels / kPatchWidth;
    column = static_cast<int>(threadIdx.x) / kQuads;
    tile_out_channel = OutChannel();
    int64_t pixel = static_cast<int64_t>(blockIdx.z) * task.pixels + column;
    if (task.patch) {
      pixel += static_cast<int64_t>(at.image * task.height + at.y) * task.width + at.x;
      rows = at.x + column < task.width ? min(kRows, task.height - at.y) : 0;
      row_step = task.width * task.out_channels;
    } else {
      pixel += at.pixel;
      rows = min(kRows, (task.pixels - at.pixel - column + kPatchWidth - 1) / kPatchWidth);
      row_step = kPatchWidth * task.out_channels;
    }
    if (task.pool != Pool::kNone) {  // a column of pooled results, every second row of them
      const int pooled = at.x / 2 + column % kPooledWidth;
      pixel = static_cast<int64_t>(blockIdx.z) * task.images_per_stack + at.image;
      pixel = (pixel * task.pooled_height + at.y / 2) * task.pooled_width + pooled;
      rows = pooled < task.pooled_width ? min(kRows / 2, task.pooled_height - at.y / 2) : 0;
      row_step = task.pooled_width * task.out_channels;
    }
    if (threadIdx.x >= U::kConsumers || at.out_channel + tile_out_channel >= task.out_channels) rows = 0;
    first = pixel * task.out_channels + at.out_channel + tile_out_channel;
  }
  __device__ __forceinline__ int64_t Element(int row) const { return first + static_cast<int64_t>(row) * row_step; }
  // Rows rank, rank + ranks, ... of more than two splits. tile_of(split): the sums of a split, which are added in the
  // order of the splits. kBatch rows of kSplits splits are loaded at a time.
  template <int kBatch, int kSplits, typename TileOf>
  __device__ __forceinline__ void Write(int rank, int ranks, float4 bias, const TileOf& tile_of) {
#pragma unroll 1
    for (int from = rank; from < rows; from += kBatch * ranks) {
      float4 sum[kBatch] = {}, extra[kBatch] = {};
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int row = from + i * ranks;
        if (task.residual && row < rows) extra[i] = Load4(task.residual + Element(row));
      }
#pragma unroll 1
      for (int split = 0; split < ranks; split += kSplits) {
        float4 next[kSplits][kBatch] = {};
#pragma unroll
        for (int j = 0; j < kSplits; ++j) {
          const float* tile = tile_of(min(split + j, ranks - 1)) + column * U::kSumStride + tile_out_channel;
#pragma unroll
          for (int i = 0; i < kBatch; ++i) {
            const int row = from + i * ranks;
            LoadIf(next[j][i], tile + row * (kPatchWidth * U::kSumStride), row < rows && split + j < ranks);
          }
        }
#pragma unroll
        for (int j = 0; j < kSplits; ++j) {
#pragma unroll
          for (int i = 0; i < kBatch; ++i) {
            sum[i] = sum[i] + next[j][i];
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int row = from + i * ranks;
        if (row < rows) Store(task.out + Element(row), Finish(sum[i], bias + extra[i], task.relu), task.counts.rows);
      }
    }
  }
  // The same of one or two tiles in fewer instructions: a row is a step of pointers.
  template <int kBatch, int kTiles>
  __device__ __forceinline__ void WriteRows(int rank, float4 bias, const float* const (&tiles)[kTiles]) {
    constexpr int kRowWords = kTiles * kPatchWidth * U::kSumStride;
    const int64_t step = static_cast<int64_t>(row_step) * kTiles;
    const int corner = (rank * kPatchWidth + column) * U::kSumStride + tile_out_channel;
    const bool counts = task.counts.rows != nullptr;
    T* out = task.out + Element(rank);
    const T* residual = task.residual ? task.residual + Element(rank) : nullptr;
    bias = bias + float4{0.f, 0.f, 0.f, 0.f};  // a sum of -0 without a bias is 0, as with one
    int word = corner;
#pragma unroll 1
    for (int left = (rows - rank + kTiles - 1) / kTiles; left > 0; left -= kBatch) {
      float4 sum[kTiles][kBatch], rest[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) rest[i] = bias;
      if (residual) {
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          if (i < left) rest[i] = bias + Load4(residual + i * step);
        }
        residual += kBatch * step;
      }
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          sum[t][i] = {0.f, 0.f, 0.f, 0.f};
          const float* from = tiles[t] + word + i * kRowWords;
          if constexpr (kTiles > 1) {
            LoadIf(sum[t][i], from, i < left);
          } else if (i < left) {
            sum[t][i] = *reinterpret_cast<const float4*>(from);
          }
        }
      }
      word += kBatch * kRowWords;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        float4 v = sum[0][i];
        if constexpr (kTiles > 1) v = v + sum[1][i];
        v = Finish(v, rest[i], task.relu);
        if (i < left) Store(out, v, counts);
        out += step;
      }
    }
  }
  // The same of pooled rows: four sums for each result.
  template <int kBatch, int kTiles>
  __device__ __forceinline__ void WritePooledRows(int rank, float4 bias, const float* const (&tiles)[kTiles]) {
    constexpr int kThreadRows = 2 * kTiles;  // between those of a thread
    constexpr int kRowWords = kThreadRows * 2 * kPatchWidth * U::kSumStride;
    const int row = rank * 2 + column / kPooledWidth;
    const int64_t step = static_cast<int64_t>(row_step) * kThreadRows;
    const bool counts = task.counts.rows != nullptr;
    T* out = task.out + Element(row);
    bias = bias + float4{0.f, 0.f, 0.f, 0.f};
    int word = (row * 2 * kPatchWidth + column % kPooledWidth * 2) * U::kSumStride + tile_out_channel;
#pragma unroll 1
    for (int left = (rows - row + kThreadRows - 1) / kThreadRows; left > 0; left -= kBatch) {
      float4 sum[kTiles][kBatch][4];
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
#pragma unroll
        for (int i = 0; i < kBatch * 4; ++i) {
          const int of = i / 4, of_row = i / 2 % 2, of_column = i % 2;
          sum[t][of][i % 4] = {0.f, 0.f, 0.f, 0.f};
          const float* from = tiles[t] + word + of * kRowWords + (of_row * kPatchWidth + of_column) * U::kSumStride;
          if constexpr (kTiles > 1) {
            LoadIf(sum[t][of][i % 4], from, of < left);
          } else if (of < left) {
            sum[t][of][i % 4] = *reinterpret_cast<const float4*>(from);
          }
        }
      }
      word += kBatch * kRowWords;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        float4(&four)[4] = sum[0][i];
        if constexpr (kTiles > 1) {
#pragma unroll
          for (int j = 0; j < 4; ++j) four[j] = four[j] + sum[1][i][j];
        }
        const float4 v = Pooled(four, bias);
        if (i < left) Store(out, v, counts);
        out += step;
      }
    }
  }
  // to: in task.out; counts: whether anybody wants to know how many are not zero.
  __device__ __forceinline__ void Store(T* to, float4 v, bool counts) {
    StoreResults<U>(task, to, v);
    if (counts) tally.template Add<T>(v, 4);
  }
  // The same of more than two splits, as Write.
  template <int kSplits, typename TileOf>
  __device__ __forceinline__ void WritePooled(int rank, int ranks, float4 bias, const TileOf& tile_of) {
#pragma unroll 1
    for (int row = rank * 2 + column / kPooledWidth; row < rows; row += ranks * 2) {
      const int corner = (row * 2 * kPatchWidth + column % kPooledWidth * 2) * U::kSumStride + tile_out_channel;
      float4 sum[4] = {};
#pragma unroll 1
      for (int split = 0; split < ranks; split += kSplits) {
        float4 next[kSplits][4] = {};
#pragma unroll
        for (int j = 0; j < kSplits; ++j) {
          const float* tile = tile_of(min(split + j, ranks - 1)) + corner;
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            LoadIf(next[j][i], tile + (i / 2 * kPatchWidth + i % 2) * U::kSumStride, split + j < ranks);
          }
        }
#pragma unroll
        for (int j = 0; j < kSplits; ++j) {
#pragma unroll
          for (int i = 0; i < 4; ++i) sum[i] = sum[i] + next[j][i];
        }
      }
      Store(task.out + Element(row), Pooled(sum, bias), task.counts.rows);
    }
  }
  __device__ __forceinline__ float4 Pooled(const float4 (&v)[4], float4 bias) const {
    return WindowPool(task.pool, task.relu, bias).Of(bias, v[0], v[1], v[2], v[3]);
  }
};

// Before a kernel writes: the one in front may have read what is written now, and wrote the residual.
__device__ __forceinline__ void WaitToWrite(const Gate& gate) {
  if (gate.in_chain) WaitForKernelBefore();
  if (gate.x_is_older) LetNextKernelStart();
}

#if __CUDA_ARCH__ >= 900
// Blocks of a cluster share the rows of their tile.
template <int kBatch, int kSplits, class U, typename T>
__device__ __forceinline__ void WriteTogether(WgmmaWriter<U, T>& writer, int rank, int ranks, float4 bias,
                                              float* tile) {
  SyncCluster();
  const auto tile_of = [&](int split) { return OfBlock(tile, split); };
  if (writer.task.pool == Pool::kNone) {
    writer.template Write<kBatch, kSplits>(rank, ranks, bias, tile_of);
  } else {
    writer.template WritePooled<2>(rank, ranks, bias, tile_of);
  }
  ArriveAtCluster();
  WaitForCluster();  // a block's sums stay until all have read them
}

// The same of two blocks, by WriteRows.
template <int kBatch, class U, typename T>
__device__ __forceinline__ void WriteAsPair(WgmmaWriter<U, T>& writer, int rank, float4 bias, float* tile) {
  SyncCluster();
  const float* const tiles[] = {OfBlock(tile, 0), OfBlock(tile, 1)};
  if (writer.task.pool == Pool::kNone) {
    writer.template WriteRows<kBatch, 2>(rank, bias, tiles);
  } else {
    writer.template WritePooledRows<1, 2>(rank, bias, tiles);
  }
  ArriveAtCluster();
  WaitForCluster();
}
#endif

}  // namespace jsc

#endif  // JSC_CUDA_DENSE_CONV_WGMMA_REDUCTION_CUH_
