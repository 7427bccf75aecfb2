"""Small networks for tests, and the same networks written in plain lax from a dict of their parameters."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jax_sparse_conv import models

VGG_DEPTHS, VGG_FEATURES, VGG_HIDDEN, VGG_POOL, CLASSES = (1, 2), (8, 16), 24, 3, 10
RESNET_DEPTHS, RESNET_WIDTH = (1, 2), 8


def small_vgg(batch_norm: bool = False, seed: int = 0, **arguments: Any) -> models.VGG:
    model = models.VGG(
        VGG_DEPTHS,
        CLASSES,
        features=VGG_FEATURES,
        hidden=VGG_HIDDEN,
        pool_size=VGG_POOL,
        batch_norm=batch_norm,
        rngs=nnx.Rngs(seed),
        **arguments,
    )
    return randomized(model, seed)


def small_resnet(seed: int = 0, depths: tuple[int, ...] = RESNET_DEPTHS, **arguments: Any) -> models.ResNet:
    return randomized(models.ResNet(depths, CLASSES, width=RESNET_WIDTH, rngs=nnx.Rngs(seed), **arguments), seed)


def randomized(model: Any, seed: int) -> Any:
    """Biases and batch-norm statistics that are neither zero nor one."""
    rng = np.random.default_rng(seed)
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        if path[-1] != "kernel":
            positive = path[-1] in ("var", "scale")
            value = rng.uniform(0.5, 1.5, variable.shape) if positive else 0.3 * rng.standard_normal(variable.shape)
            variable.set_value(jnp.asarray(value, variable.dtype))
    return model


def parameters(model: nnx.Module) -> Any:
    """Nested dict of arrays, lists as dicts of ints."""
    return nnx.to_pure_dict(nnx.state(model))


def photographs(batch: int, height: int, width: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal((batch, height, width, 3)), jnp.float32)


def dense_vgg(params: Any, x: jax.Array, epsilon: float = 1e-5) -> jax.Array:
    for stage in params["stages"].values():
        for layer in stage.values():
            x = jax.nn.relu(dense_layer(layer, x, 1, 1, epsilon))
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    x = average_to(x, VGG_POOL).reshape(x.shape[0], -1)
    for name in ("fc6", "fc7"):
        x = jax.nn.relu(x @ params[name]["kernel"] + params[name]["bias"])
    return x @ params["fc8"]["kernel"] + params["fc8"]["bias"]


def dense_resnet(params: Any, x: jax.Array, version: str, epsilon: float = 1e-5) -> jax.Array:
    x = jax.nn.relu(dense_layer(params["stem"], x, 2, 3, epsilon))
    padding = ((0, 0), (1, 1), (1, 1), (0, 0))
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), padding)
    for s, stage in params["stages"].items():
        for b, block in stage.items():
            strides = 2 if s > 0 and b == 0 else 1
            first, second = (strides, 1) if version == "v1" else (1, strides)
            shortcut = dense_layer(block["shortcut"], x, strides, 0, epsilon) if b == 0 else x
            y = jax.nn.relu(dense_layer(block["conv1"], x, first, 0, epsilon))
            y = jax.nn.relu(dense_layer(block["conv2"], y, second, 1, epsilon))
            x = jax.nn.relu(dense_layer(block["conv3"], y, 1, 0, epsilon) + shortcut)
    return x.mean((1, 2)) @ params["fc"]["kernel"] + params["fc"]["bias"]


def dense_layer(params: Any, x: jax.Array, strides: int, padding: int, epsilon: float) -> jax.Array:
    y = lax.conv_general_dilated(
        x,
        params["conv"]["kernel"],
        (strides, strides),
        [(padding, padding)] * 2,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    y = y + params["conv"].get("bias", 0)
    if "batch_norm" in params:
        norm = params["batch_norm"]
        y = (y - norm["mean"]) / jnp.sqrt(norm["var"] + epsilon) * norm["scale"] + norm["bias"]
    return y


def average_to(x: jax.Array, size: int) -> jax.Array:
    """torch's adaptive average pool, one window at a time."""

    def windows(length: int) -> list[slice]:
        return [slice(i * length // size, -(-(i + 1) * length // size)) for i in range(size)]

    return jnp.stack(
        [jnp.stack([x[:, r, c].mean((1, 2)) for c in windows(x.shape[2])], 1) for r in windows(x.shape[1])], 1
    )


def assert_close(actual: Any, expected: Any, tolerance: float = 1e-5) -> None:
    """Relative to the largest expected value."""
    expected = np.asarray(expected, np.float64)
    np.testing.assert_allclose(
        np.asarray(actual, np.float64), expected, rtol=0, atol=tolerance * np.abs(expected).max()
    )
