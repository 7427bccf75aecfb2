"""Rows of the papers' experiments (`results/<device>/paper/*.json`): each with the date, commit and flags of its run.

In files of before rows had their own they have the file's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.common.results import Content, Row, flags_of

_OF_RUN = ("date", "commit")


def stamped(rows: Sequence[Row], run: Content) -> list[Row]:
    """The rows with what their run says, where they do not say it themselves."""
    about = {key: run.get(key) for key in _OF_RUN}
    if not isinstance(run["xla_flags"], list):  # of two runs, whose rows name the flags of each side
        about["flags"] = flags_of(run["xla_flags"])
    return [{**about, **row} for row in rows]


def of(content: Content) -> list[Row]:
    """The rows of a file."""
    return stamped(content["rows"], content)


def read(path: Path) -> list[Row]:
    """The rows of a file, the oldest first."""
    return sorted(of(json.loads(path.read_text(encoding="utf-8"))), key=lambda row: row["date"])


def earlier(*rows: Row) -> Row:
    """Date and commit of the earliest of rows, where they have them."""
    dated = [row for row in rows if row.get("date")]
    return {key: min(dated, key=lambda row: str(row["date"])).get(key) for key in _OF_RUN if dated}


def dates(rows: Sequence[Mapping[str, object]]) -> str:
    """The days on which rows were measured: one, or the first and the last."""
    found = sorted(str(row["date"])[:10] for row in rows)
    return " to ".join(dict.fromkeys((found[0], found[-1])))
