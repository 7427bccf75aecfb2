"""A traced function as one list of equations: calls that hold convolutions are inlined. `rewrite` evaluates it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex_core

from jax_sparse_conv._src.fusion import chains
from jax_sparse_conv._src.primitive import primitives

MICRO_BATCHES = "jsc_micro_batches"
"""The call of a program that a CPU runs in micro-batches (`accelerate.micro_batches`); `jaxpr` has the batch as one."""


def named_like(function: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates what is traced in a function's place: errors of the trace name that function and its file."""
    while isinstance(function, functools.partial):
        function = function.func
    return functools.wraps(function, assigned=("__name__",), updated=())


def traced(function: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, list[Any], Any]:
    """The trace of a call as a closed jaxpr of the arrays among its arguments, these, and how its results are nested.

    Other leaves are taken as they are. A `jax.ShapeDtypeStruct` stands for an array.
    """
    leaves, tree = jax.tree.flatten((args, kwargs))
    kinds = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, kinds)]

    @named_like(function)
    def of_arrays(*arrays: Any) -> Any:
        filled = list(leaves)
        for place, array in zip(places, arrays, strict=True):
            filled[place] = array
        positional, named = jax.tree.unflatten(tree, filled)
        return function(*positional, **named)

    arrays = [leaves[place] for place in places]
    closed, shape = jax.make_jaxpr(of_arrays, return_shape=True)(*arrays)
    return closed, arrays, jax.tree.structure(shape)


@dataclasses.dataclass
class Equation:
    """An equation whose operands and results are numbers of values in one table, calls inlined.

    Attributes:
      equation: of a jaxpr.
      inputs: operands.
      outputs: results.
      callers: the calls that it was in, the innermost first.
    """

    equation: Any
    inputs: list[int]
    outputs: list[int]
    callers: tuple[Any, ...] = ()


class FlatJaxpr:
    """A jaxpr without calls that hold convolutions, and the values that are known from the start.

    Args:
      jaxpr: closed.
      arguments: its values, one each.
      inner: the closed jaxpr of an equation that is to be inlined, or None.
    """

    def __init__(self, jaxpr: Any, arguments: Sequence[Any], inner: Callable[[Any], Any] | None = None) -> None:
        self.known: dict[int, Any] = {}
        self._inner = _inner if inner is None else inner
        self.equations: list[Equation] = []
        self._next = 0
        constants = [self._know(value) for value in jaxpr.consts]
        self.arguments = [self._know(value) for value in arguments]
        self.outputs = self._inline(jaxpr.jaxpr, constants, self.arguments)

    def _new(self) -> int:
        self._next += 1
        return self._next

    def _know(self, value: Any) -> int:
        number = self._new()
        self.known[number] = value
        return number

    def _inline(
        self, jaxpr: Any, constants: Sequence[int], arguments: Sequence[int], callers: tuple[Any, ...] = ()
    ) -> list[int]:
        numbers: dict[Any, int] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *arguments], strict=True))

        def read(variable: Any) -> int:
            is_literal = isinstance(variable, jex_core.Literal)
            return self._know(variable.val) if is_literal else numbers[variable]

        for equation in jaxpr.eqns:
            inputs = [read(variable) for variable in equation.invars]
            inner = self._inner(equation)
            if inner is not None:
                known = [self._know(value) for value in inner.consts]
                outputs = self._inline(inner.jaxpr, known, inputs, (equation, *callers))
            else:
                outputs = [self._new() for _ in equation.outvars]
                self.equations.append(Equation(equation, inputs, outputs, callers))
            numbers.update(zip(equation.outvars, outputs, strict=True))
        return [read(variable) for variable in jaxpr.outvars]


def _inner(equation: Any) -> Any:
    """The jaxpr of a call that may be inlined because convolutions are in it, or None."""
    inner = called(equation)
    return inner if inner is not None and any(_convolutions(inner.jaxpr)) else None


def taken_apart(equation: Any, meaning: Callable[..., Any], params: Sequence[str]) -> Any:
    """What an equation means, as a closed jaxpr of its operands: a function of these and of some of its parameters."""
    operands = [jax.ShapeDtypeStruct(each.aval.shape, each.aval.dtype) for each in equation.invars]
    return jax.make_jaxpr(functools.partial(meaning, **{name: equation.params[name] for name in params}))(*operands)


def called(equation: Any) -> Any:
    """The closed jaxpr of a call that may be inlined, or None: of `jit` without shardings, and the like.

    A fused chain that a network has made by itself is taken apart again, so that what the user asks for decides.
    """
    if equation.primitive is chains.fused_chain_p and equation.params["chosen"]:
        return taken_apart(equation, chains.separate, ("layers", "results", "packed"))
    if equation.primitive.name not in ("jit", "pjit", "closed_call", "core_call", MICRO_BATCHES):
        return None
    return closed_of(equation, "jaxpr" if "jaxpr" in equation.params else "call_jaxpr")


def closed_of(equation: Any, name: str) -> Any:
    """The closed jaxpr that a parameter of a call has, or None: where there is none, and where it says shardings."""
    inner = equation.params.get(name)
    shardings = (*equation.params.get("in_shardings", ()), *equation.params.get("out_shardings", ()))
    if inner is None or any(type(each).__name__ != "UnspecifiedValue" for each in shardings):
        return None
    return inner if hasattr(inner, "consts") else jex_core.ClosedJaxpr(inner, ())


def _convolutions(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        if equation.primitive is primitives.conv_p:
            yield equation
        elif (inner := _inner(equation)) is not None:
            yield from _convolutions(inner.jaxpr)


def last_uses(jaxpr: FlatJaxpr) -> dict[int, int]:
    """By value, the last equation that reads it; results are read after all."""
    uses = {number: index for index, equation in enumerate(jaxpr.equations) for number in equation.inputs}
    return uses | {number: len(jaxpr.equations) for number in jaxpr.outputs}
