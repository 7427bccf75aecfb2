"""What looks like a part of a layer and is none, values of odd types, and weights that change in odd ways."""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_sparse_conv as jsc

pytestmark = pytest.mark.usefixtures("float32_products")

X = jax.random.normal(jax.random.key(0), (2, 8, 8, 4))
KERNEL = 0.2 * jax.random.normal(jax.random.key(1), (3, 3, 4, 8))
WEIGHTS = {"kernel": KERNEL, "row": jnp.linspace(-1, 1, 8), "column": jnp.ones((8, 1)), "slope": jnp.asarray(0.25)}


def conv(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


@jax.custom_jvp
def straight_through(x: jax.Array) -> jax.Array:
    return jnp.maximum(x, 0)


straight_through.defjvp(lambda primals, tangents: (straight_through(primals[0]), tangents[0]))
CROP = ((0, 0, 0), (-1, -1, 0), (-1, 2, 0), (0, 0, 0))

FUNCTIONS: dict[str, Callable[[dict[str, Any], jax.Array], Any]] = {
    "a pad that crops": lambda w, x: conv(lax.pad(x, 0.0, CROP), w["kernel"]),
    "quantized weights": lambda w, x: conv(x, (w["kernel"] * 1000).astype(jnp.int8).astype(jnp.float32)),
    "unsigned weights": lambda w, x: conv(x, (w["kernel"] * 9).astype(jnp.uint8).astype(jnp.float32)),
    "quantized results": lambda w, x: conv(x, w["kernel"]).astype(jnp.float8_e4m3fn).astype(jnp.float32),
    "results that overflow": lambda w, x: (conv(x, w["kernel"]) * 1e5).astype(jnp.float16).astype(jnp.float32),
    "a derivative of its own": lambda w, x: straight_through(conv(x, w["kernel"])),
    "a scalar head": lambda w, x: jnp.tanh((x[0, 0, 0] @ w["column"][:4]).squeeze()) * 2 + x.sum(),
    "a scalar of a layer": lambda w, x: jnp.tanh((conv(x, w["kernel"])[0, 0, 0] @ w["column"]).squeeze()) * 2,
    "a layer and a scalar layer": lambda w, x: conv(x, w["kernel"]) + (x[0, 0] @ w["kernel"][0, 0])[0, :1].reshape(()),
    "a scalar of weights": lambda w, x: jax.nn.relu(conv(x, w["kernel"])) * (w["kernel"].mean() * 2),
    "a scalar weight that is returned": lambda w, x: (conv(x, w["kernel"]), w["slope"] * 2),
    "a choice by weights": lambda w, x: lax.cond(w["kernel"].sum() > 0, jnp.sin, jnp.cos, conv(x, w["kernel"])),
    "a key of a number": lambda w, x: conv(x, w["kernel"]) * jax.random.bernoulli(jax.random.key(3), 0.5, (8,)),
    "a key of a weight": lambda w, x: conv(
        x, w["kernel"] + jax.random.normal(jax.random.key(w["row"].sum().astype(int)), w["kernel"].shape)
    ),
    "a complex pad": lambda w, x: (
        conv(x, w["kernel"]),
        jnp.real(lax.pad(x.astype(jnp.complex64), np.complex64(1 + 1j), ((0, 0, 0), (1, 1, 0), (0, 0, 0), (0, 0, 0)))),
    ),
    "a layer of weights": lambda w, x: (
        jax.nn.relu(conv(w["kernel"][..., :4], w["kernel"])).sum() + conv(x, w["kernel"])
    ),
    "windows that are all padding": lambda w, x: jax.nn.relu(
        lax.reduce_window(
            conv(x, w["kernel"]), -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), ((0, 0), (3, 3), (0, 0), (0, 0))
        )
    ),
}


@pytest.mark.parametrize("kind", ["arguments", "constants", "jit_inference"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values(name: str, kind: str) -> None:
    function = FUNCTIONS[name]
    wanted = jax.jit(function)(WEIGHTS, X)
    if kind == "arguments":
        found = jax.jit(jsc.accelerate(function))(WEIGHTS, X)
    elif kind == "constants":
        found = jax.jit(jsc.accelerate(lambda x: function(WEIGHTS, x)))(X)
    else:
        predict = jsc.jit_inference(function, WEIGHTS)
        found = predict(X)
        assert predict.report(X).rows
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        # Of rounding to the next of few bits.
        tolerance = {"quantized results": 0.1, "results that overflow": 2e-3}.get(name, 1e-4)
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=1e-4)


def test_quantized_results_are_quantized() -> None:
    predict = jsc.jit_inference(FUNCTIONS["quantized results"], WEIGHTS)
    assert "f8E4M3FN" in predict.lower(X).as_text()
    if jax.default_backend() == "cpu":  # XLA undoes the rounding on a GPU
        found = predict(X)
        np.testing.assert_array_equal(found, found.astype(jnp.float8_e4m3fn).astype(jnp.float32))


def test_a_derivative_of_its_own_stays() -> None:
    function = FUNCTIONS["a derivative of its own"]
    gradients = [
        jax.grad(lambda kernel, f=f: jnp.sin(f({"kernel": kernel}, X)).sum())(KERNEL)
        for f in (function, jsc.accelerate(function))
    ]
    np.testing.assert_allclose(*gradients, rtol=1e-3, atol=1e-4)


def test_numbers_among_the_weights() -> None:
    function = lambda w, x: conv(x, w["kernel"]) * w["scale"]  # noqa: E731
    predict = jsc.jit_inference(function, {"kernel": KERNEL, "scale": 0.5})
    before = predict(X)
    predict.update({"kernel": KERNEL, "scale": 2.0})
    np.testing.assert_allclose(predict(X), 4 * before, rtol=1e-5)
    half = {"kernel": KERNEL.astype(jnp.bfloat16), "scale": jnp.asarray(2.0)}
    weak = jsc.jit_inference(function, half)
    assert weak(X.astype(jnp.bfloat16)).dtype == jnp.bfloat16
    weak.update({**half, "scale": jnp.float32(2)})
    assert weak(X.astype(jnp.bfloat16)).dtype == jnp.float32


def test_static_arguments_of_other_types_are_others() -> None:
    predict = jsc.jit_inference(lambda w, x, *, s: (conv(x, w), jnp.asarray(s)), KERNEL, static_argnames="s")
    assert [predict(X, s=s)[1].dtype for s in (1, 1.0, True)] == [jnp.int32, jnp.float32, jnp.bool_]


def test_new_weights_while_another_thread_calls_first() -> None:
    tracing, may_go_on = threading.Event(), threading.Event()

    def waiting(w: jax.Array, x: jax.Array) -> jax.Array:
        tracing.set()
        may_go_on.wait(10)
        return conv(x, w)

    predict = jsc.jit_inference(waiting, KERNEL)
    first = threading.Thread(target=lambda: predict(X))
    first.start()
    tracing.wait(10)
    update = threading.Thread(target=lambda: predict.update(0.1 * KERNEL))
    update.start()
    may_go_on.set()
    first.join()
    update.join()
    np.testing.assert_allclose(predict(X), conv(X, 0.1 * KERNEL), rtol=1e-4, atol=1e-5)


def test_traced_weights_and_constants() -> None:
    def loss(function: Callable[..., jax.Array]) -> Callable[[jax.Array], jax.Array]:
        return lambda kernel: jnp.sum(function(lambda w, x: conv(x, w), kernel)(X) ** 2)

    plain = jax.grad(loss(lambda f, w: lambda x: f(w, x)))(KERNEL)
    np.testing.assert_allclose(jax.grad(loss(jsc.jit_inference))(KERNEL), plain, rtol=1e-3, atol=1e-3)
    scaled = jax.jit(lambda s: jsc.jit_inference(lambda w, x: conv(x, w) * s, KERNEL)(X))(2.0)
    np.testing.assert_allclose(scaled, 2 * conv(X, KERNEL), rtol=1e-4, atol=1e-5)


def test_references_that_a_function_holds() -> None:
    reference = jax.new_ref(jnp.zeros(()))

    def counting(w: jax.Array, x: jax.Array) -> jax.Array:
        reference[...] = reference[...] + 1
        return conv(x, w)

    np.testing.assert_allclose(jax.jit(jsc.accelerate(counting))(KERNEL, X), conv(X, KERNEL), rtol=1e-4, atol=1e-5)
    assert reference[...] == 1
    with pytest.raises(ValueError, match=r"reads or writes a reference \(jax.new_ref\) that it holds itself"):
        jsc.jit_inference(counting, KERNEL)(X)


def in_64_bits(w: jax.Array, x: jax.Array) -> jax.Array:
    with jax.enable_x64(True):
        return jax.nn.relu(conv(x.astype(jnp.float64), w.astype(jnp.float64)))


def with_a_norm_in_64_bits(w: jax.Array, x: jax.Array) -> jax.Array:
    y = jax.nn.relu(conv(x, w))
    with jax.enable_x64(True):
        wide = y.astype(jnp.float64)
        y = ((wide - wide.mean((0, 1, 2))) / jnp.sqrt(wide.var((0, 1, 2)) + 1e-5)).astype(jnp.float32)
    return jax.nn.relu(y)


@pytest.mark.parametrize("function", [in_64_bits, with_a_norm_in_64_bits])
def test_64_bits_inside_alone(function: Callable[[jax.Array, jax.Array], jax.Array]) -> None:
    wanted = jax.jit(function)(KERNEL, X)
    with pytest.warns(UserWarning, match="as it is: it has arrays of 64 bits, and jax.enable_x64 is on only inside"):
        found = jsc.accelerate(lambda x: function(KERNEL, x))(X)
    assert found.dtype == wanted.dtype
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    assert "64 bits" in str(jsc.accelerate(function).report(KERNEL, X))
    predict = jsc.jit_inference(function, KERNEL)
    with pytest.raises(ValueError, match=r"64 bits.*call it in jax.enable_x64\(True\)"):
        predict(X)
    with jax.enable_x64(True):
        np.testing.assert_allclose(predict(X), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("inside", [False, True])
def test_what_xla_was_asked_to_run_stays(inside: bool) -> None:
    kernels = [jax.random.normal(jax.random.key(i), (3, 3, 16, 16)) / 12 for i in range(2)]
    matrix, x = jax.random.normal(jax.random.key(2), (16, 8)), jax.random.normal(jax.random.key(3), (1, 8, 8, 16))

    def layer(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return jsc.conv(x, kernel, activation="relu", implementation="xla")

    def function(weights: Any, x: jax.Array) -> jax.Array:
        (first, second), matrix = weights
        y = jsc.conv((jax.jit(layer) if inside else layer)(x, first), second)
        return jsc.dense(y.mean((1, 2)), matrix, implementation="xla")

    predict = jsc.jit_inference(function, (kernels, matrix))
    left, taken = predict.report(x).rows
    assert (left.reason, taken.reason) == ('implementation="xla" was asked for', None)
    program = predict.lower(x).as_text()
    assert program.count("stablehlo.convolution") >= 1
    assert "stablehlo.dot_general" in program
    np.testing.assert_allclose(predict(x), function((kernels, matrix), x), rtol=1e-4, atol=1e-5)


def test_strides_beyond_31_bits() -> None:
    def function(w: jax.Array, x: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(x, w, (2**31, 2**32), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    (row,) = jsc.jit_inference(function, KERNEL).report(X).rows
    assert row.reason == "its padding, dilation or strides reach 4294967296 pixels, beyond 2**31 - 1"
    with jax.default_device(jax.devices("cpu")[0]):  # cuDNN has no such strides
        wanted = function(*(jnp.asarray(np.asarray(each)) for each in (KERNEL, X)))
        np.testing.assert_allclose(
            jax.jit(jsc.accelerate(function))(np.asarray(KERNEL), np.asarray(X)), wanted, rtol=1e-5
        )


def branching(w: jax.Array, x: jax.Array) -> jax.Array:
    return conv(x, w) if x.sum() > 0 else x


@pytest.mark.parametrize("function", [branching, functools.partial(branching), jax.jit(branching)])
def test_errors_of_a_trace_name_the_function(function: Callable[..., jax.Array]) -> None:
    named = rf"the function branching at .*{re.escape(Path(__file__).name)}.*the value of the argument x"
    for call in (lambda: jsc.accelerate(function)(KERNEL, X), lambda: jsc.jit_inference(function, KERNEL)(X)):
        with pytest.raises(jax.errors.TracerBoolConversionError, match=re.compile(named, re.DOTALL)):
            call()
