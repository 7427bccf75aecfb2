"""Equations on feature maps as they lie: views, elementwise ones, pools, sums, pads and concatenations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax import lax

from jax_sparse_conv._src.accelerate import equations, maps, pools
from jax_sparse_conv._src.accelerate.maps import Axes
from jax_sparse_conv._src.accelerate.values import Map, Values
from jax_sparse_conv._src.fusion.jaxprs import Equation

_REDUCTIONS = frozenset(("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"))
_UNARY = """abs acos acosh asin asinh atan atanh cbrt ceil convert_element_type copy cos cosh erf erf_inv erfc exp exp2
expm1 floor integer_pow is_finite log log1p logistic neg not reduce_precision round rsqrt sign sin sinh sqrt square tan
tanh"""
_OF_SEVERAL = "add and atan2 clamp div eq ge gt le lt max min mul ne or pow rem select_n sub xor"
_ELEMENTWISE = frozenset(_UNARY.split()) | frozenset(_OF_SEVERAL.split())


def evaluate(values: Values, equation: Equation) -> Map | jax.Array | None:
    """The result of an equation that reads a map, or None where it is to be evaluated in the function's order."""
    name, of_maps = equation.equation.primitive.name, [number for number in equation.inputs if values.is_map(number)]
    axes: Axes = values[max(of_maps, key=lambda number: math.prod(values.shape(number)))].axes
    if name in _REDUCTIONS:
        return _reduced(values, equation, axes)
    if name in pools.KINDS:
        is_whole = all(size is not None for size in pools.params(equation, axes).values())
        return Map(pools.pool(equation, axes, values.stored(values[of_maps[0]])), axes) if is_whole else None
    if name == pools.GRADIENT:
        return pools.gradient(values, equation, axes)
    if name == "concatenate":
        return _concatenated(values, equation, axes)
    if name == "slice":
        return _sliced(values, equation, axes)
    if name == "pad":
        return _padded(values, equation, axes) if equation.inputs[0] in of_maps else None
    if not axes:
        return None
    if name not in _ELEMENTWISE and not equations.is_relu(equation.equation):
        return None
    shapes = [values.shape(number) for number in equation.inputs]
    return Map(elementwise(values, equation, axes, {}), axes) if all(_fits(shape, axes) for shape in shapes) else None


def view(values: Values, equation: Equation) -> Map | None:
    """The result of an equation that renames, adds or drops axes of a map, else None."""
    name, params = equation.equation.primitive.name, equation.equation.params
    if len(equation.inputs) != 1 or name not in ("transpose", "squeeze", "reshape", "broadcast_in_dim"):
        return None
    value, shape = values[equation.inputs[0]], values.shape(equation.inputs[0])
    axes: Axes | None
    if name == "transpose":
        axes = tuple(value.axes[axis] for axis in params["permutation"])
    elif name == "broadcast_in_dim":
        axes = maps.expanded(value.axes, shape, params["shape"], params["broadcast_dimensions"])
    elif name == "reshape" and params["dimensions"] is not None:
        axes = None
    else:
        axes = maps.reshaped(value.axes, shape, equation.equation.outvars[0].aval.shape)
    if axes is None:
        return None
    is_shared = values.readers(equation.inputs[0]) > 1  # then nothing may join the layer any more
    return Map(values.stored(value) if is_shared else value.source, axes)


def elementwise(values: Values, equation: Equation, axes: Axes, given: Mapping[int, jax.Array]) -> jax.Array:
    """An elementwise equation on [N, H, W, C] arrays, of which some are given."""
    operands: list[Any] = []
    for number in equation.inputs:
        is_plain = number not in given and not values.shape(number)
        operand = values.given(number) if is_plain else given.get(number, None)
        operands.append(values.like(number, axes) if operand is None else operand)
    if equations.is_relu(equation.equation):
        return jax.nn.relu(operands[0])
    (out,) = equations.bind(equation.equation, operands)
    result: jax.Array = out
    return result


def _fits(shape: Sequence[Any], axes: Axes) -> bool:
    """Whether a value of this shape may go with a map of these axes."""
    if not shape:
        return True
    return len(shape) == len(axes) and not any(
        axis is None and size != 1 for axis, size in zip(axes, shape, strict=True)
    )


def _reduced(values: Values, equation: Equation, axes: Axes) -> jax.Array | None:
    """A reduction whose result has its axes in the order in which they lie."""
    over = set(equation.equation.params["axes"])
    kept = [axis for index, axis in enumerate(axes) if index not in over]
    if any(axis is None for axis in kept) or kept != sorted(axis for axis in kept if axis is not None):
        return None
    gone = tuple(axis for axis in range(maps.RANK) if axis not in kept)
    (out,) = equations.bind(equation.equation, [values.stored(values[equation.inputs[0]])], axes=gone)
    result: jax.Array = out
    return result


def _concatenated(values: Values, equation: Equation, axes: Axes) -> Map | None:
    axis = axes[equation.equation.params["dimension"]]
    parts = [values.like(number, axes) for number in equation.inputs]
    known = [part for part in parts if part is not None]
    return None if axis is None or len(known) < len(parts) else Map(lax.concatenate(known, axis), axes)


def _sliced(values: Values, equation: Equation, axes: Axes) -> Map | None:
    stored, params = values.stored(values[equation.inputs[0]]), equation.equation.params
    sizes, strides = values.shape(equation.inputs[0]), params["strides"] or (1,) * len(axes)
    bounds = list(zip(params["start_indices"], params["limit_indices"], strides, strict=True))
    whole = [(0, size, 1) for size in sizes]
    cut = [None if bound == all_of else bound for bound, all_of in zip(bounds, whole, strict=True)]
    placed = maps.permuted(cut, axes, None)
    if placed is None:
        return None
    parts = [each or (0, size, 1) for each, size in zip(placed, stored.shape, strict=True)]
    starts, limits, steps = ([part[index] for part in parts] for index in range(3))
    return Map(lax.slice(stored, starts, limits, steps), axes)


def _padded(values: Values, equation: Equation, axes: Axes) -> Map | None:
    amounts = [pools.ints(amount) for amount in equation.equation.params["padding_config"]]
    config = maps.permuted(amounts, axes, (0, 0, 0))
    if config is None:
        return None
    return Map(lax.pad(values.stored(values[equation.inputs[0]]), values.given(equation.inputs[1]), config), axes)
