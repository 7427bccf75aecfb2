"""Layers whose kernels the CPU's pixel loop reads packed, and as functions of x alone, which pack them while traced."""

from __future__ import annotations

from typing import Any

import cases
import jax
from cases import Case
from kernel_checks import call

CASE = Case("packed", (2, 14, 11, 72), 80, bias=True, activation="relu")
LAYERS = [
    *(case for case in cases.CONV_CASES if case.strides == 1 and case.kernel in ((3, 3), (1, 1))),
    CASE,
    Case("packed, an incomplete block", (1, 9, 9, 130), 50, bias=True, residual=True, activation="relu"),
    Case("packed, groups", (2, 8, 8, 64), 96, groups=2),
    Case("packed, rows apart", (1, 12, 12, 40), 48, dilation=(2, 1), padding="VALID"),
    Case("packed 5x5", (2, 9, 10, 40), 50, kernel=(5, 5), bias=True, activation="relu"),
    Case("packed 1x1", (2, 7, 7, 200), 272, kernel=(1, 1), bias=True),
    Case("packed 1x1, one block", (2, 7, 7, 200), 32, kernel=(1, 1), zeros=0.2),
    Case("packed pool", (2, 12, 12, 64), 64, bias=True, activation="relu", pool="max"),
    Case("packed, more blocks than take turns", (1, 15, 6, 80), 1200, bias=True, zeros=0.8),
    Case("packed, nothing in x", (1, 6, 6, 64), 64, zeros=1.0, bias=True),
]


def constants(case: Case, inputs: cases.Inputs, implementation: str | None = None) -> Any:
    """The case as a jitted function of x alone."""
    kernel, bias, residual = (cases.on_device(v) for v in inputs[1:])
    named = implementation or ("ecr" if case.pool is None else "pecr")
    return jax.jit(lambda x: call(case, x, kernel, bias, residual, named))
