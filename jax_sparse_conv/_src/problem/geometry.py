"""Static shapes of `conv -> pool`: strides, padding, dilation, groups and windows, resolved once.

Everything here is plain Python integers, computed at trace time. A `Geometry` is hashable, so it is the one parameter
that primitives, formats and the reference need besides arrays.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias, get_args

import jax
import numpy as np
from jax import export, lax

Pair: TypeAlias = tuple[int, int]
Pads: TypeAlias = tuple[Pair, Pair]
Padding: TypeAlias = str | int | Sequence[int | Sequence[int]]
PoolKind: TypeAlias = Literal["max", "avg"]

POOL_KINDS: tuple[PoolKind, ...] = get_args(PoolKind)
POOL_CODES: dict[PoolKind | None, int] = {None: 0, "max": 1, "avg": 2}
"""As native calls have the kinds (`native/call.h`)."""
MAX_ELEMENTS = 2**31 - 1
_MOST_OF_AN_ARRAY = 2**48  # elements of the whole of it


@dataclasses.dataclass(frozen=True)
class Pool:
    """A resolved pooling window over the convolution's result."""

    kind: PoolKind
    window: Pair
    strides: Pair
    padding: Pads


@dataclasses.dataclass(frozen=True)
class Geometry:
    """A resolved convolution, with the pool that follows it if there is one."""

    strides: Pair = (1, 1)
    padding: Pads = ((0, 0), (0, 0))
    dilation: Pair = (1, 1)
    groups: int = 1
    pool: Pool | None = None

    def conv_size(self, size: Sequence[int], kernel_size: Sequence[int]) -> Pair:
        """Height and width of the convolution's result for an input of `size`."""
        height, width = (
            windowed_size(n, k, s, p, d)
            for n, k, s, p, d in zip(size, kernel_size, self.strides, self.padding, self.dilation, strict=True)
        )
        return height, width

    def out_size(self, size: Sequence[int], kernel_size: Sequence[int]) -> Pair:
        """Height and width after the pool."""
        conv_size = self.conv_size(size, kernel_size)
        if self.pool is None:
            return conv_size
        height, width = (
            windowed_size(n, w, s, p, 1)
            for n, w, s, p in zip(conv_size, self.pool.window, self.pool.strides, self.pool.padding, strict=True)
        )
        return height, width

    def reads_few_pixels(self, kernel_size: Sequence[int]) -> bool:
        """Whether it is a 1x1 convolution whose strides pass over pixels, without padding and pool."""
        is_plain = tuple(kernel_size) == (1, 1) and self.pool is None and self.padding == ((0, 0), (0, 0))
        return is_plain and max(self.strides) > 1

    def without_pool(self) -> Geometry:
        return dataclasses.replace(self, pool=None)


def windowed_size(size: int, window: int, stride: int, padding: Pair, dilation: int) -> int:
    """Number of windows along one axis, 0 where none fits; of a symbolic size, where at least one does."""
    span = size + padding[0] + padding[1] - ((window - 1) * dilation + 1)
    return 0 if not is_symbolic(span) and span < 0 else span // stride + 1


def is_symbolic(*sizes: Any) -> bool:
    """Whether one of these is a dimension of `jax.export.symbolic_shape`, which is not known yet."""
    return any(export.is_symbolic_dim(size) for size in sizes)


def may_hold(condition: Callable[[], bool]) -> bool:
    """Whether a comparison of sizes holds, or may hold where symbolic ones leave it open."""
    try:
        return bool(condition())
    except jax.errors.InconclusiveDimensionOperation:
        return True


def resolve(
    x_shape: Sequence[int],
    kernel_shape: Sequence[int],
    *,
    strides: int | Sequence[int] = 1,
    padding: Padding = "SAME",
    kernel_dilation: int | Sequence[int] = 1,
    feature_group_count: int = 1,
) -> Geometry:
    """Resolve a convolution of x [N, H, W, C] with kernel [kh, kw, C / groups, K].

    Raises:
      ValueError: shapes that do not fit each other or an argument out of range, named with its value.
    """
    _check_rank("x", x_shape, 4, "[N, H, W, C]")
    _check_rank("kernel", kernel_shape, 4, "[kh, kw, C / feature_group_count, K]")
    groups = positive_int("feature_group_count", feature_group_count)
    _check_channels(x_shape, kernel_shape, groups)
    stride_pair = pair("strides", strides)
    dilation_pair = pair("kernel_dilation", kernel_dilation)
    kernel_size = (kernel_shape[0], kernel_shape[1])
    if min(kernel_size) < 1:
        raise ValueError(f"kernel.shape={tuple(kernel_shape)} has an empty window; kh and kw must be at least 1")
    spans = tuple((k - 1) * d + 1 for k, d in zip(kernel_size, dilation_pair, strict=True))
    pads = resolve_padding("padding", padding, (x_shape[1], x_shape[2]), spans, stride_pair)
    for size, (low, high) in zip(x_shape[1:3], pads, strict=True):
        if not is_symbolic(size) and size + low + high < 0:
            raise ValueError(f"padding={padding!r} crops more than there is of x.shape={tuple(x_shape)}")
    geometry = Geometry(stride_pair, pads, dilation_pair, groups)
    asked = f"padding={padding!r} with kernel_dilation={kernel_dilation!r}"
    _check_extent(asked, (x_shape[0], *_padded(x_shape[1:3], pads), x_shape[3]))
    _check_extent(asked, (x_shape[0], *geometry.conv_size(x_shape[1:3], kernel_size), kernel_shape[3]))
    return geometry


def _padded(size: Sequence[int], pads: Pads) -> tuple[int, ...]:
    return tuple(n + low + high for n, (low, high) in zip(size, pads, strict=True))


def _check_extent(asked: str, shape: Sequence[int]) -> None:
    """Refuse what XLA would end the process for: the elements of a shape must be few enough to count their bytes."""
    if not is_symbolic(*shape) and math.prod(shape) > _MOST_OF_AN_ARRAY:
        raise ValueError(f"{asked} makes an array of shape {tuple(shape)}, which is more than there can be")


def too_large(geometry: Geometry, x_shape: Sequence[int], kernel_shape: Sequence[int]) -> str | None:
    """Why the native kernels, which index one image and one kernel in 31 bits, cannot take a call, or None."""
    if is_symbolic(*x_shape[1:]):
        return (
            f"x.shape={tuple(x_shape)} is symbolic, and kernels must know H, W and C when they are lowered "
            "(a symbolic N is fine)"
        )
    if is_symbolic(*kernel_shape):
        return f"kernel.shape={tuple(kernel_shape)} is symbolic, and kernels must know it when they are lowered"
    conv_size = geometry.conv_size(x_shape[1:3], kernel_shape[:2])
    pieces = {
        "one image of x": x_shape[1:],
        "kernel": kernel_shape,
        "one image's result": (*conv_size, kernel_shape[3]),
    }
    for name, shape in pieces.items():
        if math.prod(shape) > MAX_ELEMENTS:
            return f"{name} has {math.prod(shape)} elements, shape {tuple(shape)}; at most 2**31 - 1 are supported"
    along = zip(x_shape[1:3], kernel_shape[:2], geometry.strides, geometry.padding, geometry.dilation, strict=True)
    for size, window, stride, (low, high), dilation in along:
        reach = max(size + abs(low) + abs(high), (window - 1) * dilation + 1, stride)
        if reach > MAX_ELEMENTS:
            return f"padding, kernel_dilation or strides reach {reach} pixels; at most 2**31 - 1 are supported"
    return None


def too_far(strides: Sequence[int], padding: Sequence[Sequence[int]], dilation: Sequence[int]) -> str | None:
    """Why `Geometry` has no place for strides, padding or dilation that lax takes, or None."""
    reach = max(*strides, *dilation, *(abs(pad) for entry in padding for pad in entry))
    return f"its padding, dilation or strides reach {reach} pixels, beyond 2**31 - 1" if reach > MAX_ELEMENTS else None


def warn_of_unknown_sizes() -> None:
    """Warn that `implementation=None` has no choice; Python shows it once."""
    warnings.warn(
        "implementation=None is XLA's own operation where H, W, C or the kernel's shape is symbolic, as kernels must "
        'know them; fixed ones let it choose (a symbolic N is fine), and "xla" says nothing',
        stacklevel=1,
    )


def with_pool(
    geometry: Geometry,
    conv_size: Sequence[int],
    *,
    kind: str,
    window_shape: int | Sequence[int],
    window_strides: int | Sequence[int] | None,
    window_padding: Padding,
) -> Geometry:
    """Add a pool over a convolution's result of `conv_size`; strides default to the window (non-overlapping)."""
    if kind not in POOL_KINDS:
        raise ValueError(f"pool={kind!r} is not one of {', '.join(map(repr, POOL_KINDS))}")
    window = pair("window_shape", window_shape)
    strides = window if window_strides is None else pair("window_strides", window_strides)
    pads = resolve_padding("window_padding", window_padding, conv_size, window, strides)
    if not is_symbolic(*pads[0], *pads[1]) and min(pads[0] + pads[1]) < 0:
        raise ValueError(f"window_padding={window_padding!r} is negative; a pool pads by 0 or more")
    _check_extent(f"window_padding={window_padding!r}", _padded(conv_size, pads))
    return dataclasses.replace(geometry, pool=Pool("max" if kind == "max" else "avg", window, strides, pads))


def resolve_padding(name: str, padding: Padding, size: Sequence[int], spans: Sequence[int], strides: Pair) -> Pads:
    """`"SAME"`, `"VALID"`, an int, a pair of ints or a pair of (low, high) pairs, as explicit (low, high) pairs."""
    choices = '"SAME", "SAME_LOWER", "VALID", an int or two entries, each an int below 2**31 or (low, high) of them'
    wanted = f"{name}={padding!r} is not {choices}"
    if isinstance(padding, np.ndarray):
        padding = padding.tolist()
    if isinstance(padding, str):
        if padding.upper() not in ("SAME", "SAME_LOWER", "VALID"):
            raise ValueError(wanted)
        height, width = lax.padtype_to_pads(size, spans, strides, padding.upper())
        return (_known_pair(height), _known_pair(width))
    try:
        if isinstance(padding, Sequence):
            entries = [_pad_entry(entry) for entry in padding]
        else:
            entries = [_pad_entry(padding)] * 2
    except TypeError as error:
        raise ValueError(wanted) from error
    if len(entries) != 2 or max(abs(pad) for entry in entries for pad in entry) > MAX_ELEMENTS:
        raise ValueError(wanted)
    return entries[0], entries[1]


def named_padding(padding: Pads, size: Sequence[int], spans: Sequence[int], strides: Pair) -> Pads | str:
    """The padding, by its name where a symbolic size leaves it open: lax takes such pads by name only."""
    if not is_symbolic(*padding[0], *padding[1]):
        return padding
    return next(name for name in ("SAME", "SAME_LOWER") if resolve_padding("", name, size, spans, strides) == padding)


def pair(name: str, value: int | Sequence[int]) -> Pair:
    """An int or two ints, each from 1 to 2**31 - 1, as a pair."""
    wanted = f"{name}={value!r} is not an int or two ints of 1 to 2**31 - 1"
    try:
        if isinstance(value, np.ndarray):
            value = value.tolist()
        entries = value if isinstance(value, Sequence) else (value, value)
        values = tuple(map(_index, entries))
    except TypeError as error:
        raise ValueError(wanted) from error
    if len(values) != 2 or min(values) < 1 or max(values) > MAX_ELEMENTS:
        raise ValueError(wanted)
    return values[0], values[1]


def _index(value: Any) -> int:
    """An int that is no bool.

    Raises:
      TypeError: anything else.
    """
    if isinstance(value, (bool, np.bool_)):
        raise TypeError("a bool is no size")
    return operator.index(value)


def _pad_entry(entry: Any) -> Pair:
    if isinstance(entry, np.ndarray):
        entry = entry.tolist()
    if isinstance(entry, Sequence) and not isinstance(entry, str):
        if len(entry) != 2:
            raise TypeError("a padding entry has a low and a high end")
        return _index(entry[0]), _index(entry[1])
    value = _index(entry)
    return value, value


def _known_pair(values: Sequence[Any]) -> Pair:
    """As ints, but for what a symbolic size leaves open."""
    low, high = (value if is_symbolic(value) else operator.index(value) for value in values)
    return low, high


def axes_of(name: str, axis: int | Sequence[int], array: str, shape: Sequence[int]) -> tuple[int, ...]:
    """An axis or several of an array of this shape, each from 0 on and once."""
    rank = len(shape)
    wanted = f"{name}={axis!r} is not an int or a tuple of different ints of {-rank} to {rank - 1}, the axes of {array}"
    try:
        axes = tuple(map(_index, axis if isinstance(axis, Sequence) else (axis,)))
    except TypeError as error:
        raise ValueError(f"{wanted}.shape={tuple(shape)}") from error
    found = {each % rank for each in axes if -rank <= each < rank}
    if len(found) != len(axes):
        raise ValueError(f"{wanted}.shape={tuple(shape)}")
    return tuple(each % rank for each in axes)


def positive_int(name: str, value: int) -> int:
    wanted = f"{name}={value!r} is not an int of 1 to 2**31 - 1"
    try:
        result = _index(value)
    except TypeError as error:
        raise ValueError(wanted) from error
    if not 1 <= result <= MAX_ELEMENTS:
        raise ValueError(wanted)
    return result


def _check_rank(name: str, shape: Sequence[int], rank: int, layout: str) -> None:
    if len(shape) != rank:
        raise ValueError(f"{name}.shape={tuple(shape)} has {len(shape)} dimensions; it must be {layout}")


def _layout_hint(x_shape: Sequence[int], kernel_shape: Sequence[int], groups: int) -> str:
    """What to say where the shapes would fit with channels first."""
    if x_shape[1] == kernel_shape[2] * groups:
        return "; x is [N, H, W, C] here, and this looks like [N, C, H, W], which x.transpose(0, 2, 3, 1) turns"
    if x_shape[1] == kernel_shape[1] * groups or x_shape[3] == kernel_shape[1] * groups:
        return "; the kernel is [kh, kw, C, K] here, and this looks like [K, C, kh, kw]: kernel.transpose(2, 3, 1, 0)"
    return ""


def _check_channels(x_shape: Sequence[int], kernel_shape: Sequence[int], groups: int) -> None:
    if x_shape[3] != kernel_shape[2] * groups:
        raise ValueError(
            f"kernel.shape={tuple(kernel_shape)} takes {kernel_shape[2]} x feature_group_count={groups} input "
            f"channels, but x.shape={tuple(x_shape)} has C={x_shape[3]}{_layout_hint(x_shape, kernel_shape, groups)}"
        )
    if kernel_shape[3] % groups:
        raise ValueError(
            f"feature_group_count={groups} does not divide the K={kernel_shape[3]} output channels of "
            f"kernel.shape={tuple(kernel_shape)}"
        )
