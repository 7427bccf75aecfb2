"""What Flax's own layers compute in float64, beside which ours are put."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


def feature_map(shape: tuple[int, ...], seed: int = 0) -> jax.Array:
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=shape) * (rng.random(shape) < 0.4), jnp.float32)


def wide(layer: nnx.Module) -> Any:
    """The layer's own class from Flax with the same parameters, in float64."""
    layer = nnx.clone(layer)
    if isinstance(layer, nnx.Conv):
        layer.preferred_element_type = None  # float32 would be narrower
    graph, state = nnx.split(layer)
    return nnx.merge(graph, jax.tree.map(lambda v: jnp.asarray(v, jnp.float64), state))


def expected(layer: Any, x: jax.Array, residual: Any = None, relu: bool = False) -> np.ndarray:
    """What Flax computes in float64, with an epilogue in numpy."""
    with jax.enable_x64(True):
        y = np.asarray(jax.jit(lambda x: wide(layer)(x))(jnp.asarray(np.asarray(x), jnp.float64)))
    y = y if residual is None else y + np.asarray(residual, np.float64)
    return np.maximum(y, 0) if relu else y


def close(actual: Any, wanted: np.ndarray, tolerance: float = 1e-5) -> None:
    assert actual.shape == wanted.shape
    np.testing.assert_allclose(np.asarray(actual, np.float64), wanted, rtol=tolerance, atol=tolerance)
