"""The suite tests: what a run of tests leaves in a file of results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.document import layer_tables
from benchmarks.suites import tests as suite

_TESTS = """\
import pytest

def test_right():
    assert 1 == 1

def test_wrong():
    assert 1 == 2

@pytest.fixture
def broken():
    raise ValueError("broken")

def test_with_a_broken_fixture(broken):
    assert broken

@pytest.mark.skip(reason="needs a GPU")
def test_skipped():
    assert False
"""


def test_a_run_is_a_row(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "test_given.py", tmp_path / "rows.json"
    file.write_text(_TESTS)
    assert suite.main([str(file), "--workers", "1", "--json", str(out)]) == 1
    (row,) = json.loads(out.read_text())["rows"]
    assert (row["tests"], row["passed"], row["failed"], row["skipped"]) == (4, 1, 2, 1)
    assert [name.partition("::")[2] for name in row["failures"]] == ["test_with_a_broken_fixture", "test_wrong"]
    assert row["skipped_because"] == {"needs a GPU": 1}
    assert "1 passed, 2 failed, 1 skipped of 4" in capfd.readouterr().out
    (table,) = layer_tables.tests([row])
    assert "| 1 | 2 | 1 |" in table


def test_what_cannot_run_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert suite.main(["tests/nowhere.py"]) == 2
    assert "no file or folder of tests 'tests/nowhere.py'" in capfd.readouterr().err
    assert suite.main(["--workers", "0"]) == 2
    assert suite.main(["--json", str(tmp_path / "nowhere" / "rows.json")]) == 2
