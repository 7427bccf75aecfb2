"""What primitives need of JAX and what it has no public name for."""

from __future__ import annotations

import functools

from jax._src import dispatch
from jax.extend import core as jex_core


def needs_devices(primitive: jex_core.Primitive) -> None:
    """Have lowerings of `primitive` know how many devices they are for."""
    dispatch.prim_requires_devices_during_lowering.add(primitive)


def runs_alone(primitive: jex_core.Primitive) -> None:
    """Have `primitive` run outside of `jit` as JAX's own do: compiled, `jax.disable_jit` or not."""
    primitive.def_impl(functools.partial(dispatch.apply_primitive, primitive))
