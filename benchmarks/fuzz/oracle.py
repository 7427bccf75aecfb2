"""The calls in NumPy and float64, with their derivatives and how far rounding may lead away from them.

    out = pool(activation(conv(x, kernel) + bias + residual))

Nothing here is shared with the package. A convolution is a product for each
tap of the kernel.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.fuzz.case import Case, Pads, conv_pads, conv_size, out_shape, pads_of

Array = npt.NDArray[np.float64]


# --- the convolution, and what it is linear in -----------------------------------------------------------------------


def _padded(x: Array, pads: Pads, fill: float = 0.0) -> Array:
    """x padded, then cropped, in a new array."""
    wide = np.pad(x, [(0, 0), *((max(0, low), max(0, high)) for low, high in pads), (0, 0)], constant_values=fill)
    return wide[_cropped(wide.shape[1:3], pads)]


def _cropped(size: Sequence[int], pads: Pads) -> tuple[slice, slice, slice]:
    """Where a padded map has what cropping leaves."""
    rows, columns = (slice(max(0, -low), n - max(0, -high)) for n, (low, high) in zip(size, pads, strict=True))
    return slice(None), rows, columns


def _unpadded(wide: Array, size: Sequence[int], pads: Pads) -> Array:
    """The part of a padded map that is not padding."""
    rows, columns = (slice(max(0, low), max(0, low) + n) for n, (low, _) in zip(size, pads, strict=True))
    return wide[:, rows, columns]


def _taps(
    window: Sequence[int], strides: Sequence[int], dilation: Sequence[int], size: Sequence[int]
) -> Iterator[tuple[tuple[int, int], tuple[slice, slice, slice]]]:
    """Each tap of a window, and where a padded map has what it meets."""
    for tap in itertools.product(*map(range, window)):
        along = [
            slice(t * d, t * d + (n - 1) * s + 1, s) if n else slice(0, 0)
            for t, d, n, s in zip(tap, dilation, size, strides, strict=True)
        ]
        yield (tap[0], tap[1]), (slice(None), along[0], along[1])


def conv(case: Case, x: Array, kernel: Array) -> Array:
    """[N, H, W, C], [kh, kw, C / G, K] -> [N, Ho, Wo, K]."""
    size, groups = conv_size(case), case.groups
    padded = _padded(x, conv_pads(case))
    out = np.zeros((x.shape[0], *size, groups, case.out_channels // groups))
    for (row, column), where in _taps(case.kernel, case.strides, case.dilation, size):
        met = padded[where].reshape(*out.shape[:4], case.kernel_shape[2])
        weights = kernel[row, column].reshape(case.kernel_shape[2], *out.shape[3:])
        out += _grouped("nhwgc,cgk->nhwgk", met, weights)
    return out.reshape(x.shape[0], *size, case.out_channels)


def _grouped(formula: str, one: Array, other: Array) -> Array:
    return np.einsum(formula, one, other, optimize=True)


def to_kernel(case: Case, x: Array, dy: Array) -> Array:
    """The cotangent of the kernel."""
    size, groups = conv_size(case), case.groups
    padded = _padded(x, conv_pads(case))
    split = dy.reshape(*dy.shape[:3], groups, case.out_channels // groups)
    out = np.zeros(case.kernel_shape)
    for (row, column), where in _taps(case.kernel, case.strides, case.dilation, size):
        met = padded[where].reshape(*split.shape[:4], case.kernel_shape[2])
        out[row, column] = _grouped("nhwgc,nhwgk->cgk", met, split).reshape(out.shape[2:])
    return out


def to_x(case: Case, kernel: Array, dy: Array) -> Array:
    """The cotangent of x."""
    size, groups, pads = conv_size(case), case.groups, conv_pads(case)
    split = dy.reshape(*dy.shape[:3], groups, case.out_channels // groups)
    wide = np.pad(np.zeros(case.x), [(0, 0), *((max(0, low), max(0, high)) for low, high in pads), (0, 0)])
    padded = wide[_cropped(wide.shape[1:3], pads)]  # a view
    for (row, column), where in _taps(case.kernel, case.strides, case.dilation, size):
        weights = kernel[row, column].reshape(case.kernel_shape[2], *split.shape[3:])
        padded[where] += _grouped("nhwgk,cgk->nhwgc", split, weights).reshape(padded[where].shape)
    return _unpadded(wide, case.x[1:3], pads)


# --- the whole call --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Rounding:
    """How far a sum of a dtype may be off.

    Attributes:
      out: of a result, relative to it.
      sums: of one addition, relative to the absolute sum.
      tiny: what may be lost of one product.
      least: what may be lost of a result.
    """

    out: float
    sums: float
    tiny: float
    least: float

    @classmethod
    def of(cls, dtype: str) -> Rounding:
        single, double = np.finfo(np.float32), np.finfo(np.float64)
        out = {"float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10, "float64": 2.0**-52}[dtype]
        sums, tiny = (double.eps, double.tiny) if dtype == "float64" else (single.eps, single.tiny)
        return cls(out, float(sums), float(tiny), 2.0**-24 if dtype == "float16" else float(tiny))

    def bound(self, absolute: Array, rounded: Array, products: int) -> Array:
        """Of results: their absolute sums, the sum of what was rounded on the way, the products of a sum."""
        long = 4 + math.sqrt(products)
        return self.sums * long * absolute + self.out * rounded + products * self.tiny + self.least


@dataclasses.dataclass(frozen=True)
class Forward:
    """A call in float64.

    Attributes:
      out: [N, Po, Qo, K].
      bound: how far each element may be off.
      typical: of each element the root of the sum of squares: its size if signs were random.
      passes: [N, Ho, Wo, K], 1 where the activation passes a change on.
      clear: [N, Po, Qo, K], whether rounding leaves it open what a derivative is.
      winner: [N, Po, Qo, K], of a max pool the place in the window.
    """

    out: Array
    bound: Array
    typical: Array
    passes: Array
    clear: npt.NDArray[np.bool_]
    winner: npt.NDArray[np.intp] | None


def forward(case: Case, x: Array, kernel: Array, bias: Array | None, residual: Array | None) -> Forward:
    """The call, its bound, and what its derivative needs."""
    rounding = Rounding.of(case.dtype)
    y = conv(case, x, kernel)
    absolute, squares = conv(case, np.abs(x), np.abs(kernel)), conv(case, x**2, kernel**2)
    rounded = np.abs(y) + _rounded_parts(case, x, kernel)
    for added in (bias, residual):
        if added is not None:
            y = y + added
            absolute, squares, rounded = absolute + np.abs(added), squares + added**2, rounded + np.abs(y)
    bound = rounding.bound(absolute, rounded, math.prod(case.kernel_shape[:3]) + 2)
    is_open = np.zeros(y.shape, bool)
    passes = np.ones(y.shape)
    if case.activation == "relu":
        is_open, passes = (np.abs(y) <= 4 * bound) & (absolute > 0), (y > 0).astype(float)
        y = np.maximum(y, 0)
    typical = np.sqrt(squares)
    if case.pool is None:
        return Forward(y, bound, typical, passes, ~is_open, None)
    return _pooled(case, y, bound, typical, passes, is_open, rounding)


def _rounded_parts(case: Case, x: Array, kernel: Array) -> Array | float:
    """What is rounded before devices that share the input channels add it up: the sum of each one's channels."""
    parts = case.split[3]
    if parts == 1 or case.groups > 1:
        return 0.0
    each = case.x[3] // parts
    mine = (np.arange(case.x[3]) // each == part for part in range(parts))
    return np.sum([np.abs(conv(case, x * own, kernel)) for own in mine], axis=0)


def _pooled(
    case: Case, y: Array, bound: Array, typical: Array, passes: Array, is_open: Any, rounding: Rounding
) -> Forward:
    bounds, typicals, opens = (_windows(case, value, 0.0) for value in (bound, typical, is_open.astype(float)))
    if case.pool == "avg":
        values = _windows(case, y, 0.0)
        out = values.mean(0)
        off = bounds.mean(0) + rounding.out * np.abs(out) + rounding.least
        off += rounding.sums * math.sqrt(len(values)) * np.abs(values).mean(0)  # the window's own additions
        return Forward(out, off, np.sqrt((typicals**2).mean(0)), passes, opens.max(0) == 0, None)
    values = _windows(case, y, -np.inf)
    winner = values.argmax(0)
    out, off = values.max(0), bounds.max(0)
    others = np.where(np.arange(len(values))[:, None, None, None, None] == winner, -np.inf, values)
    finite = np.isfinite(out)
    near = out - np.where(finite, others.max(0), 0) <= 4 * off
    is_zero = (out == 0) & (_windows(case, passes, 0.0).max(0) == 0) if case.activation == "relu" else False
    clear = finite & (opens.max(0) == 0) & (~near | is_zero)
    return Forward(out, off, typicals.max(0), passes, clear, winner)


def _windows(case: Case, y: Array, fill: float) -> Array:
    """[window, N, Po, Qo, K]: what each place of the pool's window meets."""
    strides = case.window_strides or case.window
    size = out_shape(case)[1:3]
    padded = _padded(y, pads_of(case.window_padding, y.shape[1:3], case.window, strides), fill)
    return np.stack([padded[where] for _, where in _taps(case.window, strides, (1, 1), size)])


def push(case: Case, found: Forward, dy: Array) -> Array:
    """The tangent of the result, of the tangent in front of the activation."""
    dy = dy * found.passes
    if case.pool is None:
        return dy
    windows = _windows(case, dy, 0.0)
    if case.pool == "avg":
        return windows.mean(0)
    assert found.winner is not None
    return np.take_along_axis(windows, found.winner[None], 0)[0]


def pull(case: Case, found: Forward, dout: Array) -> Array:
    """The cotangent in front of the activation, of that of the result."""
    if case.pool is None:
        return dout * found.passes
    strides = case.window_strides or case.window
    shape = found.passes.shape
    pads = pads_of(case.window_padding, shape[1:3], case.window, strides)
    padded = _padded(np.zeros(shape), pads)
    places = list(_taps(case.window, strides, (1, 1), dout.shape[1:3]))
    for place, (_, where) in enumerate(places):
        padded[where] += dout / len(places) if found.winner is None else dout * (found.winner == place)
    return _unpadded(padded, shape[1:3], pads) * found.passes
