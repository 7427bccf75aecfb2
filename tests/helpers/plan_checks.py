"""A model with a layer of each kind, its calibration, and plans as if other implementations had won."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jax_sparse_conv as jsc
from jax_sparse_conv.nnx import SparseConv, SparseConvPool, SparseLinear


class Small(nnx.Module):
    """One layer of each kind; the convolution runs twice, with a residual the second time."""

    def __init__(self, **arguments: Any) -> None:
        rngs = nnx.Rngs(0)
        self.conv = SparseConv(4, 4, (3, 3), activation="relu", rngs=rngs, **arguments)
        self.pool = SparseConvPool(4, 6, (3, 3), strides=2, rngs=rngs, **arguments)
        self.dense = SparseLinear(6, 5, rngs=rngs, **arguments)
        self.unused = SparseLinear(5, 5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.conv(x)
        x = self.pool(self.conv(x, x))
        return self.dense(x.mean((1, 2)))


def half(x: np.ndarray) -> jax.Array:
    """x with zeros in every other row."""
    x = x.copy()
    x[:, ::2] = 0
    return jnp.asarray(x, jnp.float32)


X = half(np.random.default_rng(0).standard_normal((2, 8, 8, 4)))


def calibrated(model: Any = None, batches: Any = X) -> jsc.Plan:
    return jsc.calibrate(model or Small(), batches, repeats=2)


def with_choices(made: jsc.Plan, names: Sequence[str]) -> jsc.Plan:
    """The plan as if these had won."""
    chosen = [dataclasses.replace(layer, implementation=name) for layer, name in zip(made.layers, names, strict=True)]
    return dataclasses.replace(made, layers=tuple(chosen))
