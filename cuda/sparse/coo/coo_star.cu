// CooStar to and from a dense map (Xiang et al. 2022, Algorithm 1, without its atomics).
//
// What: one warp makes or reads the list of one tile TH x TW x TC. Places in a list come from ballots in the order of
// position, so lists are the same every time. Layout: native/coo_star_args.h. Both directions only move bits, so the
// element type is an integer of its size. Bound by memory, coalesced along channels; a tile of few channels reads parts
// of a sector.
#include <algorithm>

#include "cuda/core/launch.cuh"
#include "cuda/ffi/kernels.h"
#include "native/coo_star_args.h"

namespace jsc {
namespace {

constexpr int kCooStarThreads = 256;

struct CooStarElement {
  int64_t at;  // in x
  bool inside;
};

__device__ inline CooStarElement ElementAt(const CooStarArgs& a, const CooStarTile& tile, int position) {
  const int channels = static_cast<int>(a.tile[2]), width = static_cast<int>(a.tile[1]);
  const int pixel = position / channels, c = position % channels, h = pixel / width, w = pixel % width;
  return {tile.origin + (h * a.size[1] + w) * a.channels + c, h < tile.size[0] && w < tile.size[1] && c < tile.size[2]};
}

template <typename Bits, typename Position>
__global__ void __launch_bounds__(kCooStarThreads)
    CooFromDenseKernel(const __grid_constant__ CooStarArgs a, const Bits* x, Bits* values, Position* positions,
                       int32_t* counts) {
  const int lane = threadIdx.x % kWarp, slots = static_cast<int>(a.slots());
  const int64_t warps = static_cast<int64_t>(gridDim.x) * (kCooStarThreads / kWarp);
  for (int64_t index = blockIdx.x * (kCooStarThreads / kWarp) + threadIdx.x / kWarp; index < a.all_tiles();
       index += warps) {
    const CooStarTile tile = CooStarTileAt(a, index);
    Bits* list = values + index * slots;
    Position* places = positions + index * slots;
    int used = 0;
    for (int first = 0; first < slots; first += kWarp) {
      const int position = first + lane;
      const CooStarElement element = ElementAt(a, tile, position);
      const Bits bits = position < slots && element.inside ? x[element.at] : Bits{0};
      const bool kept = static_cast<Bits>(bits << 1) != 0;
      const unsigned mask = __ballot_sync(0xffffffffu, kept);
      if (kept) {
        const int slot = used + __popc(mask & ((1u << lane) - 1));
        list[slot] = bits;
        places[slot] = static_cast<Position>(position);
      }
      used += __popc(mask);
    }
    for (int slot = used + lane; slot < slots; slot += kWarp) {
      list[slot] = 0;
      places[slot] = 0;
    }
    if (lane == 0) counts[index] = used;
  }
}

template <typename Bits, typename Position>
__global__ void __launch_bounds__(kCooStarThreads)
    CooToDenseKernel(const __grid_constant__ CooStarArgs a, const Bits* values, const Position* positions,
                     const int32_t* counts, Bits* x) {
  const int lane = threadIdx.x % kWarp, slots = static_cast<int>(a.slots());
  const int64_t warps = static_cast<int64_t>(gridDim.x) * (kCooStarThreads / kWarp);
  for (int64_t index = blockIdx.x * (kCooStarThreads / kWarp) + threadIdx.x / kWarp; index < a.all_tiles();
       index += warps) {
    const CooStarTile tile = CooStarTileAt(a, index);
    for (int position = lane; position < slots; position += kWarp) {
      const CooStarElement element = ElementAt(a, tile, position);
      if (element.inside) x[element.at] = 0;
    }
    __syncwarp();
    const int count = min(max(counts[index], 0), slots);
    for (int slot = lane; slot < count; slot += kWarp) {
      const int position = positions[index * slots + slot];
      const CooStarElement element = ElementAt(a, tile, position);
      if (element.inside && position < slots) x[element.at] = values[index * slots + slot];
    }
  }
}

// Calls body(Bits{}, Position{}) with the integer types of a call's elements and positions.
template <typename Body>
Error DispatchBits(const CooStarArgs& a, const Body& body) {
  const auto with = [&](auto bits) { return a.position_bytes == 1 ? body(bits, uint8_t{}) : body(bits, uint16_t{}); };
  if (a.element_bytes == 2) return with(uint16_t{});
  return a.element_bytes == 4 ? with(uint32_t{}) : with(uint64_t{});
}

unsigned CooStarBlocks(const CooStarArgs& a) {
  constexpr int64_t kMostBlocks = 1 << 16, kTiles = kCooStarThreads / kWarp;
  return static_cast<unsigned>(std::min((a.all_tiles() + kTiles - 1) / kTiles, kMostBlocks));
}

}  // namespace

Error CooFromDense(const CooStarArgs& a, const void* x, void* values, void* positions, void* counts,
                   cudaStream_t stream) {
  if (a.all_tiles() == 0) return Error::Success();
  return DispatchBits(a, [&](auto bits, auto position) {
    using Bits = decltype(bits);
    using Position = decltype(position);
    CooFromDenseKernel<Bits, Position><<<CooStarBlocks(a), kCooStarThreads, 0, stream>>>(
        a, static_cast<const Bits*>(x), static_cast<Bits*>(values), static_cast<Position*>(positions),
        static_cast<int32_t*>(counts));
    return CheckCuda(cudaGetLastError(), "CooFromDenseKernel");
  });
}

Error CooToDense(const CooStarArgs& a, const void* values, const void* positions, const void* counts, void* x,
                 cudaStream_t stream) {
  if (a.all_tiles() == 0) return Error::Success();
  return DispatchBits(a, [&](auto bits, auto position) {
    using Bits = decltype(bits);
    using Position = decltype(position);
    CooToDenseKernel<Bits, Position><<<CooStarBlocks(a), kCooStarThreads, 0, stream>>>(
        a, static_cast<const Bits*>(values), static_cast<const Position*>(positions),
        static_cast<const int32_t*>(counts), static_cast<Bits*>(x));
    return CheckCuda(cudaGetLastError(), "CooToDenseKernel");
  });
}

}  // namespace jsc
