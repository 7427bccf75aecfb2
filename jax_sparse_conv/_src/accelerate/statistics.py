"""The sums that a batch norm in training takes of its map, found in a function's equations.

Flax and Haiku have a mean of x and one of x * x, Keras and `jnp.var` one of (x - mean)^2, over all axes but that of
channels. All are one call of `channels.sums`, and scale, shift, residual and ReLU behind it one of `channels.affine`
(`pending.Norm`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_sparse_conv._src.accelerate import equations, maps
from jax_sparse_conv._src.accelerate.values import Map, Values
from jax_sparse_conv._src.fusion.jaxprs import Equation, FlatJaxpr
from jax_sparse_conv._src.primitive import channels, jax_internals

_SUM, _SQUARES, _SPREAD = range(3)  # as `channels.sums` has them
_RENAMES = ("broadcast_in_dim", "reshape", "squeeze")


@dataclasses.dataclass
class Statistics:
    """Sums of one map.

    Attributes:
      x: the map, by number.
      axes: that are summed over.
      kinds: by number of a sum, which it is.
      made: their values, once one was asked for.
    """

    x: int
    axes: tuple[int, ...]
    kinds: dict[int, int] = dataclasses.field(default_factory=dict)
    made: list[jax.Array] | None = None

    def value(self, values: Values, number: int) -> jax.Array | None:
        """Of one of the sums; None where they are XLA's. From here on x is the one that adds up cotangents."""
        if self.made is None:
            if not self._is_taken(values):
                return None
            x, *self.made = channels.sums(values.stored(values[self.x]))
            values.replace(self.x, Map(x, values[self.x].axes))
        return self.made[self.kinds[number]]

    def _is_taken(self, values: Values) -> bool:
        if not values.is_map(self.x):
            return False
        axes = values[self.x].axes
        kept = [axis for place, axis in enumerate(axes) if place not in self.axes]
        return len(axes) == maps.RANK and kept == [maps.CHANNELS] and channels.takes(values.stored(values[self.x]))


class _Source(NamedTuple):
    """What a sum is of: a map, by number, its dtype, and the kind of sum."""

    number: int
    aval: Any
    kind: int


def of_function(flat: FlatJaxpr) -> dict[int, Statistics]:
    """By number of a sum: those of maps of which there is a mean and a variance."""
    makers = {number: equation for equation in flat.equations for number in equation.outputs}
    every: dict[tuple[int, tuple[int, ...]], Statistics] = {}
    for equation in flat.equations:
        if equation.equation.primitive.name != "reduce_sum" or jax_internals.is_xlas(
            equation.equation, equation.callers
        ):
            continue
        source, axes = _source(flat, makers, equation), tuple(equation.equation.params["axes"])
        dtype = equation.equation.outvars[0].aval.dtype
        if len(source.aval.shape) == maps.RANK and dtype == channels.dtype_of_sums(source.aval.dtype):
            each = every.setdefault((source.number, axes), Statistics(source.number, axes))
            each.kinds[equation.outputs[0]] = source.kind
    found = [each for each in every.values() if len(set(each.kinds.values())) > 1]
    return {number: each for each in found for number in each.kinds}


def _source(flat: FlatJaxpr, makers: dict[int, Equation], equation: Equation) -> _Source:
    number, aval, kind = equation.inputs[0], equation.equation.invars[0].aval, _SUM
    maker = makers.get(number)
    if maker is not None and _is_square(maker):
        number, aval, kind = maker.inputs[0], maker.equation.invars[0].aval, _SQUARES
        maker = makers.get(number)
        if maker is not None and _is_centered(flat, makers, maker, equation.equation.params["axes"]):
            return _Source(maker.inputs[0], maker.equation.invars[0].aval, _SPREAD)
    if maker is not None and maker.equation.primitive.name == "convert_element_type":
        inner = maker.equation.invars[0].aval
        if jnp.issubdtype(inner.dtype, jnp.floating) and channels.dtype_of_sums(inner.dtype) == aval.dtype:
            return _Source(maker.inputs[0], inner, kind)
    return _Source(number, aval, kind)


def _is_square(equation: Equation) -> bool:
    name, inputs = equation.equation.primitive.name, equation.inputs
    if name == "integer_pow":
        return bool(equation.equation.params["y"] == 2)
    return name == "square" or (name == "mul" and inputs[0] == inputs[1])


def _is_centered(flat: FlatJaxpr, makers: dict[int, Equation], equation: Equation, axes: Sequence[int]) -> bool:
    """Whether an equation is `x - mean`, the mean over these axes."""
    if equation.equation.primitive.name != "sub":
        return False
    x, mean = equation.inputs
    divided = _without_renames(makers, mean)
    if divided is None or divided.equation.primitive.name not in ("div", "mul"):
        return False
    factor = flat.known.get(divided.inputs[1])
    summed = _without_renames(makers, divided.inputs[0])
    if summed is None or not equations.is_scalar(factor) or summed.equation.primitive.name != "reduce_sum":
        return False
    if summed.inputs[0] != x or tuple(summed.equation.params["axes"]) != tuple(axes):
        return False
    shape = equation.equation.invars[0].aval.shape
    assert factor is not None
    pixels = float(factor) if divided.equation.primitive.name == "div" else 1 / float(factor or math.inf)
    return math.isclose(pixels, math.prod(shape[axis] for axis in axes), rel_tol=1e-6)


def _without_renames(makers: dict[int, Equation], number: int) -> Equation | None:
    """What makes a value, but for equations that only name its axes."""
    maker = makers.get(number)
    while maker is not None and maker.equation.primitive.name in _RENAMES:
        maker = makers.get(maker.inputs[0])
    return maker
