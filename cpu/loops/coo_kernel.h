// COO* convolution on the CPU (Xiang et al. 2022, section 3.4): the lists of cuda/sparse/coo/coo.cu, output stationary
// in L1.
//
// What: for every tile of TH x TW results and every channel, the list of its non-zeros (value, position in the tile's
//   patch with halo), in the order of position. Each entry times the channel's weights is added to the results its taps
//   reach, for one block of output channels at a time. Lists that a CooStar stores are read in x's place: they are cut
//   into tiles without halo, of any size, so each tile takes of all that it meets what lies in its patch.
// Layout: a task is one row of tiles. The weights of a chunk of channels are packed once per block for all of them, as
//   [channel, tap, block]. The sums of a tile, [TH * TW, block], are what stays in L1.
// Why this tiling: entries choose results, so sums are memory here and not registers, as on the GPU. Tiles keep them in
//   L1, and a row of tiles shares the packed weights, which stream from L2.
// Bound by: one store per multiply-add, half the rate of loops/window_kernel.h, whose sums are registers. This is the
//   twin of the GPU's kernel, to compare with and to test, not the fastest one here.
#ifndef JSC_CPU_LOOPS_COO_KERNEL_H_
#define JSC_CPU_LOOPS_COO_KERNEL_H_

#include "cpu/loops/coo_task.h"
#include "cpu/loops/epilogue.h"

namespace jsc {
namespace JSC_ISA {
namespace {

constexpr int64_t kCooVectors = 4;  // of a block

// What an entry at one position adds to: taps and results whose weights and sums meet there.
struct CooReach {
  uint16_t tap[49], pixel[49];
  int64_t count;
};

// Where in a stored tile a pixel of it lies.
struct StoredPlace {
  uint16_t row, column;
};

template <typename A>
struct CooBuffers {
  CooReach* reach;      // [positions]
  StoredPlace* places;  // [pixels of a stored tile]
  A* values;            // [tiles, chunk channels, positions]
  uint8_t* positions;   // same
  int32_t* counts;      // [tiles, chunk channels]
  A* packed;            // [chunk channels, taps, block]
  A* part;              // [pixels, block]: the sums of one chunk
  A* sums;              // [blocks, tiles, pixels, block]
  int64_t block, blocks, tiles, chunk;
  int64_t bytes;
};

template <typename A>
CooBuffers<A> TakeCooBuffers(const CooRow& row, char* scratch) {
  const CooVariant& shape = *row.shape;
  Arena arena(scratch);
  CooBuffers<A> b{};
  b.block = kCooVectors * kLanes<A>;
  b.blocks = CeilDiv(row.out_channel_end - row.out_channel_begin, b.block);
  b.tiles = CeilDiv(row.call->args.conv_size[1], shape.width);
  constexpr int64_t kPackedBytes = 128 << 10;
  const int64_t channel_bytes = shape.taps() * b.block * static_cast<int64_t>(sizeof(A));
  b.chunk = Min(Clamp(kPackedBytes / channel_bytes, 8, 64), row.call->args.group_channels);
  const int64_t slots = b.tiles * b.chunk * shape.positions();
  b.reach = arena.Take<CooReach>(shape.positions());
  b.places =
      row.lists == nullptr ? nullptr : arena.Take<StoredPlace>(row.lists->args.tile[0] * row.lists->args.tile[1]);
  b.values = arena.Take<A>(slots);
  b.positions = arena.Take<uint8_t>(slots);
  b.counts = arena.Take<int32_t>(b.tiles * b.chunk);
  b.packed = arena.Take<A>(b.chunk * shape.taps() * b.block);
  b.part = arena.Take<A>(shape.pixels() * b.block);
  b.sums = arena.Take<A>(b.blocks * b.tiles * shape.pixels() * b.block);
  b.bytes = arena.used();
  return b;
}

inline void FindReach(const CooVariant& shape, CooReach* reach) {
  for (int64_t y = 0; y < shape.patch_height(); ++y) {
    for (int64_t x = 0; x < shape.patch_width(); ++x, ++reach) {
      reach->count = 0;
      for (int64_t tap = 0; tap < shape.taps(); ++tap) {
        const int64_t row = y - tap / shape.kernel, column = x - tap % shape.kernel;
        if (row < 0 || column < 0 || row % shape.stride != 0 || column % shape.stride != 0) continue;
        if (row / shape.stride >= shape.height || column / shape.stride >= shape.width) continue;
        reach->tap[reach->count] = static_cast<uint16_t>(tap);
        reach->pixel[reach->count] = static_cast<uint16_t>(row / shape.stride * shape.width + column / shape.stride);
        ++reach->count;
      }
    }
  }
}

inline void FindPlaces(const CooStarArgs& stored, StoredPlace* places) {
  for (int64_t y = 0; y < stored.tile[0]; ++y) {
    for (int64_t x = 0; x < stored.tile[1]; ++x, ++places) {
      *places = {static_cast<uint16_t>(y), static_cast<uint16_t>(x)};
    }
  }
}

// The lists of one tile's channels [first, first + channels): every list has room for all positions.
template <typename T, typename A>
void ListTile(const CooRow& row, int64_t tile, int64_t first, int64_t channels, const CooBuffers<A>& b) {
  const ConvArgs& a = row.call->args;
  const CooVariant& shape = *row.shape;
  const int64_t step[2] = {shape.kernel == 1 ? a.stride[0] : 1, shape.kernel == 1 ? a.stride[1] : 1};
  const T* x = static_cast<const T*>(row.call->x) + row.group * a.group_channels + first;  // [N, H, W, C]
  int32_t* counts = b.counts + tile * b.chunk;
  const int64_t lists = tile * b.chunk * shape.positions();
  __builtin_memset(counts, 0, channels * sizeof(int32_t));
  for (int64_t p = 0; p < shape.positions(); ++p) {
    const int64_t y = row.tile_row * shape.height * a.stride[0] - a.pad_low[0] + p / shape.patch_width() * step[0];
    const int64_t column = tile * shape.width * a.stride[1] - a.pad_low[1] + p % shape.patch_width() * step[1];
    if (y < 0 || y >= a.size[0] || column < 0 || column >= a.size[1]) continue;
    const T* pixel = x + ((row.image * a.size[0] + y) * a.size[1] + column) * a.channels;
    for (int64_t c = 0; c < channels; ++c) {
      const A value = Widen(pixel[c]);
      const int64_t slot = lists + c * shape.positions() + counts[c];
      b.values[slot] = value;  // stays only if the count moves on
      b.positions[slot] = static_cast<uint8_t>(p);
      counts[c] += !IsZero(value);
    }
  }
}

// The same from stored lists: those of the tiles that the patch meets, one after the other.
template <typename T, typename A, typename Position>
void ListStored(const CooRow& row, int64_t tile, int64_t first, int64_t channels, const CooBuffers<A>& b) {
  const ConvArgs& a = row.call->args;
  const CooVariant& shape = *row.shape;
  const CooStarArgs& s = row.lists->args;
  const int64_t step[2] = {shape.kernel == 1 ? a.stride[0] : 1, shape.kernel == 1 ? a.stride[1] : 1};
  const int64_t patch[2] = {shape.patch_height(), shape.patch_width()};
  const int64_t origin[2] = {row.tile_row * shape.height * a.stride[0] - a.pad_low[0],
                             tile * shape.width * a.stride[1] - a.pad_low[1]};
  int64_t begin[3], end[3], span[2];  // tiles, and pixels of the patch that may be in the map
  for (int i = 0; i < 2; ++i) {
    span[i] = Clamp((patch[i] - 1) * step[i] + 1, 0, Max(a.size[i] - origin[i], 0));
    begin[i] = Max(origin[i], 0) / s.tile[i];
    end[i] = CeilDiv(Max(origin[i] + span[i], 0), s.tile[i]);
  }
  const int64_t first_channel = row.group * a.group_channels + first;
  begin[2] = first_channel / s.tile[2];
  end[2] = CeilDiv(first_channel + channels, s.tile[2]);
  const T* values = static_cast<const T*>(row.lists->values);
  const Position* positions = static_cast<const Position*>(row.lists->positions);
  int32_t* counts = b.counts + tile * b.chunk;
  const int64_t lists = tile * b.chunk * shape.positions();
  __builtin_memset(counts, 0, channels * sizeof(int32_t));
  const auto slots = static_cast<uint32_t>(s.slots()), depth = static_cast<uint32_t>(s.tile[2]);
  const bool apart = step[0] * step[1] != 1;
  const auto add = [&](int64_t down, int64_t right, int64_t channel, A value) {
    if (static_cast<uint64_t>(down) >= static_cast<uint64_t>(span[0]) ||
        static_cast<uint64_t>(right) >= static_cast<uint64_t>(span[1]) ||
        static_cast<uint64_t>(channel) >= static_cast<uint64_t>(channels)) {
      return;
    }
    if (apart) {
      if (down % step[0] != 0 || right % step[1] != 0) return;
      down /= step[0], right /= step[1];
    }
    if (IsZero(value) || counts[channel] == shape.positions()) return;
    const int64_t slot = lists + channel * shape.positions() + counts[channel]++;
    b.values[slot] = value;
    b.positions[slot] = static_cast<uint8_t>(down * patch[1] + right);
  };
  for (int64_t y = begin[0]; y < end[0]; ++y) {
    for (int64_t x = begin[1]; x < end[1]; ++x) {
      const int64_t down = y * s.tile[0] - origin[0], right = x * s.tile[1] - origin[1];
      for (int64_t c = begin[2]; c < end[2]; ++c) {
        const int64_t index = ((row.image * s.tiles[0] + y) * s.tiles[1] + x) * s.tiles[2] + c;
        const int64_t from = index * s.slots(), count = Clamp(row.lists->counts[index], 0, s.slots());
        const int64_t channel = c * s.tile[2] - first_channel;
        for (int64_t i = from; i < from + count; ++i) {
          const uint32_t position = positions[i];
          if (position >= slots) continue;
          const uint32_t pixel = depth == 1 ? position : position / depth;
          const StoredPlace& place = b.places[pixel];
          add(down + place.row, right + place.column, channel + (position - pixel * depth), Widen(values[i]));
        }
      }
    }
  }
}

// The lists of a tile's channels, from x or from what is stored.
template <typename T, typename A>
void ListAny(const CooRow& row, int64_t tile, int64_t first, int64_t channels, const CooBuffers<A>& b) {
  if (row.lists == nullptr) return ListTile<T>(row, tile, first, channels, b);
  const auto list = row.lists->args.position_bytes == 1 ? ListStored<T, A, uint8_t> : ListStored<T, A, uint16_t>;
  list(row, tile, first, channels, b);
}

// packed: [channels, taps, block] of output channels [begin, begin + width) of the group.
template <typename T, typename A>
[[gnu::noinline]] void PackCoo(const CooRow& row, int64_t first, int64_t channels, int64_t begin, int64_t width,
                               const CooBuffers<A>& b) {
  const ConvArgs& a = row.call->args;
  const int64_t taps = row.shape->taps(), out_channels = a.out_channels / a.groups;
  const T* kernel = static_cast<const T*>(row.call->kernel);  // [S, R, R, C / groups, K]
  A* packed = b.packed;
  for (int64_t c = first; c < first + channels; ++c) {
    for (int64_t tap = 0; tap < taps; ++tap, packed += b.block) {
      const T* weights = kernel + ((row.stack * taps + tap) * a.group_channels + c) * a.out_channels +
                         row.group * out_channels + begin;
      int64_t k = 0;
      for (; k + kLanes<A> <= width; k += kLanes<A>) Store(packed + k, Load(weights + k));
      for (; k < width; ++k) packed[k] = Widen(weights[k]);
      for (; k < b.block; ++k) packed[k] = 0;
    }
  }
}

// A chunk's products, added up from 0 on, to sums [pixels, block] of one tile.
template <typename A>
[[gnu::noinline]] void MultiplyTile(const CooVariant& shape, int64_t tile, int64_t channels, const CooBuffers<A>& b,
                                    A* sums) {
  constexpr int64_t kBlock = kCooVectors * kLanes<A>;
  const int64_t taps = shape.taps(), slots = shape.positions(), size = shape.pixels() * kBlock;
  __builtin_memset(b.part, 0, size * sizeof(A));
  for (int64_t c = 0; c < channels; ++c) {
    const int64_t list = (tile * b.chunk + c) * slots;
    const int32_t count = b.counts[tile * b.chunk + c];
    const A* weights = b.packed + c * taps * kBlock;
    for (int64_t i = list; i < list + count; ++i) {
      const A value = b.values[i];
      const CooReach& reach = b.reach[b.positions[i]];
      for (int64_t r = 0; r < reach.count; ++r) {
        A* sum = b.part + reach.pixel[r] * kBlock;
        const A* weight = weights + reach.tap[r] * kBlock;
#pragma GCC unroll 4
        for (int64_t v = 0; v < kBlock; v += kLanes<A>) AddTo(sum + v, value * Load(weight + v));
      }
    }
  }
  for (int64_t v = 0; v < size; v += kLanes<A>) AddTo(sums + v, Load(b.part + v));
}

// Bias, residual and ReLU on the sums of one tile and block, to out.
template <typename T, typename A>
void WriteTile(const CooRow& row, int64_t tile, int64_t begin, int64_t width, const CooBuffers<A>& b, const A* sums) {
  const ConvArgs& a = row.call->args;
  const CooVariant& shape = *row.shape;
  ConvTask task{};  // what Activate reads of it
  task.call = row.call;
  task.stack = row.stack;
  T* out = static_cast<T*>(row.call->out);  // [N, Ho, Wo, K]
  const int64_t channel = row.group * (a.out_channels / a.groups) + begin;
  for (int64_t pixel = 0; pixel < shape.pixels(); ++pixel, sums += b.block) {
    const int64_t y = row.tile_row * shape.height + pixel / shape.width;
    const int64_t x = tile * shape.width + pixel % shape.width;
    if (y >= a.conv_size[0] || x >= a.conv_size[1]) continue;
    const int64_t at = (row.image * a.conv_size[0] + y) * a.conv_size[1] + x;
    for (int64_t v = 0; v < width; v += kLanes<A>) {
      const ChannelRange range = {channel + v, Min(kLanes<A>, width - v)};
      StoreFirst(out + at * row.call->out_stride + range.channel, Activate<T>(task, Load(sums + v), range, at),
                 range.width);
    }
  }
}

template <typename T>
int64_t CooBytes(const CooRow& row) {
  return TakeCooBuffers<Accumulator<T>>(row, nullptr).bytes;
}

template <typename T>
void RunCoo(const CooRow& row, char* scratch) {
  using A = Accumulator<T>;
  const IeeeScope ieee;
  const CooVariant& shape = *row.shape;
  const CooBuffers<A> b = TakeCooBuffers<A>(row, scratch);
  const int64_t tile_sums = shape.pixels() * b.block, channels = row.call->args.group_channels;
  FindReach(shape, b.reach);
  if (row.lists != nullptr) FindPlaces(row.lists->args, b.places);
  __builtin_memset(b.sums, 0, b.blocks * b.tiles * tile_sums * sizeof(A));
  const auto width = [&](int64_t block) {
    return Min(b.block, row.out_channel_end - row.out_channel_begin - block * b.block);
  };
  for (int64_t first = 0; first < channels; first += b.chunk) {
    const int64_t here = Min(b.chunk, channels - first);
    for (int64_t tile = 0; tile < b.tiles; ++tile) ListAny<T>(row, tile, first, here, b);
    for (int64_t block = 0; block < b.blocks; ++block) {
      PackCoo<T>(row, first, here, row.out_channel_begin + block * b.block, width(block), b);
      for (int64_t tile = 0; tile < b.tiles; ++tile) {
        MultiplyTile(shape, tile, here, b, b.sums + (block * b.tiles + tile) * tile_sums);
      }
    }
  }
  for (int64_t block = 0; block < b.blocks; ++block) {
    for (int64_t tile = 0; tile < b.tiles; ++tile) {
      const A* sums = b.sums + (block * b.tiles + tile) * tile_sums;
      WriteTile<T>(row, tile, row.out_channel_begin + block * b.block, width(block), b, sums);
    }
  }
}

}  // namespace
}  // namespace JSC_ISA
}  // namespace jsc

#endif  // JSC_CPU_LOOPS_COO_KERNEL_H_
