"""Layers as chains of kernels on a GPU, beside the oracle: cases, operands, and the custom call itself."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import Case
from chains import equations, weights
from platforms import PLATFORM

import jax_sparse_conv as jsc
from jax_sparse_conv._src import _native
from jax_sparse_conv._src.fusion import chain_rules, rewrite
from jax_sparse_conv._src.fusion.schedule import Schedule
from jax_sparse_conv._src.primitive.reference import average_of_pixels

TOLERANCE = {"highest": 2e-6, "default": 5e-4, "bfloat16": 6e-3, "float16": 8e-4}
KINDS = [("float32", "highest"), ("float32", "default"), ("bfloat16", "default"), ("float16", "default")]
KIND_IDS = [f"{dtype} {precision}" for dtype, precision in KINDS]
CASES = [
    case
    for case in (*cases.CONV_CASES, *cases.CONV_POOL_CASES)
    if case.groups == 1
    and case.out_channels % 8 == 0
    and 1 <= case.x[0] <= chain_rules.MAX_IMAGES
    and case.pool != "avg"
]
LARGER = (
    Case("many units", (2, 57, 61, 64), 200, kernel=(1, 1), bias=True, residual=True, activation="relu"),
    Case("deep and small", (1, 7, 7, 512), 512, bias=True, residual=True, activation="relu"),
    Case("strided", (3, 29, 27, 72), 136, strides=2, padding=((1, 0), (2, 1)), activation="relu"),
    Case("dilated", (1, 21, 19, 40), 64, dilation=(2, 3), kernel=(3, 5), padding=((3, 1), (0, 5))),
    Case("stem", (1, 224, 224, 3), 64, kernel=(7, 7), strides=2, padding=3, bias=True, activation="relu", pool="max",
         window=(3, 3), window_strides=(2, 2), window_padding=((1, 1), (1, 1)), zeros=0.0),
    *(case for case in (*cases.IMAGE_CASES, *cases.IMAGE_POOL_CASES)
      if case.out_channels % 8 == 0 and case.x[0] <= chain_rules.MAX_IMAGES),
)  # fmt: skip


def require_kernel(dtype: str) -> None:
    reason = _native.why_missing("chain", PLATFORM, dtype)
    if reason is None and _native.device_properties(0)["major"] < 9:
        reason = "the kernel of fused chains needs compute capability 9.0"
    if reason is not None:
        pytest.skip(reason)


def poison(function: Callable[..., Any], *arguments: Any) -> None:
    """Leave NaN in freed memory of the results' and the workspace's sizes."""
    shapes = [leaf.shape for leaf in jax.tree.leaves(jax.eval_shape(function, *arguments))]
    buffers = [jax.device_put(np.full(shape, np.nan, np.float32)) for shape in [*shapes, (1 << 22,)] for _ in range(3)]
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
    """The case's operation and another convolution as one fused chain where the kernel takes both."""

    operands = [cases.on_device(v) for v in (*inputs, kernel)]
    fused = jax.jit(rewrite.fuse(then_another(case, precision)))
    poison(fused, *operands)
    first = fused(*operands)
    again = fused(*operands)
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float64), np.asarray(b, np.float64))
    return first


def check(
    case: Case, dtype: str, precision: str, inputs: cases.Inputs, out_channels: int = 24, window: int = 1
) -> None:
    """The case's operation and a convolution of its result by square windows, each beside the oracle."""
    kernel = np.asarray(weights(13, window, window, case.out_channels, out_channels)).astype(jnp.dtype(dtype))
    first, second = run_twice(case, inputs, kernel, precision)
    tolerance = TOLERANCE[precision if dtype == "float32" else dtype]
    assert first.dtype == second.dtype == jnp.dtype(dtype)
    assert oracle.relative_error(first, oracle.expected(case, inputs)) <= tolerance
    then = Case("then", first.shape, out_channels, kernel=(window, window), activation="relu")
    operands = cases.Inputs(np.asarray(first), kernel, None, None)
    assert oracle.relative_error(second, oracle.expected(then, operands)) <= tolerance


class End(NamedTuple):
    """Two 1x1 convolutions, and dense layers behind them."""

    name: str
    x: tuple[int, ...]
    channels: int
    averages: bool  # the pixels of the convolutions' result, or a row of all
    out_channels: tuple[int, ...]


ENDS = (
    End("one pixel", (1, 1, 1, 8), 16, True, (8,)),
    End("few channels", (1, 5, 3, 8), 24, True, (1000,)),
    End("part of a piece", (1, 7, 7, 16), 264, True, (72, 8)),
    End("as ResNet's", (1, 7, 7, 64), 2048, True, (1000,)),
    End("many pixels", (1, 23, 19, 8), 520, True, (136,)),
    End("many channels", (1, 5, 3, 8), 4104, True, (1024,)),
    End("many output channels", (1, 3, 3, 8), 1032, True, (2048,)),
    End("flat", (1, 7, 7, 8), 512, False, (4096, 1000)),
    End("flat, odd", (1, 3, 5, 8), 40, False, (1000, 24, 8)),
)


def check_end(end: End, zeros: int | str, dtype: str, precision: str) -> None:
    """As a chain on a GPU with clusters, each layer beside float64 of what it reads, the same in every run."""
    kernels = [weights(1, 1, 1, end.x[3], 8), weights(2, 1, 1, 8, end.channels)]
    bias = jnp.full(end.channels, {0: 9.0, 80: -2.0, 100: -1e4}.get(zeros, 0.0))  # type: ignore[call-overload]
    if zeros == "not finite":
        bias = bias.at[1].set(jnp.nan).at[2].set(jnp.inf).at[5].set(-jnp.inf)
    sizes = (end.channels if end.averages else end.x[1] * end.x[2] * end.channels, *end.out_channels)
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

    fused = jax.jit(rewrite.fuse(layers))
    text = fused.lower(*operands).compile().as_text() or ""
    assert text.count('custom_call_target="jsc_chain"') == 1
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


_POINTWISE = functools.partial(Case, kernel=(1, 1))
PAIRS = (
    (_POINTWISE("stage 2", (1, 28, 28, 128), 512, bias=True, residual=True, activation="relu"), 128),
    (_POINTWISE("to stage 3", (1, 28, 28, 128), 512, bias=True, residual=True, activation="relu"), 256),
    (_POINTWISE("stage 3", (1, 14, 14, 256), 1024, bias=True, residual=True, activation="relu"), 256),
    (_POINTWISE("to stage 4", (1, 14, 14, 256), 1024, bias=True, residual=True, activation="relu"), 512),
    (_POINTWISE("without anything", (1, 14, 13, 64), 128), 64),
    (_POINTWISE("odd pixels", (3, 5, 7, 128), 192, bias=True, activation="relu"), 192),
    (_POINTWISE("one pixel", (1, 1, 1, 64), 256, residual=True), 64),
    (_POINTWISE("more blocks than copies of pixels", (1, 9, 7, 128), 448, bias=True), 448),
    (_POINTWISE("no zeros", (1, 14, 14, 256), 1024, residual=True, activation="relu", zeros=0.0), 256),
    (_POINTWISE("zeros only", (1, 14, 14, 256), 1024, bias=True, zeros=1.0), 256),
)  # fmt: skip


def as_equation(case: Case, inputs: cases.Inputs, precision: str) -> tuple[Any, list[jax.Array]]:
    """The case's operation, then a 1x1 convolution of its result, as a fused chain and its operands."""
    kernel = np.asarray(weights(7, 1, 1, case.out_channels, 24)).astype(inputs.x.dtype)
    values = [cases.on_device(v) for v in (*inputs, kernel)]
    (equation,) = equations(rewrite.fuse(then_another(case, precision)), *values)
    present = [v for v in (inputs.x, inputs.kernel[None], inputs.bias, inputs.residual, kernel[None]) if v is not None]
    shapes = [v.aval.shape for v in equation.invars]
    return equation, [cases.on_device(np.reshape(v, shape)) for v, shape in zip(present, shapes, strict=True)]


def call_of(equation: Any, schedule: Schedule, **changed: np.ndarray) -> Callable[..., Any]:
    """The custom call of a schedule of an equation, with other attributes."""
    shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in equation.outvars]
    shapes.append(jax.ShapeDtypeStruct((schedule.workspace_bytes,), jnp.uint8))
    attributes = {**schedule.attributes(), **changed}
    return jax.jit(lambda *of: jax.ffi.ffi_call("jsc_chain", shapes)(*of, **attributes)[:-1])
