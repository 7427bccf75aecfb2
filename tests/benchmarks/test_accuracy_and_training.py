"""The suites accuracy, gradients and training: a small run of each, and their tables."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from benchmarks.document import layer_tables, network_tables
from benchmarks.networks import training
from benchmarks.suites import accuracy, gradients
from jax_sparse_conv import models
from jax_sparse_conv._src import devices


def test_accuracy_has_a_row_for_every_kernel(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.json"
    assert accuracy.main(["--layers", "2", "--networks", "lenet5", "--json", str(out)]) == 0
    rows = [row for row in json.loads(out.read_text())["rows"] if row["precision"] == "highest"]
    cases = list(dict.fromkeys(row["case"] for row in rows))
    assert cases == ["3x3 128->64 28x28, 0 % zeros", "3x3 128->64 28x28, 50 % zeros", "lenet5"]
    assert {"direct", "coo"} < {row["implementation"] for row in rows if row["case"] == cases[0]}
    assert all(row["ratio"] == pytest.approx(row["error"] / row["xla_error"]) for row in rows)
    assert all(0 < row["error"] < 2e-6 for row in rows)
    assert "over XLA's" in capsys.readouterr().out
    (table,) = layer_tables.accuracy(rows)
    assert table.count("\n") == 1 + len(cases)
    assert accuracy.main(["--json", "nowhere/rows.json"]) == 1


def test_accuracy_of_batches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.json"
    line = ["--layers", "0", "--networks", "lenet5"]
    assert accuracy.main([*line, "--batch", "1", "3", "--json", str(out)]) == 0
    rows = [row for row in json.loads(out.read_text())["rows"] if row["precision"] == "highest"]
    assert {(row["case"], row["batch"]) for row in rows} == {("lenet5", 1), ("lenet5, 3 images", 3)}
    assert all(0 < row["error"] < 2e-6 for row in rows)
    assert accuracy.main([*line, "--batch", "2", "0"]) == 1
    assert capsys.readouterr().err.endswith("--batch 0 is not at least 1\n")


def test_accuracy_of_each_way_to_run_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.ResNet((1, 1), 10, width=4, rngs=nnx.Rngs(0))
    images = jax.random.normal(jax.random.key(0), (2, 32, 32, 3))
    exact = accuracy._exact_of_network(model, images)
    assert exact.shape == (2, 10)
    assert exact.dtype == "float64"
    assert (exact[0] != exact[1]).all()
    for platform, precision, names in (
        ("cpu", "highest", {"jit_inference"}),
        ("gpu", "default", {"jit_inference"}),
        ("gpu", "highest", {"jit_inference", "jax.jit", "jax.jit, folded"}),
    ):
        monkeypatch.setattr(accuracy.devices, "default_platform", lambda platform=platform: platform)
        ways = dict(accuracy._ways(model, precision))
        assert ways.keys() == names
    monkeypatch.undo()
    with jax.default_matmul_precision("highest"):
        for run in ways.values():
            assert accuracy._error(run(images), exact) < 2e-6


def test_training_compares_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.json"
    line = ["--networks", "lenet5", "--batch", "2", "--repeats", "1"]
    line += ["--precision", "highest"]  # else the error is of TF32, on a GPU
    assert training.main([*line, "--json", str(out)]) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert (row["network"], row["batch"], row["size"]) == ("lenet5", 2, 32)
    assert row["ratio"] == pytest.approx(row["xla_ms"] / row["ours_ms"])
    assert row["error"] < 1e-3
    assert "over XLA" in capsys.readouterr().out
    assert "| lenet5 | 2 |" in network_tables.training([row])[0]
    assert training.main([*line, "--json", "nowhere/rows.json"]) == 1


def test_steps_in_bfloat16(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.json"
    line = ["--networks", "lenet5", "--batch", "2", "--repeats", "1", "--precision", "bfloat16"]
    assert training.main([*line, "--json", str(out)]) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert row["precision"] == "bfloat16"
    assert row["error"] < 0.05
    step, weights, rest = training.step_of("lenet5", None, jnp.bfloat16)
    assert "bf16" in step.lower(weights, rest, jnp.zeros((2, 32, 32, 1))).as_text()
    assert training.main(["--networks", training.FLAXS, "--precision", "bfloat16"]) == 1
    assert "this package's networks" in capsys.readouterr().err


def test_flaxs_own_network_is_accelerated() -> None:
    step, weights, rest = training.step_of(training.FLAXS, None)
    text = step.lower(weights, rest, jnp.zeros((2, 64, 64, 3))).as_text()
    calls = text.count("custom_call @jsc_channel_affine(") if devices.default_platform() == "cpu" else 53
    assert calls == 53


def test_gradients_of_both_sides_are_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = (
        gradients.Layer(2, 8, 16, 16, pool=2),
        gradients.Layer(1, 9, 16, 32, stride=2, groups=4),
        gradients.Layer(1, 8, 16, 16, each=3),
    )
    monkeypatch.setitem(gradients.SETS, "kinds", layers)
    out = tmp_path / "rows.json"
    assert gradients.main(["--repeats", "2", "--precision", "highest", "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(row["layer"], row["by"]) for row in rows] == [
        (layer.name, by) for layer in layers for by in ("x", "kernel")
    ]
    assert all(row["difference"] < 2e-6 for row in rows)
    errors = [row[f"{side}_error"] for row in rows if not row["pool"] for side in ("xla", "ours")]
    assert len(errors) == 8
    assert all(0 < error < 1e-6 for error in errors)
    assert all(row["ratio"] == pytest.approx(row["xla_us"] / row["ours_us"]) for row in rows)
    assert "ratio" in capsys.readouterr().out
    (table,) = layer_tables.gradients(rows)
    assert "| 1x8x8, 3x3 16->16, of each of 3, HIGHEST |" in table
    assert gradients.main(["--json", "nowhere/rows.json"]) == 1
