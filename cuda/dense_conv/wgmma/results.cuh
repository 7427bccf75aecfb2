// The epilogue of the engine wgmma from registers, where one block has all sums of a tile. Shared memory then keeps the
// stages of the next tile.
//
// A warp's store is whole 32-byte sectors. TF32 products leave neighbouring output channels in a thread. Of 16-bit ones
// a thread has one output channel of two pixels. movmatrix transposes these, and lanes swap them, into four output
// channels of one pixel. A pool's 2x2 window is in one thread.
#ifndef JSC_CUDA_DENSE_CONV_WGMMA_RESULTS_CUH_
#define JSC_CUDA_DENSE_CONV_WGMMA_RESULTS_CUH_

#include "cuda/core/epilogue.cuh"
#include "cuda/dense_conv/wgmma/engine.cuh"

namespace jsc {

// Where a tile's results, or pooled results, lie: rows of kPatchWidth columns, or half as many.
struct ResultPlace {
  int64_t first;               // element of out and residual: row 0, column 0, output channel 0 of the tile
  int row_step, out_channels;  // elements between rows, and between columns
  int rows, columns;           // with results; columns from `columns` on have none in a patch, else one row less
  bool patch;

  template <class U, typename T>
  static __device__ __forceinline__ ResultPlace Of(const WgmmaTask<T>& task, const WgmmaPlace& at) {
    constexpr int kRows = U::kPixels / kPatchWidth;
    const int stack = static_cast<int>(blockIdx.z);
    ResultPlace p;
    p.out_channels = task.out_channels;
    p.patch = task.patch;
    int64_t pixel;
    if (task.pool != Pool::kNone) {
      pixel = static_cast<int64_t>(stack * task.images_per_stack + at.image) * task.pooled_height + at.y / 2;
      pixel = pixel * task.pooled_width + at.x / 2;
      p.rows = min(kRows / 2, task.pooled_height - at.y / 2);
      p.columns = task.pooled_width - at.x / 2;
      p.row_step = task.pooled_width * task.out_channels;
    } else if (task.patch) {
      pixel = static_cast<int64_t>(stack * task.images_per_stack + at.image) * task.height + at.y;
      pixel = pixel * task.width + at.x;
      p.rows = min(kRows, task.height - at.y);
      p.columns = task.width - at.x;
      p.row_step = task.width * task.out_channels;
    } else {
      pixel = static_cast<int64_t>(stack) * task.pixels + at.pixel;
      p.rows = min(kRows, (task.pixels - at.pixel + kPatchWidth - 1) / kPatchWidth);
      p.columns = task.pixels - at.pixel - (p.rows - 1) * kPatchWidth;  // of the last row
      p.row_step = kPatchWidth * task.out_channels;
    }
    p.first = pixel * task.out_channels + at.out_channel;
    return p;
  }
  // Rows of a column that have results.
  __device__ __forceinline__ int RowsOf(int column) const {
    if (column < columns) return rows;
    return patch ? 0 : rows - 1;
  }
};

// Bias, residual, ReLU and pool; 16-bit types.
template <class U, typename T>
struct ResultWriter {
  static constexpr int kRows = U::kPixels / kPatchWidth, kBatch = 4;
  const WgmmaTask<T>& task;
  Tally tally;

  __device__ __forceinline__ explicit ResultWriter(const WgmmaTask<T>& task) : task(task) {}

  // Of an 8x8 matrix of pairs, lane l has row l / 4 and columns 2 * (l % 4) and the next: transposed.
  static __device__ __forceinline__ uint32_t Transpose(uint32_t pair) {
    uint32_t transposed;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(pair));
    return transposed;
  }
  __device__ __forceinline__ void Store(int64_t element, uint2 four) {
    *reinterpret_cast<uint2*>(task.out + element) = four;
    if (task.counts.rows) {
      const float2 low = Unpack<T>(four.x), high = Unpack<T>(four.y);
      tally.Add<float>(float4{low.x, low.y, high.x, high.y}, 4);
    }
  }

  // Of the calling thread's output channels, 8 apart.
  static __device__ __forceinline__ float2 LoadBias(const WgmmaTask<T>& task, const WgmmaPlace& at) {
    const int out_channel = at.out_channel + static_cast<int>(threadIdx.x) / kWarp * 16 + threadIdx.x % kWarp / 4;
    const T* from = task.bias + static_cast<int64_t>(blockIdx.z) * task.out_channels + out_channel;
    float2 bias = {0.f, 0.f};
    if (task.bias && out_channel < task.out_channels) bias.x = ToFloat(from[0]);
    if (task.bias && out_channel + 8 < task.out_channels) bias.y = ToFloat(from[8]);
    return bias;
  }
  // All threads of the warpgroups.
  __device__ __forceinline__ void Write(const WgmmaPlace& at, float2 both, const float (&sums)[U::kPixels / 2]) {
    const int lane = threadIdx.x % kWarp, of_tile = static_cast<int>(threadIdx.x) / kWarp * 16;
    const float bias[2] = {both.x, both.y};
    const ResultPlace place = ResultPlace::Of<U>(task, at);
    const int four = of_tile + SwappedQuad();
    const bool has_out_channels = at.out_channel + four < task.out_channels;
    if (task.pool != Pool::kNone) {
      const WindowPool pooled(task.pool, task.relu, both);
      const int column = lane / 4 / 2, parity = lane / 4 % 2;
      const int rows = has_out_channels ? place.RowsOf(column) : 0;
      const int64_t first = place.first + four + column * place.out_channels;
#pragma unroll
      for (int row = 0; row < kRows / 2; row += 2) {
        uint32_t transposed[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const auto at = [&](int row) {
            const float* v = sums + row * 8 + h * 2;
            return row < kRows / 2 ? pooled.Of(bias[h], v[0], v[1], v[4], v[5]) : 0.f;
          };
          transposed[h] = Transpose(Pack<T>(at(row), at(row + 1)));
        }
        const uint2 result = SwapPairs(transposed[0], transposed[1]);
        if (row + parity < rows) Store(first + static_cast<int64_t>(row + parity) * place.row_step, result);
      }
      return;
    }
    const int rows = has_out_channels ? place.RowsOf(lane / 4) : 0;
    const int64_t first = place.first + four + lane / 4 * place.out_channels;
#pragma unroll
    for (int from = 0; from < kRows; from += kBatch) {
      uint2 extra[kBatch] = {};
      if (task.residual) {
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          if (from + i < min(rows, kRows)) {
            extra[i] = *reinterpret_cast<const uint2*>(task.residual + first +
                                                       static_cast<int64_t>(from + i) * place.row_step);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int row = from + i;
        if (row >= kRows) break;
        uint32_t transposed[2];
        float2 rest[2] = {};
        if (task.residual) {
          const uint2 halves = SwapPairs(extra[i].x, extra[i].y);
          rest[0] = Unpack<T>(Transpose(halves.x));
          rest[1] = Unpack<T>(Transpose(halves.y));
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          transposed[h] = Transpose(Pack<T>(Finish(sums[row * 4 + h * 2], bias[h] + rest[h].x, task.relu),
                                            Finish(sums[row * 4 + h * 2 + 1], bias[h] + rest[h].y, task.relu)));
        }
        const uint2 result = SwapPairs(transposed[0], transposed[1]);
        if (row < rows) Store(first + static_cast<int64_t>(row) * place.row_step, result);
      }
    }
  }
};

// float32: a thread has two neighbouring output channels of two neighbouring columns.
template <class U>
struct ResultWriter<U, float> {
  static constexpr int kRows = U::kPixels / kPatchWidth, kBatch = 4;
  const WgmmaTask<float>& task;
  Tally tally;

  __device__ __forceinline__ explicit ResultWriter(const WgmmaTask<float>& task) : task(task) {}

  __device__ __forceinline__ void Store(int64_t element, float2 v) {
    *reinterpret_cast<float2*>(task.out + element) = v;
    if (task.counts.rows) tally.Add<float>(v, 2);
  }
  // The first of the calling thread's two output channels.
  static __device__ __forceinline__ int OutChannel() {
    using Weights = StepWeights<U, float>;
    return static_cast<int>(threadIdx.x) / 128 * 64 + Weights::Box() * 32 + Weights::Slot() * 4 + Weights::Half() * 2;
  }
  static __device__ __forceinline__ float2 LoadBias(const WgmmaTask<float>& task, const WgmmaPlace& at) {
    const int out_channel = at.out_channel + OutChannel();
    if (task.bias == nullptr || out_channel >= task.out_channels) return {0.f, 0.f};
    const float* from = task.bias + static_cast<int64_t>(blockIdx.z) * task.out_channels + out_channel;
    return {from[0], from[1]};
  }
  __device__ __forceinline__ void Write(const WgmmaPlace& at, float2 bias, const float (&sums)[U::kPixels / 2]) {
    const int pair = threadIdx.x % 4, out_channel = OutChannel();
    const ResultPlace place = ResultPlace::Of<U>(task, at);
    const bool has_out_channels = at.out_channel + out_channel < task.out_channels;
    if (task.pool != Pool::kNone) {
      const WindowPool pooled(task.pool, task.relu, bias);
      const int rows = has_out_channels ? place.RowsOf(pair) : 0;
      const int64_t first = place.first + out_channel + pair * place.out_channels;
#pragma unroll
      for (int row = 0; row < kRows / 2; ++row) {
        const float* v = sums + row * 8;
        const float2 result = {pooled.Of(bias.x, v[0], v[1], v[4], v[5]), pooled.Of(bias.y, v[2], v[3], v[6], v[7])};
        if (row < rows) Store(first + static_cast<int64_t>(row) * place.row_step, result);
      }
      return;
    }
    int rows[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) rows[e] = has_out_channels ? place.RowsOf(pair * 2 + e) : 0;
    const int64_t first = place.first + out_channel + pair * 2 * place.out_channels;
#pragma unroll
    for (int from = 0; from < kRows; from += kBatch) {
      float2 extra[kBatch][2] = {};
      if (task.residual) {
#pragma unroll
        for (int i = 0; i < kBatch * 2; ++i) {
          if (from + i / 2 < min(rows[i % 2], kRows)) {
            extra[i / 2][i % 2] = *reinterpret_cast<const float2*>(task.residual + first +
                                                                   static_cast<int64_t>(from + i / 2) * place.row_step +
                                                                   i % 2 * place.out_channels);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kBatch * 2; ++i) {
        const int row = from + i / 2, e = i % 2;
        if (row >= kRows) break;
        const float2 rest = extra[i / 2][e];
        const float2 result = {Finish(sums[row * 4 + e], bias.x + rest.x, task.relu),
                               Finish(sums[row * 4 + 2 + e], bias.y + rest.y, task.relu)};
        if (row < rows[e]) Store(first + static_cast<int64_t>(row) * place.row_step + e * place.out_channels, result);
      }
    }
  }
};

}  // namespace jsc

#endif  // JSC_CUDA_DENSE_CONV_WGMMA_RESULTS_CUH_
