// The epilogue of the engine few_channels: bias, residual, ReLU and pool, and sums again where they are not finite.
#ifndef JSC_CUDA_DENSE_CONV_FEW_CHANNELS_RESULTS_CUH_
#define JSC_CUDA_DENSE_CONV_FEW_CHANNELS_RESULTS_CUH_

#include "cuda/core/epilogue.cuh"
#include "cuda/dense_conv/few_channels/sums.cuh"

namespace jsc {

// One result without bias, product after product by FFMA. Not inlined: it runs where there are infinities or NaN.
template <typename T>
__device__ __noinline__ float FewChannelsResult(const FewChannelsTask<T>& task, int image, int y, int x,
                                                int tile_out_channel) {
  const int64_t stack = blockIdx.z;
  const T* kernel =
      task.kernel + stack * task.kernel_size[0] * task.window_elements * task.out_channels + tile_out_channel;
  float sum = 0.f;
#pragma unroll 1
  for (int dy = 0; dy < task.kernel_size[0]; ++dy) {
    const int row = y * task.stride[0] - task.pad_low[0] + dy;
    const int first = (x * task.stride[1] - task.pad_low[1]) * task.channels;
    const T* from = task.x + ((stack * task.images + image) * task.height + row) * task.row_elements;
#pragma unroll 1
    for (int e = first; e < first + task.window_elements; ++e, kernel += task.out_channels) {
      const bool inside = row >= 0 && row < task.height && e >= 0 && e < task.row_elements;
      sum = fmaf(inside ? ToFloat(from[e]) : 0.f, ToFloat(*kernel), sum);
    }
  }
  return sum;
}

// A lane's result of a run.
struct FewChannelsResultPlace {
  bool there;       // it is of the map, and this block's
  int64_t element;  // of out, its first one of the lane
  int staged;       // word of the tile in front of a pool, likewise
};

// From sums to results: bias, residual and ReLU.
template <class U, typename T>
struct FewChannelsWriter {
  static constexpr int kCount = FewChannelsSums<U, T>::kCount;  // neighbouring output channels of a lane
  const FewChannelsTask<T>& task;
  unsigned char* shared;
  int out_channel;
  Tally tally;

  // Neighbouring results, of which `valid` are there; whole: all or none, and aligned.
  template <int kCount>
  __device__ __forceinline__ void StorePiece(T* to, const float (&v)[kCount], int valid, bool whole) const {
    const Packed<T, kCount> stored(v);
    if (whole) {
      if (valid > 0) stored.template Store<kCount* static_cast<int>(sizeof(T))>(to);
    } else if (sizeof(T) == 2 && task.out_bytes >= 4) {
#pragma unroll
      for (int i = 0; i < kCount; i += 2) {
        if (i < valid)
          reinterpret_cast<uint32_t*>(to)[i / 2] = reinterpret_cast<const uint32_t*>(stored.element)[i / 2];
      }
    } else {
      stored.StoreUpTo(to, valid);
    }
  }
  template <int kCount>
  __device__ __forceinline__ void StoreBoth(int64_t element, const float (&v)[kCount], int valid, bool whole) const {
    StorePiece(task.out + element, v, valid, whole);
    if constexpr (U::kTf32x3) {
      if (task.low_out == nullptr) return;
      float low[kCount];
#pragma unroll
      for (int i = 0; i < kCount; ++i) low[i] = LowPart(v[i]);
      StorePiece(task.low_out + element, low, valid, whole);
    }
  }
  template <int kCount>
  __device__ __forceinline__ void Store(int64_t element, const float (&v)[kCount], int tile_out_channel) {
    const int valid = max(0, min(kCount, task.out_channels - out_channel - tile_out_channel));
    StoreBoth(element, v, valid, task.out_bytes >= kCount * static_cast<int>(sizeof(T)));
    if (task.counts.rows) tally.Add<T>(v, valid);
  }
  // The lane's first or second result of a run of the tile; output channel: its first, in the block's.
  __device__ __forceinline__ FewChannelsResultPlace Find(const FewChannelsPlace& at, int run, int second,
                                                         int tile_out_channel) const {
    const Quotient place = Divide(run, task.by_runs);
    const int x = place.remainder * kFewChannelsRun + static_cast<int>(threadIdx.x) % 4 * 2 + second;
    const int row = at.y + place.quotient, column = at.x + x;
    FewChannelsResultPlace found;
    found.there = row >= 0 && row < task.conv_size[0] && column >= 0 && column < task.conv_size[1] &&
                  (task.pools || x < task.tile_out[1]);
    found.element = (static_cast<int64_t>(at.stack_image * task.conv_size[0] + row) * task.conv_size[1] + column) *
                        task.out_channels +
                    out_channel + tile_out_channel;
    found.staged = (place.quotient * task.tile[1] + x) * task.pool_stride + tile_out_channel;
    return found;
  }
  __device__ __forceinline__ void LoadBias(int tile_out_channel, float (&bias)[kCount]) const {
    const auto* from = reinterpret_cast<const float4*>(shared + task.bias_at) + tile_out_channel / 4;
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const float4 v = from[i / 4];
      bias[i] = v.x, bias[i + 1] = v.y, bias[i + 2] = v.z, bias[i + 3] = v.w;
    }
  }
  // Sums of kCount output channels from `beyond` the lane's first one, which is `output channel`.
  template <FewChannelsTarget kTarget>
  __device__ __forceinline__ void Write(const FewChannelsResultPlace& to, int tile_out_channel, int beyond,
                                        const float (&bias)[kCount], float (&v)[kCount]) {
    const int end = task.out_channels - out_channel - tile_out_channel - beyond;
    if (kTarget == FewChannelsTarget::kOther && task.residual && to.there) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (i < end) v[i] += ToFloat(task.residual[to.element + beyond + i]);
      }
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) v[i] = AtLeast(v[i] + bias[i], task.least);
    if constexpr (kTarget == FewChannelsTarget::kPool) {
      auto* staged = reinterpret_cast<float4*>(shared + task.pool_at) + (to.staged + beyond) / 4;
#pragma unroll
      for (int i = 0; i < kCount; i += 4) {
        staged[i / 4] = to.there ? make_float4(v[i], v[i + 1], v[i + 2], v[i + 3])
                                 : make_float4(-INFINITY, -INFINITY, -INFINITY, -INFINITY);
      }
    } else if (kTarget == FewChannelsTarget::kPlain) {
      if (to.there) StoreBoth(to.element + beyond, v, end, true);
    } else if (to.there) {
      Store(to.element + beyond, v, tile_out_channel + beyond);
    }
  }
  // The maxima of the tile's windows.
  __device__ __forceinline__ void WritePool(const FewChannelsPlace& at) {
    constexpr int kPiece = 16 / static_cast<int>(sizeof(T));
    const auto* staged = reinterpret_cast<const float*>(shared + task.pool_at);
    const int results = task.tile_out[0] * task.tile_out[1];
    for (int index = threadIdx.x; index < results << task.pieces_log; index += blockDim.x) {
      const int tile_out_channel = (index & ((1 << task.pieces_log) - 1)) * kPiece;
      const Quotient pixel = Divide(index >> task.pieces_log, task.by_out_columns);
      const int row = at.tile_y * task.tile_out[0] + pixel.quotient;
      const int column = at.tile_x * task.tile_out[1] + pixel.remainder;
      if (row >= task.out_size[0] || column >= task.out_size[1]) continue;
      const float* corner =
          staged + tile_out_channel +
          (pixel.quotient * task.window_stride[0] * task.tile[1] + pixel.remainder * task.window_stride[1]) *
              task.pool_stride;
      float most[kPiece];
#pragma unroll
      for (float& v : most) v = -INFINITY;
#pragma unroll 1
      for (int y = 0; y < task.window[0]; ++y) {
#pragma unroll 3
        for (int x = 0; x < task.window[1]; ++x) {
#pragma unroll
          for (int i = 0; i < kPiece; i += 4) {
            const float4 v = *reinterpret_cast<const float4*>(corner + (y * task.tile[1] + x) * task.pool_stride + i);
            most[i] = AtLeast(most[i], v.x), most[i + 1] = AtLeast(most[i + 1], v.y);
            most[i + 2] = AtLeast(most[i + 2], v.z), most[i + 3] = AtLeast(most[i + 3], v.w);
          }
        }
      }
      const int64_t result = static_cast<int64_t>(at.stack_image * task.out_size[0] + row) * task.out_size[1] + column;
      Store(result * task.out_channels + out_channel + tile_out_channel, most, tile_out_channel);
    }
  }
};

// A warp's runs of results: first, first + 1, ... of `runs`; output channel: the lane's first.
template <FewChannelsTarget kTarget, class U, typename T>
__device__ __forceinline__ void WriteRuns(const FewChannelsPlace& at, int first, int runs, int tile_out_channel,
                                          const FewChannelsSums<U, T>& sums, FewChannelsWriter<U, T>& writer) {
  constexpr int kCount = FewChannelsSums<U, T>::kCount, kQuads = FewChannelsSums<U, T>::kQuads;
  float bias[kQuads][kCount];
#pragma unroll
  for (int q = 0; q < kQuads; ++q) writer.LoadBias(tile_out_channel + q * 8 * kCount, bias[q]);
#pragma unroll
  for (int run = 0; run < kFewChannelsWarpRuns; ++run) {
    if (first + run >= runs) break;
#pragma unroll
    for (int second = 0; second < 2; ++second) {
      const FewChannelsResultPlace to = writer.Find(at, first + run, second, tile_out_channel);
#pragma unroll
      for (int q = 0; q < kQuads; ++q) {
        float v[kCount];
        sums.Results(run, second, q, v);
        writer.template Write<kTarget>(to, tile_out_channel, q * 8 * kCount, bias[q], v);
      }
    }
  }
}

// The same where not all sums are finite.
template <class U, typename T>
__device__ __forceinline__ void WriteRunsAgain(const FewChannelsTask<T>& task, const FewChannelsPlace& at, int first,
                                               int runs, int tile_out_channel, FewChannelsWriter<U, T>& writer) {
  constexpr int kCount = FewChannelsSums<U, T>::kCount;
#pragma unroll 1
  for (int result = 2 * first; result < 2 * min(first + kFewChannelsWarpRuns, runs); ++result) {
    const FewChannelsResultPlace to = writer.Find(at, result / 2, result % 2, tile_out_channel);
    const Quotient place = Divide(result / 2, task.by_runs);
    const int x = at.x + place.remainder * kFewChannelsRun + static_cast<int>(threadIdx.x) % 4 * 2 + result % 2;
#pragma unroll 1
    for (int beyond = 0; beyond < U::kOutChannels; beyond += 8 * kCount) {
      float v[kCount], bias[kCount];
      writer.LoadBias(tile_out_channel + beyond, bias);
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const int out_channel = writer.out_channel + tile_out_channel + beyond + i;
        v[i] = out_channel < task.out_channels
                   ? FewChannelsResult(task, at.image, at.y + place.quotient, x, out_channel)
                   : 0.f;
      }
      if (task.pools) {
        writer.template Write<FewChannelsTarget::kPool>(to, tile_out_channel, beyond, bias, v);
      } else {
        writer.template Write<FewChannelsTarget::kOther>(to, tile_out_channel, beyond, bias, v);
      }
    }
  }
}

}  // namespace jsc

#endif  // JSC_CUDA_DENSE_CONV_FEW_CHANNELS_RESULTS_CUH_
