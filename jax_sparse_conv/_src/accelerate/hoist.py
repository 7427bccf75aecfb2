"""What of a program depends on weights alone, as a program of its own that runs once.

Batch norms folded into kernels, casts, packed copies and transposed matrices are so computed when weights are given,
and not in every call.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core as jex_core

from jax_sparse_conv._src.accelerate import equations
from jax_sparse_conv._src.fusion.jaxprs import FlatJaxpr

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
    crossing: list[int] = []

    def placed(arguments: Sequence[Any]) -> tuple[FlatJaxpr, set[int]]:
        flat = equations.flattened(closed, arguments)
        return flat, {number for number, each in zip(flat.arguments, fixed, strict=True) if each}

    def once(*arguments: Any) -> list[Any]:
        left = iter(arguments)
        flat, known = placed([next(left) if each else None for each in fixed])
        values, readers = dict(flat.known), set(flat.outputs)
        for equation in flat.equations:
            if _is_of_weights(equation, known, values):
                values.update(
                    zip(equation.outputs, equations.bind(equation.equation, _read(equation, values)), strict=True)
                )
                known.update(equation.outputs)
            else:
                readers.update(equation.inputs)
        crossing[:] = sorted(number for number in known if number in readers)
        return [values[number] for number in crossing]

    first = jax.make_jaxpr(once)(*given)

    def every(crossed: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
        left = iter(arguments)
        flat, known = placed([None if each else next(left) for each in fixed])
        values = {**flat.known, **dict(zip(crossing, crossed, strict=True))}
        for equation in flat.equations:
            if _is_of_weights(equation, known, values):
                known.update(equation.outputs)
            else:
                values.update(
                    zip(equation.outputs, equations.bind(equation.equation, _read(equation, values)), strict=True)
                )
        return [values[number] for number in flat.outputs]

    return Split(first, jax.make_jaxpr(every)(list(first.out_avals), others))


def evaluate(closed: Any, *arguments: Any) -> list[Any]:
    """The results of a closed jaxpr."""
    out: list[Any] = jex_core.jaxpr_as_fun(closed)(*arguments)
    return out


def _read(equation: Any, values: dict[int, Any]) -> list[Any]:
    return [values[number] for number in equation.inputs]


def _is_of_weights(equation: Any, known: set[int], values: dict[int, Any]) -> bool:
    """Whether weights alone decide an equation's results, which are not much larger than what it reads."""
    traced = equation.equation
    if not equations.may_move(traced) or not any(number in known for number in equation.inputs):
        return False
    if not all(number in known or equations.is_scalar(values.get(number)) for number in equation.inputs):
        return False
    read = sum(_bytes(variable.aval) for variable in traced.invars)
    return sum(_bytes(variable.aval) for variable in traced.outvars) <= _GROWTH * read


def _bytes(aval: Any) -> int:
    return math.prod(aval.shape) * getattr(aval.dtype, "itemsize", 1) if hasattr(aval, "shape") else 0
