"""Layers for `flax.linen` that skip the zeros of their input.

`SparseConv`, `SparseConvPool` and `SparseDense` have the fields and the parameters of `nn.Conv` and `nn.Dense`: their
variables are interchangeable. A parameter "kernel" may be what `jax_sparse_conv.pack` made of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, TypeAlias

import jax
import jax.numpy as jnp
from flax import linen as nn

from jax_sparse_conv._src.api import ops
from jax_sparse_conv._src.layers import layer_calls, layers
from jax_sparse_conv._src.primitive import packing
from jax_sparse_conv._src.problem.geometry import Padding

__all__ = ["SparseConv", "SparseConvPool", "SparseDense"]

Promoted: TypeAlias = tuple[jax.Array, layers.Kernel, jax.Array | None]


class SparseConv(nn.Conv):
    """`nn.Conv` whose two-dimensional convolutions skip the zeros of their input (`jax_sparse_conv.conv`).

    What `jax_sparse_conv.conv` does not have runs as in `nn.Conv`. That is other than two dimensions, "CIRCULAR",
    "REFLECT" and "CAUSAL" padding, input dilation, and a `conv_general_dilated` of your own.

    Attributes:
      activation: None or "relu", applied in the same operation.
      implementation: "ecr", "coo", "direct", "adaptive", "xla" or None, as in `jax_sparse_conv.conv`.

    Raises:
      ValueError: an unknown activation or implementation.
    """

    activation: str | None = None
    implementation: layers.Implementation = None

    implementations: ClassVar[tuple[str, ...]] = ops.CONV_IMPLEMENTATIONS

    def __post_init__(self) -> None:
        layers.check_arguments(self.activation, self.implementation, self.implementations)
        super().__post_init__()

    @nn.compact
    def __call__(
        self, inputs: jax.Array, residual: Any = None, *, nonzeros: Any = None, count_nonzeros: bool = False
    ) -> Any:
        """`activation(conv(inputs) + bias + residual)`.

        Args:
          inputs: [..., H, W, C], with none, one or several leading axes.
          residual: [..., Ho, Wo, K] or None, cast to the computation's dtype.
          nonzeros: counts of the inputs' non-zeros, as in `jax_sparse_conv.conv`.
          count_nonzeros: whether to return such counts of the result.

        Returns:
          [..., Ho, Wo, K], pooled by `SparseConvPool`; with `count_nonzeros` a pair of that and the counts.

        Raises:
          ValueError: a shape that does not fit, or a named implementation that cannot run this layer.
        """
        reason, counts = layers.why_dense_conv(self), layers.Counts(nonzeros, count_nonzeros)
        if reason is None:
            y, counted = self._sparse(*self._promoted(inputs), residual, counts)
        else:
            layers.require_dense(self.implementation, reason)
            y = self._after(layers.epilogue(super().__call__(inputs), residual, self.activation))
            y, counted = layers.counted(y, counts)
        y = layer_calls.recorded(self, inputs, residual, y)
        return (y, counted) if count_nonzeros else y

    def _promoted(self, inputs: Any) -> Promoted:
        channels = jnp.shape(inputs)[-1]
        if channels % self.feature_group_count:
            raise ValueError(
                f"feature_group_count={self.feature_group_count} does not divide the C={channels} input channels of "
                f"inputs.shape={jnp.shape(inputs)}"
            )
        shape = (*self.kernel_size, channels // self.feature_group_count, self.features)  # type: ignore[misc]
        kernel = self.param("kernel", self.kernel_init, shape, self.param_dtype)
        bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype) if self.use_bias else None
        return _promoted(self, inputs, kernel, bias, self.mask)

    _sparse = layers.conv

    def _after(self, y: jax.Array) -> jax.Array:
        return y


class SparseConvPool(SparseConv):
    """Convolution, bias, ReLU and pool in one operation that skips the zeros of its input.

    The parameters are `nn.Conv`'s; the operation is `jax_sparse_conv.conv_pool`.

    Attributes:
      activation: "relu" or None, before the pool.
      implementation: "pecr", "ecr", "coo", "direct", "adaptive", "xla" or None, as in
        `jax_sparse_conv.conv_pool`.
      pool: "max" or "avg".
      window_shape: rows and columns of a pooling window.
      window_strides: between pooling windows; None is `window_shape`.
      window_padding: of the pool, as in `jax_sparse_conv.conv_pool`.

    Raises:
      ValueError: a kernel that is not two-dimensional, or an unknown activation, implementation or pool.
    """

    activation: str | None = "relu"
    pool: str = "max"
    window_shape: int | Sequence[int] = (2, 2)
    window_strides: int | Sequence[int] | None = None
    window_padding: Padding = "VALID"

    implementations: ClassVar[tuple[str, ...]] = ops.CONV_POOL_IMPLEMENTATIONS

    def __post_init__(self) -> None:
        if isinstance(self.kernel_size, int) or len(self.kernel_size) != 2:
            raise ValueError(f"kernel_size={self.kernel_size!r} is not two ints; the pool is two-dimensional")
        layers.check_pool(self.pool, self.window_shape, self.window_strides, self.window_padding)
        super().__post_init__()

    _sparse = layers.conv_pool
    _after = layers.pooled


class SparseDense(nn.Dense):
    """`nn.Dense` that reads only the kernel rows of non-zero inputs where that pays (`jax_sparse_conv.dense`).

    A `dot_general` of your own runs as in `nn.Dense`.

    Attributes:
      activation: None or "relu", applied in the same operation.
      implementation: "ecr", "xla" or None, as in `jax_sparse_conv.dense`.

    Raises:
      ValueError: an unknown activation or implementation.
    """

    activation: str | None = None
    implementation: layers.Implementation = None

    implementations: ClassVar[tuple[str, ...]] = ops.DENSE_IMPLEMENTATIONS

    def __post_init__(self) -> None:
        layers.check_arguments(self.activation, self.implementation, self.implementations)
        super().__post_init__()

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """`activation(inputs @ kernel + bias)`: inputs [..., C] -> [..., K].

        Raises:
          ValueError: a shape that does not fit, or a named implementation that cannot run this layer.
        """
        reason = layers.why_dense_product(self)
        if reason is None:
            x, kernel, bias = self._promoted(inputs)
            y = layers.dense(self, x, kernel, bias)
        else:
            layers.require_dense(self.implementation, reason)
            y = layers.epilogue(super().__call__(inputs), None, self.activation)
        return layer_calls.recorded(self, inputs, None, y)

    def _promoted(self, inputs: Any) -> Promoted:
        kernel = self.param("kernel", self.kernel_init, (jnp.shape(inputs)[-1], self.features), self.param_dtype)
        bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype) if self.use_bias else None
        return _promoted(self, inputs, kernel, bias)


def _promoted(layer: Any, inputs: Any, kernel: Any, bias: Any, mask: Any = None) -> Promoted:
    """Inputs, kernel and bias in the computation's dtype; a packed kernel stays one where nothing changes it."""
    plain = packing.plain(kernel)
    inputs, promoted, bias = layer.promote_dtype(inputs, layers.masked(plain, mask), bias, dtype=layer.dtype)
    return inputs, packing.beside(promoted, plain, kernel), bias
