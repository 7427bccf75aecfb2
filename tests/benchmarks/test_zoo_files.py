"""What reads files of `benchmarks zoo`: XLA's times as raw times, and which rows are of today's kernels."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import pytest

from benchmarks.common import results
from benchmarks.suites import zoo_current
from benchmarks.tune import xla_times
from jax_sparse_conv._src.layers.calls import Call
from jax_sparse_conv._src.problem.geometry import Geometry, Pool
from jax_sparse_conv._src.tune import raw_times

CALL = Call("conv", (1, 14, 14, 64), (3, 3, 64, 64), "float16", "default", Geometry(padding=((1, 1), (1, 1))), True,
            False, "relu")  # fmt: skip
POOLED = Call("conv_pool", (1, 14, 14, 64), (1, 1, 64, 32), "float32", "default",
              Geometry(pool=Pool("avg", (2, 2), (2, 2), ((0, 0), (0, 0)))), False, False, None)  # fmt: skip


def test_calls_come_back() -> None:
    for call in (CALL, POOLED):
        assert xla_times.call_of(repr(call)) == call
    for text in ("print(1)", "Geometry()", "[1, 2]"):
        with pytest.raises(ValueError, match=r"is no call|malformed node"):
            xla_times.call_of(text)


def test_it_writes_what_tune_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"run": 0, "flags": "command buffers", "details": repr(CALL), "implementation": "direct", "ours_us": 1.0}
    rows = [
        row | {"xla_us": 7.0},
        row | {"xla_us": 9.0},
        row | {"flags": "default", "xla_us": 1.0},
        row | {"details": repr(POOLED), "implementation": "xla", "xla_us": 5.0, "ours_us": 6.0},
        {name: value for name, value in row.items() if name != "ours_us"},
    ]
    run = {"date": "2026-01-01", "device": "NVIDIA H900", "commit": "abc"}
    (tmp_path / "zoo.json").write_text(json.dumps({"runs": [run], "rows": rows}), encoding="utf-8")
    (tmp_path / "tune.times.jsonl").write_text(json.dumps({"run": {"gpu": {"name": "NVIDIA H900"}}}) + "\n")
    assert xla_times.main([str(tmp_path)]) == 0
    assert "2 calls" in capsys.readouterr().out
    plain, pooled = raw_times.read(tmp_path / "xla.times.jsonl")
    assert (plain.key.kind, plain.key.pool, plain.times) == ("16bit", (), {"xla": 8.0})
    assert (pooled.key.pool, pooled.times) == ((2, 2, 2, 2, 0, 0, 0, 0, 2), {"xla": 5.5})
    assert (plain.run["commit"], plain.run["gpu"]) == ("abc", {"name": "NVIDIA H900"})


EXACT = dataclasses.replace(CALL, dtype="float32", precision="highest")
RUN = {"date": "2026-01-01T00:00:00+00:00", "commit": "abc", "device": "NVIDIA H200", "command": "zoo"}


def written(folder: Path) -> Path:
    """A file with a kernel that runs today, one that does not, and the same with what makes it no choice."""
    about = {"run": 0, "flags": "default", "date": RUN["date"], "commit": "abc", "details": repr(EXACT), "ratio": 2.0}
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
