"""`benchmarks.left_to_xla`: what it says of rows of `benchmarks.zoo`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import on_a_gpu

from benchmarks import left_to_xla, zoo_layers


def _row(name: str, xla_us: float, direct_us: float, batch: int = 32) -> dict[str, Any]:
    """The row of VGG-19's layer of this name, in TF32 and without zeros."""
    user = f"vgg19/{name}"
    (call,) = (layer.call for layer in zoo_layers.layers_of(("vgg19",), batch) if user in layer.users)
    times = {"xla_us": xla_us, "ours_us": xla_us + 1, "direct_us": direct_us}
    about = {"details": repr(call), "batch": batch, "users": [user], "zeros_target": 0, "weights": "arguments"}
    return about | {"implementation": "xla"} | times


def test_says_what_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """conv1_1 is an image, conv2_2 is taken for its pool, and the others are too large."""
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    rows = [_row("conv1_1", 200, 100), _row("conv2_2", 400, 410), _row("conv2_1", 90, 100), _row("conv3_1", 80, 100)]
    first.write_text(json.dumps({"rows": [_row("conv1_1", 1, 1), {**_row("conv3_2", 1, 1), "direct_us": 2.0}]}))
    second.write_text(json.dumps({"rows": rows}))
    on_a_gpu(monkeypatch, (9, 0), has_warpgroups=True)
    assert left_to_xla.main([str(first), str(second)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("5 timed, 1 faster by direct, 1 of them by more than 3 %; 1 taken with their pool alone\n")
    assert "default: 1 taken, geometric mean 2.000" in out
    assert "| default | 32 | 1 | 2.00 | 2.00 | 2.00 | 3 | 0.85 |" in out
    on_a_gpu(monkeypatch, (9, 0), has_warpgroups=False)
    assert left_to_xla.main([str(first)]) == 1
    assert "not built for Hopper" in capsys.readouterr().err
