"""The gradient of x as convolutions of the cotangent with the kernel turned round.

With strides there is one for each phase of x, the pixels that meet the same taps.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_sparse_conv._src.primitive import turned_kernel
from jax_sparse_conv._src.primitive.primitives import Config, bind
from jax_sparse_conv._src.primitive.turned_kernel import Taps
from jax_sparse_conv._src.problem.geometry import Geometry, Pads


class _Phase(NamedTuple):
    """Rows (or columns) `first`, `first + stride`, ... of x, and the taps that they meet.

    Attributes:
      first: the first of them.
      taps: the kernel's rows, from the last one to the first.
      pads: of the convolution of the cotangent that makes them.
      size: how many they are.
    """

    first: int
    taps: slice
    pads: tuple[int, int]
    size: int


def _phases(size: int, results: int, taps: int, stride: int, dilation: int, low: int) -> list[_Phase]:
    """Along one axis; a phase that no tap meets, whose gradient is zero, is left out."""
    if stride == 1:
        reach = (taps - 1) * dilation
        return [_Phase(0, slice(None, None, -1), (reach - low, size - results + low), size)]
    found = []
    for first in range(min(stride, size)):
        nearest = (first + low) % stride
        if nearest >= taps:
            continue
        count, length = (taps - nearest + stride - 1) // stride, (size - first + stride - 1) // stride
        before = count - 1 - (first + low - nearest) // stride
        turned = slice(nearest + (count - 1) * stride, nearest - 1 if nearest else None, -stride)
        found.append(_Phase(first, turned, (before, length - results - before + count - 1), length))
    return found


def has_simple_phases(config: Config) -> bool:
    """Whether a phase meets evenly spaced taps: not with strides and dilation at once."""
    return max(config.geometry.strides) == 1 or max(config.geometry.dilation) == 1


def phases(kernel: Any, cotangent: Any, config: Config, like: Any) -> Iterator[tuple[_Phase, _Phase]]:
    """Of the rows and columns of x, from the operands of `gradient` or their types."""
    geometry = config.geometry
    rows, columns = (
        _phases(
            like.shape[1 + axis],
            cotangent.shape[1 + axis],
            kernel.shape[1 + axis],
            geometry.strides[axis],
            geometry.dilation[axis],
            geometry.padding[axis][0],
        )
        for axis in range(2)
    )
    return itertools.product(rows, columns)


def part_of(config: Config, rows: _Phase, columns: _Phase) -> Config:
    """The convolution of the cotangent that makes a phase, by whatever suits it."""
    pads: Pads = (rows.pads, columns.pads)
    geometry = Geometry((1, 1), pads, config.geometry.dilation, config.geometry.groups)
    return Config(geometry, "ecr", fallback=True, precision=config.precision)


def kernel_shape_of(kernel: Any, config: Config, rows: _Phase, columns: _Phase) -> tuple[int, ...]:
    """Of that convolution's kernel."""
    stacks, height, width, channels, out_channels = kernel.shape
    taps = (len(range(*phase.taps.indices(n))) for phase, n in ((rows, height), (columns, width)))
    groups = config.geometry.groups
    return stacks, *taps, out_channels // groups, groups * channels


def gradient(kernel: jax.Array, cotangent: jax.Array, config: Config, like: Any) -> jax.Array:
    """kernel [S, kh, kw, C / groups, K], cotangent [N, Ho, Wo, K] -> [N, H, W, C]."""
    size, strides = like.shape[1:3], config.geometry.strides
    turned = _turned(kernel, cotangent, config.geometry.groups)

    def part(rows: _Phase, columns: _Phase) -> jax.Array:
        return bind(cotangent, turned(rows, columns), None, None, part_of(config, rows, columns))

    each = phases(kernel, cotangent, config, like)
    if strides == (1, 1):
        return part(*next(each))
    whole = jnp.zeros(like.shape, like.dtype)
    for rows, columns in each:
        spread = [(0, 0, 0)]
        for axis, phase in enumerate((rows, columns)):
            used = phase.first + (phase.size - 1) * strides[axis] + 1
            spread.append((phase.first, size[axis] - used, strides[axis] - 1))
        whole = whole + lax.pad(part(rows, columns), np.zeros((), like.dtype), (*spread, (0, 0, 0)))
    return whole


def _turned(kernel: jax.Array, cotangent: jax.Array, groups: int) -> Callable[[_Phase, _Phase], jax.Array]:
    """What makes a phase's kernel, [S, rows, columns, K / groups, C], of kernel [S, kh, kw, C / groups, K].

    On a CPU once the cotangent is there.
    """
    if not turned_kernel.takes(kernel):
        swapped = turned_kernel.swapped(kernel, groups)
        return lambda rows, columns: swapped[:, rows.taps, columns.taps]

    def turned(rows: _Phase, columns: _Phase) -> jax.Array:
        height, width = kernel.shape[1:3]
        return turned_kernel.turned(kernel, cotangent, Taps.of(rows.taps, height), Taps.of(columns.taps, width), groups)

    return turned
