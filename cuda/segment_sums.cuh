// From sums to results in a segment: what blocks or warps have is added in their order, then bias, residual and ReLU.
// And the max pool, which has no sums.
#ifndef JSC_CUDA_SEGMENT_SUMS_CUH_
#define JSC_CUDA_SEGMENT_SUMS_CUH_

#include "segment_load.cuh"

namespace jsc {

// Four elements as they lie in memory. They are read from L2: other blocks have just written them.
template <typename T>
struct Quad {
  using Raw = std::conditional_t<sizeof(T) == 4, uint4, uint2>;
  Raw raw;
  __device__ __forceinline__ Quad() : raw{} {}
  __device__ __forceinline__ explicit Quad(const T* p) : raw(__ldcg(reinterpret_cast<const Raw*>(p))) {}
  __device__ __forceinline__ float4 Value() const { return Load4(reinterpret_cast<const T*>(&raw)); }
};

// Max pool, one thread a quad of channels at a time.
template <typename T>
__device__ __noinline__ void RunPool(const SegmentLayer<T>& layer) {
  const int quads = layer.features / 4;
  for (int i = blockIdx.x * kSegmentThreads + threadIdx.x; i < layer.pixels * quads; i += gridDim.x * kSegmentThreads) {
    const int pixel = i / quads, quad = i - pixel * quads;
    const Quotient row = Divide(pixel, layer.by_out_width), image = Divide(row.quotient, layer.by_out_height);
    const int y = image.remainder * layer.stride[0] - layer.pad_low[0];
    const int x = row.remainder * layer.stride[1] - layer.pad_low[1];
    const T* from =
        layer.x + (static_cast<int64_t>(image.quotient) * layer.height * layer.width) * layer.features + quad * 4;
    float4 best = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
    constexpr int kBatch = 9;  // loads in flight
#pragma unroll 1
    for (int first = 0; first < layer.reach[0] * layer.reach[1]; first += kBatch) {
      Quad<T> values[kBatch];
      bool inside[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const Quotient tap = Divide(first + i, layer.by_kernel_width);
        const int row_of = y + tap.quotient, column = x + tap.remainder;
        inside[i] = tap.quotient < layer.reach[0] &&
                    static_cast<unsigned>(row_of) < static_cast<unsigned>(layer.height) &&
                    static_cast<unsigned>(column) < static_cast<unsigned>(layer.width);
        if (inside[i]) values[i] = Quad<T>(from + (row_of * layer.width + column) * layer.features);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const float4 v = values[i].Value();
        if (inside[i])
          best = {MaxOrNan(best.x, v.x), MaxOrNan(best.y, v.y), MaxOrNan(best.z, v.z), MaxOrNan(best.w, v.w)};
      }
    }
    StoreUpTo4(layer.out + static_cast<int64_t>(pixel) * layer.features + quad * 4, best, 4, true);
  }
}

// Completes a block's share of its tile: every `step`-th pixel, a quad of filters a thread. What is added up lies in
// `parts` places, of warps or of blocks, and is added in their order; every thread loads kMost quads at the most.
template <typename T>
struct ShareWriter {
  static constexpr int kMost = 8;
  T* out;  // at the first of its results
  int64_t stride;
  int quad, first, step, count, parts_log, relu;  // of tile pixels
  Quad<T> bias, extra[kMost];

  __device__ __forceinline__ void Find(const SegmentLayer<T>& layer, const SegmentPlace& place) {
    const int quads_log = layer.warps_f + 3, splits_log = layer.splits_log;
    quad = static_cast<int>(threadIdx.x) & ((1 << quads_log) - 1);
    first = ((static_cast<int>(threadIdx.x) >> quads_log) << splits_log) + place.split;
    step = (kSegmentThreads >> quads_log) << splits_log;
    parts_log = splits_log > 0 ? splits_log : layer.warps_k;
    relu = layer.relu;
    const int pixels = min(kWarpSide << layer.warps_p, layer.pixels - place.pixel);
    const int feature = place.feature + quad * 4, features = layer.features;
    count = feature < features && pixels > first ? (pixels - first + step - 1) / step : 0;
    stride = static_cast<int64_t>(step) * features;
    const int64_t at = static_cast<int64_t>(place.pixel + first) * features + feature;
    out = layer.out + at;
    bias = layer.bias && count ? Quad<T>(layer.bias + feature) : Quad<T>();
    const T* residual = layer.residual ? layer.residual + at : nullptr;
#pragma unroll
    for (int j = 0; j < kMost; ++j) {
      extra[j] = Quad<T>();
      const int i = j >> parts_log;
      if (residual && i << parts_log == j && i < count) extra[j] = Quad<T>(residual + i * stride);
    }
  }
  // load(pixel, part): a quad of sums
  template <typename LoadPart>
  __device__ __forceinline__ void Write(int loads, const LoadPart& load) {
    float4 part[kMost];
#pragma unroll
    for (int j = 0; j < kMost; ++j) {
      if (j < loads) part[j] = load(first + (j >> parts_log) * step, j & ((1 << parts_log) - 1));
    }
    float4 sum = part[0];
    Quad<T> more = extra[0];
    T* to = out;
    int left = count;
#pragma unroll
    for (int j = 1; j <= kMost; ++j) {
      if (j > loads) break;
      if ((j & ((1 << parts_log) - 1)) == 0) {
        sum = sum + (bias.Value() + more.Value());
        if (relu) sum = {Relu(sum.x), Relu(sum.y), Relu(sum.z), Relu(sum.w)};
        if (left-- > 0) StoreUpTo4(to, sum, 4, true);
        to += stride;
        if (j < kMost) sum = part[j], more = extra[j];
      } else if (j < kMost) {
        sum = sum + part[j];
      }
    }
  }
};

}  // namespace jsc

#endif  // JSC_CUDA_SEGMENT_SUMS_CUH_
