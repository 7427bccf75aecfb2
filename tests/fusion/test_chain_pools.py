"""Pools inside the kernels of chains: what a call is promised of them, by whom, and what comes of a broken promise."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import Case
from chain_checks import KIND_IDS, KINDS, TOLERANCE, as_equation, call_of, require_kernel
from chain_keys import POOLED, chain, chain_parameters, on
from chains import equations, weights

import jax_sparse_conv as jsc
from jax_sparse_conv._src import _native, devices
from jax_sparse_conv._src.devices import Device
from jax_sparse_conv._src.dispatch import chain_tiles
from jax_sparse_conv._src.dispatch.chain_tiles import BY_MODEL, Tile
from jax_sparse_conv._src.fusion import chains, rewrite
from jax_sparse_conv._src.fusion.schedule import Layer, Schedule

NOWHERE = 3
EXPORTED = [jax.export.DisabledSafetyCheck.custom_call("jsc_chain")]
Asked = tuple[tuple[int, ...], Tile, int, bool]


# --- the lowering ----------------------------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Asked]:
    """As on a GPU whose kernels take every pool: what they are asked."""
    found: list[Asked] = []

    def takes_pool(*question: Any) -> bool:
        *layer, device = question
        assert device == Device()
        found.append(tuple(layer))
        return True

    monkeypatch.setattr(_native, "why_missing", lambda *_: None)
    monkeypatch.setattr(chain_tiles, "takes_pool", takes_pool)
    on(monkeypatch)
    return found


def lowered(function: Callable[..., Any], *operands: Any) -> str:
    return str(jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",)).as_text())


def places(text: str) -> list[int]:
    """Where the values of a program's one fused chain are."""
    (found,) = re.findall(r"values = dense<\[([-0-9, ]*)\]>", text)
    return [int(each) for each in found.split(",")][::7]


def test_the_gpu_that_is_lowered_for_is_asked(asked: list[Asked], monkeypatch: pytest.MonkeyPatch) -> None:
    x, parameters = weights(0, 1, 28, 28, 64), chain_parameters()
    monkeypatch.setattr(devices, "_GPU", "none that is here")
    assert NOWHERE not in places(lowered(rewrite.fuse(chain), x, parameters))
    assert not asked
    monkeypatch.setattr(devices, "_GPU", jax.default_backend())
    assert places(lowered(rewrite.fuse(chain), x, parameters)).count(NOWHERE) == 1
    assert asked == [(POOLED, BY_MODEL, 4, False)] * len(asked)
    asked.clear()
    half = [each.astype(jnp.bfloat16) for each in parameters]
    lowered(rewrite.fuse(lambda *of: chain(*of, precision="highest")), x.astype(jnp.bfloat16), half)
    assert asked == [(POOLED, BY_MODEL, 2, True)] * len(asked)


def test_an_exported_program_suits_any_gpu(asked: list[Asked], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_GPU", jax.default_backend())
    function = jax.jit(rewrite.fuse(chain))
    exported = jax.export.export(function, platforms=("cuda",), disabled_checks=EXPORTED)
    found = places(exported(weights(0, 1, 28, 28, 64), chain_parameters()).mlir_module())
    assert NOWHERE not in found
    assert not asked


def test_a_map_has_a_place_where_the_kernel_does_not_take_the_pool(
    asked: list[Asked], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "_GPU", jax.default_backend())
    monkeypatch.setattr(chain_tiles, "takes_pool", lambda *_: False)
    assert NOWHERE not in places(lowered(rewrite.fuse(chain), weights(0, 1, 28, 28, 64), chain_parameters()))


def test_every_gpu_of_a_program_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(Device, "of", classmethod(lambda cls, ordinal: Device(multiprocessors=ordinal)))

    def takes_pool(*question: Any) -> bool:
        asked.append(question[-1].multiprocessors)
        return asked[-1] < 2

    monkeypatch.setattr(chain_tiles, "takes_pool", takes_pool)
    for ordinals, answer in (((0, 1), True), ((0, 2), False)):
        takes_pool = chains._pools_of(ordinals)
        assert takes_pool is not None
        assert takes_pool(POOLED, BY_MODEL, 4, False) == answer
    assert asked == [0, 1, 0, 2]
    assert chains._pools_of(()) is None


def test_without_an_extension_there_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "_modules", {})
    monkeypatch.setattr(_native, "_reasons", {"planner": "it was not built"})
    with pytest.raises(RuntimeError, match="it was not built"):
        chain_tiles.takes_pool(POOLED, BY_MODEL, 4, False, Device())


@pytest.mark.parametrize(
    ("key", "tile", "element_bytes", "reason"),
    [
        (POOLED[:16], BY_MODEL, 4, "pool must have 8 entries and tile 4"),
        (POOLED, BY_MODEL[1:], 4, "pool must have 8 entries and tile 4"),
        (POOLED[:-1], BY_MODEL, 4, "pool 8, 9 or none"),
        ((*POOLED[:16], 0, *POOLED[17:]), BY_MODEL, 4, "a pool's windows"),
        (POOLED, BY_MODEL, 8, "element_bytes must be 2 or 4"),
    ],
)
def test_what_is_no_layer_with_a_pool_is_refused(
    key: Any, tile: Any, element_bytes: int, reason: str, h200: Device
) -> None:
    with pytest.raises(ValueError, match=reason):
        chain_tiles.takes_pool(key, tile, element_bytes, False, h200)


# --- the kernel ------------------------------------------------------------------------------------------------------

TILES: tuple[Tile, ...] = (BY_MODEL, (64, 56, 1, 1), (64, 112, 1, 1), (128, 112, 1, 2), (64, 192, 0, 1))
CASES = (
    Case("pairs", (1, 28, 30, 64), 72, bias=True, activation="relu", pool="max"),
    Case("many channels", (1, 14, 14, 256), 128, activation="relu", pool="max"),
    Case("strided", (2, 28, 28, 64), 64, strides=2, activation="relu", pool="max"),
    Case("groups", (1, 14, 14, 128), 128, groups=2, activation="relu", pool="max"),
    Case("wide pool", (1, 28, 30, 64), 72, activation="relu", pool="max", window=(3, 3), window_strides=(2, 2)),
    Case("padded pool", (1, 13, 15, 64), 64, activation="relu", pool="max", window_padding=((0, 1), (0, 1))),
    Case("image", (1, 57, 55, 3), 64, bias=True, activation="relu", pool="max", zeros=0.0),
    Case("stem", (2, 112, 112, 3), 64, kernel=(7, 7), strides=2, padding=3, bias=True, activation="relu", pool="max",
         window=(3, 3), window_strides=(2, 2), window_padding=((1, 1), (1, 1)), zeros=0.0),
    Case("large stem", (8, 224, 224, 3), 64, kernel=(7, 7), strides=2, padding=3, activation="relu", pool="max",
         window=(3, 3), window_strides=(2, 2), window_padding=((1, 1), (1, 1)), zeros=0.0),
)  # fmt: skip


def schedules(equation: Any, first: Layer) -> tuple[Schedule, Schedule]:
    """Of a case and the layer behind it: for any GPU, and with the pool promised."""
    operands, layers = [v.aval for v in equation.invars], (first, *equation.params["layers"][1:])
    made = [
        Schedule(operands, layers, equation.params["results"], takes_pool=takes_pool)
        for takes_pool in (None, lambda *_: True)
    ]
    return made[0], made[1]


@pytest.mark.parametrize(("dtype", "precision"), KINDS, ids=KIND_IDS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_answer_is_what_the_kernel_does(case: Case, dtype: str, precision: str, gpu: jax.Device) -> None:
    """A promise is an error where the answer is no, else it changes no bit of the results."""
    require_kernel(dtype)
    inputs = cases.inputs(case, jnp.dtype(dtype))
    equation, operands = as_equation(case, inputs, precision)
    key = chains.keys([v.aval for v in equation.invars], equation.params["layers"])[0]
    by_oracle = oracle.expected(case, inputs)
    tolerance = TOLERANCE[precision if dtype == "float32" else dtype]
    for tile in TILES:
        layer = dataclasses.replace(equation.params["layers"][0], tile=tile)
        for_any, promised = schedules(equation, layer)
        assert promised.workspace_bytes < for_any.workspace_bytes
        expected = call_of(equation, for_any)(*operands)
        assert oracle.relative_error(expected[0], by_oracle) <= tolerance
        call = call_of(equation, promised)
        if chain_tiles.takes_pool(key, tile, jnp.dtype(dtype).itemsize, precision == "highest", devices.current()):
            for one, other in zip(call(*operands), expected, strict=True):
                np.testing.assert_array_equal(np.asarray(one, np.float64), np.asarray(other, np.float64))
        else:
            with pytest.raises(jax.errors.JaxRuntimeError, match="layer 0: its kernel does not take the pool behind"):
                jax.block_until_ready(call(*operands))


def test_which_pools_are_taken(h200: Device) -> None:
    answers = {}
    for case in CASES:
        for precision in ("highest", "default"):
            equation, _ = as_equation(case, cases.inputs(case), precision)
            key = chains.keys([v.aval for v in equation.invars], equation.params["layers"])[0]
            answers[case.name, precision] = chain_tiles.takes_pool(key, BY_MODEL, 4, precision == "highest", h200)
    assert answers["pairs", "highest"]
    assert answers["pairs", "default"]
    assert not answers["wide pool", "default"]
    assert not answers["padded pool", "default"]
    assert answers["stem", "default"]
    assert answers["large stem", "default"]
    assert not answers["large stem", "highest"]


def test_a_tile_that_does_not_exist_takes_no_pool(h200: Device) -> None:
    assert chain_tiles.takes_pool(POOLED, (64, 56, 1, 1), 4, False, h200)
    assert not chain_tiles.takes_pool(POOLED, (64, 57, 0, 1), 4, False, h200)


@pytest.mark.parametrize(
    ("case", "value", "layer"),
    [(0, 0, 0), (0, 2, 1), (0, 3, 2), (7, 0, 0), (7, 2, 1)],
    ids=["x", "a pool's result", "the last result", "an image", "a stem's result"],
)
def test_only_what_a_pool_reads_may_be_nowhere(case: int, value: int, layer: int, gpu: jax.Device) -> None:
    require_kernel("float32")
    equation, operands = as_equation(CASES[case], cases.inputs(CASES[case]), "default")
    for schedule in schedules(equation, equation.params["layers"][0]):
        values = np.asarray(schedule.attributes()["values"]).reshape(-1, 7)
        values[value, 0] = NOWHERE
        reason = f"layer {layer}: only what the pool behind a convolution without a residual reads may be nowhere"
        with pytest.raises(jax.errors.JaxRuntimeError, match=reason):
            jax.block_until_ready(call_of(equation, schedule, values=values.reshape(-1))(*operands))


@pytest.mark.parametrize("which", ["residual", "result"])
def test_a_residual_is_somewhere(which: str, gpu: jax.Device) -> None:
    require_kernel("float32")
    case = Case("residual", (1, 14, 14, 64), 64, kernel=(1, 1), residual=True)
    equation, operands = as_equation(case, cases.inputs(case), "default")
    schedule = Schedule([v.aval for v in equation.invars], equation.params["layers"], (0, 1))
    values = np.asarray(schedule.attributes()["values"]).reshape(-1, 7)
    step = schedule.steps[0]
    values[step.residual if which == "residual" else step.out, 0] = NOWHERE
    with pytest.raises(jax.errors.JaxRuntimeError, match="layer 0: only what the pool"):
        jax.block_until_ready(call_of(equation, schedule, values=values.reshape(-1))(*operands))


def small_vgg(x: jax.Array, parameters: list[jax.Array], **options: Any) -> jax.Array:
    """x [N, H, W, 3]: the first two blocks of VGG and a layer, narrower."""
    y = jsc.conv_pool(jsc.conv(x, parameters[0], activation="relu", **options), parameters[1], **options)
    y = jsc.conv_pool(jsc.conv(y, parameters[1], activation="relu", **options), parameters[1], **options)
    return jsc.conv(y, parameters[1], **options)


@pytest.mark.parametrize(("dtype", "precision"), KINDS, ids=KIND_IDS)
def test_a_program_takes_no_room_for_maps_that_are_not_written(dtype: str, precision: str, gpu: jax.Device) -> None:
    require_kernel(dtype)
    if devices.current().capability != (9, 0) or not _native.has_warpgroups():
        pytest.skip("no warpgroup products, which take these pools")
    x = weights(0, 1, 64, 64, 3).astype(dtype)
    parameters = [weights(1, 3, 3, 3, 64).astype(dtype), weights(2, 3, 3, 64, 64).astype(dtype)]
    function = jax.jit(rewrite.fuse(lambda x, of: small_vgg(x, of, precision=precision)))
    (equation,) = equations(function, x, parameters)
    operands, layers = [v.aval for v in equation.invars], equation.params["layers"]
    reserved = Schedule.in_least_memory(operands, layers, equation.params["results"]).workspace_bytes
    analysis = function.lower(x, parameters).compile().memory_analysis()
    assert analysis.temp_size_in_bytes < reserved - 0.9 * 64 * 64 * 64 * x.dtype.itemsize  # a map in front of a pool
    exported = jax.export.export(function, disabled_checks=EXPORTED)(x, parameters)
    expected = np.asarray(exported.call(x, parameters), np.float64)
    for _ in range(3):
        np.testing.assert_array_equal(np.asarray(function(x, parameters), np.float64), expected)
