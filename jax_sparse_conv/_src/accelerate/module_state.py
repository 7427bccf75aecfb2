"""What a function writes into nnx modules among its arguments, such as running statistics and counts of dropout's keys.

A trace is of copies of the arguments. What is written there is one more result of it, and is written into the arguments
when it has run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
from flax import nnx

from jax_sparse_conv._src.fusion.jaxprs import named_like

Written: TypeAlias = Mapping[int, Any]
"""Values by the number of their variable among those of the arguments."""


def with_written(function: Callable[..., Any]) -> Callable[..., tuple[Any, Written]]:
    """The function with what it wrote beside its result."""

    @named_like(function)
    def both(*args: Any, **kwargs: Any) -> tuple[Any, Written]:
        found = _variables(args, kwargs)
        given = [variable.get_raw_value() for variable in found]
        out = function(*args, **kwargs)
        now = [variable.get_raw_value() for variable in found]
        return out, {n: new for n, (old, new) in enumerate(zip(given, now, strict=True)) if new is not old}

    return both


def write(args: Any, kwargs: Any, written: Written) -> None:
    """Write into the modules of a call what the trace wrote into their copies.

    Raises:
      ValueError: a variable that the arguments hold several times, as layers with tied weights do: each has a copy.
      flax.errors.TraceContextError: a module is of another trace than the call.
    """
    found = _variables(args, kwargs)
    for number in written:
        if sum(each is found[number] for each in found) > 1:
            raise ValueError(
                f"the function writes into a {type(found[number]).__name__} that its arguments hold several times, of "
                "which accelerate makes copies; accelerate the loss alone, or nnx.split the module and merge it there"
            )
    for number, value in written.items():
        found[number].set_raw_value(value)


def _variables(args: Any, kwargs: Any) -> list[Any]:
    """The variables of arguments, in the order of their leaves."""
    leaves = jax.tree.leaves((args, kwargs), is_leaf=lambda each: isinstance(each, nnx.Variable))
    return [leaf for leaf in leaves if isinstance(leaf, nnx.Variable)]
