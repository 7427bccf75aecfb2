"""Tables of measured choices: for a workload on a GPU, the kernel family and tile that was the fastest, or XLA.

A shipped table of a GPU is `tables/<device>.json` beside this file. `python -m jax_sparse_conv tune` writes one of the
user's own, in the user's cache folder; its rows win over the shipped ones. Where there is no row, that of a sibling's
table counts, if it is clear: of a GPU of the same compute capability with as many multiprocessors. Then the nearest row
of its class, if that is near enough and clear. Else the models choose (`choice`).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar

import jax

from jax_sparse_conv._src import devices
from jax_sparse_conv._src.devices import Device
from jax_sparse_conv._src.dispatch import folders, model, planner, table_files
from jax_sparse_conv._src.dispatch.model import KINDS, kind_of
from jax_sparse_conv._src.dispatch.planner import Candidate, Layer
from jax_sparse_conv._src.problem.workload import Workload

SHIPPED = Path(__file__).with_name("tables")
SIZES, POOL_SIZES = 16, 9
"""Numbers of a key, and of its pool."""
LEAST_GAIN = 0.98
"""Of XLA's time: what gains less than that is XLA's, forward and in gradients."""
# A row serves workloads whose pixels and channels differ by no more than "near", the length of their logarithms to base
# 2. And only where one side was ahead by "clear": what is level may be otherwise beside it.
_RULES = model.shipped("gpu choice")


@dataclasses.dataclass(frozen=True)
class Key:
    """What a row is found by.

    Attributes:
      sizes: N, H, W, C, kh, kw, K, then rows and columns of strides, padding (low, high of H, then of W) and dilation,
        and groups.
      kind: of `model.KINDS`, or of `cpu_table.KINDS`.
      residual: whether a map is added.
      pool: of a pool behind it, as `planner.Layer` has it. A GPU's raw times may be of one, its rows are not.
      is_dense: whether it is a dense layer, whose rows are maps of one pixel; in a CPU's tables only.
    """

    sizes: tuple[int, ...]
    kind: str
    residual: bool
    pool: tuple[int, ...] = ()
    is_dense: bool = False

    @classmethod
    def of(cls, workload: Workload) -> Key | None:
        """Of a convolution of known sizes by one kernel and without a pool; None for all else."""
        is_conv = workload.method == "ecr" and workload.geometry.pool is None
        if not is_conv or workload.is_symbolic or workload.kernel_shape[0] != 1 or workload.itemsize not in (2, 4):
            return None
        return cls(Layer.of(workload).sizes, kind_of(workload), workload.residual)

    @property
    def layer(self) -> Layer:
        """As the planners see it."""
        return Layer(self.sizes, self.pool, 2 if self.kind == "16bit" else 4, self.kind == "highest", self.residual)

    @property
    def workload(self) -> Workload:
        """The call; one of bfloat16 where it is of 16 bits."""
        n, height, width, channels, kh, kw, out_channels, *windows, groups = self.sizes
        geometry = planner.geometry_of(windows, groups, self.pool)
        dtype = "bfloat16" if self.kind == "16bit" else "float32"
        shapes = (n, height, width, channels), (1, kh, kw, channels // groups, out_channels)
        method = "dense" if self.is_dense else "pecr" if self.pool else "ecr"
        return Workload(method, *shapes, geometry, dtype, self.kind == "highest", self.residual)

    @property
    def class_(self) -> tuple[Any, ...]:
        """Workloads that a row may stand for: all but the number of pixels and, without groups, channels."""
        grouped = (self.sizes[3], self.sizes[6]) if self.sizes[15] > 1 else ()
        windows = self.sizes[4:6], self.sizes[7:9], self.sizes[13:16], self.pool
        return self.kind, self.residual, self.is_dense, *windows, grouped

    def distance(self, other: Key) -> float:
        """Between two workloads of one class: the length of the logarithms of pixels, C and K, to base 2."""
        mine, its = self._extents(), other._extents()
        return math.sqrt(sum(math.log2(a / b) ** 2 for a, b in zip(mine, its, strict=True)))

    def _extents(self) -> tuple[int, int, int]:
        images, height, width, channels = self.sizes[:4]
        return max(1, images * height * width), max(1, channels), max(1, self.sizes[6])


@dataclasses.dataclass(frozen=True)
class Row:
    """What was measured of a workload.

    Attributes:
      key: the workload.
      candidate: the fastest kernel with its tile, or None where XLA was.
      us: its microseconds; XLA's where it is None.
      xla_us: XLA's.
      run: index into the table's `runs`.
    """

    key: Key
    candidate: Candidate | None
    us: float
    xla_us: float
    run: int

    @property
    def is_clear(self) -> bool:
        """Whether one side was ahead by enough to say the same of a neighbour."""
        return self.candidate is None or self.xla_us >= _RULES["clear"] * self.us


@dataclasses.dataclass(frozen=True)
class Table:
    """The rows of one GPU.

    Attributes:
      device: its kind, such as "NVIDIA H100 80GB HBM3".
      multiprocessors: how many it has; a part of such a GPU, with fewer, has no table.
      runs: of the commands that measured: date, commit, command, versions, driver.
      rows: in any order.
    """

    device: str
    multiprocessors: int
    runs: tuple[Mapping[str, Any], ...]
    rows: tuple[Row, ...]

    @property
    def capability(self) -> tuple[int, ...]:
        """Compute capability, as its runs say; nothing where none does."""
        return next((tuple(run["gpu"]["capability"]) for run in self.runs if "gpu" in run), ())


class _Keyed(Protocol):
    @property
    def key(self) -> Key: ...


AnyRow = TypeVar("AnyRow", bound=_Keyed)
Index: TypeAlias = Mapping[tuple[Any, ...], Sequence[Row]]


# --- what is chosen --------------------------------------------------------------------------------------------------


def decision(workload: Workload) -> Row | None:
    """The row whose choice a workload takes on the GPU that is lowered for; None where no table says anything."""
    key, device = Key.of(workload), devices.known()
    if key is None or device is None:
        return None
    return _decided(key, device, os.environ.get(folders.SWITCH, ""), os.environ.get(folders.CACHE, ""))


def near(key: Key, device: Device) -> Row | None:
    """As `decision`, for a workload without a row of its own: by the nearest other row, if it is near and clear."""
    row = nearest(key, [*_rows(key, device), *_sibling_rows(key, device)])
    if row is None or not row.is_clear:
        return None
    return dataclasses.replace(row, key=key) if row.candidate is None else _retiled(row, key, device)


def of_sibling(key: Key, device: Device) -> Row | None:
    """The row of another GPU of the same build, where it is clear."""
    row = next((row for row in _sibling_rows(key, device) if row.key == key), None)
    return row if row is not None and row.is_clear and _fits(row.candidate, key, device) else None


def nearest(key: Key, rows: Iterable[AnyRow]) -> AnyRow | None:
    """The nearest of the other rows of a class, if it is near."""
    others = [row for row in rows if row.key != key]
    row = min(others, key=lambda row: key.distance(row.key), default=None)
    return None if row is None or key.distance(row.key) > _RULES["near"] else row


@functools.lru_cache(maxsize=4096)
def _decided(key: Key, device: Device, switch: str, cache: str) -> Row | None:
    del switch, cache  # which rows there are
    exact = next((row for row in _rows(key, device) if row.key == key), None)
    if exact is not None and _fits(exact.candidate, key, device):
        return exact
    return of_sibling(key, device) or near(key, device)


def _rows(key: Key, device: Device) -> Sequence[Row]:
    """Of the workload's class."""
    rows = _index(device.name, device.multiprocessors, folders.switch(), os.environ.get(folders.CACHE, ""))
    return rows.get(key.class_, ())


def _sibling_rows(key: Key, device: Device) -> Sequence[Row]:
    """Of the workload's class, in the shipped tables of other GPUs of the same build."""
    switch = folders.switch()
    rows = _index_of_siblings(device.name, device.multiprocessors, device.capability) if switch != "off" else {}
    return rows.get(key.class_, ())


def _fits(candidate: Candidate | None, key: Key, device: Device) -> bool:
    """Whether this build has a candidate: a table may be older, or of a build with other code."""
    return candidate is None or key.layer.expected([candidate], device)[0] > 0


def _retiled(row: Row, key: Key, device: Device) -> Row | None:
    """A neighbour's choice with the tile that its family's planner has for this workload; None where it has none."""
    assert row.candidate is not None
    family = row.candidate.family
    tiles = [each.candidate for each in key.layer.candidates(device, 1) if each.candidate.family == family]
    return dataclasses.replace(row, key=key, candidate=tiles[0]) if tiles else None


# --- files -----------------------------------------------------------------------------------------------------------


def paths(device: str) -> dict[str, Path]:
    """The tables of a GPU that may be read, by whose they are, the first winning; whether they exist or not."""
    return paths_of(folders.slug(device))


def paths_on(gpu: jax.Device) -> dict[str, Path]:
    """As `paths`, and the shipped tables of other GPUs of the same build."""
    try:
        device = Device.of(gpu.local_hardware_id or 0)
    except RuntimeError:  # no CUDA kernels, which is what tables choose among
        return paths(gpu.device_kind)
    others = _tables_of_siblings(device.name, device.multiprocessors, device.capability)
    siblings = {f"sibling {path.stem}": path for path in others}
    return paths(device.name) | (siblings if folders.switch() != "off" else {})


def paths_of(slug: str) -> dict[str, Path]:
    """As `paths`, by the name that a GPU or CPU has in file names."""
    switch, name = folders.switch(), f"{slug}.json"
    found = {"user": folders.cache_folder() / name, "shipped": SHIPPED / name}
    return {name: path for name, path in found.items() if switch != "off" and (name != "user" or switch == "")}


@functools.lru_cache(maxsize=16)
def _index(device: str, multiprocessors: int, switch: str, cache: str) -> Index:
    del switch, cache  # what `paths` reads
    rows: dict[Key, Row] = {}
    for path in reversed(paths(device).values()):
        found_table = load(path) if path.exists() else None
        if found_table is not None and found_table.multiprocessors == multiprocessors:
            rows |= {row.key: row for row in found_table.rows}
    return _by_class(rows)


@functools.lru_cache(maxsize=16)
def _index_of_siblings(device: str, multiprocessors: int, capability: tuple[int, int]) -> Index:
    tables = _tables_of_siblings(device, multiprocessors, capability).values()
    return _by_class({row.key: row for each in tables for row in each.rows})


def _tables_of_siblings(device: str, multiprocessors: int, capability: tuple[int, int]) -> dict[Path, Table]:
    found = {path: load(path) for path in sorted(SHIPPED.glob("*.json"))}
    return {
        path: each
        for path, each in found.items()
        if (each.multiprocessors, each.capability) == (multiprocessors, capability) and each.device != device
    }


def _by_class(rows: Mapping[Key, Row]) -> Index:
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows.values():
        found.setdefault(row.key.class_, []).append(row)
    return found


def forget() -> None:
    """Read the tables again at the next call: after one was written."""
    _index.cache_clear()
    _index_of_siblings.cache_clear()
    _decided.cache_clear()


def load(path: str | os.PathLike[str]) -> Table:
    """Read a table.

    Raises:
      ValueError: a file that is no table; names the first thing that is wrong.
      OSError: the file cannot be read.
    """

    def table_of(content: Any) -> Table:
        runs = tuple(dict(run) for run in content["runs"])
        rows = tuple(_row(values, len(runs)) for values in content["rows"])
        return Table(str(content["device"]), int(content["multiprocessors"]), runs, rows)

    return table_files.load(path, "table of choices", table_of)


def save(path: str | os.PathLike[str], table: Table) -> None:
    """Write a table, a row a line and all in order, so that changes can be read."""
    ordered = sorted(table.rows, key=lambda row: (row.key.kind, row.key.residual, row.key.sizes[4:], row.key.sizes))
    lines = [json.dumps(_values(row)) for row in ordered]
    runs = json.dumps(list(table.runs), indent=1, sort_keys=True).replace("\n", "\n ")
    text = f'{{\n "format": {table_files.FORMAT},\n "device": {json.dumps(table.device)},\n'
    text += f' "multiprocessors": {table.multiprocessors},\n "runs": {runs},\n "rows": [\n  '
    whole = text + ",\n  ".join(lines) + "\n ]\n}\n"
    folders.write_whole(path, whole)


def sizes_from(values: Sequence[Any]) -> tuple[int, ...]:
    """The sizes of a key from JSON.

    Raises:
      ValueError: values that are no sizes of a convolution.
    """
    sizes = tuple(values)
    paddings = range(9, 13)
    if len(sizes) != SIZES or not all(type(size) is int for size in sizes):
        raise ValueError(f"sizes={sizes} are not {SIZES} ints")
    if any(not (place in paddings or size >= 1) or abs(size) >= 1 << 31 for place, size in enumerate(sizes)):
        raise ValueError(f"sizes={sizes} are not from 1 to 2^31, but for padding")
    return sizes


def _values(row: Row) -> list[Any]:
    family, tile = ("xla", ()) if row.candidate is None else (row.candidate.family, row.candidate.tile)
    return [list(row.key.sizes), row.key.kind, int(row.key.residual), family, list(tile), row.us, row.xla_us, row.run]


def _row(values: Sequence[Any], runs: int) -> Row:
    sizes, kind, residual, family, tile, us, xla_us, run = values
    sizes = sizes_from(sizes)
    if kind not in KINDS or residual not in (0, 1):
        raise ValueError(f"kind={kind!r}, residual={residual!r} are not one of {', '.join(KINDS)} and 0 or 1")
    if not (0 < us < math.inf and 0 < xla_us < math.inf and 0 <= run < runs):
        raise ValueError(f"us={us!r}, xla_us={xla_us!r}, run={run!r}: times are above 0 and run is one of {runs}")
    candidate = None if family == "xla" else Candidate.of(family, tile)
    return Row(Key(sizes, kind, bool(residual)), candidate, float(us), float(xla_us), run)
