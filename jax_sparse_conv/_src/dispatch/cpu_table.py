"""Tables of a CPU: for a workload, the density of x up to which the native call is as fast as XLA.

They are found, kept and hidden as those of GPUs (`table`): a shipped one in `tables/`, one of the user's own in the
user's cache folder, whose rows win. Convolutions, those with a pool behind them and dense layers have rows. A workload
without a row takes the nearest row of its class. Else `cpu_choice` has rules.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jax_sparse_conv._src import devices
from jax_sparse_conv._src.devices import Cpu
from jax_sparse_conv._src.dispatch import folders, table, table_files
from jax_sparse_conv._src.dispatch.planner import Layer
from jax_sparse_conv._src.dispatch.table import Key
from jax_sparse_conv._src.problem.workload import Workload

KINDS = {4: "float32", 2: "16bit"}
"""Of products, by bytes of an element; precision makes no difference on a CPU."""
ALWAYS = math.inf
"""The density of a row whose native call is as fast as XLA at any."""

_ALWAYS = "always"  # in files


@dataclasses.dataclass(frozen=True)
class Row:
    """What was measured of a workload.

    Attributes:
      key: the workload.
      below: the density of x, from 0 to 1, up to which the native call is as fast; 0 never, `ALWAYS` at any.
      gains: XLA's time over the native call's at the least density timed, and at the greatest.
      xla_us: XLA's microseconds.
      run: index into the table's `runs`.
    """

    key: Key
    below: float
    gains: tuple[float, float]
    xla_us: float
    run: int


@dataclasses.dataclass(frozen=True)
class Table:
    """The rows of one CPU.

    Attributes:
      cpu: its model, instruction set and threads; another has no use of them.
      runs: of the commands that measured: date, commit, command, versions.
      rows: in any order.
    """

    cpu: Cpu
    runs: tuple[Mapping[str, Any], ...]
    rows: tuple[Row, ...]


def key_of(workload: Workload) -> Key | None:
    """What a row is found by; None of what has no rows: unknown sizes, images, several kernels and other dtypes."""
    if workload.is_symbolic or workload.is_image or workload.kernel_shape[0] != 1 or workload.itemsize not in KINDS:
        return None
    if workload.method not in ("ecr", "pecr", "dense") or workload.pixels == 0:
        return None
    layer = Layer.of(workload)
    is_dense = workload.method == "dense"
    return Key(layer.sizes, KINDS[workload.itemsize], workload.residual, layer.pool, is_dense)


# --- what is chosen --------------------------------------------------------------------------------------------------


def decision(workload: Workload) -> Row | None:
    """The row of a workload on the CPU of this process, or a near one; None where no table says anything."""
    key = key_of(workload)
    if key is None:
        return None
    rows = _index(devices.cpu(), folders.switch(), os.environ.get(folders.CACHE, "")).get(key.class_, {})
    return rows.get(key) or table.nearest(key, rows.values())


@functools.lru_cache(maxsize=16)
def _index(cpu: Cpu, switch: str, cache: str) -> Mapping[tuple[Any, ...], Mapping[Key, Row]]:
    """Rows by class and key."""
    del switch, cache  # what `paths` reads

    def rows_of(path: Path) -> Sequence[Row]:
        found = load(path)
        return found.rows if found.cpu == cpu else ()

    return table_files.indexed(paths(cpu), rows_of, lambda row: (row.key.class_, row.key))


def forget() -> None:
    """Read the tables again at the next call: after one was written."""
    _index.cache_clear()


# --- files -----------------------------------------------------------------------------------------------------------


def paths(cpu: Cpu) -> dict[str, Path]:
    """The tables of a CPU that may be read, by whose they are, the first winning; whether they exist or not."""
    return table.paths_of(cpu.slug)


def load(path: str | os.PathLike[str]) -> Table:
    """Read a table.

    Raises:
      ValueError: a file that is no table of a CPU; names the first thing that is wrong.
      OSError: the file cannot be read.
    """

    def table_of(content: Any) -> Table:
        cpu = Cpu(**content["cpu"])
        runs = tuple(dict(run) for run in content["runs"])
        return Table(cpu, runs, tuple(_row(values, len(runs)) for values in content["rows"]))

    return table_files.load(path, "table of a CPU", table_of)


def save(path: str | os.PathLike[str], found: Table) -> None:
    """Write a table, a row a line and all in order, so that changes can be read.

    Raises:
      OSError: the file cannot be written.
    """
    head = {"cpu": dataclasses.asdict(found.cpu), "runs": list(found.runs)}
    table_files.save(path, head, _values(found.rows))


def key_values(key: Key) -> dict[str, Any]:
    """A key as JSON has it, in tables and in raw times."""
    return {
        "op": "dense" if key.is_dense else "conv",
        "sizes": list(key.sizes),
        "pool": list(key.pool),
        "kind": key.kind,
        "residual": key.residual,
    }


def key_from(content: Mapping[str, Any]) -> Key:
    """The inverse of `key_values`.

    Raises:
      ValueError: values that are no key.
      KeyError: one is missing.
    """
    sizes, pool = table.sizes_from(content["sizes"]), tuple(content["pool"])
    if not all(type(number) is int for number in pool) or len(pool) not in (0, table.POOL_SIZES):
        raise ValueError(f"pool={pool} are not {table.POOL_SIZES} ints, or none")
    op, kind, residual = content["op"], content["kind"], content["residual"]
    if op not in ("conv", "dense") or kind not in KINDS.values() or not isinstance(residual, bool):
        named = f"op={op!r}, kind={kind!r}, residual={residual!r}"
        raise ValueError(f"{named} are not conv or dense, one of {', '.join(KINDS.values())}, and true or false")
    return Key(sizes, kind, residual, pool, op == "dense")


def _values(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    for row in sorted(rows, key=lambda row: (row.key.is_dense, row.key.kind, row.key.sizes[4:], row.key.sizes)):
        below = _ALWAYS if row.below == ALWAYS else row.below
        measured = {"below": below, "gains": list(row.gains), "xla_us": row.xla_us, "run": row.run}
        yield key_values(row.key) | measured


def _row(content: Mapping[str, Any], runs: int) -> Row:
    below = ALWAYS if content["below"] == _ALWAYS else float(content["below"])
    least, full = map(float, content["gains"])
    xla_us, run = float(content["xla_us"]), int(content["run"])
    if not (0 <= below <= 1 or below == ALWAYS):
        raise ValueError(f"below={below!r} is not a density from 0 to 1, or {_ALWAYS!r}")
    if not (min(least, full, xla_us) > 0 and 0 <= run < runs):
        named = f"gains={content['gains']}, xla_us={xla_us}, run={run}"
        raise ValueError(f"{named}: gains and times are above 0 and run is one of {runs}")
    return Row(key_from(content), below, (least, full), xla_us, run)
