"""Batch norms of maps side by side against float64, with averages of 2x2 pixels and what else reads the maps."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from oracle import relative_error

from jax_sparse_conv._src import _native, devices
from jax_sparse_conv._src.primitive.joined import joined

UNITS = {"float32": 2**-24, "bfloat16": 2**-9, "float16": 2**-11, "float64": 2**-53}
CHANNELS = ((64, 32, 32), (3,), (5, 523, 17, 1), (16, 16))
PIXELS = (2, 6, 10)
CASES = [(relu, sums, back) for relu in (False, True) for sums in (False, True) for back in (False, True)]


def operands(channels: Sequence[int], dtype: str, pixels: Sequence[int] = PIXELS) -> list[Any]:
    """Maps, center, scale and shift."""
    rng = np.random.default_rng(sum(channels))
    rows = "float64" if dtype == "float64" else "float32"
    maps = [jnp.asarray(rng.normal(1, 2, (*pixels, count)), dtype) for count in channels]
    return [maps, *(jnp.asarray(rng.normal(1, 0.5, sum(channels)), rows) for _ in range(3))]


def by_definition(maps: Any, center: Any, scale: Any, shift: Any, *, relu: bool, sums: bool) -> jax.Array:
    y = (jnp.concatenate(maps, axis=-1) - center) * scale + shift
    y = jnp.where(y > 0, y, 0) if relu else y
    return y[:, ::2, ::2] + y[:, 1::2, ::2] + y[:, ::2, 1::2] + y[:, 1::2, 1::2] if sums else y


def wide(arrays: Any) -> Any:
    return jax.tree.map(lambda each: jnp.asarray(each, "float64"), arrays)


def losses(given: list[Any], relu: bool, sums: bool, back: bool) -> tuple[Any, Any]:
    """Of y and, with `back`, of the maps: by the operation and by the definition.

    Where a ReLU's sign depends on rounding, there is no loss.
    """
    exact = functools.partial(by_definition, relu=relu, sums=sums)
    rng = np.random.default_rng(0)
    shape = jax.eval_shape(exact, *given).shape
    is_safe = jnp.abs(by_definition(*wide(given), relu=False, sums=False)) > 0.05
    if sums:
        is_safe = by_definition([is_safe.astype(float)], 0, 1, 0, relu=False, sums=True) == 4
    weights = jnp.where(is_safe, rng.normal(size=shape), 0)
    others = [jnp.asarray(rng.normal(size=each.shape)) for each in given[0]]

    def loss(maps: Any, y: Any) -> Any:
        found = (jnp.asarray(y, "float64") * weights).sum()
        return found + sum((jnp.asarray(m, "float64") ** 2 * w).sum() for m, w in zip(maps, others, strict=True)) * back

    def ours(*operands: Any) -> Any:
        return loss(*joined(*operands, relu=relu, sums=sums, gives_back=back))

    return ours, lambda *operands: loss(operands[0], exact(*operands))


@pytest.mark.parametrize(("relu", "sums", "back"), CASES)
@pytest.mark.parametrize("dtype", UNITS)
@pytest.mark.parametrize("channels", CHANNELS)
def test_values_and_gradients(channels: tuple[int, ...], dtype: str, relu: bool, sums: bool, back: bool) -> None:
    with jax.enable_x64(True):
        given = operands(channels, dtype)
        maps, y = jax.jit(functools.partial(joined, relu=relu, sums=sums, gives_back=back))(*given)
        jax.tree.map(np.testing.assert_array_equal, maps, given[0])
        expected = by_definition(*wide(given), relu=relu, sums=sums)
        assert (y.dtype, y.shape) == (given[0][0].dtype, expected.shape)
        assert relative_error(y, np.asarray(expected)) <= 8 * UNITS[dtype]
        ours, exact = losses(given, relu, sums, back)
        found = jax.jit(jax.grad(ours, (0, 1, 2, 3)))(*given)
        wanted = jax.grad(exact, (0, 1, 2, 3))(*wide(given))
        for one, like, other in zip(*map(jax.tree.leaves, (found, given, wanted)), strict=True):
            assert one.dtype == like.dtype
            assert relative_error(one, np.asarray(other)) <= 32 * UNITS[dtype]


@pytest.mark.skipif(devices.default_platform() != "cpu", reason="these are the CPU's instruction sets")
@pytest.mark.parametrize("dtype", UNITS)
def test_every_instruction_set(dtype: str, cpu_isa: str) -> None:
    for case in CASES:
        test_values_and_gradients((5, 40), dtype, *case)


@pytest.mark.parametrize(("relu", "sums", "back"), CASES)
def test_numerical_derivatives_of_second_order(relu: bool, sums: bool, back: bool) -> None:
    with jax.enable_x64(True):
        given = operands((16, 5), "float64", (1, 2, 4))
        check_grads(losses(given, relu, sums, back)[0], tuple(given), order=2, modes=["fwd", "rev"], rtol=2e-2)


@pytest.mark.parametrize("sums", [False, True])
def test_transformations(sums: bool) -> None:
    given = operands((16, 5), "float32")
    function = functools.partial(joined, relu=True, sums=sums, gives_back=True)

    def loss(*operands: Any) -> Any:
        maps, y = function(*operands)
        return (y**2).sum() + sum((each**3).sum() for each in maps)

    gradient = jax.grad(loss, (0, 1, 2, 3))
    many = jax.tree.map(lambda each: jnp.stack([each, 2 * each, each - 1]), given)
    each = jax.lax.map(lambda operands: gradient(*operands), many)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-2), jax.vmap(gradient)(*many), each)
    again = jax.grad(jax.checkpoint(loss), (0, 1, 2, 3))(*given)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-2), again, gradient(*given))
    backward = jax.vjp(function, *given)[1]
    tangent = jax.jvp(function, given, given)[1]
    turned = jax.linear_transpose(backward, function(*given))
    for one, other in zip(*map(jax.tree.leaves, (turned(tuple(given)), [tangent])), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-3)


def test_maps_of_several_dtypes_have_the_common_one() -> None:
    (one, other), *rows = operands((16, 5), "float32")
    maps, y = joined([one, other.astype("bfloat16")], *rows)
    assert {each.dtype for each in (*maps, y)} == {jnp.dtype("float32")}


@pytest.mark.skipif(devices.default_platform() != "cpu", reason="the calls are the CPU's")
def test_gradients_are_added_in_place() -> None:
    given = operands((64, 32), "float32")

    def loss(maps: Any, *rows: Any) -> Any:
        for _ in range(3):
            maps, y = joined(maps, *rows, relu=True, gives_back=True)
            maps = [*maps, jnp.sin(y[..., :32])]
            rows = tuple(jnp.pad(row, (0, 32)) for row in rows)
        return joined(maps, *rows, relu=True)[1].sum()

    text = jax.jit(jax.grad(loss)).lower(*given).compile().as_text()
    calls = [line for line in text.splitlines() if 'custom_call_target="jsc_channel_joined_gradient"' in line]
    assert [line.count("output_to_operand_aliasing") for line in calls].count(1) == 3
    assert len(calls) == 4
    assert " copy(" not in text


def test_repeated_steps_are_equal() -> None:
    with jax.enable_x64(True):
        given = operands((64, 32, 5), "float32", (4, 30, 28))
        step = jax.jit(jax.grad(losses(given, True, True, True)[0], (0, 1, 2, 3)))
        first = step(*given)
        for _ in range(3):
            jax.tree.map(np.testing.assert_array_equal, step(*given), first)


def test_an_empty_map() -> None:
    assert joined(*operands((16, 5), "float32", (0, 4, 4)), relu=True, sums=True)[1].shape == (0, 2, 2, 21)


X, ROW = np.zeros((2, 4, 4, 8), np.float32), np.zeros(8, np.float32)
ROWS, SMALL = (ROW, ROW, ROW), X[:, :2, :2]
WRONG: list[tuple[str, int, tuple[Any, ...], list[Any], str]] = [
    ("channel_joined", 0, (ROW, ROW, ROW[:7], X), [X], r"must be \[8\], float64 for a float64 x and else float32"),
    ("channel_joined", 0, (*ROWS, X, X), [X], "must have the channels of the result"),
    ("channel_joined", 0, (*ROWS, SMALL), [X], "the dtype of the result, and its pixels or 2x2 each"),
    ("channel_joined", 1, (*ROWS, X), [X], "the dtype of the result, and its pixels or 2x2 each"),
    ("channel_joined", 1, (*ROWS, X[0]), [SMALL[0]], "the dtype of the result, and its pixels or 2x2 each"),
    ("channel_joined", 0, (*ROWS, X.astype(np.float16)), [X], "the dtype of the result"),
    ("channel_joined_gradient", 0, (*ROWS, X, X), [ROW, ROW, X, X], "a gradient of each map"),
    ("channel_joined_gradient", 0, (*ROWS, X, X), [ROW, ROW, X[:1]], "the gradient of a map must have its shape"),
    ("channel_joined_gradient", 0, (*ROWS, X, X, X[:1]), [ROW, ROW, X], "the cotangent of a map must have its shape"),
    ("channel_joined_gradient", 1, (*ROWS, X, X), [ROW, ROW, X], "its pixels or 2x2 each"),
]


@pytest.mark.parametrize(("method", "sums", "arguments", "results", "message"), WRONG)
def test_a_wrong_call_is_an_error(method: str, sums: int, arguments: Any, results: Any, message: str) -> None:
    if _native.why_missing(method, "cpu", "float32") is not None or devices.default_platform() != "cpu":
        pytest.skip("the calls are the CPU's")
    types = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in results]
    wrong = jax.ffi.ffi_call(_native.target_name(method), types)
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(wrong(*arguments, relu=np.int64(1), sums=np.int64(sums)))
