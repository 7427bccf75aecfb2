"""Tables of gradients: how a row is found, what runs by it, and files that are damaged."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from platforms import CPU, PLATFORM, on_a_gpu

import jax_sparse_conv as jsc
from jax_sparse_conv._src import devices
from jax_sparse_conv._src.dispatch import folders, gradient_table, planner
from jax_sparse_conv._src.dispatch.gradient_table import Row, Table
from jax_sparse_conv._src.primitive import gpu_gradient, primitives
from jax_sparse_conv._src.problem.geometry import Geometry
from jax_sparse_conv._src.problem.workload import Workload

RUN = {"date": "2026-11-28T12:00:00+00:00"}


def workload(n: int = 2, channels: int = 16, out_channels: int = 32, **fields: Any) -> Workload:
    values = {"method": "ecr", "geometry": Geometry(padding=((1, 1), (1, 1))), "dtype": "float32", "exact": False}
    return Workload(x_shape=(n, 8, 8, channels), kernel_shape=(1, 3, 3, channels, out_channels), **values | fields)  # type: ignore[arg-type]


def row(of: Workload, by_kernel: bool, ratio: float, tile: tuple[int, ...] = (), platform: str = "cpu") -> Row:
    """XLA takes so many times as long."""
    key = gradient_table.key_of(of, platform)
    assert key is not None
    return Row(key, by_kernel, tile, 100.0, 100.0 * ratio, 0)


def keep(*rows: Row, machine: gradient_table.Machine = CPU, of: gradient_table.Machine | None = None) -> Path:
    path = gradient_table.paths(machine)["user"]
    gradient_table.save(path, Table(gradient_table.machine_of(of or machine), (RUN,), rows))
    gradient_table.forget()
    return path


def is_ours(of: Workload, by_kernel: bool) -> bool | None:
    found = gradient_table.on_cpu(of, by_kernel)
    return None if found is None else found.is_ours


def test_a_row_decides_of_its_gradient(folder: Path) -> None:
    keep(row(workload(), True, 2.0), row(workload(), False, 0.9))
    assert (is_ours(workload(), True), is_ours(workload(), False)) == (True, False)
    assert is_ours(workload(dtype="bfloat16"), True) is None
    assert is_ours(workload(dtype="float64"), True) is None


def test_what_gains_little_is_xlas(folder: Path) -> None:
    keep(row(workload(), True, 1.01))
    assert is_ours(workload(), True) is False


def test_a_near_row_decides_if_it_is_clear(folder: Path) -> None:
    keep(row(workload(20), True, 1.2), row(workload(20), False, 1.05))
    assert (is_ours(workload(21), True), is_ours(workload(21), False)) == (True, None)
    assert is_ours(workload(64), True) is None  # far
    assert is_ours(workload(20, geometry=Geometry((2, 2), ((1, 1), (1, 1)))), True) is None


def test_a_table_of_another_machine_says_nothing(folder: Path) -> None:
    keep(row(workload(), True, 2.0), of=dataclasses.replace(CPU, threads=16))
    assert is_ours(workload(), True) is None


@pytest.mark.parametrize("switch", ["off", "shipped"])
def test_the_users_table_can_be_hidden(folder: Path, monkeypatch: pytest.MonkeyPatch, switch: str) -> None:
    keep(row(workload(), True, 2.0))
    monkeypatch.setenv(folders.SWITCH, switch)
    assert is_ours(workload(), True) is None


@pytest.mark.skipif(PLATFORM != "cpu", reason="the calls are the CPU's")
@pytest.mark.parametrize("by_kernel", [False, True])
def test_it_decides_what_a_gradient_is_lowered_to(folder: Path, by_kernel: bool) -> None:
    def text() -> str:
        operands = jnp.ones((2, 8, 8, 16)), jnp.ones((3, 3, 16, 32))
        loss = jax.grad(lambda *both: jsc.conv(*both).sum(), argnums=int(by_kernel))
        return jax.jit(loss).lower(*operands).as_text()

    ours = text()
    assert "@jsc_" in ours
    assert "stablehlo.convolution" not in ours
    keep(row(workload(), by_kernel, 0.5))
    assert "stablehlo.convolution" in text()


@pytest.mark.skipif(PLATFORM != "cpu", reason="the calls are the CPU's")
def test_it_overrules_the_rules_limits(folder: Path) -> None:
    """Of few channels, which the rules give to XLA."""
    x, kernel = jnp.ones((2, 8, 8, 16)), jnp.ones((3, 3, 16, 4))

    def text() -> str:
        return jax.jit(jax.grad(lambda kernel: jsc.conv(x, kernel).sum())).lower(kernel).as_text()

    assert "@jsc_kernel_gradient" not in text()
    keep(row(workload(out_channels=4), True, 1.5))
    assert "@jsc_kernel_gradient" in text()


def test_a_gpu_runs_the_plan_of_its_row(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = on_a_gpu(monkeypatch, (9, 0), has_warpgroups=True)
    device = dataclasses.replace(plain, name="NVIDIA H900")
    for name in ("current", "known"):
        monkeypatch.setattr(devices, name, lambda: device)
    monkeypatch.setattr(gpu_gradient._native, "why_missing", lambda *_: None)
    of = workload(32, 64, 64, exact=True)
    config = primitives.Config(of.geometry, "ecr", fallback=True, precision=lax.Precision.HIGHEST)
    x, kernel = (jax.core.ShapedArray(each, jnp.float32) for each in (of.x_shape, of.kernel_shape))
    cotangent = jax.core.ShapedArray((32, 8, 8, 64), jnp.float32)
    layer = planner.Layer.of(of)
    first, second, *_ = layer.kernel_gradients(device, 8)

    def takes() -> tuple[bool, bool]:
        by_x, by_kernel = (kernel, cotangent, config, x, False), (x, cotangent, config, kernel, True)
        return gpu_gradient.takes(*by_x), gpu_gradient.takes(*by_kernel)

    def plan() -> planner.KernelGradient | None:
        return gradient_table.plan_of(gradient_table.on_gpu(of, True, device), layer, device)

    assert plan() == first
    ours = [row(of, False, 2.0, platform="cuda"), row(of, True, 2.0, second.tile, "cuda")]
    keep(*ours, machine=device)
    assert takes() == (True, True)
    assert plan() == second
    xlas = [dataclasses.replace(each, xla_us=50.0) for each in ours]
    keep(*xlas, machine=device)
    assert takes() == (False, False)
    keep(dataclasses.replace(ours[1], tile=(1, 2, 3, 4)), machine=device)  # of another build
    assert plan() == first
    keep(row(workload(31, 64, 64, exact=True), True, 2.0, second.tile, "cuda"), machine=device)
    assert takes()[1]
    assert plan() == first  # a neighbour's plan may not fit


def test_a_file_comes_back(folder: Path) -> None:
    rows = (row(workload(), False, 0.9), row(workload(), True, 2.0, (3, 1, 32, 4)))
    path = keep(*rows)
    assert gradient_table.load(path) == Table(gradient_table.machine_of(CPU), (RUN,), rows)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"format": 7}, "its format is 7, not 1"),
        ({"machine": None, "rows": [{}]}, "KeyError: 'tile'"),
        ({"rows": [{"by": "y"}]}, "by='y' are not one of highest, float32, 16bit, and x or kernel"),
        ({"rows": [{"sizes": [1, 2]}]}, r"sizes=\(1, 2\) are not 16 ints"),
        ({"rows": [{"us": 0}]}, "times are above 0"),
        ({"rows": [{"run": 5}]}, "run is one of 1"),
        ({"rows": [{"tile": ["a"]}]}, "are no ints"),
    ],
)
def test_a_damaged_file_is_an_error_that_names_it(folder: Path, changed: dict[str, Any], message: str) -> None:
    path = keep(row(workload(), True, 2.0))
    content = json.loads(path.read_text())
    (good,) = content["rows"]
    if "rows" in changed:
        changed = changed | {"rows": [good | each if each else {} for each in changed["rows"]]}
    path.write_text(json.dumps(content | changed))
    with pytest.raises(ValueError, match=f"{path.name} holds no table of gradients: .*{message}"):
        gradient_table.load(path)
