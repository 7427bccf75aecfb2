"""Small parts of maps, that kernels of a chain at HIGHEST leave for those behind them: they change no result."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import Case
from chains import equations, weights
from test_chain_pairs import PAIRS
from test_chain_pools import call_of
from test_given_tiles import CASES, native_planner
from test_segments import TOLERANCE, require_kernel

import jax_sparse_conv as jsc
from jax_sparse_conv._src.dispatch import chain_tiles
from jax_sparse_conv._src.fusion import chains
from jax_sparse_conv._src.fusion.schedule import Schedule

TILED = (*CASES, Case("deep", (1, 7, 7, 520), 136, bias=True, residual=True, activation="relu"))
OTHERS = (
    Case("far strides", (1, 40, 40, 64), 64, strides=9, activation="relu"),  # of a kernel that writes none
    Case("many images", (3, 9, 9, 40), 72, bias=True),
    Case("no zeros", (1, 14, 14, 64), 64, zeros=0.0),
    Case("zeros only", (1, 14, 14, 64), 64, bias=True, zeros=1.0),
)
FIRST = (
    Case("image", (2, 31, 29, 3), 64, kernel=(7, 7), strides=2, padding="SAME", bias=True, activation="relu"),
    Case("image, odd filters", (1, 20, 20, 3), 36, bias=True, zeros=0.0),
    Case("stem", (1, 56, 54, 3), 64, kernel=(7, 7), strides=2, bias=True, activation="relu", pool="max",
         window=(3, 3), window_strides=(2, 2)),
)  # fmt: skip
MOST = 12  # tiles of a case, evenly among all that there are


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
    case: Case, inputs: cases.Inputs, features: int, window: int, has_front: bool
) -> tuple[Any, list[jax.Array]]:
    """The chain as a segment, and its operands."""
    kernels = weights(5, 1, 1, case.x[3], case.x[3]), weights(7, window, window, case.features, features)
    given = [None if v is None else jnp.asarray(v) for v in (*inputs, *kernels)]
    function = chain_of(case, has_front)
    (equation,) = equations(jsc.fuse(function), *given)
    front, behind = (kernel[None] for kernel in kernels)
    order = (inputs.x, front if has_front else None, inputs.kernel[None], inputs.bias, inputs.residual, behind)
    present = [v for v in order if v is not None]
    return equation, [jnp.asarray(v).reshape(of.aval.shape) for v, of in zip(present, equation.invars, strict=True)]


def check(
    case: Case,
    inputs: cases.Inputs,
    features: int = 24,
    window: int = 1,
    has_front: bool = True,
    tile: chain_tiles.Tile | None = None,
) -> None:
    """With small parts in memory and without: each result the same bit by bit, and the case's as the oracle's."""
    equation, operands = as_equation(case, inputs, features, window, has_front)
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


def put_in(value: float, inputs: cases.Inputs) -> None:
    inputs.x[0, 1, 2, 2], inputs.x[0, -1, -1, -1] = value, value
    inputs.kernel[0, 0, 1, 2] = value


@pytest.mark.parametrize("value", [None, np.inf, np.nan])
@pytest.mark.parametrize("case", TILED, ids=lambda case: case.name)
def test_every_kernel_that_reads_them(case: Case, value: float | None, gpu: jax.Device) -> None:
    require_kernel("float32")
    inputs = cases.inputs(dataclasses.replace(case, zeros=0.3))
    if value is not None:
        put_in(value, inputs)
    equation, _ = as_equation(case, inputs, 24, 1, True)
    key = chains.keys([v.aval for v in equation.invars], equation.params["layers"])[1]
    found = native_planner()(key, "highest", 0)
    assert found
    for candidate in found[:: -(-len(found) // MOST)]:
        check(case, inputs, tile=candidate.tile)


@pytest.mark.parametrize("value", [None, -np.inf])
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("case", OTHERS, ids=lambda case: case.name)
def test_kernels_beside_others(case: Case, window: int, value: float | None, gpu: jax.Device) -> None:
    require_kernel("float32")
    inputs = cases.inputs(case)
    if value is not None:
        put_in(value, inputs)
    check(case, inputs, window=window)


@pytest.mark.parametrize("value", [None, np.nan, -np.inf])
@pytest.mark.parametrize("case", FIRST, ids=lambda case: case.name)
def test_what_kernels_of_images_write(case: Case, value: float | None, gpu: jax.Device) -> None:
    require_kernel("float32")
    inputs = cases.inputs(case)
    if value is not None:
        put_in(value, inputs)
    check(case, inputs, has_front=False)


@pytest.mark.parametrize("value", [None, np.inf, np.nan])
@pytest.mark.parametrize(("case", "features"), PAIRS, ids=[case.name for case, _ in PAIRS])
def test_pairs(case: Case, features: int, value: float | None, gpu: jax.Device) -> None:
    require_kernel("float32")
    inputs = cases.inputs(case)
    if value is not None:
        inputs.x[0, 0, 0, 3] = value
    check(case, inputs, features)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("operand", "value 0: only what a layer of float32 at HIGHEST writes has small parts"),
        ("nowhere", "value 2: only what a layer of float32 at HIGHEST writes has small parts"),
        ("default", "value 1: only what a layer of float32 at HIGHEST writes has small parts"),
        ("bfloat16", "value 1: only what a layer of float32 at HIGHEST writes has small parts"),
        ("odd byte", "value 1: byte 4 is no place in a workspace of"),
        ("far", "value 1: byte 1099511627776 is no place in a workspace of"),
        ("end", "value 1: byte [0-9]+ is no place in a workspace of"),
    ],
)
def test_places_that_make_no_sense_are_errors(kind: str, reason: str, gpu: jax.Device) -> None:
    dtype = "bfloat16" if kind == "bfloat16" else "float32"
    require_kernel(dtype)
    case = CASES[0]
    inputs = cases.inputs(case)
    equation, operands = as_equation(case, inputs, 24, 1, True)
    schedule = Schedule([v.aval for v in equation.invars], equation.params["layers"], equation.params["results"])
    values = np.asarray(schedule.attributes()["values"]).reshape(-1, 7)
    bytes_of = {"odd byte": 4, "far": 1 << 40, "end": schedule.workspace_bytes // 256 * 256}
    number = {"operand": 0, "nowhere": 2}.get(kind, 1)
    values[number, 6] = bytes_of.get(kind, 0)
    if kind == "nowhere":
        values[number, 0] = 3
    changed = {"values": values.reshape(-1)}
    if kind == "default":
        changed["precision"] = np.int64(0)
    if kind == "bfloat16":
        operands = [v.astype(dtype) for v in operands]
    shapes = [jax.ShapeDtypeStruct(v.aval.shape, dtype) for v in equation.outvars]
    shapes.append(jax.ShapeDtypeStruct((schedule.workspace_bytes,), jnp.uint8))
    attributes = {**schedule.attributes(), **changed}
    call = jax.jit(lambda *of: jax.ffi.ffi_call("jsc_segment", shapes)(*of, **attributes))
    with pytest.raises(jax.errors.JaxRuntimeError, match=reason):
        jax.block_until_ready(call(*operands))
