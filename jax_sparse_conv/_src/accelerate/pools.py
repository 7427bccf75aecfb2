"""Pools on feature maps as they lie, and the gradients of max pools in a function that differentiates by itself.

A max pool is `max_pool.pool`, whose derivatives are fast on a CPU. What that does not take stays the equation it was.
"""

from __future__ import annotations

from typing import Any

import jax

from jax_sparse_conv._src.accelerate import equations, maps
from jax_sparse_conv._src.accelerate.maps import Axes
from jax_sparse_conv._src.accelerate.values import Map, Values
from jax_sparse_conv._src.fusion.jaxprs import Equation
from jax_sparse_conv._src.primitive import explicit, jax_internals, max_pool, reference
from jax_sparse_conv._src.problem import geometry as geo
from jax_sparse_conv._src.problem.geometry import Pool

KINDS = {"reduce_window_max": "max", "reduce_window_sum": "sum", "reduce_window_min": "min"}
GRADIENT = "select_and_scatter_add"
_FILLS = {"window_dimensions": 1, "window_strides": 1, "base_dilation": 1, "window_dilation": 1, "padding": (0, 0)}
_OUTER = (maps.IMAGES, maps.CHANNELS)


def pool(equation: Equation, axes: Axes, y: jax.Array) -> jax.Array:
    """A pool on [N, H, W, C], whose parameters all have a place there."""
    spec = _max_pool_of(equation, axes, y) if KINDS[equation.equation.primitive.name] == "max" else None
    if spec is not None:
        return max_pool.pool(y, spec)
    given = params(equation, axes)

    def reduce(y: jax.Array, padding: Any) -> jax.Array:
        (out,) = equations.bind(equation.equation, [y], **{**given, "padding": padding})
        result: jax.Array = out
        return result

    found = None if _is_xlas(equation) or KINDS[equation.equation.primitive.name] != "sum" else spec_of(given)
    if found is None:
        return reduce(y, given["padding"])
    return reference.reduce_window(y, 0, Pool("avg", *found), lambda y, pads: reduce(y, ((0, 0), *pads, (0, 0))))


def gradient(values: Values, equation: Equation, axes: Axes) -> Map | None:
    """That of a max pool from its cotangent and operand, or None where it is to stay as it is."""
    cotangent, x = (values.like(number, axes) for number in equation.inputs)
    if cotangent is None or x is None or equation.equation.params["select_prim"].name != "ge":
        return None
    spec = _max_pool_of(equation, axes, x)
    if spec is None or cotangent.dtype != x.dtype:
        return None
    return Map(max_pool.gradient(x, cotangent, spec), axes)


def plain(values: Values, equation: Equation) -> jax.Array | None:
    """A max pool or the gradient of one, of arrays [N, H, W, C] that are no maps; None for everything else."""
    name = equation.equation.primitive.name
    if name not in ("reduce_window_max", GRADIENT) or len(values.shape(equation.inputs[0])) != maps.RANK:
        return None
    if name == GRADIENT:
        found = gradient(values, equation, maps.STORED)
        return None if found is None else values.stored(found)
    y = values.given(equation.inputs[0])
    return None if _max_pool_of(equation, maps.STORED, y) is None else pool(equation, maps.STORED, y)


def params(equation: Equation, axes: Axes) -> dict[str, Any]:
    """A pool's parameters for [N, H, W, C]; None for what is said of an axis without a place."""
    given = equation.equation.params

    def known(value: Any) -> Any:
        return ints(value) if isinstance(value, tuple) else int(value)

    names = (name for name in _FILLS if name in given)
    return {name: maps.permuted([known(v) for v in given[name]], axes, _FILLS[name]) for name in names}


def spec_of(found: dict[str, Any]) -> tuple[Any, Any, Any] | None:
    """Window, strides and padding of height and width; None of a pool of other axes, or of pixels apart."""
    if any(values is None for values in found.values()):
        return None
    window, strides, padding = (found[name] for name in ("window_dimensions", "window_strides", "padding"))
    if any(size != 1 for name in ("base_dilation", "window_dilation") for size in found.get(name, ())):
        return None
    if any((window[axis], strides[axis], padding[axis]) != (1, 1, (0, 0)) for axis in _OUTER):
        return None
    return window[1:3], strides[1:3], padding[1:3]


def ints(values: Any) -> Any:
    """As Python's, but for sizes that are not known yet."""
    return tuple(value if geo.is_symbolic(value) else int(value) for value in values)


def _max_pool_of(equation: Equation, axes: Axes, y: Any) -> Pool | None:
    """The max pool that an equation computes or differentiates, where `max_pool` takes it."""
    found = None if _is_xlas(equation) else spec_of(params(equation, axes))
    if found is None or explicit.has_split_pixels(y):
        return None
    spec = Pool("max", *found)
    return spec if max_pool.takes(y, spec) else None


def _is_xlas(equation: Equation) -> bool:
    return jax_internals.is_xlas(equation.equation, equation.callers)
