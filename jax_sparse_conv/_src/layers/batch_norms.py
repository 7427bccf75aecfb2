"""`nnx.BatchNorm` in training with the residual and the ReLU behind it, as one operation where that is faster."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jax_sparse_conv._src.primitive import batch_norm


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
    scale = jnp.ones_like(norm.mean[...]) if norm.scale is None else norm.scale[...]
    bias = jnp.zeros_like(norm.mean[...]) if norm.bias is None else norm.bias[...]
    y, mean, variance = batch_norm.batch_norm(x, scale, bias, residual, epsilon=norm.epsilon, relu=relu)
    for stored, new in ((norm.mean, mean), (norm.var, variance)):
        stored[...] = jax.lax.stop_gradient(norm.momentum * stored[...] + (1 - norm.momentum) * new)
    return y


def _is_taken(norm: nnx.BatchNorm, x: jax.Array, residual: jax.Array | None) -> bool:
    """Whether the operation computes what the layer does, and faster."""
    if type(norm) is not nnx.BatchNorm or norm.use_running_average or norm.axis_name is not None:
        return False
    if norm.axis not in (-1, x.ndim - 1) or norm.dtype not in (None, x.dtype):
        return False
    if residual is not None and (residual.shape, residual.dtype) != (x.shape, x.dtype):
        return False
    return batch_norm.takes(x)
