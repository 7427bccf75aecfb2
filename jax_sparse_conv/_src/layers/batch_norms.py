"""`nnx.BatchNorm` in training with what follows it, of this package's operations where these are faster."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from jax_sparse_conv._src.primitive import channels, joined


def normalized(
    norm: nnx.BatchNorm,
    x: jax.Array,
    residual: jax.Array | None = None,
    *,
    relu: bool = False,
    is_xlas: bool = False,
) -> jax.Array:
    """relu(norm(x) + residual) in x's dtype, [..., C]; in training the stored statistics move on, as in Flax.

    With `is_xlas`, of XLA's operations.
    """
    if is_xlas or not _is_taken(norm, x, residual):
        y = norm(x).astype(x.dtype)
        y = y if residual is None else y + residual
        return jax.nn.relu(y) if relu else y
    x, mean, variance = _moments(x)
    return channels.affine(x, mean, *_scale_and_shift(norm, mean, variance), residual, relu=relu)


@dataclasses.dataclass
class DenseMap:
    """The map of a dense block in training: maps side by side, with the statistics of each channel, computed once.

    Attributes:
      maps: [..., C1], [..., C2], ...
      mean, variance: of all channels, [C1 + C2 + ...].
    """

    maps: Sequence[jax.Array]
    mean: jax.Array
    variance: jax.Array

    @classmethod
    def of(cls, x: jax.Array) -> DenseMap:
        """x [..., C] alone."""
        x, mean, variance = _moments(x)
        return cls([x], mean, variance)

    def append(self, x: jax.Array) -> None:
        """Channels of x [..., C] behind those that are there."""
        x, mean, variance = _moments(x)
        self.maps = [*self.maps, x]
        self.mean, self.variance = (jnp.concatenate(each) for each in ((self.mean, mean), (self.variance, variance)))

    def normalized(self, norm: nnx.BatchNorm) -> jax.Array:
        """relu(norm(the maps side by side)), [..., C1 + C2 + ...]. Others may read the maps, too."""
        scale, shift = _scale_and_shift(norm, self.mean, self.variance)
        self.maps, y = joined.joined(self.maps, self.mean, scale, shift, relu=True, gives_back=True)
        return y

    def last_normalized(self, norm: nnx.BatchNorm, *, averages: bool = False) -> jax.Array:
        """The same where nothing else reads the maps; or its averages of 2x2 pixels, for even H and W."""
        pixels = 4 if averages else 1
        scale, shift = (row / pixels for row in _scale_and_shift(norm, self.mean, self.variance))
        return joined.joined(self.maps, self.mean, scale, shift, relu=True, sums=averages)[1]


def takes_dense_map(norm: nnx.BatchNorm, x: jax.Array) -> bool:
    """Whether the batch norm of a map with x's pixels and dtype can be that of a `DenseMap`."""
    return _is_taken(norm, x, None)


def _moments(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """x, for everything else that reads it, and mean and variance of its channels."""
    x, total, _, spread = channels.sums(x)
    pixels = math.prod(x.shape[:-1])
    return x, total / pixels, spread / pixels


def _scale_and_shift(norm: nnx.BatchNorm, mean: jax.Array, variance: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of the map around its mean. The stored statistics move on."""
    for stored, new in ((norm.mean, mean), (norm.var, variance)):
        stored[...] = jax.lax.stop_gradient(norm.momentum * stored[...] + (1 - norm.momentum) * new)
    scale = jax.lax.rsqrt(variance + norm.epsilon) * (1 if norm.scale is None else norm.scale[...])
    return scale, jnp.zeros_like(scale) if norm.bias is None else norm.bias[...]


def _is_taken(norm: nnx.BatchNorm, x: jax.Array, residual: jax.Array | None) -> bool:
    """Whether the operations compute what the layer does, and faster."""
    if type(norm) is not nnx.BatchNorm or norm.use_running_average or norm.axis_name is not None:
        return False
    if norm.axis not in (-1, x.ndim - 1) or norm.dtype not in (None, x.dtype):
        return False
    if residual is not None and (residual.shape, residual.dtype) != (x.shape, x.dtype):
        return False
    return channels.takes(x)
