"""Checks that pages say what the results say, and reports how old results are and what loses.

    python -m benchmarks check

It fails where

- a page or a figure in a sentence is not what the files give, as `document --check` does;
- a figure beside a file of results is of no sentence in `document/sentences.py`;
- the newest log of tests on a GPU is more than 20 commits to the kernels behind;
- in a log of tests, the newest run of all has more than 10 failures.

It lists the tests that failed, and only reports how many commits to the kernels each other file is behind, by its
oldest row, and how many rows of layers, networks and models are below 0.97x by medians. Rows with a label do not count.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict

from benchmarks.common import help, tables
from benchmarks.document import age, command, losses

_AGES = (
    ("file", "file", "<", "{}"),
    ("rows", "rows", ">", "{}"),
    ("dates", "measured", "<", "{}"),
    ("commit", "oldest", "<", "{}"),
    ("behind", "behind", ">", "{}"),
)
_LOSSES = (
    ("file", "file", "<", "{}"),
    ("rows", "rows", ">", "{}"),
    ("lost", "lost", ">", "{}"),
    ("least", "least", ">", "{:.2f}"),
    ("case", "of", "<", "{}"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Check and report; the result is the exit status."""
    help.parser("check", __doc__).parse_args(argv)
    stale = command.main(["--check"])
    refused = _ages() + _failures()
    _losses()
    for line in refused:
        print(line, file=sys.stderr)
    return int(bool(stale or refused))


def _ages() -> list[str]:
    """Prints the ages; the result is what is refused."""
    print("Commits to the kernels since the oldest row of each file (cuda/ or cpu/, and native/):\n")
    reason = age.no_history()
    if reason:
        print(f"skipped: {reason}, so commits are not counted\n")
        return []
    ages = age.of_files()
    unknown = "?"
    print(tables.aligned([asdict(each) | {"behind": _or(each.behind, unknown)} for each in ages], _AGES) + "\n")
    if any(each.behind is None for each in ages):
        print(f"{unknown}: this clone does not know the commit\n")
    for device in age.without_log():
        print(f"{device} has no log of the tests (tests.json)")
    return age.old_logs(ages)


def _failures() -> list[str]:
    """Prints the tests that failed; the result is what is refused."""
    notes, refused = age.failures()
    if notes:
        print("\nTests that failed:\n")
        print("\n".join(notes))
    return refused


def _losses() -> None:
    print(f"\nRows below {losses.LEAST}, by medians:\n")
    print(tables.aligned([asdict(each) for each in losses.of_files()], _LOSSES))


def _or(count: int | None, otherwise: str) -> str:
    return otherwise if count is None else str(count)
