"""Errors of gradients of convolutions, against sums in float64 at some elements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from jax import lax

_ELEMENTS = 128
"""Of a gradient, at random: sums of all its elements in float64 would take minutes."""


def relative(layer: Any, by: str, operands: tuple[Any, Any, Any], found: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Of each gradient of a layer without a pool, the root of the mean squared error over that of the exact values.

    Args:
      layer: of `benchmarks gradients`.
      by: "x" or "kernel".
      operands: x [N, H, W, C], kernel and cotangent; the first and last with an axis in front where `layer.each`.
      found: gradients by name.
    """
    rng = np.random.default_rng(1)
    shape = next(iter(found.values())).shape
    points = np.stack([rng.integers(0, size, _ELEMENTS) for size in shape], 1)
    x, kernel, cotangent = (np.asarray(each) for each in operands)
    of_element = _of_x if by == "x" else _of_kernel
    exact = []
    for point in points:
        image, *rest = point if layer.each else (None, *point)
        given = (x, kernel, cotangent) if image is None else (x[image], kernel, cotangent[image])
        exact.append(of_element(layer, given, *(int(index) for index in rest)))
    scale = np.sqrt(np.mean(np.square(exact)))
    where = tuple(points.T)
    return {name: float(np.sqrt(np.mean((each[where] - exact) ** 2)) / scale) for name, each in found.items()}


def _of_kernel(layer: Any, operands: tuple[Any, Any, Any], row: int, column: int, channel: int, out: int) -> float:
    """What meets one weight: a channel of x under all results of one channel."""
    x, kernel, cotangent = operands
    channel += out // (kernel.shape[3] // layer.groups) * kernel.shape[2]
    (rows, of_rows), (columns, of_columns) = (
        _under_tap(layer, tap, size, results)
        for tap, size, results in zip((row, column), x.shape[1:3], cotangent.shape[1:3], strict=True)
    )
    met = x[:, rows, columns, channel].astype(np.float64)
    return float((met * cotangent[:, of_rows, of_columns, out]).sum())


def _under_tap(layer: Any, tap: int, size: int, results: int) -> tuple[slice, slice]:
    """Pixels of x that a tap meets along an axis, and the results that it meets them for."""
    ((low, _),) = lax.padtype_to_pads((size,), (layer.window,), (layer.stride,), "SAME")
    first = max(0, -((tap - low) // layer.stride))
    last = min(results - 1, (size - 1 + low - tap) // layer.stride)
    start = first * layer.stride + tap - low
    return slice(start, start + (last - first) * layer.stride + 1, layer.stride), slice(first, last + 1)


def _of_x(layer: Any, operands: tuple[Any, Any, Any], image: int, row: int, column: int, channel: int) -> float:
    """What meets one element of x: each tap that some result reads it by."""
    x, kernel, cotangent = operands
    group, within = divmod(channel, kernel.shape[2])
    outputs = kernel.shape[3] // layer.groups
    of_group = slice(group * outputs, (group + 1) * outputs)
    total = 0.0
    for down, r in _results_of(layer, row, x.shape[1], cotangent.shape[1]):
        for across, q in _results_of(layer, column, x.shape[2], cotangent.shape[2]):
            weights = kernel[down, across, within, of_group].astype(np.float64)
            total += float(weights @ cotangent[image, r, q, of_group].astype(np.float64))
    return total


def _results_of(layer: Any, pixel: int, size: int, results: int) -> list[tuple[int, int]]:
    """Each tap that meets a pixel along an axis, and the result it does so for."""
    ((low, _),) = lax.padtype_to_pads((size,), (layer.window,), (layer.stride,), "SAME")
    pairs = ((tap, pixel + low - tap) for tap in range(layer.window))
    met = ((tap, at // layer.stride) for tap, at in pairs if at % layer.stride == 0)
    return [(tap, result) for tap, result in met if 0 <= result < results]
