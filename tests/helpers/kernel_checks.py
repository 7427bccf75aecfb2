"""One call beside the oracle: how exact it has to be, operands that are made once, memory that was NaN before."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
from cases import Case

import jax_sparse_conv as jsc
from jax_sparse_conv._src.primitive import sampling

TOLERANCE = {"float32": 2e-6, "bfloat16": 6e-3, "float16": 8e-4, "float64": 1e-14}
TF32 = 5e-4


def poison(shape: tuple[int, ...], dtype: Any) -> None:
    """Leave NaN in freed memory of the result's size, so that an element nobody writes is seen."""
    buffers = [jax.device_put(np.full(shape, np.nan, dtype)) for _ in range(4)]
    jax.block_until_ready(buffers)
    for buffer in buffers:
        buffer.delete()


@functools.cache
def result_shape(case: Case, *operands: jax.ShapeDtypeStruct | None) -> tuple[int, ...]:
    return jax.eval_shape(lambda *values: call(case, *values, "xla"), *operands).shape


def run(case: Case, inputs: cases.Inputs, implementation: str | None, precision: Any = "highest") -> jax.Array:
    x, kernel, bias, residual = (cases.on_device(v) for v in inputs)
    kinds = [None if v is None else jax.ShapeDtypeStruct(v.shape, v.dtype) for v in (x, kernel, bias, residual)]
    poison(result_shape(case, *kinds), x.dtype)
    return call(case, x, kernel, bias, residual, implementation, precision)


@functools.cache
def inputs_and_result(case: Case, dtype: str) -> tuple[cases.Inputs, np.ndarray]:
    """The same for every implementation, and not to be written to."""
    inputs = cases.inputs(case, jnp.dtype(dtype))
    wanted = oracle.expected(case, inputs)
    for array in (*inputs, wanted):
        if array is not None:
            array.flags.writeable = False
    return inputs, wanted


@functools.cache
def inputs_and_gradients(case: Case, dtype: str) -> tuple[cases.Inputs, tuple[np.ndarray, np.ndarray]]:
    """The same with the gradients by x and by kernel of the sum of the result's squares."""
    inputs = cases.inputs(case, jnp.dtype(dtype))
    wanted = oracle.gradients(case, inputs)
    for array in (*inputs, *wanted):
        if array is not None:
            array.flags.writeable = False
    return inputs, wanted


def call(
    case: Case,
    x: Any,
    kernel: Any,
    bias: Any,
    residual: Any,
    implementation: str | None,
    precision: Any = "highest",
    nonzeros: Any = None,
) -> jax.Array:
    chosen = {"implementation": implementation, "precision": precision, "nonzeros": nonzeros}
    if case.pool is None:
        return jsc.conv(x, kernel, bias, residual=residual, **chosen, **case.arguments)
    return jsc.conv_pool(x, kernel, bias, **chosen, **case.arguments)


def check_counts(y: Any, counts: Any) -> None:
    values, rows = np.asarray(y), np.asarray(counts)
    assert rows.shape == (sampling.PARTS, 2)
    assert rows.dtype == np.int32
    nonzeros, elements = rows.sum(0)
    assert (rows[:, 0] <= rows[:, 1]).all()
    assert (rows >= 0).all()
    assert elements <= values.size
    found = np.count_nonzero(values)
    if elements == values.size:
        assert nonzeros == found
    else:
        assert elements >= min(values.size, 500)
        assert abs(nonzeros / elements - found / values.size) < 0.12
    if found in (0, values.size):
        assert nonzeros == (elements if found else 0)


# --- what holds for each dense loop of a CPU, under None -------------------------------------------------------------


def check_kernels_of_their_own(channels: int, out_channels: int) -> None:
    """Images with a kernel each, by vmap, against float64."""
    case = Case("batch", (3, 9, 8, channels), out_channels, zeros=0.0)
    inputs = cases.inputs(case)
    kernels = np.stack([inputs.kernel, 2 * inputs.kernel, -inputs.kernel])
    result = jax.jit(jax.vmap(lambda x, kernel: jsc.conv(x[None], kernel)[0]))(inputs.x, kernels)
    wanted = oracle.expected(case, inputs) * np.array([1, 2, -1]).reshape(3, 1, 1, 1)
    assert oracle.relative_error(result, wanted) <= TOLERANCE["float32"]


def check_as_exact_as_xla(case: Case) -> None:
    inputs = cases.inputs(case)
    wanted = oracle.expected(case, inputs)
    by_xla = oracle.relative_error(run(case, inputs, "xla"), wanted)
    assert oracle.relative_error(run(case, inputs, None), wanted) <= 1.3 * by_xla


def check_named_ones_skip(channels: int, out_channels: int) -> None:
    """Where 0 * inf must be 0 the loop does not run: named kernels skip, and None may multiply."""
    x = jnp.zeros((1, 4, 4, channels)).at[0, 0, 0, 0].set(1)
    kernel = jnp.full((3, 3, channels, out_channels), jnp.inf)
    assert not np.isnan(np.asarray(jsc.conv(x, kernel, implementation="ecr"))).any()
    assert np.isnan(np.asarray(jsc.conv(x, kernel))).any()


def check_images_alone(function: Callable[[Any], jax.Array], x: np.ndarray) -> None:
    """Images alone and in a batch are cut into other tiles and tasks, and give the same bits."""
    whole = np.asarray(function(x))
    for image in range(len(x)):
        np.testing.assert_array_equal(whole[image : image + 1], np.asarray(function(x[image : image + 1])))
