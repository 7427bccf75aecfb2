"""Random calls against NumPy in float64: is a value wrong, does a call raise, hang or end the process?

    python -m benchmarks fuzz --cases 500
    python -m benchmarks fuzz --seed 7 --minutes 25 --json fuzz.json
    python -m benchmarks fuzz --seed 7 --values 8
    python -m benchmarks fuzz --case '{"operation": "dense", "dtype": "float32", ...}'

A case is a call of conv, conv_pool, dense, conv_general_dilated or of a function that accelerate rewrote. Drawn are
the implementation, dtype, sizes, strides, padding, dilation, groups, what is added, the pool, zeros and magnitudes of
x, and a transform: vmap, grad, jacfwd or none. Some calls and gradients are split over a mesh of two or four devices,
by images, rows, columns or channels; on a CPU each process has four. Values have no NaN and no infinities. Case N of a
seed is the same everywhere. With `--values` so many cases in a row are one call with other values and zeros, which one
compiled program takes; a row of the file says how many.

Each element must be within its own bound: float32 additions in some order, and the roundings to the dtype. The norm of
all errors must be as the package's tests have it. Cases run in a process of their own, and one that ends or hangs it is
a finding. A finding prints the command that repeats it.

With `--json` the file's row of the seed says how many cases are done and what was found. A later run goes on there, and
first repeats what was found: what is right by now is no finding any more.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import help
from benchmarks.fuzz import draws
from benchmarks.fuzz.case import Case, from_text
from benchmarks.fuzz.worker import Worker

_FINE = ("right", "skipped")  # outcomes that are no findings
_CASES = 500  # where nothing says how long
_PER_PROCESS = 300  # programs that a process keeps
_WRITE_SECONDS = 20.0  # between two versions of the file
_ROW = ("seed", "values", "cases", "skipped", "operations", "findings")


def main(argv: Sequence[str] | None = None) -> int:
    """Run cases, print findings and write a JSON file; the exit status is 1 where there is a finding."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # this process and its worker share a GPU
    from benchmarks.common import command
    from jax_sparse_conv._src import environment

    arguments = list(sys.argv[1:] if argv is None else argv)
    options = _parser().parse_args(arguments)
    try:
        _check(options)
        command.check_folder("--json", options.json)
        if options.case is not None:
            return _one(from_text(options.case), options.timeout)
        row = _row(options.json, options.seed, options.values)
    except ValueError as error:
        print(f"benchmarks fuzz: {error}", file=sys.stderr)
        return 2
    content = {**environment.describe_run(), "command": command.portable("fuzz", arguments)}
    _run(options, content, row)
    print(
        f"seed {row['seed']}: {row['cases'] - row['skipped']} cases ran, {row['skipped']} skipped, "
        f"{len(row['findings'])} findings"
    )
    return int(bool(row["findings"]))


def _check(options: argparse.Namespace) -> None:
    for name in ("cases", "minutes", "timeout", "values"):
        value = getattr(options, name)
        if value is not None and value <= 0:
            raise ValueError(f"--{name} {value} is not above 0")
    if options.seed < 0:
        raise ValueError(f"--seed {options.seed} is not at least 0")


def _one(case: Case, seconds: float) -> int:
    """Run a case that is given, and say what is wrong with it."""
    worker = Worker(seconds)
    answer = worker.run(case)
    worker.close()
    print(f"{answer['outcome']} {answer['message']}".strip())
    return int(answer["outcome"] not in _FINE)


def _row(path: Path | None, seed: int, values: int) -> dict[str, Any]:
    """What a file has of a seed."""
    from benchmarks.common import results

    for row in results.load(path)["rows"] if path is not None and path.is_file() else ():
        if row["seed"] == seed:
            if row.get("values", 1) != values:
                raise ValueError(f"--values {values} is not the {row.get('values', 1)} of seed {seed} in {path}")
            return {"values": 1} | {name: row[name] for name in _ROW if name in row}
    return {"seed": seed, "values": values, "cases": 0, "skipped": 0, "operations": {}, "findings": []}


def _run(options: argparse.Namespace, content: dict[str, Any], row: dict[str, Any]) -> None:
    """Run what is left of the cases, or as many as the minutes give, and keep the row up to date."""
    from benchmarks.common import results

    end = time.monotonic() + 60 * options.minutes if options.minutes else float("inf")
    last = options.cases or (_CASES if options.minutes is None else sys.maxsize)
    written, worker = time.monotonic(), None
    row["findings"] = [found for found in row["findings"] if _is_found_again(found, options.timeout)]
    try:
        while row["cases"] < last and time.monotonic() < end:
            if worker is None:
                worker = Worker(options.timeout)
            program, number = divmod(row["cases"], options.values)
            case = draws.with_other_values(draws.draw(options.seed, program), options.seed, number)
            answer = worker.run(case)
            _note(row, case, answer)
            if answer["outcome"] in ("died", "hung") or row["cases"] % (_PER_PROCESS * options.values) == 0:
                worker.close()
                worker = None
            if time.monotonic() > written + _WRITE_SECONDS:
                written = time.monotonic()
                results.add(options.json, "fuzz", content | {"rows": [row]})
    finally:
        if worker is not None:
            worker.close()
    results.add(options.json, "fuzz", content | {"rows": [row]})


def _is_found_again(found: dict[str, Any], seconds: float) -> bool:
    """Whether a finding is still one, in a process of its own."""
    worker = Worker(seconds)
    answer = worker.run(from_text(found["case"]))
    worker.close()
    return answer["outcome"] not in _FINE


def _note(row: dict[str, Any], case: Case, answer: dict[str, Any]) -> None:
    """Count a case, and keep and print what is wrong with it."""
    number = row["cases"]
    row["cases"] += 1
    row["skipped"] += answer["outcome"] == "skipped"
    row["operations"][case.operation] = row["operations"].get(case.operation, 0) + 1
    if answer["outcome"] in _FINE:
        return
    row["findings"].append({"number": number, **answer, "case": case.text()})
    line = shlex.join(["python", "-m", "benchmarks", "fuzz", "--case", case.text()])
    print(f"case {number} {answer['outcome']}: {answer['message']}\n  {line}", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = help.parser("fuzz", __doc__)
    add = parser.add_argument
    add("--seed", type=int, default=0)
    add("--cases", type=int, help=f"how many of the seed are to be done; {_CASES} without --minutes")
    add("--values", type=int, default=1, help="cases of each program; 1 without it")
    add("--minutes", type=float, help="end after so long")
    add("--timeout", type=float, default=120.0, help="seconds in which a case has to end")
    add("--case", help="run this one case, as a finding prints it")
    add("--json", type=Path)
    return parser
