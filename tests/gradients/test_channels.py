"""Sums and affine maps of channels against float64: what batch norms in training are made of."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from flax import nnx
from jax.experimental import jet
from jax.test_util import check_grads

import jax_sparse_conv as jsc
from jax_sparse_conv._src import _native, devices
from jax_sparse_conv._src.layers import batch_norms
from jax_sparse_conv._src.primitive import channels, turned_kernel

DTYPES = ("float32", "bfloat16", "float16", "float64")
UNITS = {"float32": 2**-24, "bfloat16": 2**-9, "float16": 2**-11, "float64": 2**-53}
SHAPES = (
    (3, 9, 7, 1),
    (2, 5, 5, 3),
    (1, 1, 1, 16),
    (4, 7, 7, 40),
    (2, 17, 13, 64),
    (2, 3, 5, 523),
    (5, 130),
    (300, 17),
)
EPSILON = 1e-3


def batch_norm(x: Any, scale: Any, shift: Any, residual: Any = None, *, relu: bool = False) -> Any:
    """y, mean and variance by the operations."""
    x, total, _, spread = channels.sums(x)
    pixels = np.prod(x.shape[:-1])
    mean, variance = total / pixels, spread / pixels
    factor = jax.lax.rsqrt(variance + EPSILON) * scale
    return channels.affine(x, mean, factor, shift, residual, relu=relu), mean, variance


def in_float64(x: Any, scale: Any, shift: Any, residual: Any = None, *, relu: bool = False) -> Any:
    """The same in numpy's or jax's float64, by the definition."""
    axes = tuple(range(x.ndim - 1))
    mean = x.mean(axes)
    variance = ((x - mean) ** 2).mean(axes)
    y = (x - mean) / jnp.sqrt(variance + EPSILON) * scale + shift
    y = y if residual is None else y + residual
    return (jnp.where(y > 0, y, 0) if relu else y), mean, variance


def operands(shape: tuple[int, ...], dtype: str, has_residual: bool, mean: float = 1.0) -> list[Any]:
    rng = np.random.default_rng(sum(shape))
    rows = "float64" if dtype == "float64" else "float32"
    x = rng.normal(mean, 2, shape)
    found = [jnp.asarray(x, dtype), *(jnp.asarray(rng.normal(1, 0.5, shape[-1]), rows) for _ in range(2))]
    return [*found, jnp.asarray(rng.normal(0, 1, shape), dtype)] if has_residual else found


def wide(arrays: Any) -> Any:
    return jax.tree.map(lambda each: jnp.asarray(each, "float64"), arrays)


def assert_near(found: Any, expected: Any, units: float) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert oracle.relative_error(one, np.asarray(other)) <= units


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients(shape: tuple[int, ...], dtype: str, has_residual: bool, relu: bool) -> None:
    with jax.enable_x64(True):
        given = operands(shape, dtype, has_residual)
        # Units of the dtype of sums and of the map's; the sign of a y near 0 may differ, and a whole cotangent with it.
        rows, maps = 16 * UNITS["float64" if dtype == "float64" else "float32"], 4 * UNITS[dtype]
        y, *moments = jax.jit(functools.partial(batch_norm, relu=relu))(*given)
        expected, *moments_expected = in_float64(*wide(given), relu=relu)
        assert y.dtype == given[0].dtype
        assert_near(moments, moments_expected, rows)
        assert_near(y, expected, maps + rows)

        rng = np.random.default_rng(1)
        weights = [jnp.asarray(rng.normal(size=shape)), *(jnp.asarray(rng.normal(size=shape[-1])) for _ in range(2))]
        is_safe = jnp.abs(in_float64(*wide(given))[0]) > 0.05  # no ReLU's sign depends on rounding there
        weights[0] = jnp.where(is_safe, weights[0], 0)

        def weighted(function: Any) -> Any:
            return lambda *a: sum(
                (jnp.asarray(o, "float64") * w).sum() for o, w in zip(function(*a), weights, strict=True)
            )

        every = tuple(range(len(given)))
        found = jax.jit(jax.grad(weighted(functools.partial(batch_norm, relu=relu)), every))(*given)
        wanted = jax.grad(weighted(functools.partial(in_float64, relu=relu)), every)(*wide(given))
        assert [each.dtype for each in found] == [each.dtype for each in given]
        if np.prod(shape[:-1]) > 1:  # of one pixel, gradients of x are what is left of equal terms
            assert_near(found, wanted, 8 * maps + 8 * rows)


@pytest.mark.skipif(devices.default_platform() != "cpu", reason="these are the CPU's instruction sets")
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_instruction_set(dtype: str, cpu_isa: str) -> None:
    for shape in ((2, 5, 5, 3), (4, 7, 7, 40), (2, 3, 5, 523)):
        for has_residual in (False, True):
            test_values_and_gradients(shape, dtype, has_residual, has_residual)


@pytest.mark.parametrize("mean", [1e2, 1e4])
def test_a_mean_far_from_zero_costs_the_variance_no_digits(mean: float) -> None:
    with jax.enable_x64(True):
        x, scale, shift = operands((4, 9, 9, 32), "float32", False, mean)
        variance = batch_norm(x, scale, shift)[2]
        assert_near(variance, in_float64(*wide((x, scale, shift)))[2], 1e-6)


def test_the_gradient_of_a_variance_far_from_zero() -> None:
    with jax.enable_x64(True):
        x = operands((4, 9, 9, 32), "float32", False, 1e3)[0]
        spread = lambda x: channels.sums(x)[3].sum()  # noqa: E731
        exact = lambda x: ((x - x.mean((0, 1, 2))) ** 2).sum()  # noqa: E731
        assert_near(jax.grad(spread)(x), jax.grad(exact)(wide(x)), 3e-5)
        tangent = operands((4, 9, 9, 32), "float32", False, 0.0)[0]
        found = jax.jvp(spread, (x,), (tangent,))[1]
        assert abs(found / jax.jvp(exact, (wide(x),), (wide(tangent),))[1] - 1) < 1e-3


def test_first_pixels_unlike_the_rest() -> None:
    x = np.full((1, 512, 512, 16), 1.1, np.float32)
    x[0, 0, :16] = 0
    spread = channels.sums(jnp.asarray(x))[3]
    wide_x = x.astype(np.float64)
    np.testing.assert_allclose(spread, ((wide_x - wide_x.mean((0, 1, 2))) ** 2).sum((0, 1, 2)), rtol=1e-3)


def test_squares_beyond_the_dtype_are_infinite() -> None:
    squares = channels.sums(jnp.full((2, 8, 8, 16), 3.2e38))[2]
    np.testing.assert_array_equal(squares, np.full(16, np.inf))
    x = jnp.ones((2, 8, 8, 16)).at[0, 0, 0].set(-np.inf).at[1, 7, 7].set(np.inf)
    np.testing.assert_array_equal(channels.sums(x)[2], np.full(16, np.inf))


def test_gradients_at_zero_under_vmap() -> None:
    zeros, row = jnp.zeros((3, 2, 5, 5, 16)), jnp.zeros(16)
    loss = lambda bias: jax.vmap(lambda x: channels.affine(x, row, row, bias, relu=True))(zeros).sum()  # noqa: E731
    np.testing.assert_array_equal(jax.grad(loss)(row), row)


def test_taylor_terms() -> None:
    x, scale, shift = operands((2, 5, 5, 16), "float32", False)
    function = lambda *a: channels.affine(*a[:1], shift, *a[1:])  # noqa: E731
    _, (found,) = jet.jet(function, (x, scale, shift), ((x,), (scale,), (shift,)))
    np.testing.assert_allclose(found, jax.jvp(function, (x, scale, shift), (x, scale, shift))[1], rtol=1e-5)
    kernel, bias = jnp.ones((3, 3, 16, 16)) / 9, jnp.ones(16)
    gradient = jax.grad(lambda w, b: (jsc.conv(x, w, b, padding="SAME") ** 2).sum(), (0, 1))
    _, found = jet.jet(gradient, (kernel, bias), ((kernel,), (bias,)))
    expected = jax.jvp(gradient, (kernel, bias), (kernel, bias))[1]
    for (one,), other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3)


def test_few_channels_and_other_platforms_are_xlas(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not channels.takes(jnp.zeros((2, 64, 64, 3)))
    assert channels.takes(jnp.zeros((2, 64, 64, 32))) == (devices.default_platform() == "cpu")
    monkeypatch.setattr(devices, "default_platform", lambda: "gpu")
    assert not channels.takes(jnp.zeros((2, 64, 64, 32)))
    assert not turned_kernel.takes(jnp.zeros((1, 3, 3, 256, 256)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_in_its_channel(value: float, dtype: str) -> None:
    x, scale, shift = operands((2, 6, 6, 40), dtype, False)
    for place in ((0, 0, 0, 5), (1, 3, 2, 7)):
        x = x.at[place].set(value)
    y, mean, _ = batch_norm(x, scale, shift, relu=True)
    others = np.delete(np.arange(40), [5, 7])
    clean = batch_norm(x[..., others], scale[others], shift[others], relu=True)
    np.testing.assert_array_equal(y[..., others], clean[0])
    assert not np.isfinite(mean[np.array([5, 7])]).any()
    assert np.isnan(np.asarray(y, np.float32)[..., [5, 7]]).all()


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("has_residual", [False, True])
def test_numerical_derivatives_of_second_order(has_residual: bool, relu: bool) -> None:
    with jax.enable_x64(True):
        given = operands((2, 4, 4, 40), "float64", has_residual)
        is_safe = jnp.abs(in_float64(*given)[0]) > 0.05
        loss = lambda *a: jnp.where(is_safe, batch_norm(*a, relu=relu)[0], 0)  # noqa: E731
        check_grads(loss, tuple(given), order=2, modes=["fwd", "rev"], rtol=2e-2)


def test_transformations() -> None:
    x, scale, shift, residual = operands((2, 5, 5, 40), "float32", True)
    loss = lambda x: (batch_norm(x, scale, shift, residual, relu=True)[0] ** 2).sum()  # noqa: E731
    many = jnp.stack([x, 2 * x, x - 1])
    each = jnp.stack([jax.grad(loss)(one) for one in many])
    np.testing.assert_allclose(jax.vmap(jax.grad(loss))(many), each, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(jax.grad(jax.checkpoint(loss))(x), jax.grad(loss)(x), rtol=1e-4, atol=1e-5)
    backward = jax.vjp(lambda x: batch_norm(x, scale, shift)[0], x)[1]
    turned = jax.linear_transpose(backward, residual)
    tangent = jax.jvp(lambda x: batch_norm(x, scale, shift)[0], (x,), (residual,))[1]
    np.testing.assert_allclose(turned((residual,))[0], tangent, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(devices.default_platform() != "cpu", reason="the calls are the CPU's")
def test_the_step_is_four_calls_and_no_copy() -> None:
    x, scale, shift, residual = operands((2, 5, 5, 40), "float32", True)
    loss = lambda *a: (batch_norm(*a, relu=True)[0] ** 2).sum()  # noqa: E731
    text = jax.jit(jax.grad(loss, (0, 1, 2, 3))).lower(x, scale, shift, residual).compile().as_text()
    names = [name for name in _native.TARGETS if name.startswith(("jsc_channel_sums", "jsc_channel_affine"))]
    assert [text.count(f'custom_call_target="{name}"') for name in names] == [1] * 4


def test_repeated_steps_are_equal() -> None:
    x, scale, shift, residual = operands((4, 31, 29, 70), "float32", True)
    step = jax.jit(jax.value_and_grad(lambda *a: (batch_norm(*a, relu=True)[0] ** 2).sum(), (0, 1, 2, 3)))
    first = step(x, scale, shift, residual)
    for _ in range(3):
        jax.tree.map(np.testing.assert_array_equal, step(x, scale, shift, residual), first)


def test_an_empty_map_has_sums_of_zero() -> None:
    _, *found = channels.sums(jnp.zeros((0, 4, 4, 8)))
    for each in found:
        np.testing.assert_array_equal(each, np.zeros(8))
    assert channels.affine(jnp.zeros((0, 4, 8)), *[jnp.ones(8)] * 3).shape == (0, 4, 8)


X, ROW = np.zeros((2, 3, 8), np.float32), np.zeros(8, np.float32)
WRONG: list[tuple[str, tuple[Any, ...], list[Any], str]] = [
    ("channel_sums", (X,), [ROW, ROW, ROW[:7]], r"must be \[8\], float64 for a float64 x and else float32"),
    ("channel_sums", (X.astype(np.int32),), [ROW] * 3, "x must be float32, bfloat16, float16 or float64"),
    ("channel_sums_gradient", (X, ROW, X[:1], *[ROW] * 3), [X], "maps must have x's shape and dtype"),
    ("channel_affine", (X, ROW, ROW, ROW.astype(np.float64)), [X], "float64 for a float64 x"),
    ("channel_affine", (X, ROW, ROW, ROW, X[..., :4]), [X], "residual must have x's shape"),
    ("channel_affine_gradient", (X, ROW, ROW, ROW, X, X), [X, ROW, ROW], "belong together"),
    ("channel_affine_gradient", (X, ROW, ROW, ROW, X, X[:1]), [X, ROW, ROW, X], "y must have x's shape"),
    ("channel_masked_gradient", (X, X[:1]), [ROW, X], "y must have x's shape"),
    ("channel_masked_gradient", (X, X), [ROW], "belong together"),
]


@pytest.mark.parametrize(("method", "arguments", "results", "message"), WRONG)
def test_a_wrong_call_is_an_error(method: str, arguments: Any, results: Any, message: str) -> None:
    if _native.why_missing(method, "cpu", "float32") is not None or devices.default_platform() != "cpu":
        pytest.skip("the calls are the CPU's")
    attributes = {"relu": np.int64(1)} if "affine" in method else {}
    types = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in results]
    with jax.enable_x64(True):
        wrong = jax.ffi.ffi_call(_native.target_name(method), types)
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            jax.block_until_ready(wrong(*arguments, **attributes))


@pytest.mark.parametrize("options", [{}, {"use_scale": False}, {"use_bias": False}, {"use_fast_variance": False}])
def test_layers_norm_is_flaxs(options: dict[str, Any]) -> None:
    x = operands((3, 8, 8, 40), "float32", False)[0]
    ours, theirs = (nnx.BatchNorm(40, momentum=0.9, rngs=nnx.Rngs(0), **options) for _ in range(2))
    found = batch_norms.normalized(ours, x, x, relu=True)
    np.testing.assert_allclose(found, jax.nn.relu(theirs(x) + x), rtol=1e-5, atol=1e-5)
    for name in ("mean", "var"):
        np.testing.assert_allclose(getattr(ours, name)[...], getattr(theirs, name)[...], rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("activation", [None, "relu"])
def test_bias_residual_and_relu_of_a_convolution(
    activation: Any, has_residual: bool, pool: bool, dtype: str, float32_products: None
) -> None:
    if pool and has_residual:
        pytest.skip("conv_pool takes no residual")
    rng = np.random.default_rng(3)
    with jax.enable_x64(True):
        x = jnp.asarray(rng.normal(size=(2, 9, 9, 24)) * (rng.random((2, 9, 9, 24)) < 0.5), dtype)
        kernel = jnp.asarray(rng.normal(size=(3, 3, 24, 40)) / 15, dtype)
        bias = jnp.asarray(rng.normal(size=40), dtype)
        residual = jnp.asarray(rng.normal(size=(2, 9, 9, 40)), dtype) if has_residual else None
        given = [x, kernel, bias, *([residual] if has_residual else [])]
        options: dict[str, Any] = {"padding": "SAME", "activation": activation}
        weights = jnp.asarray(rng.normal(size=(2, 4, 4, 40) if pool else (2, 9, 9, 40)))

        def loss(implementation: Any, x: Any, kernel: Any, bias: Any, *residual: Any) -> Any:
            if pool:
                y = jsc.conv_pool(x, kernel, bias, implementation=implementation, **options)
            else:
                y = jsc.conv(x, kernel, bias, residual=residual[0] if residual else None, **options)
            return (y.astype(weights.dtype) * weights).sum()

        every = tuple(range(len(given)))
        found = jax.jit(jax.grad(functools.partial(loss, None), every))(*given)
        expected = jax.grad(functools.partial(loss, "xla"), every)(*wide(given))
        assert [each.dtype for each in found] == [each.dtype for each in given]
        assert_near(found, expected, 40 * UNITS[dtype] if dtype in ("float32", "float64") else 0.1)


@pytest.mark.skipif(devices.default_platform() != "cpu", reason="the calls are the CPU's")
def test_a_layers_gradient_keeps_its_call() -> None:
    """Forward with bias and ReLU in one call, and the gradient of both in another one."""
    x, kernel, bias = jnp.ones((2, 9, 9, 24)), jnp.ones((3, 3, 24, 40)), jnp.ones(40)
    loss = lambda *a: (jsc.conv(*a, padding="SAME", activation="relu") ** 2).sum()  # noqa: E731
    text = jax.jit(jax.grad(loss, (0, 1, 2))).lower(x, kernel, bias).compile().as_text()
    assert text.count('custom_call_target="jsc_channel_masked_gradient"') == 1
    assert text.count('custom_call_target="jsc_ecr"') == 2  # forward, and of x
    assert " reduce(" not in text.replace("reduce-window", "")
