"""Compressed feature maps: `ECR` (one list per convolution window) and `PECR` (those lists grouped by pooling window).

Xu et al. 2023, sections 5 and 6, for any number of channels and images, any stride, padding, dilation and pool. The
`"ecr"` and `"pecr"` kernels build these lists on the fly and never store them; here they are arrays, to be looked at,
counted, and multiplied by the kernel the way the papers define it.

    window (3 x 3, one channel)      values     indices    count
      0  0 15
     22  0  0                        15 22 8    2 3 7      3          index = (i * kw + j) * C + c
      0  8  0
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_sparse_conv import geometry as geo
from jax_sparse_conv import layers, ops, reference, windows
from jax_sparse_conv.geometry import Geometry, Padding, Pair

_DTYPES = ("float32", "bfloat16", "float16", "float64")
_MAX_INT32 = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class _Compressed:
    """What both formats share: lists of `capacity` slots, one per window, in the order of (row, column, channel)."""

    values: jax.Array
    indices: jax.Array
    counts: jax.Array
    size: Pair = dataclasses.field(metadata={"static": True})
    channels: int = dataclasses.field(metadata={"static": True})
    kernel_size: Pair = dataclasses.field(metadata={"static": True})
    geometry: Geometry = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the feature map, [N, H, W, C] (more leading axes where `jax.vmap` added them)."""
        return (*self.counts.shape[: self.counts.ndim - self._window_axes], *self.size, self.channels)

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.values.dtype)

    @property
    def capacity(self) -> int:
        """Slots per window."""
        return int(self.values.shape[-1])

    @property
    def nbytes(self) -> int:
        """Bytes of values, indices and counts together, unused slots included."""
        return sum(math.prod(a.shape) * a.dtype.itemsize for a in (self.values, self.indices, self.counts))

    @property
    def multiplications(self) -> jax.Array:
        """Multiplications of one output channel: the non-zeros of all windows.

        A scalar, int32, or float32 where `dense_multiplications` does not fit int32.
        """
        return self._total(jnp.maximum(self.counts, 0))

    @property
    def additions(self) -> jax.Array:
        """Additions of one output channel: one less than the non-zeros of each window; typed as `multiplications`."""
        return self._total(jnp.maximum(self.counts - 1, 0))

    @property
    def dense_multiplications(self) -> int:
        """Multiplications of one output channel that skips nothing, padding included."""
        return self._windows * self._taps

    @property
    def dense_additions(self) -> int:
        """Additions of one output channel that skips nothing."""
        return self._windows * max(self._taps - 1, 0)

    @jax.jit
    def todense(self) -> jax.Array:
        """The feature map [N, H, W, C]: exact where a window reaches, zero at pixels that no window covers.

        -0.0 comes back as 0.0. An image that overflowed `nse` comes back as NaN.
        """
        if 0 in self.values.shape:
            return jnp.zeros(self.shape, self.dtype)
        window_shape = self.counts.shape[self.counts.ndim - self._window_axes :]
        images = math.prod(self.shape[:-3])
        lists = (images, *window_shape, self.capacity)
        rows, columns = self._origins()
        pixels = jax.vmap(functools.partial(self._scatter, rows=rows, columns=columns))(
            self.values.reshape(lists), self.indices.reshape(lists)
        )
        overflowed = jnp.any((self.counts > self.capacity).reshape(images, math.prod(window_shape)), axis=1)
        return jnp.where(overflowed[:, None], jnp.nan, pixels).astype(self.dtype).reshape(self.shape)

    def _scatter(self, values: jax.Array, indices: jax.Array, rows: np.ndarray, columns: np.ndarray) -> jax.Array:
        """One image's lists as pixels [H * W * C]; `rows` and `columns` are the windows' first pixels."""
        tap, channel = jnp.divmod(indices, self.channels)
        i, j = jnp.divmod(tap, self.kernel_size[1])
        row = rows[..., None] + i * self.geometry.dilation[0]
        column = columns[..., None] + j * self.geometry.dilation[1]
        length = self.size[0] * self.size[1] * self.channels
        pixel = jnp.where(indices < 0, length, (row * self.size[1] + column) * self.channels + channel)
        return jnp.zeros(length, values.dtype).at[pixel].set(values, mode="drop")

    def _origins(self) -> tuple[np.ndarray, np.ndarray]:
        raise NotImplementedError

    def _convolve(self, kernel: jax.typing.ArrayLike) -> jax.Array:
        """Algorithm 2 of the paper for K output channels: slot after slot, values[s] * kernel[indices[s]]."""
        kernel = jnp.asarray(kernel)
        expected = (*self.kernel_size, self.channels)
        if kernel.ndim != 4 or kernel.shape[:3] != expected:
            raise ValueError(f"kernel.shape={kernel.shape} must be {expected} and the output channels, [kh, kw, C, K]")
        if kernel.dtype != self.dtype:
            raise TypeError(f"kernel.dtype={kernel.dtype} must equal the feature map's dtype={self.dtype}")
        return self._sum_slots(kernel)

    @jax.jit
    def _sum_slots(self, kernel: jax.Array) -> jax.Array:
        shape = (*self.counts.shape, kernel.shape[3])
        if 0 in self.values.shape:
            return jnp.zeros(shape, self.dtype)
        accumulator = jnp.promote_types(self.dtype, jnp.float32)
        rows = kernel.reshape(self._taps, kernel.shape[3]).astype(accumulator)

        def step(total: jax.Array, slot: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            value, index = (part[..., None] for part in slot)
            row = rows.at[index[..., 0]].get(mode="fill", fill_value=0, wrap_negative_indices=False)
            return total + jnp.where(index < 0, 0, value.astype(accumulator) * row), None

        slots = (jnp.moveaxis(self.values, -1, 0), jnp.moveaxis(self.indices, -1, 0))
        return lax.scan(step, jnp.zeros(shape, accumulator), slots)[0].astype(self.dtype)

    def _total(self, per_window: jax.Array) -> jax.Array:
        fits = self.dense_multiplications <= _MAX_INT32
        return jnp.sum(per_window, dtype=jnp.int32 if fits else jnp.float32)

    @property
    def _taps(self) -> int:
        return math.prod(self.kernel_size) * self.channels

    @property
    def _windows(self) -> int:
        raise NotImplementedError

    @property
    def _window_axes(self) -> int:
        raise NotImplementedError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ECR(_Compressed):
    """Extended and Compressed Row format (Xu et al. 2023, section 5.2) of a feature map [N, H, W, C].

    A pytree of three arrays; everything else about it is static.

    Gradients with respect to the dense map reach stored non-zeros only: they are 0 at every zero of it. To
    differentiate a convolution use `jax_sparse_conv.conv`, whose gradients are those of the dense one.

    Attributes:
      values: [N, Ho, Wo, capacity], the non-zeros of each window, in the order of (row, column, channel), then zeros.
      indices: [N, Ho, Wo, capacity] int32, rows `(i * kw + j) * C + c` of the kernel flattened to [kh * kw * C, K]; -1
        in unused slots.
      counts: [N, Ho, Wo] int32, non-zeros of each window; -1 where there are none.
      size: (H, W) of the feature map.
      channels: C.
      kernel_size: (kh, kw).
      geometry: strides, padding and dilation, resolved.
    """

    @classmethod
    def fromdense(
        cls,
        x: jax.typing.ArrayLike,
        kernel_size: int | Sequence[int],
        *,
        strides: int | Sequence[int] = 1,
        padding: Padding = "SAME",
        kernel_dilation: int | Sequence[int] = 1,
        nse: int | None = None,
    ) -> Self:
        """Compress every convolution window of `x` (Algorithm 1 of the paper).

        Both zeros are left out; NaN, infinities and subnormals are not.

        Args:
          x: [N, H, W, C], float32, bfloat16, float16 or float64.
          kernel_size: rows and columns of the kernel, an int or two.
          strides: as in `jax_sparse_conv.conv`.
          padding: as in `jax_sparse_conv.conv`.
          kernel_dilation: as in `jax_sparse_conv.conv`.
          nse: slots per window; None is the worst case, kh * kw * C. Where a window has more non-zeros than a smaller
            `nse`, this raises outside of `jax.jit`; inside, that window's values are NaN (and so is its convolution),
            its count is the true one, and `todense` gives NaN for that image.

        Raises:
          ValueError: an argument that does not fit, or a window that overflows `nse`.
          TypeError: another dtype.
        """
        x, size, geometry = _resolve(x, kernel_size, strides, padding, kernel_dilation)
        values, indices, counts = windows.compress(x, size, geometry, nse)
        return cls(values, indices, counts, (x.shape[1], x.shape[2]), x.shape[3], size, geometry)

    def conv(self, kernel: jax.typing.ArrayLike) -> jax.Array:
        """The convolution (Algorithm 2): kernel [kh, kw, C, K] of the same dtype -> [N, Ho, Wo, K].

        16-bit types are summed in float32. Products with zeros of x are not taken, so `0 * inf` drops out.

        Raises:
          ValueError: a kernel of another shape.
          TypeError: a kernel of another dtype.
        """
        return self._convolve(kernel)

    @property
    def _windows(self) -> int:
        return math.prod(self.counts.shape)

    @property
    def _window_axes(self) -> int:
        return 2

    def _origins(self) -> tuple[np.ndarray, np.ndarray]:
        height, width = self.counts.shape[-2:]
        return windows.first_pixels(self.geometry, np.arange(height)[:, None], np.arange(width)[None, :])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PECR(_Compressed):
    """Pooling-pack Extended and Compressed Row format (Xu et al. 2023, section 6.2) of a feature map [N, H, W, C].

    The lists of `ECR`, once for each pooling window [ph, pw] that the convolution's result falls into. Attributes as in
    `ECR`, with shapes [N, Po, Qo, ph * pw, capacity], [N, Po, Qo, ph * pw, capacity] and [N, Po, Qo, ph * pw]; a count
    is -2 where the pooling window reaches into the pool's padding.

    Gradients with respect to the dense map reach stored non-zeros only: they are 0 at every zero of it. To
    differentiate a convolution use `jax_sparse_conv.conv_pool`, whose gradients are those of the dense one.
    """

    @classmethod
    def fromdense(
        cls,
        x: jax.typing.ArrayLike,
        kernel_size: int | Sequence[int],
        *,
        strides: int | Sequence[int] = 1,
        padding: Padding = "SAME",
        kernel_dilation: int | Sequence[int] = 1,
        window_shape: int | Sequence[int] = (2, 2),
        window_strides: int | Sequence[int] | None = None,
        window_padding: Padding = "VALID",
        nse: int | None = None,
    ) -> Self:
        """Compress every convolution window of every pooling window of `x` (Algorithm 3 of the paper).

        Args:
          x: [N, H, W, C], float32, bfloat16, float16 or float64.
          kernel_size: rows and columns of the kernel, an int or two.
          strides: as in `jax_sparse_conv.conv_pool`, and so are padding, kernel_dilation and the window_* arguments.
          nse: slots per convolution window; an overflow is treated as in `ECR.fromdense`.

        Raises:
          ValueError: an argument that does not fit, or a window that overflows `nse`.
          TypeError: another dtype.
        """
        x, size, geometry = _resolve(x, kernel_size, strides, padding, kernel_dilation)
        conv_size = geometry.conv_size((x.shape[1], x.shape[2]), size)
        geometry = geo.with_pool(
            geometry,
            conv_size,
            kind="max",
            window_shape=window_shape,
            window_strides=window_strides,
            window_padding=window_padding,
        )
        places = windows.pool_places(geometry, conv_size, geometry.out_size((x.shape[1], x.shape[2]), size))
        values, indices, counts = (
            windows.gather(lists, *places, fill)
            for lists, fill in zip(windows.compress(x, size, geometry, nse), (0, -1, windows.ABSENT), strict=True)
        )
        return cls(values, indices, counts, (x.shape[1], x.shape[2]), x.shape[3], size, geometry)

    def conv(self, kernel: jax.typing.ArrayLike) -> jax.Array:
        """The convolutions before the pool: kernel [kh, kw, C, K] -> [N, Po, Qo, ph * pw, K], 0 in the pool's padding.

        Raises:
          ValueError: a kernel of another shape.
          TypeError: a kernel of another dtype.
        """
        return self._convolve(kernel)

    def conv_pool(
        self, kernel: jax.typing.ArrayLike, *, pool: str = "max", activation: str | None = "relu"
    ) -> jax.Array:
        """Convolution, activation and pool (Algorithm 4): kernel [kh, kw, C, K] -> [N, Po, Qo, K].

        Args:
          kernel: [kh, kw, C, K], the feature map's dtype.
          pool: "max", or "avg" (padding counts in the mean, as in `jax_sparse_conv.conv_pool`).
          activation: None or "relu", before the pool.

        Raises:
          ValueError: an argument that does not fit.
          TypeError: a kernel of another dtype.
        """
        layers.check_choice("pool", pool, geo.POOL_KINDS)
        layers.check_choice("activation", activation, ops.ACTIVATIONS)
        y = reference.epilogue(self._convolve(kernel), None, None, activation)
        absent = self.counts[..., None] == windows.ABSENT
        if pool == "max":
            return jnp.max(jnp.where(absent, -jnp.inf, y), axis=-2)
        wide = jnp.where(absent, 0, y).astype(jnp.promote_types(self.dtype, jnp.float32))
        return jnp.mean(wide, axis=-2).astype(self.dtype)

    @property
    def _windows(self) -> int:
        conv_size = self.geometry.conv_size(self.size, self.kernel_size)
        inside = windows.pool_places(self.geometry, conv_size, (self.counts.shape[-3], self.counts.shape[-2]))[2]
        return math.prod(self.counts.shape[:-3]) * int(inside.sum())

    @property
    def _window_axes(self) -> int:
        return 3

    def _origins(self) -> tuple[np.ndarray, np.ndarray]:
        conv_size = self.geometry.conv_size(self.size, self.kernel_size)
        rows, columns, _ = windows.pool_places(self.geometry, conv_size, (self.counts.shape[-3], self.counts.shape[-2]))
        return windows.first_pixels(self.geometry, rows, columns)


def _resolve(
    x: jax.typing.ArrayLike,
    kernel_size: int | Sequence[int],
    strides: int | Sequence[int],
    padding: Padding,
    kernel_dilation: int | Sequence[int],
) -> tuple[jax.Array, Pair, Geometry]:
    x = jnp.asarray(x)
    if str(x.dtype) not in _DTYPES:
        raise TypeError(f"x.dtype={x.dtype} is not one of {', '.join(_DTYPES)}")
    size = geo.pair("kernel_size", kernel_size)
    channels = x.shape[3] if x.ndim == 4 else 1  # another rank is the next line's error
    geometry = geo.resolve(
        x.shape, (*size, channels, 1), strides=strides, padding=padding, kernel_dilation=kernel_dilation
    )
    return x, size, geometry
