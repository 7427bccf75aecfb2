"""Low parts of maps, that kernels of a chain at HIGHEST leave for those behind them: they change no result."""

from __future__ import annotations

import dataclasses

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case
from chain_checks import PAIRS, require_kernel
from chain_keys import TILE_CASES
from split_checks import FIRST, TILED, as_equation, check

from jax_sparse_conv._src import devices
from jax_sparse_conv._src.dispatch import chain_tiles
from jax_sparse_conv._src.fusion import chains
from jax_sparse_conv._src.fusion.schedule import Schedule

OTHERS = (
    Case("far strides", (1, 40, 40, 64), 64, strides=9, activation="relu"),  # of a kernel that writes none
    Case("many images", (3, 9, 9, 40), 72, bias=True),
    Case("no zeros", (1, 14, 14, 64), 64, zeros=0.0),
    Case("zeros only", (1, 14, 14, 64), 64, bias=True, zeros=1.0),
)
MOST = 12  # tiles of a case, evenly among all that there are


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
    found = chain_tiles.candidates(key, "highest", devices.current())
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
@pytest.mark.parametrize(("case", "out_channels"), PAIRS, ids=[case.name for case, _ in PAIRS])
def test_pairs(case: Case, out_channels: int, value: float | None, gpu: jax.Device) -> None:
    require_kernel("float32")
    inputs = cases.inputs(case)
    if value is not None:
        inputs.x[0, 0, 0, 3] = value
    check(case, inputs, out_channels)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("operand", "value 0: only what a layer of float32 at HIGHEST writes has low parts"),
        ("nowhere", "value 2: only what a layer of float32 at HIGHEST writes has low parts"),
        ("default", "value 1: only what a layer of float32 at HIGHEST writes has low parts"),
        ("bfloat16", "value 1: only what a layer of float32 at HIGHEST writes has low parts"),
        ("odd byte", "value 1: byte 4 is no place in a workspace of"),
        ("far", "value 1: byte 1099511627776 is no place in a workspace of"),
        ("end", "value 1: byte [0-9]+ is no place in a workspace of"),
    ],
)
def test_places_that_make_no_sense_are_errors(kind: str, reason: str, gpu: jax.Device) -> None:
    dtype = "bfloat16" if kind == "bfloat16" else "float32"
    require_kernel(dtype)
    case = TILE_CASES[0]
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
    call = jax.jit(lambda *of: jax.ffi.ffi_call("jsc_chain", shapes)(*of, **attributes))
    with pytest.raises(jax.errors.JaxRuntimeError, match=reason):
        jax.block_until_ready(call(*operands))
