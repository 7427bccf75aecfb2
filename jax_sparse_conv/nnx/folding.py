"""Batch norms folded into the layers in front of them, where an `nnx.Sequential` says which these are.

A module does not say what another module's code does with its result. A `Sequential` does: its entries run in order.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator, Mapping, MutableSequence, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from jax import lax

from jax_sparse_conv._src.api.lax_signature import conv_general_dilated
from jax_sparse_conv._src.primitive import reference
from jax_sparse_conv.nnx.layers import SparseConv, SparseLinear

# All of a model, with their paths.
Modules: TypeAlias = Sequence[tuple[str, nnx.Module]]

_CONVS = (nnx.Conv, SparseConv)
_LINEARS = (nnx.Linear, SparseLinear)
_OWN_FUNCTIONS: Mapping[str, tuple[Any, ...]] = {
    "conv_general_dilated": (None, lax.conv_general_dilated, conv_general_dilated),
    "dot_general": (None, lax.dot_general),
    "promote_dtype": (None, dtypes.promote_dtype),
}


class FoldedBatchNorm(nnx.Module):
    """What stands in the place of a folded batch norm: it gives its argument the dtype that the batch norm gave it.

    Args:
      dtype: of the result, or None.
      at_least: promoted with the argument's dtype where `dtype` is None.
    """

    def __init__(self, dtype: Any, at_least: Any) -> None:
        self.dtype = dtype
        self.at_least = at_least

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., C] -> [..., C]."""
        return x.astype(jnp.promote_types(x.dtype, self.at_least) if self.dtype is None else self.dtype)


class _Place(NamedTuple):
    """An entry of a `Sequential`, and the modules on the way to it from another `Sequential` that has this one."""

    entries: MutableSequence[Any]
    number: int
    way: tuple[nnx.Module, ...]

    @property
    def module(self) -> Any:
        return self.entries[self.number]


class Fold(NamedTuple):
    """A batch norm that can be folded, by `run`.

    Attributes:
      path: of the batch norm.
      layer_path: of the layer in front of it.
      place: of the batch norm.
      layer: a convolution or dense layer.
    """

    path: str
    layer_path: str
    place: _Place
    layer: Any

    def run(self) -> None:
        """Give the layer the folded kernel and bias, and put a `FoldedBatchNorm` in the batch norm's place."""
        layer, norm = self.layer, self.place.module
        bias = None if layer.bias is None else layer.bias[...]
        kernel, new_bias = folded(layer.kernel[...], bias, *scale_and_shift(norm))
        layer.kernel[...] = kernel
        if layer.bias is None:
            layer.bias = nnx.Param(new_bias)
            layer.use_bias = True
        else:
            layer.bias[...] = new_bias
        variables = (norm.scale, norm.bias, norm.mean, norm.var)
        at_least = jnp.result_type(*(each.dtype for each in variables if each is not None))
        self.place.entries[self.place.number] = FoldedBatchNorm(norm.dtype, at_least)


def plan(modules: Modules) -> list[Fold]:
    """How to fold every batch norm of a model, in the order of its modules; changes nothing.

    Args:
      modules: all of the model, with their paths.

    Raises:
      ValueError: a batch norm that cannot be folded; all of them are named, each with the reason.
    """
    paths = {id(module): path for path, module in modules}
    pairs = {id(norm.module): (norm, layer) for norm, layer in _pairs(modules)}
    uses = _uses(modules)
    folds, refused = [], []
    for path, module in modules:
        if not isinstance(module, nnx.BatchNorm):
            continue
        norm, layer = pairs.get(id(module), (None, None))
        if norm is None or layer is None:
            refused.append((path, "no nnx.Sequential says what it follows"))
        elif reason := _why_not(norm, layer, uses):
            refused.append((path, reason))
        else:
            folds.append(Fold(path, paths[id(layer.module)], norm, layer.module))
    if refused:
        listed = "; ".join(f"{path or '(model)'}: {reason}" for path, reason in refused)
        raise ValueError(
            f"fold=True folds all batch norms or none, and cannot fold {len(refused)} of {len(folds) + len(refused)}. "
            f"{listed}. jax_sparse_conv.nnx.jit_inference(model) folds every batch norm behind a convolution by itself "
            "in any model after model.eval(); jax_sparse_conv.models.fold_batch_norm is for this package's networks"
        )
    return folds


# --- which layer a batch norm follows --------------------------------------------------------------------------------


def _is_sequence(module: Any) -> bool:
    """Whether it is a `Sequential` that runs its entries in order, and has some."""
    is_sequence = isinstance(module, nnx.Sequential) and type(module).__call__ is nnx.Sequential.__call__
    return is_sequence and bool(module.layers)


def _pairs(modules: Modules) -> Iterator[tuple[_Place, _Place]]:
    """Each batch norm that runs next in some `Sequential`, and what runs directly in front of it."""
    sequences: Iterator[Any] = filter(_is_sequence, (module for _, module in modules))
    for sequence in sequences:
        for number in range(1, len(sequence.layers)):
            norm = _end(sequence.layers, number, last=False)
            if isinstance(norm.module, nnx.BatchNorm):
                yield norm, _end(sequence.layers, number - 1, last=True)


def _end(entries: Any, number: int, *, last: bool) -> _Place:
    """An entry; of a nested `Sequential`, which it may be, its last or first one."""
    way: list[nnx.Module] = [entries]
    while _is_sequence(entries[number]):
        nested = entries[number]
        entries = nested.layers
        number = len(entries) - 1 if last else 0
        way += [nested, entries]
    return _Place(entries, number, tuple(way))


def _uses(modules: Modules) -> Mapping[int, int]:
    """`id` of each module and variable -> how many attributes of the model's modules are it."""
    found: collections.Counter[int] = collections.Counter()
    for _, module in modules:
        for value in vars(module).values():
            with contextlib.suppress(TypeError, ValueError):  # a static dict whose keys do not sort, for one
                found.update(id(node) for node in jax.tree.leaves(value, is_leaf=_is_node) if _is_node(node))
    return found


def _is_node(value: Any) -> bool:
    return isinstance(value, (nnx.Module, nnx.Variable))


# --- why not ---------------------------------------------------------------------------------------------------------


def _why_not(norm: _Place, layer: _Place, uses: Mapping[int, int]) -> str | None:
    """Why a batch norm cannot be folded into what is in front of it, or None."""
    return (
        _why_not_norm(norm.module)
        or _why_not_layer(layer.module, norm.module)
        or _why_shared(norm, "it", uses)
        or _why_shared(layer, f"the {type(layer.module).__name__} in front of it", uses)
    )


def _why_not_norm(norm: Any) -> str | None:
    if type(norm) is not nnx.BatchNorm:
        return "a subclass of BatchNorm may compute something else"
    if norm.use_running_average is not True:
        return (
            f"use_running_average={norm.use_running_average} normalizes by the statistics of a batch; call model.eval()"
        )
    if norm.axis not in (-1, (-1,)):
        return f"axis={norm.axis!r} is not -1, the channels"
    shape = (norm.num_features,)
    variables = {"scale": norm.scale, "bias": norm.bias, "mean": norm.mean, "var": norm.var}
    for name, variable in variables.items():
        if variable is not None and (reason := _why_not_variable(name, variable, shape)):
            return reason
    return _own_function(norm)


def _why_not_layer(layer: Any, norm: Any) -> str | None:
    kind = type(layer)
    name = getattr(layer, "__name__", kind.__name__)
    if kind not in (*_CONVS, *_LINEARS):
        kinds = ", ".join(each.__name__ for each in (*_CONVS, *_LINEARS))
        return f"{name} in front of it is none of {kinds}"
    if getattr(layer, "activation", None) is not None:
        return f"the {name} in front of it has activation={layer.activation!r}"
    if reason := _own_function(layer):
        return f"the {name} in front of it: {reason}"
    inputs = (
        (*layer.kernel_size, layer.in_features // layer.feature_group_count) if kind in _CONVS else (layer.in_features,)
    )
    wanted = {"kernel": (*inputs, norm.num_features), "bias": (norm.num_features,)}
    for attribute, shape in wanted.items():
        variable = getattr(layer, attribute)
        if variable is None:
            continue
        if reason := _why_not_variable(attribute, variable, shape):
            return f"the {name} in front of it: {reason}"
    return None


def _why_not_variable(name: str, variable: Any, shape: tuple[int, ...]) -> str | None:
    if not isinstance(variable, nnx.Variable):
        return f"its {name} is a {type(variable).__name__}, not an nnx.Variable"
    if any(value for key, value in variable.get_metadata().items() if key.startswith("on_")):
        return f"its {name} has hooks"
    if tuple(variable.shape) != shape:
        return f"its {name} has shape {tuple(variable.shape)}, not {shape}"
    if isinstance(variable.get_value(), jax.ShapeDtypeStruct):
        return f"its {name} has no value, only a shape"
    return None


def _own_function(module: Any) -> str | None:
    for name, known in _OWN_FUNCTIONS.items():
        if (value := getattr(module, name, None)) not in known:
            return f"{name}={value!r} is a function of your own"
    return None


def _why_shared(place: _Place, name: str, uses: Mapping[int, int]) -> str | None:
    """Why folding would change what the model computes elsewhere: something on the way is used twice."""
    if uses[id(place.module)] > 1 or any(uses[id(module)] > 1 for module in place.way[1:]):
        return f"{name} is used in several places"
    if uses[id(place.way[0])] > 1:
        return f"the list of layers that has {name} is used in several places"
    for attribute in ("kernel", "bias"):
        if not isinstance(place.module, nnx.BatchNorm) and uses[id(getattr(place.module, attribute))] > 1:
            return f"the {attribute} of {name} is shared with another layer"
    return None


# --- values ----------------------------------------------------------------------------------------------------------


def scale_and_shift(norm: nnx.BatchNorm) -> tuple[jax.Array, jax.Array]:
    """A batch norm at inference as y = scale * x + shift, [C] each, in float32 at least."""
    gamma, beta = (None if value is None else value[...] for value in (norm.scale, norm.bias))
    return _scale_and_shift_of(gamma, beta, norm.mean[...], norm.var[...], norm.epsilon)


@jax.jit
def _scale_and_shift_of(
    gamma: jax.Array | None, beta: jax.Array | None, mean: jax.Array, var: jax.Array, epsilon: float
) -> tuple[jax.Array, jax.Array]:
    scale = (1.0 if gamma is None else _wide(gamma)) / jnp.sqrt(_wide(var) + epsilon)
    moved = _wide(mean) * scale
    return scale, -moved if beta is None else _wide(beta) - moved


@jax.jit
def folded(
    kernel: jax.Array, bias: jax.Array | None, scale: jax.Array, shift: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Kernel [..., K] and bias [K] of a layer with the scale and shift [K] that followed it, in their dtypes."""
    moved = shift if bias is None else shift + _wide(bias) * scale
    scaled = _wide(kernel) * reference.for_channels_of(kernel, scale)
    return scaled.astype(kernel.dtype), moved.astype((kernel if bias is None else bias).dtype)


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
