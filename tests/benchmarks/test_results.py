"""Files of results: what of two rows of the same case stays, and what every row says of its run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common import merge, results
from jax_sparse_conv._src import environment

DEVICES = re.compile(r"h100|h200|cpu_\w+")


def content(date: str, *rows: dict[str, Any], **more: Any) -> dict[str, Any]:
    command = "python -m benchmarks zoo --json /tmp/abc/zoo.json --plan=/tmp/p.json --zeros none"
    run = {"date": date, "commit": "abc1234", "command": command, "device": "a GPU", "repeats": 5}
    about = {"environment": {"gpu_driver": "580", "versions": {"jax": "0.11"}}, "xla_flags": "", "weights": "arguments"}
    return {**run, **about, "rows": list(rows), **more}


def row(details: str, ours: float, **more: Any) -> dict[str, Any]:
    times = {"xla_us": 2.0, "xla_best_us": 1.0, "ours_us": ours, "ours_best_us": 1.0}
    return {"details": details, "zeros_target": 0, "implementation": "direct", **times, **more}


def test_the_newest_row_of_each_case_stays(tmp_path: Path) -> None:
    path = tmp_path / "zoo.json"
    results.add(path, "zoo", content("2026-11-02", row("a", 1.0), row("b", 2.0)))
    results.add(path, "zoo", content("2026-11-03", row("b", 3.0), row("c", 4.0)))
    results.add(path, "zoo", content("2026-11-01", row("a", 5.0)))  # older
    found = results.load(path)
    assert {each["details"]: each["ours_us"] for each in found["rows"]} == {"a": 1.0, "b": 3.0, "c": 4.0}
    assert [each["details"] for each in results.read(path)] == ["a", "b", "c"]  # the oldest first
    assert [each["date"] for each in found["rows"]] == ["2026-11-02", "2026-11-03", "2026-11-03"]


@pytest.mark.parametrize(
    "other",
    [
        {"zeros_target": 50},
        {"implementation": "ecr"},
        {"weights": "packed"},
        {"flags": "command buffers"},
        {"label": "before"},
        {"direct_us": 1.0},
    ],
    ids=str,
)
def test_rows_of_other_cases_do_not_take_its_place(tmp_path: Path, other: dict[str, Any]) -> None:
    path = tmp_path / "zoo.json"
    results.add(path, "zoo", content("2026-11-02", row("a", 1.0)))
    results.add(path, "zoo", content("2026-11-03", row("a", 2.0) | other))
    assert len(results.load(path)["rows"]) == 2


def test_rows_say_what_their_run_says(tmp_path: Path) -> None:
    path = tmp_path / "zoo.json"
    results.add(path, "zoo", content("2026-11-02", row("a", 1.0)))
    (found,) = results.read(path)
    assert found["command"] == "python -m benchmarks zoo --json zoo.json --plan=p.json --zeros none"
    assert (found["driver"], found["versions"], found["repeats"]) == ("580", {"jax": "0.11"}, 5)
    assert (found["commit"], found["flags"], found["weights"]) == ("abc1234", "default", "arguments")
    with pytest.raises(ValueError, match="a GPU"):
        results.add(path, "zoo", content("2026-11-02", row("a", 1.0), device="another"))
    (tmp_path / "other.json").write_text('{"rows": []}')
    with pytest.raises(ValueError, match="no file of results"):
        results.load(tmp_path / "other.json")


def test_merge_takes_files_from_before_there_were_files_of_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new, out = (tmp_path / f"{name}.json" for name in ("old", "new", "out"))
    old.write_text(json.dumps(content("2026-11-01", row("a", 1.0), row("b", 2.0), command="python -m benchmarks.zoo")))
    results.add(new, "zoo", content("2026-11-02", row("a", 3.0)))
    assert merge.main([str(new), str(old), "--out", str(out)]) == 0
    assert {each["details"]: each["ours_us"] for each in results.read(out)} == {"a": 3.0, "b": 2.0}
    assert "2 of 3 rows are the newest" in capsys.readouterr().out
    assert merge.main([str(old), "--label", "before", "--out", str(out)]) == 0
    assert len(results.read(out)) == 4
    old.write_text(json.dumps(content("2026-11-01", command="python -m something")))
    assert merge.main([str(old), "--out", str(out)]) == 1
    assert "names no suite" in capsys.readouterr().err


def test_both_flag_sets_are_rows_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "layers.json"
    runs = {flags: [{"layer": "a", "ours_us": us}] for flags, us in (("default", 2.0), ("command buffers", 1.0))}
    results.add(path, "layers", content("2026-11-01", runs=runs))
    assert {each["flags"]: each["ours_us"] for each in results.read(path)} == {"default": 2.0, "command buffers": 1.0}


FILES = sorted(path for path in results.RESULTS.rglob("*.json") if path.parent.name != "paper")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(results.RESULTS)))
def test_recorded_files_are_current_and_whole(path: Path) -> None:
    found = results.load(path)
    assert DEVICES.fullmatch(path.parent.name)
    assert path.stem == found["suite"]
    assert len({run["device"] for run in found["runs"]}) == 1
    cases = [results.case_of(found["suite"], each) for each in found["rows"]]
    assert len(set(cases)) == len(cases)
    wanted = {"date", "commit", "device", "driver", "versions", "command"}
    assert all(wanted <= each.keys() for each in results.read(path))


FOLDERS = sorted({path.parent for path in results.RESULTS.rglob("*.json")})


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(results.RESULTS)))
def test_recorded_files_name_no_folder_of_a_machine(folder: Path) -> None:
    for path in folder.glob("*.json"):
        assert not re.search(r'[" =](/[\w.-]+){2,}', path.read_text(encoding="utf-8")), path


def test_a_run_names_no_folder_of_this_machine() -> None:
    text = json.dumps(environment.describe_run(["run", "--json", "/tmp/abc/run.json"]))
    assert not re.search(r'[" =](/[\w.-]+){2,}', text)
