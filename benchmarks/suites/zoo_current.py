"""Drop what is not true any more from files of `benchmarks zoo`: rows of kernels that None does not run by now.

    python -m benchmarks zoo_current benchmarks/results/h100 benchmarks/results/h200

Calls are lowered for the GPU that tune.times.jsonl describes, so no GPU is needed. A row stays if None runs on that GPU
what it ran when the row was timed. Rows with a label stay, too, and those of cold weights, which tell why.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common import command, results, tables
from benchmarks.common.as_on import as_on
from benchmarks.suites.zoo import will_run
from benchmarks.tune.xla_times import call_of
from jax_sparse_conv._src.devices import Device
from jax_sparse_conv._src.tune import raw_times


def main(argv: Sequence[str] | None = None) -> int:
    """Write the files anew and say what was dropped; the result is the exit status."""
    parser = command.parser("zoo_current FOLDER...", __doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="of one device's results")
    try:
        for folder in parser.parse_args(argv).folders:
            path = folder / "zoo.json"
            content, device = results.load(path), device_of(folder)
            kept = [row for row in content["rows"] if _is_of_no_choice(row)]
            kept += current([row for row in content["rows"] if not _is_of_no_choice(row)], device)
            print(f"{path}: dropped {len(content['rows']) - len(kept)} of {len(content['rows'])} rows")
            results.save(path, results.merged([{**content, "rows": kept}]))
    except (OSError, ValueError) as error:
        print(f"benchmarks zoo_current: {error}", file=sys.stderr)
        return 1
    return 0


def _is_of_no_choice(row: tables.Row) -> bool:
    return "label" in row or row["weights"] == "cold"


def device_of(folder: Path) -> Device:
    """The GPU of a folder of results, as its raw times describe it.

    Raises:
      ValueError: a folder without raw times.
    """
    times = raw_times.times_of(raw_times.read(folder / "tune.times.jsonl"))
    if not times:
        raise ValueError(f"{folder} has no tune.times.jsonl, which describes its GPU")
    return times[0].device


def current(rows: Sequence[tables.Row], device: Device) -> list[tables.Row]:
    """Rows whose kernel `None` takes on this GPU today."""
    will_run.cache_clear()  # of what it found for another device
    with as_on(device):
        kept = [row for row in rows if will_run(call_of(row["details"]), platform="cuda") == row["implementation"]]
    will_run.cache_clear()
    return kept
