"""`benchmarks wins`: what a kernel alone wins, by times that are given."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks.document import kernels_page
from benchmarks.tune import wins
from jax_sparse_conv._src.devices import Device


def test_gains_are_over_the_next() -> None:
    every = [{"a": 4.0, "b": 5.0, "xla": 6.0}, {"a": 4.0, "xla": 4.2}, {"a": 4.0, "b": 3.0}, {"a": 1.0}]
    assert list(wins.gains("a", every)) == [pytest.approx(1.25), pytest.approx(1.05)]


def test_tiles_of_a_kernel_are_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = {"sizes": [1, 14, 14, 256, 3, 3, 256, 1, 1, 1, 1, 1, 1, 1, 1, 1], "kind": "tf32", "residual": False}
    times = {"xla": 10.0, "wgmma 64,56,1,6": 5.0, "wgmma 64,56,1,4": 4.0, "mma 1,1": 8.0}
    lines = [{"run": {"gpu": dataclasses.asdict(Device())}}, {"key": key, "times": times, "again": []}]
    raw = tmp_path / "h200" / "tune.times.jsonl"
    raw.parent.mkdir()
    raw.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    assert wins.main([str(raw)]) == 0
    _, mma, wgmma = capsys.readouterr().out.splitlines()
    assert mma.split()[1:5] == ["mma", "1", "1", "0"]
    assert wgmma.split() == ["tf32", "wgmma", "64,56,1", "1", "1", "1", "2.000"]
    assert "## H200" not in kernels_page.page(tmp_path)  # not without XLA's times
    raw.with_name("xla.times.jsonl").write_text(json.dumps(lines[0]) + "\n", encoding="utf-8")
    page = kernels_page.page(tmp_path)
    assert "From `h200/tune.times.jsonl` and `h200/xla.times.jsonl`." in page
    assert page.endswith("| TF32 | `mma 1` | 1 | 0 | 0 | |\n| TF32 | `wgmma 64,56,1` | 1 | 1 | 1 | 2.00 |\n")
