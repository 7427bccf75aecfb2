"""What the networks are made of: a convolution with all that follows it, and what may stand before it.

A `ConvUnit` is `conv -> (batch norm) -> (+ residual) -> (ReLU) -> (pool)`. Without batch norm, or once it is folded,
that is one operation of this package. With batch norm in between it is several, with the same result.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple, Required, TypeAlias, TypedDict, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jax_sparse_conv._src.api.arguments import (
    ConvImplementation,
    ConvPoolImplementation,
    DenseImplementation,
    check_positive,
)
from jax_sparse_conv._src.layers import batch_norms, layers
from jax_sparse_conv._src.layers.packed_params import PackedParam
from jax_sparse_conv._src.primitive import reference
from jax_sparse_conv._src.primitive.reference import ActivationName
from jax_sparse_conv._src.problem.geometry import PoolKind
from jax_sparse_conv.models.initializers import he_normal
from jax_sparse_conv.nnx import SparseConv, SparseConvPool, SparseLinear, folding
from jax_sparse_conv.nnx.layers import promoted

TORCH_EPSILON = 1e-5


class Shared(TypedDict, total=False):
    """Arguments that every network takes and passes on to every layer.

    Keys:
      implementation: None, "xla", "ecr", "coo", "direct", "adaptive", or "pecr" (PECR where a pool follows, ECR
        elsewhere).
      dtype: of the computation, None for what x and the parameters promote to.
      param_dtype: of the parameters.
      precision: as in lax.
      rngs: a stream `params` for the initial values.
    """

    implementation: ConvPoolImplementation | None
    dtype: Any
    param_dtype: Any
    precision: lax.PrecisionLike
    rngs: Required[nnx.Rngs]


class Pool(NamedTuple):
    """A square pool: (low, high) padding on both axes; (0, strides - 1) is what torch calls `ceil_mode`."""

    window: int
    strides: int
    padding: tuple[int, int] = (0, 0)
    kind: PoolKind = "max"


class ConvUnit(nnx.Module):
    """A convolution with its batch norm, residual, ReLU and pool.

    Args:
      in_features: C of x [N, H, W, C].
      out_features: K of the result [N, Ho, Wo, K].
      kernel_size: rows and columns of the square kernel.
      strides: rows and columns between windows.
      padding: zeros on every side of x, as torch pads (Flax's "SAME" is asymmetric under a stride of 2).
      groups: of channels convolved separately.
      use_bias: whether the convolution itself has a bias.
      batch_norm: whether a batch norm (inference: stored statistics) follows the convolution.
      epsilon: of the batch norm.
      relu: whether a ReLU follows.
      pool: None, or the pool that follows.
      **shared: see `Shared`; the implementation "pecr" means "ecr" where no pool follows.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kernel_size: int,
        strides: int = 1,
        padding: int = 0,
        *,
        groups: int = 1,
        use_bias: bool = False,
        batch_norm: bool = True,
        epsilon: float = TORCH_EPSILON,
        relu: bool = True,
        pool: Pool | None = None,
        **shared: Unpack[Shared],
    ) -> None:
        implementation = shared.pop("implementation", None)
        arguments: dict[str, Any] = {
            "in_features": in_features,
            "out_features": out_features,
            "kernel_size": (kernel_size, kernel_size),
            "strides": (strides, strides),
            "padding": ((padding, padding), (padding, padding)),
            "feature_group_count": groups,
            "use_bias": use_bias,
            "activation": "relu" if relu else None,
            "kernel_init": he_normal,
            **shared,
        }
        self.conv: SparseConv
        if pool is None:
            self.conv = SparseConv(implementation=without_pool(implementation), **arguments)
        else:
            self.conv = SparseConvPool(
                pool=pool.kind,
                window_shape=(pool.window, pool.window),
                window_strides=(pool.strides, pool.strides),
                window_padding=(pool.padding, pool.padding),
                implementation=implementation,
                **arguments,
            )
        self.folded = False
        self.batch_norm: nnx.BatchNorm | None = nnx.data(None)
        if batch_norm:
            self.batch_norm = _batch_norm(out_features, epsilon, shared)

    def __call__(
        self,
        x: jax.Array,
        residual: jax.Array | None = None,
        *,
        nonzeros: jax.Array | None = None,
        count_nonzeros: bool = False,
    ) -> Any:
        """x [N, H, W, C] and residual [N, Ho, Wo, K] (only without a pool) -> [N, Po, Qo, K].

        Counts as in `jax_sparse_conv.conv`, where the unit `is_adaptive`.
        """
        if self.batch_norm is not None:
            return self.pooled(self._normalized(self.convolved(x), residual, relu=self.conv.activation is not None))
        return self.conv(x, residual, nonzeros=nonzeros, count_nonzeros=count_nonzeros)

    @property
    def is_adaptive(self) -> bool:
        """Whether the unit is one operation that goes by the density of its input."""
        return self.batch_norm is None and self.conv.implementation == "adaptive"

    def convolved(self, x: jax.Array) -> jax.Array:
        """The convolution and its bias alone, what a batch norm sees: x [N, H, W, C] -> [N, Ho, Wo, K]."""
        return layers.bare_conv(self.conv, *promoted(self.conv, x, self.conv.mask))

    def preactivation(self, x: jax.Array, residual: jax.Array | None = None) -> jax.Array:
        """Everything before the ReLU: x [N, H, W, C] -> [N, Ho, Wo, K]."""
        y = self.convolved(x)
        if self.batch_norm is not None:
            return self._normalized(y, residual, relu=False)
        return y if residual is None else y + residual

    def _normalized(self, y: jax.Array, residual: jax.Array | None, *, relu: bool) -> jax.Array:
        assert self.batch_norm is not None
        is_xlas = self.conv.implementation == "xla"
        return batch_norms.normalized(self.batch_norm, y, residual, relu=relu, is_xlas=is_xlas)

    def pooled(self, y: jax.Array) -> jax.Array:
        """The pool, where the layer has one: [N, Ho, Wo, K] -> [N, Po, Qo, K]."""
        return layers.pooled(self.conv, y) if isinstance(self.conv, SparseConvPool) else y

    def fold_batch_norm(self) -> bool:
        """Fold the batch norm into the convolution's kernel and bias; False where there is none."""
        norm, conv = self.batch_norm, self.conv
        if norm is None:
            return False
        kernel, bias = folding.folded(
            conv.kernel[...], None if conv.bias is None else conv.bias[...], *folding.scale_and_shift(norm)
        )
        kind: Any = nnx.Param if isinstance(conv.kernel, PackedParam) else type(conv.kernel)
        conv.kernel = kind.from_metadata(kernel, conv.kernel.get_metadata())
        conv.bias = nnx.Param(bias)
        conv.use_bias = True
        self.batch_norm, self.folded = nnx.data(None), True
        return True


class PreActivation(nnx.Module):
    """Batch norm and ReLU in front of a convolution, on a map that other layers see without them (DenseNet).

    Such a batch norm cannot be folded into what made the map; `fold_batch_norm` leaves a scale and a shift a channel.

    Args:
      features: C of x [N, H, W, C].
      epsilon: of the batch norm.
      **shared: see `Shared`.
    """

    def __init__(self, features: int, epsilon: float = TORCH_EPSILON, **shared: Unpack[Shared]) -> None:
        self.folded = False
        self.batch_norm: nnx.BatchNorm | None = _batch_norm(features, epsilon, shared)
        self.scale: nnx.Param[jax.Array] | None = nnx.data(None)
        self.bias: nnx.Param[jax.Array] | None = nnx.data(None)
        self.dtype = shared.get("dtype")
        self.implementation = shared.get("implementation")

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [N, H, W, C] -> [N, H, W, C] with exact zeros."""
        return self._activated(x, relu=True)

    def preactivation(self, x: jax.Array) -> jax.Array:
        """Everything before the ReLU."""
        return self._activated(x, relu=False)

    @property
    def in_training(self) -> nnx.BatchNorm:
        """The batch norm, which has not been folded."""
        assert self.batch_norm is not None
        return self.batch_norm

    def _activated(self, x: jax.Array, *, relu: bool) -> jax.Array:
        if self.batch_norm is not None:
            y = x if self.dtype is None else x.astype(self.dtype)
            return batch_norms.normalized(self.batch_norm, y, relu=relu, is_xlas=self.implementation == "xla")
        y = self._scaled(x)
        return jax.nn.relu(y) if relu else y

    def _scaled(self, x: jax.Array) -> jax.Array:
        assert self.scale is not None
        assert self.bias is not None
        scale, shift = (reference.for_channels_of(x, each[...].astype(x.dtype)) for each in (self.scale, self.bias))
        return x * scale + shift

    def fold_batch_norm(self) -> bool:
        """Replace the batch norm by its scale and shift; False where that is done."""
        norm = self.batch_norm
        if norm is None:
            return False
        scale, shift = folding.scale_and_shift(norm)
        dtype = norm.scale[...].dtype  # type: ignore[index]
        self.scale, self.bias = nnx.Param(scale.astype(dtype)), nnx.Param(shift.astype(dtype))
        self.batch_norm, self.folded = nnx.data(None), True
        return True


def takes_dense_map(norm: PreActivation, x: jax.Array) -> bool:
    """Whether its batch norm can be that of a `DenseMap` that has x [N, H, W, C] among its maps.

    As a method `nnx.tabulate` would compile it.
    """
    if type(norm) is not PreActivation or norm.batch_norm is None:  # a class of its own may do something else
        return False
    if norm.implementation == "xla" or norm.dtype not in (None, x.dtype):
        return False
    return batch_norms.takes_dense_map(norm.batch_norm, x)


Layer: TypeAlias = ConvUnit | PreActivation | SparseLinear


def fully_connected(in_features: int, out_features: int, *, relu: bool, **shared: Unpack[Shared]) -> SparseLinear:
    """A fully connected layer [N, C] -> [N, K], with a ReLU or without: a network's last one, which gives its logits.

    Raises:
      ValueError: a K that is no int of at least 1.
    """
    check_positive("out_features" if relu else "num_classes", out_features)
    implementation = dense_implementation(shared.pop("implementation", None))
    arguments: dict[str, Any] = {"kernel_init": he_normal, **shared}
    activation: ActivationName | None = "relu" if relu else None
    return SparseLinear(in_features, out_features, activation=activation, implementation=implementation, **arguments)


def dense_implementation(implementation: ConvPoolImplementation | None) -> DenseImplementation | None:
    """The implementation of dense layers in a network that has this one: the same where they have it, else None."""
    elsewhere = without_pool(implementation)
    return elsewhere if elsewhere == "xla" or elsewhere == "ecr" else None


def result_size(unit: ConvUnit, size: int) -> int:
    """Rows of a unit's result for rows of x; 0 where a window does not fit."""
    conv = unit.conv
    padding: Any = conv.padding
    strides: Any = conv.strides
    size = _windows(size + sum(padding[0]), conv.kernel_size[0], strides[0])
    if isinstance(conv, SparseConvPool):
        window, padding = conv.window_shape, conv.window_padding
        strides = conv.window_strides
        size = size and _windows(size + sum(padding[0]), window[0], strides[0])  # type: ignore[index]
    return size


def smallest_size(path: Sequence[ConvUnit]) -> int:
    """Fewest rows and columns that leave something after every unit of a path through a network."""

    def fits(size: int) -> bool:
        for unit in path:
            size = size and result_size(unit, size)
        return size > 0

    return next(filter(fits, itertools.count(1)))


def without_pool(implementation: ConvPoolImplementation | None) -> ConvImplementation | None:
    """The implementation of a layer without a pool in a network that has this one."""
    return "ecr" if implementation == "pecr" else implementation


def _batch_norm(features: int, epsilon: float, shared: Shared) -> nnx.BatchNorm:
    return nnx.BatchNorm(
        features,
        use_running_average=True,
        epsilon=epsilon,
        dtype=shared.get("dtype"),
        param_dtype=shared.get("param_dtype", jnp.float32),
        rngs=shared["rngs"],
    )


def _windows(size: int, window: int, strides: int) -> int:
    return max(0, (size - window) // strides + 1)
