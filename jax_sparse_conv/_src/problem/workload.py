"""A workload: one call as the table and the models see it, by its sizes, dtype and precision."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from jax_sparse_conv._src.problem.geometry import Geometry

_IMAGE_CHANNELS = 3  # a map of so few channels is an image: no ReLU has been there


@dataclasses.dataclass(frozen=True)
class Workload:
    """One call without its arrays, as what chooses its implementation sees it.

    Attributes:
      method: the native target, "dense" for a matrix product.
      x_shape: [N, H, W, C].
      kernel_shape: [S, kh, kw, C / groups, K].
      geometry: of the call.
      dtype: of every operand.
      exact: whether float32 must be float32 in the dense convolution.
      residual: whether there is one.
    """

    method: str
    x_shape: tuple[int, ...]
    kernel_shape: tuple[int, ...]
    geometry: Geometry
    dtype: str
    exact: bool
    residual: bool = False

    def unpooled(self) -> Workload:
        """The convolution alone; the same object where there is no pool."""
        if self.geometry.pool is None:
            return self
        return dataclasses.replace(self, method="ecr", geometry=self.geometry.without_pool())

    @property
    def pixels(self) -> int:
        """Results of the convolution, over all images."""
        return self.x_shape[0] * math.prod(self.geometry.conv_size(self.x_shape[1:3], self.kernel_shape[1:3]))

    @property
    def products(self) -> int:
        """Multiplications of one result of the dense convolution."""
        return math.prod(self.kernel_shape[1:4])

    @property
    def flops(self) -> float:
        """Operations of the dense convolution."""
        return 2.0 * self.pixels * self.products * self.kernel_shape[4]

    @property
    def elements(self) -> int:
        """Elements of the kernel and of all maps that the convolution reads and writes, each counted once."""
        results = self.pixels * self.kernel_shape[4]
        return math.prod(self.x_shape) + math.prod(self.kernel_shape) + results * (2 if self.residual else 1)

    @property
    def is_image(self) -> bool:
        """Whether x has so few channels that no ReLU has been there."""
        return self.kernel_shape[1] * self.kernel_shape[2] > 1 and self.x_shape[3] <= _IMAGE_CHANNELS

    @property
    def is_symbolic(self) -> bool:
        """Whether sizes are unknown, as in `jax.export` for any number of images."""
        return any(map(jax.export.is_symbolic_dim, (*self.x_shape, *self.kernel_shape)))

    @property
    def is_precise(self) -> bool:
        """Whether float32 is to be multiplied as float32."""
        return self.exact and self.dtype == "float32"

    @property
    def itemsize(self) -> int:
        return int(jnp.dtype(self.dtype).itemsize)
