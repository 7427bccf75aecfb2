"""Layers for `flax.nnx` that skip the zeros of their input, with the parameters and the state tree of Flax's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import jax
from flax import nnx

from jax_sparse_conv._src.api import ops
from jax_sparse_conv._src.api.arguments import (
    Activation,
    ConvImplementation,
    ConvPoolImplementation,
    DenseImplementation,
)
from jax_sparse_conv._src.layers import layer_calls, layers, packed_params
from jax_sparse_conv._src.primitive import packing
from jax_sparse_conv._src.primitive.coo_star import CooStar
from jax_sparse_conv._src.problem.geometry import Padding, PoolKind, positive_int


class SparseConv(nnx.Conv):
    """`nnx.Conv` whose two-dimensional convolutions skip the zeros of their input (`jax_sparse_conv.conv`).

    What `jax_sparse_conv.conv` does not have runs as in `nnx.Conv`. That is other than two dimensions, "CIRCULAR",
    "REFLECT" and "CAUSAL" padding, input dilation, `preferred_element_type`, and a `conv_general_dilated` of your own.

    Args:
      in_features: C.
      out_features: K.
      kernel_size: as in `nnx.Conv`.
      strides: as in `nnx.Conv`.
      activation: None, or "relu" or `jax.nn.relu`, applied in the same operation.
      implementation: "ecr", "coo", "direct", "adaptive", "xla" or None, as in `jax_sparse_conv.conv`.
      **conv_arguments: `nnx.Conv`'s other arguments, `rngs` among them.

    Raises:
      ValueError: an unknown activation or implementation, or a feature_group_count that is not an int of at least 1.
    """

    implementations: ClassVar[tuple[str, ...]] = ops.CONV_IMPLEMENTATIONS
    activation: Activation
    implementation: layers.Implementation

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kernel_size: int | Sequence[int],
        strides: int | Sequence[int] | None = 1,
        *,
        activation: Activation = None,
        implementation: ConvImplementation | None = None,
        **conv_arguments: Any,
    ) -> None:
        layers.check_arguments(activation, implementation, self.implementations)
        positive_int("feature_group_count", conv_arguments.get("feature_group_count", 1))
        super().__init__(in_features, out_features, kernel_size, strides, **conv_arguments)
        self.activation = activation
        self.implementation = implementation

    def __call__(  # type: ignore[override]  # nnx.Conv's second argument is out_sharding; it is understood here too
        self,
        inputs: jax.Array | CooStar,
        residual: Any = None,
        out_sharding: Any = None,
        *,
        nonzeros: Any = None,
        count_nonzeros: bool = False,
    ) -> Any:
        """`activation(conv(inputs) + bias + residual)`.

        Args:
          inputs: [..., H, W, C], with none, one or several leading axes; or a `CooStar` with some.
          residual: [..., Ho, Wo, K] or None, cast to the computation's dtype.
          out_sharding: as in `nnx.Conv`.
          nonzeros: counts of the inputs' non-zeros, as in `jax_sparse_conv.conv`.
          count_nonzeros: whether to return such counts of the result.

        Returns:
          [..., Ho, Wo, K]; with `count_nonzeros` a pair of that and the counts.

        Raises:
          ValueError: a shape that does not fit, or a named implementation that cannot run this layer.
        """
        layers.check_arguments(self.activation, self.implementation, self.implementations)
        if isinstance(residual, (jax.sharding.Sharding, jax.sharding.PartitionSpec)):
            residual, out_sharding = None, residual
        reason, counts = layers.why_dense_conv(self), layers.Counts(nonzeros, count_nonzeros)
        if reason is None:
            y, counted = self._sparse(*promoted(self, inputs, self.mask), residual, counts)
            y = y if out_sharding is None else jax.sharding.reshard(y, out_sharding)
        else:
            layers.require_dense(self.implementation, reason)
            y = super().__call__(layers.dense_map(inputs), out_sharding)
            y = self._after(layers.epilogue(y, residual, self.activation))
            y, counted = layers.counted(y, counts)
        y = layer_calls.recorded(self, inputs, residual, y)
        return (y, counted) if count_nonzeros else y

    _sparse = layers.conv

    def _after(self, y: jax.Array) -> jax.Array:
        return y


class SparseConvPool(SparseConv):
    """Convolution, bias, ReLU and pool in one operation that skips the zeros of its input.

    The parameters are `nnx.Conv`'s; the operation is `jax_sparse_conv.conv_pool`.

    Args:
      in_features: C.
      out_features: K.
      kernel_size: rows and columns of the kernel.
      strides: of the convolution, as in `nnx.Conv`.
      pool: "max" or "avg".
      window_shape: rows and columns of a pooling window.
      window_strides: between pooling windows; None is `window_shape`.
      window_padding: of the pool, as in `jax_sparse_conv.conv_pool`.
      activation: None, or "relu" or `jax.nn.relu`, before the pool.
      implementation: "pecr", "ecr", "coo", "direct", "adaptive", "xla" or None, as in
        `jax_sparse_conv.conv_pool`.
      **conv_arguments: `nnx.Conv`'s other arguments, `rngs` among them.

    Raises:
      ValueError: a kernel that is not two-dimensional, or an unknown activation, implementation or pool.
    """

    implementations: ClassVar[tuple[str, ...]] = ops.CONV_POOL_IMPLEMENTATIONS

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kernel_size: Sequence[int],
        strides: int | Sequence[int] | None = 1,
        *,
        pool: PoolKind = "max",
        window_shape: int | Sequence[int] = (2, 2),
        window_strides: int | Sequence[int] | None = None,
        window_padding: Padding = "VALID",
        activation: Activation = "relu",
        implementation: ConvPoolImplementation | None = None,
        **conv_arguments: Any,
    ) -> None:
        if isinstance(kernel_size, int) or len(kernel_size) != 2:
            raise ValueError(f"kernel_size={kernel_size!r} is not two ints; the pool is two-dimensional")
        layers.check_pool(pool, window_shape, window_strides, window_padding)
        super().__init__(
            in_features,
            out_features,
            kernel_size,
            strides,
            activation=activation,
            implementation=implementation,  # type: ignore[arg-type]  # of this class's own names
            **conv_arguments,
        )
        self.pool = pool
        self.window_shape = window_shape
        self.window_strides = window_strides
        self.window_padding = window_padding

    _sparse = layers.conv_pool
    _after = layers.pooled


class SparseLinear(nnx.Linear):
    """`nnx.Linear` that reads only the kernel rows of non-zero inputs where that pays (`jax_sparse_conv.dense`).

    A `dot_general` of your own, `preferred_element_type` and a call's `out_sharding` run as in `nnx.Linear`.

    Args:
      in_features: C.
      out_features: K.
      activation: None, or "relu" or `jax.nn.relu`, applied in the same operation.
      implementation: "ecr", "xla" or None, as in `jax_sparse_conv.dense`.
      **linear_arguments: `nnx.Linear`'s other arguments, `rngs` among them.

    Raises:
      ValueError: an unknown activation or implementation.
    """

    implementations: ClassVar[tuple[str, ...]] = ops.DENSE_IMPLEMENTATIONS
    activation: Activation
    implementation: layers.Implementation

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        activation: Activation = None,
        implementation: DenseImplementation | None = None,
        **linear_arguments: Any,
    ) -> None:
        layers.check_arguments(activation, implementation, self.implementations)
        super().__init__(in_features, out_features, **linear_arguments)
        self.activation = activation
        self.implementation = implementation

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """`activation(inputs @ kernel + bias)`: inputs [..., C] -> [..., K].

        Raises:
          ValueError: a shape that does not fit, or a named implementation that cannot run this layer.
        """
        layers.check_arguments(self.activation, self.implementation, self.implementations)
        reason = layers.why_dense_product(self)
        if out_sharding is not None:
            reason = f"out_sharding={out_sharding!r} is set"
        if reason is None:
            x, kernel, bias = promoted(self, inputs)
            y = layers.dense(self, x, kernel, bias)
        else:
            layers.require_dense(self.implementation, reason)
            y = layers.epilogue(super().__call__(inputs, out_sharding), None, self.activation)
        return layer_calls.recorded(self, inputs, None, y)


def promoted(layer: Any, inputs: Any, mask: Any = None) -> tuple[Any, layers.Kernel, jax.Array | None]:
    """Inputs, kernel and bias in the computation's dtype; a packed kernel stays one where nothing changes it."""
    given = packed_params.kernel_of(layer)
    plain = packing.plain(given)
    bias = None if layer.bias is None else layer.bias[...]
    given_arrays = (layers.array_of(inputs), layers.masked(plain, mask), bias)
    array, kernel, bias = layer.promote_dtype(given_arrays, dtype=layer.dtype)
    return layers.with_array(inputs, array), packing.beside(kernel, plain, given), bias
