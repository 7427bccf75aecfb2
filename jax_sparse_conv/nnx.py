"""Layers for `flax.nnx` that skip the zeros of their input, and `replace`, which puts them into any nnx model.

`SparseConv`, `SparseConvPool` and `SparseLinear` have the parameters and the state tree of `nnx.Conv` and `nnx.Linear`:
checkpoints, optimizers and transformations do not see a difference.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import jax
from flax import nnx

from jax_sparse_conv import layers, ops, packed_params, packing
from jax_sparse_conv.geometry import Padding
from jax_sparse_conv.layers import LayerCall, record_calls
from jax_sparse_conv.packed_params import PackedParam

__all__ = [
    "LayerCall",
    "PackedParam",
    "Report",
    "ReportEntry",
    "SparseConv",
    "SparseConvPool",
    "SparseLinear",
    "layer_paths",
    "pack",
    "record_calls",
    "replace",
    "set_implementation",
    "unpack",
]


class SparseConv(nnx.Conv):
    """`nnx.Conv` whose two-dimensional convolutions skip the zeros of their input (`jax_sparse_conv.conv`).

    What `jax_sparse_conv.conv` does not have (other than two dimensions, "CIRCULAR", "REFLECT" and "CAUSAL" padding,
    input dilation, `preferred_element_type`, one's own `conv_general_dilated`) runs as in `nnx.Conv`.

    Args:
      in_features: C.
      out_features: K.
      kernel_size: as in `nnx.Conv`.
      strides: as in `nnx.Conv`.
      activation: None or "relu", applied in the same operation.
      implementation: "ecr", "coo", "direct", "adaptive", "xla" or None, as in `jax_sparse_conv.conv`.
      **conv_arguments: `nnx.Conv`'s other arguments, `rngs` among them.

    Raises:
      ValueError: an unknown activation or implementation.
    """

    implementations: ClassVar[tuple[str, ...]] = ops.CONV_IMPLEMENTATIONS
    activation: str | None
    implementation: layers.Implementation

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kernel_size: int | Sequence[int],
        strides: int | Sequence[int] | None = 1,
        *,
        activation: str | None = None,
        implementation: layers.Implementation = None,
        **conv_arguments: Any,
    ) -> None:
        layers.check_arguments(activation, implementation, self.implementations)
        super().__init__(in_features, out_features, kernel_size, strides, **conv_arguments)
        self.activation = activation
        self.implementation = implementation

    def __call__(  # type: ignore[override]  # nnx.Conv's second argument is out_sharding; it is understood here too
        self,
        inputs: jax.Array,
        residual: Any = None,
        out_sharding: Any = None,
        *,
        nonzeros: Any = None,
        count_nonzeros: bool = False,
    ) -> Any:
        """`activation(conv(inputs) + bias + residual)`.

        Args:
          inputs: [..., H, W, C], with none, one or several leading axes.
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
            y = self._after(layers.epilogue(super().__call__(inputs, out_sharding), residual, self.activation))
            y, counted = layers.counted(y, counts)
        y = layers.recorded(self, inputs, residual, y)
        return (y, counted) if count_nonzeros else y

    def _sparse(
        self, inputs: jax.Array, kernel: layers.Kernel, bias: jax.Array | None, residual: Any, counts: layers.Counts
    ) -> layers.Counted:
        return layers.conv(self, inputs, kernel, bias, residual, counts)

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
      activation: "relu" or None, before the pool.
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
        pool: str = "max",
        window_shape: int | Sequence[int] = (2, 2),
        window_strides: int | Sequence[int] | None = None,
        window_padding: Padding = "VALID",
        activation: str | None = "relu",
        implementation: layers.Implementation = None,
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
            implementation=implementation,
            **conv_arguments,
        )
        self.pool = pool
        self.window_shape = window_shape
        self.window_strides = window_strides
        self.window_padding = window_padding

    def _sparse(
        self, inputs: jax.Array, kernel: layers.Kernel, bias: jax.Array | None, residual: Any, counts: layers.Counts
    ) -> layers.Counted:
        return layers.conv_pool(self, inputs, kernel, bias, residual, counts)

    def _after(self, y: jax.Array) -> jax.Array:
        return layers.pooled(self, y)


class SparseLinear(nnx.Linear):
    """`nnx.Linear` that reads only the kernel rows of non-zero inputs where that pays (`jax_sparse_conv.dense`).

    One's own `dot_general`, `preferred_element_type` and a call's `out_sharding` run as in `nnx.Linear`.

    Args:
      in_features: C.
      out_features: K.
      activation: None or "relu", applied in the same operation.
      implementation: "ecr", "xla" or None, as in `jax_sparse_conv.dense`.
      **linear_arguments: `nnx.Linear`'s other arguments, `rngs` among them.

    Raises:
      ValueError: an unknown activation or implementation.
    """

    implementations: ClassVar[tuple[str, ...]] = ops.DENSE_IMPLEMENTATIONS
    activation: str | None
    implementation: layers.Implementation

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        activation: str | None = None,
        implementation: layers.Implementation = None,
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
        return layers.recorded(self, inputs, None, y)


def promoted(layer: Any, inputs: Any, mask: Any = None) -> tuple[jax.Array, layers.Kernel, jax.Array | None]:
    """Inputs, kernel and bias in the computation's dtype; a packed kernel stays one where nothing changes it."""
    given = packed_params.kernel_of(layer)
    plain = packing.plain(given)
    bias = None if layer.bias is None else layer.bias[...]
    inputs, kernel, bias = layer.promote_dtype((inputs, layers.masked(plain, mask), bias), dtype=layer.dtype)
    return inputs, packing.beside(kernel, plain, given), bias


# --- whole models ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ReportEntry:
    """What `replace` did with one layer.

    Attributes:
      path: where the layer is, such as `"layers.0"`; empty for the model itself.
      old_type: name of its class before.
      new_type: name of its class now, or None where it was left.
      reason: why it was swapped or left.
    """

    path: str
    old_type: str
    new_type: str | None
    reason: str

    def __str__(self) -> str:
        now = f"-> {self.new_type}" if self.new_type else "left"
        return f"{self.path or '(model)'}: {self.old_type} {now} ({self.reason})"


@dataclasses.dataclass(frozen=True)
class Report:
    """What `replace` swapped and what it left, in the order of `nnx.iter_modules`; `print` shows it."""

    entries: tuple[ReportEntry, ...]

    @property
    def swapped(self) -> tuple[ReportEntry, ...]:
        return tuple(entry for entry in self.entries if entry.new_type)

    @property
    def left(self) -> tuple[ReportEntry, ...]:
        return tuple(entry for entry in self.entries if not entry.new_type)

    def __str__(self) -> str:
        summary = f"{len(self.swapped)} layers swapped, {len(self.left)} left"
        return "\n".join([summary, *(f"  {entry}" for entry in self.entries)])


def replace(model: nnx.Module, *, implementation: str | None = None) -> Report:
    """Make every `nnx.Conv` and `nnx.Linear` of `model` sparse, in place, and report what was left and why.

    Parameters stay where they are, and so does the state tree: only the layers' classes change. Subclasses of
    `nnx.Conv` and `nnx.Linear` may compute something else and are left, as is what would run densely anyway.

    Args:
      model: any nnx module, a layer itself included.
      implementation: of all swapped layers, as in `jax_sparse_conv.conv` and `jax_sparse_conv.dense`.

    Returns:
      A `Report` with one entry for every convolution and dense layer.

    Raises:
      ValueError: an unknown implementation.
      TypeError: a model that is not an nnx module.
    """
    _check_module(model)
    layers.check_choice("implementation", implementation, (None, *ops.CONV_IMPLEMENTATIONS))
    layers.check_choice("implementation", implementation, (None, *ops.DENSE_IMPLEMENTATIONS))
    entries = [_replace_layer(path, module, implementation) for path, module in _modules(model) if _is_layer(module)]
    return Report(tuple(entries))


def set_implementation(
    model: nnx.Module, *, conv: str | None = None, conv_pool: str | None = None, dense: str | None = None
) -> None:
    """Set the implementation of every sparse layer of `model`, in place.

    Args:
      model: any nnx module.
      conv: for `SparseConv`.
      conv_pool: for `SparseConvPool`.
      dense: for `SparseLinear`.

    Raises:
      ValueError: a name that the operation does not have.
    """
    layers.check_choice("conv", conv, (None, *SparseConv.implementations))
    layers.check_choice("conv_pool", conv_pool, (None, *SparseConvPool.implementations))
    layers.check_choice("dense", dense, (None, *SparseLinear.implementations))
    for _, module in _modules(model):
        if isinstance(module, SparseConvPool):
            module.implementation = conv_pool
        elif isinstance(module, SparseConv):
            module.implementation = conv
        elif isinstance(module, SparseLinear):
            module.implementation = dense


def pack(model: nnx.Module) -> int:
    """Have the convolutions of `model` hold packed kernels, in place, for inference with weights as arguments.

    Under `nnx.jit` or `jax.jit(lambda model, x: model(x))` a CPU packs every kernel in every call; so it does once, at
    the price of a second copy. A packed parameter (`PackedParam`) is the kernel to Flax, and new weights are packed
    when they are assigned; gradients by it are refused, so `unpack` before training. Layers that would not read the
    copy (other windows, strides, dtypes, implementations) and everything on other devices are left as they are.

    Args:
      model: any nnx module, a layer itself included.

    Returns:
      How many layers are packed now.

    Raises:
      TypeError: a model that is not an nnx module.
    """
    return packed_params.pack(_convs(model))


def unpack(model: nnx.Module) -> int:
    """Undo `pack`, in place: the parameters are `nnx.Param`s of the kernels alone; returns how many were packed."""
    return packed_params.unpack(_convs(model))


def layer_paths(model: nnx.Module) -> dict[int, str]:
    """`id(layer)` -> path, such as `"layers.0"`, of every sparse layer of `model`; names what `record_calls` keeps."""
    return {id(module): path for path, module in _modules(model) if isinstance(module, (SparseConv, SparseLinear))}


def _modules(model: nnx.Module) -> Iterator[tuple[str, nnx.Module]]:
    for path, module in nnx.iter_modules(model):
        yield ".".join(map(str, path)), module


def _check_module(model: Any) -> None:
    if not isinstance(model, nnx.Module):
        raise TypeError(f"model is a {type(model).__name__}, which is not an nnx.Module")


def _convs(model: nnx.Module) -> list[SparseConv]:
    _check_module(model)
    return [module for _, module in _modules(model) if isinstance(module, SparseConv)]


def _is_layer(module: nnx.Module) -> bool:
    return isinstance(module, (nnx.Conv, nnx.ConvTranspose, nnx.Linear, nnx.LinearGeneral, nnx.Einsum))


def _replace_layer(path: str, module: Any, implementation: str | None) -> ReportEntry:
    old = type(module).__name__
    reason = _why_left(module)
    if reason is not None:
        return ReportEntry(path, old, None, reason)
    new = SparseConv if type(module) is nnx.Conv else SparseLinear
    object.__setattr__(module, "__class__", new)  # past nnx, which would record an attribute of that name
    module.activation = None
    module.implementation = implementation
    return ReportEntry(path, old, new.__name__, f"implementation={implementation!r}, parameters kept")


def _why_left(module: Any) -> str | None:
    if isinstance(module, (SparseConv, SparseLinear)):
        return "already sparse"
    if type(module) is nnx.Conv:
        return layers.why_dense_conv(module)
    if type(module) is nnx.Linear:
        return layers.why_dense_product(module)
    if isinstance(module, (nnx.Conv, nnx.Linear)):
        return f"a subclass of {'Conv' if isinstance(module, nnx.Conv) else 'Linear'} may compute something else"
    return f"there is no sparse {type(module).__name__}"
