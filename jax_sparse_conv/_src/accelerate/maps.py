"""Feature maps that lie as [N, H, W, C] in memory, whatever order a function has their axes in.

A function's axes are `Axes`: for each the axis of the [N, H, W, C] array, or None for an axis of size 1 that the array
does not have. Transposing, squeezing and expanding a map change its axes and move nothing. Axes of the array that the
function does not have are of size 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
from jax import lax

Axes: TypeAlias = tuple[int | None, ...]

IMAGES, CHANNELS, RANK = 0, 3, 4
STORED: Axes = (0, 1, 2, 3)  # of a function that has a map as it lies
_ORDER = (0, 3, 1, 2)  # lax's images, channels, height and width among the axes of [N, H, W, C]


def reshaped(axes: Axes, shape: Sequence[Any], new_shape: Sequence[Any]) -> Axes | None:
    """The axes after a reshape that adds or drops axes of size 1 only; None for any other reshape."""
    kept = [(size, axis) for size, axis in zip(shape, axes, strict=True) if size != 1]
    if [size for size, _ in kept] != [size for size in new_shape if size != 1]:
        return None
    left = iter(axis for _, axis in kept)
    return tuple(None if size == 1 else next(left) for size in new_shape)


def expanded(axes: Axes, shape: Sequence[Any], new_shape: Sequence[Any], dimensions: Sequence[int]) -> Axes | None:
    """The axes after `broadcast_in_dim`, where that adds axes of size 1 only; None where it repeats elements."""
    if any(new_shape[to] != size for to, size in zip(dimensions, shape, strict=True)):
        return None
    if any(size != 1 for to, size in enumerate(new_shape) if to not in dimensions):
        return None
    places = {int(to): axis for to, axis in zip(dimensions, axes, strict=True)}
    return tuple(places.get(to) for to in range(len(new_shape)))


def agree(axes: Axes, others: Axes, shape: Sequence[Any]) -> bool:
    """Whether two maps of this shape lie in memory alike, an axis of size 1 anywhere."""
    pairs = zip(axes, others, shape, strict=True)
    return len(axes) == len(others) and all(size == 1 or one == other for one, other, size in pairs)


def stored_shape(axes: Axes, shape: Sequence[Any]) -> tuple[Any, ...]:
    """[N, H, W, C] of a map of this shape."""
    sizes = {axis: size for axis, size in zip(axes, shape, strict=True) if axis is not None}
    return tuple(sizes.get(axis, 1) for axis in range(RANK))


def as_given(stored: jax.Array, axes: Axes) -> jax.Array:
    """An [N, H, W, C] array in the function's own order of axes."""
    if axes == tuple(range(RANK)):
        return stored
    present = [axis for axis in axes if axis is not None]
    rest = [axis for axis in range(RANK) if axis not in present]
    shape = tuple(1 if axis is None else stored.shape[axis] for axis in axes)
    moved = stored if present == sorted(present) else lax.transpose(stored, (*present, *rest))
    return lax.reshape(moved, shape)


def as_stored(array: jax.Array, axes: Axes) -> jax.Array | None:
    """An array in the function's own order of axes as [N, H, W, C]; None where an axis without a place has elements.

    Axes of size 1 are what broadcasting takes them for.
    """
    if axes == tuple(range(RANK)):
        return array
    if any(axis is None and size != 1 for axis, size in zip(axes, array.shape, strict=True)):
        return None
    present = [(axis, index) for index, axis in enumerate(axes) if axis is not None]
    kept = lax.reshape(array, tuple(array.shape[index] for _, index in present))
    order = [number for _, number in sorted((axis, number) for number, (axis, _) in enumerate(present))]
    moved = kept if order == list(range(len(order))) else lax.transpose(kept, order)
    return lax.reshape(moved, stored_shape(axes, array.shape))


def is_per_channel(shape: Sequence[Any], axes: Axes) -> bool:
    """Whether an array of this shape, beside a map with these axes, has one value for each channel, or one for all."""
    return all(size == 1 or axis == CHANNELS for size, axis in zip(shape, axes, strict=True))


def permuted(values: Sequence[Any], axes: Axes, fill: Any) -> tuple[Any, ...] | None:
    """What a function says for each of its axes, for those of [N, H, W, C]; None where one without a place has it."""
    found: list[Any] = [fill] * RANK
    for axis, value in zip(axes, values, strict=True):
        if axis is None and value != fill:
            return None
        if axis is not None:
            found[axis] = value
    return tuple(found)


def axes_of(spec: Sequence[int]) -> Axes:
    """The axes of an array whose images, channels, height and width are at the places of `spec`, as lax has them."""
    places = dict(zip(spec, _ORDER, strict=True))
    return tuple(places[place] for place in range(len(spec)))


def to_hwio(dimensions: Any) -> tuple[int, ...]:
    """The axes of lax's kernel, those of space first."""
    outputs, inputs, *space = dimensions.rhs_spec
    return (*space, inputs, outputs)
