"""Tables of choices: how a row is found, what a near one decides, and files that are damaged."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import pytest

from jax_sparse_conv._src import _native, devices
from jax_sparse_conv._src.devices import Device
from jax_sparse_conv._src.dispatch import folders, table
from jax_sparse_conv._src.dispatch.planner import Candidate
from jax_sparse_conv._src.dispatch.table import Key, Row, Table
from jax_sparse_conv._src.primitive import lowering
from jax_sparse_conv._src.primitive.primitives import Config
from jax_sparse_conv._src.problem.geometry import Geometry, Pool
from jax_sparse_conv._src.problem.workload import Workload

GPU = Device(name="NVIDIA H900")
SAME = Geometry(padding=((1, 1), (1, 1)))
RUN = {"date": "2026-11-26T12:00:00+00:00", "commit": "abc"}


def workload(n: int = 1, size: int = 14, channels: int = 256, **fields: Any) -> Workload:
    values = {"geometry": SAME, "dtype": "float32", "exact": False, "method": "ecr"} | fields
    return Workload(x_shape=(n, size, size, channels), kernel_shape=(1, 3, 3, channels, 256), **values)


def row(of: Workload, candidate: Candidate | None, us: float = 5.0, xla_us: float = 10.0) -> Row:
    key = Key.of(of)
    assert key is not None
    return Row(key, candidate, us, xla_us, 0)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder, on a GPU that no table is shipped for."""
    monkeypatch.setenv(folders.CACHE, str(tmp_path))
    monkeypatch.delenv(folders.SWITCH, raising=False)
    monkeypatch.setattr(devices, "known", lambda: GPU)
    monkeypatch.setattr(_native, "has_warpgroups", lambda: True)
    monkeypatch.setattr(table, "SHIPPED", tmp_path / "none")
    table.forget()
    return tmp_path


def keep(folder: Path, *rows: Row, device: Device = GPU) -> None:
    table.save(folder / "h900.json", Table(device.name, device.multiprocessors, (RUN,), rows))
    table.forget()


TILE = Candidate("wgmma", (64, 56, 1, 5))


def test_an_exact_row_decides(folder: Path) -> None:
    keep(folder, row(workload(), TILE), row(workload(8), None))
    assert table.decision(workload()) == row(workload(), TILE)
    found = table.decision(workload(8))
    assert found is not None
    assert found.candidate is None


@pytest.mark.parametrize(
    ("candidate", "method"), [(TILE, "direct"), (Candidate("ecr", (16, 1, 1, 7, 7, 1, 160)), "ecr")]
)
def test_a_rows_candidate_is_what_the_call_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch, candidate: Candidate, method: str
) -> None:
    monkeypatch.setattr(_native, "why_missing", lambda *_: None)
    of = workload()
    keep(folder, row(of, candidate))
    x, kernel = (jax.ShapeDtypeStruct(shape, of.dtype) for shape in (of.x_shape, of.kernel_shape))
    found = lowering.resolved(x, kernel, Config(SAME, "ecr", fallback=True), "cuda")
    assert found is not None
    assert (found.method, found.candidate) == (method, candidate)


def test_a_row_of_code_that_this_build_lacks_does_not_count(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(folder, row(workload(), TILE))
    monkeypatch.setattr(_native, "has_warpgroups", lambda: False)
    assert table.decision(workload()) is None


def test_a_row_of_a_candidate_that_is_gone_does_not_count(folder: Path) -> None:
    keep(folder, row(workload(), Candidate("wgmma", (64, 192, 0, 1))))
    assert table.decision(workload()) is None


def test_a_near_row_gives_its_family_and_the_planner_the_tile(folder: Path) -> None:
    keep(folder, row(workload(size=14), TILE))
    near = workload(size=15)
    found = table.decision(near)
    assert found is not None
    assert found.candidate is not None
    assert found.candidate.family == "wgmma"
    key = Key.of(near)
    assert key is not None
    assert found.candidate in [each.candidate for each in key.layer.candidates(GPU, 1)]


@pytest.mark.parametrize(
    ("other", "candidate", "us"),
    [
        (workload(size=28), TILE, 5.0),  # far
        (workload(size=15), TILE, 9.8),  # near, but level
        (workload(size=15, exact=True), TILE, 5.0),  # of another kind
        (workload(size=15, residual=True), TILE, 5.0),
        (workload(size=15, geometry=dataclasses.replace(SAME, strides=(2, 2))), TILE, 5.0),
        (workload(size=15), Candidate("grouped", (1, 7, 7, 1, 1)), 5.0),  # a family that does not take it
    ],
)
def test_otherwise_the_models_decide(folder: Path, other: Workload, candidate: Candidate, us: float) -> None:
    keep(folder, row(workload(), candidate, us))
    assert table.decision(other) is None


def test_what_tables_do_not_hold(folder: Path) -> None:
    keep(folder, row(workload(), TILE))
    pool = Pool("max", (2, 2), (2, 2), ((0, 0), (0, 0)))
    assert table.decision(workload(geometry=dataclasses.replace(SAME, pool=pool), method="pecr")) is None
    assert table.decision(workload(method="dense")) is None
    stacked = dataclasses.replace(workload(2), kernel_shape=(2, 3, 3, 256, 256))
    assert table.decision(stacked) is None


def test_switches_hide_tables(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(folder, row(workload(), TILE))
    for switch in ("off", "shipped"):
        monkeypatch.setenv(folders.SWITCH, switch)
        assert table.decision(workload()) is None
    monkeypatch.setenv(folders.SWITCH, "of")
    with pytest.raises(ValueError, match="JSC_TABLES='of' is not one of"):
        table.paths(GPU.name)


def test_a_part_of_a_gpu_and_no_gpu_have_no_table(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(folder, row(workload(), TILE))
    for gpu in (dataclasses.replace(GPU, multiprocessors=66), dataclasses.replace(GPU, name="NVIDIA H901"), None):
        monkeypatch.setattr(devices, "known", lambda gpu=gpu: gpu)
        assert table.decision(workload()) is None


def test_the_users_rows_win_over_the_shipped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = folder / "shipped"
    monkeypatch.setattr(table, "SHIPPED", shipped)
    other = Candidate("wgmma", (64, 112, 1, 4))
    rows = (row(workload(), other), row(workload(8), other))
    table.save(shipped / "h900.json", Table(GPU.name, GPU.multiprocessors, (RUN,), rows))
    keep(folder, row(workload(), TILE))
    assert [found.candidate for n in (1, 8) if (found := table.decision(workload(n)))] == [TILE, other]


def test_rows_of_a_sibling_count_where_they_are_clear(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "SHIPPED", folder / "shipped")
    other = Candidate("wgmma", (64, 112, 1, 4))
    rows = (row(workload(), other), row(workload(8), other), row(workload(32), other, 9.9))
    for name, capability in (("h901", [9, 0]), ("b901", [10, 0])):
        run = RUN | {"gpu": {"capability": capability}}
        table.save(folder / "shipped" / f"{name}.json", Table(f"NVIDIA {name.upper()}", 132, (run,), rows))
    keep(folder, row(workload(), TILE))

    def decided(device: Device) -> list[Any]:
        monkeypatch.setattr(devices, "known", lambda: device)
        found = [table.decision(workload(n)) for n in (1, 8, 32)]
        return [None if each is None else each.candidate for each in found]

    assert decided(GPU) == [TILE, other, None]
    gpu: Any = SimpleNamespace(device_kind=GPU.name, local_hardware_id=0)
    monkeypatch.setattr(Device, "of", lambda ordinal: GPU)
    own = {"user": folder / "h900.json", "shipped": folder / "shipped" / "h900.json"}
    assert table.paths_on(gpu) == own | {"sibling h901": folder / "shipped" / "h901.json"}
    assert decided(dataclasses.replace(GPU, name="NVIDIA H902")) == [other, other, None]
    for others in ({"capability": (9, 1)}, {"multiprocessors": 114}):
        assert decided(dataclasses.replace(GPU, name="NVIDIA H902", **others)) == [None, None, None]
    monkeypatch.setenv(folders.SWITCH, "off")
    assert decided(GPU) == [None, None, None]
    assert table.paths_on(gpu) == {}


def test_files_come_back_as_they_were(tmp_path: Path) -> None:
    whole = Table(GPU.name, 132, (RUN,), (row(workload(), TILE), row(workload(8), None)))
    table.save(tmp_path / "h900.json", whole)
    assert table.load(tmp_path / "h900.json") == whole
    assert [path.name for path in tmp_path.iterdir()] == ["h900.json"]


@pytest.mark.parametrize("name", ["h100", "h200"])
def test_shipped_tables_are_whole_and_their_tiles_are_the_planners(name: str) -> None:
    found = table.load(table.SHIPPED / f"{name}.json")
    assert folders.slug(found.device) == name
    assert all({"date", "commit", "driver", "versions"} <= run.keys() for run in found.runs)
    with mock.patch.object(_native, "has_warpgroups", return_value=True):
        for each in (row for row in found.rows if row.candidate is not None):
            layer = each.key.layer  # the best few have nearly all of them; all take the planner a hundred times as long
            found_by = (rated.candidate for most in (8, 1000) for rated in layer.candidates(Device(), most))
            assert each.candidate in found_by, each


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"format": 2}, "its format is 2, not 1"),
        ({"rows": [[[1, 2], "tf32", 0, "xla", [], 1.0, 1.0, 0]]}, "are not 16 ints"),
        ({"rows": [[[1] * 16, "tf33", 0, "xla", [], 1.0, 1.0, 0]]}, "kind='tf33'"),
        ({"rows": [[[1] * 16, "tf32", 0, "wgmma", [64], 1.0, 1.0, 0]]}, "is not 4 numbers"),
        ({"rows": [[[1] * 16, "tf32", 0, "xla", [], -1.0, 1.0, 0]]}, "times are above 0"),
        ({"rows": [[[1] * 16, "tf32", 0, "xla", [], 1.0, 1.0, 3]]}, "run is one of 1"),
        ({"rows": 7}, "TypeError"),
    ],
)
def test_damaged_files_are_refused_by_what_is_wrong(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    content = {"format": 1, "device": "NVIDIA H900", "multiprocessors": 132, "runs": [RUN], "rows": []} | change
    path = tmp_path / "h900.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=reason) as error:
        table.load(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("device", "name"),
    [("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA A100-SXM4-40GB", "a100"), ("NVIDIA GeForce RTX 4090", "4090")],
)
def test_names_of_files(device: str, name: str) -> None:
    assert folders.slug(device) == name
