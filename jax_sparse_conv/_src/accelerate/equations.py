"""A function's jaxpr as one list of equations, without dead ones, and the jaxprs inside of the others."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core

from jax_sparse_conv._src.fusion import dense_blocks
from jax_sparse_conv._src.fusion.jaxprs import MICRO_BATCHES, Equation, FlatJaxpr, called, taken_apart
from jax_sparse_conv._src.primitive import jax_internals, primitives

_LAYERS = ("conv_general_dilated", "dot_general", primitives.conv_p.name)
CALLS = {
    **dict.fromkeys(("jit", "pjit", "checkpoint", "remat2", MICRO_BATCHES), "jaxpr"),
    **dict.fromkeys(("closed_call", "custom_jvp_call", "custom_vjp_call"), "call_jaxpr"),
}
"""What calls a jaxpr once: the parameter that holds it."""
# fmt: off
ELEMENTWISE = frozenset((
    "abs", "add", "and", "cbrt", "ceil", "clamp", "convert_element_type", "copy", "cos", "div", "eq", "erf",
    "exp", "exp2", "expm1", "floor", "ge", "gt", "integer_pow", "is_finite", "le", "log", "log1p", "logistic",
    "lt", "max", "min", "mul", "ne", "neg", "not", "or", "pow", "reduce_precision", "rem", "round", "rsqrt",
    "select_n", "sign", "sin", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh",
))
# fmt: on
"""Names of primitives whose results have the shape of their operands, element by element."""
_REPEATS = ELEMENTWISE | {"broadcast_in_dim", "iota", "reshape", "squeeze"}
_OF_64_BITS = (np.float64, np.int64, np.uint64, np.complex128)
# Where convolutions inside may be rewritten.
_BODIES = {"scan": "jaxpr", "while": "body_jaxpr", "cond": "branches", **CALLS}


def flattened(jaxpr: Any, arguments: Sequence[Any], inner: Callable[[Any], Any] = called) -> FlatJaxpr:
    """All calls inlined, what is computed of numbers known, and equations whose results nothing reads dropped.

    `inner` is as in `FlatJaxpr`.
    """
    flat = FlatJaxpr(jaxpr, arguments, inner)
    flat.equations = [each for each in flat.equations if not _is_folded(each, flat.known)]
    flat.equations = live(flat.equations, flat.outputs, lambda equation: equation.inputs)
    return flat


def live(
    every: Sequence[Equation], outputs: Sequence[int], reads: Callable[[Equation], Sequence[int]]
) -> list[Equation]:
    """The equations that the outputs need or that have effects, in order, where each reads what `reads` says."""
    needed, kept = set(outputs), []
    for equation in reversed(every):
        if equation.equation.effects or needed.intersection(equation.outputs):
            needed.update(reads(equation))
            kept.append(equation)
    return kept[::-1]


def apart(equation: Any) -> Any:
    """As `called`, for a function that is not rewritten yet: its dense blocks are layers, like any others."""
    if equation.primitive is dense_blocks.dense_block_p and not equation.params["must"]:
        return taken_apart(equation, dense_blocks.separate, ("precision", "packed"))
    return called(equation)


def _is_folded(equation: Equation, known: dict[int, Any]) -> bool:
    """Whether an equation makes numbers of numbers that are known while tracing, which are known then."""
    traced = equation.equation
    are_numbers = all(is_scalar(known.get(number)) for number in equation.inputs)
    if not equation.inputs or not are_numbers or not may_move(traced):
        return False
    types = [variable.aval for variable in traced.outvars]
    if not all(getattr(each, "shape", None) == () and jnp.issubdtype(each.dtype, jnp.number) for each in types):
        return False
    with jax.ensure_compile_time_eval():
        values = bind(traced, [known[number] for number in equation.inputs])
    known.update(zip(equation.outputs, (np.asarray(value)[()] for value in values), strict=True))
    return True


def bind(equation: Any, operands: Sequence[Any], **changes: Any) -> list[Any]:
    """Evaluate an equation, with some of its parameters changed."""
    params = {**equation.params, **changes}
    with equation.ctx.manager, jax_internals.as_from(equation):
        out = equation.primitive.bind(*operands, **equation.primitive.get_bind_params(params))
    return list(out) if equation.primitive.multiple_results else [out]


def evaluate(equation: Equation, values: dict[int, Any]) -> None:
    """Evaluate an equation of values by number, among which its results then are."""
    results = bind(equation.equation, [values[number] for number in equation.inputs])
    values.update(zip(equation.outputs, results, strict=True))


def bytes_of(aval: Any) -> int:
    """Of a value of that type; 0 of what is no array."""
    return math.prod(aval.shape) * getattr(aval.dtype, "itemsize", 1) if hasattr(aval, "shape") else 0


def with_bodies(equation: Any, change: Callable[[Any], Any]) -> dict[str, Any]:
    """Changed parameters of an equation that has jaxprs with layers inside; empty where there are none.

    `change` makes a closed jaxpr of one; what has other types of results than before, or needs constants that there is
    no place for, stays.
    """
    name = _BODIES.get(equation.primitive.name)
    if name is None or name not in equation.params:
        return {}
    given = equation.params[name]
    if isinstance(given, (tuple, list)):
        bodies = [_changed(body, change) for body in given]
        is_changed = any(new is not old for new, old in zip(bodies, given, strict=True))
        return {name: type(given)(bodies)} if is_changed else {}
    body = _changed(given, change)
    return {} if body is given else {name: body}


def _changed(body: Any, change: Callable[[Any], Any]) -> Any:
    is_closed = hasattr(body, "consts")
    closed = body if is_closed else jex_core.ClosedJaxpr(body, ())
    if not any(_layers(closed.jaxpr)):
        return body
    found = change(closed)
    if [_type(aval) for aval in found.out_avals] != [_type(aval) for aval in closed.out_avals]:
        return body
    if is_closed:
        return found
    return body if found.consts else found.jaxpr


def _type(aval: Any) -> tuple[Any, ...]:
    return (aval.shape, aval.dtype) if hasattr(aval, "shape") else (aval,)


def out_of_reach(equation: Any) -> list[Any]:
    """lax's convolutions inside of an equation whose body is not rewritten, such as `shard_map`'s."""
    found = () if equation.primitive.name in _BODIES else _inside(equation)
    return [each for each in found if each.primitive.name == "conv_general_dilated"]


def _layers(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        if equation.primitive.name in _LAYERS:
            yield equation
        yield from _inside(equation)


def _inside(equation: Any) -> Iterator[Any]:
    for inner in _jaxprs(equation):
        yield from _layers(inner)


def _jaxprs(equation: Any) -> Iterator[Any]:
    """Of an equation's parameters."""
    for value in equation.params.values():
        for each in value if isinstance(value, (tuple, list)) else (value,):
            inner = getattr(each, "jaxpr", each)
            if hasattr(inner, "eqns"):
                yield inner


def has_hidden_64_bits(jaxpr: Any) -> bool:
    """Whether values of a jaxpr have 64 bits, which `jax.enable_x64` is on for only inside of it."""
    return jax.dtypes.canonicalize_dtype(np.float64) != np.float64 and _has_64_bits(jaxpr)


def _has_64_bits(jaxpr: Any) -> bool:
    made = itertools.chain.from_iterable(equation.outvars for equation in jaxpr.eqns)
    dtypes = (getattr(variable.aval, "dtype", None) for variable in (*jaxpr.constvars, *jaxpr.invars, *made))
    if any(dtype in _OF_64_BITS for dtype in dtypes):
        return True
    return any(_has_64_bits(inner) for equation in jaxpr.eqns for inner in _jaxprs(equation))


def may_move(equation: Any) -> bool:
    """Whether an equation may be evaluated elsewhere: it has no effects and names no axis of a mesh or of `vmap`."""
    if equation.primitive.name == "shard_map":  # the names are inside
        return False
    names = (equation.params.get(key, ()) for key in ("axes", "axis_name"))
    flat = [name for each in names for name in (each if isinstance(each, (tuple, list)) else (each,))]
    return not equation.effects and all(isinstance(name, (int, np.integer)) for name in flat)


def repeats(equation: Any) -> bool:
    """Whether an equation makes an array of known sizes that is no smaller than its operands, such as a mask of one."""
    return equation.primitive.name in _REPEATS and has_known_sizes(equation)


def has_known_sizes(equation: Any) -> bool:
    """Whether no operand and no result has a symbolic size."""
    avals = (variable.aval for variable in (*equation.invars, *equation.outvars))
    return all(isinstance(size, int) for aval in avals for size in getattr(aval, "shape", ()))


def is_like(equation: Equation, numbers: Container[int]) -> bool:
    """Whether an equation goes through one of these values element by element."""
    traced = equation.equation
    if traced.primitive.name not in ELEMENTWISE:
        return False
    operands = zip(equation.inputs, traced.invars, strict=True)
    return any(number in numbers and each.aval.shape == traced.outvars[0].aval.shape for number, each in operands)


def is_relu(equation: Any) -> bool:
    """Whether a call with a derivative of its own is `jax.nn.relu`, by what it computes."""
    if equation.primitive.name != "custom_jvp_call" or len(equation.invars) != 1:
        return False
    flat = FlatJaxpr(equation.params["call_jaxpr"], [None], called)
    if not jax_internals.is_of_jax_nn(equation.params["call_jaxpr"]):
        return False  # a derivative of the user's own
    if len(flat.equations) != 1 or flat.equations[0].equation.primitive.name != "max":
        return False
    known = [flat.known.get(number) for number in flat.equations[0].inputs]
    return flat.outputs == flat.equations[0].outputs and any(is_zero(value) for value in known)


def is_zero(value: Any) -> bool:
    """Whether a value is known while tracing, and zero."""
    return is_scalar(value) and bool(value == 0)


def is_scalar(value: Any) -> bool:
    """Whether a value is a number that is known while tracing."""
    if value is None or isinstance(value, (jax.core.Tracer, jax.Array)):
        return False
    if np.ndim(value) != 0:
        return False
    dtype = np.asarray(value).dtype
    return bool(jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer))
