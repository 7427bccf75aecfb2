"""A program of weights evaluated by NumPy, which compiles nothing.

Folding the batch norms of a network takes thousands of small operations of different shapes. XLA compiles them for
longer than it compiles the network. NumPy has them done meanwhile. What it has no function for is JAX's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_sparse_conv._src.accelerate import equations

_Array = np.ndarray[Any, Any]
_CHOICES = 32  # of `np.choose`, and what chooses among them
_DTYPES = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint32", "bfloat16", "float16", "float32", "float64")


def evaluate(closed: Any, arguments: Sequence[jax.Array]) -> list[jax.Array]:
    """The results of a closed jaxpr, on the one device of its arguments."""
    device = next(iter(arguments[0].devices()))
    is_committed = any(argument.committed for argument in arguments)
    given = [np.asarray(argument) for argument in arguments]
    flat = equations.flattened(closed, given)
    values = dict(flat.known)
    with np.errstate(all="ignore"), jax.debug_nans(False), jax.debug_infs(False):  # as inside of one program of XLA
        for equation in flat.equations:
            operands = [values[number] for number in equation.inputs]
            values.update(zip(equation.outputs, results(equation.equation, operands), strict=True))
    own = dict(zip(flat.arguments, arguments, strict=True))

    def placed(number: int) -> jax.Array:
        if number in own:
            return own[number]
        if isinstance(values[number], jax.Array):  # a key
            return values[number]
        value = np.asarray(values[number])
        is_view = any(np.may_share_memory(value, array) for array in given)
        array = np.array(value, order="C", copy=True if is_view else None)
        with jax.default_device(device):
            return jax.device_put(array, device) if is_committed else jax.device_put(array)

    return [placed(number) for number in flat.outputs]


def suits(arguments: Sequence[Any]) -> bool:
    """Whether all arguments are whole on one device of this process, and of types that NumPy has."""
    if not arguments or any(isinstance(each, jax.core.Tracer) or not isinstance(each, jax.Array) for each in arguments):
        return False
    if not all(each.is_fully_addressable for each in arguments):
        return False
    if not all(jnp.issubdtype(each.dtype, jnp.number) or each.dtype == jnp.bool_ for each in arguments):
        return False
    return len({device for each in arguments for device in each.devices()}) == 1


def results(equation: Any, operands: Sequence[Any]) -> list[Any]:
    """What an equation makes of arrays of NumPy; keys stay JAX's."""
    name, params = equation.primitive.name, equation.params
    if _is_xlas(equation):
        name = ""
    if name in _FUNCTIONS:
        result = _FUNCTIONS[name](*operands)
    elif name in _WITH_PARAMETERS:
        result = _WITH_PARAMETERS[name](params, *operands)
    elif name == "custom_jvp_call":
        return _inner(params["call_jaxpr"], operands)
    else:
        values = equations.bind(equation, [jax.device_put(each) for each in operands])
        return [value if jnp.issubdtype(value.dtype, jax.dtypes.extended) else np.asarray(value) for value in values]
    return [np.asarray(result, equation.outvars[0].aval.dtype)]


def _is_xlas(equation: Any) -> bool:
    """Whether NumPy has other results, or none: it rounds integers down, and wraps what does not fit a type."""
    dtypes = [getattr(variable.aval, "dtype", None) for variable in (*equation.invars, *equation.outvars)]
    if not all(str(dtype) in _DTYPES for dtype in dtypes):
        return True
    name, is_exact = equation.primitive.name, [not jnp.issubdtype(str(dtype), jnp.inexact) for dtype in dtypes]
    if name == "convert_element_type":
        return is_exact[1] and not is_exact[0]
    if name == "select_n":
        return len(equation.invars) > _CHOICES
    return is_exact[-1] and name in ("div", "integer_pow")


def _inner(closed: Any, operands: Sequence[Any]) -> list[Any]:
    flat = equations.flattened(closed, operands)
    values = dict(flat.known)
    for equation in flat.equations:
        given = [values[number] for number in equation.inputs]
        values.update(zip(equation.outputs, results(equation.equation, given), strict=True))
    return [values[number] for number in flat.outputs]


def _broadcast(params: Any, x: Any, *_: Any) -> _Array:
    sizes = [1] * len(params["shape"])
    for place, size in zip(params["broadcast_dimensions"], np.shape(x), strict=True):
        sizes[place] = size
    return np.broadcast_to(np.reshape(x, sizes), params["shape"])


def _pad(params: Any, x: Any, value: Any) -> _Array:
    config = params["padding_config"]
    if any(low < 0 or high < 0 or interior for low, high, interior in config):
        return np.asarray(jax.lax.pad(x, np.asarray(value, x.dtype), config))
    return np.pad(x, [(low, high) for low, high, _ in config], constant_values=value)


def _reshape(params: Any, x: Any) -> _Array:
    moved = x if params["dimensions"] is None else np.transpose(x, params["dimensions"])
    return np.reshape(moved, params["new_sizes"])


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": np.abs,
    "add": np.add,
    "copy": np.asarray,
    "div": np.divide,
    "exp": np.exp,
    "is_finite": np.isfinite,
    "max": np.maximum,
    "min": np.minimum,
    "mul": np.multiply,
    "neg": np.negative,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "select_n": lambda which, *cases: np.choose(np.asarray(which, np.int32), cases),
    "sqrt": np.sqrt,
    "stop_gradient": np.asarray,
    "sub": np.subtract,
}
_WITH_PARAMETERS: dict[str, Callable[..., Any]] = {
    "broadcast_in_dim": _broadcast,
    "concatenate": lambda params, *parts: np.concatenate(parts, params["dimension"]),
    "convert_element_type": lambda params, x: np.asarray(x).astype(params["new_dtype"]),
    "integer_pow": lambda params, x: np.power(x, params["y"]),
    "pad": _pad,
    "reshape": _reshape,
    "slice": lambda params, x: x[
        tuple(map(slice, params["start_indices"], params["limit_indices"], params["strides"] or (None,) * x.ndim))
    ],
    "squeeze": lambda params, x: np.squeeze(x, params["dimensions"]),
    "transpose": lambda params, x: np.transpose(x, params["permutation"]),
}
