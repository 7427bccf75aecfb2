"""What joins a convolution, in each spelling and order of axes, and what is left, with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.test_util import check_grads

import jax_sparse_conv as jsc

pytestmark = pytest.mark.usefixtures("float32_products")

KEYS = jax.random.split(jax.random.key(0), 8)
X = jax.random.normal(KEYS[0], (2, 8, 9, 16))
KERNEL = 0.1 * jax.random.normal(KEYS[1], (3, 3, 16, 16))
MEAN, GAIN, BIAS = (0.3 * jax.random.normal(key, (16,)) for key in KEYS[2:5])
VARIANCE = jnp.linspace(0.5, 2, 16)
NHWC = ("NHWC", "HWIO", "NHWC")


def conv(x: jax.Array, kernel: jax.Array = KERNEL, padding: Any = "SAME", **options: Any) -> jax.Array:
    return lax.conv_general_dilated(x, kernel, (1, 1), padding, dimension_numbers=NHWC, **options)


def norm(x: jax.Array) -> jax.Array:
    return (x - MEAN) * lax.rsqrt(VARIANCE + 1e-5) * GAIN + BIAS


JOINS: dict[str, tuple[Callable[[jax.Array], jax.Array], list[tuple[str, ...]]]] = {
    "bias": (lambda x: conv(x) + BIAS, [("bias",)]),
    "bias in front": (lambda x: BIAS + conv(x), [("bias",)]),
    "bias that is broadcast": (lambda x: conv(x) + jnp.broadcast_to(BIAS, x.shape), [("bias",)]),
    "subtracted from": (lambda x: BIAS - conv(x), [("scale and bias",)]),
    "negative": (lambda x: -conv(x), [("scale",)]),
    "a number": (lambda x: conv(x) * 0.5 + 1, [("scale and bias",)]),
    "norm": (lambda x: norm(conv(x)), [("scale and bias",)]),
    "norm by a standard deviation": (lambda x: (conv(x) - MEAN) / jnp.sqrt(VARIANCE), [("scale and bias",)]),
    "relu": (lambda x: jax.nn.relu(conv(x)), [("relu",)]),
    "maximum": (lambda x: jnp.maximum(conv(x), 0), [("relu",)]),
    "where": (lambda x: jnp.where((y := conv(x)) > 0, y, 0), [("relu",)]),
    "where greater or equal": (lambda x: jnp.where((y := conv(x)) >= 0, y, 0.0), [("relu",)]),
    "clip": (lambda x: jnp.clip(conv(x), 0), [("relu",)]),
    "relu6 is XLA's": (lambda x: jax.nn.relu6(conv(x) + BIAS), [("bias",)]),
    "residual": (lambda x: jax.nn.relu(norm(conv(x)) + x), [("scale and bias", "residual", "relu")]),
    "residual in front": (lambda x: jax.nn.relu(x + conv(x)), [("residual", "relu")]),
    "bias behind a residual": (lambda x: (conv(x) + x) + BIAS, [("residual", "bias")]),
    "of two layers the later": (lambda x: norm(conv(x)) + conv(x, 2 * KERNEL), [("scale and bias",), ("residual",)]),
    "max pool": (
        lambda x: lax.reduce_window(
            jax.nn.relu(conv(x)), -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), ((0, 0), (1, 1), (1, 1), (0, 0))
        ),
        [("relu", "max pool")],
    ),
    "relu behind a max pool": (
        lambda x: jax.nn.relu(lax.reduce_window(conv(x), -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")),
        [("max pool", "relu")],
    ),
    "average pool": (
        lambda x: lax.reduce_window(conv(x), 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") / 4,
        [("average pool",)],
    ),
    "sums of a pool are none": (
        lambda x: lax.reduce_window(conv(x) + BIAS, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") / 3,
        [("bias",)],
    ),
    "pad": (lambda x: conv(jnp.pad(x, ((0, 0), (1, 2), (0, 1), (0, 0))), padding="VALID"), [()]),
    "pad with ones is none": (lambda x: conv(jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=1)), [()]),
    "what else reads the value ends it": (lambda x: jax.nn.relu(y := conv(x) + BIAS) + jnp.sin(y), [("bias",)]),
    "cast and back": (
        lambda x: norm(conv(x.astype(jnp.bfloat16), KERNEL.astype(jnp.bfloat16)).astype(jnp.float32)).astype(
            jnp.bfloat16
        ),
        [("scale and bias",)],
    ),
    "sums in float32 and back": (
        lambda x: norm(
            conv(x.astype(jnp.bfloat16), KERNEL.astype(jnp.bfloat16), preferred_element_type=jnp.float32)
        ).astype(jnp.bfloat16),
        [("scale and bias",)],
    ),
    "dense": (lambda x: jax.nn.relu(x[:, 0, 0] @ KERNEL[0, 0] + BIAS), [("bias", "relu")]),
    "dense, turned": (lambda x: (KERNEL[0, 0] @ x[0, 0, 0]) + BIAS, [("bias",)]),
}


@pytest.mark.parametrize("name", JOINS)
def test_what_joins(name: str) -> None:
    function, joined = JOINS[name]
    fast = jsc.accelerate(function)
    assert [row.joined for row in fast.report(X).rows] == joined  # type: ignore[attr-defined]
    assert [row.reason for row in fast.report(X).rows] == [None] * len(joined)  # type: ignore[attr-defined]
    found, wanted = jax.jit(fast)(X), jax.jit(function)(X)
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    tolerance = 2e-2 if found.dtype == jnp.bfloat16 else 1e-5
    np.testing.assert_allclose(
        found.astype(jnp.float32), wanted.astype(jnp.float32), rtol=tolerance, atol=tolerance * float(abs(wanted).max())
    )


LEFT: dict[str, tuple[Callable[[jax.Array], jax.Array], str]] = {
    "one dimension": (
        lambda x: lax.conv_general_dilated(x[0], KERNEL[0], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")),
        "it has 1 spatial dimensions, not 2",
    ),
    "transposed": (
        lambda x: conv(x, padding=((2, 2), (2, 2)), lhs_dilation=(2, 2)),
        "its lhs_dilation is (2, 2), as of a transposed",
    ),
    "batch groups": (lambda x: conv(x, KERNEL[..., :2], batch_group_count=2), "its batch_group_count is 2"),
    "integers": (lambda x: conv(x.astype(jnp.int32), KERNEL.astype(jnp.int32)), "there are no kernels for x of int32"),
    "float32 of bfloat16": (
        lambda x: conv(x.astype(jnp.bfloat16), KERNEL.astype(jnp.bfloat16), preferred_element_type=jnp.float32),
        "its result is float32 of x in bfloat16",
    ),
}


@pytest.mark.parametrize("name", LEFT)
@pytest.mark.filterwarnings("ignore:accelerate left all")
def test_what_is_left(name: str) -> None:
    function, reason = LEFT[name]
    (row,) = jsc.accelerate(function).report(X).rows  # type: ignore[attr-defined]
    assert row.reason is not None
    assert row.reason.startswith(reason)
    if name == "integers" and jax.default_backend() == "gpu":
        return  # XLA has none there
    np.testing.assert_allclose(jax.jit(jsc.accelerate(function))(X), jax.jit(function)(X), rtol=1e-5, atol=1e-5)


def test_a_function_with_nothing_to_do_runs_as_it_is() -> None:
    with pytest.warns(UserWarning, match="accelerate found no convolution in sin, which runs as it is"):
        assert jsc.accelerate(jnp.sin)(0.0) == 0
    with pytest.warns(UserWarning, match="accelerate left all 1 convolutions of .*lhs_dilation"):
        jsc.accelerate(LEFT["transposed"][0])(X)
    with pytest.raises(TypeError, match="function=3 cannot be called"):
        jsc.accelerate(3)  # type: ignore[type-var]


def channels_first(x: jax.Array) -> jax.Array:
    """Two layers and what is between them, [N, C, H, W]."""

    def block(x: jax.Array) -> jax.Array:
        kernel = KERNEL.transpose(3, 2, 0, 1)
        y = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NCHW", "OIHW", "NCHW"))
        return jax.nn.relu(y + BIAS[:, None, None] + x)

    y = lax.reduce_window(block(x), -jnp.inf, lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")
    y = jnp.concatenate([jnp.tanh(y), y * y.mean((2, 3), keepdims=True)], 1)[:, :16]
    return block(y)


def test_channels_first_moves_the_first_map_and_the_last() -> None:
    x = X.transpose(0, 3, 1, 2)

    equations = jax.make_jaxpr(jsc.accelerate(channels_first))(x).eqns
    moved = [each for each in equations if each.primitive.name == "transpose" and min(each.outvars[0].aval.shape) > 1]
    assert [each.params["permutation"] for each in moved] == [(0, 2, 3, 1), (0, 3, 1, 2)]
    np.testing.assert_allclose(
        jax.jit(jsc.accelerate(channels_first))(x), jax.jit(channels_first)(x), rtol=1e-4, atol=1e-4
    )


BODIES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "scan": lambda x: lax.scan(lambda c, _: (jax.nn.relu(norm(conv(c))), c.sum()), x, length=3)[0],
    "while": lambda x: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.tanh(conv(c[1]) + BIAS)), (0, x))[1],
    "cond": lambda x: lax.cond(x.sum() > 0, lambda x: norm(conv(x)), lambda x: x, x),
    "checkpoint": jax.checkpoint(lambda x: jax.nn.relu(norm(conv(x)))),
    "jit": jax.jit(lambda x: jax.nn.relu(norm(conv(x)))),
    "custom_jvp": jax.custom_jvp(lambda x: jax.nn.relu(norm(conv(x)))),
}
BODIES["custom_jvp"].defjvp(lambda primals, tangents: (conv(*primals), 3 * tangents[0]))  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", BODIES)
def test_bodies(name: str) -> None:
    function = BODIES[name]
    fast = jsc.accelerate(lambda x: 2 * function(x) + 1)
    assert [row.reason for row in fast.report(X).rows] == [None]  # type: ignore[attr-defined]
    assert "jsc_conv" in str(jax.make_jaxpr(fast)(X))
    np.testing.assert_allclose(jax.jit(fast)(X), jax.jit(function)(X) * 2 + 1, rtol=1e-4, atol=1e-4)
    if name != "while":
        gradient = jax.grad(lambda x: jnp.sum(2 * function(x) + 1))(X)
        np.testing.assert_allclose(jax.grad(lambda x: fast(x).sum())(X), gradient, rtol=1e-3, atol=1e-4)


def test_transformations() -> None:
    function = JOINS["residual"][0]
    fast = jsc.accelerate(function)
    np.testing.assert_allclose(jax.vmap(fast)(X[None])[0], function(X), rtol=1e-4, atol=1e-4)
    check_grads(fast, (X[:1, :3, :3],), 1, ["fwd", "rev"], atol=1e-2, rtol=1e-2)
    twice = jsc.accelerate(fast)
    np.testing.assert_allclose(twice(X), function(X), rtol=1e-4, atol=1e-4)


def test_calls_of_the_package_are_counted() -> None:
    rows = jsc.accelerate(lambda x: conv(jsc.conv(x, KERNEL, activation="relu"))).report(X).rows  # type: ignore[attr-defined]
    assert [row.reason for row in rows] == [None, None]


def test_weights_that_are_arguments_are_folded_where_that_is_cheap() -> None:
    function = lambda x, kernel, mean: jax.nn.relu((conv(x, kernel) - mean) * 2)  # noqa: E731
    small, large = jnp.ones((1, 3, 3, 16)), jnp.ones((8, 56, 56, 16))
    joined = [jsc.accelerate(function).report(x, KERNEL, MEAN).rows[0].joined for x in (small, large)]  # type: ignore[attr-defined]
    assert joined == [("bias",), ("scale and bias", "relu")]


def test_the_report_is_a_table() -> None:
    report = jsc.accelerate(JOINS["residual"][0]).report(jax.ShapeDtypeStruct(X.shape, X.dtype))  # type: ignore[attr-defined]
    lines = str(report).splitlines()
    assert lines[0].split() == ["layer", "input", "kernel", "with", "runs", "chain", "at"]
    assert "2x8x9x16  3x3x16x16  scale and bias, residual, relu" in lines[1]
    assert "test_recognise.py" in lines[1]
    assert lines[-1] == "1 of 1 layers are calls of jax_sparse_conv"
    assert report._repr_html_().startswith("<table><tr><th>layer</th>")
    assert repr(report) == str(report)
