"""`python -m benchmarks models`, of a model small enough for a test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from benchmarks.document import network_tables
from benchmarks.networks import frameworks, models


def build(x: jax.Array) -> frameworks.Built:
    def function(weights: Any, x: jax.Array) -> jax.Array:
        for kernel, shift in weights:
            y = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            x = jax.nn.relu(y + shift)
        return x.mean((1, 2))

    shapes = ((3, 3, 3, 16), (3, 3, 16, 16))
    keys = jax.random.split(jax.random.key(0))
    kernels = [jax.random.normal(key, shape).astype(x.dtype) for key, shape in zip(keys, shapes, strict=True)]
    return function, [(kernel, jnp.zeros(16, x.dtype)) for kernel in kernels]


def measured(tmp_path: Path, *more: str) -> dict[str, Any]:
    file = tmp_path / "models.json"
    arguments = ["--models", "keras_vgg16", "--batches", "2", "--size", "8", "--repeats", "2", "--json", str(file)]
    assert models.main([*arguments, *more]) == 0
    (row,) = json.loads(file.read_text())["rows"]
    return row


def test_a_row_has_every_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(frameworks.MODELS, "keras_vgg16", build)
    monkeypatch.setattr(models, "shares_of", lambda name: [0.75])
    row = measured(tmp_path, "--kinds", "highest")
    assert row["layers"] == 2
    assert row["error"] < 1e-5
    sides = [side for side in models.SIDES if side != "graphs" or jax.default_backend() == "gpu"]
    assert all(row[f"{side}_{what}"] > 0 for side in sides for what in ("us", "waited_us", "compile_s"))
    dense = min(row[f"{side}_us"] for side in sides if side not in models.OURS)
    assert row["accelerate_ratio"] == pytest.approx(dense / row["accelerate_us"])
    assert row["weights"] == "trained"
    assert row["zeros_percent"] == pytest.approx(75 / 2, abs=3)  # of the image and of one map
    kernels = 4 * 3 * 3 * (3 + 16) * 16
    assert kernels <= row["jit_weight_bytes"] < 1.5 * kernels
    assert all(row[f"{side}_bytes"] == row[f"{side}_temp_bytes"] + row[f"{side}_weight_bytes"] for side in sides)
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("keras_vgg16", "trained", "zeros %", "jit_inference bytes"))


def test_zeros_of_the_model_as_built_and_of_other_dtypes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(frameworks.MODELS, "keras_vgg16", build)
    initial = measured(tmp_path, "--weights", "initial", "--kinds", "bfloat16")
    assert initial["weights"] == "initial"
    monkeypatch.setattr(models, "shares_of", lambda name: [0.9])
    (tmp_path / "models.json").unlink()
    trained = measured(tmp_path, "--kinds", "bfloat16")
    assert trained["zeros_percent"] == pytest.approx(90 / 2, abs=3)
    assert trained["zeros_percent"] > initial["zeros_percent"] + 10


def test_the_table_has_zeros_and_memory_where_rows_have_them() -> None:
    old: dict[str, Any] = {"model": "keras_vgg16", "batch": 1, "kind": "default", "weights": "initial"}
    old |= {"backend": "gpu", "jit_us": 300.0, "jit_inference_us": 150.0, "jit_inference_ratio": 2.0}
    old |= {"jit_waited_us": 330.0, "jit_inference_waited_us": 150.0}
    new = old | {"weights": "trained", "zeros_percent": 61.3, "jit_bytes": 300, "jit_inference_bytes": 240}
    (table,) = network_tables.others([new, old])
    assert table.splitlines()[2:] == [
        "| VGG16, Keras | 1 | TF32 | initial | | 300 | | | 150 | 2.00 | 2.20 | |",
        "| VGG16, Keras | 1 | TF32 | trained | 61 % | 300 | | | 150 | 2.00 | 2.20 | 1.25 |",
    ]


def test_a_folder_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert models.main(["--json", "nowhere/models.json"]) == 1
    assert "--json" in capsys.readouterr().err
