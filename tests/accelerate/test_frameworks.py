"""Models as their authors write them, in each framework: every layer becomes a call, and the results stay."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import jax_sparse_conv as jsc

pytestmark = pytest.mark.usefixtures("float32_products")

X = jax.random.normal(jax.random.key(0), (2, 16, 16, 3))
Function = Callable[[Any, jax.Array], jax.Array]


def shaken(tree: Any) -> Any:
    """Weights of a trained kind: batch norms that do something."""
    leaves, structure = jax.tree.flatten(tree)
    rng = np.random.default_rng(0)

    def moved(leaf: Any) -> Any:
        if not eqx.is_inexact_array(leaf):
            return leaf
        return jnp.asarray(leaf + 0.1 * abs(rng.normal(size=leaf.shape)), leaf.dtype)

    return jax.tree.unflatten(structure, [moved(leaf) for leaf in leaves])


class Bottleneck(nnx.Module):
    def __init__(self, channels: int, width: int, rngs: nnx.Rngs) -> None:
        self.conv1 = nnx.Conv(channels, width, (1, 1), use_bias=False, rngs=rngs)
        self.norm1 = nnx.BatchNorm(width, rngs=rngs)
        self.conv2 = nnx.Conv(width, width, (3, 3), strides=2, use_bias=False, rngs=rngs)
        self.norm2 = nnx.BatchNorm(width, rngs=rngs)
        self.conv3 = nnx.Conv(width, 4 * width, (1, 1), use_bias=False, rngs=rngs)
        self.norm3 = nnx.BatchNorm(4 * width, rngs=rngs)
        self.shortcut = nnx.Conv(channels, 4 * width, (1, 1), strides=2, use_bias=False, rngs=rngs)
        self.norm4 = nnx.BatchNorm(4 * width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = nnx.relu(self.norm1(self.conv1(x)))
        y = self.norm3(self.conv3(nnx.relu(self.norm2(self.conv2(y)))))
        return nnx.relu(y + self.norm4(self.shortcut(x)))


class ResNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.stem = nnx.Conv(3, 16, (7, 7), strides=2, padding=3, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.block = Bottleneck(16, 8, rngs)
        self.head = nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.max_pool(nnx.relu(self.norm(self.stem(x))), (3, 3), strides=(2, 2), padding="SAME")
        return self.head(jnp.mean(self.block(x), axis=(1, 2)))


class LinenNet(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = linen.relu(linen.BatchNorm(use_running_average=True)(linen.Conv(16, (3, 3), use_bias=False)(x)))
        z = linen.BatchNorm(use_running_average=True)(linen.Conv(16, (3, 3), use_bias=False)(y))
        y = linen.avg_pool(linen.relu(y + z), (2, 2), strides=(2, 2))
        return linen.Dense(10)(y.reshape(y.shape[0], -1))


class EquinoxNet(eqx.Module):
    conv1: eqx.nn.Conv2d
    conv2: eqx.nn.Conv2d
    norm: eqx.nn.BatchNorm
    pool: eqx.nn.MaxPool2d
    head: eqx.nn.Linear

    def __init__(self) -> None:
        keys = jax.random.split(jax.random.key(0), 3)
        self.conv1 = eqx.nn.Conv2d(3, 16, 3, padding=1, key=keys[0])
        self.conv2 = eqx.nn.Conv2d(16, 16, 3, padding=1, key=keys[1])
        self.norm = eqx.nn.BatchNorm(16, "batch", mode="batch")
        self.pool = eqx.nn.MaxPool2d(2, 2)
        self.head = eqx.nn.Linear(16, 10, key=keys[2])

    def __call__(self, x: jax.Array, state: Any) -> jax.Array:
        y = jax.nn.relu(self.conv1(x))
        z, _ = self.norm(self.conv2(y), state)
        return self.head(self.pool(jax.nn.relu(y + z)).mean((1, 2)))


def of_nnx() -> tuple[Function, Any, jax.Array]:
    model = ResNet(nnx.Rngs(0))
    model.eval()
    graph, state = nnx.split(model)
    return lambda state, x: nnx.merge(graph, state)(x), shaken(state), X


def of_linen() -> tuple[Function, Any, jax.Array]:
    model = LinenNet()
    return model.apply, shaken(model.init(jax.random.key(0), X)), X  # type: ignore[return-value]


def of_haiku() -> tuple[Function, Any, jax.Array]:
    hk = pytest.importorskip("haiku")

    def forward(x: jax.Array, is_training: bool) -> jax.Array:
        return hk.nets.ResNet18(10)(x, is_training)

    network = hk.transform_with_state(forward)
    weights = jax.jit(network.init, static_argnums=2)(jax.random.key(0), X, True)
    return lambda weights, x: network.apply(*weights, None, x, False)[0], shaken(weights), X


def of_equinox() -> tuple[Function, Any, jax.Array]:
    model, state = eqx.nn.make_with_state(EquinoxNet)()
    model = eqx.nn.inference_mode(model)

    def function(weights: Any, x: jax.Array) -> jax.Array:
        return jax.vmap(lambda x: weights[0](x, weights[1]), axis_name="batch")(x)

    return function, (shaken(model), state), X.transpose(0, 3, 1, 2)


def of_keras() -> tuple[Function, Any, jax.Array]:
    keras = pytest.importorskip("keras")
    image = keras.Input((16, 16, 3))
    y = keras.layers.ZeroPadding2D(3)(image)
    y = keras.layers.Activation("relu")(keras.layers.BatchNormalization()(keras.layers.Conv2D(16, 7, strides=2)(y)))
    y = keras.layers.MaxPooling2D(3, 2)(keras.layers.ZeroPadding2D(1)(y))
    z = keras.layers.BatchNormalization()(keras.layers.Conv2D(16, 3, padding="same")(y))
    y = keras.layers.Activation("relu")(keras.layers.Add()([y, z]))
    y = keras.layers.Dense(10)(keras.layers.GlobalAveragePooling2D()(y))
    model = keras.Model(image, y)
    weights = [[v.value for v in each] for each in (model.trainable_variables, model.non_trainable_variables)]
    return lambda weights, x: model.stateless_call(*weights, x)[0], shaken(weights), X


# By framework: the model, and how many convolutions and dense layers it has.
MODELS: dict[str, tuple[Callable[[], tuple[Function, Any, jax.Array]], int]] = {
    "nnx": (of_nnx, 6),
    "linen": (of_linen, 3),
    "haiku": (of_haiku, 21),
    "equinox": (of_equinox, 3),
    "keras": (of_keras, 3),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_layer_is_a_call(name: str) -> None:
    build, layers = MODELS[name]
    function, weights, x = build()
    predict = jsc.jit_inference(function, weights)
    report = predict.report(x)
    assert [row.reason for row in report.rows] == [None] * layers
    wanted = jax.jit(lambda x: function(weights, x))(x)
    np.testing.assert_allclose(predict(x), wanted, rtol=1e-4, atol=1e-5 * float(abs(wanted).max()))
    assert "rsqrt" not in predict.lower(x).as_text()


def test_one_chain_of_a_whole_network() -> None:
    function, weights, x = of_nnx()
    equations = jax.make_jaxpr(jsc.jit_inference(function, weights))(x[:1]).eqns
    names = {equation.primitive.name for equation in equations}
    views = {"reshape", "broadcast_in_dim", "custom_jvp_call"}  # of weights
    assert names - views == {"jsc_chain"}  # the mean and the dense layer are in it, too
    (chain,) = (equation for equation in equations if equation.primitive.name == "jsc_chain")
    assert [layer.is_dense for layer in chain.params["layers"]] == [False] * 5 + [True]


@pytest.mark.parametrize("name", ["nnx", "equinox"])
def test_as_a_closure(name: str) -> None:
    function, weights, x = MODELS[name][0]()
    fast = jax.jit(jsc.accelerate(lambda x: function(weights, x)))
    wanted = jax.jit(lambda x: function(weights, x))(x)
    np.testing.assert_allclose(fast(x), wanted, rtol=1e-4, atol=1e-5 * float(abs(wanted).max()))


def test_a_module_itself() -> None:
    model = ResNet(nnx.Rngs(0))
    model.eval()
    wanted = jax.jit(lambda x: model(x))(X)
    np.testing.assert_allclose(jax.jit(jsc.accelerate(model))(X), wanted, rtol=1e-4, atol=1e-4)
    predict = jsc.nnx.jit_inference(model)
    assert len(predict.report(X).rows) == 6
    np.testing.assert_allclose(predict(X), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("library", "made", "advice"),
    [
        ("flax.linen", lambda linen: linen.Conv(8, (3, 3)), r"Conv, .* jit_inference\(model.apply, variables\)"),
        ("keras", lambda keras: keras.Sequential(), r"Sequential, .* model.stateless_call\(\*w, x\)"),
    ],
)
def test_a_model_is_no_function_of_its_weights(library: str, made: Any, advice: str) -> None:
    module = pytest.importorskip(library)
    with pytest.raises(TypeError, match=rf"function is the {library} model {advice}"):
        jsc.jit_inference(made(module), {})
