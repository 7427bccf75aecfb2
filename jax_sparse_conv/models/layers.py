"""What the networks are made of: a convolution with all that follows it, and a base class that names its layers.

A `ConvUnit` is `conv -> (batch norm) -> (+ residual) -> (ReLU) -> (pool)`. Without batch norm, or once it is folded,
that is one operation of this package; with batch norm in between it is several, with the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jax_sparse_conv import layers, ops
from jax_sparse_conv import nnx as sparse_nnx
from jax_sparse_conv.models.initializers import he_normal
from jax_sparse_conv.nnx import SparseConv, SparseConvPool, SparseLinear

TORCH_EPSILON = 1e-5


class ConvUnit(nnx.Module):
    """A convolution with its batch norm, residual, ReLU and pool.

    Args:
      in_features: C of x [N, H, W, C].
      out_features: K of the result [N, Ho, Wo, K].
      kernel_size: rows and columns of the square kernel.
      strides: rows and columns between windows.
      padding: zeros on every side of x, as torch pads (Flax's "SAME" is asymmetric under a stride of 2).
      use_bias: whether the convolution itself has a bias.
      batch_norm: whether a batch norm (inference: stored statistics) follows the convolution.
      relu: whether a ReLU follows.
      pool: None, or (window, strides, padding) of the max pool that follows.
      implementation: of the convolution; "pecr" means "ecr" where no pool follows.
      dtype: of the computation, None for what x and the parameters promote to.
      param_dtype: of the parameters.
      precision: as in lax.
      rngs: a stream `params` for the initial values.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kernel_size: int,
        strides: int = 1,
        padding: int = 0,
        *,
        use_bias: bool,
        batch_norm: bool,
        relu: bool = True,
        pool: tuple[int, int, int] | None = None,
        implementation: str | None = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        precision: lax.PrecisionLike = None,
        rngs: nnx.Rngs,
    ) -> None:
        shared: dict[str, Any] = {
            "strides": (strides, strides),
            "padding": ((padding, padding), (padding, padding)),
            "use_bias": use_bias,
            "activation": "relu" if relu else None,
            "dtype": dtype,
            "param_dtype": param_dtype,
            "precision": precision,
            "kernel_init": he_normal,
            "rngs": rngs,
        }
        size = (kernel_size, kernel_size)
        self.conv: SparseConv
        if pool is None:
            self.conv = SparseConv(
                in_features, out_features, size, implementation=_without_pool(implementation), **shared
            )
        else:
            window, window_strides, window_padding = pool
            self.conv = SparseConvPool(
                in_features,
                out_features,
                size,
                pool="max",
                window_shape=(window, window),
                window_strides=(window_strides, window_strides),
                window_padding=((window_padding, window_padding), (window_padding, window_padding)),
                implementation=implementation,
                **shared,
            )
        self.batch_norm: nnx.BatchNorm | None = nnx.data(None)
        if batch_norm:
            self.batch_norm = nnx.BatchNorm(
                out_features,
                use_running_average=True,
                epsilon=TORCH_EPSILON,
                dtype=dtype,
                param_dtype=param_dtype,
                rngs=rngs,
            )

    def __call__(self, x: jax.Array, residual: jax.Array | None = None) -> jax.Array:
        """x [N, H, W, C] and residual [N, Ho, Wo, K] (only without a pool) -> [N, Po, Qo, K]."""
        if self.batch_norm is not None:
            return self.pooled(self.activated(self.preactivation(x, residual)))
        out: jax.Array = self.conv(x) if residual is None else self.conv(x, residual)
        return out

    def convolved(self, x: jax.Array) -> jax.Array:
        """The convolution and its bias alone, what a batch norm sees: x [N, H, W, C] -> [N, Ho, Wo, K]."""
        conv = self.conv
        bias = None if conv.bias is None else conv.bias[...]
        return layers.bare_conv(conv, *conv.promote_dtype((x, conv.kernel[...], bias), dtype=conv.dtype))

    def preactivation(self, x: jax.Array, residual: jax.Array | None = None) -> jax.Array:
        """Everything before the ReLU: x [N, H, W, C] -> [N, Ho, Wo, K]."""
        y = self.convolved(x)
        if self.batch_norm is not None:
            y = self.batch_norm(y).astype(y.dtype)
        return y if residual is None else y + residual

    def activated(self, y: jax.Array) -> jax.Array:
        """The ReLU, where the layer has one."""
        return jax.nn.relu(y) if self.conv.activation == "relu" else y

    def pooled(self, y: jax.Array) -> jax.Array:
        """The pool, where the layer has one: [N, Ho, Wo, K] -> [N, Po, Qo, K]."""
        return layers.pooled(self.conv, y) if isinstance(self.conv, SparseConvPool) else y

    def fold_batch_norm(self) -> bool:
        """Fold the batch norm into the convolution's kernel and bias; False where there is none."""
        norm, conv = self.batch_norm, self.conv
        if norm is None:
            return False
        dtype = conv.kernel[...].dtype
        gamma, beta = (jnp.asarray(value, jnp.float32) for value in (norm.scale, norm.bias))
        scale = gamma / jnp.sqrt(norm.var[...] + norm.epsilon)
        conv_bias = 0.0 if conv.bias is None else conv.bias[...].astype(jnp.float32)
        bias = beta + (conv_bias - norm.mean[...]) * scale
        conv.kernel = nnx.Param((conv.kernel[...].astype(jnp.float32) * scale).astype(dtype))
        conv.bias = nnx.Param(bias.astype(dtype))
        conv.use_bias = True
        self.batch_norm = nnx.data(None)
        return True


Layer: TypeAlias = ConvUnit | SparseLinear
# Called before every layer with its name, the layer, its input and its residual.
BeforeLayer: TypeAlias = Callable[[str, Layer, jax.Array, jax.Array | None], None]


class ConvNet(nnx.Module):
    """Base of the networks: layers by name, in the order they run."""

    def named_layers(self) -> Iterator[tuple[str, Layer]]:
        """(name, layer) of every layer with weights, in the order they run."""
        raise NotImplementedError

    def features(self, x: jax.Array, *, before_layer: BeforeLayer | None = None) -> jax.Array:
        """The last feature map: x [N, H, W, 3] -> [N, h, w, K]."""
        raise NotImplementedError

    def __call__(self, x: jax.Array, *, before_layer: BeforeLayer | None = None) -> jax.Array:
        """x [N, H, W, 3] -> logits [N, num_classes]."""
        raise NotImplementedError


def run_layer(
    name: str,
    layer: Layer,
    x: jax.Array,
    residual: jax.Array | None = None,
    *,
    before_layer: BeforeLayer | None,
) -> jax.Array:
    """One layer of a forward pass, announced to `before_layer`."""
    if before_layer is not None:
        before_layer(name, layer, x, residual)
    out: jax.Array = layer(x) if residual is None else layer(x, residual)
    return out


def layer_inputs(model: ConvNet, x: jax.Array) -> dict[str, tuple[jax.Array, jax.Array | None]]:
    """Input and residual (or None) of every layer by name, for network input x [N, H, W, 3]; works under jit."""
    inputs: dict[str, tuple[jax.Array, jax.Array | None]] = {}

    def keep(name: str, layer: Layer, value: jax.Array, residual: jax.Array | None) -> None:
        inputs[name] = (value, residual)

    model(x, before_layer=keep)
    return inputs


def layer_names(model: nnx.Module) -> dict[int, str]:
    """`id(layer)` -> name of every sparse layer: the network's own where it is one of this package, else its place."""
    names = dict(sparse_nnx.layer_paths(model))
    if isinstance(model, ConvNet):
        names |= {id(getattr(layer, "conv", layer)): name for name, layer in model.named_layers()}
    return names


def fold_batch_norm(model: nnx.Module) -> int:
    """Fold every batch norm into its convolution's kernel and bias, in place; returns how many there were.

    Exact up to float32 rounding. From then on each layer is one fused operation, its residual, ReLU and pool included.
    """
    units = [module for _, module in nnx.iter_modules(model) if isinstance(module, ConvUnit)]
    return sum([unit.fold_batch_norm() for unit in units])


def set_network_implementation(model: nnx.Module, implementation: str | None) -> None:
    """Set one implementation for a whole network, in place: None, "xla", "ecr", "coo", "direct" or "pecr".

    Dense layers choose themselves where they lack it. "pecr" is the paper's OCPA rule (Xu et al. 2023, section 7): PECR
    where a pool follows, ECR elsewhere.
    `jax_sparse_conv.nnx.set_implementation` sets convolutions, those with a pool and dense layers separately.

    Raises:
      ValueError: another name.
    """
    check_implementation(implementation)
    elsewhere = _without_pool(implementation)
    sparse_nnx.set_implementation(model, conv=elsewhere, conv_pool=implementation, dense=_dense(implementation))


def fully_connected(
    in_features: int,
    out_features: int,
    *,
    relu: bool,
    implementation: str | None,
    dtype: Any,
    param_dtype: Any,
    precision: lax.PrecisionLike,
    rngs: nnx.Rngs,
) -> SparseLinear:
    """A fully connected layer [N, C] -> [N, K], with a ReLU or without."""
    return SparseLinear(
        in_features,
        out_features,
        activation="relu" if relu else None,
        implementation=_dense(implementation),
        dtype=dtype,
        param_dtype=param_dtype,
        precision=precision,
        kernel_init=he_normal,
        rngs=rngs,
    )


def check_implementation(implementation: str | None) -> None:
    """Raise a ValueError for an implementation that a network does not have."""
    layers.check_choice("implementation", implementation, (None, *ops.CONV_POOL_IMPLEMENTATIONS))


def check_images(x: jax.Array) -> None:
    """Raise a ValueError for an x that is not [N, H, W, 3]."""
    if x.ndim != 4 or x.shape[3] != 3:
        raise ValueError(f"x.shape={x.shape} must be [N, H, W, 3]")


def _dense(implementation: str | None) -> str | None:
    """The same name where dense layers have it, else None."""
    elsewhere = _without_pool(implementation)
    return elsewhere if elsewhere in ops.DENSE_IMPLEMENTATIONS else None


def _without_pool(implementation: str | None) -> str | None:
    return "ecr" if implementation == "pecr" else implementation
