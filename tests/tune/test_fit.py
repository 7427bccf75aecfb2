"""`tune --fit`: constants that made the times are found again, and others stay."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from jax_sparse_conv import __main__
from jax_sparse_conv._src.devices import Device
from jax_sparse_conv._src.dispatch import folders, model, table
from jax_sparse_conv._src.dispatch.planner import Candidate
from jax_sparse_conv._src.dispatch.table import Key
from jax_sparse_conv._src.problem.geometry import Geometry, Pool
from jax_sparse_conv._src.problem.workload import Workload
from jax_sparse_conv._src.tune import fit
from jax_sparse_conv._src.tune.raw_times import Time

GPU = Device(name="NVIDIA H900")


def key_of(images: int, size: int, channels: int, out_channels: int, side: int = 3) -> Key:
    padding = ((side // 2, side // 2),) * 2
    shapes = (images, size, size, channels), (1, side, side, channels, out_channels)
    key = Key.of(Workload("ecr", *shapes, Geometry(padding=padding), "float32", False))
    assert key is not None
    return key


KEYS = [
    key_of(images, size, channels, out_channels)
    for images in (1, 4, 16)
    for size in (7, 14, 28)
    for channels, out_channels in ((64, 64), (128, 256), (512, 128))
]


def start() -> model.Model:
    """The shipped model, whose constants a fit begins with."""
    shipped = model.load(model.SHIPPED)
    begun = {
        part: {name: dataclasses.replace(group, first=group.kinds) for name, group in getattr(shipped, part).items()}
        for part in ("kernels", "xla", "others")
    }
    return dataclasses.replace(shipped, **begun)


def test_workloads_come_back() -> None:
    pool = Pool("max", (3, 2), (2, 1), ((1, 0), (0, 1)))
    geometry = Geometry((2, 1), ((0, 2), (-1, 3)), (1, 2), 4, pool)
    workload = Workload("pecr", (2, 9, 11, 32), (1, 3, 5, 8, 24), geometry, "bfloat16", False, False)
    plain = workload.unpooled()
    key = Key.of(plain)
    assert key is not None
    assert key.workload == plain
    pooled = dataclasses.replace(key, pool=(3, 2, 2, 1, 1, 0, 0, 1, 1))
    assert pooled.workload == workload


@pytest.mark.parametrize(("kind", "other"), [("tf32", "highest"), ("highest", "tf32")])
def test_constants_of_xla_are_found_again(kind: str, other: str) -> None:
    shipped = start()
    group = shipped.xla["window"]
    factors = {"floor": 2, "flops": 1.4, "chain": 0.7, "spectra floor": 0.8, "spectra": 1.5}
    real = tuple(value * factors.get(name, 1) for name, value in zip(group.names, group.kinds[kind], strict=True))
    keys = [dataclasses.replace(key, kind=kind) for key in KEYS]
    features = [model.features(key.workload, GPU) for key in keys]
    times = [Time(key, None, float(model.xla_of(real, each)), GPU) for key, each in zip(keys, features, strict=True)]
    found = fit.fitted(shipped, times)
    us = [float(model.xla_of(found.xla["window"].kinds[kind], each)) for each in features]
    assert np.allclose(us, [time.us for time in times], rtol=0.05)
    assert found.xla["window"].kinds[other] == group.kinds[other]
    assert found.kernels == shipped.kernels
    residuals = found.fit["residuals"][f"xla window/{kind}"]
    assert residuals["rms"] < residuals["rms_before"] / 4


def test_constants_of_kernels_are_found_again() -> None:
    """Every time a third longer, and one tile half again."""
    shipped = start()
    times = []
    for key in KEYS:
        for tile in ((64, 56, 0, 1), (128, 112, 0, 1)):
            candidate = Candidate("wgmma", tile)
            [us] = key.layer.expected([candidate], GPU, any_build=True)
            times.append(Time(key, candidate, us * (1.33 if tile[0] == 64 else 1.5), GPU))
    found = fit.fitted(shipped, times)
    constants = found.of_planners
    us = [
        time.key.layer.expected([time.candidate], GPU, constants, any_build=True)[0]
        for time in times
        if time.candidate is not None
    ]
    assert np.allclose(us, [time.us for time in times], rtol=0.1)
    assert found.kernels["mma"] == shipped.kernels["mma"]
    never = shipped.kernels["wgmma"].names.index("step 64x224 alone")
    before, after = (each.kernels["wgmma"].kinds["tf32"][never] for each in (shipped, found))
    assert after == pytest.approx(before)


def test_few_times_change_nothing() -> None:
    shipped = start()
    found = fit.fitted(shipped, [Time(KEYS[0], None, 1000.0, GPU)] * 4)
    assert found.xla == shipped.xla


def test_candidates_that_are_gone_do_not_count() -> None:
    shipped = start()
    gone = [Time(key, Candidate("wgmma", (64, 192, 0, 1)), 1.0, GPU) for key in KEYS]
    assert fit.fitted(shipped, gone).kernels == shipped.kernels


def raw_times(path: Path, device: Device) -> Path:
    run = {"run": {"device": device.name, "date": "2026-01-01", "gpu": dataclasses.asdict(device)}}
    lines = [run]
    for key in KEYS:
        named = {"sizes": key.sizes, "kind": key.kind, "residual": key.residual}
        times = {"xla": 30.0, "mma 1,1": 10.0, "mma 2,1": 12.0}
        lines.append({"key": named, "times": times, "again": list(times)})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def test_the_command_writes_model_and_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(folders.CACHE, str(tmp_path))
    monkeypatch.delenv(folders.SWITCH, raising=False)
    raw_times(tmp_path / "h900.times.jsonl", GPU)
    before = model.xla_us(KEYS[0].workload, GPU)
    assert __main__.main(["tune", "--fit"]) == 0
    assert "xla window/tf32: 27 times" in capsys.readouterr().out
    assert abs(model.xla_us(KEYS[0].workload, GPU) - 30) < abs(before - 30)
    assert {row.candidate for row in table.load(tmp_path / "h900.json").rows} == {Candidate("mma", (1, 1))}
    model.forget()
    table.forget()


def test_times_of_several_gpus_make_one_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [raw_times(tmp_path / f"{name}.jsonl", dataclasses.replace(GPU, name=name)) for name in ("A1", "A2")]
    assert __main__.main(["tune", "--fit", *map(str, files), "--out", str(tmp_path / "out")]) == 0
    capsys.readouterr()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a1.json", "a2.json", "model.json"]
    assert model.load(tmp_path / "out" / "model.json").fit["devices"] == ["A1", "A2"]


def test_without_times_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(folders.CACHE, str(tmp_path))
    assert __main__.main(["tune", "--fit"]) == 1
    assert "no raw times of a known device in" in capsys.readouterr().err
