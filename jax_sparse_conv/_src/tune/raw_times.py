"""Raw times of `tune`: a file of lines, each a workload's times, or the run that the lines behind it are of."""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from jax_sparse_conv._src import environment
from jax_sparse_conv._src.devices import Device
from jax_sparse_conv._src.dispatch import table, table_files
from jax_sparse_conv._src.dispatch.planner import Candidate
from jax_sparse_conv._src.dispatch.table import Key
from jax_sparse_conv._src.tune import measure

_Entry = TypeVar("_Entry")


@dataclasses.dataclass(frozen=True)
class Entry:
    """What a line says of a workload.

    Attributes:
      key: the workload.
      times: microseconds by name, as `measure.name_of` has them, and "xla".
      again: the names of what was timed twice, side by side.
      run: date, commit, command, versions, driver, and the GPU.
    """

    key: Key
    times: Mapping[str, float]
    again: tuple[str, ...]
    run: Mapping[str, Any]

    @classmethod
    def of(cls, content: Mapping[str, Any], run: Mapping[str, Any]) -> Entry:
        """From a line."""
        key = content["key"]
        pool = tuple(key.get("pool", ()))
        sizes, times = table.sizes_from(key["sizes"]), times_from(content["times"])
        return cls(Key(sizes, str(key["kind"]), bool(key["residual"]), pool), times, tuple(content["again"]), run)

    def of_candidates_left(self, device: Device) -> Entry:
        """Without times of candidates that the planners no longer have."""
        named = [name for name in self.times if name != measure.XLA]
        candidates = [candidate for name in named if (candidate := measure.candidate_of(name)) is not None]
        expected = dict(zip(named, self.key.layer.expected(candidates, device, any_build=True), strict=True))
        times = {name: us for name, us in self.times.items() if expected.get(name, 1) > 0}
        return dataclasses.replace(self, times=times, again=tuple(name for name in self.again if name in times))


@dataclasses.dataclass(frozen=True)
class Time:
    """A measured time.

    Attributes:
      key: the workload.
      candidate: the kernel; None for XLA.
      us: microseconds.
      device: the GPU.
    """

    key: Key
    candidate: Candidate | None
    us: float
    device: Device


def with_used_runs(
    rows: Sequence[Any], runs: Sequence[Mapping[str, Any]]
) -> tuple[tuple[Mapping[str, Any], ...], tuple[Any, ...]]:
    """The runs that rows of a table are of, and the rows with their numbers among these."""
    used = sorted({row.run for row in rows})
    numbered = (dataclasses.replace(row, run=used.index(row.run)) for row in rows)
    return tuple(runs[run] for run in used), tuple(numbered)


def entries(
    raw: Path, of: Callable[[Mapping[str, Any], Mapping[str, Any]], _Entry | None], *, must_exist: bool = False
) -> list[_Entry]:
    """What `of` makes of each workload's line and its run, but for None; of a line that was cut off nothing is read.

    Args:
      raw: a file of raw times.
      of: makes an entry of the content of a line, and of its run.
      must_exist: otherwise a file that does not exist has no entries.

    Raises:
      ValueError: another file; names the line, and what is wrong there.
      OSError: the file cannot be read.
    """
    try:
        lines = raw.read_text(encoding="utf-8").splitlines() if must_exist or raw.exists() else []
    except UnicodeDecodeError as error:
        raise ValueError(f"{raw} is no text in UTF-8: {error}") from error
    run: Mapping[str, Any] = {}
    found = []
    for number, line in enumerate(lines, 1):
        try:
            content = json.loads(line)
            if "run" in content:
                run = dict(content["run"])
                continue
            entry = of(content, run)
        except json.JSONDecodeError as error:
            if number == len(lines):
                break
            raise ValueError(f"{raw}, line {number} is no JSON: {error}") from error
        except table_files.WRONG_CONTENT as error:
            said = f"{type(error).__name__}: {error}"
            raise ValueError(f"{raw}, line {number} holds no times of `tune`: {said}") from error
        if entry is not None:
            found.append(entry)
    return found


def times_from(content: Mapping[str, Any]) -> dict[str, float]:
    """Microseconds by name from JSON.

    Raises:
      ValueError: one is no time.
    """
    times = {str(name): float(us) for name, us in content.items()}
    for name, us in times.items():
        if not 0 < us < math.inf:
            raise ValueError(f"times[{name!r}]={us} is not above 0, in microseconds")
    return times


def gpu_of(run: Mapping[str, Any]) -> Device:
    """The GPU that a run describes.

    Raises:
      ValueError: there is none.
    """
    if "gpu" not in run:
        raise ValueError("no run that says which device it was on is before it")
    fields: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in run["gpu"].items()}
    return Device(**fields)


def read(raw: Path, *, must_exist: bool = False) -> list[Entry]:
    """The entries of GPUs; those of CPUs are left out (`tune.cpu`). Arguments and errors as of `entries`."""

    def of(content: Mapping[str, Any], run: Mapping[str, Any]) -> Entry | None:
        if "cpu" in run:
            return None
        if "gpu" in run:
            gpu_of(run)  # or an error
        return Entry.of(content, run)

    return entries(raw, of, must_exist=must_exist)


def times_of(entries: Sequence[Entry]) -> list[Time]:
    """The times, of what was timed several times the median; of runs without a description of their GPU none."""
    found: dict[tuple[Key, str, Device], list[float]] = collections.defaultdict(list)
    for entry in entries:
        if "gpu" not in entry.run:
            continue
        device = gpu_of(entry.run)
        for name, us in entry.times.items():
            found[entry.key, name, device].append(us)
    return [
        Time(key, measure.candidate_of(name), statistics.median(us), device)
        for (key, name, device), us in found.items()
    ]


# --- writing ---------------------------------------------------------------------------------------------------------


def cut_off(raw: Path) -> None:
    """Remove a last line that stopping left unfinished, so that the next one is a line of its own."""
    content = raw.read_bytes() if raw.exists() else b""
    whole = content[: content.rfind(b"\n") + 1]
    if whole != content:
        raw.write_bytes(whole)


def run_of() -> dict[str, Any]:
    """What describes a run on any device."""
    found = environment.describe_run()
    kept = {name: found[name] for name in ("date", "command", "device", "xla_flags")}
    return kept | {"commit": os.environ.get("JSC_COMMIT", ""), "versions": found["environment"]["versions"]}


def described(device: Device) -> dict[str, Any]:
    """A run on a GPU."""
    return run_of() | {"driver": environment.gpu_driver(), "gpu": dataclasses.asdict(device)}


def line_of(found: measure.Measured) -> dict[str, Any]:
    key = {"sizes": found.key.sizes, "kind": found.key.kind, "residual": found.key.residual}
    times = {name: round(us, 3) for name, us in found.times.items()}
    return {"key": key, "times": times, "again": found.again, "failed": dict(found.failed)}


def write(file: Any, value: Mapping[str, Any]) -> None:
    file.write(json.dumps(value) + "\n")
    file.flush()
