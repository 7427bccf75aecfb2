"""Batches on a CPU as micro-batches: which parts of a function take each image by itself, and its values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from graphs import Graph
from jax import lax
from jax.experimental import checkify, jet
from networks import small_densenet, small_googlenet, small_regnet, small_resnet, small_squeezenet
from platforms import PLATFORM, require

import jax_sparse_conv as jsc
from jax_sparse_conv._src import devices
from jax_sparse_conv._src.accelerate import micro_batches
from jax_sparse_conv._src.dispatch import model

pytestmark = [
    pytest.mark.usefixtures("float32_products"),
    pytest.mark.skipif(PLATFORM != "cpu", reason="a GPU takes all images at once"),
]

X = jnp.asarray(np.random.default_rng(0).standard_normal((6, 8, 6, 4)), jnp.float32)
KERNEL = 0.2 * jax.random.normal(jax.random.key(1), (3, 3, 4, 4))
WEIGHTS = {"kernel": KERNEL, "wide": 0.2 * jax.random.normal(jax.random.key(2), (3, 3, 4, 16)), "row": jnp.arange(4.0)}
NUMBERS = ("NHWC", "HWIO", "NHWC")


@pytest.fixture(autouse=True)
def two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever machine this is; and so small maps are worth it."""
    require("ecr", "float32")
    cpu = dataclasses.replace(devices.cpu(), threads=2)
    monkeypatch.setattr(devices, "cpu", lambda: cpu)
    shipped = model.shipped

    def with_small_maps(name: str) -> Any:
        found = shipped(name)
        return {**found, "bytes, cached": 0.0, "call": 0.0} if name == "cpu micro batches" else found

    monkeypatch.setattr(micro_batches.model, "shipped", with_small_maps)


def conv(x: jax.Array, kernel: jax.Array = KERNEL) -> jax.Array:
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=NUMBERS)


def relu_conv(x: jax.Array, kernel: jax.Array = KERNEL) -> jax.Array:
    return jax.nn.relu(conv(x, kernel))


def has_micro_batches(predict: Any, *args: Any) -> bool:
    """Whether a call of a jitted function has: for one device, which the first argument is on."""
    return "stablehlo.while" in predict.lower(*args).as_text()


def check(function: Callable[..., Any], *args: Any, weights: Any = None, in_micro_batches: bool = True) -> None:
    weights = WEIGHTS if weights is None else weights
    predict = jsc.jit_inference(function, weights)
    assert has_micro_batches(predict, *args) == in_micro_batches
    accelerated = jax.jit(jsc.accelerate(function))  # of weights, too
    assert has_micro_batches(accelerated, weights, *args) == in_micro_batches
    wanted = jax.jit(function)(weights, *args)
    for found in (predict(*args), accelerated(weights, *args)):
        assert jax.tree.structure(found) == jax.tree.structure(wanted)
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            assert (one.shape, one.dtype) == (other.shape, other.dtype)
            np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-4)


# Each image by itself, to the end.
FUNCTIONS: dict[str, Callable[[Any, jax.Array], Any]] = {
    "layers": lambda w, x: relu_conv(relu_conv(x, w["kernel"]), w["wide"]),
    "a residual": lambda w, x: relu_conv(x, w["kernel"]) + relu_conv(conv(x, w["kernel"]), w["kernel"]),
    "a max pool": lambda w, x: lax.reduce_window(
        relu_conv(relu_conv(x), w["wide"]), -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"
    ),
    "an average pool": lambda w, x: (
        lax.reduce_window(relu_conv(x), 0.0, lax.add, (1, 3, 3, 1), (1, 1, 1, 1), "SAME") / 9
    ),
    "means and a product": lambda w, x: relu_conv(x, w["wide"]).mean((1, 2)) @ jnp.ones((16, 5)),
    "channels first": lambda w, x: lax.conv_general_dilated(
        relu_conv(x, w["kernel"]).transpose(0, 3, 1, 2),
        w["wide"],
        (1, 1),
        "SAME",
        dimension_numbers=("NCHW", "HWIO", "NCHW"),
    ),
    "images last": lambda w, x: relu_conv(x).transpose(1, 2, 3, 0) * 2,
    "a product on the right": lambda w, x: jnp.ones((3, 192)) @ relu_conv(x).reshape(6, 192).T,
    "concatenated": lambda w, x: jnp.concatenate([x, relu_conv(x), relu_conv(relu_conv(x))], axis=-1),
    "a pad and a slice": lambda w, x: jnp.pad(relu_conv(x), ((0, 0), (1, 1), (0, 0), (0, 0)))[:, ::2, 1:],
    "a scale and a shift": lambda w, x: relu_conv(relu_conv(x) * w["row"] + 1),
    "the largest channel": lambda w, x: relu_conv(x).argmax(-1),
    "where": lambda w, x: jnp.where(conv(x) > 0, jnp.tanh(conv(x)), 0.1 * conv(x)),
    "several results": lambda w, x: {"maps": relu_conv(x), "mean": relu_conv(relu_conv(x)).mean((1, 2, 3))},
    "a squeeze": lambda w, x: relu_conv(x).max((1, 2), keepdims=True).squeeze((1, 2)),
    "a softmax": lambda w, x: jax.nn.softmax(relu_conv(x).reshape(6, -1)),
    "a function of its own": lambda w, x: jax.jit(relu_conv)(jax.checkpoint(relu_conv)(x)),
    "a swish": lambda w, x: jax.nn.swish(conv(x)) + jax.nn.gelu(conv(x)),
    "a branch": lambda w, x: lax.cond(w["row"].sum() > 0, relu_conv, lambda x: conv(x) * 2, relu_conv(x)),
    "an axis more": lambda w, x: relu_conv(x)[:, None] * jnp.ones((1, 3, 1, 1, 1)),
}

# Images meet; the layers in front of that are, or none.
MEETING: dict[str, tuple[Callable[[Any, jax.Array], Any], bool]] = {
    "statistics of the batch": (lambda w, x: relu_conv((y := relu_conv(x)) - y.mean(0)), True),
    "a norm before all": (lambda w, x: relu_conv(x - x.mean(0)), False),
    "turned round": (lambda w, x: relu_conv(relu_conv(x)[::-1]), True),
    "a running sum": (lambda w, x: jnp.cumsum(relu_conv(relu_conv(x)), axis=0), True),
    "one image": (lambda w, x: relu_conv(relu_conv(x))[2:3], True),
    "beside another": (lambda w, x: jnp.concatenate([relu_conv(relu_conv(x)), x]), True),
    "images and rows as one": (lambda w, x: relu_conv(relu_conv(x)).reshape(48, 24), True),
    "products of images": (lambda w, x: jnp.einsum("nhwc,mhwc->nm", *[relu_conv(relu_conv(x))] * 2), True),
    "a number for each": (lambda w, x: relu_conv(relu_conv(x)) * jnp.arange(6.0)[:, None, None, None], True),
    "ranks in the batch": (lambda w, x: jnp.sort(relu_conv(relu_conv(x)), axis=0), True),
    "a softmax of the batch": (lambda w, x: jax.nn.softmax(relu_conv(relu_conv(x)), axis=0), True),
    "a window of images": (
        lambda w, x: lax.reduce_window(relu_conv(relu_conv(x)), -jnp.inf, lax.max, (2, 1, 1, 1), (1, 1, 1, 1), "VALID"),
        True,
    ),
    "a pad of images": (lambda w, x: jnp.pad(relu_conv(relu_conv(x)), ((1, 0), (0, 0), (0, 0), (0, 0))), True),
    "a loop": (
        lambda w, x: lax.fori_loop(0, 2, lambda _, x: conv(x) - x.max(0), relu_conv(relu_conv(x))),
        True,
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values(name: str) -> None:
    check(FUNCTIONS[name], X)


@pytest.mark.parametrize("name", MEETING)
def test_images_that_meet(name: str) -> None:
    function, in_micro_batches = MEETING[name]
    predict = jsc.jit_inference(function, WEIGHTS)
    accelerated = jax.jit(jsc.accelerate(lambda x: function(WEIGHTS, x)))
    wanted = jax.jit(function)(WEIGHTS, X)
    for each in (predict, accelerated):
        if name != "a loop":
            assert has_micro_batches(each, X) == in_micro_batches
        np.testing.assert_allclose(each(X), wanted, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("first", range(0, 100, 5))
def test_random_graphs(first: int) -> None:
    for seed in range(first, first + 5):
        graph = Graph(seed, "float32")
        x, weights = jnp.asarray(graph.image), [jnp.asarray(each) for each in graph.weights]
        predict = jsc.jit_inference(lambda weights, x, graph=graph: graph(x, weights), weights)
        accelerated = jax.jit(jsc.accelerate(graph))(x, weights)
        wanted = 2 * jax.tree.leaves(jax.jit(graph)(x, weights))
        for one, other in zip(jax.tree.leaves((predict(x), accelerated)), wanted, strict=True):
            first_norm, norm = (np.linalg.norm(np.asarray(each, np.float64)) for each in (one - other, other))
            assert first_norm <= 2e-5 * max(norm, 0.3), f"seed {seed}, {graph.layout}: {graph.steps}"


@pytest.mark.parametrize("build", [small_resnet, small_densenet, small_googlenet, small_squeezenet, small_regnet])
def test_networks(build: Callable[[], Any]) -> None:
    model = build()
    model.eval()
    x = jax.random.normal(jax.random.key(0), (4, 64, 64, 3))
    predict, accelerated = jsc.nnx.jit_inference(model), jax.jit(jsc.accelerate(lambda x: model(x)))
    wanted = jax.jit(nnx.jit(model))(x)
    for each in (predict, accelerated):
        assert has_micro_batches(each, x)
        np.testing.assert_allclose(each(x), wanted, rtol=1e-4, atol=1e-4 * float(jnp.abs(wanted).max()))


def test_several_arguments() -> None:
    y = X[..., ::-1]
    check(lambda w, x, y: relu_conv(relu_conv(x) + y) * y, X, y)
    check(lambda w, x, scale: relu_conv(relu_conv(x)) * scale, X, jnp.arange(4.0))
    check(lambda w, x, scale: relu_conv(relu_conv(x)) * scale, X, jnp.float32(3))
    square = jnp.ones((4, 5, 5, 4)).at[1].set(-2)  # as many images as channels
    check(lambda w, x, scale: relu_conv(relu_conv(x)) * scale, square, jnp.arange(4.0))
    check(lambda w, x, scale: relu_conv(relu_conv(x)) * scale[:, None, None, None], square, jnp.arange(4.0))


@pytest.mark.parametrize(("images", "in_micro_batches"), [(1, False), (2, True), (3, True), (4, True), (7, True)])
def test_any_number_of_images(images: int, in_micro_batches: bool) -> None:
    x = jax.random.normal(jax.random.key(images), (images, 6, 6, 4))
    check(FUNCTIONS["layers"], x, in_micro_batches=in_micro_batches)


def test_large_weights_are_read_once() -> None:
    matrix = jax.random.normal(jax.random.key(3), (144, 2000))
    x = jax.random.normal(jax.random.key(4), (20, 6, 6, 4))
    predict = jsc.jit_inference(lambda w, x: relu_conv(relu_conv(x)).reshape(20, -1) @ w, matrix)
    assert has_micro_batches(predict, x)
    (product,) = [line for line in predict.lower(x).as_text().splitlines() if "dot_general" in line]
    assert "tensor<20x2000xf32>" in product
    np.testing.assert_allclose(predict(x), relu_conv(relu_conv(x)).reshape(20, -1) @ matrix, rtol=1e-3, atol=1e-3)


def test_16_bits() -> None:
    weights = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), WEIGHTS)
    predict = jsc.jit_inference(FUNCTIONS["layers"], weights)
    x = X.astype(jnp.bfloat16)
    assert has_micro_batches(predict, x)
    found = jnp.concatenate([predict(x[i : i + 1]) for i in range(6)])
    np.testing.assert_allclose(np.asarray(predict(x), np.float32), np.asarray(found, np.float32), rtol=2e-2, atol=2e-2)


def test_a_jit_around_it_has_them() -> None:
    predict = jsc.jit_inference(FUNCTIONS["layers"], WEIGHTS)
    twice = jax.jit(lambda x: 2 * predict(x))
    assert has_micro_batches(twice, X)
    np.testing.assert_allclose(twice(X), 2 * FUNCTIONS["layers"](WEIGHTS, X), rtol=1e-4, atol=1e-4)


def squared(function: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    return lambda x: (function(x) ** 2).sum()


SEEN: dict[str, Callable[[Callable[[jax.Array], jax.Array]], Any]] = {
    "grad": lambda f: jax.grad(squared(f)),
    "grad of jit": lambda f: jax.grad(squared(jax.jit(f))),
    "jit of grad": lambda f: jax.jit(jax.grad(squared(f))),
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x[::-1],)),
    "linearize": lambda f: lambda x: jax.linearize(jax.jit(f), x)[1](x[::-1]),
    "hessian-vector product": lambda f: lambda x: jax.jvp(jax.grad(squared(jax.jit(f))), (x,), (x[::-1],)),
    "vmap": lambda f: lambda x: jax.vmap(f)(jnp.stack([x, 2 * x])),
    "vmap of jit": lambda f: lambda x: jax.vmap(jax.jit(f), in_axes=-1)(jnp.stack([x, 2 * x], axis=-1)),
    "checkpoint": lambda f: jax.grad(squared(jax.checkpoint(jax.jit(f)))),
    "scan": lambda f: lambda x: lax.scan(lambda carry, _: (carry, f(x + carry)), 0.0, None, length=2)[1],
    "disable_jit": lambda f: lambda x: _without_jit(f, x),
    "another jit_inference": lambda f: lambda x: jsc.jit_inference(lambda w, x: f(x) * w, jnp.float32(2))(x),
    "accelerate": lambda f: lambda x: jsc.accelerate(lambda x: f(x) * 2)(x),
    "checkify": lambda f: lambda x: checkify.checkify(jax.jit(f), errors=checkify.float_checks)(x)[1],
    "export": lambda f: lambda x: jax.export.export(jax.jit(f), disabled_checks=jsc.export_checks())(x).call(x),
}


def _without_jit(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    with jax.disable_jit():
        return function(x)


@pytest.mark.parametrize("by", ["jit_inference", "accelerate"])
@pytest.mark.parametrize("name", SEEN)
def test_transformations(name: str, by: str) -> None:
    predict = jsc.jit_inference(FUNCTIONS["layers"], WEIGHTS)
    if by == "accelerate":
        predict = jsc.accelerate(lambda x: FUNCTIONS["layers"](WEIGHTS, x))
    found = SEEN[name](predict)(X)
    wanted = SEEN[name](lambda x: FUNCTIONS["layers"](WEIGHTS, x))(X)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-3)


def test_derivatives_and_exports_have_the_batch_as_one() -> None:
    accelerated = jsc.accelerate(lambda x: FUNCTIONS["layers"](WEIGHTS, x))
    for predict in (jsc.jit_inference(FUNCTIONS["layers"], WEIGHTS), accelerated):
        assert not has_micro_batches(jax.jit(jax.grad(squared(jax.jit(predict)))), X)
        assert not has_micro_batches(jax.jit(jax.vmap(jax.jit(predict))), X[None])
        exported = jax.export.export(jax.jit(predict), disabled_checks=jsc.export_checks())(X)
        assert "stablehlo.while" not in exported.mlir_module()


def test_kernels_are_no_images() -> None:
    """Though their first axis may be one, and be worked on by itself, as where a batch norm is folded."""

    def function(w: Any, x: jax.Array) -> jax.Array:
        kernel = w["kernel"] * w["scale"][:, None, None, None]
        return lax.conv(lax.conv(x, kernel, (1, 1), "SAME"), kernel, (1, 1), "SAME")

    w = {"kernel": jax.random.normal(jax.random.key(6), (6, 6, 3, 3)), "scale": jnp.arange(1.0, 7)}
    for images, in_micro_batches in ((1, False), (4, True), (6, True)):
        x = jax.random.normal(jax.random.key(7), (images, 6, 8, 8))
        run = jax.jit(jsc.accelerate(function))
        assert has_micro_batches(run, w, x) == in_micro_batches
        np.testing.assert_allclose(run(w, x), function(w, x), rtol=1e-3, atol=1e-2)


def test_checkify_sees_what_is_inside() -> None:
    predict = jsc.jit_inference(lambda w, x: relu_conv(relu_conv(x)) / w, jnp.zeros(4))
    error, _ = jax.jit(checkify.checkify(predict, errors=checkify.all_checks))(X)
    assert "nan generated by primitive: div" in str(error.get()) or "division by zero" in str(error.get())


def test_transposes() -> None:
    def function(w: Any, x: jax.Array) -> jax.Array:
        return conv(conv(x, w["kernel"]), w["wide"])

    predict = jax.jit(jsc.jit_inference(function, WEIGHTS))
    assert has_micro_batches(predict, X)
    y = jax.random.normal(jax.random.key(5), (6, 8, 6, 16))
    found, wanted = (jax.linear_transpose(each, X)(y)[0] for each in (predict, lambda x: function(WEIGHTS, x)))
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-3)


def test_taylor_series() -> None:
    def function(w: Any, x: jax.Array) -> jax.Array:
        return jnp.tanh(conv(jnp.tanh(conv(x, w["kernel"])), w["wide"]))

    predict = jax.jit(jsc.jit_inference(function, WEIGHTS))
    assert has_micro_batches(predict, X)
    terms = ((jnp.ones_like(X), jnp.zeros_like(X)),)
    found, wanted = (jet.jet(each, (X,), terms) for each in (predict, lambda x: function(WEIGHTS, x)))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-3)


def test_images_that_are_split_by_their_type(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = jax.make_mesh((1,), ("batch",), axis_types=(jax.sharding.AxisType.Explicit,), devices=jax.devices()[:1])
    x = jax.device_put(X, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("batch")))
    weights = jax.device_put(WEIGHTS, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    predict = jsc.jit_inference(FUNCTIONS["layers"], weights)
    assert not has_micro_batches(predict, x)
    np.testing.assert_allclose(predict(x), FUNCTIONS["layers"](WEIGHTS, X), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("cached", "size", "expected"), [(1e6, 32, True), (1e7, 32, False), (0.0, 4, False)])
def test_maps_and_weights_of_dense_blocks(
    cached: float, size: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block's own map, larger than what it reads and gives, may be worth it; not where weights outweigh it."""
    before = micro_batches.model.shipped

    def shipped(name: str) -> Any:
        return {**before(name), "bytes, cached": cached} if name == "cpu micro batches" else before(name)

    monkeypatch.setattr(micro_batches.model, "shipped", shipped)
    random = np.random.default_rng(3)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(0.2 * random.standard_normal(shape), jnp.float32)

    def layer(channels: int) -> jsc.DenseBlockLayer:
        return jsc.DenseBlockLayer(
            draw(channels), draw(channels), draw(1, 1, channels, 16), draw(16), draw(3, 3, 16, 16)
        )

    layers = [layer(channels) for channels in range(16, 112, 16)]
    transition = jsc.DenseTransition(draw(112), draw(112), draw(1, 1, 112, 16))
    predict = jsc.jit_inference(lambda w, x: jsc.dense_block(x, layers, transition=transition), {})
    x = draw(8, size, size, 16)
    assert has_micro_batches(predict, x) == expected
    wanted = jsc.dense_block(x, layers, transition=transition, implementation="xla")
    np.testing.assert_allclose(predict(x), wanted, rtol=1e-4, atol=1e-5)


def test_effects_keep_their_order() -> None:
    seen: list[str] = []

    def function(w: Any, x: jax.Array) -> jax.Array:
        y = relu_conv(relu_conv(x))
        jax.debug.callback(lambda _: seen.append("after"), y[0, 0, 0, 0], ordered=True)
        jax.debug.callback(lambda: seen.append("last"), ordered=True)
        return y

    predict = jsc.jit_inference(function, WEIGHTS)
    assert not has_micro_batches(predict, X)
    predict(X).block_until_ready()
    jax.effects_barrier()
    assert seen == ["after", "last"]


def test_new_weights() -> None:
    predict = jsc.jit_inference(FUNCTIONS["layers"], WEIGHTS)
    predict(X)
    changed = jax.tree.map(lambda leaf: -2 * leaf, WEIGHTS)
    predict.update(changed)
    np.testing.assert_allclose(predict(X), FUNCTIONS["layers"](changed, X), rtol=1e-3, atol=1e-3)


def test_small_maps_and_many_threads_are_taken_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = dataclasses.replace(devices.cpu(), threads=16)
    monkeypatch.setattr(devices, "cpu", lambda: cpu)
    check(FUNCTIONS["layers"], X, in_micro_batches=False)
    monkeypatch.undo()
    check(FUNCTIONS["layers"], X, in_micro_batches=False)
