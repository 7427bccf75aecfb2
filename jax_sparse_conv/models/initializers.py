"""Random kernels, made with one compiled generator."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_SMALL, _LARGE = 1 << 12, 1 << 18


def he_normal(key: jax.Array, shape: Sequence[int], dtype: Any = jnp.float32) -> jax.Array:
    """Normal values with variance 2 / fan-in (He et al. 2015), for a kernel [..., inputs, outputs].

    Drawn in blocks of two sizes, because compiling JAX's generator for every shape of a network takes longer than
    running it. The values do not depend on whether the call is traced, and a small block begins as a large one does.
    """
    size = math.prod(shape)
    block = _SMALL if size <= _SMALL else _LARGE
    deviation = math.sqrt(2 / max(1, size // shape[-1] if shape[-1] else 1))
    indices = range(-(-size // block))
    if isinstance(key, jax.core.Tracer):  # one operation, because tracing one a block takes seconds in a deep network
        drawn = jax.vmap(_normals, (None, 0, None))(key, jnp.arange(len(indices)), block)
        return (drawn.reshape(-1)[:size].reshape(shape) * np.float32(deviation)).astype(dtype)
    blocks = [_normals(key, index, block) for index in indices]
    flat = np.concatenate([np.zeros(0, np.float32), *map(np.asarray, blocks)])[:size]
    return jnp.asarray((flat.reshape(shape) * np.float32(deviation)).astype(dtype))


@functools.partial(jax.jit, static_argnums=2)
def _normals(key: jax.Array, index: int, block: int) -> jax.Array:
    return jax.random.normal(jax.random.fold_in(key, index), (block,))
