"""Operations and bytes of a report, which XLA's cost analysis does not know of custom calls."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from platforms import PLATFORM, require

import jax_sparse_conv as jsc
from jax_sparse_conv._src.dispatch import cpu_choice
from jax_sparse_conv._src.primitive import lowering, primitives
from jax_sparse_conv._src.problem.geometry import Geometry

X = jax.random.normal(jax.random.key(0), (2, 9, 8, 16))
KERNEL = jax.random.normal(jax.random.key(1), (3, 3, 16, 32))
NHWC, NCHW = ("NHWC", "HWIO", "NHWC"), ("NCHW", "HWIO", "NCHW")


def conv(x: Any, kernel: Any = KERNEL, dimensions: Any = NHWC, **options: Any) -> jax.Array:
    return lax.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=dimensions, **options)


@pytest.mark.parametrize(
    ("function", "x"),
    [
        (conv, X),
        (lambda x: conv(x, dimensions=NCHW), X.transpose(0, 3, 1, 2)),
        (lambda x: conv(x, KERNEL[:, :, :4], feature_group_count=4), X),
        (lambda x: lax.conv_general_dilated(x, KERNEL, (2, 3), "VALID", dimension_numbers=NHWC), X),
        (lambda x: x @ KERNEL[0, 0], X[:, 0, 0]),
        (lambda x: lax.conv(x, jnp.ones((8, 16, 3)), (1,), "VALID"), X[:, 0].transpose(0, 2, 1)),  # left as it is
    ],
    ids=["conv", "channels first", "groups", "strides", "dense", "one axis"],
)
def test_operations_are_those_that_xla_counts(function: Any, x: jax.Array) -> None:
    report = jsc.accelerate(function).report(x)  # type: ignore[attr-defined]
    cost = jax.jit(function).lower(x).cost_analysis()
    if cost is None:
        pytest.skip("XLA counts nothing here before it compiles")
    assert report.flops == report.rows[0].flops == cost["flops"]


def test_bytes_are_those_of_the_arrays() -> None:
    y = conv(X)

    def function(x: jax.Array, residual: jax.Array) -> jax.Array:
        return jax.nn.relu(conv(x) + residual)

    (row,) = jsc.accelerate(function).report(X, y).rows  # type: ignore[attr-defined]
    assert row.result_shape == y.shape
    assert row.joined == ("residual", "relu")
    assert row.bytes == X.nbytes + KERNEL.nbytes + 2 * y.nbytes


def test_a_call_of_this_package() -> None:
    call = jsc.jit_inference(lambda kernel, x: jsc.conv_pool(x, kernel, padding="VALID"), KERNEL)
    (row,) = call.report(X).rows
    assert row.result_shape == conv(X).shape  # in front of the pool
    assert row.flops == 2 * conv(X).size * 9 * 16


def test_symbolic_sizes() -> None:
    (n,) = jax.export.symbolic_shape("n")
    report = jsc.accelerate(conv).report(jax.ShapeDtypeStruct((n, *X.shape[1:]), X.dtype))  # type: ignore[attr-defined]
    assert report.flops == n * jsc.accelerate(conv).report(X[:1]).flops  # type: ignore[attr-defined]


def test_what_xla_says_of_custom_calls() -> None:
    """The docs say it. Where this fails, XLA can be told, and the calls should tell it."""
    require("ecr", "float32")
    lowered = jax.jit(lambda x: jsc.conv(x, KERNEL, implementation="ecr")).lower(X)
    found = [cost for cost in (lowered.cost_analysis(), lowered.compile().cost_analysis()) if cost is not None]
    assert found
    assert all(cost.get("flops", -1) == -1 for cost in found)


def test_a_call_that_branches_says_from_how_many_zeros_on_it_is_native() -> None:
    if PLATFORM != "cpu":
        pytest.skip("calls that branch by the zeros are a CPU's")
    kernel = jnp.ones((1, 1, 256, 1024))  # widens a large map
    report = jsc.accelerate(lambda x: conv(x, kernel)).report(jnp.ones((1, 32, 32, 256)))
    types = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1, 32, 32, 256), (1, *kernel.shape))]
    below = cpu_choice.on_cpu(lowering.workload_of(*types, primitives.Config(Geometry(), "ecr", fallback=True))).below
    assert 0 < below < 1
    assert report.rows[0].runs == f"ecr from {1 - below:.0%} zeros on, else xla"
