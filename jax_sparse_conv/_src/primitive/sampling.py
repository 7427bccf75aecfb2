"""Counts of the non-zeros of a map, of all of it or of a sample, and what they say of its density: in lax.

They are int32 [PARTS, 2], rows of (non-zeros, elements) of parts of the map, as the CUDA kernels count what they write.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jax_sparse_conv._src.primitive import reference

PARTS = 64
"""Rows of counts, kCountRows in native/call.h."""

_SAMPLES = 1024  # of x, for a standard deviation of at most 1.6 %


def sampled_nonzeros(x: jax.Array) -> jax.Array:
    """(non-zeros, elements) of some 1024 elements spread over x [N, H, W, C]: the first row of int32 [PARTS, 2]."""
    if any(map(jax.export.is_symbolic_dim, x.shape)):
        return all_nonzeros(x)
    return all_nonzeros(lax.slice(x.reshape(-1), (0,), (x.size,), (sample_step(x.shape),)))


def all_nonzeros(x: jax.Array) -> jax.Array:
    """(non-zeros, elements) of x: the first row of int32 [PARTS, 2], zeros behind it."""
    is_nonzero = reference.is_nonzero(x)
    row = jnp.stack([jnp.sum(each, dtype=jnp.int32) for each in (is_nonzero, jnp.ones_like(is_nonzero))])
    return jnp.pad(row[None], ((0, PARTS - 1), (0, 0)))


def nonzeros_of_counts(counts: jax.Array, shape: Sequence[int]) -> jax.Array:
    """(non-zeros, elements) of each image of x [N, H, W, C], int32 [N, 2], from its tiles' counts [N, ...]."""
    of_image = jnp.sum(counts, axis=tuple(range(1, counts.ndim)), dtype=jnp.int32)
    return jnp.stack([of_image, jnp.full_like(of_image, math.prod(shape[1:]))], axis=1)


def is_at_most(nonzeros: jax.Array, density: float) -> jax.Array:
    """Whether counts [parts, 2] say so, as cuda/core/density.cuh decides it; true for an empty map."""
    total = jnp.sum(nonzeros, 0, dtype=jnp.float32)
    return total[0] <= jnp.float32(density) * total[1]


def sample_step(shape: Sequence[int]) -> int:
    """Distance between samples: prime to the channels, so that every channel is met, and to powers of two."""
    step = max(1, math.prod(shape) // _SAMPLES) | 1
    while math.gcd(step, max(1, shape[-1])) != 1:
        step += 2
    return step
