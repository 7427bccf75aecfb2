#include "cpu/ffi/coo_star.h"

#include <algorithm>
#include <cstring>
#include <exception>

#include "cpu/core/parallel.h"

namespace jsc {
namespace {

// Both directions only move bits: an element is an unsigned integer, and zero where all bits but the sign are.
template <typename Bits>
bool IsZeroBits(Bits bits) {
  return static_cast<Bits>(bits << 1) == 0;
}

template <typename Bits, typename Position>
void ListTile(const CooStarArgs& a, int64_t index, const Bits* x, Bits* values, Position* positions, int32_t* counts) {
  const CooStarTile tile = CooStarTileAt(a, index);
  values += index * a.slots();
  positions += index * a.slots();
  int64_t used = 0;
  for (int64_t h = 0; h < tile.size[0]; ++h) {
    for (int64_t w = 0; w < tile.size[1]; ++w) {
      const Bits* pixel = x + tile.origin + (h * a.size[1] + w) * a.channels;
      const int64_t first = (h * a.tile[1] + w) * a.tile[2];
      for (int64_t c = 0; c < tile.size[2]; ++c) {
        if (IsZeroBits(pixel[c])) continue;
        values[used] = pixel[c];
        positions[used++] = static_cast<Position>(first + c);
      }
    }
  }
  counts[index] = static_cast<int32_t>(used);
  std::fill(values + used, values + a.slots(), Bits{0});
  std::fill(positions + used, positions + a.slots(), Position{0});
}

template <typename Bits, typename Position>
void FillTile(const CooStarArgs& a, int64_t index, const Bits* values, const Position* positions, const int32_t* counts,
              Bits* x) {
  const CooStarTile tile = CooStarTileAt(a, index);
  for (int64_t h = 0; h < tile.size[0]; ++h) {
    for (int64_t w = 0; w < tile.size[1]; ++w) {
      std::memset(x + tile.origin + (h * a.size[1] + w) * a.channels, 0, tile.size[2] * sizeof(Bits));
    }
  }
  const int64_t count = std::clamp<int64_t>(counts[index], 0, a.slots());
  for (int64_t slot = index * a.slots(); slot < index * a.slots() + count; ++slot) {
    const int64_t position = positions[slot], pixel = position / a.tile[2], c = position % a.tile[2];
    const int64_t h = pixel / a.tile[1], w = pixel % a.tile[1];
    if (h >= tile.size[0] || w >= tile.size[1] || c >= tile.size[2]) continue;  // lists that fromdense did not make
    x[tile.origin + (h * a.size[1] + w) * a.channels + c] = values[slot];
  }
}

// Calls body(Bits{}, Position{}) with the integer types of a call's elements and positions.
template <typename Body>
void Dispatch(const CooStarArgs& a, const Body& body) {
  const auto with = [&](auto bits) { a.position_bytes == 1 ? body(bits, uint8_t{}) : body(bits, uint16_t{}); };
  if (a.element_bytes == 2) return with(uint16_t{});
  a.element_bytes == 4 ? with(uint32_t{}) : with(uint64_t{});
}

// Calls body(tile) for every tile, several to a task.
template <typename Body>
void ForTiles(ffi::ThreadPool& pool, const CooStarArgs& a, const Body& body) {
  constexpr int64_t kElements = 16384;  // of a task
  const int64_t count = a.all_tiles(), each = std::max<int64_t>(1, kElements / a.slots());
  ParallelFor(pool, std::max<int64_t>(1, pool.num_threads()), (count + each - 1) / each, [&](int64_t task, int64_t) {
    for (int64_t tile = task * each; tile < std::min(count, (task + 1) * each); ++tile) body(tile);
  });
}

}  // namespace

ffi::Error CooFromDense(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> values,
                        ffi::Result<ffi::AnyBuffer> positions, ffi::Result<ffi::AnyBuffer> counts,
                        ffi::Span<const int64_t> tile) try {
  const ffi::ErrorOr<CooStarArgs> a = MakeCooStarArgs(x, *values, *positions, *counts, tile);
  if (a.has_error()) return a.error();
  Dispatch(*a, [&](auto bits, auto position) {
    using Bits = decltype(bits);
    using Position = decltype(position);
    ForTiles(pool, *a, [&](int64_t index) {
      ListTile(*a, index, static_cast<const Bits*>(x.untyped_data()), static_cast<Bits*>(values->untyped_data()),
               static_cast<Position*>(positions->untyped_data()), static_cast<int32_t*>(counts->untyped_data()));
    });
  });
  return ffi::Error::Success();
} catch (const std::exception& error) {
  return ffi::Error(ffi::ErrorCode::kInternal, error.what());
}

ffi::Error CooToDense(ffi::ThreadPool pool, ffi::AnyBuffer values, ffi::AnyBuffer positions, ffi::AnyBuffer counts,
                      ffi::Result<ffi::AnyBuffer> x, ffi::Span<const int64_t> tile) try {
  const ffi::ErrorOr<CooStarArgs> a = MakeCooStarArgs(*x, values, positions, counts, tile);
  if (a.has_error()) return a.error();
  Dispatch(*a, [&](auto bits, auto position) {
    using Bits = decltype(bits);
    using Position = decltype(position);
    ForTiles(pool, *a, [&](int64_t index) {
      FillTile(*a, index, static_cast<const Bits*>(values.untyped_data()),
               static_cast<const Position*>(positions.untyped_data()),
               static_cast<const int32_t*>(counts.untyped_data()), static_cast<Bits*>(x->untyped_data()));
    });
  });
  return ffi::Error::Success();
} catch (const std::exception& error) {
  return ffi::Error(ffi::ErrorCode::kInternal, error.what());
}

}  // namespace jsc
