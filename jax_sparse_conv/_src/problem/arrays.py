"""Arguments as arrays, and what is said of those that are none."""

from __future__ import annotations

import reprlib
from typing import Any

import jax
import jax.numpy as jnp


def as_array(name: str, value: Any) -> jax.Array:
    """An argument as an array.

    Raises:
      TypeError: names the argument of which JAX makes none.
    """
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name}={reprlib.repr(value)} is no array, and none can be made of it: {error}") from error
