"""Arguments as arrays and as paths, and what is said of those that are none."""

from __future__ import annotations

import reprlib
from pathlib import Path
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


def as_path(name: str, value: Any) -> Path:
    """An argument as the path of a file.

    Raises:
      TypeError: names the argument that is none.
    """
    try:
        return Path(value)
    except TypeError as error:
        raise TypeError(f"{name}={reprlib.repr(value)} is no path; a str or an os.PathLike of one is") from error
