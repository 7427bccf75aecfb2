// The lists of a chunk from those that a CooStar stores, in place of steps 1 and 2 of the COO* convolution
// (sparse/coo/coo.cu).
//
// What: stored tiles have no halo and may have any size. So a block reads the lists of all tiles that its patch meets,
//   drops entries that lie outside of it, and numbers the others by their position in the patch.
// How: a warp makes the list of a channel, and then the next. Its lanes read the counts of up to 32 tiles at once. A
//   prefix sum over lanes gives each lane the entry of some tile, so that lanes read 32 entries at a time, whatever the
//   tiles. Ballots give the places in the list. Entries are in the order of tiles, and of positions within a tile: sums
//   repeat bit for bit, and differ in rounding from those of the dense map, whose lists are in the order of the patch.
// Bound by: two dependent reads for each channel and 32 entries, which other warps hide. A tile of TC channels has one
//   list for them, which is read TC times. The 7x7 tile with one output channel a thread spills one word (sm_90).
#ifndef JSC_CUDA_SPARSE_COO_STORED_CUH_
#define JSC_CUDA_SPARSE_COO_STORED_CUH_

#include "cuda/sparse/coo/lists.cuh"

namespace jsc {

// Stored tiles that a patch meets: first row and column of them, and how many.
struct StoredTiles {
  int first[2], count[2];
};

template <typename T, int kVariant>
__device__ StoredTiles StoredTilesOf(const CooTask<T>& task, const int (&origin)[2]) {
  constexpr CooVariant kShape = kCooVariants[kVariant];
  const int patch[2] = {kShape.patch_height(), kShape.patch_width()}, size[2] = {task.height, task.width};
  StoredTiles tiles;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int begin = max(origin[i], 0), end = min(origin[i] + (patch[i] - 1) * task.step[i] + 1, size[i]);
    tiles.first[i] = Divide(begin, task.stored.by_tile[i]).quotient;
    tiles.count[i] = end > begin ? Divide(end - 1, task.stored.by_tile[i]).quotient - tiles.first[i] + 1 : 0;
  }
  return tiles;
}

// Where in the patch a pixel of the map lies, or -1.
template <typename T, int kVariant>
__device__ int PatchPosition(const CooTask<T>& task, const int (&origin)[2], int row, int column) {
  constexpr CooVariant kShape = kCooVariants[kVariant];
  int y = row - origin[0], x = column - origin[1];
  if (y < 0 || x < 0 || row >= task.height || column >= task.width) return -1;
  if constexpr (kShape.kernel == 1) {  // of any stride
    if (y % task.step[0] != 0 || x % task.step[1] != 0) return -1;
    y /= task.step[0], x /= task.step[1];
  }
  return y < kShape.patch_height() && x < kShape.patch_width() ? y * kShape.patch_width() + x : -1;
}

// Appends the entries of 32 tiles, one a lane, that belong to channel `tile_channel` of a tile: the tiles are number
// `from` and so on of `tiles`, and the lane's has `count` entries from `entry` on. Returns how many the list has then.
template <typename T, int kVariant>
__device__ int AppendStored(const CooTask<T>& task, const int (&origin)[2], const StoredTiles& tiles, int from,
                            int64_t entry, int count, int tile_channel, CooEntry* list, int used) {
  constexpr int kPositions = kCooVariants[kVariant].positions();
  constexpr unsigned kAll = 0xffffffffu;
  const CooStored<T>& stored = task.stored;
  const int lane = threadIdx.x % kWarp;
  int upto = count;
#pragma unroll
  for (int distance = 1; distance < kWarp; distance *= 2) {
    const int before = __shfl_up_sync(kAll, upto, distance);
    if (lane >= distance) upto += before;
  }
  const int all = __shfl_sync(kAll, upto, kWarp - 1);
  entry -= upto - count;  // so that entry number k of all is at entry + k
#pragma unroll 1
  for (int k = lane; k - lane < all; k += kWarp) {
    int source = 0;  // the lane whose tile has entry k
#pragma unroll
    for (int half = kWarp / 2; half > 0; half /= 2) {
      if (__shfl_sync(kAll, upto, source + half - 1) <= k) source += half;
    }
    const int64_t at = __shfl_sync(kAll, entry, source) + k;
    int position = -1;
    float value = 0.f;
    if (k < all) {
      const int place = stored.wide_positions ? static_cast<const uint16_t*>(stored.positions)[at]
                                              : static_cast<const uint8_t*>(stored.positions)[at];
      value = ToFloat(stored.values[at]);
      const Quotient pixel = Divide(place, stored.by_tile[2]), in_tile = Divide(pixel.quotient, stored.by_tile[1]);
      if (value != 0.f && place < stored.slots && pixel.remainder == tile_channel) {
        const int y = tiles.first[0] + (from + source) / tiles.count[1];
        const int x = tiles.first[1] + (from + source) % tiles.count[1];
        position =
            PatchPosition<T, kVariant>(task, origin, y * static_cast<int>(stored.by_tile[0].divisor) + in_tile.quotient,
                                       x * static_cast<int>(stored.by_tile[1].divisor) + in_tile.remainder);
      }
    }
    const unsigned kept = __ballot_sync(kAll, position >= 0);
    const int slot = used + __popc(kept & ((1u << lane) - 1));
    if (position >= 0 && slot < kPositions) list[slot] = {value, static_cast<uint32_t>(position)};
    used += __popc(kept);
  }
  return used;
}

// The lists of channels [first, first + kCooChunk), all warps together; ends with the lists visible to all.
template <typename T, int kVariant>
__device__ void TakeStoredLists(const CooTask<T>& task, const CooMemory<T, kVariant>& m, int first) {
  constexpr int kPositions = kCooVariants[kVariant].positions();
  const CooStored<T>& stored = task.stored;
  const CooPlace b = LocateCoo<T, kVariant>(task);
  const int origin[2] = {b.out[0] * task.stride[0] - task.pad_low[0], b.out[1] * task.stride[1] - task.pad_low[1]};
  const StoredTiles tiles = StoredTilesOf<T, kVariant>(task, origin);
  const int all = tiles.count[0] * tiles.count[1], lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
#pragma unroll 1
  for (int channel = threadIdx.x / kWarp; channel < kCooChunk; channel += warps) {
    CooEntry* list = m.lists + channel * CooMemory<T, kVariant>::kPitch;
    const Quotient c = Divide(b.group * task.group_channels + first + channel, stored.by_tile[2]);
    int used = 0;
#pragma unroll 1
    for (int from = 0; first + channel < b.channels_end && from < all; from += kWarp) {
      int count = 0;
      int64_t entry = 0;
      if (from + lane < all) {
        const int y = tiles.first[0] + (from + lane) / tiles.count[1];
        const int x = tiles.first[1] + (from + lane) % tiles.count[1];
        const int64_t index = ((b.image * stored.tiles[0] + y) * stored.tiles[1] + x) * stored.tiles[2] + c.quotient;
        count = min(max(stored.counts[index], 0), stored.slots);
        entry = index * stored.slots;
      }
      used = AppendStored<T, kVariant>(task, origin, tiles, from, entry, count, c.remainder, list, used);
    }
    used = min(used, kPositions);
    if (lane == 0) {
      list[used] = {0.f, kPositions};
      m.totals[channel] = used;
    }
  }
  __syncthreads();
}

}  // namespace jsc

#endif  // JSC_CUDA_SPARSE_COO_STORED_CUH_
