"""`benchmarks zoo_current`: rows of kernels that None does not run any more are dropped."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from benchmarks.common import results
from benchmarks.suites import zoo_current
from jax_sparse_conv._src.layers.calls import Call
from jax_sparse_conv._src.problem.geometry import Geometry

CALL = Call("conv", (1, 14, 14, 64), (3, 3, 64, 64), "float32", "highest", Geometry(padding=((1, 1), (1, 1))), True,
            False, "relu")  # fmt: skip
RUN = {"date": "2026-01-01T00:00:00+00:00", "commit": "abc", "device": "NVIDIA H200", "command": "zoo"}


def written(folder: Path) -> Path:
    """A file with a kernel that runs today, one that does not, and the same with what makes it no choice."""
    about = {"run": 0, "flags": "default", "date": RUN["date"], "commit": "abc", "details": repr(CALL), "ratio": 2.0}
    rows = [
        about | {"implementation": "direct", "weights": "arguments", "zeros_target": 0},
        about | {"implementation": "ecr", "weights": "arguments", "zeros_target": 50},
        about | {"implementation": "ecr", "weights": "cold", "zeros_target": 50},
        about | {"implementation": "ecr", "weights": "arguments", "zeros_target": 0, "label": "earlier"},
    ]
    path = folder / "zoo.json"
    path.write_text(json.dumps({"suite": "zoo", "runs": [RUN], "rows": rows}), encoding="utf-8")
    return path


def test_rows_of_todays_kernels_stay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path)
    with (results.RESULTS / "h200" / "tune.times.jsonl").open(encoding="utf-8") as file:
        (tmp_path / "tune.times.jsonl").write_text("".join(itertools.islice(file, 2)), encoding="utf-8")
    assert zoo_current.main([str(tmp_path)]) == 0
    assert "dropped 1 of 4 rows" in capsys.readouterr().out
    kept = [(row["implementation"], row["weights"], row.get("label")) for row in results.load(path)["rows"]]
    assert sorted(kept, key=str) == [
        ("direct", "arguments", None),
        ("ecr", "arguments", "earlier"),
        ("ecr", "cold", None),
    ]


def test_a_folder_must_describe_its_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path)
    assert zoo_current.main([str(tmp_path)]) == 1
    assert "tune.times.jsonl" in capsys.readouterr().err
