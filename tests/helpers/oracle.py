"""What every implementation is compared with: lax in float64 on the CPU, written without the package's own code."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from cases import Case, Inputs
from jax import lax

_DIMENSIONS = ("NHWC", "HWIO", "NHWC")


def expected(case: Case, inputs: Inputs) -> np.ndarray:
    """The case's result in float64 from inputs of any dtype."""
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        wide = [None if v is None else np.asarray(v).astype(np.float64) for v in inputs]
        return np.asarray(jax.jit(_compute, static_argnums=0)(case, *wide))


def gradients(case: Case, inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
    """By x and by kernel, of the sum of the result's squares, in float64."""
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        wide = [None if v is None else np.asarray(v).astype(np.float64) for v in inputs]
        by_x, by_kernel = _gradients(case, *wide)
        return np.asarray(by_x), np.asarray(by_kernel)


def _compute(case: Case, x: Any, kernel: Any, bias: Any, residual: Any) -> jax.Array:
    y = lax.conv_general_dilated(
        x,
        kernel,
        (case.strides, case.strides) if isinstance(case.strides, int) else case.strides,
        case.lax_padding,
        rhs_dilation=(case.dilation, case.dilation) if isinstance(case.dilation, int) else case.dilation,
        dimension_numbers=_DIMENSIONS,
        feature_group_count=case.groups,
    )
    y = y if bias is None else y + bias
    y = y if residual is None else y + residual
    if case.activation == "relu":  # not lax.max, with which XLA loses NaN in front of some pools on a CPU
        y = lax.select(y <= 0, lax.full_like(y, 0), y)
    if case.pool is None:
        return y
    window, strides = (1, *case.window, 1), (1, *(case.window_strides or case.window), 1)
    padding = case.window_padding
    if not isinstance(padding, str):
        padding = ((0, 0), *padding, (0, 0))
    if case.pool == "max":
        most = lax.reduce_window(y, np.float64(-np.inf), lax.max, window, strides, padding)
        # XLA loses NaN in windows of larger maps on a CPU, and keeps it elsewhere.
        nans = lax.reduce_window((y != y).astype(y.dtype), np.float64(0), lax.add, window, strides, padding)
        return lax.select(nans > 0, lax.full_like(most, np.nan), most)
    return _average(y, case.window, case.window_strides or case.window, padding)


def _average(y: jax.Array, window: Any, strides: Any, padding: Any) -> jax.Array:
    """Tap by tap, as XLA's sums of windows repeat a map's only row in the padding behind it (CPUs)."""
    if isinstance(padding, str):
        padding = ((0, 0), *lax.padtype_to_pads(y.shape[1:3], window, strides, padding), (0, 0))
    y = lax.pad(y, np.float64(0), [(low, high, 0) for low, high in padding])
    ends = [max(0, size - length + 1) for size, length in zip(y.shape[1:3], window, strict=True)]
    taps = [
        y[:, row : ends[0] + row : strides[0], column : ends[1] + column : strides[1]]
        for row, column in np.ndindex(*window)
    ]
    return functools.reduce(lax.add, taps) / len(taps)


@functools.partial(jax.jit, static_argnums=0)
@functools.partial(jax.grad, argnums=(1, 2))
def _gradients(case: Case, *values: Any) -> jax.Array:
    return (_compute(case, *values) ** 2).sum()


def relative_error(actual: Any, wanted: np.ndarray) -> float:
    """Frobenius norm of the difference over that of `wanted`; inf where non-finite values do not match exactly."""
    got = np.asarray(actual).astype(np.float64)
    assert got.shape == wanted.shape, f"shape {got.shape} is not {wanted.shape}"
    finite = np.isfinite(wanted)
    same = np.where(np.isnan(wanted), np.isnan(got), got == wanted)
    if not same[~finite].all():
        return float("inf")
    norm = np.linalg.norm(wanted[finite])
    return float(np.linalg.norm(got[finite] - wanted[finite]) / (norm if norm > 0 else 1.0))
