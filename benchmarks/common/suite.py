"""The main function of a suite that prints and keeps each case's rows as soon as it has them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence

from benchmarks.common import command, results
from benchmarks.common.results import Row
from jax_sparse_conv._src import environment


def run(
    name: str,
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    cases: Callable[[argparse.Namespace], Iterable[list[Row]]],
    table: Callable[[list[Row]], str],
) -> int:
    """Measure, print a table of each case and write a JSON file; the result is the exit status.

    Args:
      name: of the suite.
      parser: of its arguments, `--repeats` and `--json` among them.
      argv: the arguments; None is the process's.
      cases: of the options; measures one case after the other, each with rows.
      table: of the rows of a case, as text.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = parser.parse_args(arguments)
    try:
        command.check_folder("--json", options.json)
    except ValueError as error:
        print(f"benchmarks {name}: {error}", file=sys.stderr)
        return 1
    line = command.portable(name, arguments)
    content = {**environment.describe_run(), "command": line, "repeats": options.repeats}
    rows: list[Row] = []
    for case in cases(options):
        rows += case
        print(table(case), flush=True)
        results.add(options.json, name, {**content, "rows": rows})
    return 0
