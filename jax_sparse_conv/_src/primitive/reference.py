"""The definition of every operation in jax.numpy and lax: the `"xla"` implementation and the tests' oracle.

    out = pool(activation(conv(x, kernel) + bias + residual))

Nothing here skips zeros, and nothing here is native code. Every other implementation must equal it, except that a
skipped zero drops `0 * inf` and `0 * nan`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_sparse_conv._src.primitive import explicit
from jax_sparse_conv._src.problem import geometry as geo
from jax_sparse_conv._src.problem.geometry import Geometry, Pads, Pair, Pool

ActivationName: TypeAlias = Literal["relu"]
_DIMENSIONS = ("NHWC", "HWIO", "NHWC")
_LONG_WINDOW = 4
_MOST_SELECTED = 16  # pixels of a window whose derivative is a selection: one of 7x7 is as slow as XLA's
_lax_conv = lax.conv_general_dilated  # lax's own, also where `jsc.conv_general_dilated` is put in its place


def conv(
    x: jax.Array,
    kernel: jax.Array,
    geometry: Geometry,
    precision: lax.PrecisionLike = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
) -> jax.Array:
    """The convolution alone: x [N, H, W, C], kernel [kh, kw, C / groups, K] -> [N, Ho, Wo, K]."""
    spans = [(k - 1) * d + 1 for k, d in zip(kernel.shape[:2], geometry.dilation, strict=True)]
    padding = geo.named_padding(geometry.padding, x.shape[1:3], spans, geometry.strides)
    if not isinstance(padding, str):
        most = [_most_left(geometry, axis, kernel.shape[axis]) for axis in range(2)]
        x, padding = _padded_within(x, padding, most)
    return _lax_conv(
        x,
        kernel,
        window_strides=geometry.strides,
        padding=padding,
        rhs_dilation=geometry.dilation,
        dimension_numbers=_DIMENSIONS,
        feature_group_count=geometry.groups,
        precision=precision,
        preferred_element_type=preferred_element_type,
    )


def _most_left(geometry: Geometry, axis: int, size: int) -> int:
    """How much padding may be left to XLA along an axis: the window's span less 1.

    No pixel where windows lie side by side. For their gradient of x, which has no padding then, XLA for CPUs may
    exchange x and kernel, although their sizes differ, and ends the process.
    """
    dilation = geometry.dilation[axis]
    return 0 if 1 < size == geometry.strides[axis] and dilation == 1 else (size - 1) * dilation


def _padded_within(x: jax.Array, padding: Pads, most: Sequence[int]) -> tuple[jax.Array, Pads]:
    """x cropped or padded so that what is left of the padding is from 0 to `most`.

    XLA's convolutions for CPUs read out of bounds for others, in themselves or in their derivatives
    (openxla/xla#48713).
    """
    left = [(_within(low, limit), _within(high, limit)) for (low, high), limit in zip(padding, most, strict=True)]
    before = [
        _cropped(size, low - a, high - b) for size, (low, high), (a, b) in zip(x.shape[1:3], padding, left, strict=True)
    ]
    if any(map(any, before)):
        x = lax.pad(x, np.zeros((), x.dtype), ((0, 0, 0), *before, (0, 0, 0)))
    return x, (left[0], left[1])


def _cropped(size: int, low: int, high: int) -> tuple[int, int, int]:
    """Padding as `lax.pad` takes it. It crops no more than there is: of such a map the convolution is empty."""
    is_beyond = not geo.is_symbolic(size) and size + low + high < 0
    return low, -size - low if is_beyond else high, 0


def _within(pad: int, most: int) -> int:
    return min(max(pad, 0), most)


def dense(x: jax.Array, kernel: jax.Array, precision: lax.PrecisionLike = None) -> jax.Array:
    """x [..., C] times kernel [C, K].

    Of one row or one column XLA makes multiplications and a sum on a GPU, and rounds each product to 16 bits.
    """
    is_vector = math.prod(x.shape[:-1]) == 1 or kernel.shape[1] == 1
    wide = jnp.promote_types(x.dtype, jnp.float32) if is_vector else None
    return jnp.matmul(x, kernel, precision=precision, preferred_element_type=wide).astype(x.dtype)


def epilogue(y: jax.Array, bias: jax.Array | None, residual: jax.Array | None, activation: str | None) -> jax.Array:
    """Bias [K] and residual [N, Ho, Wo, K] added to y [N, Ho, Wo, K], then the activation."""
    if bias is not None:
        y = y + for_channels_of(y, bias)
    if residual is not None:
        y = y + residual
    return _relu(y) if activation == "relu" else y


def _relu(y: jax.Array) -> jax.Array:
    """XLA loses NaN of `max(y, 0)` in front of some sums on a CPU; on a GPU cuDNN has that and nothing else."""
    if not jnp.issubdtype(y.dtype, jnp.floating):
        return jax.nn.relu(y)
    return lax.platform_dependent(y, cpu=_zero_where_negative, default=jax.nn.relu)


def _zero_where_negative(y: jax.Array) -> jax.Array:
    """With the derivative of `jax.nn.relu`, which is 0 at NaN."""
    fixed = lax.stop_gradient(y)
    return lax.select(y > 0, y, lax.select(fixed <= 0, lax.full_like(y, 0), fixed))


def for_channels_of(y: jax.Array, values: jax.Array) -> jax.Array:
    """Values [C] as they go with y [..., C]: [1, ..., C], so that `jax.numpy_rank_promotion` has nothing to say."""
    return lax.expand_dims(values, range(y.ndim - values.ndim))


def pool(y: jax.Array, spec: Pool | None) -> jax.Array:
    """Max pool (padded with -inf) or average pool (padded with zeros that count) of y [N, H, W, K]; both keep NaN."""
    if spec is None:
        return y
    y = explicit.whole(y, 1, 2)
    if spec.kind == "max":
        return _max_pool(y, spec)
    # Sums of 16-bit types are taken in float32, as the kernels do.
    wide = y.astype(jnp.promote_types(y.dtype, jnp.float32))
    total = _over_windows(wide, spec, 0, lax.add)
    return (total / (spec.window[0] * spec.window[1])).astype(y.dtype)


def _over_windows(y: jax.Array, spec: Pool, fill: float, of: Callable[..., Any]) -> jax.Array:
    def reduce(padded: jax.Array, padding: Pads) -> jax.Array:
        windows = _windows(y, dataclasses.replace(spec, padding=padding))
        return lax.reduce_window(padded, _scalar(fill, y), of, *windows)

    return reduce_window(y, fill, spec, reduce)


def reduce_window(y: jax.Array, fill: float, spec: Pool, reduce: Callable[[jax.Array, Pads], jax.Array]) -> jax.Array:
    """lax's `reduce_window` over H and W of y [N, H, W, C], which `reduce` calls with the padding that is left to it.

    XLA for CPUs (YNNPACK there) repeats a map's only row, or column, in padding behind it, unless some is in front. So
    such a map has one window more, in front, which is dropped. Padding alone would not do: XLA makes it the window's.

    XLA's partitioner ends the process over gradients where windows that are strides apart begin with padding alone: the
    derivative crops and spreads at once. So that padding is y's.
    """
    along = zip(y.shape[1:3], spec.window, spec.strides, spec.padding, strict=True)
    (above, top, rows), (before, left, columns) = (_in_front(*each) for each in along)
    if (above, before) == (0, 0):
        return reduce(y, spec.padding)
    padded = lax.pad(y, _scalar(fill, y), ((0, 0, 0), (above, 0, 0), (before, 0, 0), (0, 0, 0)))
    return reduce(padded, (rows, columns))[:, top:, left:]


def _in_front(size: int, window: int, stride: int, pads: Pair) -> tuple[int, int, Pair]:
    """Pixels of padding to put in front of an axis, windows to drop there then, and the padding that is left."""
    low, high = pads
    if all(map(geo.may_hold, (lambda: size <= 1, lambda: low <= 0, lambda: high > 0))):
        return stride, 1, pads
    if stride > 1 and not geo.is_symbolic(low) and low >= window:
        return low, 0, (0, high)
    return 0, 0, pads


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _max_pool(y: jax.Array, spec: Pool) -> jax.Array:
    """XLA's `reduce_window` loses NaN in windows of 2x2 on a CPU, and is slower than slices there."""
    of_windows = functools.partial(_max_of_windows, spec=spec)
    if geo.is_symbolic(*y.shape[1:3]):
        return of_windows(y)
    return lax.platform_dependent(y, cpu=functools.partial(_max_of_slices, spec=spec), default=of_windows)


@_max_pool.defjvp
def _max_pool_jvp(spec: Pool, primals: Sequence[jax.Array], tangents: Sequence[jax.Array]) -> tuple[Any, Any]:
    y = lax.stop_gradient(primals[0])
    if is_selection(y, spec):
        tangent = _of_maxima(tangents[0], _first_maxima(y, spec), spec)
    else:
        _, tangent = jax.jvp(functools.partial(_max_of_windows, spec=spec), primals, tangents)
    return _max_pool(*primals, spec), tangent


def is_selection(y: jax.Array, spec: Pool) -> bool:
    """Whether a gradient is one selection, which XLA's `select_and_scatter` is slower than (`benchmarks gradients`)."""
    if geo.is_symbolic(*y.shape[1:3]) or spec.window != spec.strides or any(map(any, spec.padding)):
        return False
    return math.prod(spec.window) <= _MOST_SELECTED and bool(jnp.issubdtype(y.dtype, jnp.inexact))


def _of_maxima(tangent: jax.Array, at: jax.Array, spec: Pool) -> jax.Array:
    """The tangents of those pixels of each window that `at` names."""
    apart = _windows_apart(tangent, spec)
    rows, columns = (lax.broadcasted_iota(at.dtype, (1, 1, spec.window[0], 1, spec.window[1], 1), a) for a in (2, 4))
    taken = lax.expand_dims(at, (2, 4)) == rows * spec.window[1] + columns
    return lax.select(taken, apart, lax.full_like(apart, 0)).sum((2, 4))


def _first_maxima(y: jax.Array, spec: Pool) -> jax.Array:
    """Which pixel of each window [N, Ho, Wo, K] has its gradient: the first maximum of those behind the last NaN.

    This is the choice of `select_and_scatter`, which JAX gives `>=`.
    """
    (rows, columns), (_, height, width, _) = spec.window, y.shape
    values = [
        strided_slice(strided_slice(y, 1, row, height // rows, rows), 2, column, width // columns, columns)
        for row, column in np.ndindex(spec.window)
    ]
    best, at = values[0], lax.full_like(values[0], 0, dtype=np.int8)
    for tap, value in enumerate(values[1:], 1):
        stays = best >= value
        best = lax.select(stays, best, value)
        at = lax.select(stays, at, lax.full_like(at, tap))
    return at


def _windows_apart(y: jax.Array, spec: Pool) -> jax.Array:
    """y [N, H, W, K] -> [N, Ho, rows, Wo, columns, K] of windows, without what is left behind the last ones."""
    (rows, columns), (images, height, width, channels) = spec.window, y.shape
    whole = y[:, : height // rows * rows, : width // columns * columns]
    # One axis at a time, as JAX knows how the results of such reshapes are split.
    by_rows = whole.reshape(images, height // rows, rows, whole.shape[2], channels)
    return by_rows.reshape(images, height // rows, rows, width // columns, columns, channels)


def _max_of_windows(y: jax.Array, spec: Pool) -> jax.Array:
    return _over_windows(y, spec, pool_padding(spec, y.dtype), lax.max)


def _windows(y: jax.Array, spec: Pool) -> tuple[Any, Any, Any]:
    """Window, strides and padding as lax takes them."""
    named = geo.named_padding(spec.padding, y.shape[1:3], spec.window, spec.strides)
    padding = named if isinstance(named, str) else ((0, 0), *named, (0, 0))
    return (1, *spec.window, 1), (1, *spec.strides, 1), padding


def _max_of_slices(y: jax.Array, spec: Pool) -> jax.Array:
    """The maxima of rows, then of columns."""
    around = ((0, 0, 0), *((*pads, 0) for pads in spec.padding), (0, 0, 0))
    y = lax.pad(y, _scalar(pool_padding(spec, y.dtype), y), around)
    for axis, window, stride in zip((1, 2), spec.window, spec.strides, strict=True):
        y = _max_along(y, axis, window, stride)
    return y


def _max_along(y: jax.Array, axis: int, window: int, stride: int) -> jax.Array:
    """The maximum of each window along an axis; long windows are those of two halves, which may overlap."""
    count = geo.windowed_size(y.shape[axis], window, stride, (0, 0), 1)
    if count == 0:
        return lax.slice_in_dim(y, 0, 0, axis=axis)
    starts = range(window)
    if window > _LONG_WINDOW:
        half = (window + 1) // 2
        y, starts = _max_along(y, axis, half, 1), (0, window - half)  # type: ignore[assignment]
    return functools.reduce(jnp.maximum, [strided_slice(y, axis, start, count, stride) for start in starts])


def strided_slice(y: jax.Array, axis: int, start: int, count: int, stride: int) -> jax.Array:
    """So many rows of an axis, a stride apart.

    One row has no stride: XLA's partitioner takes another row then, or raises, where the axis is split.
    """
    if count == 0:  # a start may lie past the end
        return lax.slice_in_dim(y, 0, 0, axis=axis)
    stride = stride if count > 1 else 1
    return lax.slice_in_dim(y, start, start + (count - 1) * stride + 1, stride, axis)


def pool_padding(spec: Pool, dtype: np.dtype) -> float:
    """What a pool's window has where there is padding."""
    return _lowest(dtype) if spec.kind == "max" else 0.0


def average_of_pixels(x: jax.Array) -> jax.Array:
    """x [N, H, W, C] -> [N, C], summed in float32 at least.

    Scaled first: on a GPU XLA fuses the scaling into the sum's kernel, and `jnp.mean` divides in a kernel of its own.
    `rewrite.fuse` recognises this form.
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return jnp.sum(wide * (1 / (x.shape[1] * x.shape[2])), axis=(1, 2)).astype(x.dtype)


def conv_pool(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
    geometry: Geometry,
    activation: str | None,
    precision: lax.PrecisionLike = None,
) -> jax.Array:
    """The whole operation, in the order of the module's formula."""
    y = conv(x, kernel, geometry, precision)
    return pool(epilogue(y, bias, residual, activation), geometry.pool)


def density(x: jax.Array, axis: int | tuple[int, ...] | None = None) -> jax.Array:
    """Fraction of non-zero elements of x (-0.0 is zero, NaN is not) over `axis`, as float32."""
    return jnp.mean(is_nonzero(x), axis=axis, dtype=jnp.float32)


def is_nonzero(x: jax.Array) -> jax.Array:
    """Where x is neither 0.0 nor -0.0. Compares bits: XLA's CPU backend takes a subnormal for zero."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x != 0
    bits = lax.bitcast_convert_type(x, jnp.dtype(f"uint{jnp.finfo(x.dtype).bits}"))
    return (bits << 1) != 0


def _lowest(dtype: np.dtype) -> float:
    """-inf, or where there is none the least number."""
    if not jnp.issubdtype(dtype, jnp.inexact):
        return float(jnp.iinfo(dtype).min)
    return float(jnp.finfo(dtype).min) if np.isnan(np.asarray(-np.inf, dtype)) else -math.inf


def _scalar(value: float, like: jax.Array) -> np.ndarray:
    return np.asarray(value, like.dtype)  # concrete, so that lax sees a known monoid and can differentiate it
