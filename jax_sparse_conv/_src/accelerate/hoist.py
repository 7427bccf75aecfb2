"""What of a program depends on weights alone, as a program of its own that runs once.

Batch norms folded into kernels, masks, casts, packed copies and transposed matrices are so computed when weights are
given, and not in every call.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex_core

from jax_sparse_conv._src.accelerate import equations
from jax_sparse_conv._src.fusion.jaxprs import Equation, FlatJaxpr

_GROWTH = 2  # bytes of a result over those of its operands: what repeats elements stays in the program


@dataclasses.dataclass(frozen=True, eq=False)
class Split:
    """A program in two parts.

    Attributes:
      once: closed jaxpr from fixed arguments to what the other part reads of them.
      every: closed jaxpr from that and the other arguments to the results.
    """

    once: Any
    every: Any


def split(closed: Any, fixed: Sequence[bool]) -> Split:
    """Part a closed jaxpr into what its fixed arguments alone decide and the rest."""
    given = [aval for aval, each in zip(closed.in_avals, fixed, strict=True) if each]
    others = [aval for aval, each in zip(closed.in_avals, fixed, strict=True) if not each]

    def once(*arguments: Any) -> list[Any]:
        left = iter(arguments)
        parts = _Parts(closed, [next(left) if each else None for each in fixed], fixed)
        values = parts.evaluated(parts.once, {})
        return [values[number] for number in parts.crossing]

    first = jax.make_jaxpr(once)(*given)

    def every(crossed: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
        left = iter(arguments)
        parts = _Parts(closed, [None if each else next(left) for each in fixed], fixed)
        values = parts.evaluated(parts.every, dict(zip(parts.crossing, crossed, strict=True)))
        return [values[number] for number in parts.flat.outputs]

    return Split(first, jax.make_jaxpr(every)(list(first.out_avals), others))


class _Parts:
    """The equations of both parts, and the values that go from one to the other, by number.

    What only shows an argument in another shape belongs to the second part, so that it needs no copy. What is computed
    of it is shown once: of such a view XLA may make a copy in each call, where axes of one element are among its axes.
    What repeats elements, or is made of constants, belongs to both parts, as far as they read it.
    """

    def __init__(self, closed: Any, arguments: Sequence[Any], fixed: Sequence[bool]) -> None:
        self.flat = equations.flattened(closed, arguments)
        given = {number for number, each in zip(self.flat.arguments, fixed, strict=True) if each}
        movable, kept = _of_weights(self.flat, given)
        shown = _shown(movable)
        moved = {id(equation) for equation in movable}
        needed = set(self.flat.outputs)
        self.every: list[Equation] = []
        for equation in reversed(self.flat.equations):
            is_computed = id(equation) in moved and kept.issuperset(equation.outputs)
            is_read = not needed.isdisjoint(equation.outputs)
            if id(equation) not in moved or (is_read and not (is_computed and shown.isdisjoint(equation.outputs))):
                self.every.insert(0, equation)
                needed.update(equation.inputs)
        self.crossing = sorted((needed & kept) - shown)
        self.once = equations.live(movable, self.crossing, lambda equation: equation.inputs)

    def evaluated(self, chosen: Sequence[Equation], given: dict[int, Any]) -> dict[int, Any]:
        """All values after these equations."""
        values = {**self.flat.known, **given}
        for equation in chosen:
            equations.evaluate(equation, values)
        return values


def is_view(equation: Any) -> bool:
    """Whether an equation gives its first operand another shape, and no more."""
    if equation.primitive.name == "custom_jvp_call":
        inner = equation.params["call_jaxpr"].jaxpr
        return not inner.eqns and len(inner.outvars) == 1 and inner.outvars[0] is inner.invars[0]
    if equation.primitive.name not in ("reshape", "squeeze", "broadcast_in_dim"):
        return False
    same_size = math.prod(equation.invars[0].aval.shape) == math.prod(equation.outvars[0].aval.shape)
    return (same_size and equation.params.get("dimensions") is None) or equation.primitive.name == "squeeze"


def evaluate(closed: Any, *arguments: Any) -> list[Any]:
    """The results of a closed jaxpr."""
    out = zip(jex_core.jaxpr_as_fun(closed)(*arguments), closed.out_avals, strict=True)
    return [value if isinstance(value, jax.Array) else jnp.asarray(value, aval.dtype) for value, aval in out]


def _of_weights(flat: FlatJaxpr, weights: set[int]) -> tuple[list[Equation], set[int]]:
    """The equations that may go to the first part, and which values are kept from call to call.

    Kept is what weights alone decide and what is not much larger than they are; so is what goes through such a value
    element by element, with constants or with what repeats weights.
    """
    found, kept = [], set(weights)
    repeated = {number for number, value in flat.known.items() if equations.is_scalar(value)}
    scalars = set(repeated)
    for equation in flat.equations:
        traced = equation.equation
        is_known = all(number in kept or number in repeated for number in equation.inputs)
        if traced.primitive.name.startswith("jsc_"):  # the report counts these calls
            continue
        if not is_known or not equations.may_move(traced) or not equations.has_known_sizes(traced):
            continue
        is_of_weights = not kept.isdisjoint(equation.inputs) and scalars.union(kept).issuperset(equation.inputs)
        if (is_of_weights and _is_small(traced)) or equations.is_like(equation, kept):
            kept.update(equation.outputs)
        elif equations.repeats(traced):
            repeated.update(equation.outputs)
        else:
            continue
        found.append(equation)
    return found, kept


def _is_small(equation: Any) -> bool:
    read = sum(equations.bytes_of(variable.aval) for variable in equation.invars)
    return sum(equations.bytes_of(variable.aval) for variable in equation.outvars) <= _GROWTH * read


def _shown(of_weights: Sequence[Equation]) -> set[int]:
    """Results of equations that only show an argument in another shape."""
    computed: set[int] = set()
    for equation in of_weights:
        if not is_view(equation.equation) or equation.inputs[0] in computed:
            computed.update(equation.outputs)
    return {number for equation in of_weights for number in equation.outputs} - computed
