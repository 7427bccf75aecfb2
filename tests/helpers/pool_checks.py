"""Every derivative of a pool that a user may ask for."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def derivatives(function: Any, pool: Any, y: jax.Array, tangent: jax.Array) -> list[Any]:
    """Forward, backward, of each image, second and within other transformations, of `function(y, pool)`."""
    batch = jnp.stack([y, -y, tangent])

    def loss(y: Any) -> Any:
        return (function(y, pool) ** 3).sum()

    return [
        jax.jvp(lambda y: function(y, pool), (y,), (tangent,))[1],
        jax.vmap(jax.grad(loss))(batch),
        jax.vmap(jax.grad(loss), 3)(jnp.moveaxis(batch, 0, 3)),
        jax.vmap(lambda t: jax.jvp(lambda y: function(y, pool), (y,), (t,))[1])(batch),
        jax.jacrev(lambda y: function(y, pool))(y),
        jax.jacfwd(jax.grad(loss))(y),
        jax.jacrev(jax.grad(loss))(y),
        jax.grad(lambda y: (jax.grad(loss)(y) ** 2).sum())(y),
        jax.grad(jax.checkpoint(loss))(y),
        jax.jit(jax.grad(loss))(y),
        jax.linearize(loss, y)[1](tangent),
        jax.lax.scan(lambda total, y: (total + jax.grad(loss)(y), None), jnp.zeros_like(y), batch)[0],
    ]
