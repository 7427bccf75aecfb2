"""The sweep over random layers: what it draws, what it times again, and one small run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from benchmark_layers import CPU_EXTENSION

from benchmarks.common import losing
from benchmarks.document import layer_tables
from benchmarks.suites import sweep
from benchmarks.suites.sweep import Layer

MOST = 1e8


def test_layers_are_repeatable_and_cover_the_space() -> None:
    drawn = [sweep.draw(1, number, MOST) for number in range(300)]
    assert drawn[:9] == [sweep.draw(1, number, MOST) for number in range(9)]
    assert {layer.op for layer in drawn} == {"conv", "conv_pool", "dense"}
    assert all(1e4 <= layer.flops <= MOST for layer in drawn)
    assert max(layer.stride for layer in drawn) == 8
    assert any(layer.groups > 1 for layer in drawn)
    assert any(layer.kernel[-1] < 4 for layer in drawn)
    assert any(layer.kernel[-1] > 500 for layer in drawn)
    assert {0, 95} <= {layer.zeros for layer in drawn}


@pytest.mark.parametrize(
    "layer",
    [
        Layer("conv", (2, 9, 8, 6), (3, 3, 3, 4), stride=2, groups=2),
        Layer("conv", (1, 9, 8, 6), (3, 1, 6, 5), dilation=2),
        Layer("conv_pool", (1, 9, 8, 3), (2, 2, 3, 4)),
        Layer("dense", (2, 12), (12, 7), zeros=50),
    ],
    ids=lambda layer: layer.name,
)
def test_both_sides_are_the_same_layer(layer: Layer) -> None:
    rng = np.random.default_rng(0)
    shapes = (layer.x, layer.kernel, layer.kernel[-1:])
    operands = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    ours, xlas = (jax.jit(side("float32", "highest"))(*operands) for side in (layer.ours, layer.xlas))
    np.testing.assert_allclose(ours, xlas, rtol=1e-4, atol=1e-4)


def test_as_many_winners_are_timed_again_as_losers() -> None:
    layers = [Layer("dense", (1, n), (n, 1)) for n in range(1, 11)]
    ratios = dict(zip(layers, [0.5, 0.9, 0.96, *[1.5] * 7], strict=True))
    chosen = losing.again(ratios, 0)
    assert len(chosen) == len(set(chosen)) == 6
    assert set(layers[:3]) <= set(chosen)
    assert losing.again(dict.fromkeys(layers, 0.5), 0) != layers  # in a drawn order
    assert losing.again(dict.fromkeys(layers, 1.0), 0) == []
    assert set(losing.again(ratios, 0, layers[-3:])) == {*layers[:3], *layers[-3:]}  # those timed again before


def test_a_loss_is_one_twice() -> None:
    def row(name: str, ratio: float, **more: Any) -> dict[str, Any]:
        about = {"layer": name, "implementation": "ecr", "xla_us": 1.0, "ours_us": 1.0, "best_ratio": ratio}
        return {**about, "ratio": ratio, **more}

    first = [row("a", 0.5), row("b", 0.5), row("c", 2.0), row("d", 2.0)]
    again = [
        row(name, ratio, first_ratio=earlier, first_best_ratio=earlier)
        for name, ratio, earlier in (("a", 0.6, 0.5), ("b", 1.5, 0.5), ("c", 0.9, 2.0))
    ]
    text = sweep.summary(first, again, 7)
    assert "4 layers timed, 7 left to XLA\ngeometric mean 1.00\n" in text
    assert "1 below 0.97 twice; of 3 timed again 1 more came out below it" in text
    assert text.splitlines()[1].startswith("a ")


@CPU_EXTENSION
@pytest.mark.parametrize("weights", ["arguments", "constant"])
def test_a_small_sweep(weights: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "sweep.json"
    line = ["--layers", "4", "--most-flops", "1e6", "--repeats", "2", "--weights", weights, "--json", str(out)]
    assert sweep.main(line) == 0
    rows = json.loads(out.read_text())["rows"]
    assert 0 < len(rows) <= 4
    assert {row["weights"] for row in rows} == {weights}
    for row in rows:
        assert row["ratio"] == pytest.approx(row["xla_us"] / row["ours_us"])
    assert f"{len(rows)} layers timed, {4 - len(rows)} left to XLA" in capsys.readouterr().out


def test_the_page_counts_losses_and_findings() -> None:
    about = {"op": "conv", "dtype": "float32", "precision": "highest", "weights": "constant"}
    times = ({"ratio": 0.5, "best_ratio": 1.1, "first_ratio": 2.0}, {"ratio": 8.0, "best_ratio": 7.0})
    assert layer_tables.sweep([about | each for each in times])[0].endswith("| 2 | 4.00 | 1 |")
    finding = {"case": '{"operation": "dense"}'}
    row = {"seed": 3, "cases": 1207, "skipped": 200, "operations": {"conv": 1200, "dense": 7}, "findings": [finding]}
    found = layer_tables.fuzz([row, row | {"values": 8}])[0]
    assert found.splitlines()[2:] == [
        "| 3 | 1,007 | 200 | 1 | 1,207 | 1,200 | 7 |",
        "| 3 | 1,007 | 200 | 1 | 151 | 1,200 | 7 |",
        "| all | 2,014 | 400 | 2 | 1,358 | 2,400 | 14 |",
    ]
