"""`jit_inference` of any function: what is computed once, what is shared, and what new weights change."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_sparse_conv as jsc
from jax_sparse_conv._src import _native
from jax_sparse_conv._src.accelerate import hoist, inference
from jax_sparse_conv._src.accelerate.inference import Inference

pytestmark = pytest.mark.usefixtures("float32_products")

X = jax.random.normal(jax.random.key(0), (2, 6, 7, 3))
DIMENSIONS = ("NHWC", "HWIO", "NHWC")


def weights(seed: int = 1) -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(seed), 6)
    return {
        "kernel": 0.2 * jax.random.normal(keys[0], (3, 3, 3, 16)),
        "mean": jax.random.normal(keys[1], (16,)),
        "variance": jnp.exp(jax.random.normal(keys[2], (16,))),
        "head": 0.2 * jax.random.normal(keys[3], (16, 5)),
        "bias": jax.random.normal(keys[4], (5,)),
    }


def network(w: Any, x: jax.Array, scale: Any = 1.0, *, twice: bool = False) -> jax.Array:
    y = jax.lax.conv_general_dilated(x, w["kernel"], (1, 1), "SAME", dimension_numbers=DIMENSIONS)
    y = jax.nn.relu((y - w["mean"]) * jax.lax.rsqrt(w["variance"] + 1e-5))
    return (y.mean((1, 2)) @ w["head"] + w["bias"]) * scale * (2 if twice else 1)


def same(found: Any, wanted: Any) -> None:
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_calls() -> None:
    predict, w = jsc.jit_inference(network, weights(), static_argnames="twice"), weights()
    same(predict(X), network(w, X))
    same(predict(X, 0.5), network(w, X, 0.5))
    same(predict(X, scale=jnp.float32(2), twice=True), network(w, X, 2, twice=True))
    same(predict(np.asarray(X)), network(w, X))


def test_what_weights_alone_decide_is_computed_once() -> None:
    predict = jsc.jit_inference(network, weights())
    text = predict.lower(X).as_text()
    assert "rsqrt" not in text
    found = [value.shape for value in predict.prepared(X)]
    assert (1, 3, 3, 3, 16) in found  # the kernel with the batch norm in it, as the call reads it
    assert len(found) <= 5


def test_weights_that_are_read_as_they_are_have_no_copy() -> None:
    w = weights()
    predict = jsc.jit_inference(lambda w, x: jax.lax.conv(x.transpose(0, 3, 1, 2), w.T, (1, 1), "SAME"), w["kernel"])
    assert len(predict.prepared(X)) <= 2
    plain = jsc.jit_inference(lambda w, x: jsc.conv(x, w, strides=3), w["kernel"])
    assert [value is w["kernel"] for value in plain.prepared(X)] == [True]


def test_entries_share_what_they_need_of_the_weights() -> None:
    predict = jsc.jit_inference(network, weights())
    one, other = predict.prepared(X), predict.prepared(X[:1])
    assert [id(value) for value in one] == [id(value) for value in other]


def test_new_weights() -> None:
    traces = []

    def counted(w: Any, x: jax.Array) -> jax.Array:
        traces.append(x)
        return network(w, x)

    predict = jsc.jit_inference(counted, weights())
    before = predict(X)
    predict.update(weights(7))
    same(predict(X), network(weights(7), X))
    assert not np.allclose(before, predict(X))
    assert len(traces) == 1
    with pytest.raises(ValueError, match=r"weights\['head'\] is float16\[16, 5\], not float32\[16, 5\]"):
        predict.update({**weights(), "head": weights()["head"].astype(jnp.float16)})
    with pytest.raises(ValueError, match="another structure"):
        predict.update(list(weights().values()))
    same(predict(X), network(weights(7), X))


def test_settings_of_a_trace_are_seen() -> None:
    predict = jsc.jit_inference(network, weights())
    predict(X)
    with jax.default_matmul_precision("bfloat16"):
        predict(X)
    assert len(predict._entries) == 2


def test_transformations() -> None:
    predict, w = jsc.jit_inference(network, weights()), weights()
    same(jax.vmap(predict)(X[:, None])[:, 0], network(w, X))
    same(jax.jit(lambda x: predict(x) + 1)(X), network(w, X) + 1)
    gradient = jax.grad(lambda x: jnp.sum(network(w, x) ** 2))(X)
    same(jax.grad(lambda x: jnp.sum(predict(x) ** 2))(X), gradient)
    assert jax.eval_shape(predict, X).shape == (2, 5)


def test_leaves_that_are_no_arrays() -> None:
    predict = jsc.jit_inference(lambda w, x: w[1](network(w[0], x)), (weights(), jnp.tanh, None, 3))
    same(predict(X), jnp.tanh(network(weights(), X)))


def test_the_report() -> None:
    report = jsc.jit_inference(network, weights()).report(X)
    assert [row.joined for row in report.rows] == [("scale and bias", "relu"), ("scale and bias",)]
    assert "2 of 2 layers are calls of jax_sparse_conv" in str(report)
    by_xla = dataclasses.replace(report, rows=tuple(dataclasses.replace(row, runs="xla") for row in report.rows))
    assert by_xla.summary() == "2 of 2 layers are calls of jax_sparse_conv, 2 of which XLA runs"
    nothing = jsc.jit_inference(lambda w, x: x * w, jnp.ones(3)).report(X)
    assert str(nothing) == "Nothing was rewritten: there is no convolution, and no product of few rows with a matrix."


def test_a_flag_that_is_no_static_argument_says_so() -> None:
    predict = jsc.jit_inference(network, weights())
    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        predict(X, twice=True)
    assert any("static_argnames" in note for note in caught.value.__notes__)


def test_a_module_is_for_the_other_function() -> None:
    with pytest.raises(TypeError, match=r"function is the nnx module Conv, .* jsc.nnx.jit_inference takes it"):
        jsc.jit_inference(nnx.Conv(3, 8, (3, 3), rngs=nnx.Rngs(0)), X)


def test_what_cannot_be_called() -> None:
    with pytest.raises(TypeError, match="function=3 cannot be called"):
        jsc.jit_inference(3, {})  # type: ignore[arg-type]
    assert isinstance(jsc.jit_inference(network, weights()), Inference)


def test_compiler_options_are_known_here() -> None:
    assert inference._is_accepted("xla_gpu_graph_min_graph_size", 1)
    assert not inference._is_accepted("xla_no_such_option", 1)
    options = jsc.compiler_options()
    assert (options == {}) == (jax.default_backend() != "gpu")
    assert jax.jit(lambda x: x + 1, compiler_options=options)(1) == 2


@pytest.mark.parametrize(
    ("names", "kind", "message"),
    [
        ("foo", ValueError, "static_argnames has 'foo', which the function does not take: w, x, twice"),
        (("twice", "foo"), ValueError, "static_argnames has 'foo'"),
        (3, TypeError, "static_argnames=3 is no name and no names"),
    ],
)
def test_static_names_are_those_of_the_function(names: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        jsc.jit_inference(lambda w, x, twice=False: x, weights(), static_argnames=names)
    assert jsc.jit_inference(lambda w, x, **flags: x, weights(), static_argnames="foo")(jnp.ones(2), foo=1).shape == (
        2,
    )


def test_views_of_what_is_computed_are_made_once() -> None:
    """And those of a given array in each call, as they would else be copies of it."""

    def run(given: jax.Array, x: jax.Array) -> jax.Array:
        return x + given.reshape(1, 4, 6) + (2 * given).T.reshape(1, 4, 6)

    parts = hoist.split(jax.make_jaxpr(run)(jnp.ones((6, 4)), jnp.ones((1, 4, 6))), [True, False])
    assert [aval.shape for aval in parts.once.out_avals] == [(6, 4), (1, 4, 6)]
    assert [equation.primitive.name for equation in parts.every.jaxpr.eqns] == ["reshape", "add", "add"]


def pruned(w: Any, mask: jax.Array) -> jax.Array:
    return jnp.where(mask, w, 0)


def pruned_by_channels(w: Any, mask: jax.Array) -> jax.Array:
    return jnp.where(mask[0, 0, 0], w, 0)


def standardized(w: Any, _: jax.Array) -> jax.Array:
    mean, variance = (jnp.broadcast_to(f(w, axis=(0, 1, 2)), w.shape) for f in (jnp.mean, jnp.var))
    return (w - mean) / jnp.sqrt(jnp.maximum(variance * w[..., 0].size, 1e-4))


def in_a_band(w: Any, _: jax.Array) -> jax.Array:
    return w * (jnp.arange(w.shape[2])[:, None] <= jnp.arange(w.shape[3]))


@pytest.mark.parametrize("kernel_of", [pruned, pruned_by_channels, standardized, in_a_band])
def test_kernels_made_of_weights_and_constants_are_made_once(kernel_of: Any) -> None:
    keys = jax.random.split(jax.random.key(2), 2)
    w = {"kernel": jax.random.normal(keys[0], (3, 3, 3, 16)), "mask": jax.random.bernoulli(keys[1], 0.3, (3, 3, 3, 16))}

    def run(w: Any, x: jax.Array) -> jax.Array:
        kernel = kernel_of(w["kernel"], w["mask"])
        return jax.nn.relu(jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=DIMENSIONS))

    predict = jsc.jit_inference(run, w)
    np.testing.assert_allclose(predict(X), run(w, X), rtol=1e-5, atol=1e-5)
    (entry,) = predict._entries.values()
    names = [equation.primitive.name for equation in entry.chained.every.jaxpr.eqns]
    assert set(names) <= {"jsc_conv", "reshape", "broadcast_in_dim", "squeeze"}
    assert "jsc_conv" in names


@pytest.mark.skipif(
    jax.default_backend() != "cpu" or not _native.cpu_multiplies_pairs(), reason="this processor has no AVX512-BF16"
)
def test_a_call_copies_no_packed_kernel() -> None:
    """XLA did where the axis of the window had one element and the kernel's last axes were made one."""
    model = nnx.Conv(64, 256, (1, 1), dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    x = jnp.ones((1, 14, 14, 64), jnp.bfloat16)
    predict = jsc.nnx.jit_inference(model)
    predict(x)
    program = predict.lower(x).compile().as_text()
    assert "has_packed = 1" in program
    assert " fusion(" not in program
    assert " copy(" not in program
