"""What of a program is computed once, when weights are given: small, right, and the same from call to call."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import jax_sparse_conv as jsc
from jax_sparse_conv._src.accelerate import by_numpy, hoist

pytestmark = pytest.mark.usefixtures("float32_products")

DIMENSIONS = ("NHWC", "HWIO", "NHWC")
KERNEL = 0.1 * jax.random.normal(jax.random.key(1), (3, 3, 8, 8))
X = jax.random.normal(jax.random.key(0), (2, 6, 5, 8))


def conv(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=DIMENSIONS)


def split(function: Any, *arguments: jax.Array) -> hoist.Split:
    """Of a function whose first argument is its weights."""
    return hoist.split(jax.make_jaxpr(function)(*arguments), [True] + [False] * (len(arguments) - 1))


def names(closed: Any) -> list[str]:
    return [equation.primitive.name for equation in closed.jaxpr.eqns]


def largest(closed: Any) -> int:
    """Elements of the largest value that a program computes."""
    return max((variable.aval.size for each in closed.jaxpr.eqns for variable in each.outvars), default=0)


def test_what_repeats_weights_is_computed_where_it_is_read() -> None:
    """A bias over a map is not stored at the map's size, whatever follows."""

    def run(bias: jax.Array, x: jax.Array) -> jax.Array:
        over_map = jnp.broadcast_to(bias, (1, 4, 6, 64))
        for _ in range(20):
            over_map = over_map + jnp.sin(over_map)
        return x * over_map + jnp.tanh(2 * bias)

    parts = split(run, jnp.ones(64), jnp.ones((1, 4, 6, 64)))
    assert [aval.size for aval in parts.once.out_avals] == [64, 64]
    assert largest(parts.once) == 64


def test_no_large_array_is_made_of_weights() -> None:
    """Distances of all pairs, which XLA makes one by one."""

    def run(codes: jax.Array, x: jax.Array) -> jax.Array:
        near = (codes > jnp.linspace(-3, 3, 1000)[:, None, None]).mean(0)
        return x @ ((codes[:, None] - codes[None]) ** 2).sum(-1) @ near

    parts = split(run, jnp.ones((32, 16)), jnp.ones((2, 32)))
    assert largest(parts.once) <= 32 * 16


def test_states_of_zeros_are_not_of_weights() -> None:
    """Batches of different sizes share what they need of the weights."""

    def run(weights: Any, x: jax.Array) -> jax.Array:
        state = jnp.zeros((x.shape[0], 8))
        for _ in range(2):
            state = jnp.tanh(conv(x, weights[0]).mean((1, 2)) + state @ weights[1])
        return state

    weights = (KERNEL, jnp.eye(8))
    predict = jsc.jit_inference(run, weights)
    for images in (1, 2, 3):
        x = jnp.ones((images, 6, 5, 8))
        np.testing.assert_allclose(predict(x), run(weights, x), rtol=1e-5, atol=1e-5)
    made = {id(entry.prepared) for entry in predict._entries.values()}
    assert len(made) == 1


def test_layers_that_read_constants_are_reported() -> None:
    def run(kernel: jax.Array, x: jax.Array) -> jax.Array:
        grid = jnp.broadcast_to(jnp.arange(5.0)[:, None], (2, 6, 5, 8))
        return jax.nn.relu(conv(x, kernel) + conv(grid, kernel) + conv(jnp.zeros_like(x), kernel))

    predict = jsc.jit_inference(run, KERNEL)
    assert len(predict.report(X).rows) == 3
    np.testing.assert_allclose(predict(X), run(KERNEL, X), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "function",
    [
        lambda w, x: x @ w + jnp.zeros((x.shape[0], 4)) @ w,
        lambda w, x: x @ w + (jnp.zeros((x.shape[0], 4)) + w[0]),
        lambda w, x: x @ w + jnp.arange(x.shape[0])[:, None] * w[0],
        lambda w, x: jnp.concatenate([x[:, None], jnp.broadcast_to(w[0], (x.shape[0], 1, 4))], 1),
        lambda w, x: x @ w + jnp.where(jnp.arange(x.shape[0])[:, None] < 3, w[0], 0),
    ],
)
def test_symbolic_batches(function: Any) -> None:
    w = jax.random.normal(jax.random.key(3), (4, 4))
    (images,) = jax.export.symbolic_shape("images")
    shape = jax.ShapeDtypeStruct((images, 4), jnp.float32)
    x = jax.random.normal(jax.random.key(4), (5, 4))
    for exported in (
        jsc.jit_inference(function, w).export(shape),
        jax.export.export(jax.jit(jsc.accelerate(functools.partial(function, w))))(shape),
    ):
        np.testing.assert_allclose(exported.call(x), function(w, x), rtol=1e-5, atol=1e-5)


def test_two_callbacks_are_two_programs() -> None:
    """The text of both is the same."""

    def run(w: jax.Array, x: jax.Array) -> jax.Array:
        def scaled(kernel: Any) -> Any:
            return np.asarray(kernel) * np.float32(x.shape[0])

        return conv(x, jax.pure_callback(scaled, jax.ShapeDtypeStruct(w.shape, w.dtype), w))

    predict = jsc.jit_inference(run, KERNEL)
    for x in (X[:1], X):
        np.testing.assert_allclose(predict(x), run(KERNEL, x), rtol=1e-5, atol=1e-5)


def test_random_bits_of_either_kind() -> None:
    def run(w: Any, x: jax.Array) -> jax.Array:
        return x + w[0] * jax.random.uniform(w[1], w[0].shape) + jax.random.uniform(jax.random.key(0), w[0].shape)

    weights, x = (jnp.ones(5), jax.random.key(7)), jnp.zeros(5)
    predict = jsc.jit_inference(run, weights)
    for is_partitionable in (True, False, True):
        with jax.threefry_partitionable(is_partitionable):
            np.testing.assert_allclose(predict(x), run(weights, x), rtol=1e-6)


def test_new_weights_of_a_program_of_64_bits() -> None:
    def run(w: jax.Array, x: jax.Array) -> jax.Array:
        return x + w * 2 / 3 * jnp.arange(3)

    with jax.enable_x64(True):
        x, old, new = jnp.zeros(3), jnp.ones(3), jnp.arange(3.0)
        predict = jsc.jit_inference(run, old)
        assert predict(x).dtype == jnp.float64
    predict.update(new)
    with jax.enable_x64(True):
        np.testing.assert_allclose(predict(x), run(new, x), rtol=1e-12)


@pytest.mark.parametrize(
    ("function", "weight"),
    [
        (lambda w: lax.select_n(w, *(jnp.full(w.shape, i, jnp.float32) * w for i in range(70))), np.arange(8) * 8),
        (lambda w: (w**200).astype(jnp.float32), np.arange(8, dtype=np.int8)),
        (lambda w: jnp.where(w > 0, jnp.log(w), 0), np.arange(8, dtype=np.float32) - 4),
    ],
)
def test_what_numpy_has_otherwise(function: Any, weight: Any) -> None:
    w = jnp.asarray(weight)
    closed = jax.make_jaxpr(function)(w)
    with jax.debug_nans(True):
        (found,) = by_numpy.evaluate(closed, [w])
    np.testing.assert_allclose(found, jax.jit(function)(w), rtol=1e-6)


def test_a_mesh_named_inside() -> None:
    mesh = jax.make_mesh((1,), ("d",), devices=jax.devices()[:1])

    def run(w: jax.Array, x: jax.Array) -> jax.Array:
        def scaled(kernel: jax.Array) -> jax.Array:
            return kernel * (1 + lax.axis_index("d"))

        spec = PartitionSpec(None)
        return conv(x, jax.shard_map(scaled, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(w))

    want = jax.jit(run)(KERNEL, X)
    np.testing.assert_allclose(jsc.jit_inference(run, KERNEL)(X), want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(jax.jit(jsc.accelerate(functools.partial(run, KERNEL)))(X), want, rtol=1e-5, atol=1e-5)


def test_results_that_are_numbers() -> None:
    """In a derivative, too, where nothing is jitted."""

    def run(w: jax.Array, x: jax.Array) -> tuple[jax.Array, Any]:
        return conv(x, w).sum(), 3.0

    predict = jsc.jit_inference(run, KERNEL)
    _, number = jax.grad(predict, has_aux=True)(X)
    assert isinstance(number, jax.Array)
    assert number.dtype == jnp.float32
