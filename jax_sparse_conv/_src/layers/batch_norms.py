"""`nnx.BatchNorm` in training with what follows it, of this package's operations where these are faster."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx

from jax_sparse_conv._src.primitive import channels


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
    x, total, _, spread = channels.sums(x)
    pixels = math.prod(x.shape[:-1])
    mean, variance = total / pixels, spread / pixels
    for stored, new in ((norm.mean, mean), (norm.var, variance)):
        stored[...] = jax.lax.stop_gradient(norm.momentum * stored[...] + (1 - norm.momentum) * new)
    scale = jax.lax.rsqrt(variance + norm.epsilon) * (1 if norm.scale is None else norm.scale[...])
    shift = jnp.zeros_like(scale) if norm.bias is None else norm.bias[...]
    return channels.affine(x, mean, scale, shift, residual, relu=relu)


def _is_taken(norm: nnx.BatchNorm, x: jax.Array, residual: jax.Array | None) -> bool:
    """Whether the operations compute what the layer does, and faster."""
    if type(norm) is not nnx.BatchNorm or norm.use_running_average or norm.axis_name is not None:
        return False
    if norm.axis not in (-1, x.ndim - 1) or norm.dtype not in (None, x.dtype):
        return False
    if residual is not None and (residual.shape, residual.dtype) != (x.shape, x.dtype):
        return False
    return channels.takes(x)
