"""`python -m benchmarks latency`, of a network small enough for a test."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import pytest

from benchmarks.networks import latency


def test_a_row_for_every_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "latency.json"
    assert latency.main(["--networks", "lenet5", "--repeats", "1", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    sides = {"nothing", "product", "xla", "jit_inference"} | (
        {"xla graphs"} if jax.default_backend() == "gpu" else set()
    )
    assert {row["side"] for row in rows} == sides
    assert all(row[f"{way}_us"] > 0 for row in rows for way in latency.WAYS)
    assert "jit_inference" in capsys.readouterr().out


def test_a_folder_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert latency.main(["--json", "nowhere/latency.json"]) == 1
    assert "--json" in capsys.readouterr().err
