"""The values of a function while it is walked: arrays, and feature maps in whatever order the function has their axes.

An array is as the function has it. A `Map` lies as [N, H, W, C], or is the result of a layer that is still pending.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_sparse_conv._src.accelerate import equations, maps
from jax_sparse_conv._src.accelerate.maps import Axes
from jax_sparse_conv._src.accelerate.pending import Pending
from jax_sparse_conv._src.accelerate.rows import Row
from jax_sparse_conv._src.fusion.jaxprs import Equation, FlatJaxpr


@dataclasses.dataclass(frozen=True, eq=False)
class Map:
    """A feature map, [N, H, W, C] in memory or still pending, and the axes that the function has."""

    source: jax.Array | Pending
    axes: Axes


class Values:
    """Values by number, with their shapes, their readers, and where they come from.

    Args:
      flat: the function.
      fixed: which of its known values depend on weights alone.
    """

    def __init__(self, flat: FlatJaxpr, fixed: set[int]) -> None:
        self._values: dict[int, Any] = dict(flat.known)
        self._fixed = set(fixed)
        self._constant: set[int] = set()  # arrays made of numbers alone, such as a mask or zeros
        self._readers = collections.Counter(number for each in flat.equations for number in each.inputs)
        self._readers.update(flat.outputs)
        self._types: dict[int, Any] = {}
        self._repeated: dict[int, tuple[int, Sequence[int]]] = {}  # by result of a broadcast: operand and dimensions
        self._moved: dict[tuple[int, Axes], jax.Array | None] = {}
        self._calls = 0
        self.padded: dict[int, tuple[int, Any]] = {}
        """By result of a pad with zeros: what was padded, and how."""
        self.positive: dict[int, int] = {}
        """By result of `x > 0`: x."""

    def __getitem__(self, number: int) -> Any:
        return self._values[number]

    def set(self, equation: Equation, results: Sequence[Any]) -> None:
        """The results of an equation."""
        self._values.update(zip(equation.outputs, results, strict=True))

    def replace(self, number: int, value: Map) -> None:
        """A value by an equal one."""
        self._values[number] = value

    def note(self, equation: Equation) -> None:
        """Remember an equation's types, and where its results come from."""
        traced, name = equation.equation, equation.equation.primitive.name
        self._types.update(zip(equation.inputs, (each.aval for each in traced.invars), strict=True))
        self._types.update(zip(equation.outputs, (each.aval for each in traced.outvars), strict=True))
        if equations.may_move(traced):
            if self._is_of_weights(equation):
                self._fixed.update(equation.outputs)
            elif equations.repeats(traced) and all(map(self._is_constant, equation.inputs)):
                self._constant.update(equation.outputs)
        if name == "broadcast_in_dim" and len(equation.inputs) == 1:
            self._repeated[equation.outputs[0]] = equation.inputs[0], traced.params["broadcast_dimensions"]
        elif name in ("pvary", "pcast"):
            self._repeated[equation.outputs[0]] = equation.inputs[0], range(len(self.shape(equation.inputs[0])))
        elif name == "pad" and self.is_zero(equation.inputs[1]):
            self.padded[equation.outputs[0]] = equation.inputs[0], traced.params["padding_config"]
        elif name in ("gt", "ge") and self.is_zero(equation.inputs[1]):
            self.positive[equation.outputs[0]] = equation.inputs[0]
        elif name == "lt" and self.is_zero(equation.inputs[0]):
            self.positive[equation.outputs[0]] = equation.inputs[1]

    # --- questions ---------------------------------------------------------------------------------------------------

    def type_of(self, number: int) -> Any:
        """As an abstract value."""
        return self._types[number]

    def shape(self, number: int) -> tuple[Any, ...]:
        """In the function's order of axes."""
        return tuple(self._types[number].shape)

    def readers(self, number: int) -> int:
        """How often equations and results read a value."""
        return self._readers[number]

    def is_weight(self, number: int) -> bool:
        """Whether a value depends on weights alone."""
        return number in self._fixed

    def is_number(self, number: int) -> bool:
        """Whether a value is a number that is known while tracing."""
        return equations.is_scalar(self._values.get(number))

    def is_fixed(self, number: int) -> bool:
        """Whether a value is the same in every call."""
        return self.is_weight(number) or self.is_number(number)

    def _is_constant(self, number: int) -> bool:
        return number in self._constant or self.is_number(number)

    def _is_of_weights(self, equation: Equation) -> bool:
        """Whether weights alone decide an equation's results, or weights element by element with constants."""
        if all(map(self.is_fixed, equation.inputs)):
            return any(map(self.is_weight, equation.inputs))
        is_known = all(self.is_weight(number) or self._is_constant(number) for number in equation.inputs)
        return is_known and equations.is_like(equation, self._fixed)

    def is_map(self, number: int) -> bool:
        """Whether a value is a `Map`."""
        return isinstance(self._values[number], Map)

    def is_zero(self, number: int) -> bool:
        """Whether a value is zero everywhere, known while tracing."""
        while number in self._repeated:
            number = self._repeated[number][0]
        return equations.is_zero(self._values.get(number))

    def pending(self, number: int) -> Pending | None:
        """The layer that a value is the result of, while it is pending."""
        value = self._values.get(number)
        source = value.source if isinstance(value, Map) else None
        return source if isinstance(source, Pending) and source.made is None else None

    # --- arrays ------------------------------------------------------------------------------------------------------

    def stored(self, value: Map) -> jax.Array:
        """A map as [N, H, W, C]."""
        return value.source.array(self.emitted) if isinstance(value.source, Pending) else value.source

    def given(self, number: int) -> Any:
        """A value in the function's order of axes."""
        value = self._values[number]
        return maps.as_given(self.stored(value), value.axes) if isinstance(value, Map) else value

    def like(self, number: int, axes: Axes) -> jax.Array | None:
        """A value as [N, H, W, C] beside a map with these axes; None where it has others."""
        value, shape = self._values[number], self.shape(number)
        if len(shape) != len(axes):
            return None
        if isinstance(value, Map) and maps.agree(value.axes, axes, shape):
            return self.stored(value)
        if (number, axes) not in self._moved:
            self._moved[number, axes] = maps.as_stored(jnp.asarray(self.given(number)), axes)
        return self._moved[number, axes]

    def channel_source(self, number: int, axes: Axes) -> int | None:
        """Whose elements, [K] or [1], go with the channels of a map with these axes in a value, else None."""
        shape = self.shape(number)
        if number in self._repeated and len(shape) == len(axes):
            operand, dimensions = self._repeated[number]
            places = tuple(axes[to] for to in dimensions)
            if maps.is_per_channel(self.shape(operand), places):
                return operand
        if len(shape) not in (0, len(axes)):
            return None
        return number if maps.is_per_channel(shape, axes[: len(shape)]) else None

    def per_channel(self, number: int, axes: Axes) -> jax.Array | None:
        """[K] or [1] of a value that goes with the channels of a map with these axes, else None."""
        source = self.channel_source(number, axes)
        return None if source is None or self.is_map(source) else jnp.asarray(self._values[source]).reshape(-1)

    def emitted(self, row: Row) -> None:
        """Number a call that is made."""
        row.call = self._calls
        self._calls += 1
