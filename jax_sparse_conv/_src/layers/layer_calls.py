"""Watching sparse layers: calls recorded with their values, or operations run by an observer in their place."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import jax

from jax_sparse_conv._src.layers.calls import Call, Operands


@dataclasses.dataclass(frozen=True)
class LayerCall:
    """One call of a sparse layer, as `record_calls` keeps it.

    Attributes:
      layer: the layer that was called.
      inputs: its input, as given.
      residual: its residual, as given, or None.
      output: its result.
    """

    layer: Any
    inputs: jax.Array
    residual: jax.Array | None
    output: jax.Array


_calls: contextvars.ContextVar[list[LayerCall] | None] = contextvars.ContextVar("jax_sparse_conv_calls", default=None)


@contextlib.contextmanager
def record_calls() -> Iterator[list[LayerCall]]:
    """Collect every call of a sparse layer inside the `with` block, in order.

    Calls under `jax.jit` or another transformation have no values to keep and are left out.
    """
    calls: list[LayerCall] = []
    token = _calls.set(calls)
    try:
        yield calls
    finally:
        _calls.reset(token)


def recorded(layer: Any, inputs: Any, residual: Any, output: jax.Array) -> jax.Array:
    """`output`, noted down where `record_calls` is active."""
    calls = _calls.get()
    if calls is not None and not isinstance(output, jax.core.Tracer):
        calls.append(LayerCall(layer, inputs, residual, output))
    return output


# Runs an operation in a layer's place: (layer, call, operands, arguments) -> result.
Observer: TypeAlias = Callable[[Any, Call, Operands, Mapping[str, Any]], jax.Array]
_observer: contextvars.ContextVar[Observer | None] = contextvars.ContextVar("jax_sparse_conv_observer", default=None)


@contextlib.contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Inside the `with` block, `observer` runs every operation of every sparse layer."""
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


def observer() -> Observer | None:
    """The observer of the `with` block, if there is one."""
    return _observer.get()


def are_observed() -> bool:
    """Whether somebody records or runs every operation of every sparse layer, so that layers must not be joined."""
    return _calls.get() is not None or _observer.get() is not None
