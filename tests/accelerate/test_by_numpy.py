"""Programs of weights by NumPy against XLA's results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jax_sparse_conv._src.accelerate import by_numpy

KERNEL = jax.random.normal(jax.random.key(0), (3, 3, 4, 6))
SCALE = jnp.linspace(-2, 2, 6)
COUNTS = jnp.arange(-6, 6, dtype=jnp.int32)

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "fold": lambda k, s, _: [k * s * lax.rsqrt(abs(s) + 1e-3), -s / jnp.sqrt(abs(s) + 2) - 1],
    "moves": lambda k, s, _: [k.transpose(3, 2, 0, 1), k.reshape(9, -1), s[None, :, None], jnp.squeeze(s[None], 0)],
    "pad": lambda k, *_: [jnp.pad(k, ((0, 0), (1, 2), (0, 0), (3, 0)), constant_values=2)],
    "pad that crops": lambda k, *_: [lax.pad(k, 1.0, ((0, 0, 0), (-1, 0, 0), (0, 2, 1), (0, 0, 0)))],
    "types": lambda k, s, n: [k.astype(jnp.bfloat16) * s.astype(jnp.bfloat16), n.astype(jnp.float32), s.astype(int)],
    "integers are cut off": lambda k, s, n: [lax.div(n, jnp.full_like(n, 4)), lax.max(n, -n)],
    "a turned reshape": lambda k, *_: [lax.reshape(k, (24, 9), (2, 3, 0, 1))],
    "broadcast": lambda k, s, _: [jnp.broadcast_to(s[:, None], (6, 5)), jnp.broadcast_to(3.0, (2,)) + s[0]],
    "infinite": lambda k, s, _: [1 / (s - s), jnp.sqrt(s)],
    "powers and joins": lambda k, s, _: [jnp.concatenate([s**3, jnp.exp(s), jnp.minimum(s, 0)])],
    "a derivative of its own": lambda k, *_: [jax.nn.relu(lax.stop_gradient(k))],
    "what NumPy has no function for": lambda k, s, _: [jnp.linalg.norm(k.reshape(-1, 6), axis=0), lax.erf(s), k @ k.mT],
    "choices and slices": lambda k, s, n: [
        jnp.where(jnp.isfinite(1 / n), s[0], k.mean()),
        lax.select_n(n > 1, n, -n),
        lax.select_n(s[0] > 0, k, -k),
        lax.slice(k, (0, 1, 0, 2), (3, 3, 4, 6), (2, 1, 1, 3)),
        k[1:, :, 2],
    ],
    "as it is": lambda k, s, n: [k, s, n],
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_results(name: str) -> None:
    arguments = [KERNEL, SCALE, COUNTS]
    function = FUNCTIONS[name]
    found = by_numpy.evaluate(jax.make_jaxpr(function)(*arguments), arguments)
    for one, other in zip(found, jax.jit(function)(*arguments), strict=True):
        assert isinstance(one, jax.Array)
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        np.testing.assert_allclose(one.astype(jnp.float32), other.astype(jnp.float32), rtol=1e-6, atol=1e-6)


def test_results_share_no_memory_with_weights() -> None:
    (found,) = by_numpy.evaluate(jax.make_jaxpr(lambda k: k.reshape(9, 24))(KERNEL), [KERNEL])
    assert not np.may_share_memory(np.asarray(found), np.asarray(KERNEL))


def test_what_suits() -> None:
    assert by_numpy.suits([KERNEL, COUNTS])
    assert not by_numpy.suits([])
    assert not by_numpy.suits([jax.random.key(0)])
    assert not by_numpy.suits([np.ones(3)])
