"""Layers for `flax.linen` that skip the zeros of their input.

`SparseConv`, `SparseConvPool` and `SparseDense` have the fields and the parameters of `nn.Conv` and `nn.Dense`: their
variables are interchangeable. A parameter "kernel" may be what `jax_sparse_conv.pack` made of it. `sparse_layers` has a
model's own `nn.Conv` and `nn.Dense` run so, without new classes.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from flax import linen as nn

from jax_sparse_conv._src.api import ops
from jax_sparse_conv._src.api.arguments import Activation, DenseImplementation
from jax_sparse_conv._src.layers import layer_calls, layers
from jax_sparse_conv._src.primitive import packing
from jax_sparse_conv._src.primitive.coo_star import CooStar
from jax_sparse_conv._src.problem.geometry import Padding, positive_int

__all__ = ["SparseConv", "SparseConvPool", "SparseDense", "sparse_layers"]


def __dir__() -> list[str]:
    return sorted(__all__)


Promoted: TypeAlias = tuple[jax.Array, layers.Kernel, jax.Array | None]


class SparseConv(nn.Conv):
    """`nn.Conv` whose two-dimensional convolutions skip the zeros of their input (`jax_sparse_conv.conv`).

    What `jax_sparse_conv.conv` does not have runs as in `nn.Conv`. That is other than two dimensions, "CIRCULAR",
    "REFLECT" and "CAUSAL" padding, input dilation, and a `conv_general_dilated` of your own.

    Attributes:
      activation: None, or "relu" or `jax.nn.relu`, applied in the same operation.
      implementation: "ecr", "coo", "direct", "adaptive", "xla" or None, as in `jax_sparse_conv.conv`.

    Raises:
      ValueError: an unknown activation or implementation.
    """

    activation: Activation = None
    implementation: layers.Implementation = None

    implementations: ClassVar[tuple[str, ...]] = ops.CONV_IMPLEMENTATIONS

    def __post_init__(self) -> None:
        layers.check_arguments(self.activation, self.implementation, self.implementations)
        super().__post_init__()

    @nn.compact
    def __call__(
        self, inputs: jax.Array | CooStar, residual: Any = None, *, nonzeros: Any = None, count_nonzeros: bool = False
    ) -> Any:
        """`activation(conv(inputs) + bias + residual)`.

        Args:
          inputs: [..., H, W, C], with none, one or several leading axes; or a `CooStar` with some.
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
            y, counted = self._sparse(*_conv_operands(self, inputs), residual, counts)
        else:
            layers.require_dense(self.implementation, reason)
            y = self._after(layers.epilogue(super().__call__(layers.dense_map(inputs)), residual, self.activation))
            y, counted = layers.counted(y, counts)
        y = layer_calls.recorded(self, inputs, residual, y)
        return (y, counted) if count_nonzeros else y

    _sparse = layers.conv

    def _after(self, y: jax.Array) -> jax.Array:
        return y


class SparseConvPool(SparseConv):
    """Convolution, bias, ReLU and pool in one operation that skips the zeros of its input.

    The parameters are `nn.Conv`'s; the operation is `jax_sparse_conv.conv_pool`.

    Attributes:
      activation: None, or "relu" or `jax.nn.relu`, before the pool.
      implementation: "pecr", "ecr", "coo", "direct", "adaptive", "xla" or None, as in
        `jax_sparse_conv.conv_pool`.
      pool: "max" or "avg".
      window_shape: rows and columns of a pooling window.
      window_strides: between pooling windows; None is `window_shape`.
      window_padding: of the pool, as in `jax_sparse_conv.conv_pool`.

    Raises:
      ValueError: a kernel that is not two-dimensional, or an unknown activation, implementation or pool.
    """

    activation: Activation = "relu"
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
      activation: None, or "relu" or `jax.nn.relu`, applied in the same operation.
      implementation: "ecr", "xla" or None, as in `jax_sparse_conv.dense`.

    Raises:
      ValueError: an unknown activation or implementation.
    """

    activation: Activation = None
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
            y = layers.dense(self, *_dense_operands(self, inputs))
        else:
            layers.require_dense(self.implementation, reason)
            y = layers.epilogue(super().__call__(inputs), None, self.activation)
        return layer_calls.recorded(self, inputs, None, y)


# --- Flax's own layers -----------------------------------------------------------------------------------------------


def sparse_layers(implementation: DenseImplementation | None = None) -> contextlib.AbstractContextManager[None]:
    """Inside of `with sparse_layers():`, every `nn.Conv` and `nn.Dense` skips the zeros of its input.

    They run by `jax_sparse_conv.conv` and `jax_sparse_conv.dense`. Names, parameters, initial values and dtypes stay as
    they are, in `model.init` and in `model.apply`. Subclasses of the two may compute something else, so they are left.
    So is a layer that `SparseConv` or `SparseDense` would run as Flax does, whatever the implementation.

    What counts is where a function is traced. For `jax.jit` put the block inside of the function, not around its call:
    JAX runs again what it has traced before. Of nested blocks the inner one counts. Another interceptor
    (`nn.intercept_methods`) that is entered inside of the block does not see the layers that run so.

    Args:
      implementation: of all these layers: None, "xla" or "ecr", as in `jax_sparse_conv.conv` and
        `jax_sparse_conv.dense`.

    Returns:
      A context manager.

    Raises:
      ValueError: an unknown implementation. When a layer is called: a shape that does not fit, or a dtype that a named
        implementation cannot run.
    """
    layers.check_choice("implementation", implementation, (None, *ops.DENSE_IMPLEMENTATIONS))  # those that both have
    return _sparse_layers(implementation)


@contextlib.contextmanager
def _sparse_layers(implementation: str | None) -> Iterator[None]:
    block = object()

    def run(following: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        layer, inputs = context.module, _only_argument(args, kwargs)
        operation = _OPERATIONS.get(type(layer)) if context.method_name == "__call__" else None
        if operation is None or inputs is None or _innermost.get() is not block or operation.why_dense(layer):
            return following(*args, **kwargs)
        y = operation.run(_Sparse(layer, implementation), inputs)
        return layer_calls.recorded(layer, inputs, None, y)

    token = _innermost.set(block)
    try:
        with nn.intercept_methods(run):
            yield
    finally:
        _innermost.reset(token)


_innermost: contextvars.ContextVar[object] = contextvars.ContextVar("jax_sparse_conv_sparse_layers", default=None)


@dataclasses.dataclass(frozen=True)
class _Sparse:
    """A layer of Flax's own, with the attributes that this package's have beside."""

    layer: Any
    implementation: str | None
    activation: None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)


class _Operation(NamedTuple):
    """What runs a class of layers: why it would not, and the call itself."""

    why_dense: Callable[[Any], str | None]
    run: Callable[[Any, Any], jax.Array]


_OPERATIONS: dict[type[nn.Module], _Operation] = {
    nn.Conv: _Operation(layers.why_dense_conv, lambda layer, x: layers.conv(layer, *_conv_operands(layer, x))[0]),
    nn.Dense: _Operation(layers.why_dense_product, lambda layer, x: layers.dense(layer, *_dense_operands(layer, x))),
}


def _only_argument(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`inputs` where it is the call's only argument, else None: Flax then says what is wrong."""
    if kwargs:
        return kwargs.get("inputs") if not args and len(kwargs) == 1 else None
    return args[0] if len(args) == 1 else None


# --- parameters ------------------------------------------------------------------------------------------------------


def _conv_operands(layer: Any, inputs: Any) -> Promoted:
    channels = _shape(inputs)[-1]
    positive_int("feature_group_count", layer.feature_group_count)
    if channels % layer.feature_group_count:
        raise ValueError(
            f"feature_group_count={layer.feature_group_count} does not divide the C={channels} input channels of "
            f"inputs.shape={_shape(inputs)}"
        )
    shape = (*layer.kernel_size, channels // layer.feature_group_count, layer.features)
    return _promoted(layer, inputs, *_parameters(layer, shape), layer.mask)


def _dense_operands(layer: Any, inputs: Any) -> Promoted:
    return _promoted(layer, inputs, *_parameters(layer, (_shape(inputs)[-1], layer.features)))


def _shape(inputs: Any) -> tuple[int, ...]:
    return inputs.shape if isinstance(inputs, CooStar) else jnp.shape(inputs)


def _parameters(layer: Any, kernel_shape: tuple[int, ...]) -> tuple[Any, Any]:
    """Kernel and bias, made in the order of Flax, on which initial values depend."""
    kernel = layer.param("kernel", layer.kernel_init, kernel_shape, layer.param_dtype)
    bias = layer.param("bias", layer.bias_init, (layer.features,), layer.param_dtype) if layer.use_bias else None
    return kernel, bias


def _promoted(layer: Any, inputs: Any, kernel: Any, bias: Any, mask: Any = None) -> Promoted:
    """Inputs, kernel and bias in the computation's dtype; a packed kernel stays one where nothing changes it."""
    plain = packing.plain(kernel)
    given = (layers.array_of(inputs), layers.masked(plain, mask), bias)
    array, promoted, bias = layer.promote_dtype(*given, dtype=layer.dtype)
    return layers.with_array(inputs, array), packing.beside(promoted, plain, kernel), bias
