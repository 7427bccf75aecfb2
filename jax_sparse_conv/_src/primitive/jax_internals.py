"""What primitives need of JAX and what it has no public name for."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from jax._src import ad_checkpoint, checkify, config, core, dispatch, source_info_util
from jax.experimental import jet
from jax.extend import core as jex_core

XLAS = "jsc_xla"
"""In the names of equations that a user has asked XLA to run."""
_LIBRARIES = frozenset(("site-packages", "dist-packages"))  # folders
_OWN = Path(__file__).parents[2]
_OWN_LAYERS = (str(_OWN / "_src") + os.sep, str(_OWN / "nnx") + os.sep, str(_OWN / "linen.py"))


def needs_devices(primitive: jex_core.Primitive) -> None:
    """Have lowerings of `primitive` know how many devices they are for."""
    dispatch.prim_requires_devices_during_lowering.add(primitive)


def runs_alone(primitive: jex_core.Primitive) -> None:
    """Have `primitive` run outside of `jit` as JAX's own do: compiled, `jax.disable_jit` or not."""
    primitive.def_impl(functools.partial(dispatch.apply_primitive, primitive))


def checks_nans(primitive: jex_core.Primitive) -> None:
    """Have `checkify.float_checks` look for NaN in what `primitive` returns, as it does for JAX's own."""
    checkify.error_checks[primitive] = functools.partial(checkify.nan_error_check, primitive)


def checks_inside(primitive: jex_core.Primitive, name: str) -> None:
    """Have `checkify` look into the closed jaxpr that `primitive` computes, its parameter `name`, as into a `jit`."""

    def rule(*arguments: Any, **params: Any) -> Any:
        closed = params[name]
        (call,) = jax.make_jaxpr(jax.jit(jex_core.jaxpr_as_fun(closed)))(*closed.in_avals).eqns
        return checkify.error_checks[call.primitive](*arguments, **call.params)

    checkify.error_checks[primitive] = rule


def has_taylor(primitive: jex_core.Primitive, rule: Callable[..., Any]) -> None:
    """Have `jax.experimental.jet` take a rule for `primitive`: of primals, series and parameters."""
    jet.jet_rules[primitive] = rule


def _taylor_of_name(primals_in: Any, series_in: Any, **params: Any) -> Any:
    return ad_checkpoint.name_p.bind(*primals_in, **params), series_in[0]


# `checkpoint_name`, which derivatives have, lacks one in JAX.
jet.jet_rules.setdefault(ad_checkpoint.name_p, _taylor_of_name)


def trace_context() -> Any:
    """The settings of JAX on which a trace depends, such as the default precision; hashable."""
    return config.trace_context()


def settings_of_values() -> tuple[bool, bool]:
    """What the text of a jaxpr does not say of its values: whether there are 64 bits, and how random bits are made."""
    return bool(config.enable_x64.value), bool(config.threefry_partitionable.value)


def is_tracing() -> bool:
    """Whether the call is inside of a transformation."""
    return not core.trace_state_clean()


def source_of(equation: Any, callers: Sequence[Any] = ()) -> str:
    """The line that an equation of a jaxpr comes from, as "model.py:12 (name)": the first outside of libraries.

    Args:
      equation: of a jaxpr.
      callers: the calls that it is in, the innermost first.
    """
    each_in = (source_info_util.user_frames(each.source_info.traceback) for each in (equation, *callers))
    frames = list(itertools.chain.from_iterable(each_in))
    if not frames:
        return "?"
    frame = next((each for each in frames if not _is_of_library(each.file_name)), frames[0])
    return f"{os.path.basename(frame.file_name)}:{frame.start_line} ({frame.function_name})"


def is_xlas(equation: Any, callers: Sequence[Any] = ()) -> bool:
    """Whether an equation, or a call that it is in, has the name `XLAS`."""
    return any(XLAS in str(each.source_info.name_stack) for each in (equation, *callers))


def _is_of_library(file: str) -> bool:
    """Whether a file is of an installed package, or of this package's layers."""
    return file.startswith(_OWN_LAYERS) or not _LIBRARIES.isdisjoint(file.split(os.sep))


def is_of_jax_nn(closed: Any) -> bool:
    """Whether a jaxpr is the trace of a function of `jax.nn`, whose derivative is JAX's own."""
    source = str(closed.jaxpr.debug_info.func_src_info)
    return os.path.join("jax", "_src", "nn", "functions.py") in source


def as_from(equation: Any) -> contextlib.AbstractContextManager[Any]:
    """A context whose equations say that they come from the line and scope of another."""
    source = equation.source_info
    context: contextlib.AbstractContextManager[Any] = source_info_util.user_context(
        source.traceback, name_stack=source_info_util.current_name_stack() + source.name_stack
    )
    return context
