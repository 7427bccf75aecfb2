"""`python -m benchmarks models`, of a model small enough for a test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from benchmarks.common import frameworks
from benchmarks.suites import models


def build(x: jax.Array) -> frameworks.Built:
    def function(weights: Any, x: jax.Array) -> jax.Array:
        y = lax.conv_general_dilated(x, weights, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return jax.nn.relu(y).mean((1, 2))

    return function, 0.1 * jnp.ones((3, 3, 3, 16), x.dtype)


def test_a_row_has_every_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(frameworks.MODELS, "keras_vgg16", build)
    file = tmp_path / "models.json"
    arguments = ["--models", "keras_vgg16", "--batches", "2", "--size", "8", "--repeats", "2", "--json", str(file)]
    assert models.main(arguments) == 0
    (row,) = json.loads(file.read_text())["rows"]
    assert row["layers"] == 1
    assert row["error"] < 1e-5
    sides = [side for side in models.SIDES if side != "graphs" or jax.default_backend() == "gpu"]
    assert all(row[f"{side}_{what}"] > 0 for side in sides for what in ("us", "waited_us", "compile_s"))
    dense = min(row[f"{side}_us"] for side in sides if side not in models.OURS)
    assert row["accelerate_ratio"] == pytest.approx(dense / row["accelerate_us"])
    assert "keras_vgg16" in capsys.readouterr().out


def test_a_folder_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert models.main(["--json", "nowhere/models.json"]) == 1
    assert "--json" in capsys.readouterr().err
