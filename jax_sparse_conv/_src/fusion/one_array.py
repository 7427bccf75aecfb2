"""Several parameters in one array: every argument of a jitted function costs the host time in every call."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

# Elements at a multiple of which a parameter starts: 128 bytes of 16-bit types, and the same places after a cast.
ALIGNMENT = 64

Shape = tuple[int, ...]


def offsets(shapes: Sequence[Shape]) -> list[int]:
    """Elements in front of each parameter."""
    return _ends(shapes)[:-1]


def size(shapes: Sequence[Shape]) -> int:
    """Elements of the array."""
    return _ends(shapes)[-1]


def _ends(shapes: Sequence[Shape]) -> list[int]:
    return [0, *itertools.accumulate(-(-math.prod(shape) // ALIGNMENT) * ALIGNMENT for shape in shapes)]


@jax.jit
def joined(arrays: Sequence[jax.Array]) -> jax.Array:
    """The arrays one after the other, each from a multiple of `ALIGNMENT` on."""
    return jnp.concatenate([jnp.pad(array.ravel(), (0, -array.size % ALIGNMENT)) for array in arrays])


@functools.partial(jax.jit, static_argnums=1, inline=True)  # outside of jit one compilation, not hundreds
def slices(values: jax.Array, shapes: tuple[Shape, ...]) -> list[jax.Array]:
    """The parameters again."""
    places = zip(offsets(shapes), shapes, strict=True)
    return [lax.slice(values, (at,), (at + math.prod(shape),)).reshape(shape) for at, shape in places]


def abstract(values: Any, shapes: Sequence[Shape]) -> list[Any]:
    """The parameters as abstract values."""
    whole = [values.sharding.update(spec=PartitionSpec(*[None] * len(shape))) for shape in shapes]
    return [values.update(shape=shape, sharding=sharding) for shape, sharding in zip(shapes, whole, strict=True)]
