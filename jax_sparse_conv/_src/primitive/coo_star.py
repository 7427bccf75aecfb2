"""COO* of cuSNN (Xiang et al. 2022, section 3.4): a feature map as lists of non-zeros per tile, without a prefix sum.

    tile 2 x 2 x 1      values       positions    count
      0  7
      3  0              7 3 0 0      1 2 0 0      2            position = (th * TW + tw) * TC + tc

Every list has room for all elements of its tile, so its start is known before anything is counted. The `"coo"`
convolution of a dense map builds such lists in shared memory and stores none. Here they are arrays, which a convolution
reads in the map's place (`jax_sparse_conv.conv`).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax
from jax.sharding import NamedSharding, PartitionSpec

from jax_sparse_conv._src import _native, typed_json
from jax_sparse_conv._src.dispatch.coo import configurations, cost_model
from jax_sparse_conv._src.primitive import explicit, reference
from jax_sparse_conv._src.problem import described
from jax_sparse_conv._src.problem import geometry as geo
from jax_sparse_conv._src.problem.arrays import as_array

_DTYPES = ("float32", "bfloat16", "float16", "float64")
_MAX_POSITIONS = 2**16
_MAX_INT32 = 2**31 - 1
_UNBUILT_TILE = (4, 4, 1)  # of the model where the package is not built, and no variants are known
Tile = tuple[int, int, int]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class CooStar:
    """COO* format of a feature map [N, H, W, C], tiles of TH x TW x TC (Xiang et al. 2022, Figure 6).

    A pytree of three arrays. Gradients with respect to the dense map reach stored non-zeros only. Those with respect to
    a `CooStar` need `jax.grad(..., allow_int=True)`, since positions and counts are integers.

    Attributes:
      values: [N, tH, tW, tC, slots], the non-zeros of each tile in the order of position (row, column, channel), then
        zeros. slots = TH * TW * TC, and tH = ceil(H / TH), and so on.
      positions: [N, tH, tW, tC, slots] uint8, or uint16 where a tile has more than 256 elements. Within the tile it is
        `(th * TW + tw) * TC + tc`, and 0 in unused slots. Those of a list differ; where they do not, results are
        unspecified.
      counts: [N, tH, tW, tC] int32, non-zeros of each tile.
      size: (H, W) of the feature map.
      channels: C.
      tile: (TH, TW, TC).
    """

    values: jax.Array
    positions: jax.Array
    counts: jax.Array
    size: tuple[int, int] = dataclasses.field(metadata={"static": True})
    channels: int = dataclasses.field(metadata={"static": True})
    tile: Tile = dataclasses.field(metadata={"static": True})

    def __repr__(self) -> str:
        return described.without_values(self)

    @classmethod
    def fromdense(
        cls,
        x: jax.typing.ArrayLike,
        tile: Sequence[int] | None = None,
        *,
        kernel_shape: Sequence[int] | None = None,
        strides: int | Sequence[int] = 1,
    ) -> Self:
        """Compress `x` (Algorithm 1 of the paper, without its atomics: slots are in a fixed order).

        Both zeros are left out; NaN, infinities and subnormals are not.

        Without a tile the model of section 3.5 picks one, for a convolution of `x` by `kernel_shape` and `strides` on
        the GPU here, or an H200 without one. The tile is what the convolution's own tile of results moves over, of one
        channel: (TH * stride, TW * stride, 1). `jax_sparse_conv.conv` reads lists of any tile. Those of one channel are
        the fastest: a kernel for GPUs reads a list as often as its tile has channels.

        Args:
          x: [N, H, W, C], float32, bfloat16, float16 or float64.
          tile: (TH, TW, TC), each at least 1 and together at most 65536 elements; up to 256 take one-byte positions.
            None is the model's.
          kernel_shape: [kh, kw, C / groups, K] of the convolution that is planned for; None is [3, 3, C, C].
          strides: of that convolution, an int or two.

        Raises:
          ValueError: an x of another rank, a tile that does not fit, or a convolution that COO* does not compute.
          TypeError: another dtype.
        """
        x = as_array("x", x)
        if str(x.dtype) not in _DTYPES:
            raise TypeError(f"x.dtype={x.dtype} is not one of {', '.join(_DTYPES)}")
        if x.ndim != 4:
            raise ValueError(f"x.shape={x.shape} has {x.ndim} dimensions; it must be [N, H, W, C]")
        checked = _planned_tile(x, kernel_shape, strides) if tile is None else _tile(tile)
        values, positions, counts = explicit.by_image(lambda x: _fromdense(x, checked), x)
        return cls(values, positions, counts, (x.shape[1], x.shape[2]), x.shape[3], checked)

    def check(self) -> None:
        """Raise for arrays that are no lists of this map, such as those of a slice of one.

        Raises:
          ValueError: names the array, its shape and what that must be; or the size, the channels or the tile.
          TypeError: an array that is none, or of another dtype.
        """
        sizes = (*self.size, self.channels) if isinstance(self.size, tuple) else ()
        if len(sizes) != 3 or not all(geo.is_symbolic(n) or (isinstance(n, int) and n >= 0) for n in sizes):
            raise ValueError(f"x.size={self.size!r} and x.channels={self.channels!r} are not (H, W) and C, all ints")
        if not isinstance(self.tile, tuple) or _tile(self.tile) != self.tile:
            raise ValueError(f"x.tile={self.tile!r} is not a tuple of three ints of at least 1, (TH, TW, TC)")
        given = {"values": self.values, "positions": self.positions, "counts": self.counts}
        for name, array in given.items():
            if not (hasattr(array, "shape") and hasattr(array, "dtype")):
                raise TypeError(f"x.{name}={array!r} is not an array")
        lists = (*self.counts.shape[:-3], *_counts_of(sizes, self.tile))
        slots = (*lists, math.prod(self.tile))
        for (name, array), shape in zip(given.items(), (slots, slots, lists), strict=True):
            if array.shape != shape:
                raise ValueError(
                    f"x.{name}.shape={array.shape} must be {shape}, of a map of {self.size} pixels and "
                    f"{self.channels} channels in tiles of {self.tile}"
                )
        for name, dtypes in (("values", _DTYPES), ("positions", (_position_dtype(self.tile),)), ("counts", ("int32",))):
            if str(given[name].dtype) not in map(str, dtypes):
                raise TypeError(f"x.{name}.dtype={given[name].dtype} must be {' or '.join(map(str, dtypes))}")

    def todense(self) -> jax.Array:
        """The feature map [N, H, W, C], bit for bit but for -0.0, which comes back as 0.0; errors as of `check`."""
        self.check()
        dense: jax.Array = self._dense()
        return dense

    def __jax_array__(self) -> jax.Array:
        raise TypeError("a CooStar is not an array, which only conv and conv_pool take it for; x.todense() is one")

    @jax.jit
    def _dense(self) -> jax.Array:
        size, tile = self.shape[-3:], self.tile
        return explicit.by_image(lambda *lists: _todense(*lists, size, tile), self.values, self.positions, self.counts)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the feature map, [N, H, W, C] (more leading axes where `jax.vmap` added them)."""
        return (*self.counts.shape[:-3], *self.size, self.channels)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.values.dtype)

    @property
    def slots(self) -> int:
        """Slots per tile, as many as it has elements."""
        return int(self.values.shape[-1])

    @property
    def nbytes(self) -> int:
        """Bytes of values and positions, unused slots included: eqs. (1) and (2) of the paper.

        1.25 times a float32 map with one-byte positions, where tiles divide it. The counts, four bytes a tile, are not
        in the paper's equations and not in here.
        """
        return sum(math.prod(a.shape) * a.dtype.itemsize for a in (self.values, self.positions))

    @property
    def multiplications(self) -> jax.Array:
        """Multiplications of one output channel and one kernel position: the non-zeros.

        A scalar, int32, or float32 where the elements of the map do not fit int32.
        """
        fits = math.prod(self.shape) <= _MAX_INT32
        return jnp.sum(self.counts, dtype=jnp.int32 if fits else jnp.float32)

    @property
    def additions(self) -> jax.Array:
        """Additions of the same: every product is added to a sum that begins at zero; typed as `multiplications`."""
        return self.multiplications

    @property
    def dense_multiplications(self) -> int:
        """Multiplications of one output channel and kernel position that skips nothing."""
        return math.prod(self.shape)

    @property
    def dense_additions(self) -> int:
        """Additions of the same."""
        return math.prod(self.shape)


export.register_pytree_node_serialization(
    CooStar,
    serialized_name="jax_sparse_conv.CooStar",
    serialize_auxdata=lambda fixed: json.dumps(fixed).encode(),
    deserialize_auxdata=lambda text: typed_json.read(tuple[geo.Pair, int, Tile], json.loads(text), "CooStar"),
)


def _tile(tile: Sequence[int]) -> Tile:
    sentence = f"tile={tile!r} is not three ints of at least 1, (TH, TW, TC)"
    try:
        height, width, channels = (operator.index(entry) for entry in tile)
    except (TypeError, ValueError) as error:
        raise ValueError(sentence) from error
    if min(height, width, channels) < 1:
        raise ValueError(sentence)
    if height * width * channels > _MAX_POSITIONS:
        raise ValueError(
            f"tile={tile!r} has {height * width * channels} elements; at most {_MAX_POSITIONS} are supported"
        )
    return height, width, channels


def _planned_tile(x: jax.Array, kernel_shape: Sequence[int] | None, strides: int | Sequence[int]) -> Tile:
    """The tile of x that belongs to the model's tile of results."""
    shape = tuple(size if geo.is_symbolic(size) else max(1, size) for size in x.shape)
    channels = shape[3]
    kernel = (3, 3, channels, channels) if kernel_shape is None else _kernel_shape(kernel_shape)
    if channels % kernel[2] or kernel[3] % (channels // kernel[2]):
        raise ValueError(
            f"kernel_shape={kernel_shape!r} has {kernel[2]} input and {kernel[3]} output channels, which are no groups "
            f"of x's {channels}"
        )
    geometry = geo.resolve(shape, kernel, strides=strides, feature_group_count=channels // kernel[2])
    reason = configurations.why_not(kernel, geometry)
    if reason is not None:
        raise ValueError(f"{reason.replace('kernel.shape', 'kernel_shape')}; give a tile for another convolution")
    if not configurations.variants() or geo.is_symbolic(*shape[1:]):
        return _UNBUILT_TILE
    if (reason := geo.too_large(geometry, shape, kernel)) is not None:
        raise ValueError(f"kernel_shape={kernel_shape!r} is of no convolution: {reason}")
    found = cost_model.for_operands(shape, (1, *kernel), geometry, x.dtype.itemsize).variant
    height = min(found.height * geometry.strides[0], shape[1])
    return height, min(found.width * geometry.strides[1], shape[2], max(1, _MAX_POSITIONS // height)), 1


def _kernel_shape(kernel_shape: Sequence[int]) -> tuple[int, int, int, int]:
    sentence = f"kernel_shape={kernel_shape!r} is not [kh, kw, C / groups, K], all of them positive ints"
    try:
        height, width, channels, out_channels = (operator.index(size) for size in kernel_shape)
    except (TypeError, ValueError) as error:
        raise ValueError(sentence) from error
    if min(height, width, channels, out_channels) < 1:
        raise ValueError(sentence)
    return height, width, channels, out_channels


def _counts_of(size: Sequence[int], tile: Tile) -> tuple[int, int, int]:
    rows, columns, channels = (-(-n // t) for n, t in zip(size, tile, strict=True))
    return rows, columns, channels


def _position_dtype(tile: Tile) -> np.dtype:
    return np.dtype(np.uint8 if math.prod(tile) <= 256 else np.uint16)


# --- the definition, in jax.numpy ------------------------------------------------------------------------------------


def _reference_fromdense(x: jax.Array, tile: Tile) -> tuple[jax.Array, jax.Array, jax.Array]:
    """x [..., H, W, C] -> values, positions [..., tH, tW, tC, slots] and counts [..., tH, tW, tC]."""
    tiles = _tiled(x, tile)
    kept = reference.is_nonzero(tiles)
    # A stable sort that only asks "zero or not" brings non-zeros to the front in their order.
    order = jnp.argsort(~kept, axis=-1, stable=True)
    counts = jnp.sum(kept, axis=-1, dtype=jnp.int32)
    used = _slots_of(counts, tiles.shape[-1]) < counts[..., None]
    values = jnp.where(used, jnp.take_along_axis(tiles, order, axis=-1), 0).astype(x.dtype)
    return values, jnp.where(used, order, 0).astype(_position_dtype(tile)), counts


def _slots_of(counts: jax.Array, slots: int) -> jax.Array:
    """counts [..., tC] -> [..., tC, slots], the slots' numbers."""
    return lax.broadcasted_iota(jnp.int32, (*counts.shape, slots), counts.ndim)


def _tiled(x: jax.Array, tile: Tile) -> jax.Array:
    """x [..., H, W, C] -> [..., tH, tW, tC, slots], padded with zeros to whole tiles."""
    lead, size = x.shape[:-3], x.shape[-3:]
    counts = _counts_of(size, tile)
    pads = [(0, 0)] * len(lead) + [(0, n * t - s) for n, t, s in zip(counts, tile, size, strict=True)]
    split = jnp.pad(x, pads).reshape(*lead, counts[0], tile[0], counts[1], tile[1], counts[2], tile[2])
    first = len(lead)
    axes = (*range(first), first, first + 2, first + 4, first + 1, first + 3, first + 5)
    return split.transpose(axes).reshape(*lead, *counts, math.prod(tile))


def _reference_todense(
    values: jax.Array, positions: jax.Array, counts: jax.Array, size: tuple[int, ...], tile: Tile
) -> jax.Array:
    slots = values.shape[-1]
    slot = _slots_of(counts, slots)
    target = jnp.where(slot < counts[..., None], positions.astype(jnp.int32), slots + slot)  # unused: out of bounds
    flat = math.prod(counts.shape)

    def scatter(list_: jax.Array, place: jax.Array) -> jax.Array:
        return jnp.zeros(slots, list_.dtype).at[place].set(list_, mode="drop", unique_indices=True)

    tiles = jax.vmap(scatter)(values.reshape(flat, slots), target.reshape(flat, slots))
    lead = counts.shape[:-3]
    split = tiles.reshape(*lead, *counts.shape[-3:], *tile)
    first = len(lead)
    axes = (*range(first), first, first + 3, first + 1, first + 4, first + 2, first + 5)
    whole = [n * t for n, t in zip(counts.shape[-3:], tile, strict=True)]
    padded = split.transpose(axes).reshape(*lead, *whole)
    return padded[..., : size[0], : size[1], : size[2]]


# --- native kernels where there are any ------------------------------------------------------------------------------


def _on_platforms(method: str, native: Callable[..., Any], fallback: Callable[..., Any], *operands: jax.Array) -> Any:
    """`native` on the platforms that have the target for the first operand's dtype, `fallback` on the others."""
    if any(0 in operand.shape for operand in operands):
        return fallback(*operands)
    having = [p for p in _native.PLATFORMS if _native.why_missing(method, p, operands[0].dtype) is None]
    if not having:
        return fallback(*operands)
    return lax.platform_dependent(*operands, default=fallback, **dict.fromkeys(having, native))


def _result(shape: tuple[int, ...], dtype: Any, like: jax.Array) -> jax.ShapeDtypeStruct:
    """The type of a native call's result. Under `shard_map` it varies over devices as `like` does."""
    of = jax.typeof(like)
    if not of.mat.varying:
        return jax.ShapeDtypeStruct(shape, dtype)
    whole = NamedSharding(of.sharding.mesh, PartitionSpec())
    return jax.ShapeDtypeStruct(shape, dtype, sharding=whole, manual_axis_type=of.mat)


def _fromdense(x: jax.Array, tile: Tile) -> tuple[jax.Array, jax.Array, jax.Array]:
    values, positions, counts = _lists(lax.stop_gradient(x), tile)
    return _differentiable(x, values, positions, counts, tile), positions, counts


@functools.partial(jax.jit, static_argnums=1)
def _lists(x: jax.Array, tile: Tile) -> tuple[jax.Array, jax.Array, jax.Array]:
    counts = _counts_of(x.shape[-3:], tile)
    lists = (*x.shape[:-3], *counts, math.prod(tile))
    shapes = ((lists, x.dtype), (lists, _position_dtype(tile)), (lists[:-1], jnp.int32))
    results = [_result(shape, dtype, x) for shape, dtype in shapes]

    def native(x: jax.Array) -> Any:
        call = jax.ffi.ffi_call("jsc_coo_fromdense", results, vmap_method="broadcast_all")
        return tuple(call(x, tile=np.asarray(tile, np.int64)))

    return _on_platforms("coo_fromdense", native, functools.partial(_reference_fromdense, tile=tile), x)


@functools.partial(jax.custom_jvp, nondiff_argnums=(4,))
def _differentiable(x: jax.Array, values: jax.Array, positions: jax.Array, counts: jax.Array, tile: Tile) -> jax.Array:
    """The values as a function of x."""
    del x, positions, counts, tile
    return values


@_differentiable.defjvp
def _values_jvp(tile: Tile, primals: Any, tangents: Any) -> Any:
    _, values, positions, counts = primals
    moved = jnp.take_along_axis(_tiled(tangents[0], tile), positions.astype(jnp.int32), axis=-1)
    used = _slots_of(counts, values.shape[-1]) < counts[..., None]
    return values, jnp.where(used, moved, 0)


@functools.partial(jax.custom_jvp, nondiff_argnums=(3, 4))
@functools.partial(jax.jit, static_argnums=(3, 4))
def _todense(
    values: jax.Array, positions: jax.Array, counts: jax.Array, size: tuple[int, ...], tile: Tile
) -> jax.Array:
    result = _result((*counts.shape[:-3], *size), values.dtype, values)

    def native(values: jax.Array, positions: jax.Array, counts: jax.Array) -> jax.Array:
        call = jax.ffi.ffi_call("jsc_coo_todense", result, vmap_method="broadcast_all")
        return call(values, positions, counts, tile=np.asarray(tile, np.int64))

    fallback = functools.partial(_reference_todense, size=size, tile=tile)
    return _on_platforms("coo_todense", native, fallback, values, positions, counts)


@_todense.defjvp
def _todense_jvp(size: tuple[int, ...], tile: Tile, primals: Any, tangents: Any) -> Any:
    values, positions, counts = primals
    # Linear in the values; the definition has a transpose, which the custom call has not.
    return _todense(values, positions, counts, size, tile), _reference_todense(
        tangents[0], positions, counts, size, tile
    )
