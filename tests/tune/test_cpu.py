"""`tune` on a CPU, on times that are given: what is timed, the rows that times make, and the files."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from platforms import PLATFORM, require

from jax_sparse_conv import __main__
from jax_sparse_conv._src import devices
from jax_sparse_conv._src.devices import Cpu
from jax_sparse_conv._src.dispatch import cpu_choice, folders
from jax_sparse_conv._src.dispatch.cpu_table import ALWAYS
from jax_sparse_conv._src.layers.calls import Call
from jax_sparse_conv._src.problem.geometry import Geometry, Pool
from jax_sparse_conv._src.tune import cpu, raw_times, workloads
from jax_sparse_conv._src.tune.cpu import DENSITIES, Entry, Sample

CPU = Cpu("AMD EPYC 7B13", "avx2", 8)
CALL = Call("conv", (1, 14, 14, 64), (3, 3, 64, 64), "float32", "default", Geometry(padding=((1, 1), (1, 1))), True,
            False, "relu")  # fmt: skip
KEY = cpu.key_of(CALL)
POOL = Pool("avg", (2, 2), (2, 2), ((0, 0), (0, 0)))


def samples(gains: Sequence[float], best: Sequence[float] | None = None) -> tuple[Sample, ...]:
    """XLA takes 100 us, and so many times as long as the native call."""
    each = zip(DENSITIES, gains, best or gains, strict=True)
    return tuple(Sample(density, 100.0, 100 / gain, 90.0, 90 / of_best) for density, gain, of_best in each)


def below(gains: Sequence[float], best: Sequence[float] | None = None, branch: float = 0.0) -> float | None:
    assert KEY is not None
    made = cpu.table_of(CPU, [Entry(KEY, samples(gains, best), branch, {})])
    return made.rows[0].below if made.rows else None


@pytest.fixture
def timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """As on a CPU whose native call is twice as fast up to a density of 0.5: the calls that are timed."""
    found: list[Call] = []

    def times(call: Call) -> tuple[tuple[Sample, ...], float]:
        found.append(call)
        return samples((2.0, 2.0, 2.0, 0.5, 0.5)), 1.0

    monkeypatch.setattr(cpu, "times_of", times)
    monkeypatch.setattr(devices, "cpu", lambda: CPU)
    monkeypatch.setenv(folders.CACHE, str(tmp_path / "cache"))
    monkeypatch.delenv(folders.SWITCH, raising=False)
    return found


def tune(*arguments: str) -> int:
    return __main__.main(["tune", "--device", "cpu", *arguments])


def test_rows_of_given_times() -> None:
    assert below((2.0, 1.8, 1.5, 1.2, 1.0)) == ALWAYS
    assert below((2.0, 1.8, 1.5, 1.2, 0.98)) == ALWAYS  # level
    assert below((1.03, 1.0, 0.9, 0.8, 0.7)) == 0  # too little to be ours
    assert below((2.0, 1.8, 1.25, 0.8, 0.7)) == pytest.approx(0.625, abs=0.01)
    assert below((2.0, 2.0, 2.0, 2.0, 0.5)) == pytest.approx(0.875)
    assert below((2.0, 1.8, 1.5, 0.8, 1.9)) == ALWAYS  # from a density on it is dense


def test_a_branch_has_to_pay() -> None:
    gains = (2.0, 1.8, 1.25, 0.8, 0.7)
    assert below(gains, branch=2.0) == pytest.approx(0.625, abs=0.01)
    assert below(gains, branch=20.0) == ALWAYS
    assert below((1.2, 1.1, 0.9, 0.6, 0.5), branch=20.0) == 0


def test_what_other_work_disturbed_has_no_row() -> None:
    assert below((2.0, 1.8, 1.25, 0.8, 0.7), best=(2.0, 1.8, 1.5, 1.3, 1.1)) is None
    assert below((2.0, 1.8, 1.25, 0.8, 0.7), best=(2.0, 1.8, 1.3, 0.8, 0.7)) is not None
    assert below((2.0, 1.8, 1.5, 1.2, 1.0), best=(1.0, 0.9, 0.8, 0.7, 0.6)) is None


def test_the_last_times_of_a_workload_count() -> None:
    assert KEY is not None
    entries = [Entry(KEY, samples([gain] * 5), 0.0, {"date": date}) for gain, date in ((2.0, "first"), (0.5, "second"))]
    made = cpu.table_of(CPU, entries)
    assert [each.below for each in made.rows] == [0]
    assert made.runs == ({"date": "second"},)
    assert made.rows[0].gains == (0.5, 0.5)


def test_it_makes_the_table_that_dispatch_reads(timed: list[Call], capsys: pytest.CaptureFixture[str]) -> None:
    assert tune("--network", "lenet5", "--batch", "1", "32", "--kinds", "tf32", "highest") == 0
    assert [(call.op, call.x_shape[0]) for call in timed] == [
        *[("conv_pool", 1), ("dense", 1), ("dense", 1), ("dense", 1)],
        *[("conv_pool", 32), ("dense", 32), ("dense", 32), ("dense", 32)],
    ]  # no image
    assert "float32  conv_pool" in capsys.readouterr().out
    key = cpu.key_of(timed[-1])
    assert key is not None
    assert cpu_choice.by_rules(key.workload).below == 0
    assert cpu_choice.on_cpu(key.workload).below == pytest.approx(0.625, abs=0.01)


def test_it_shows_its_table(timed: list[Call], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tune("--show") == 0
    assert "user: none of this device; " in capsys.readouterr().out
    assert tune("--network", "lenet5", "--batch", "1", "--kinds", "tf32") == 0
    assert tune("--show") == 0
    shown = capsys.readouterr().out
    assert f"user: {tmp_path / 'cache' / 'cpu_amd_epyc_7b13_avx2_8_threads.json'}, 4 rows" in shown


def test_it_goes_on_where_it_stopped(timed: list[Call], tmp_path: Path) -> None:
    layers = tmp_path / "layers.json"
    layers.write_text(json.dumps([dataclasses.asdict(CALL)]))
    for batches in (["1"], ["1", "2"]):
        assert tune("--layers", str(layers), "--kinds", "tf32", "--batch", *batches) == 0
    assert [call.x_shape[0] for call in timed] == [1, 2]


def test_fit_makes_the_table_again(timed: list[Call], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tune("--network", "lenet5", "--batch", "1", "--kinds", "tf32") == 0
    path = tmp_path / "cache" / f"{CPU.slug}.json"
    made = path.read_text()
    path.unlink()
    assert __main__.main(["tune", "--fit"]) == 0
    assert path.read_text() == made
    assert raw_times.read(path.with_suffix(".times.jsonl")) == []  # of GPUs


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [(["--no-xla"], "--no-xla is for GPUs"), (["--network", "vgg99"], "--network 'vgg99' is not one of")],
)
def test_mistakes_are_one_sentence(
    timed: list[Call], arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tune(*arguments) == 1
    assert reason in capsys.readouterr().err


def test_an_unknown_device_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        __main__.main(["tune", "--device", "tpu"])
    assert "'tpu' is not 'cpu' or a GPU's number" in capsys.readouterr().err


def test_averages_that_come_first_have_no_row() -> None:
    pooled = dataclasses.replace(
        CALL, op="conv_pool", kernel_shape=(1, 1, 64, 64), geometry=Geometry(pool=POOL), activation=None
    )
    assert cpu.key_of(pooled) is None
    assert cpu.key_of(dataclasses.replace(pooled, activation="relu")) is not None


@pytest.mark.skipif(PLATFORM != "cpu", reason="times of a CPU")
@pytest.mark.parametrize("op", ["conv", "conv_pool", "dense"])
def test_calls_are_timed_for_real(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    require("ecr", "float32")
    monkeypatch.setattr(cpu, "_SAMPLES", 2)
    [call] = [each for each in calls() if each.op == op]
    found, branch = cpu.times_of(call)
    assert branch >= 0
    assert [each.density for each in found] == list(DENSITIES)
    assert all(min(dataclasses.astuple(each)) > 0 for each in found)


def calls() -> list[Call]:
    """One of each operation; the convolution has a residual."""
    conv = dataclasses.replace(CALL, residual=True)
    pool = dataclasses.replace(CALL, op="conv_pool", geometry=dataclasses.replace(CALL.geometry, pool=POOL))
    return [conv, pool, next(call for call in workloads.of_networks(["lenet5"]) if call.op == "dense")]
