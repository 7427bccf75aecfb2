"""`python -m benchmarks`: every suite has a line and a help that fits 80 columns."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks import __main__ as benchmarks

NAMES = tuple(benchmarks.SUITES | benchmarks.TOOLS)
COLUMNS = 80


def test_the_list_has_a_line_for_every_suite(capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmarks.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [sum(line.startswith(f"  {name} ") for line in lines) for name in NAMES] == [1] * len(NAMES)
    assert max(map(len, lines)) <= COLUMNS


@pytest.mark.parametrize("name", NAMES)
def test_help_fits_80_columns(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        benchmarks.main([name, "--help"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: python -m benchmarks {name} ")
    assert f"python -m benchmarks {name}" in text.split("options:")[0].removeprefix("usage: ")[1:]
    assert not [line for line in text.splitlines() if len(line) > COLUMNS]


def test_what_is_no_suite_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmarks.main(["zo"]) == 2
    assert capsys.readouterr().err.startswith("benchmarks: there is no suite 'zo'; it is one of networks, zoo, ")


def test_listing_and_scaling_do_not_import_jax() -> None:
    """The scaling suite binds its processes to cores before JAX makes its pool of threads."""
    code = "import sys, benchmarks.__main__, benchmarks.suites.scaling; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
