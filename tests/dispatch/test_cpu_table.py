"""Tables of CPUs: how a row is found, what runs by it, and files that are damaged."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import platform
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from platforms import CPU, PLATFORM, require

import jax_sparse_conv as jsc
from jax_sparse_conv._src import _native, devices, environment
from jax_sparse_conv._src.devices import Cpu
from jax_sparse_conv._src.dispatch import cpu_choice, cpu_table, folders
from jax_sparse_conv._src.dispatch.cpu_choice import Choice
from jax_sparse_conv._src.dispatch.cpu_table import ALWAYS, Row, Table
from jax_sparse_conv._src.primitive import lowering
from jax_sparse_conv._src.primitive.primitives import Config
from jax_sparse_conv._src.problem.geometry import Geometry, Pool
from jax_sparse_conv._src.problem.workload import Workload

SAME = Geometry(padding=((1, 1), (1, 1)))
PAIRS = dataclasses.replace(SAME, pool=Pool("max", (2, 2), (2, 2), ((0, 0), (0, 0))))
RUN = {"date": "2026-11-26T12:00:00+00:00"}


def workload(n: int = 1, size: int = 14, **fields: Any) -> Workload:
    values = {"method": "ecr", "geometry": SAME, "dtype": "float32", "exact": False} | fields
    return Workload(x_shape=(n, size, size, 64), kernel_shape=(1, 3, 3, 64, 48), **values)


def rows_of_dense(rows: int, out_channels: int = 1000, dtype: str = "float32") -> Workload:
    return Workload("dense", (rows, 1, 1, 4096), (1, 1, 1, 4096, out_channels), Geometry(), dtype, False)


def row(of: Workload, below: float) -> Row:
    key = cpu_table.key_of(of)
    assert key is not None
    return Row(key, below, (2.5, 0.8), 120.0, 0)


def keep(folder: Path, *rows: Row, cpu: Cpu = CPU) -> Path:
    path = folder / f"{CPU.slug}.json"
    cpu_table.save(path, Table(cpu, (RUN,), rows))
    cpu_table.forget()
    return path


def test_an_exact_row_decides(folder: Path) -> None:
    of = {0.0: workload(), 0.4: workload(8), ALWAYS: rows_of_dense(32)}
    keep(folder, *(row(each, below) for below, each in of.items()))
    assert [cpu_choice.on_cpu(each) for each in of.values()] == [Choice(0, True), Choice(0.4, True), Choice(ALWAYS)]
    assert cpu_choice.by_rules(rows_of_dense(32)).below == 0


@pytest.mark.parametrize("exact", [True, False])
def test_precision_makes_no_difference(folder: Path, exact: bool) -> None:
    keep(folder, row(workload(), 0.3))
    assert cpu_choice.on_cpu(workload(exact=exact)).below == 0.3


def test_a_near_row_decides(folder: Path) -> None:
    keep(folder, row(workload(), 0.3), row(rows_of_dense(32), 0.2))
    assert cpu_choice.on_cpu(workload(size=15)).below == 0.3
    assert cpu_choice.on_cpu(rows_of_dense(33)).below == 0.2


@pytest.mark.parametrize(
    "other",
    [
        workload(size=28),  # far
        workload(dtype="bfloat16"),
        workload(residual=True),
        workload(geometry=PAIRS, method="pecr"),
        workload(geometry=dataclasses.replace(SAME, strides=(2, 2))),
        workload(dtype="float64"),  # no table has it
        dataclasses.replace(workload(2), kernel_shape=(2, 3, 3, 64, 48)),
        rows_of_dense(2),
    ],
)
def test_otherwise_the_rules_decide(folder: Path, other: Workload) -> None:
    keep(folder, row(workload(), 0.3))
    with jax.enable_x64(True):
        assert cpu_choice.on_cpu(other) == cpu_choice.by_rules(other)


def test_images_have_no_rows(folder: Path) -> None:
    image = dataclasses.replace(workload(), x_shape=(1, 224, 224, 3), kernel_shape=(1, 3, 3, 3, 48))
    assert cpu_table.key_of(image) is None
    assert cpu_choice.on_cpu(image) == cpu_choice.Choice(math.inf, may_be_dense=True)


def test_switches_hide_tables(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(folder, row(workload(), 0.3))
    for switch in ("off", "shipped"):
        monkeypatch.setenv(folders.SWITCH, switch)
        assert cpu_table.decision(workload()) is None


@pytest.mark.parametrize("change", [{"model": "another"}, {"isa": "avx2"}, {"threads": 4}])
def test_the_table_of_another_cpu_does_not_count(folder: Path, change: dict[str, Any]) -> None:
    keep(folder, row(workload(), 0.3), cpu=dataclasses.replace(CPU, **change))
    assert cpu_table.decision(workload()) is None


def test_the_users_rows_win_over_the_shipped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = folder / "shipped"
    monkeypatch.setattr(cpu_table.table, "SHIPPED", shipped)
    cpu_table.save(shipped / f"{CPU.slug}.json", Table(CPU, (RUN,), (row(workload(), 0.1), row(workload(8), 0.2))))
    keep(folder, row(workload(), 0.3))
    assert [cpu_choice.on_cpu(workload(n)).below for n in (1, 8)] == [0.3, 0.2]


# --- what runs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("below", "expected"), [(0.0, None), (0.4, (0.4, True)), (ALWAYS, (None, True))])
def test_a_row_becomes_a_call(
    folder: Path, monkeypatch: pytest.MonkeyPatch, below: float, expected: tuple[float | None, bool] | None
) -> None:
    monkeypatch.setattr(_native, "why_missing", lambda *_: None)
    of = workload()
    keep(folder, row(of, below))
    x, kernel = (jax.ShapeDtypeStruct(shape, of.dtype) for shape in (of.x_shape, of.kernel_shape))
    found = lowering.resolved(x, kernel, Config(SAME, "ecr", fallback=True), "cpu")
    assert (None if found is None else (found.below, found.may_be_dense)) == expected


def test_adaptive_asks_no_table(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sparse side has no dense kernel, as that of rows has."""
    monkeypatch.setattr(_native, "why_missing", lambda *_: None)
    of = workload()
    keep(folder, row(of, 0.1))
    x, kernel = (jax.ShapeDtypeStruct(shape, of.dtype) for shape in (of.x_shape, of.kernel_shape))
    found = lowering.resolved(x, kernel, Config(SAME, "adaptive"), "cpu")
    assert found is not None
    assert found.below == cpu_choice.density_of_sparse(of) != 0.1


@pytest.mark.skipif(PLATFORM != "cpu", reason="only a CPU decides while the program runs")
@pytest.mark.parametrize("density", [0.02, 0.6, 1.0])
def test_the_running_program_branches_where_the_row_says(folder: Path, density: float) -> None:
    """Zeros hide an infinite weight from the native call alone, which shows what ran."""
    require("ecr", "float32")
    keep(folder, row(workload(), 0.3))
    x = np.random.default_rng(0).random((1, 14, 14, 64), np.float32)
    x = jnp.asarray(np.where(x < density, x, 0)).at[..., 0].set(0)
    kernel = jnp.ones((3, 3, 64, 48)).at[:, :, 0].set(jnp.inf)
    call = jax.jit(functools.partial(jsc.conv, padding="SAME"))
    assert bool(jnp.isfinite(call(x, kernel)).all()) == (density < 0.3)
    assert " conditional(" in (call.lower(x, kernel).compile().as_text() or "")


# --- files and names -------------------------------------------------------------------------------------------------


def test_files_come_back_as_they_were(tmp_path: Path) -> None:
    rows = (row(workload(), 0.25), row(workload(geometry=PAIRS, method="pecr"), 0.0), row(rows_of_dense(1), ALWAYS))
    whole = Table(CPU, (RUN,), rows)
    cpu_table.save(tmp_path / "cpu.json", whole)
    assert cpu_table.load(tmp_path / "cpu.json") == whole
    assert [path.name for path in tmp_path.iterdir()] == ["cpu.json"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"sizes": [1, 2]}, "are not 16 ints"),
        ({"pool": [2, 2]}, "are not 9 ints, or none"),
        ({"kind": "tf32"}, "kind='tf32'"),
        ({"op": "pool"}, "op='pool'"),
        ({"residual": 0}, "residual=0"),
        ({"below": 1.5}, "is not a density from 0 to 1, or 'always'"),
        ({"gains": [0.0, 1.0]}, "are above 0"),
        ({"run": 3}, "run is one of 1"),
        ({"gains": 7}, "TypeError"),
    ],
)
def test_damaged_rows_are_refused_by_what_is_wrong(folder: Path, change: dict[str, Any], reason: str) -> None:
    path = keep(folder, row(workload(), 0.3))
    content = json.loads(path.read_text())
    content["rows"][0] |= change
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=reason) as error:
        cpu_table.load(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(("change", "reason"), [({"format": 2}, "its format is 2, not 1"), ({"cpu": {}}, "TypeError")])
def test_damaged_files_are_refused_by_what_is_wrong(folder: Path, change: dict[str, Any], reason: str) -> None:
    path = keep(folder)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=reason):
        cpu_table.load(path)


def test_names_of_files() -> None:
    assert CPU.slug == "cpu_intel_xeon_processor_2_50ghz_avx512_2_threads"
    assert devices.cpu().slug.startswith("cpu_")


@pytest.mark.skipif(PLATFORM != "cpu", reason="the first device is a GPU")
def test_env_names_the_cpus_table(folder: Path) -> None:
    path = keep(folder, row(workload(), 0.3))
    assert environment.collect()["tables"]["user"] == str(path)


def test_processors_of_one_name_are_told_apart() -> None:
    zen = "processor\t: 0\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\n\nprocessor\t: 1\nmodel\t\t: 9\n"
    assert environment.named_cpu(zen) == "AMD EPYC (family 25 model 17)"
    arm = "processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n"
    assert environment.named_cpu(arm) == f"{platform.machine()} (implementer 0x41 part 0xd40)"
    assert environment.named_cpu("model name : Some\n") == "Some"
    assert environment.named_cpu("") == ""
    assert environment.cpu_model()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dense_layers_of_16_bits_and_few_rows_never_go_to_xla(dtype: str) -> None:
    for out_channels in (10, 1000, 25088):
        for rows in (1, 2, 8):
            assert cpu_choice.by_rules(rows_of_dense(rows, out_channels, dtype)).below == ALWAYS
    assert cpu_choice.by_rules(rows_of_dense(9, 1000, dtype)).below == 0
