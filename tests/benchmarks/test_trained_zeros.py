"""Biases of any function are moved until its ReLUs make given shares of zeros."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from benchmarks.networks import frameworks
from benchmarks.networks.trained_zeros import with_zeros

IMAGE = jax.random.normal(jax.random.key(0), (1, 24, 24, 3))
FIRST, SECOND = 0.1 * jax.random.normal(jax.random.key(1), (2, 3, 3, 16, 16))
FIRST = FIRST[:, :, :3]


def conv(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def pooled(x: jax.Array) -> jax.Array:
    padded = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    return lax.reduce_window(padded, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "VALID")


# By name: the first map of a shift, which becomes the second convolution's input.
MAPS: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "bias": lambda x, b: jax.nn.relu(conv(x, FIRST) + b),
    "maximum": lambda x, b: jnp.maximum(conv(x, FIRST) + b.reshape(1, 1, 1, -1), 0.0),
    "subtracted": lambda x, b: jax.nn.relu(conv(x, FIRST) - b),
    "repeated": lambda x, b: jax.nn.relu(jnp.broadcast_to(b, (1, 24, 24, 16)) + conv(x, FIRST)),
    "batch norm": lambda x, b: jax.nn.relu(conv(x, FIRST) * 0.7 + (b - 0.2 * 0.7)),
    "channels first": lambda x, b: jax.nn.relu(
        lax.conv_general_dilated(x.transpose(0, 3, 1, 2), FIRST.transpose(3, 2, 0, 1), (1, 1), "SAME")
        + b[:, None, None]
    ).transpose(0, 2, 3, 1),
    "residual": lambda x, b: jax.nn.relu((conv(x, FIRST) + b) + conv(x, FIRST[::-1])),
    "pooled": lambda x, b: pooled(jax.nn.relu(conv(x, FIRST) + b)),
}


@pytest.mark.parametrize("name", MAPS)
def test_the_wanted_share_is_zero(name: str) -> None:
    make = MAPS[name]

    def function(weights: dict[str, Any], x: jax.Array) -> jax.Array:
        return conv(make(x, weights["shift"]), weights["kernel"])

    weights = {"shift": jnp.zeros(16), "kernel": SECOND}
    moved, _ = with_zeros(function, weights, IMAGE, [0.8])
    zeros = np.asarray(make(IMAGE, moved["shift"]) == 0)
    assert zeros.mean() == pytest.approx(0.8, abs=0.02)
    by_channel = zeros.mean((0, 1, 2))
    assert by_channel.std() > 0.05
    assert 0 < by_channel.min() < by_channel.max() < 1
    assert float(conv(make(IMAGE, moved["shift"]), moved["kernel"]).std()) == pytest.approx(1, rel=1e-3)


def two_layers(weights: list[jax.Array], x: jax.Array) -> tuple[jax.Array, jax.Array]:
    y = jax.nn.relu(conv(x, FIRST) + weights[0])
    return y, jax.nn.relu(conv(y, SECOND) + weights[1])


def test_shares_are_in_the_order_of_the_layers() -> None:
    moved, mean = with_zeros(two_layers, [jnp.zeros(16), jnp.zeros(16)], IMAGE, [0.3, 0.5, 0.9])
    found = [float((y == 0).mean()) for y in two_layers(moved, IMAGE)]
    assert found == pytest.approx([0.3, 0.9], abs=0.02)
    assert mean == pytest.approx(found[0] / 2, abs=1e-3)  # of the image, which has no zeros, and the first map


def test_without_shares_zeros_are_only_counted() -> None:
    weights = [jnp.zeros(16), jnp.zeros(16)]
    kept, mean = with_zeros(two_layers, weights, IMAGE, [])
    assert all(new is old for new, old in zip(kept, weights, strict=True))
    assert mean == pytest.approx(float((two_layers(weights, IMAGE)[0] == 0).mean()) / 2, abs=1e-3)


def test_a_weight_moves_once_and_what_was_computed_of_it_follows() -> None:
    def function(shift: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = conv(x, FIRST) + shift
        return jax.nn.relu(y), jax.nn.relu(conv(y, SECOND) + shift)

    moved, _ = with_zeros(function, jnp.zeros(16), IMAGE, [0.7, 0.1])
    assert float((function(moved, IMAGE)[0] == 0).mean()) == pytest.approx(0.7, abs=0.02)


def test_a_dense_layer_has_one_threshold_and_dtypes_stay() -> None:
    kernel = jax.random.normal(jax.random.key(2), (24 * 24 * 3, 64))

    def function(weights: dict[str, Any], x: jax.Array) -> jax.Array:
        return jax.nn.relu(x.reshape(1, -1) @ kernel + weights["shift"].astype(x.dtype))

    weights = {"shift": jnp.zeros(64, jnp.float16), "steps": np.arange(3), "name": "fc"}
    moved, _ = with_zeros(function, weights, IMAGE, [0.75])
    assert float((function(moved, IMAGE) == 0).mean()) == pytest.approx(0.75, abs=0.02)
    assert moved["shift"].dtype == jnp.float16
    assert np.unique(moved["shift"]).size == 1
    assert moved["steps"] is weights["steps"]


@pytest.mark.parametrize(("name", "count"), [("nnx_resnet50", 49), ("linen_vgg16", 15), ("keras_densenet121", 121)])
def test_there_is_a_share_for_every_relu(name: str, count: int) -> None:
    shares = frameworks.shares_of(name)
    assert len(shares) == count
    assert all(0.2 < share < 1 for share in shares)
    assert frameworks.shares_of("keras_mobilenet") == []
