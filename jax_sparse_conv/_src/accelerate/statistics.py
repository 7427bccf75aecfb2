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

from jax_sparse_conv._src.accelerate import equations, maps, pending
from jax_sparse_conv._src.accelerate.pending import Pending
from jax_sparse_conv._src.accelerate.values import Map, Values
from jax_sparse_conv._src.fusion.jaxprs import Equation, FlatJaxpr
from jax_sparse_conv._src.primitive import channels, jax_internals

_SUM, _SQUARES, _SPREAD = range(3)  # as `channels.sums` has them
_RENAMES = ("broadcast_in_dim", "reshape", "squeeze")


class Norms:
    """The batch norms of a function: their sums, and what they do with their maps behind these."""

    def __init__(self, flat: FlatJaxpr) -> None:
        self._of_sum, self._widened = _of_function(flat), _widened(flat)

    def sum(self, values: Values, equation: Equation) -> jax.Array | None:
        """The result of an equation that is one of the sums; None where it is XLA's."""
        found = self._of_sum.get(equation.outputs[0]) if equation.outputs else None
        return None if found is None else found.value(values, equation.outputs[0])

    def start(self, values: Values, number: int, position: int) -> Pending | None:
        """A map whose sums were taken, or that map in their dtype, as what a scale and a shift may join."""
        root = self._widened.get(number, number)
        if all(each.x != root or each.made is None for each in self._of_sum.values()):
            return None
        return pending.of_map(values.stored(values[root]), values.type_of(number).dtype, position)


@dataclasses.dataclass
class _Statistics:
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
        """Of one of the sums; None where they are XLA's.

        Equations behind it read x as `channels.sums` gives it back, so that all of its cotangents meet in one pass.
        """
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


def _of_function(flat: FlatJaxpr) -> dict[int, _Statistics]:
    """By number of a sum: those of maps of which there is a mean and a variance."""
    finder = _Finder(flat)
    every: dict[tuple[int, tuple[int, ...]], _Statistics] = {}
    for equation in flat.equations:
        is_xlas = jax_internals.is_xlas(equation.equation, equation.callers)
        if equation.equation.primitive.name != "reduce_sum" or is_xlas:
            continue
        source, axes = finder.source(equation), tuple(equation.equation.params["axes"])
        dtype = equation.equation.outvars[0].aval.dtype
        if len(source.aval.shape) == maps.RANK and dtype == channels.dtype_of_sums(source.aval.dtype):
            each = every.setdefault((source.number, axes), _Statistics(source.number, axes))
            each.kinds[equation.outputs[0]] = source.kind
    found = [each for each in every.values() if len(set(each.kinds.values())) > 1]
    return {number: each for each in found for number in each.kinds}


def _widened(flat: FlatJaxpr) -> dict[int, int]:
    """By number of a map that was converted to the dtype of its sums: the map as it was."""
    finder = _Finder(flat)
    converted = (number for equation in flat.equations for number in equation.outputs if _is_conversion(equation))
    return {number: root for number in converted if (root := finder.root(number)) != number}


def _is_conversion(equation: Equation) -> bool:
    return equation.equation.primitive.name == "convert_element_type"


class _Finder:
    """What values of a function are made of."""

    def __init__(self, flat: FlatJaxpr) -> None:
        self._known = flat.known
        self._makers = {number: equation for equation in flat.equations for number in equation.outputs}

    def source(self, equation: Equation) -> _Source:
        """Of a sum."""
        number, aval, kind = equation.inputs[0], equation.equation.invars[0].aval, _SUM
        maker = self._makers.get(number)
        if maker is not None and _is_square(maker):
            number, aval, kind = maker.inputs[0], maker.equation.invars[0].aval, _SQUARES
            centered = self._makers.get(number)
            if centered is not None and self._is_centered(centered, tuple(equation.equation.params["axes"])):
                number, aval, kind = centered.inputs[0], centered.equation.invars[0].aval, _SPREAD
        root = self.root(number)
        return _Source(root, aval if root == number else self._makers[number].equation.invars[0].aval, kind)

    def root(self, number: int) -> int:
        """A value before it was converted to the dtype of its sums."""
        maker = self._makers.get(number)
        if maker is None or not _is_conversion(maker):
            return number
        before, after = maker.equation.invars[0].aval, maker.equation.outvars[0].aval
        is_widened = jnp.issubdtype(before.dtype, jnp.floating) and channels.dtype_of_sums(before.dtype) == after.dtype
        return maker.inputs[0] if is_widened else number

    def _is_centered(self, equation: Equation, axes: tuple[int, ...]) -> bool:
        """Whether an equation is `x - mean`, the mean over these axes at the place of the one that is left."""
        if equation.equation.primitive.name != "sub":
            return False
        x, mean = equation.inputs
        shape = equation.equation.invars[0].aval.shape
        divided, renames = self._without_renames(mean)
        if divided is None or divided.equation.primitive.name not in ("div", "mul"):
            return False
        factor = self._known.get(divided.inputs[1])
        summed, earlier = self._without_renames(divided.inputs[0])
        if summed is None or not equations.is_scalar(factor) or summed.equation.primitive.name != "reduce_sum":
            return False
        if self.root(summed.inputs[0]) != self.root(x) or tuple(summed.equation.params["axes"]) != axes:
            return False
        kept = [axis for axis in range(len(shape)) if axis not in axes]
        if len(kept) != 1 or _place_of_channels([*earlier, *renames]) != kept[0]:
            return False
        assert factor is not None
        pixels = float(factor) if divided.equation.primitive.name == "div" else 1 / float(factor or math.inf)
        return math.isclose(pixels, math.prod(shape[axis] for axis in axes), rel_tol=1e-6)

    def _without_renames(self, number: int) -> tuple[Equation | None, list[Equation]]:
        """What makes a value, and the equations behind it that only name axes, in order."""
        renames: list[Equation] = []
        maker = self._makers.get(number)
        while maker is not None and maker.equation.primitive.name in _RENAMES:
            renames.insert(0, maker)
            maker = self._makers.get(maker.inputs[0])
        return maker, renames


def _place_of_channels(renames: Sequence[Equation]) -> int | None:
    """Where equations that name axes put the only axis of [C]; None where that cannot be said."""
    place = 0
    for equation in renames:
        traced = equation.equation
        before, after = traced.invars[0].aval.shape, traced.outvars[0].aval.shape
        if traced.primitive.name == "broadcast_in_dim":
            place = traced.params["broadcast_dimensions"][place]
            continue
        is_alone = all(size == 1 for axis, size in enumerate(before) if axis != place)
        found = [axis for axis, size in enumerate(after) if size != 1]
        if not is_alone or len(found) != 1:
            return None
        place = found[0]
    return place


def _is_square(equation: Equation) -> bool:
    name, inputs = equation.equation.primitive.name, equation.inputs
    if name == "integer_pow":
        return bool(equation.equation.params["y"] == 2)
    return name == "square" or (name == "mul" and inputs[0] == inputs[1])
