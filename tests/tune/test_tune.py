"""`tune` on a stand-in for a GPU: what is timed and kept, that it goes on where it stopped, and its table."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jax_sparse_conv import __main__
from jax_sparse_conv._src import _native, devices
from jax_sparse_conv._src.devices import Device
from jax_sparse_conv._src.dispatch import folders, model, table
from jax_sparse_conv._src.dispatch.planner import Candidate
from jax_sparse_conv._src.layers.calls import Call
from jax_sparse_conv._src.problem.geometry import Geometry
from jax_sparse_conv._src.tune import command, measure, raw_times, workloads

GPU = Device(name="NVIDIA H900")
CALL = Call("conv", (1, 14, 14, 64), (3, 3, 64, 64), "float32", "default", Geometry(padding=((1, 1), (1, 1))), True,
            False, "relu")  # fmt: skip


@pytest.fixture
def timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """As on a GPU on which XLA takes 10 us, and the first candidate 4: the calls that are timed."""
    found: list[Call] = []

    def times(call: Call, device: Device, xla: bool) -> measure.Measured:
        found.append(call)
        key = measure.key_of(call)
        assert key is not None
        names = [measure.name_of(candidate) for candidate in measure._candidates(key, device)[:3]]
        return measure.Measured(
            key, {"xla": 10.0, **dict(zip(names, (4.0, 5.0, 6.0), strict=False))}, ("xla", *names), {}
        )

    monkeypatch.setattr(measure, "measure", times)
    monkeypatch.setattr(command, "_gpu", lambda number: _stand_in())
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(Device, "of", classmethod(lambda cls, ordinal: GPU))
    monkeypatch.setattr(jax, "default_device", lambda device: jax.ensure_compile_time_eval())
    monkeypatch.setattr(_native, "has_warpgroups", lambda: True)
    monkeypatch.setenv(folders.CACHE, str(tmp_path / "cache"))
    monkeypatch.delenv(folders.SWITCH, raising=False)
    return found


def _stand_in() -> Any:
    return SimpleNamespace(device_kind=GPU.name, local_hardware_id=0)


def tune(*arguments: str) -> int:
    return __main__.main(["tune", *arguments])


def layers_file(folder: Path, *calls: Call) -> str:
    path = folder / "layers.json"
    path.write_text(json.dumps([dataclasses.asdict(call) for call in calls]))
    return str(path)


def test_it_makes_the_table_that_dispatch_reads(
    timed: list[Call], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    layers = layers_file(tmp_path, CALL)
    assert tune("--layers", layers, "--batch", "1", "8", "--kinds", "tf32", "16bit") == 0
    assert [(call.x_shape[0], call.dtype) for call in timed] == [
        (1, "float32"),
        (1, "bfloat16"),
        (8, "float32"),
        (8, "bfloat16"),
    ]
    assert "2.50" in capsys.readouterr().out
    monkeypatch.setattr(devices, "known", lambda: GPU)
    key = measure.key_of(CALL)
    assert key is not None
    rows = {row.key: row for row in table.load(tmp_path / "cache" / "h900.json").rows}
    assert len(rows) == 4
    assert rows[key].candidate == measure._candidates(key, GPU)[0]
    assert (rows[key].us, rows[key].xla_us) == (4.0, 10.0)


def test_it_goes_on_where_it_stopped(timed: list[Call], tmp_path: Path) -> None:
    layers = layers_file(tmp_path, CALL)
    assert tune("--layers", layers, "--batch", "1", "--kinds", "tf32") == 0
    raw = tmp_path / "cache" / "h900.times.jsonl"
    raw.write_text(raw.read_text() + '{"key": {"si')  # stopped while it wrote
    assert tune("--layers", layers, "--batch", "1", "2", "--kinds", "tf32", "--out", str(tmp_path / "cache")) == 0
    assert [call.x_shape[0] for call in timed] == [1, 2]
    assert len(raw_times.read(raw)) == 2


def test_parts_are_all_and_of_a_stopped_part_the_rest(timed: list[Call], tmp_path: Path) -> None:
    arguments = ["--layers", layers_file(tmp_path, CALL), "--batch", "1", "2", "3", "4", "5", "--kinds", "tf32"]
    for part in ("1/2", "2/2", "1/2"):
        assert tune(*arguments, "--part", part, "--out", str(tmp_path / part[0])) == 0
    assert [call.x_shape[0] for call in timed] == [1, 3, 5, 2, 4]


def test_calls_are_timed_with_the_taps_that_are_read(timed: list[Call], tmp_path: Path) -> None:
    padding = ((1, 1), (1, 1))
    small = dataclasses.replace(
        CALL, x_shape=(2, 1, 1, 256), kernel_shape=(3, 3, 256, 256), geometry=Geometry(padding=padding)
    )
    assert tune("--layers", layers_file(tmp_path, small)) == 0
    (call,) = timed
    assert (call.kernel_shape, call.geometry.padding) == ((1, 1, 256, 256), ((0, 0), (0, 0)))
    config, _, kernel, _ = measure.bound(call)
    assert (kernel.shape[1:3], config.geometry) == ((1, 1), call.geometry)


def test_the_budget_ends_it(timed: list[Call], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layers = layers_file(tmp_path, CALL)
    assert tune("--layers", layers, "--batch", "1", "2", "3", "--budget", "0") == 0
    assert timed == []
    assert "3 of 3 are left" in capsys.readouterr().err


def test_calls_of_a_file_have_their_own_images_and_products(timed: list[Call], tmp_path: Path) -> None:
    calls = [
        dataclasses.replace(CALL, x_shape=(n, *CALL.x_shape[1:]), dtype=d) for n, d in ((3, "float32"), (5, "float16"))
    ]
    assert tune("--layers", layers_file(tmp_path, *calls)) == 0
    assert [(call.x_shape[0], call.dtype) for call in timed] == [(3, "float32"), (5, "float16")]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--network", "vgg99"], "--network 'vgg99' is not one of"),
        (["--layers", "none.json"], "none.json"),
    ],
)
def test_mistakes_are_one_sentence(
    timed: list[Call], arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tune(*arguments) == 1
    assert reason in capsys.readouterr().err


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    if jax.default_backend() == "gpu":
        pytest.skip("this is a GPU")
    assert tune("--network", "lenet5", "--device", "0") == 1
    assert "--device 0: JAX has no such GPU here" in capsys.readouterr().err


def test_what_gains_too_little_is_xlas() -> None:
    key = measure.key_of(CALL)
    assert key is not None
    content = {"key": {"sizes": key.sizes, "kind": key.kind, "residual": key.residual}, "again": ["xla", "mma 1,1"]}
    chosen = []
    for us in (9.9, 9.0):
        table_of = command.table_of(GPU, [raw_times.Entry.of(content | {"times": {"xla": 10.0, "mma 1,1": us}}, {})])
        chosen.append(table_of.rows[0].candidate)
    assert chosen == [None, Candidate("mma", (1, 1))]


def test_times_of_several_runs_make_a_row_where_they_are_clear() -> None:
    key = measure.key_of(CALL)
    assert key is not None
    content = {"key": {"sizes": key.sizes, "kind": key.kind, "residual": key.residual}, "again": []}
    xla = raw_times.Entry.of(content | {"times": {"xla": 10.0}}, {"command": "one"})
    for us, rows in ((9.5, 0), (5.0, 1), (10.5, 0), (12.0, 1)):
        kernels = raw_times.Entry.of(content | {"times": {"mma 1,1": us, "mma 2,1": us + 1}}, {"command": "another"})
        assert len(command.table_of(GPU, [xla, kernels]).rows) == rows


def test_a_gpus_table_has_convolutions_without_pools() -> None:
    calls = workloads.convolutions(workloads.of_networks(["lenet5"]))
    assert [call.kernel_shape for call in calls] == [(5, 5, 1, 6), (5, 5, 6, 16)]
    assert all(call.geometry.pool is None for call in calls)
    assert all(measure.key_of(call) is not None for call in workloads.expanded(calls, (1, 4), model.KINDS))


def test_names_of_candidates_come_back() -> None:
    for candidate in (Candidate("wgmma", (64, 56, 1, 5)), Candidate("per_output", ())):
        assert measure.candidate_of(measure.name_of(candidate)) == candidate
    assert measure.candidate_of("xla") is None


def test_a_call_is_timed_for_real_on_a_gpu(gpu: jax.Device) -> None:
    """Every candidate runs; XLA has a time."""
    found = measure.measure(CALL, Device.of(0))
    assert found.failed == {}
    assert found.times["xla"] > 0
    assert len(found.again) > 1
