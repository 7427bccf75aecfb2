"""Fused chains on a GPU: chains of kernels against the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import Case
from chain_checks import CASES, ENDS, KIND_IDS, KINDS, LARGER, TOLERANCE, End, check, check_end, poison, require_kernel
from chains import equations, small_resnet, weights

import jax_sparse_conv as jsc
from jax_sparse_conv._src.fusion import rewrite
from jax_sparse_conv._src.fusion.schedule import Schedule

RUNS = [(case, *KINDS[0]) for case in CASES] + [
    (case, *kind) for index, kind in enumerate(KINDS[1:]) for case in CASES[index::4]
]


@pytest.mark.parametrize(("case", "dtype", "precision"), RUNS, ids=[f"{c.name} {d} {p}" for c, d, p in RUNS])
def test_layers_against_the_oracle(case: Case, dtype: str, precision: str, gpu: jax.Device) -> None:
    require_kernel(dtype)
    check(case, dtype, precision, cases.inputs(case, jnp.dtype(dtype)))


@pytest.mark.parametrize(("dtype", "precision"), KINDS, ids=KIND_IDS)
@pytest.mark.parametrize("case", LARGER, ids=lambda case: case.name)
def test_larger_layers_against_the_oracle(case: Case, dtype: str, precision: str, gpu: jax.Device) -> None:
    require_kernel(dtype)
    check(case, dtype, precision, cases.inputs(case, jnp.dtype(dtype)))


@pytest.mark.parametrize(("dtype", "precision"), KINDS, ids=KIND_IDS)
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite(value: float, dtype: str, precision: str, gpu: jax.Device) -> None:
    """Non-finite values go where lax's go, in x and in the kernel: nothing is skipped."""
    require_kernel(dtype)
    case = Case("extreme", (1, 9, 9, 40), 72, bias=True, zeros=0.0)
    inputs = cases.inputs(case, jnp.dtype(dtype))
    inputs.x[0, 1, 1, 3] = value
    check(case, dtype, precision, inputs)
    inputs = cases.inputs(case, jnp.dtype(dtype))
    inputs.kernel[1, 1, 2, 5] = value
    check(case, dtype, precision, inputs)


@pytest.mark.parametrize(("dtype", "precision"), KINDS, ids=KIND_IDS)
def test_a_network_on_the_gpu(dtype: str, precision: str, gpu: jax.Device) -> None:
    """One custom call, results within the tolerance that many layers need, and the same in every run."""
    require_kernel(dtype)
    model = small_resnet()
    x = weights(0, 2, 64, 64, 3).astype(dtype)
    from flax import nnx

    nnx.update(model, jax.tree.map(lambda leaf: leaf.astype(dtype), nnx.state(model)))
    with jax.default_matmul_precision(precision):
        fused = jax.jit(rewrite.fuse(model))
        assert (fused.lower(x).compile().as_text() or "").count('custom_call_target="jsc_chain"') == 1
        expected = np.asarray(jax.jit(lambda x: model(x))(x), np.float64)
        results = [np.asarray(fused(x), np.float64) for _ in range(20)]
    assert all(np.array_equal(result, results[0]) for result in results)
    tolerance = 20 * TOLERANCE[precision if dtype == "float32" else dtype]
    assert np.linalg.norm(results[0] - expected) <= tolerance * np.linalg.norm(expected)


def large_layers(x: jax.Array, parameters: list[jax.Array], **options: Any) -> jax.Array:
    """x [1, 56, 56, 64]: layers of every kind of kernel, whose results soon take the place of earlier ones."""
    first, narrow, grouped, wide = parameters
    for _ in range(4):
        y = jsc.conv(x, first, activation="relu", **options)
        y = jsc.conv(y, narrow, activation="relu", **options)
        y = jsc.conv(y, grouped, feature_group_count=2, activation="relu", **options)
        x = jsc.conv(y, wide, residual=x, activation="relu", **options)
    return jsc.conv_pool(jsc.conv_pool(x, first, **options), first, window_shape=(3, 3), window_strides=2, **options)


def windows_alone(x: jax.Array, parameters: list[jax.Array], **options: Any) -> jax.Array:
    """x [1, 56, 56, 64]: as VGG, without 1x1 layers and strides."""
    first, wider, wide, wider_yet, widest = parameters
    for kernel in (first, first, wider):
        x = jsc.conv(x, kernel, activation="relu", **options)
    x = jsc.conv_pool(x, wide, **options)
    for _ in range(3):
        x = jsc.conv(x, wide, residual=x, activation="relu", **options)
    x = jsc.conv_pool(x, wider_yet, **options)
    return jsc.conv_pool(x, widest, **options)


LARGE = (
    (large_layers, ((3, 3, 64, 64), (1, 1, 64, 128), (3, 3, 64, 128), (1, 1, 128, 64))),
    (windows_alone, ((3, 3, 64, 64), (3, 3, 64, 128), (3, 3, 128, 128), (5, 3, 128, 256), (3, 3, 256, 256))),
)


@pytest.mark.parametrize(("dtype", "precision"), KINDS, ids=KIND_IDS)
@pytest.mark.parametrize(("layers", "shapes"), LARGE, ids=[layers.__name__ for layers, _ in LARGE])
def test_a_chain_of_large_layers_on_the_gpu(
    layers: Any, shapes: Sequence[Sequence[int]], dtype: str, precision: str, gpu: jax.Device
) -> None:
    """Kernels that overlap neither read what is not there yet nor write over what is still read."""
    require_kernel(dtype)
    parameters = [weights(i, *shape).astype(dtype) for i, shape in enumerate(shapes)]
    x = weights(9, 1, 56, 56, 64).astype(dtype)
    fused = jax.jit(rewrite.fuse(lambda x: layers(x, parameters, precision=precision)))
    assert (fused.lower(x).compile().as_text() or "").count('custom_call_target="jsc_chain"') == 1
    x64, *wide = (np.asarray(value, np.float64) for value in (x, *parameters))
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        expected = np.asarray(layers(jnp.asarray(x64), list(map(jnp.asarray, wide)), implementation="xla"))
    results = [fused(x) for _ in range(50)]  # not waited for one by one
    for result in results:
        np.testing.assert_array_equal(np.asarray(result, np.float64), np.asarray(results[0], np.float64))
    tolerance = 10 * TOLERANCE[precision if dtype == "float32" else dtype]
    assert np.linalg.norm(np.asarray(results[0], np.float64) - expected) <= tolerance * np.linalg.norm(expected)


@pytest.mark.parametrize(("dtype", "precision"), KINDS, ids=KIND_IDS)
@pytest.mark.parametrize("zeros", [0, 80, 100, "not finite"])
@pytest.mark.parametrize("end", ENDS, ids=[end.name for end in ENDS])
def test_dense_layers_at_the_end(end: End, zeros: int | str, dtype: str, precision: str, gpu: jax.Device) -> None:
    require_kernel(dtype)
    check_end(end, zeros, dtype, precision)


def test_two_heads_of_one_map(gpu: jax.Device) -> None:
    require_kernel("float32")
    first, second, flat, mean = (
        weights(i, *of) for i, of in enumerate(((3, 3, 8, 8), (3, 3, 8, 64), (2240, 40), (64, 24)))
    )

    def heads(x: Any) -> tuple[jax.Array, jax.Array]:
        y = jsc.conv(jsc.conv(x, first, precision="highest"), second, activation="relu", precision="highest")
        row = jnp.mean(y, axis=(1, 2))
        return jsc.dense(y.reshape(1, -1), flat, precision="highest"), jsc.dense(row, mean, precision="highest")

    x, fused = weights(9, 1, 5, 7, 8), jax.jit(rewrite.fuse(heads))
    assert (fused.lower(x).compile().as_text() or "").count('custom_call_target="jsc_') == 1
    poison(fused, x)
    with jax.default_device(jax.devices("cpu")[0]):
        expected = heads(jax.device_put(x, jax.devices("cpu")[0]))
    for found, other in zip(fused(x), expected, strict=True):
        assert oracle.relative_error(found, np.asarray(other, np.float64)) <= TOLERANCE["highest"]


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        (6, 3, "window must be all of x, or a pixel"),
        (17, 2, "a dense layer has no residual and no groups"),
        (4, 0, "a dense layer has no residual and no groups"),
        (2, 0, r"the kernel is not \[1, 1, 1, C, K\]"),
        (3, 0, r"the bias is not \[1, K\]"),
        (1, 99, "there is no such value"),
        (5, 99, "there is no such value"),
        (5, 0, "a dense layer has an image, and results of a pixel"),
    ],
)
def test_dense_layers_that_make_no_sense_are_errors(field: int, value: int, reason: str, gpu: jax.Device) -> None:
    require_kernel("float32")
    kernels = [weights(i, 3, 3, 8, 8) for i in range(2)]
    dense = weights(2, 8, 16)
    x = weights(9, 1, 5, 7, 8)

    def function(x: Any) -> jax.Array:
        return jsc.dense(jnp.mean(jsc.conv(jsc.conv(x, kernels[0]), kernels[1]), axis=(1, 2)), dense)

    (equation,) = equations(rewrite.fuse(function), x)
    schedule = Schedule([v.aval for v in equation.invars], equation.params["layers"], equation.params["results"])
    given = schedule.attributes()
    layers = np.array(given["layers"]).reshape(3, -1)
    layers[2, field] = value
    shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in equation.outvars]
    shapes.append(jax.ShapeDtypeStruct((schedule.workspace_bytes,), jnp.uint8))
    operands = [jnp.zeros(v.aval.shape, v.aval.dtype) for v in equation.invars]
    call = jax.jit(lambda *of: jax.ffi.ffi_call("jsc_chain", shapes)(*of, **{**given, "layers": layers.reshape(-1)}))
    with pytest.raises(jax.errors.JaxRuntimeError, match=reason):
        jax.block_until_ready(call(*operands))
