"""Taps of a kernel that meet nothing but padding: of a small map a 3x3 kernel may read one pixel, and so be 1x1.

The last layers of a network are such on small images: a ResNet's on 32x32. Where the kernel is an argument, the rest of
it is copied first. On a GPU that is a kernel more, some 2 us, so it has to be worth it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from jax_sparse_conv._src.problem.geometry import Geometry, Pair, is_symbolic, windowed_size

_MOST = 0.6  # of the taps may be left
_LEAST = 2**15  # weights of a kernel


def read(geometry: Geometry, size: Sequence[int], kernel_shape: Sequence[int]) -> tuple[tuple[slice, slice], Geometry]:
    """What of a kernel meets a map of `size`, and the convolution with that alone.

    All of it where few taps would be left out, where the kernel is small, or where sizes are symbolic.
    """
    kernel_size = kernel_shape[:2]
    whole = (slice(0, kernel_size[0]), slice(0, kernel_size[1]))
    if is_symbolic(*size, *kernel_shape) or math.prod(kernel_shape) < _LEAST:
        return whole, geometry
    if 0 in (*size, *geometry.conv_size(size, kernel_size)):
        return whole, geometry
    along = zip(size, kernel_size, geometry.strides, geometry.padding, geometry.dilation, strict=True)
    found = tuple(_along(*each) for each in along)
    if math.prod(taps.stop - taps.start for taps, _ in found) > _MOST * math.prod(kernel_size):
        return whole, geometry
    (rows, high), (columns, wide) = found
    return (rows, columns), dataclasses.replace(geometry, padding=(high, wide))


def _along(size: int, taps: int, stride: int, padding: Pair, dilation: int) -> tuple[slice, Pair]:
    """The taps from the first to the last that meet the map, and the padding of a kernel of these."""
    low, high = padding
    last = stride * (windowed_size(size, taps, stride, padding, dilation) - 1)  # where the last window begins
    # A tap meets places from its first one on, `stride` apart. The whole map may lie between two of them.
    places = (tap * dilation - low for tap in range(taps))
    met = [tap for tap, at in enumerate(places) if at < size and at + last >= 0]
    if not met:
        return slice(0, taps), padding
    # Not more than the padding there is: what is left may not crop.
    first = min(met[0], max(low, 0) // dilation)
    beyond = min(taps - 1 - met[-1], max(high, 0) // dilation)
    return slice(first, taps - beyond), (low - first * dilation, high - beyond * dilation)
