"""`benchmarks cpu_regret`: what a choice loses, by times that are given."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks.tune import cpu_regret
from jax_sparse_conv._src.devices import Cpu
from jax_sparse_conv._src.dispatch.table import Key
from jax_sparse_conv._src.tune import cpu
from jax_sparse_conv._src.tune.cpu import DENSITIES, Entry, Sample

KEY = Key((32, 1, 1, 512, 1, 1, 512, *[1, 1], *[0] * 4, *[1, 1], 1), "float32", False, is_dense=True)


def entry_of(gain: float) -> Entry:
    samples = tuple(Sample(density, 100.0, 100 / gain, 100.0, 100.0) for density in DENSITIES)
    return Entry(KEY, samples, 5.0, {"cpu": dataclasses.asdict(Cpu("AMD EPYC 7B13", "avx2", 8))})


def test_regret_of_given_times() -> None:
    entry = entry_of(2.0)
    rows = {row.key: row for row in cpu.table_of(Cpu(**entry.run["cpu"]), [entry_of(2.0)]).rows}
    assert rows == {}  # best times say something else
    assert list(cpu_regret.outcomes_of(entry, "rules", rows)) == [(2.0, 1.0)] * 5  # 32 rows are XLA's
    assert list(cpu_regret.outcomes_of(entry, "rules", rows, best=True)) == [(1.0, 1.0)] * 5


def test_a_row_loses_nothing_and_is_not_its_own_neighbour(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    samples = tuple(dataclasses.replace(each, native_best=50.0) for each in entry_of(2.0).samples)
    raw = tmp_path / "raw.jsonl"
    lines = [{"run": entry_of(2.0).run}, cpu.line_of(KEY, samples, 5.0)]
    raw.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert cpu_regret.main([str(raw)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "1 workloads, 1 of them with a row"
    assert [line.split()[2:5] for line in printed[2:]] == [
        ["row", "5", "1.000"],
        ["near", "5", "2.000"],
        ["rules", "5", "2.000"],
    ]


def test_without_times_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cpu_regret.main([str(tmp_path / "none.jsonl")])
    assert "no times of a CPU in" in capsys.readouterr().err
