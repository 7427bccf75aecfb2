"""What tests of the kernels of "direct" share: element types with their precision, stacks of calls, counts."""

from __future__ import annotations

import dataclasses
import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import Case
from kernel_checks import TF32, TOLERANCE
from platforms import PLATFORM, require

import jax_sparse_conv as jsc

# Element types and precisions that large layers of "direct" are computed in, and how exact they are then.
LARGE_KINDS = (
    ("float32", None, TF32),
    ("float32", "highest", TOLERANCE["float32"]),
    ("bfloat16", None, TOLERANCE["bfloat16"]),
    ("float16", None, TOLERANCE["float16"]),
)


def name_of(case: Case) -> str:
    return case.name


of_large_kinds = pytest.mark.parametrize(("dtype", "precision", "tolerance"), LARGE_KINDS)
on_cuda_alone = pytest.mark.skipif(PLATFORM != "cuda", reason="a CPU has no kernels of its own for large layers")


def check_stacks(case: Case, value: float | None, dtype: str, precision: str | None, tolerance: float) -> None:
    """Several kernels in one call, each with images and residuals of its own, of which one has `value`."""
    require("direct", dtype)
    case = dataclasses.replace(case, bias=True)
    inputs = [cases.inputs(case, jnp.dtype(dtype), seed) for seed in range(3)]
    if value is not None:
        inputs[1].x[-1, -1, 0, 2] = value
    stacked = [[v for v in each if v is not None] for each in zip(*inputs, strict=True)]
    x, kernel, bias, *residual = (cases.on_device(np.stack(each)) for each in stacked if each)
    layer = functools.partial(jsc.conv, **case.arguments, precision=precision, implementation="direct")
    result = jax.vmap(lambda x, kernel, bias, *rest: layer(x, kernel, bias, residual=next(iter(rest), None)))(
        x, kernel, bias, *residual
    )
    wanted = np.stack([oracle.expected(case, each) for each in inputs])
    assert oracle.relative_error(result, wanted) <= tolerance


def check_counts(case: Case, dtype: str, precision: str | None) -> None:
    """The counts of a call are of what it makes, which is what it makes without them."""
    require("direct", dtype)
    x, kernel, bias, residual = (cases.on_device(v) for v in cases.inputs(case, jnp.dtype(dtype)))
    layer = functools.partial(jsc.conv, **case.arguments, precision=precision, implementation="direct")
    y, counts = layer(x, kernel, bias, residual=residual, count_nonzeros=True)
    np.testing.assert_array_equal(np.asarray(layer(x, kernel, bias, residual=residual)), np.asarray(y))
    nonzeros, elements = np.asarray(counts).sum(0)
    assert 0 < nonzeros <= elements <= y.size
    found = np.count_nonzero(np.asarray(y, np.float64))
    assert abs(nonzeros / elements - found / y.size) < (0.1 if y.size > 25_000 else 0.25)  # of a sample
    assert elements < y.size or nonzeros == found
