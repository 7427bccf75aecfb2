"""Two 1x1 layers of a chain that one kernel runs: when, in which order and places, and against the oracle."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import Case
from chain_checks import _POINTWISE, KIND_IDS, KINDS, PAIRS, TOLERANCE, check, poison, require_kernel
from chains import equations, weights

import jax_sparse_conv as jsc
from jax_sparse_conv._src import _native, devices
from jax_sparse_conv._src.devices import Device
from jax_sparse_conv._src.dispatch import chain_tiles, planner
from jax_sparse_conv._src.fusion import chains, rewrite, schedule
from jax_sparse_conv._src.fusion.schedule import Schedule
from jax_sparse_conv._src.problem import geometry


def kind_of(dtype: str, precision: str) -> str:
    return chain_tiles.kind_of(jnp.dtype(dtype).itemsize, precision == "highest")


def key_of(case: Case) -> chain_tiles.Key:
    return chain_tiles.key_of(case.x, (1, 1, 1, case.x[3], case.out_channels), geometry.Geometry())


def require_pair(case: Case, out_channels: int, dtype: str, precision: str) -> None:
    require_kernel(dtype)
    if not chain_tiles.pairs(key_of(case), out_channels, kind_of(dtype, precision), devices.current()):
        pytest.skip("this device runs them in two kernels")


def test_the_schedule_makes_room_for_every_pair_of_a_gpu(h200: Device) -> None:
    sides, channels = (1, 7, 14, 28, 56), (32, 64, 128, 256, 512, 1024, 1088)
    runs = 0
    for side, inputs, middle, outputs in itertools.product(sides, channels, channels, channels):
        key = key_of(Case("pair", (1, side, side, inputs), middle))
        for kind in chain_tiles.KINDS:
            if chain_tiles.pairs(key, outputs, kind, h200):
                shapes = ((1, side, side, each) for each in (inputs, middle, outputs))
                assert schedule._suits_pair(*shapes)
                runs += 1
    assert runs > 100
    assert not schedule._suits_pair((1, 7, 7, 64), (1, 7, 7, 64), (1, 7, 7, 64))


@pytest.mark.parametrize(("dtype", "precision"), KINDS, ids=KIND_IDS)
@pytest.mark.parametrize(("case", "out_channels"), PAIRS, ids=[case.name for case, _ in PAIRS])
def test_pairs_against_the_oracle(case: Case, out_channels: int, dtype: str, precision: str, gpu: jax.Device) -> None:
    require_pair(case, out_channels, dtype, precision)
    check(case, dtype, precision, cases.inputs(case, jnp.dtype(dtype)), out_channels)


@pytest.mark.parametrize(("dtype", "precision"), KINDS, ids=KIND_IDS)
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("operand", ["x", "kernel", "residual"])
def test_what_is_not_finite(operand: str, value: float, dtype: str, precision: str, gpu: jax.Device) -> None:
    case = _POINTWISE("extreme", (1, 9, 9, 64), 256, bias=True, residual=True, zeros=0.0)
    require_pair(case, 128, dtype, precision)
    inputs = cases.inputs(case, jnp.dtype(dtype))
    array = getattr(inputs, operand)
    array[(0,) * (array.ndim - 1) + (3,)] = value
    check(case, dtype, precision, inputs, 128)


@pytest.mark.parametrize("size", [2.0**-90, 2.0**100])
def test_magnitudes_at_highest(size: float, gpu: jax.Device) -> None:
    """Float32 has its range; what TF32 drops of it counts."""
    case = _POINTWISE("magnitudes", (1, 9, 9, 64), 256, zeros=0.0)
    require_pair(case, 128, "float32", "highest")
    inputs = cases.inputs(case, jnp.dtype("float32"))
    check(case, "float32", "highest", inputs._replace(x=inputs.x * np.float32(size)), 128)


def bottlenecks(x: jax.Array, kernels: list[jax.Array], precision: str) -> list[jax.Array]:
    """Blocks [N, H, W, 256] -> the same, the last one's result with a stride of 2 and each block's own."""
    conv = functools.partial(jsc.conv, precision=precision, activation="relu")
    results = []
    for first, second, third in zip(kernels[::3], kernels[1::3], kernels[2::3], strict=True):
        y = conv(conv(x, first), second, padding=1)
        x = conv(y, third, residual=x)
        results.append(x)
    return [*results, conv(x, kernels[0], strides=2)]


@pytest.mark.parametrize(("dtype", "precision"), KINDS, ids=KIND_IDS)
def test_blocks_with_pairs_in_them(dtype: str, precision: str, gpu: jax.Device) -> None:
    """What kernels beside a pair read and write: beside the same layers one by one, in poisoned memory, repeated."""
    require_kernel(dtype)
    shapes = [(1, 1, 256, 64), (3, 3, 64, 64), (1, 1, 64, 256)] * 4
    kernels = [(weights(i, *shape) * np.sqrt(2)).astype(dtype) for i, shape in enumerate(shapes)]
    x = jax.nn.relu(weights(20, 1, 11, 13, 256) * 30).astype(dtype)
    run = functools.partial(bottlenecks, precision=precision)
    fused = jax.jit(rewrite.fuse(run))
    assert sum(e.primitive is chains.fused_chain_p for e in equations(rewrite.fuse(run), x, kernels)) == 1
    wanted = jax.jit(run)(x, kernels)
    poison(fused, x, kernels)
    found, again = fused(x, kernels), fused(x, kernels)
    tolerance = 8 * TOLERANCE[precision if dtype == "float32" else dtype]
    for one, other, each in zip(found, again, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(one, np.float64), np.asarray(other, np.float64))
        assert oracle.relative_error(one, np.asarray(each, np.float64)) <= tolerance


# --- order and places ------------------------------------------------------------------------------------------------


def schedule_of(function: Any, *arguments: Any) -> tuple[Schedule, list[int]]:
    """The schedule of the one fused chain, and the kernels in the order of its steps as numbers of arguments."""
    (equation,) = (e for e in equations(rewrite.fuse(function), *arguments) if e.primitive is chains.fused_chain_p)
    avals = [v.aval for v in equation.invars]
    schedule = Schedule.in_least_memory(avals, equation.params["layers"], equation.params["results"])
    return schedule, [step.kernel for step in schedule.steps]


def test_x_stays_until_the_pair_is_done() -> None:
    """One kernel writes the second's result while its other blocks read the first's x."""

    def function(x: jax.Array, *kernels: jax.Array) -> jax.Array:
        for kernel in kernels:
            x = jsc.conv(x, kernel, padding="SAME")
        return x

    x = weights(0, 1, 8, 8, 64)
    schedule, _ = schedule_of(function, x, weights(1, 3, 3, 64, 64), weights(2, 1, 1, 64, 128),
                              weights(3, 1, 1, 128, 64), weights(4, 3, 3, 64, 64))  # fmt: skip
    first, second = schedule.steps[1], schedule.steps[2]
    read, written = schedule.values[first.x], schedule.values[second.out]
    assert read.last == 2
    bytes_of_a_map = 8 * 8 * 64 * 4
    assert abs(read.index - written.index) >= bytes_of_a_map
    narrow, _ = schedule_of(function, weights(0, 1, 8, 8, 8), weights(1, 3, 3, 8, 8), weights(2, 1, 1, 8, 8),
                            weights(3, 1, 1, 8, 8), weights(4, 3, 3, 8, 8))  # fmt: skip
    assert narrow.values[narrow.steps[1].x].last == 1


def test_a_projection_does_not_part_a_pair() -> None:
    def function(x: jax.Array, third: jax.Array, projection: jax.Array, first: jax.Array, second: jax.Array) -> Any:
        y = jsc.conv(x, third)
        shortcut = jsc.conv(y, projection, strides=2)
        z = jsc.conv(jsc.conv(y, first), second, strides=2, padding=1)
        return shortcut, z

    kernels = [
        weights(1, 1, 1, 64, 256),
        weights(2, 1, 1, 256, 64),
        weights(3, 1, 1, 256, 64),
        weights(4, 3, 3, 64, 64),
    ]
    schedule, order = schedule_of(function, weights(0, 1, 8, 8, 64), *kernels)
    assert [schedule.steps[i].numbers[2] for i in range(4)] == [1, 1, 2, 2]  # strides
    assert order[1] != order[2]
    assert schedule.steps[1].x == schedule.steps[0].out == schedule.steps[2].x


# --- what runs -------------------------------------------------------------------------------------------------------


def test_which_layers_are_pairs(h200: Device) -> None:
    def pairs(pixels: int, *channels: int, kind: str = "tf32") -> bool:
        layer = _POINTWISE("layer", (1, 1, pixels, channels[0]), channels[1])
        return chain_tiles.pairs(key_of(layer), channels[2], kind, h200)

    for kind in ("tf32", "16bit", "highest"):
        assert pairs(196, 256, 1024, 256, kind=kind)
        assert pairs(784, 128, 512, 256, kind=kind)
        assert not pairs(3136, 64, 256, 64, kind=kind)  # more tiles than clusters run at once
        assert not pairs(49, 512, 2048, 512, kind=kind)  # more blocks than a cluster has
        assert not pairs(196, 256, 1000, 256, kind=kind)
        assert not pairs(196, 240, 1024, 256, kind=kind)
        assert not pairs(196, 256, 1024, 64, kind=kind)  # a sixteenth of them is no piece for each block
    assert not pairs(196, 512, 512, 512)
    assert pairs(196, 512, 512, 512, kind="16bit")


def test_sizes_that_make_no_sense(h200: Device) -> None:
    chain_pairs = _native.planner().chain_pairs
    with pytest.raises(ValueError, match=r"sizes must be from 1 to 2\^31 - 1"):
        chain_pairs(0, 64, 128, 64, 4, False, planner.described(h200))
    with pytest.raises(ValueError, match="element_bytes must be 2 or 4"):
        chain_pairs(10, 64, 128, 64, 8, False, planner.described(h200))


def test_without_an_extension_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "_modules", {})
    monkeypatch.setattr(_native, "_reasons", {"planner": "it was not built"})
    with pytest.raises(RuntimeError, match="it was not built"):
        chain_tiles.pairs(key_of(PAIRS[0][0]), 128, "tf32", Device())
