"""What chains read of the weights in one array, as on a GPU: values, arguments, derivatives, images of `vmap`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from oracle import relative_error

import jax_sparse_conv as jsc
from jax_sparse_conv._src import devices
from jax_sparse_conv._src.fusion import chain_rules, chains, one_array

X = jax.random.normal(jax.random.key(0), (1, 8, 9, 16))
SHAPES = [(3, 3, 16, 16), (1, 1, 16, 32), (3, 3, 32, 64), *[(3, 3, 64, 64)] * 6]  # enough for a chain that pays


def weights() -> list[dict[str, jax.Array]]:
    keys = jax.random.split(jax.random.key(1), len(SHAPES))
    kernels = [
        jax.random.normal(key, shape) / np.sqrt(np.prod(shape[:3])) for key, shape in zip(keys, SHAPES, strict=True)
    ]
    return [{"kernel": kernel, "scale": kernel.sum((0, 1, 2)) + 1, "shift": kernel[0, 0, 0]} for kernel in kernels]


def network(weights: Any, x: jax.Array) -> jax.Array:
    for each in weights:
        y = lax.conv_general_dilated(x, each["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        x = jax.nn.relu(y * each["scale"] + each["shift"])
    return x


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chains are made and said to be one call, and lowered layer by layer all the same."""
    if jax.default_backend() == "gpu":
        return
    monkeypatch.setattr(devices, "default_platform", lambda: "gpu")
    monkeypatch.setattr(chains, "is_one_call", lambda operands, layers, chosen: True)
    monkeypatch.setattr(chain_rules, "why_not", lambda *of: None)


@pytest.mark.usefixtures("as_on_a_gpu", "float32_products")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_chain_has_one_array(dtype: str) -> None:
    given = jax.tree.map(lambda each: each.astype(dtype), weights())
    x = X.astype(dtype)
    predict = jsc.jit_inference(network, given)
    assert len(predict.prepared(x)) == 1
    wanted = np.asarray(jax.jit(network)(given, x), np.float64)
    tolerance = {"float32": 1e-5, "bfloat16": 2e-2}[dtype]
    assert relative_error(predict(x), wanted) < tolerance
    new = jax.tree.map(lambda each: 1.5 * each, given)
    predict.update(new)
    assert relative_error(predict(x), np.asarray(jax.jit(network)(new, x), np.float64)) < tolerance


@pytest.mark.usefixtures("as_on_a_gpu", "float32_products")
def test_transformations() -> None:
    given = weights()
    predict = jsc.jit_inference(network, given)
    images = jnp.stack([X, 2 * X, -X])
    assert relative_error(jax.vmap(predict)(images), np.asarray([network(given, x) for x in images])) < 1e-5
    assert relative_error(jax.jit(predict)(X), network(given, X)) < 1e-5
    found, wanted = (jax.grad(lambda x, f=f: jnp.sin(f(x)).sum())(X) for f in (predict, lambda x: network(given, x)))
    assert relative_error(found, wanted) < 1e-4  # the sine of values up to 80


@pytest.mark.usefixtures("as_on_a_gpu", "float32_products")
def test_what_else_reads_a_weight_keeps_it() -> None:
    given = weights()

    def function(weights: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return network(weights, x), x * weights[0]["kernel"][0, 0, 0] + weights[1]["shift"].sum()

    predict = jsc.jit_inference(function, given)
    assert len(predict.prepared(X)) > 1
    for found, wanted in zip(predict(X), function(given, X), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("as_on_a_gpu", "float32_products")
def test_weights_that_layers_share() -> None:
    each = {"kernel": weights()[0]["kernel"], "scale": jnp.full(16, 0.9), "shift": jnp.full(16, 0.1)}

    def function(weights: Any, x: jax.Array) -> jax.Array:
        return network([weights] * 8, x)

    predict = jsc.jit_inference(function, each)
    assert len(predict.prepared(X)) == 1
    assert relative_error(predict(X), function(each, X)) < 1e-5
    kernels = [jnp.eye(16)[None, None], jnp.full((3, 3, 16, 16), 0.01)]
    shared = jsc.jit_inference(lambda w, x: [x := jsc.conv(x, w[i % 2]) for i in range(8)][-1], kernels)
    wanted = X
    for index in range(8):
        wanted = jsc.conv(wanted, kernels[index % 2])
    assert relative_error(shared(X), wanted) < 1e-5


@jax.custom_jvp
def second(one: jax.Array, other: jax.Array) -> jax.Array:
    return other


second.defjvp(lambda primals, tangents: (primals[1], tangents[1]))


@pytest.mark.usefixtures("as_on_a_gpu", "float32_products")
def test_weights_that_a_rule_of_its_own_chooses() -> None:
    kernels = [jax.random.normal(key, (3, 3, 16, 16)) / 12 for key in jax.random.split(jax.random.key(5), 9)]

    def function(weights: Any, x: jax.Array) -> jax.Array:
        for index in range(8):
            x = jsc.conv(x, second(weights[index], weights[index + 1]))
        return x

    assert relative_error(jsc.jit_inference(function, kernels)(X), function(kernels, X)) < 1e-5


@pytest.mark.usefixtures("as_on_a_gpu", "float32_products")
def test_weights_that_are_maps_too() -> None:
    kernel, bias = jnp.full((1, 1, 16, 16), 0.1), jnp.arange(16.0)

    def with_bias(weights: Any, x: jax.Array) -> jax.Array:
        for _ in range(8):
            x = jsc.conv(x, weights[0], weights[1], residual=weights[1].reshape(1, 1, 1, 16))
        return x

    def of_itself(weights: Any, x: jax.Array) -> jax.Array:
        y = jsc.conv(weights[0], weights[0])
        for _ in range(8):
            y = jsc.conv(y, weights[0])
        return y * x

    x = X[:, :1, :1]
    for function in (with_bias, of_itself):
        given = [kernel, bias] if function is with_bias else [jnp.full((1, 1, 16, 16), 0.1).reshape(1, 1, 16, 16)]
        found, wanted = jsc.jit_inference(function, given)(x), function(given, x)
        assert relative_error(found, wanted) < 1e-5


@pytest.mark.usefixtures("as_on_a_gpu")
def test_large_weights_of_the_users_own_have_no_copy() -> None:
    kernels = [jnp.ones((3, 3, 64, 64)), jnp.ones((1, 1, 64, 64))]
    x = jnp.ones((1, 8, 9, 64))
    predict = jsc.jit_inference(lambda w, x: jsc.conv(jsc.conv(x, w[0]), w[1]), kernels)
    assert any(each is kernels[0] for each in predict.prepared(x))


def test_slices_are_what_was_joined() -> None:
    shapes = ((3, 5), (1,), (2, 64))
    arrays = [jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape) for shape in shapes]
    values = one_array.joined(arrays)
    assert values.shape == (one_array.size(shapes),) == (256,)
    for found, wanted in zip(one_array.slices(values, shapes), arrays, strict=True):
        np.testing.assert_array_equal(found, wanted)
    assert [each.shape for each in one_array.abstract(jax.typeof(values), shapes)] == list(shapes)
