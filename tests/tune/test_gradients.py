"""`tune --gradients`: what is timed, the rows that times make, and the files."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from platforms import PLATFORM, on_a_gpu

from benchmarks.common.as_on import as_on
from benchmarks.tune import gradient_regret
from jax_sparse_conv import __main__
from jax_sparse_conv._src import _native, devices
from jax_sparse_conv._src.dispatch import folders, gradient_table
from jax_sparse_conv._src.layers.calls import Call
from jax_sparse_conv._src.problem.geometry import Geometry, Pool
from jax_sparse_conv._src.tune import gradients, measure
from jax_sparse_conv._src.tune.gradients import Entry, Gradient

POOL = Pool("max", (2, 2), (2, 2), ((0, 0), (0, 0)))
PLAIN = Call("conv", (2, 8, 8, 16), (3, 3, 16, 16), "float32", "highest", Geometry(padding=((1, 1), (1, 1))), False,
             False, None)  # fmt: skip
POOLED = dataclasses.replace(
    PLAIN, op="conv_pool", bias=True, activation="relu", geometry=dataclasses.replace(PLAIN.geometry, pool=POOL)
)
IMAGE = dataclasses.replace(PLAIN, x_shape=(2, 8, 8, 3), kernel_shape=(3, 3, 3, 16))
DEVICE = "cpu" if PLATFORM == "cpu" else "0"


def machine() -> gradient_table.Machine:
    return devices.cpu() if PLATFORM == "cpu" else devices.current()


@pytest.fixture
def timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Gradient]:
    """XLA takes twice as long for x and half as long for the kernel: what is timed."""
    found: list[Gradient] = []

    def times_of(gradient: Gradient) -> dict[str, float]:
        found.append(gradient)
        ours = gradients.name_of((3, 0, 8, 1)) if gradient.by_kernel and PLATFORM == "cuda" else gradients.OURS
        return {"xla": 100.0, ours: 200.0 if gradient.by_kernel else 50.0}

    monkeypatch.setattr(gradients, "times_of", times_of)
    monkeypatch.setenv(folders.CACHE, str(tmp_path / "cache"))
    monkeypatch.delenv(folders.SWITCH, raising=False)
    return found


@pytest.fixture
def layers(tmp_path: Path) -> str:
    path = tmp_path / "layers.json"
    path.write_text(json.dumps([dataclasses.asdict(PLAIN)]))
    return str(path)


def tune(*arguments: str) -> int:
    return __main__.main(["tune", "--gradients", "--device", DEVICE, *arguments])


def test_what_is_timed() -> None:
    """Without bias, ReLU and pool; of an image the gradient of the kernel alone."""
    found = gradients.gradients_of([PLAIN, POOLED, IMAGE, dataclasses.replace(PLAIN, op="dense")])
    assert found == [Gradient(PLAIN, False), Gradient(PLAIN, True), Gradient(IMAGE, True)]


@pytest.mark.skipif(PLATFORM not in ("cpu", "cuda"), reason="there are no kernels")
def test_times_are_of_both_sides() -> None:
    times = gradients.times_of(Gradient(PLAIN, PLATFORM == "cpu"))
    assert set(times) == {measure.XLA, gradients.OURS}
    assert min(times.values()) > 0


@pytest.mark.skipif(PLATFORM != "cuda", reason="plans are a GPU's")
def test_times_of_plans() -> None:
    times = gradients.times_of(Gradient(PLAIN, True))
    assert len(times) > 1
    assert all(len(gradients.tile_of(name)) == 4 for name in times if name != measure.XLA)


def test_what_is_xlas_in_any_case_has_no_row() -> None:
    wide = dataclasses.replace(PLAIN, x_shape=(1, 1, 1 << 13, 16), kernel_shape=(1, 3, 16, 16))
    default = dataclasses.replace(PLAIN, precision="default")
    found = [gradients.key_of(Gradient(call, True)) is None for call in (wide, default)]
    assert found == ([True, False] if PLATFORM == "cpu" else [False, True])


def test_a_gpu_has_sides_of_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    device = on_a_gpu(monkeypatch, (9, 0), has_warpgroups=True)
    monkeypatch.setattr(devices, "default_platform", lambda: "gpu")
    monkeypatch.setattr(_native, "why_missing", lambda *_: None)
    by_x, by_kernel = (Gradient(PLAIN, each) for each in (False, True))
    key = gradients.key_of(by_kernel)
    assert key is not None
    assert key[0].kind == gradient_table.GPU_KIND
    assert gradients.key_of(by_x) == (key[0], False)
    assert gradients.key_of(Gradient(dataclasses.replace(PLAIN, precision="default"), True)) is None
    assert gradients.key_of(Gradient(IMAGE, True)) is None  # channels in multiples of 4
    assert list(gradients._sides(by_x)) == [measure.XLA, gradients.OURS]
    first, *rest = gradients._sides(by_kernel)
    assert first == measure.XLA
    assert [gradients.tile_of(name) for name in rest] == [
        plan.tile for plan in key[0].layer.kernel_gradients(device, 3)
    ]


def test_it_makes_the_table_that_dispatch_reads(
    timed: list[Gradient], layers: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tune("--layers", layers, "--kinds", "highest", "--batch", "2", "4") == 0
    of = {2: PLAIN, 4: dataclasses.replace(PLAIN, x_shape=(4, 8, 8, 16))}
    assert timed == [Gradient(call, by_kernel) for call in of.values() for by_kernel in (False, True)]
    found = gradient_table.load(gradient_table.paths(machine())["user"])
    assert [(row.by_kernel, row.is_ours) for row in found.rows] == [(False, True)] * 2 + [(True, False)] * 2
    kind = "float32" if PLATFORM == "cpu" else "highest"
    lines = [f"{kind:8} {'kernel':7} {2:5} {0:5} {1:6.2f}", f"{kind:8} {'x':7} {2:5} {2:5} {2:6.2f}"]
    out = capsys.readouterr().out
    assert all(line in out for line in lines)
    assert tune("--show") == 0
    shown = capsys.readouterr().out
    assert "4 rows" in shown
    assert all(line in shown for line in lines)


def test_it_goes_on_where_it_stopped(timed: list[Gradient], layers: str) -> None:
    for batches in (["2"], ["2", "4"]):
        assert tune("--layers", layers, "--kinds", "highest", "--batch", *batches) == 0
    assert [gradient.call.x_shape[0] for gradient in timed] == [2, 2, 4, 4]


def test_fit_makes_the_table_again(timed: list[Gradient], layers: str, tmp_path: Path) -> None:
    assert tune("--layers", layers, "--kinds", "highest", "--batch", "2") == 0
    path = gradient_table.paths(machine())["user"]
    made = path.read_text()
    path.unlink()
    assert tune("--fit") == 0
    assert path.read_text() == made
    raw = path.with_name(path.name.replace(".json", ".times.jsonl"))
    device = dataclasses.replace(devices.Device(), name="NVIDIA H900")
    other = tmp_path / "h900.times.jsonl"
    key = gradient_table.Key((2, 8, 8, 16, 3, 3, 16, 1, 1, 1, 1, 1, 1, 1, 1, 1), gradient_table.GPU_KIND, False)
    lines = [
        {"run": {"gpu": dataclasses.asdict(device)}},
        gradients.line_of(key, True, {"xla": 2.0, "ours 3,0,8,1": 1.0}),
    ]
    other.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert tune("--fit", str(raw), str(other), "--out", str(tmp_path / "out")) == 0
    assert (tmp_path / "out" / "gradients" / path.name).read_text() == made
    of_other = gradient_table.load(tmp_path / "out" / "gradients" / "h900.json")
    assert of_other.machine == gradient_table.machine_of(device)
    assert [row.tile for row in of_other.rows] == [(3, 0, 8, 1)]


def test_mistakes_are_one_sentence(
    timed: list[Gradient], layers: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tune("--layers", layers, "--no-xla") == 1
    assert "--no-xla is not for --gradients" in capsys.readouterr().err
    other = tmp_path / "other.jsonl"
    other.write_text('{"key": {}, "times": {}}\n')
    assert tune("--fit", str(other)) == 1
    assert "other.jsonl, line 1 holds no times of `tune`" in capsys.readouterr().err
    assert tune("--fit") == 1
    assert "no times of gradients in" in capsys.readouterr().err
    with pytest.raises(ValueError, match="'theirs 1,2' does not begin with 'ours'"):
        gradients.tile_of("theirs 1,2")


def test_regret_of_given_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rules take the first plan, which is slower here than the second; a neighbour says that XLA is faster."""
    device = devices.Device(name="NVIDIA H900", capability=(9, 0))
    run = {"gpu": dataclasses.asdict(device)}
    sizes = [(images, 56, 56, 64, 3, 3, 64, 1, 1, 1, 1, 1, 1, 1, 1, 1) for images in (32, 30)]
    keys = [gradient_table.Key(each, gradient_table.GPU_KIND, False) for each in sizes]
    with as_on(device):
        plans = [key.layer.kernel_gradients(device, 2) for key in keys]
    names = [[gradients.name_of(plan.tile) for plan in each] for each in plans]
    entries = [
        Entry(keys[0], True, {"xla": 100.0, names[0][0]: 50.0, names[0][1]: 40.0}, run),
        Entry(keys[1], True, {"xla": 30.0, names[1][0]: 60.0}, run),
    ]
    found = {way: next(gradient_regret.outcomes_of(entries, way)) for way in gradient_regret.WAYS}
    assert found == {"row": (1.0, 2.5), "near": (2.5, 1.0), "rules": (1.25, 2.0)}
    raw = tmp_path / "times.jsonl"
    lines = [{"run": run}, *(gradients.line_of(each.key, True, each.times) for each in entries)]
    raw.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert gradient_regret.main([str(raw)]) == 0
    assert "highest  kernel rules       2" in capsys.readouterr().out
    raw.write_text("")
    with pytest.raises(SystemExit):
        gradient_regret.main([str(raw)])
