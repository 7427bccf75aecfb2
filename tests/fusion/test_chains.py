"""Segments on a GPU: chains of kernels against the oracle."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import Case
from chains import equations, small_resnet, weights
from conftest import PLATFORM

import jax_sparse_conv as jsc
from jax_sparse_conv._src import _native
from jax_sparse_conv._src.fusion import chain_rules
from jax_sparse_conv._src.fusion.schedule import Schedule
from jax_sparse_conv._src.primitive.reference import average_of_pixels

TOLERANCE = {"highest": 2e-6, "default": 5e-4, "bfloat16": 6e-3, "float16": 8e-4}
KINDS = [("float32", "highest"), ("float32", "default"), ("bfloat16", "default"), ("float16", "default")]
KIND_IDS = [f"{dtype} {precision}" for dtype, precision in KINDS]
CASES = [
    case
    for case in (*cases.CONV_CASES, *cases.CONV_POOL_CASES)
    if case.groups == 1 and case.features % 8 == 0 and 1 <= case.x[0] <= chain_rules.MAX_IMAGES and case.pool != "avg"
]
RUNS = [(case, *KINDS[0]) for case in CASES] + [
    (case, *kind) for index, kind in enumerate(KINDS[1:]) for case in CASES[index::4]
]
LARGER = (
    Case("many units", (2, 57, 61, 64), 200, kernel=(1, 1), bias=True, residual=True, activation="relu"),
    Case("deep and small", (1, 7, 7, 512), 512, bias=True, residual=True, activation="relu"),
    Case("strided", (3, 29, 27, 72), 136, strides=2, padding=((1, 0), (2, 1)), activation="relu"),
    Case("dilated", (1, 21, 19, 40), 64, dilation=(2, 3), kernel=(3, 5), padding=((3, 1), (0, 5))),
    Case("stem", (1, 224, 224, 3), 64, kernel=(7, 7), strides=2, padding=3, bias=True, activation="relu", pool="max",
         window=(3, 3), window_strides=(2, 2), window_padding=((1, 1), (1, 1)), zeros=0.0),
    *(case for case in (*cases.IMAGE_CASES, *cases.IMAGE_POOL_CASES)
      if case.features % 8 == 0 and case.x[0] <= chain_rules.MAX_IMAGES),
)  # fmt: skip


def require_kernel(dtype: str) -> None:
    reason = _native.why_missing("segment", PLATFORM, dtype)
    if reason is None and _native.device_properties(0)["major"] < 9:
        reason = "the kernel of segments needs compute capability 9.0"
    if reason is not None:
        pytest.skip(reason)


def poison(function: Callable[..., Any], *arguments: Any) -> None:
    """Leave NaN in freed memory of the results' and the workspace's sizes."""
    shapes = [leaf.shape for leaf in jax.tree.leaves(jax.eval_shape(function, *arguments))]
    buffers = [jnp.full(shape, jnp.nan) for shape in [*shapes, (1 << 22,)] for _ in range(3)]
    jax.block_until_ready(buffers)
    for buffer in buffers:
        buffer.delete()


def then_another(case: Case, precision: str) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """The case's operation, then another convolution: of x, kernel, bias, residual and the second kernel."""

    def function(x: Any, first: Any, bias: Any, residual: Any, second: Any) -> tuple[jax.Array, jax.Array]:
        if case.pool is None:
            y = jsc.conv(x, first, bias, residual=residual, precision=precision, **case.arguments)
        else:
            y = jsc.conv_pool(x, first, bias, precision=precision, **case.arguments)
        return y, jsc.conv(y, second, activation="relu", precision=precision)

    return function


def run_twice(case: Case, inputs: cases.Inputs, kernel: Any, precision: str) -> tuple[Any, Any]:
    """The case's operation and another convolution as one segment where the kernel takes both."""

    operands = [None if v is None else jnp.asarray(v) for v in (*inputs, kernel)]
    fused = jax.jit(jsc.fuse(then_another(case, precision)))
    poison(fused, *operands)
    first = fused(*operands)
    again = fused(*operands)
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float64), np.asarray(b, np.float64))
    return first


def check(case: Case, dtype: str, precision: str, inputs: cases.Inputs, features: int = 24, window: int = 1) -> None:
    """The case's operation and a convolution of its result by square windows, each beside the oracle."""
    kernel = np.asarray(weights(13, window, window, case.features, features)).astype(jnp.dtype(dtype))
    first, second = run_twice(case, inputs, kernel, precision)
    tolerance = TOLERANCE[precision if dtype == "float32" else dtype]
    assert first.dtype == second.dtype == jnp.dtype(dtype)
    assert oracle.relative_error(first, oracle.expected(case, inputs)) <= tolerance
    then = Case("then", first.shape, features, kernel=(window, window), activation="relu")
    operands = cases.Inputs(np.asarray(first), kernel, None, None)
    assert oracle.relative_error(second, oracle.expected(then, operands)) <= tolerance


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
        fused = jax.jit(jsc.fuse(model))
        assert (fused.lower(x).compile().as_text() or "").count('custom_call_target="jsc_segment"') == 1
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
    fused = jax.jit(jsc.fuse(lambda x: layers(x, parameters, precision=precision)))
    assert (fused.lower(x).compile().as_text() or "").count('custom_call_target="jsc_segment"') == 1
    x64, *wide = (np.asarray(value, np.float64) for value in (x, *parameters))
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        expected = np.asarray(layers(jnp.asarray(x64), list(map(jnp.asarray, wide)), implementation="xla"))
    results = [fused(x) for _ in range(50)]  # not waited for one by one
    for result in results:
        np.testing.assert_array_equal(np.asarray(result, np.float64), np.asarray(results[0], np.float64))
    tolerance = 10 * TOLERANCE[precision if dtype == "float32" else dtype]
    assert np.linalg.norm(np.asarray(results[0], np.float64) - expected) <= tolerance * np.linalg.norm(expected)


class End(NamedTuple):
    """Two 1x1 convolutions, and dense layers behind them."""

    name: str
    x: tuple[int, ...]
    channels: int
    averages: bool  # the pixels of the convolutions' result, or a row of all
    features: tuple[int, ...]


ENDS = (
    End("one pixel", (1, 1, 1, 8), 16, True, (8,)),
    End("few channels", (1, 5, 3, 8), 24, True, (1000,)),
    End("part of a piece", (1, 7, 7, 16), 264, True, (72, 8)),
    End("as ResNet's", (1, 7, 7, 64), 2048, True, (1000,)),
    End("many pixels", (1, 23, 19, 8), 520, True, (136,)),
    End("many channels", (1, 5, 3, 8), 4104, True, (1024,)),
    End("many features", (1, 3, 3, 8), 1032, True, (2048,)),
    End("flat", (1, 7, 7, 8), 512, False, (4096, 1000)),
    End("flat, odd", (1, 3, 5, 8), 40, False, (1000, 24, 8)),
)


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

    x, fused = weights(9, 1, 5, 7, 8), jax.jit(jsc.fuse(heads))
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

    (equation,) = equations(jsc.fuse(function), x)
    schedule = Schedule([v.aval for v in equation.invars], equation.params["layers"], equation.params["results"])
    given = schedule.attributes()
    layers = np.array(given["layers"]).reshape(3, -1)
    layers[2, field] = value
    shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in equation.outvars]
    shapes.append(jax.ShapeDtypeStruct((schedule.workspace_bytes,), jnp.uint8))
    operands = [jnp.zeros(v.aval.shape, v.aval.dtype) for v in equation.invars]
    call = jax.jit(lambda *of: jax.ffi.ffi_call("jsc_segment", shapes)(*of, **{**given, "layers": layers.reshape(-1)}))
    with pytest.raises(jax.errors.JaxRuntimeError, match=reason):
        jax.block_until_ready(call(*operands))


def check_end(end: End, zeros: int | str, dtype: str, precision: str) -> None:
    """As a chain on a GPU with clusters, each layer beside float64 of what it reads, the same in every run."""
    kernels = [weights(1, 1, 1, end.x[3], 8), weights(2, 1, 1, 8, end.channels)]
    bias = jnp.full(end.channels, {0: 9.0, 80: -2.0, 100: -1e4}.get(zeros, 0.0))  # type: ignore[call-overload]
    if zeros == "not finite":
        bias = bias.at[1].set(jnp.nan).at[2].set(jnp.inf).at[5].set(-jnp.inf)
    sizes = (end.channels if end.averages else end.x[1] * end.x[2] * end.channels, *end.features)
    dense = [weights(3 + i, *pair) for i, pair in enumerate(itertools.pairwise(sizes))]
    operands = [value.astype(dtype) for value in (weights(0, *end.x), *kernels, bias, *dense)]

    def layers(x: Any, first: Any, second: Any, bias: Any, *dense: Any) -> list[jax.Array]:
        y = jsc.conv(jsc.conv(x, first, precision=precision), second, bias, activation="relu", precision=precision)
        row = average_of_pixels(y) if end.averages else y.reshape(1, -1)
        found = [y]
        for weight in dense:
            row = jsc.dense(row, weight, activation="relu", precision=precision)
            found.append(row)
        return found

    fused = jax.jit(jsc.fuse(layers))
    text = fused.lower(*operands).compile().as_text() or ""
    assert text.count('custom_call_target="jsc_segment"') == 1
    assert "jsc_dense" not in text
    poison(fused, *operands)
    results = [fused(*operands) for _ in range(10)]  # not waited for one by one
    for again in results[1:]:
        for a, b in zip(results[0], again, strict=True):
            np.testing.assert_array_equal(np.asarray(a, np.float64), np.asarray(b, np.float64))
    y, *rows = (np.asarray(each, np.float64) for each in results[0])
    row = y.mean(axis=(1, 2)).astype(jnp.dtype(dtype)).astype(np.float64) if end.averages else y.reshape(1, -1)
    tolerance = TOLERANCE["highest" if dtype == "float32" else dtype]
    for found, weight in zip(rows, dense, strict=True):
        wide = np.asarray(weight.astype(dtype), np.float64)
        used = np.where(row.T == 0, 0, wide)  # kernel rows of zeros are skipped
        with np.errstate(invalid="ignore"):
            sums = row @ used
        expected = np.where(sums <= 0, 0, sums)
        assert oracle.relative_error(found, expected) <= tolerance
        row = found
