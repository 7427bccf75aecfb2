"""Tables, plots and numbers of a comparison."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import numpy as np
import pytest

from jax_sparse_conv._src.cli import photograph, report
from jax_sparse_conv._src.cli.comparison import Comparison, LayerResult, Totals, differences, top_classes

pytest.importorskip("rich")


def comparison(dense_us: float = 400.0) -> Comparison:
    scores = np.asarray([[0.1, 0.5, 0.05, 0.2, 0.1, 0.05]], np.float32)
    rows = (
        LayerResult("conv1", "SparseConv", (1, 56, 56, 64), (1, 56, 56, 64), 58.25, "ecr", dense_us, 100.0),
        LayerResult(
            "a.very.long.path.of.a.layer.conv", "SparseConvPool", (1, 7, 7, 8), (1, 3, 3, 8), 0, "xla", 50, 100
        ),
    )
    return Comparison(rows, Totals(600.0, 300.0), 1.5e-6, 2.5e-7, scores, scores)


def printed(found: Comparison, width: int | None = None, **arguments: object) -> str:
    file = io.StringIO()
    out = report.console(file)
    if width is not None:
        out.width = width
    report.print_comparison(found, out, "a title", **arguments)  # type: ignore[arg-type]
    return file.getvalue()


def test_output_that_is_piped_has_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    row = LayerResult("conv2_1", "SparseConv", (32, 112, 112, 64), (32, 112, 112, 128), 100, "ecr|xla", 98765432.1, 9e7)
    found = dataclasses.replace(comparison(), layers=(row, comparison().layers[0]))
    lines = printed(found, notes=["a note that is longer than a line " * 5]).splitlines()
    assert max(map(len, lines)) <= 80
    assert any("98,765.432" in line and "90,000.000" in line and line.split()[-1] == "1.10" for line in lines)
    assert "Left out for the width: output, input; --json and --html have all." in lines


@pytest.mark.parametrize("width", [20, 40, 80, 120, 200])
def test_columns_are_dropped_and_digits_never(width: int) -> None:
    lines = printed(comparison(), width).splitlines()
    row = next(line.split() for line in lines if line.split()[:1] == ["conv1"])
    assert row[-3:] == ["400.0", "100.0", "4.00"]
    if width >= 80:
        assert max(map(len, lines)) <= width
    assert ("1x56x56x64" in row) == (width >= 120)


def test_table_shows_every_number() -> None:
    lines = printed(comparison(), 200, notes=["a note"]).splitlines()
    row = next(line.split() for line in lines if line.split()[:1] == ["conv1"])
    assert row == ["conv1", "1x56x56x64", "1x56x56x64", "58.2", "ecr", "400.0", "100.0", "4.00"]
    assert any("a.very.long.path.of.a.layer.conv" in line and line.split()[-1] == "0.50" for line in lines)
    assert any(line.split()[-3:] == ["450.0", "200.0", "2.25"] for line in lines if "sum of the layers" in line)
    assert any(line.split()[-3:] == ["600.0", "300.0", "2.00"] for line in lines if "whole network" in line)
    assert any("dense us" in line for line in lines)
    assert lines[-1] == "a note"


def test_a_sum_above_the_whole_network_is_explained() -> None:
    sentence = "Each layer is a call of its own here, with a call's cost; the whole network is one call."
    assert sentence not in printed(comparison(), 200)
    found = dataclasses.replace(comparison(), network=Totals(dense_us=440.0, sparse_us=300.0))
    assert sentence in printed(found, 200)


def test_table_uses_milliseconds_for_slow_layers() -> None:
    text = printed(comparison(dense_us=123456.0))
    assert "dense ms" in text
    assert "123.456" in text


def test_classes_have_names_where_there_is_a_list() -> None:
    assert "top 5 dense: class 1 50.0 %, class 3 20.0 %, class 0 10.0 %" in printed(comparison())
    assert "top 5 dense: dog 50.0 %, class 3 20.0 %" in printed(comparison(), labels=["cat", "dog"])


@pytest.mark.parametrize("width", [60, 80, 120])
def test_lines_end_between_classes(width: int) -> None:
    labels = [f"a bird of class {index}" for index in range(6)]
    named = [line for line in printed(comparison(), width, labels=labels).splitlines() if "a bird" in line]
    assert sum(line.count("a bird of class") for line in named) == 10
    assert all(line.rstrip(",").endswith("%") and line.count("a bird of class") == line.count(" %") for line in named)
    assert max(map(len, named)) <= width


def test_json_holds_the_whole_table(tmp_path: Path) -> None:
    report.write_json(tmp_path / "run.json", report.as_json(comparison(), ["cat", "dog"]))
    found = json.loads((tmp_path / "run.json").read_text())
    assert found["layers"][0] == {
        "path": "conv1",
        "kind": "SparseConv",
        "input_shape": [1, 56, 56, 64],
        "output_shape": [1, 56, 56, 64],
        "zeros_percent": 58.25,
        "implementation": "ecr",
        "dense_us": 400.0,
        "sparse_us": 100.0,
        "ratio": 4.0,
    }
    assert found["totals"]["network"] == {"dense_us": 600.0, "sparse_us": 300.0, "ratio": 2.0}
    assert found["difference"] == {"max_relative": 1.5e-6, "frobenius": 2.5e-7}
    assert found["top5"]["sparse"][0][0] == {"class": 1, "name": "dog", "probability": 0.5}


def test_plot_is_an_image(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report.plot(comparison().layers, tmp_path / "run.png", "a title")
    with pytest.importorskip("PIL.Image").open(tmp_path / "run.png") as image:
        assert image.size[0] >= 1000


def test_differences_are_relative_to_the_largest_value_and_to_the_norm() -> None:
    expected = np.asarray([3.0, -4.0])
    assert differences(np.asarray([3.0, -4.5]), expected) == pytest.approx((0.125, 0.1))
    assert differences(expected, expected) == (0, 0)
    assert differences(np.zeros(2), np.zeros(2)) == (0, 0)
    assert differences(np.ones(2), np.zeros(2)) == (np.inf, np.inf)


def test_top_classes_are_ordered() -> None:
    assert top_classes(np.asarray([[1.0, 3.0, 2.0], [0.0, 0.0, 5.0]]), 2) == [
        [(1, 3.0), (2, 2.0)],
        [(2, 5.0), (0, 0.0)],
    ]


def test_a_batch_has_no_two_equal_images() -> None:
    image = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    batch = photograph.batch_of(image, 7)
    np.testing.assert_array_equal(batch[0], image)
    assert len({one.tobytes() for one in batch}) == 7


def test_the_sample_photograph_is_a_square() -> None:
    pytest.importorskip("sklearn")
    image = photograph.load(None, 48)
    assert image.shape == (48, 48, 3)
    assert image.std() > 20
