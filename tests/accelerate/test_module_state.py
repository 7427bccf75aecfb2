"""What a function that `accelerate` takes writes into nnx modules among its arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax_checks import feature_map

import jax_sparse_conv as jsc

pytestmark = pytest.mark.usefixtures("float32_products")

X = feature_map((4, 8, 8, 3))


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv = nnx.Conv(3, 16, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dropout(nnx.relu(self.norm(self.conv(x))))


def loss(model: Any, x: jax.Array) -> jax.Array:
    return (model(x) ** 2).mean()


def step(model: Any, optimizer: nnx.Optimizer[Any], x: jax.Array) -> jax.Array:
    found, gradients = nnx.value_and_grad(loss)(model, x)
    optimizer.update(model, gradients)
    return found


def state_of(*modules: Any) -> list[np.ndarray]:
    leaves = jax.tree.leaves(nnx.state(modules))
    return [jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf for leaf in leaves]


WAYS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "a call": lambda function: function,
    "nnx.jit": nnx.jit,
    "nnx.grad": nnx.grad,
}


@pytest.mark.parametrize("way", WAYS)
def test_state_is_what_it_is_without(way: str) -> None:
    fresh, plain, ours = (Net(nnx.Rngs(0)) for _ in range(3))
    for _ in range(2):
        WAYS[way](loss)(plain, X)
        WAYS[way](jsc.accelerate(loss))(ours, x=X)
    for before, wanted, found in zip(*map(state_of, (fresh, plain, ours)), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
        assert before.shape == found.shape
    changed = [not np.array_equal(*pair) for pair in zip(state_of(fresh), state_of(ours), strict=True)]
    assert sum(changed) == 3  # mean, variance and the count of keys


@pytest.mark.parametrize("way", ["a call", "nnx.jit"])
def test_a_step_trains_the_model_that_it_is_given(way: str) -> None:
    losses = []
    for function in (step, jsc.accelerate(step)):
        model = Net(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.sgd(0.5), wrt=nnx.Param)
        losses.append([float(WAYS[way](function)(model, optimizer, X)) for _ in range(3)])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)
    assert losses[1][2] < losses[1][0]


def test_what_writes_nothing_keeps_its_arrays() -> None:
    model = Net(nnx.Rngs(0))
    model.eval()
    before = jax.tree.leaves(nnx.state(model))
    jsc.accelerate(loss)(model, X)
    assert all(one is other for one, other in zip(before, jax.tree.leaves(nnx.state(model)), strict=True))


def test_a_function_without_convolutions_writes_too() -> None:
    norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    with pytest.warns(UserWarning, match="accelerate found no convolution in <lambda>"):
        jsc.accelerate(lambda norm, x: norm(x))(norm, X)
    assert float(jnp.abs(norm.mean[...]).sum()) > 0


class Tied(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Conv(16, 16, (3, 3), rngs=rngs)
        self.second = self.first

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.second(nnx.relu(self.first(x)))


def test_tied_weights_are_read_right_and_not_written_twice() -> None:
    model, x = Tied(nnx.Rngs(0)), feature_map((2, 6, 6, 16))
    wanted, found = (nnx.grad(function)(model, x) for function in (loss, jsc.accelerate(loss)))
    for theirs, ours in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    before = state_of(model)
    optimizer = nnx.Optimizer(model, optax.sgd(0.5), wrt=nnx.Param)
    with pytest.raises(ValueError, match=r"writes into a Param that its arguments hold several times.*nnx\.split"):
        jsc.accelerate(step)(model, optimizer, x)
    assert all(one is other for one, other in zip(before, state_of(model), strict=True))
