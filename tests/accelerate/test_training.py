"""Loss functions with batch norms in training, in each framework: what accelerate makes of them, and its gradients."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import jax_sparse_conv as jsc
from jax_sparse_conv._src import devices

pytestmark = pytest.mark.usefixtures("float32_products")

IS_CPU = devices.default_platform() == "cpu"
CALLS = ("jsc_channel_sums", "jsc_channel_sums_gradient", "jsc_channel_affine", "jsc_channel_affine_gradient")
X = jax.random.normal(jax.random.key(0), (4, 12, 12, 8))
Loss = Callable[..., tuple[jax.Array, Any]]


def weighted(y: jax.Array) -> jax.Array:
    """A loss to which all elements matter, and in which they do not cancel: y is at least 0."""
    return (y.astype(jnp.float32) * (1.5 + jnp.cos(jnp.arange(y.size))).reshape(y.shape)).sum()


class LinenNet(linen.Module):
    dtype: Any = None

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def convolved(y: jax.Array) -> jax.Array:
            y = linen.Conv(32, (3, 3), use_bias=False, dtype=self.dtype)(y)
            return linen.BatchNorm(use_running_average=False, dtype=self.dtype)(y)

        y = linen.relu(convolved(x))
        return linen.relu(convolved(y) + y).mean((1, 2))


def of_linen(dtype: Any = None) -> tuple[Loss, tuple[Any, ...]]:
    model = LinenNet(dtype)
    variables = model.init(jax.random.key(1), X)

    def loss(params: Any, stats: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        y, stats = model.apply({"params": params, "batch_stats": stats}, x, mutable="batch_stats")
        return weighted(y), stats

    return loss, (variables["params"], variables["batch_stats"], X)


class NnxNet(nnx.Module):
    def __init__(self, fast: bool, rngs: nnx.Rngs) -> None:
        self.conv1 = nnx.Conv(8, 32, (3, 3), use_bias=False, rngs=rngs)
        self.norm1 = nnx.BatchNorm(32, use_fast_variance=fast, rngs=rngs)
        self.conv2 = nnx.Conv(32, 32, (3, 3), use_bias=False, rngs=rngs)
        self.norm2 = nnx.BatchNorm(32, use_fast_variance=fast, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = nnx.relu(self.norm1(self.conv1(x)))
        return nnx.relu(y + self.norm2(self.conv2(y))).mean((1, 2))


def of_nnx(fast: bool = True) -> tuple[Loss, tuple[Any, ...]]:
    graph, params, rest = nnx.split(NnxNet(fast, nnx.Rngs(0)), nnx.Param, ...)

    def loss(params: Any, rest: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        model = nnx.merge(graph, params, rest, copy=True)
        return weighted(model(x)), nnx.state(model, nnx.Not(nnx.Param))

    return loss, (params, rest, X)


def of_haiku() -> tuple[Loss, tuple[Any, ...]]:
    hk = pytest.importorskip("haiku")

    def network(x: jax.Array) -> jax.Array:
        y = jax.nn.relu(hk.BatchNorm(True, True, 0.9)(hk.Conv2D(32, 3, with_bias=False)(x), True))
        z = hk.BatchNorm(True, True, 0.9)(hk.Conv2D(32, 3, with_bias=False)(y), True)
        return jax.nn.relu(z + y).mean((1, 2))

    model = hk.transform_with_state(network)
    params, state = model.init(jax.random.key(1), X)

    def loss(params: Any, state: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        y, state = model.apply(params, state, None, x)
        return weighted(y), state

    return loss, (params, state, X)


def of_keras(policy: str = "float32") -> tuple[Loss, tuple[Any, ...]]:
    keras = pytest.importorskip("keras")
    keras.utils.set_random_seed(0)

    def convolved(y: Any) -> Any:
        y = keras.layers.Conv2D(32, 3, padding="same", use_bias=False, dtype=policy)(y)
        return keras.layers.BatchNormalization(dtype=policy)(y)

    given = keras.Input(X.shape[1:])
    y = keras.layers.ReLU(dtype=policy)(convolved(given))
    z = keras.layers.Add(dtype=policy)([y, convolved(y)])
    model = keras.Model(given, keras.layers.ReLU(dtype=policy)(z))
    weights = [v.value for v in model.trainable_variables], [v.value for v in model.non_trainable_variables]

    def loss(params: Any, state: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        y, state = model.stateless_call(params, state, x, training=True)
        return weighted(y.mean((1, 2))), state

    return loss, (*weights, X)


MODELS: dict[str, Callable[[], tuple[Loss, tuple[Any, ...]]]] = {
    "linen": of_linen,
    "nnx": of_nnx,
    "nnx with the variance around the mean": lambda: of_nnx(False),
    "haiku": of_haiku,
    "keras": of_keras,
}


def steps(loss: Loss) -> tuple[Any, Any]:
    """As it is and accelerated, jitted."""
    each = (jax.value_and_grad(function, has_aux=True) for function in (loss, jsc.accelerate(loss)))
    one, other = (jax.jit(function) for function in each)
    return one, other


def assert_close(found: Any, expected: Any, tolerance: float) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        difference = np.linalg.norm(np.asarray(one, np.float32) - np.asarray(other, np.float32))
        assert difference <= tolerance * (1e-3 + np.linalg.norm(np.asarray(other, np.float32)))


@pytest.mark.parametrize("name", MODELS)
def test_each_batch_norm_is_two_calls_and_two_of_its_gradient(name: str) -> None:
    loss, arguments = MODELS[name]()
    given, accelerated = steps(loss)
    assert_close(accelerated(*arguments), given(*arguments), 1e-4)
    if IS_CPU:
        text = accelerated.lower(*arguments).compile().as_text()
        assert [text.count(f'custom_call_target="{call}"') for call in CALLS] == [2, 2, 2, 2]


@pytest.mark.parametrize("build", [lambda: of_linen(jnp.bfloat16), lambda: of_keras("mixed_bfloat16")])
def test_of_bfloat16(build: Any) -> None:
    loss, arguments = build()
    given, accelerated = steps(loss)
    assert_close(accelerated(*arguments)[0], given(*arguments)[0], 2e-2)
    if IS_CPU:
        text = accelerated.lower(*arguments).compile().as_text()
        assert [text.count(f'custom_call_target="{call}"') for call in CALLS] == [2, 2, 2, 2]


def test_of_a_map_whose_channels_come_first() -> None:
    kernel, scale = jax.random.normal(jax.random.key(1), (3, 3, 8, 32)), 1 + 0.1 * jnp.arange(32.0)

    def loss(kernel: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        dimensions = jax.lax.conv_dimension_numbers(x.shape, kernel.shape, ("NCHW", "HWIO", "NCHW"))
        y = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=dimensions)
        mean, variance = y.mean((0, 2, 3), keepdims=True), y.var((0, 2, 3), keepdims=True)
        y = (y - mean) / jnp.sqrt(variance + 1e-5) * scale[:, None, None]
        return weighted(jax.nn.relu(y).mean((2, 3))), variance

    given, accelerated = steps(loss)
    x = jnp.transpose(X, (0, 3, 1, 2))
    assert_close(accelerated(kernel, x), given(kernel, x), 1e-4)
    if IS_CPU:
        text = accelerated.lower(kernel, x).compile().as_text()
        assert [text.count(f'custom_call_target="{call}"') for call in CALLS] == [1, 1, 1, 1]


def test_what_reads_the_map_besides_adds_its_gradient() -> None:
    kernel = jax.random.normal(jax.random.key(1), (3, 3, 8, 32))

    def loss(kernel: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
        y = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        mean = y.mean((0, 1, 2))
        variance = (y * y).mean((0, 1, 2)) - mean * mean
        normalized = jax.nn.relu((y - mean) * jax.lax.rsqrt(variance + 1e-5))
        return weighted(normalized.mean((1, 2))) + weighted(jnp.tanh(y).mean((1, 2))), None

    given, accelerated = steps(loss)
    assert_close(accelerated(kernel, X), given(kernel, X), 1e-4)


def test_a_mean_along_another_axis_is_none_of_channels() -> None:
    kernel = jax.random.normal(jax.random.key(1), (3, 3, 8, 16))

    def function(kernel: jax.Array, x: jax.Array) -> tuple[jax.Array, ...]:
        y = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        mean = y.mean((0, 1, 2))
        spreads = [((y - mean.reshape(shape)) ** 2).sum((0, 1, 2)) for shape in ((16, 1), (1, 1, 16, 1), (1, 1, 1, 16))]
        return mean, *spreads

    x = jax.random.normal(jax.random.key(2), (2, 16, 16, 8))
    assert_close(jax.jit(jsc.accelerate(function))(kernel, x), function(kernel, x), 1e-5)


@pytest.mark.parametrize(
    "statistics",
    [
        lambda y: (y.mean((0, 1, 2)), ((y - y.mean((0, 1))) ** 2).mean((0, 1, 2))),  # of another mean
        lambda y: (y.mean((0, 1, 2)), ((y - y.sum((0, 1, 2)) / 7) ** 2).mean((0, 1, 2))),  # of another number
        lambda y: (y.mean((1, 2), keepdims=True), (y * y).mean((1, 2), keepdims=True)),  # of each image
        lambda y: (y.mean(), (y * y).mean()),  # of all channels
    ],
)
def test_other_statistics_stay(statistics: Any) -> None:
    kernel = jax.random.normal(jax.random.key(1), (3, 3, 8, 32))

    def loss(kernel: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
        y = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        mean, other = statistics(y)
        return weighted(jax.nn.relu((y - mean) * jax.lax.rsqrt(1 + jnp.abs(other))).mean((1, 2))), None

    given, accelerated = steps(loss)
    assert_close(accelerated(kernel, X), given(kernel, X), 1e-4)
    assert "jsc_channel" not in accelerated.lower(kernel, X).as_text()
