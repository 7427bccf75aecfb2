"""Add the rows of files to a file of results, in which the newest row of each case stays; measures nothing.

    python -m benchmarks merge part_1.json part_2.json --out benchmarks/results/h200/zoo.json
    python -m benchmarks merge before.json --label "before the grouped engine" --out benchmarks/results/h100/zoo.json

FILE is what a suite's `--json` has written, or what `python -m jax_sparse_conv run --json` has (suite run); files from
before there were files of results name their suite in their command. Rows with a label do not take the place of others:
it says what they are of instead of today's package as it comes. What is in --out counts as the first file.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common import command, results
from benchmarks.common.results import Content

_SUITE = re.compile(r"-m (?:benchmarks[. ]|jax_sparse_conv )(\w+)")


def main(argv: Sequence[str] | None = None) -> int:
    """Merge; the result is the exit status."""
    options = _parser().parse_args(argv)
    try:
        command.check_folder("--out", options.out)
        contents = [_read(path, options.label) for path in options.files]
        if options.out.is_file():
            contents.insert(0, results.load(options.out))
        found = results.merged(contents)
        results.save(options.out, found)
    except (KeyError, OSError, ValueError) as error:
        print(f"benchmarks merge: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    count = sum(len(content["rows"]) for content in contents)
    print(f"{len(found['rows'])} of {count} rows are the newest of their case")
    return 0


def _read(path: Path, label: str | None) -> Content:
    """A file of results, or what is from before there were any, as such; its rows with this label."""
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"{path} is no file of results")
    if "suite" not in content:
        suite = _SUITE.search(str(content.get("command")))
        if suite is None or suite[1] not in results.KEYS:
            raise ValueError(f"{path} names no suite in its command: {content.get('command')!r}")
        content = results.unified(suite[1], content)
    if label:
        content["rows"] = [{**row, "label": label} for row in content["rows"]]
    return content


def _parser() -> argparse.ArgumentParser:
    parser = command.parser("merge FILE ...", __doc__)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="later ones win where dates are equal")
    parser.add_argument("--label", help="of the rows of FILE: what they are of")
    parser.add_argument("--out", type=Path, required=True, help="a file of results; what is in it stays")
    return parser
