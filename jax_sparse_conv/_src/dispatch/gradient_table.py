"""Tables of gradients: for a convolution, whether that of x or of the kernel is faster by this package or by XLA.

They are in the folder `gradients` beside the tables of forward passes (`table`), and hidden as these are. `python -m
jax_sparse_conv tune --gradients` writes the user's own; the H200's is shipped. A table is of one machine: siblings do
not count. A convolution without a row takes the nearest row of its class, if that is near and clear. Else
`cpu_gradient` and `gpu_gradient` have rules.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import jax

from jax_sparse_conv._src import devices
from jax_sparse_conv._src.devices import Cpu, Device
from jax_sparse_conv._src.dispatch import cpu_table, folders, table, table_files
from jax_sparse_conv._src.dispatch.planner import KernelGradient, Layer
from jax_sparse_conv._src.dispatch.table import Key
from jax_sparse_conv._src.problem.workload import Workload

GPU_KIND = "highest"
"""Of products, the only one that a GPU's gradients are computed here for."""

_FOLDER = "gradients"
_CLEAR = 1.1  # times of a side that say the same of a neighbour
_PLANS = 4096  # of a call at most, of which a row's is one


@dataclasses.dataclass(frozen=True)
class Row:
    """What was measured of one gradient of a convolution.

    Attributes:
      key: the convolution; without a pool and a residual.
      by_kernel: whether it is the gradient of the kernel, not of x.
      tile: of a kernel's gradient on a GPU the plan that was the fastest (`planner.KernelGradient`); else nothing.
      us: microseconds of this package's.
      xla_us: microseconds of XLA's.
      run: index into the table's `runs`.
    """

    key: Key
    by_kernel: bool
    tile: tuple[int, ...]
    us: float
    xla_us: float
    run: int

    @property
    def is_ours(self) -> bool:
        """Whether this package's is faster."""
        return self.us <= table.LEAST_GAIN * self.xla_us

    @property
    def is_clear(self) -> bool:
        """Whether one side was ahead by enough to say the same of a neighbour."""
        return max(self.us, self.xla_us) >= _CLEAR * min(self.us, self.xla_us)


@dataclasses.dataclass(frozen=True)
class Table:
    """The rows of one machine.

    Attributes:
      machine: what `machine_of` calls it; another one has no use of them.
      runs: of the commands that measured: date, commit, command, versions.
      rows: in any order.
    """

    machine: str
    runs: tuple[Mapping[str, Any], ...]
    rows: tuple[Row, ...]


Machine: TypeAlias = Cpu | Device


def machine_of(machine: Machine) -> str:
    """A CPU with its threads, a GPU with its multiprocessors: what times depend on."""
    if isinstance(machine, Cpu):
        return machine.slug
    return f"{machine.name}, {machine.multiprocessors} multiprocessors"


def key_of(workload: Workload, platform: str) -> Key | None:
    """What rows of a convolution are found by; None of what has no rows: unknown sizes, several kernels, float64."""
    kind = GPU_KIND if platform == "cuda" else cpu_table.KINDS.get(workload.itemsize)
    if kind is None or workload.is_symbolic or workload.kernel_shape[0] != 1 or 0 in workload.x_shape:
        return None
    return Key(Layer.of(workload).sizes, kind, False)


# --- what is chosen --------------------------------------------------------------------------------------------------


def on_cpu(workload: Workload, by_kernel: bool) -> Row | None:
    """The row whose choice a gradient takes on the CPU of this process; None where no table says anything."""
    return _decision(key_of(workload, "cpu"), by_kernel, devices.cpu())


def on_gpu(workload: Workload, by_kernel: bool, device: Device) -> Row | None:
    """The same on a GPU. A neighbour's row has its own plan, which may not fit."""
    return _decision(key_of(workload, "cuda"), by_kernel, device)


def plan_of(row: Row | None, layer: Layer, device: Device) -> KernelGradient | None:
    """The plan of a kernel's gradient on a GPU: a row's, else the planner's first; None where there is none."""
    if row is not None and row.key.sizes == layer.sizes:
        for plan in layer.kernel_gradients(device, _PLANS):
            if plan.tile == row.tile:
                return plan
    return next(iter(layer.kernel_gradients(device)), None)


def _decision(key: Key | None, by_kernel: bool, machine: Machine) -> Row | None:
    if key is None:
        return None
    rows = _index(machine, folders.switch(), os.environ.get(folders.CACHE, "")).get((by_kernel, *key.class_), {})
    near = rows.get(key) or table.nearest(key, rows.values())
    return near if near is not None and (near.key == key or near.is_clear) else None


@functools.lru_cache(maxsize=16)
def _index(machine: Machine, switch: str, cache: str) -> Mapping[tuple[Any, ...], Mapping[Key, Row]]:
    """Rows by class and key."""
    del switch, cache  # what `paths` reads

    def rows_of(path: Path) -> Sequence[Row]:
        found = load(path)
        return found.rows if found.machine == machine_of(machine) else ()

    return table_files.indexed(paths(machine), rows_of, lambda row: ((row.by_kernel, *row.key.class_), row.key))


def forget() -> None:
    """Read the tables again at the next call: after one was written."""
    _index.cache_clear()


# --- files -----------------------------------------------------------------------------------------------------------


def paths(machine: Machine) -> dict[str, Path]:
    """The tables that may be read, by whose they are, the first winning; whether they exist or not."""
    return _paths_of(slug_of(machine))


def _paths_of(slug: str) -> dict[str, Path]:
    forward = table.paths_of(slug)
    return {whose: path.parent / _FOLDER / path.name for whose, path in forward.items()}


def paths_on(device: jax.Device) -> dict[str, Path]:
    """As `paths`, of a device of JAX's."""
    if device.platform == "cpu":
        return paths(devices.cpu())
    return _paths_of(folders.slug(device.device_kind))


def folder_in(folder: Path) -> Path:
    """Where a folder of tables has those of gradients."""
    return folder / _FOLDER


def slug_of(machine: Machine) -> str:
    """Its name in file names."""
    return machine.slug if isinstance(machine, Cpu) else folders.slug(machine.name)


def load(path: str | os.PathLike[str]) -> Table:
    """Read a table.

    Raises:
      ValueError: a file that is no table of gradients; names the first thing that is wrong.
      OSError: the file cannot be read.
    """

    def table_of(content: Any) -> Table:
        runs = tuple(dict(run) for run in content["runs"])
        return Table(str(content["machine"]), runs, tuple(_row(values, len(runs)) for values in content["rows"]))

    return table_files.load(path, "table of gradients", table_of)


def save(path: str | os.PathLike[str], found: Table) -> None:
    """Write a table, a row a line and all in order, so that changes can be read.

    Raises:
      OSError: the file cannot be written.
    """
    ordered = sorted(found.rows, key=lambda row: (row.by_kernel, row.key.kind, row.key.sizes[4:], row.key.sizes))
    table_files.save(path, {"machine": found.machine, "runs": list(found.runs)}, map(_values, ordered))


def key_values(key: Key, by_kernel: bool) -> dict[str, Any]:
    """What is differentiated as JSON has it, in tables and in raw times."""
    return {"sizes": list(key.sizes), "kind": key.kind, "by": "kernel" if by_kernel else "x"}


def key_from(content: Mapping[str, Any]) -> tuple[Key, bool]:
    """The inverse of `key_values`.

    Raises:
      ValueError: values that are no key.
      KeyError: one is missing.
    """
    sizes, kind, by = table.sizes_from(content["sizes"]), content["kind"], content["by"]
    kinds = (GPU_KIND, *cpu_table.KINDS.values())
    if kind not in kinds or by not in ("x", "kernel"):
        raise ValueError(f"kind={kind!r}, by={by!r} are not one of {', '.join(kinds)}, and x or kernel")
    return Key(sizes, kind, False), by == "kernel"


def _values(row: Row) -> dict[str, Any]:
    measured = {"tile": list(row.tile), "us": row.us, "xla_us": row.xla_us, "run": row.run}
    return key_values(row.key, row.by_kernel) | measured


def _row(content: Mapping[str, Any], runs: int) -> Row:
    tile, us, xla_us, run = tuple(content["tile"]), float(content["us"]), float(content["xla_us"]), int(content["run"])
    if not all(type(number) is int for number in tile):
        raise ValueError(f"tile={tile} are no ints")
    if not (0 < us < math.inf and 0 < xla_us < math.inf and 0 <= run < runs):
        raise ValueError(f"us={us!r}, xla_us={xla_us!r}, run={run!r}: times are above 0 and run is one of {runs}")
    return Row(*key_from(content), tile, us, xla_us, run)
