"""`benchmarks regret`: what a choice loses, by times that are given."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks.tune import regret
from jax_sparse_conv._src.devices import Device


def test_regret_of_given_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a GPU without a table the models choose the dense kernel, whose best tile takes 4 us of XLA's 100."""
    device = Device(name="NVIDIA H900")
    key = {"sizes": [1, 14, 14, 256, 3, 3, 256, 1, 1, 1, 1, 1, 1, 1, 1, 1], "kind": "highest", "residual": False}
    times = {"xla": 100.0, "wgmma 64,56,1,6": 5.0, "mma 1,1": 4.0}
    lines = [{"run": {"gpu": dataclasses.asdict(device)}}, {"key": key, "times": times, "again": []}]
    raw, found = tmp_path / "times.jsonl", tmp_path / "found.json"
    raw.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    assert regret.main([str(raw), "--json", str(found)]) == 0
    assert "NVIDIA H900" in capsys.readouterr().out
    outcomes = json.loads(found.read_text(encoding="utf-8"))
    assert {each["choice"] for each in outcomes} == {"tables", "sibling", "no row", "models"}
    for each in outcomes:
        assert each["regret"] in (pytest.approx(1.25), pytest.approx(1.0))
        assert each["ratio"] == pytest.approx(25 / each["regret"])
