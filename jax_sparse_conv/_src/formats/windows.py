"""Cuts a feature map into convolution and pooling windows and compresses each: the algorithms behind `formats`."""

from __future__ import annotations

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_sparse_conv._src.primitive import reference
from jax_sparse_conv._src.problem.geometry import Geometry, Pair

EMPTY = -1
"""The count of a window without non-zeros."""
ABSENT = -2
"""The count of a place of a pooling window that lies in the pool's padding, where there is no convolution."""


def compress(
    x: jax.Array, kernel_size: Pair, geometry: Geometry, nse: int | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """x [N, H, W, C] -> values and indices [N, Ho, Wo, capacity], counts [N, Ho, Wo]; capacity is `nse` or all taps."""
    taps = kernel_size[0] * kernel_size[1] * x.shape[3]
    capacity = taps if nse is None else _slots(nse)
    values, indices, counts = _compress(x, kernel_size, geometry, capacity)
    values = _poison_overflow(values, counts, capacity)
    return values, indices, jnp.where(counts == 0, EMPTY, counts)


def _slots(nse: int) -> int:
    try:
        slots = operator.index(nse)
    except TypeError:
        slots = 0
    if slots < 1:
        raise ValueError(f"nse={nse!r} is not an int of at least 1 or None")
    return slots


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _compress(
    x: jax.Array, kernel_size: Pair, geometry: Geometry, capacity: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    pixels = cut(x, kernel_size, geometry)
    shape = pixels.shape[:-1]
    if pixels.size == 0:
        lists = (*shape, capacity)
        return jnp.zeros(lists, x.dtype), jnp.full(lists, -1, jnp.int32), jnp.zeros(shape, jnp.int32)
    compress_window = functools.partial(_compress_window, capacity=capacity)
    for _ in shape:
        compress_window = jax.vmap(compress_window)
    return compress_window(pixels)


def cut(x: jax.Array, kernel_size: Pair, geometry: Geometry) -> jax.Array:
    """x [N, H, W, C] -> [N, Ho, Wo, kh * kw * C], each window's pixels in the order of (row, column, channel)."""
    height, width = geometry.conv_size((x.shape[1], x.shape[2]), kernel_size)
    taps = kernel_size[0] * kernel_size[1] * x.shape[3]
    if 0 in (height, width):
        return jnp.zeros((x.shape[0], height, width, taps), x.dtype)
    pads = [(0, 0, 0), *((low, high, 0) for low, high in geometry.padding), (0, 0, 0)]
    padded = lax.pad(x, jnp.zeros((), x.dtype), pads)
    rows, columns = (
        np.arange(n)[:, None] * stride + np.arange(k)[None, :] * dilation
        for n, k, stride, dilation in zip(
            (height, width), kernel_size, geometry.strides, geometry.dilation, strict=True
        )
    )
    windows = padded[:, rows][:, :, :, columns]  # [N, Ho, kh, Wo, kw, C]
    return windows.transpose(0, 1, 3, 2, 4, 5).reshape(x.shape[0], height, width, taps)


def _compress_window(pixels: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One window [taps] -> values [capacity], indices [capacity] and the count, not limited by the capacity."""
    kept = reference.is_nonzero(pixels)
    indices = jnp.nonzero(kept, size=capacity, fill_value=-1)[0].astype(jnp.int32)
    values = pixels.at[indices].get(mode="fill", fill_value=0, wrap_negative_indices=False)
    return values, indices, jnp.sum(kept, dtype=jnp.int32)


def _poison_overflow(values: jax.Array, counts: jax.Array, capacity: int) -> jax.Array:
    overflowed = counts > capacity
    try:
        largest = int(jnp.max(counts, initial=0))
    except jax.errors.ConcretizationTypeError:
        return jnp.where(overflowed[..., None], jnp.nan, values).astype(values.dtype)
    if largest > capacity:
        raise ValueError(f"nse={capacity} is too small: a window has {largest} non-zeros; nse={largest} or None works")
    return values


def pool_places(geometry: Geometry, conv_size: Pair, out_size: Pair) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Row, column and presence of each convolution result of each pooling window, [Po, Qo, ph * pw]."""
    pool = geometry.pool
    assert pool is not None
    rows, columns = (
        np.arange(n)[:, None] * stride - low + np.arange(window)[None, :]
        for n, stride, (low, _), window in zip(out_size, pool.strides, pool.padding, pool.window, strict=True)
    )
    shape = (*out_size, *pool.window)
    flat = (*out_size, pool.window[0] * pool.window[1])
    row = np.broadcast_to(rows[:, None, :, None], shape).reshape(flat)
    column = np.broadcast_to(columns[None, :, None, :], shape).reshape(flat)
    inside = (row >= 0) & (row < conv_size[0]) & (column >= 0) & (column < conv_size[1])
    return row, column, inside


def gather(lists: jax.Array, rows: np.ndarray, columns: np.ndarray, inside: np.ndarray, fill: int) -> jax.Array:
    """lists [N, Ho, Wo, ...] -> [N, Po, Qo, ph * pw, ...], `fill` where not inside."""
    if not inside.any():
        return jnp.full((lists.shape[0], *inside.shape, *lists.shape[3:]), fill, lists.dtype)
    gathered = lists[:, np.where(inside, rows, 0), np.where(inside, columns, 0)]
    present = inside.reshape(1, *inside.shape, *(1,) * (lists.ndim - 3))
    return jnp.where(present, gathered, jnp.asarray(fill, lists.dtype))


def first_pixels(geometry: Geometry, rows: np.ndarray, columns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The pixel of the unpadded map at which the windows of convolution results (rows, columns) start."""
    (top, _), (left, _) = geometry.padding
    rows, columns = np.broadcast_arrays(rows * geometry.strides[0] - top, columns * geometry.strides[1] - left)
    return rows, columns
