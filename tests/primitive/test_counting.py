"""Counts of the non-zeros of a result, by the kernel that makes it or by lax: exact, or of a sample that is like it."""

from __future__ import annotations

import functools
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import Case
from kernel_checks import TOLERANCE, check_counts, poison
from platforms import PLATFORM, require

import jax_sparse_conv as jsc
from jax_sparse_conv._src.primitive import sampling

CONV = Case("counted conv", (2, 9, 9, 40), 48, bias=True, residual=True, activation="relu")


def counted_call(
    case: Case, inputs: cases.Inputs, implementation: str | None, precision: str | None = "highest"
) -> Any:
    x, kernel, bias, residual = (cases.on_device(v) for v in inputs)
    poison((sampling.PARTS, 2), jnp.float32)
    chosen = {"implementation": implementation, "precision": precision, "count_nonzeros": True}
    if case.pool is None:
        return jsc.conv(x, kernel, bias, residual=residual, **chosen, **case.arguments)
    return jsc.conv_pool(x, kernel, bias, **chosen, **case.arguments)


@pytest.mark.parametrize(("case", "implementation"), cases.runs(), ids=lambda v: v if isinstance(v, str) else v.name)
def test_counts(case: Case, implementation: str) -> None:
    require(implementation, "float32")
    inputs = cases.inputs(case)
    y, counts = counted_call(case, inputs, implementation)
    assert oracle.relative_error(y, oracle.expected(case, inputs)) <= TOLERANCE["float32"]
    check_counts(y, counts)
    again = counted_call(case, inputs, implementation)
    np.testing.assert_array_equal(np.asarray(again[1]), np.asarray(counts))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64", "int32"])
def test_counts_of_other_dtypes(dtype: str) -> None:
    if PLATFORM == "cuda" and dtype == "int32":
        pytest.skip("XLA has no convolution of int32 on CUDA")
    with jax.enable_x64(dtype == "float64"):
        inputs = cases.Inputs(*(None if v is None else (4 * v).astype(jnp.dtype(dtype)) for v in cases.inputs(CONV)))
        check_counts(*counted_call(CONV, inputs, None))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["64->64 57x55", "groups of 128"])
def test_counts_of_large_layers_at_default_precision(name: str, dtype: str) -> None:
    case = next(case for case in cases.LARGE_CASES if case.name == name)
    require("direct", dtype)
    check_counts(*counted_call(case, cases.inputs(case, jnp.dtype(dtype)), "direct", None))


@pytest.mark.parametrize("implementation", ["ecr", "direct", "xla", None])
def test_counts_of_a_result_of_few_elements_are_complete(implementation: str | None) -> None:
    case = Case("few elements", (1, 5, 5, 24), 40, activation="relu")
    y, counts = counted_call(case, cases.inputs(case), implementation)
    np.testing.assert_array_equal(np.asarray(counts).sum(0), [np.count_nonzero(y), y.size])


def test_counts_are_those_of_a_kernel_where_there_is_one(gpu: jax.Device) -> None:
    """One custom call, nothing besides."""
    inputs = cases.inputs(CONV)
    x, kernel = cases.on_device(inputs.x), cases.on_device(inputs.kernel)
    for name in ("ecr", "direct"):
        text = jax.jit(functools.partial(jsc.conv, implementation=name, count_nonzeros=True)).lower(x, kernel)
        assert "fusion" not in (text.compile().as_text() or "")


def test_subnormals_are_no_zeros() -> None:
    x = jnp.full((1, 2, 2, 16), 1e-40)
    assert float(jsc.density(x)) == 1
    assert sampling.all_nonzeros(x).sum(0).tolist() == [x.size, x.size]


def test_counts_of_a_batch_are_of_each() -> None:
    x = jnp.asarray(cases.feature_map(np.random.default_rng(5), (2, 8, 8, 16), 0.6), jnp.float32)
    kernel = jnp.asarray(np.random.default_rng(0).standard_normal((3, 3, 16, 16)) / 12, jnp.float32)
    xs = jnp.stack([x, jnp.zeros_like(x)])
    layer = functools.partial(jsc.conv, implementation="ecr", count_nonzeros=True)
    ys, counts = jax.vmap(layer, (0, None))(xs, kernel)
    for y, each in zip(ys, counts, strict=True):
        check_counts(y, each)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_subnormals_count_as_in_density(dtype: str) -> None:
    with jax.enable_x64(dtype == "float64"):
        least = jnp.finfo(dtype).smallest_subnormal
        x = np.zeros((1, 5, 5, 8), jnp.dtype(dtype))
        x[0, 1:3, :, ::2], x[0, 3, :, 1], x[0, 4] = least, np.nan, -0.0
        y = cases.on_device(x)
        counts = np.asarray(jax.jit(sampling.all_nonzeros)(y)).sum(0)
        assert counts.tolist() == [45, 200]
        assert float(jsc.density(y)) == pytest.approx(45 / 200)
