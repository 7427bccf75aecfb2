"""Random functions, accelerated, against themselves: values and derivatives, weights as constants and as arguments.

JSC_RANDOM_GRAPHS=2000 in the environment tries as many.
"""

from __future__ import annotations

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from graphs import Graph

import jax_sparse_conv as jsc

_EACH = 5
# Norm of a result below which errors count as of that: sums of what cancels, which a GPU adds in another order.
_SMALL = 0.3 if jax.default_backend() == "cpu" else 1.0
_SEEDS = range(0, int(os.environ.get("JSC_RANDOM_GRAPHS", "100")), _EACH)
_TOLERANCE = {"float32": 2e-5, "float16": 1e-2, "bfloat16": 8e-2}

pytestmark = [
    pytest.mark.usefixtures("float32_products"),
    pytest.mark.filterwarnings("ignore:accelerate left all"),
]


def same(found: Any, wanted: Any, tolerance: float) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        first, second = (np.asarray(value, np.float64) for value in (one, other))
        assert np.linalg.norm(first - second) <= tolerance * max(np.linalg.norm(second), _SMALL)


@pytest.mark.parametrize("first", _SEEDS)
def test_values(first: int) -> None:
    for seed in range(first, first + _EACH):
        graph = Graph(seed)
        x, weights = jnp.asarray(graph.image), [jnp.asarray(each) for each in graph.weights]
        wanted = jax.jit(graph)(x, weights)
        if seed % 2:
            found = jax.jit(jsc.accelerate(graph))(x, weights)
        else:
            found = jax.jit(jsc.accelerate(lambda x, graph=graph, weights=weights: graph(x, weights)))(x)
        try:
            same(found, wanted, _TOLERANCE[graph.dtype])
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, {graph.layout}, {graph.dtype}: {graph.steps}") from error


@pytest.mark.parametrize("seed", range(0, 100, 9))
@pytest.mark.usefixtures("optimized")
def test_derivatives(seed: int) -> None:
    graph = Graph(seed, "float32", zero_at_zero=True)
    x, weights = jnp.asarray(graph.image), [jnp.asarray(each) for each in graph.weights]

    def loss(function: Any) -> Any:
        return jax.grad(lambda x, weights: jnp.sum(jnp.sin(function(x, weights)[0])), argnums=(0, 1))

    same(jax.jit(loss(jsc.accelerate(graph)))(x, weights), jax.jit(loss(graph))(x, weights), 1e-4)
