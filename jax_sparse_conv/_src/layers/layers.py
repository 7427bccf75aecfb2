"""What the Flax layers of `nnx` and `linen` share: how a layer's attributes become one operation.

A layer's `implementation` is None, a name, or what a plan made of it (`Planned`).

A `ConvLayer` is any object with the attributes of `flax.nnx.Conv` or `flax.linen.Conv` and those added here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from jax_sparse_conv._src.api import arguments, by_density, ops
from jax_sparse_conv._src.api.arguments import Activation
from jax_sparse_conv._src.api.by_density import Step
from jax_sparse_conv._src.layers import calls, layer_calls
from jax_sparse_conv._src.layers.calls import Call, Operands
from jax_sparse_conv._src.layers.layer_calls import observed as observed
from jax_sparse_conv._src.primitive import counting, max_pool, reference
from jax_sparse_conv._src.primitive.coo_star import CooStar
from jax_sparse_conv._src.primitive.packing import PackedKernel
from jax_sparse_conv._src.problem import geometry as geo

_NOT_ZERO_PADDING = ("CIRCULAR", "REFLECT", "CAUSAL")


@dataclasses.dataclass(frozen=True)
class Planned:
    """The `implementation` of a layer with a plan: a name for each call it was calibrated with, None for any other.

    Attributes:
      choices: (call, name of its implementation).
      steps: (call, what runs in place of it up to which densities of the input, the least first).
    """

    choices: tuple[tuple[Call, str], ...]
    steps: tuple[tuple[Call, tuple[Step, ...]], ...] = ()

    def __getitem__(self, call: Call) -> str | None:
        return dict(self.choices).get(call)

    def steps_of(self, call: Call) -> tuple[Step, ...]:
        return dict(self.steps).get(call, ())

    @property
    def names(self) -> list[str]:
        """Every implementation that may run."""
        of_steps = [name for _, steps in self.steps for _, name in steps]
        return list(dict.fromkeys([*(name for _, name in self.choices), *of_steps]))

    def __repr__(self) -> str:
        return f"<planned: {', '.join(self.names)}>"


Implementation: TypeAlias = arguments.ConvPoolImplementation | Planned | None
Kernel: TypeAlias = jax.Array | PackedKernel


class ConvLayer(Protocol):
    """The attributes that say what a convolution layer computes."""

    kernel_size: Any
    strides: Any
    padding: Any
    input_dilation: Any
    kernel_dilation: Any
    feature_group_count: Any
    precision: Any
    activation: Activation
    implementation: Implementation


class DenseLayer(Protocol):
    """The attributes that say what a dense layer computes."""

    precision: Any
    activation: Activation
    implementation: Implementation


class ConvPoolLayer(ConvLayer, Protocol):
    """A convolution layer with a pool."""

    pool: geo.PoolKind
    window_shape: Any
    window_strides: Any
    window_padding: Any


class Counts(NamedTuple):
    """What a call knows of its input's zeros, and whether it returns counts of its result.

    Attributes:
      nonzeros: of the input, as `jax_sparse_conv.conv` takes them, or None.
      wanted: whether the result's are asked for.
    """

    nonzeros: Any = None
    wanted: bool = False


# A result and its counts, None where they are not wanted.
Counted: TypeAlias = tuple[jax.Array, jax.Array | None]
_NO_COUNTS = Counts()

# --- arguments -------------------------------------------------------------------------------------------------------


def check_arguments(activation: Activation, implementation: Implementation, names: tuple[str, ...]) -> None:
    """Raise a ValueError for an activation or implementation that no call of the layer could use."""
    arguments.canonical_activation(activation)
    if not isinstance(implementation, Planned):
        check_choice("implementation", implementation, (None, *names))


def check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    if not arguments.is_one_of(value, choices):
        raise ValueError(f"{name}={value!r} is not one of {', '.join(map(repr, choices))}")


def check_pool(pool: str, window_shape: Any, window_strides: Any, window_padding: Any) -> None:
    """Raise a ValueError for a pool that no convolution result could be pooled with."""
    window = geo.pair("window_shape", window_shape)
    size = (window[0], window[1])
    geo.with_pool(
        geo.Geometry(),
        size,
        kind=pool,
        window_shape=window,
        window_strides=window_strides,
        window_padding=window_padding,
    )


def why_dense_conv(layer: Any) -> str | None:
    """Why a layer with `Conv`'s attributes is not one of `jax_sparse_conv.conv`'s convolutions, or None."""
    size = layer.kernel_size
    if isinstance(size, int) or len(size) != 2:
        return f"kernel_size={size!r} is not two-dimensional"
    if isinstance(layer.padding, str) and layer.padding.upper() in _NOT_ZERO_PADDING:
        return f"padding={layer.padding!r} is not padding with zeros"
    if layer.input_dilation is not None and geo.pair("input_dilation", layer.input_dilation) != (1, 1):
        return f"input_dilation={layer.input_dilation!r} is not 1"
    if getattr(layer, "preferred_element_type", None) is not None:
        return f"preferred_element_type={layer.preferred_element_type!r} is set"
    if getattr(layer, "conv_general_dilated", None) not in (None, lax.conv_general_dilated):
        return f"conv_general_dilated={layer.conv_general_dilated!r} is not lax's"
    if getattr(layer, "conv_general_dilated_cls", None) is not None:
        return f"conv_general_dilated_cls={layer.conv_general_dilated_cls!r} is set"
    return None


def why_dense_product(layer: Any) -> str | None:
    """Why a layer with `Linear`'s or `Dense`'s attributes is not one of `jax_sparse_conv.dense`'s products, or None."""
    if getattr(layer, "preferred_element_type", None) is not None:
        return f"preferred_element_type={layer.preferred_element_type!r} is set"
    if layer.dot_general not in (None, lax.dot_general):
        return f"dot_general={layer.dot_general!r} is not lax's"
    if getattr(layer, "dot_general_cls", None) is not None:
        return f"dot_general_cls={layer.dot_general_cls!r} is set"
    return None


def require_dense(implementation: Implementation, reason: str) -> None:
    """Raise unless the layer may run densely, which is what `reason` calls for."""
    if isinstance(implementation, str) and implementation != "xla":
        raise ValueError(f"implementation={implementation!r} cannot run this layer: {reason}; None or 'xla' can")


def masked(kernel: jax.Array, mask: Any) -> jax.Array:
    """`kernel`, multiplied by `mask` of the same shape if there is one."""
    if mask is None:
        return kernel
    if mask.shape != kernel.shape:
        raise ValueError(f"mask.shape={mask.shape} must be the kernel's shape, {kernel.shape}")
    return kernel * mask


# --- inputs that are stored as COO* ---


def array_of(inputs: Any) -> Any:
    """What has the inputs' dtype: of a `CooStar` its values."""
    return inputs.values if isinstance(inputs, CooStar) else inputs


def with_array(inputs: Any, array: Any) -> Any:
    """The inputs with another such array."""
    return dataclasses.replace(inputs, values=array) if isinstance(inputs, CooStar) else array


def dense_map(inputs: Any) -> Any:
    """The inputs as an array."""
    return inputs.todense() if isinstance(inputs, CooStar) else inputs


# --- the operations --------------------------------------------------------------------------------------------------


def conv(
    layer: ConvLayer,
    inputs: jax.Array | CooStar,
    kernel: Kernel,
    bias: jax.Array | None,
    residual: Any = None,
    counts: Counts = _NO_COUNTS,
) -> Counted:
    """inputs [..., H, W, C] and residual [..., Ho, Wo, K] -> [..., Ho, Wo, K], with any number of leading axes."""
    x, added = _images(inputs, residual)
    y, nonzeros = _run(layer, "conv", (x, kernel, bias, added), conv_arguments(layer), counts)
    return _restore(y, inputs), nonzeros


def bare_conv(layer: ConvLayer, x: jax.Array, kernel: Kernel, bias: jax.Array | None) -> jax.Array:
    """The convolution and its bias alone, for a layer with something between these and its activation."""
    return _run(layer, "conv", (x, kernel, bias, None), conv_arguments(layer) | {"activation": None})[0]


def conv_pool(
    layer: ConvPoolLayer,
    inputs: jax.Array | CooStar,
    kernel: Kernel,
    bias: jax.Array | None,
    residual: Any = None,
    counts: Counts = _NO_COUNTS,
) -> Counted:
    """As `conv`, then the pool: [..., Po, Qo, K]. A residual is added between convolution and activation."""
    if residual is not None:
        if layer.implementation == "pecr":
            raise ValueError("implementation='pecr' has no residual; None, 'ecr' or 'xla' have")
        y, _ = conv(layer, inputs, kernel, bias, residual, Counts(counts.nonzeros))
        return counted(pooled(layer, y), counts)
    x, _ = _images(inputs, None)
    arguments = conv_arguments(layer) | pool_arguments(layer)
    y, nonzeros = _run(layer, "conv_pool", (x, kernel, bias, None), arguments, counts)
    return _restore(y, inputs), nonzeros


def dense(layer: DenseLayer, x: jax.Array, kernel: Kernel, bias: jax.Array | None) -> jax.Array:
    """x [..., C] -> [..., K]."""
    return _run(layer, "dense", (x, kernel, bias, None), dense_arguments(layer))[0]


def pooled(layer: ConvPoolLayer, y: jax.Array) -> jax.Array:
    """The layer's pool alone: [..., Ho, Wo, K] -> [..., Po, Qo, K]."""
    images, _ = _images(y, None)
    arguments = pool_arguments(layer)
    kind = arguments.pop("pool")
    geometry = geo.with_pool(geo.Geometry(), (images.shape[1], images.shape[2]), kind=kind, **arguments)
    pool = reference.pool if layer.implementation == "xla" else max_pool.pool
    return _restore(pool(images, geometry.pool), y)


def epilogue(y: jax.Array, residual: Any, activation: Activation) -> jax.Array:
    """Residual (cast to y's dtype) and activation after a layer that computed y with its bias."""
    if residual is not None:
        residual = jnp.asarray(residual, y.dtype)
        if residual.shape != y.shape:
            raise ValueError(f"residual.shape={residual.shape} must be {y.shape}")
    return reference.epilogue(y, None, residual, arguments.canonical_activation(activation))


def counted(y: jax.Array, counts: Counts) -> Counted:
    """y, and its counts by lax where they are wanted."""
    return y, counting.counted(y) if counts.wanted else None


def _run(layer: Any, op: str, operands: Operands, arguments: Mapping[str, Any], counts: Counts = _NO_COUNTS) -> Counted:
    observer = layer_calls.observer()
    if observer is not None:
        operands = (dense_map(operands[0]), *operands[1:])
        return counted(observer(layer, Call.of(op, operands, arguments), operands, arguments), counts)
    implementation, nonzeros = layer.implementation, counts.nonzeros
    if isinstance(implementation, Planned):
        call = Call.of(op, operands, arguments)
        if steps := implementation.steps_of(call):
            return _run_by_density(op, operands, arguments, steps, implementation[call], counts)
        implementation = implementation[call]
        if nonzeros is not None and implementation not in ops.READS_NONZEROS:
            by_density.checked_nonzeros(nonzeros)
            nonzeros = None  # the plan has measured; nothing is left to decide
        if implementation not in ops.READS_LISTS:
            operands = (dense_map(operands[0]), *operands[1:])
    elif implementation == "pecr" and op == "conv":
        implementation = "ecr"  # a pool that comes later, or apart
    if nonzeros is not None:
        arguments = {**arguments, "nonzeros": nonzeros}
    if not counts.wanted:
        return calls.run(op, operands, arguments, implementation), None
    return calls.run(op, operands, {**arguments, "count_nonzeros": True}, implementation)


def _run_by_density(
    op: str, operands: Operands, arguments: Mapping[str, Any], steps: tuple[Step, ...], beyond: Any, counts: Counts
) -> Counted:
    fields = dict(arguments)
    if counts.nonzeros is not None:
        fields["nonzeros"] = counts.nonzeros
    if not counts.wanted:
        return calls.run_by_density(op, operands, fields, steps, beyond), None
    y, counted = calls.run_by_density(op, operands, {**fields, "count_nonzeros": True}, steps, beyond)
    return y, counted


def conv_arguments(layer: ConvLayer) -> dict[str, Any]:
    """Keyword arguments of `ops.conv`."""
    return {
        "strides": 1 if layer.strides is None else layer.strides,
        "padding": layer.padding,
        "kernel_dilation": 1 if layer.kernel_dilation is None else layer.kernel_dilation,
        "feature_group_count": layer.feature_group_count,
        "activation": arguments.canonical_activation(layer.activation),
        "precision": layer.precision,
    }


def dense_arguments(layer: DenseLayer) -> dict[str, Any]:
    """Keyword arguments of `ops.dense`."""
    return {"activation": arguments.canonical_activation(layer.activation), "precision": layer.precision}


def pool_arguments(layer: ConvPoolLayer) -> dict[str, Any]:
    """What `ops.conv_pool` takes beside `conv_arguments`."""
    return {
        "pool": layer.pool,
        "window_shape": layer.window_shape,
        "window_strides": layer.window_strides,
        "window_padding": layer.window_padding,
    }


def _images(inputs: Any, residual: Any) -> tuple[Any, jax.Array | None]:
    """Both with their leading axes as one, [N, H, W, C] and [N, Ho, Wo, K]."""
    if inputs.ndim < 3:
        raise ValueError(f"inputs.shape={inputs.shape} has fewer dimensions than [H, W, C]")
    leading = inputs.shape[:-3]
    if isinstance(inputs, CooStar):
        axes = len(leading)
        images = jax.tree.map(lambda leaf: leaf.reshape(math.prod(leading), *leaf.shape[axes:]), inputs)
    else:
        images = inputs.reshape(math.prod(leading), *inputs.shape[-3:])
    if residual is None:
        return images, None
    residual = jnp.asarray(residual, inputs.dtype)
    if residual.ndim != inputs.ndim or residual.shape[:-3] != leading:
        raise ValueError(f"residual.shape={residual.shape} must have the leading axes of inputs.shape={inputs.shape}")
    return images, residual.reshape(math.prod(leading), *residual.shape[-3:])


def _restore(y: jax.Array, inputs: jax.Array | CooStar) -> jax.Array:
    return y.reshape(*inputs.shape[:-3], *y.shape[1:])
