"""Compressed feature maps: `ECR` (one list per convolution window) and `PECR` (those lists grouped by pooling window).

Xu et al. 2023, sections 5 and 6, for any number of channels and images, any stride, padding, dilation and pool. The
`"ecr"` and `"pecr"` kernels build these lists on the fly and never store them. Here they are arrays, to look at, to
count, and to multiply by the kernel as the papers define it.

    window (3 x 3, one channel)      values     indices    count
      0  0 15
     22  0  0                        15 22 8    2 3 7      3          index = (i * kw + j) * C + c
      0  8  0
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np

from jax_sparse_conv._src.api import ops
from jax_sparse_conv._src.formats import windows
from jax_sparse_conv._src.formats.compressed import Compressed, exportable
from jax_sparse_conv._src.layers import layers
from jax_sparse_conv._src.primitive import reference
from jax_sparse_conv._src.primitive.reference import ActivationName
from jax_sparse_conv._src.problem import geometry as geo
from jax_sparse_conv._src.problem.arrays import as_array
from jax_sparse_conv._src.problem.geometry import Geometry, Padding, Pair

_DTYPES = ("float32", "bfloat16", "float16", "float64")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ECR(Compressed):
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
          nse: slots per window; None is the worst case, kh * kw * C. A window with more non-zeros raises outside of
            `jax.jit`. Inside, its values and its convolution are NaN, and its count is the true one. `todense` gives
            NaN for that image.

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
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class PECR(Compressed):
    """Pooling-pack Extended and Compressed Row format (Xu et al. 2023, section 6.2) of a feature map [N, H, W, C].

    The lists of `ECR`, once for each pooling window [ph, pw] that the convolution's result falls into. Attributes are
    as in `ECR`. `values` and `indices` are [N, Po, Qo, ph * pw, capacity], `counts` is [N, Po, Qo, ph * pw]. A count is
    -2 where the pooling window reaches into the pool's padding.

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
        self, kernel: jax.typing.ArrayLike, *, pool: geo.PoolKind = "max", activation: ActivationName | None = "relu"
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
    x = as_array("x", x)
    if str(x.dtype) not in _DTYPES:
        raise TypeError(f"x.dtype={x.dtype} is not one of {', '.join(_DTYPES)}")
    size = geo.pair("kernel_size", kernel_size)
    channels = x.shape[3] if x.ndim == 4 else 1  # another rank is the next line's error
    geometry = geo.resolve(
        x.shape, (*size, channels, 1), strides=strides, padding=padding, kernel_dilation=kernel_dilation
    )
    return x, size, geometry


exportable(ECR)
exportable(PECR)
