"""The package's tests on this machine, as a row of results: how many passed, what failed and what was skipped.

    python -m benchmarks tests --json benchmarks/results/h100/tests.json
    python -m benchmarks tests --workers 14 tests/cuda

The row says whether the kernels that are here have been tested on that device, at which commit. `benchmarks check`
says how many commits to the kernels are newer.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import command, help, results

_ALL = ["tests"]
_RAN = (0, 1)  # pytest's status where tests ran, of which some may have failed


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tests, print their counts and write a JSON file; the result is pytest's exit status."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # this process and all workers share a GPU
    from jax_sparse_conv._src import environment

    arguments = list(sys.argv[1:] if argv is None else argv)
    options = _parser().parse_args(arguments)
    try:
        command.check_folder("--json", options.json)
        _check(options)
    except ValueError as error:
        print(f"benchmarks tests: {error}", file=sys.stderr)
        return 2
    content = {**environment.describe_run(), "command": command.portable("tests", arguments)}
    begun = time.monotonic()
    status, row = _run(options.tests, options.workers)
    if status not in _RAN:
        return status
    row["seconds_of_all"] = round(time.monotonic() - begun)
    print(", ".join(f"{row[name]} {name}" for name in ("passed", "failed", "skipped")), "of", row["tests"])
    results.add(options.json, "tests", {**content, "rows": [row]})
    return status


def _check(options: argparse.Namespace) -> None:
    if options.workers is not None and options.workers < 1:
        raise ValueError(f"--workers {options.workers} is not above 0")
    for path in options.tests:
        if not Path(path.partition("::")[0]).exists():
            raise ValueError(f"there is no file or folder of tests {path!r}")


def _run(tests: list[str], workers: int | None) -> tuple[int, dict[str, Any]]:
    """pytest's exit status, and the row."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        count = "auto" if workers is None else str(workers)
        line = [*("-m", "pytest", "-o", "addopts=", "-q", "-n", count, "--dist", "worksteal"), f"--junitxml={report}"]
        status = subprocess.run([sys.executable, *line, *tests]).returncode
        return status, _read(report, tests) if status in _RAN else {}


def _read(report: Path, tests: list[str]) -> dict[str, Any]:
    """The row of a report of pytest's."""
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    outcomes = {_name(case): _outcome(case) for case in cases}
    counts = Counter(outcomes.values())
    reasons = Counter(str(each.get("message")) for case in cases for each in case.iter("skipped"))
    return {
        "tests_of": " ".join(tests),
        "tests": len(outcomes),
        **{name: counts[name] for name in ("passed", "failed", "skipped")},
        "failures": sorted(name for name, outcome in outcomes.items() if outcome == "failed"),
        "skipped_because": dict(reasons.most_common()),
    }


def _name(case: ElementTree.Element) -> str:
    return f"{case.get('classname')}::{case.get('name')}"


def _outcome(case: ElementTree.Element) -> str:
    """An error of a fixture is a failure."""
    children = {child.tag for child in case}
    if children & {"failure", "error"}:
        return "failed"
    return "skipped" if "skipped" in children else "passed"


def _parser() -> argparse.ArgumentParser:
    parser = help.parser("tests", __doc__)
    add: Any = parser.add_argument
    add("tests", nargs="*", default=_ALL, help="files or folders; the default is all", metavar="PATH")
    add("--workers", type=int, metavar="COUNT", help="processes; the default is one for each core")
    add("--json", type=Path)
    return parser
