"""Chains at HIGHEST whose kernels leave low parts to each other: results with them, without, and the oracle's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import cases
import jax
import numpy as np
import oracle
from cases import Case
from chain_checks import TOLERANCE, call_of
from chain_keys import TILE_CASES
from chains import equations, weights

import jax_sparse_conv as jsc
from jax_sparse_conv._src.dispatch import chain_tiles
from jax_sparse_conv._src.fusion import rewrite
from jax_sparse_conv._src.fusion.schedule import Schedule

TILED = (*TILE_CASES, Case("deep", (1, 7, 7, 520), 136, bias=True, residual=True, activation="relu"))
FIRST = (
    Case("image", (2, 31, 29, 3), 64, kernel=(7, 7), strides=2, padding="SAME", bias=True, activation="relu"),
    Case("image, odd output channels", (1, 20, 20, 3), 36, bias=True, zeros=0.0),
    Case("stem", (1, 56, 54, 3), 64, kernel=(7, 7), strides=2, bias=True, activation="relu", pool="max",
         window=(3, 3), window_strides=(2, 2)),
)  # fmt: skip


def chain_of(case: Case, has_front: bool, precision: str = "highest") -> Callable[..., list[jax.Array]]:
    """A 1x1 layer, the case's operation and another layer: of x, the case's operands and the other kernels."""

    def function(x: Any, kernel: Any, bias: Any, residual: Any, front: Any, behind: Any) -> list[jax.Array]:
        y = jsc.conv(x, front, precision=precision) if has_front else x
        if case.pool is None:
            z = jsc.conv(y, kernel, bias, residual=residual, precision=precision, **case.arguments)
        else:
            z = jsc.conv_pool(y, kernel, bias, precision=precision, **case.arguments)
        return [*([y] if has_front else []), z, jsc.conv(z, behind, activation="relu", precision=precision)]

    return function


def as_equation(
    case: Case, inputs: cases.Inputs, out_channels: int, window: int, has_front: bool
) -> tuple[Any, list[jax.Array]]:
    """The chain as a fused chain, and its operands."""
    kernels = weights(5, 1, 1, case.x[3], case.x[3]), weights(7, window, window, case.out_channels, out_channels)
    given = [cases.on_device(v) for v in (*inputs, *kernels)]
    function = chain_of(case, has_front)
    (equation,) = equations(rewrite.fuse(function), *given)
    front, behind = (kernel[None] for kernel in kernels)
    order = (inputs.x, front if has_front else None, inputs.kernel[None], inputs.bias, inputs.residual, behind)
    present = [v for v in order if v is not None]
    return equation, [
        cases.on_device(np.reshape(v, of.aval.shape)) for v, of in zip(present, equation.invars, strict=True)
    ]


def check(
    case: Case,
    inputs: cases.Inputs,
    out_channels: int = 24,
    window: int = 1,
    has_front: bool = True,
    tile: chain_tiles.Tile | None = None,
) -> None:
    """With low parts in memory and without: each result the same bit by bit, and the case's as the oracle's."""
    equation, operands = as_equation(case, inputs, out_channels, window, has_front)
    layers = list(equation.params["layers"])
    layers[-2] = dataclasses.replace(layers[-2], tile=tile)
    schedule = Schedule([v.aval for v in equation.invars], layers, equation.params["results"])
    assert sum(value.is_split for value in schedule.values) == (2 if has_front else 1)
    values = np.asarray(schedule.attributes()["values"]).reshape(-1, 7)
    without = values.copy()
    without[:, 6] = -1
    results = [call_of(equation, schedule, values=each.reshape(-1))(*operands) for each in (values, values, without)]
    for other in results[1:]:
        for one, another in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(np.asarray(one), np.asarray(another))
    x = np.asarray(results[0][0]) if has_front else inputs.x
    found = oracle.relative_error(results[0][-2], oracle.expected(case, inputs._replace(x=x)))
    assert found <= TOLERANCE["highest"], f"{tile}: {found}"
