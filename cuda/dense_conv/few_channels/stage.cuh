// How the engine few_channels brings weights and pixels to shared memory. They are copied as they lie, all at once, by
// loops of few instructions, since code that runs once costs its fetch. Then they are ordered and rounded there.
#ifndef JSC_CUDA_DENSE_CONV_FEW_CHANNELS_STAGE_CUH_
#define JSC_CUDA_DENSE_CONV_FEW_CHANNELS_STAGE_CUH_

#include "cuda/core/copies.cuh"
#include "cuda/dense_conv/few_channels/task.cuh"
#include "cuda/dense_conv/mma/engine.cuh"

namespace jsc {

// Elements of 2 bytes at odd places, which no copy takes: loads of a thread that are on their way together.
constexpr int kTogether = 8;

// High and low part of a float32: see dense_conv/mma/tf32x3.cuh.
__device__ __forceinline__ float2 HighLowOf(uint32_t bits) {
  const float value = __uint_as_float(bits);
  const float high = __uint_as_float((bits + 0x1000u) & 0xffffe000u);
  return {high, value - high};
}

__device__ __forceinline__ uint4 RoundToTf32(uint4 v) {
  return {RoundToTf32(v.x), RoundToTf32(v.y), RoundToTf32(v.z), RoundToTf32(v.w)};
}

// High parts, and low parts `low_offset` further on.
__device__ __forceinline__ void StoreHighLow(uint4* to, int low_offset, uint4 v) {
  const float2 x = HighLowOf(v.x), y = HighLowOf(v.y), z = HighLowOf(v.z), w = HighLowOf(v.w);
  *reinterpret_cast<float4*>(to) = {x.x, y.x, z.x, w.x};
  *reinterpret_cast<float4*>(to + low_offset) = {x.y, y.y, z.y, w.y};
}

// The block's weights as they lie, [tap and channel, output channels and 16 bytes more], without waiting. With that
// distance rows that are read together (every second one) lie in distinct banks.
template <typename T>
__device__ __forceinline__ void CopyWeights(const FewChannelsTask<T>& task, int out_channel, unsigned char* raw) {
  constexpr int kPiece = 16 / static_cast<int>(sizeof(T));
  const int rows = task.kernel_size[0] * task.window_elements, pieces = 1 << task.pieces_log;
  const T* kernel = task.kernel + static_cast<int64_t>(blockIdx.z) * rows * task.out_channels + out_channel;
  const int valid = task.out_channels - out_channel;
  if (task.kernel_bytes == 16) {
#pragma unroll 2
    for (int index = threadIdx.x; index < rows << task.pieces_log; index += blockDim.x) {
      const int row = index >> task.pieces_log, piece = index & (pieces - 1);
      CopyAsync<16>(raw + (row * (pieces + 1) + piece) * 16, kernel + row * task.out_channels + piece * kPiece, 16,
                    piece * kPiece < valid);
    }
    return;
  }
  if (sizeof(T) == 4 || task.kernel_bytes >= 4) {
    constexpr int kWord = 4 / static_cast<int>(sizeof(T));
#pragma unroll 2
    for (int index = threadIdx.x; index < rows * 4 << task.pieces_log; index += blockDim.x) {
      const int row = index / 4 >> task.pieces_log, word = index & (pieces * 4 - 1);
      CopyAsync<4>(raw + row * (pieces + 1) * 16 + word * 4, kernel + row * task.out_channels + word * kWord, 4,
                   word * kWord < valid);
    }
    return;
  }
  const int step = static_cast<int>(blockDim.x);
#pragma unroll 1
  for (int first = threadIdx.x; first < rows * task.tile_out_channels; first += kTogether * step) {
    T v[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int row = (first + i * step) / kPiece >> task.pieces_log;
      const int tile_out_channel = (first + i * step) & (task.tile_out_channels - 1);
      v[i] = row < rows && tile_out_channel < valid ? kernel[row * task.out_channels + tile_out_channel]
                                                    : FromFloat<T>(0.f);
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int row = (first + i * step) / kPiece >> task.pieces_log;
      const int tile_out_channel = (first + i * step) & (task.tile_out_channels - 1);
      if (row < rows) reinterpret_cast<T*>(raw + row * (pieces + 1) * 16)[tile_out_channel] = v[i];
    }
  }
}

// Weights in the order of fragments, whose rows are output channels. 16 bytes are what a lane needs for four pairs of
// the reduction (of 16-bit elements eight): the first and second elements of two output channels. Low parts come after
// all high parts. A lane's output channels of its fragments are neighbours. A thread takes a pair of rows of 16 bytes.
template <class U, typename T>
__device__ __forceinline__ void OrderWeights(const FewChannelsTask<T>& task, const unsigned char* raw,
                                             unsigned char* shared) {
  constexpr int kPieces = U::kOutChannels * static_cast<int>(sizeof(T)) / 16;
  const auto* from = reinterpret_cast<const uint4*>(raw);
  const int low_offset = task.pairs * kPieces * 2;  // in 16 bytes
#pragma unroll 1
  for (int index = threadIdx.x; index < task.pairs * kPieces; index += blockDim.x) {
    // Of the index: four pairs, then pieces, then pairs again.
    const int piece = index / 4 % kPieces, pair = index / (4 * kPieces) * 4 + index % 4;
    const Quotient row = Divide(pair, task.by_row_pairs);
    const int element = 2 * row.remainder - task.lead;
    const bool there = row.quotient < task.kernel_size[0];
    const uint4* at = from + (row.quotient * task.window_elements + element) * (kPieces + 1) + piece;
    uint4 a = {0u, 0u, 0u, 0u}, b = {0u, 0u, 0u, 0u};
    if (there && element >= 0) a = at[0];
    if (there && element + 1 < task.window_elements) b = at[kPieces + 1];
    uint4* slots = reinterpret_cast<uint4*>(shared);
    if constexpr (sizeof(T) == 4) {
      uint4* slot = slots + (pair / 4 * U::kFragments + piece / 8 * 2) * kWarp + piece % 8 * 4 + pair % 4;
      const uint4 first = {a.x, a.y, b.x, b.y}, second = {a.z, a.w, b.z, b.w};
      if constexpr (U::kTf32x3) {
        StoreHighLow(slot, low_offset, first);
        StoreHighLow(slot + kWarp, low_offset, second);
      } else {
        slot[0] = RoundToTf32(first);
        slot[kWarp] = RoundToTf32(second);
      }
    } else {
      const uint32_t low[4] = {a.x, a.y, a.z, a.w}, high[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // two output channels
        const int fragment = i % U::kFragments, lane = (piece * 4 / U::kFragments + i / U::kFragments) * 4 + pair % 4;
        uint4* slot = slots + (pair / 8 * U::kFragments + fragment) * kWarp + lane;
        reinterpret_cast<uint2*>(slot)[pair / 4 % 2] = {__byte_perm(low[i], high[i], 0x5410),
                                                        __byte_perm(low[i], high[i], 0x7632)};
      }
    }
  }
}

// Bytes from a staged element to the next, of pairs. At 3xTF32 a pair's high parts stand before its low parts where
// pairs begin at even elements. Else all high parts stand before all low parts.
template <class U, typename T>
constexpr int StagedBytes() {
  return U::kTf32x3 && U::kPaired ? 8 : static_cast<int>(sizeof(T));
}

// Where the elements of each pair are, from a result's first one on, in bytes; and the bias.
template <class U, typename T>
__device__ __forceinline__ void StageTable(const FewChannelsTask<T>& task, int out_channel, unsigned char* shared) {
  auto* table = reinterpret_cast<int*>(shared + task.table_at);
#pragma unroll 1
  for (int pair = threadIdx.x; pair < task.pairs + kFewChannelsAhead; pair += blockDim.x) {
    const Quotient row = Divide(pair, task.by_row_pairs);
    const bool there = row.quotient < task.kernel_size[0];  // others have weights of zero
    table[pair] = there ? (row.quotient * task.pitch + 2 * row.remainder) * StagedBytes<U, T>() : 0;
  }
  auto* bias = reinterpret_cast<float*>(shared + task.bias_at);
#pragma unroll 1
  for (int i = threadIdx.x; i < task.tile_out_channels; i += blockDim.x) {
    const bool there = task.bias && out_channel + i < task.out_channels;
    bias[i] = there ? ToFloat(task.bias[static_cast<int64_t>(blockIdx.z) * task.out_channels + out_channel + i]) : 0.f;
  }
}

// The pixels under a tile as they lie, [patch row, pitch] elements with zeros outside the map, without waiting.
template <typename T>
__device__ __forceinline__ void CopyPatch(const FewChannelsTask<T>& task, const FewChannelsPlace& at,
                                          unsigned char* patch) {
  constexpr int kPiece = 16 / static_cast<int>(sizeof(T));
  const int lane = threadIdx.x % kWarp, warps = static_cast<int>(blockDim.x) / kWarp;
  const int top = at.y * task.stride[0] - task.pad_low[0];
  const T* image = task.x + static_cast<int64_t>(at.stack_image) * task.height * task.row_elements;
#pragma unroll 1
  for (int row = static_cast<int>(threadIdx.x) / kWarp; row < task.patch_rows; row += warps) {
    const int y = top + row;
    const bool there = y >= 0 && y < task.height;
    const T* from = image + y * task.row_elements;
    unsigned char* to = patch + row * task.pitch * static_cast<int>(sizeof(T));
    if (task.in_bytes == 16) {
#pragma unroll 2
      for (int e = lane * kPiece; e < task.pitch; e += kWarp * kPiece) {
        const int element = at.first + e;
        CopyAsync<16>(to + e * static_cast<int>(sizeof(T)), from + element, 16,
                      there && element >= 0 && element < task.row_elements);
      }
    } else if (sizeof(T) == 4 || task.in_bytes >= 4) {
      constexpr int kWord = 4 / static_cast<int>(sizeof(T));
#pragma unroll 2
      for (int e = lane * kWord; e < task.pitch; e += kWarp * kWord) {
        const int element = at.first + e;
        CopyAsync<4>(to + e * static_cast<int>(sizeof(T)), from + element, 4,
                     there && element >= 0 && element < task.row_elements);
      }
    } else {
#pragma unroll 1
      for (int e = lane; e < task.pitch; e += kTogether * kWarp) {
        T v[kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          const int element = at.first + e + i * kWarp;
          const bool inside = there && element >= 0 && element < task.row_elements;
          v[i] = inside ? from[element] : FromFloat<T>(0.f);
        }
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          if (e + i * kWarp < task.pitch) reinterpret_cast<T*>(to)[e + i * kWarp] = v[i];
        }
      }
    }
  }
}

// The same as it is read: rounded to TF32, or at 3xTF32; 16-bit elements as they are. May be in its place without
// 3xTF32.
template <class U, typename T>
__device__ __forceinline__ void RoundPatch(const FewChannelsTask<T>& task, const unsigned char* raw,
                                           unsigned char* patch) {
  if (sizeof(T) == 2 && raw == patch) return;
  const int pieces = task.patch_rows * task.pitch * static_cast<int>(sizeof(T)) / 16;
  const auto* from = reinterpret_cast<const uint4*>(raw);
  auto* to = reinterpret_cast<uint4*>(patch);
#pragma unroll 2
  for (int index = threadIdx.x; index < pieces; index += blockDim.x) {
    const uint4 v = from[index];
    if constexpr (U::kTf32x3 && U::kPaired) {
      const float2 x = HighLowOf(v.x), y = HighLowOf(v.y), z = HighLowOf(v.z), w = HighLowOf(v.w);
      auto* pairs = reinterpret_cast<float4*>(to) + 2 * index;
      pairs[0] = {x.x, y.x, x.y, y.y};
      pairs[1] = {z.x, w.x, z.y, w.y};
    } else if constexpr (U::kTf32x3) {
      StoreHighLow(to + index, pieces, v);
    } else if constexpr (sizeof(T) == 4) {
      to[index] = RoundToTf32(v);
    } else {
      to[index] = v;
    }
  }
}

}  // namespace jsc

#endif  // JSC_CUDA_DENSE_CONV_FEW_CHANNELS_STAGE_CUH_
