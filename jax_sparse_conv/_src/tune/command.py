"""`python -m jax_sparse_conv tune`: keeps raw times, goes on where it stopped, and makes the table."""

from __future__ import annotations

import argparse
import collections
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jax_sparse_conv import models
from jax_sparse_conv._src import devices, environment
from jax_sparse_conv._src.dispatch import table
from jax_sparse_conv._src.dispatch.table import Key, Row, Table
from jax_sparse_conv._src.layers.calls import Call
from jax_sparse_conv._src.plans.timing import geometric_mean
from jax_sparse_conv._src.tune import measure, workloads

NETWORKS = ("vgg19", "resnet50", "densenet121", "regnetx_400mf")
_LEAST_GAIN = 0.98  # of XLA's time: what gains less is XLA's


def run(options: argparse.Namespace) -> None:
    """The command.

    Raises:
      ValueError: an option that cannot be, or no GPU to tune for.
      OSError: a file that cannot be read or written.
    """
    if options.show:
        _show(_gpu(options.device).device_kind if jax.default_backend() == "gpu" else "NVIDIA H200")
        return
    gpu = _gpu(options.device)
    folder = options.out or table.cache_folder()
    raw = folder / f"{table.slug(gpu.device_kind)}.times.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    with jax.default_device(gpu):
        _time_all(_calls(options), gpu.local_hardware_id or 0, raw, 60 * options.budget)
    made = table_of(devices.Device.of(gpu.local_hardware_id or 0), read(raw))
    table.save(folder / f"{table.slug(gpu.device_kind)}.json", made)
    table.forget()
    print(summary(made))
    print(f"table: {folder / (table.slug(gpu.device_kind) + '.json')}, raw times: {raw}")


def _gpu(number: int) -> jax.Device:
    gpus = jax.local_devices() if jax.default_backend() == "gpu" else []
    found = next((gpu for gpu in gpus if (gpu.local_hardware_id or 0) == number), None)
    if found is None:
        raise ValueError(f"--device {number}: JAX has no such GPU here, its devices are {jax.local_devices()}")
    return found


def _calls(options: argparse.Namespace) -> list[Call]:
    if min(options.batch) < 1:
        raise ValueError(f"--batch {min(options.batch)} is not 1 or more")
    unknown = [name for name in options.network or () if name not in models.NETWORKS]
    if unknown:
        raise ValueError(f"--network {unknown[0]!r} is not one of {', '.join(models.NETWORKS)}")
    single = workloads.of_file(options.layers) if options.layers else workloads.of_networks(options.network or NETWORKS)
    return list(workloads.expanded(single, options.batch, options.kinds))


# --- raw times -------------------------------------------------------------------------------------------------------


def _time_all(calls: Sequence[Call], ordinal: int, raw: Path, seconds: float) -> None:
    """Time the calls that have no times yet, and write each down at once, so that nothing is lost by stopping."""
    _cut_off(raw)
    known = {entry.key for entry in read(raw)}
    keys = {measure.key_of(call): call for call in calls}
    due = {key: call for key, call in keys.items() if key is not None and key not in known}
    start, device = time.monotonic(), devices.Device.of(ordinal)
    with raw.open("a", encoding="utf-8") as file:
        _write(file, {"run": _described()})
        for index, call in enumerate(due.values()):
            if time.monotonic() - start > seconds:
                print(f"\n{len(due) - index} of {len(due)} are left: the budget is spent", file=sys.stderr)
                return
            _write(file, _entry(measure.measure(call, device)))
            done, spent = index + 1, time.monotonic() - start
            left = spent / done * (len(due) - done)
            print(f"\r{done}/{len(due)}  {spent:.0f} s, some {left:.0f} s left ", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)


def _cut_off(raw: Path) -> None:
    """Remove a last line that stopping left unfinished, so that the next one is a line of its own."""
    content = raw.read_bytes() if raw.exists() else b""
    whole = content[: content.rfind(b"\n") + 1]
    if whole != content:
        raw.write_bytes(whole)


def _described() -> dict[str, Any]:
    found = environment.describe_run()
    versions = found["environment"]["versions"]
    kept = {name: found[name] for name in ("date", "command", "device", "xla_flags")}
    kept["commit"] = os.environ.get("JSC_COMMIT", "")
    return kept | {"versions": versions, "driver": found["environment"]["gpu_driver"]}


def _entry(found: measure.Measured) -> dict[str, Any]:
    key = {"sizes": found.key.sizes, "kind": found.key.kind, "residual": found.key.residual}
    times = {name: round(us, 3) for name, us in found.times.items()}
    return {"key": key, "times": times, "again": found.again, "failed": dict(found.failed)}


def _write(file: Any, value: Mapping[str, Any]) -> None:
    file.write(json.dumps(value) + "\n")
    file.flush()


class Entry:
    """What a line of raw times says of a workload."""

    def __init__(self, content: Mapping[str, Any], run: Mapping[str, Any]) -> None:
        key = content["key"]
        self.key = Key(tuple(key["sizes"]), str(key["kind"]), bool(key["residual"]))
        self.times = {str(name): float(us) for name, us in content["times"].items()}
        self.again = tuple(content["again"])
        self.run = run

    def row(self, run: int) -> Row | None:
        """The row of a table: of those timed twice the fastest, or XLA; None where XLA has no time."""
        xla = self.times.get(measure.XLA)
        ours = {name: self.times[name] for name in self.again if name != measure.XLA}
        if xla is None:
            return None
        best = min(ours, key=lambda name: ours[name], default=measure.XLA)
        us = self.times[best]
        if us > _LEAST_GAIN * xla:
            best, us = measure.XLA, xla
        return Row(self.key, measure.candidate_of(best), us, xla, run)


def read(raw: Path) -> list[Entry]:
    """The entries of raw times; of a line that was cut off by stopping nothing is read.

    Raises:
      ValueError: another file.
    """
    found: list[Entry] = []
    run: Mapping[str, Any] = {}
    lines = raw.read_text(encoding="utf-8").splitlines() if raw.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            content = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):
                break
            raise ValueError(f"{raw}, line {number} is no JSON: {error}") from error
        if "run" in content:
            run = content["run"]
        else:
            found.append(Entry(content, run))
    return found


def table_of(device: devices.Device, entries: Sequence[Entry]) -> Table:
    """The table of a GPU from raw times."""
    runs = list({json.dumps(entry.run, sort_keys=True): entry.run for entry in entries}.values())
    rows = [entry.row(runs.index(entry.run)) for entry in entries]
    known = {row.key: row for row in rows if row is not None}  # of what was timed twice the later
    return Table(device.name, device.multiprocessors, tuple(runs), tuple(known.values()))


# --- what is printed -------------------------------------------------------------------------------------------------


def summary(made: Table) -> str:
    """A table's rows by kind and family: how many, and XLA's time over theirs."""
    groups: dict[tuple[str, str], list[float]] = collections.defaultdict(list)
    for row in made.rows:
        groups[row.key.kind, "xla" if row.candidate is None else row.candidate.family].append(row.xla_us / row.us)
    lines = [f"{'kind':8} {'kernel':16} {'rows':>5} {'ratio':>6} {'least':>6}"]
    lines += [
        f"{kind:8} {family:16} {len(ratios):5} {geometric_mean(ratios):6.2f} {min(ratios):6.2f}"
        for (kind, family), ratios in sorted(groups.items())
    ]
    return "\n".join(lines)


def _show(device: str) -> None:
    for line in described(device):
        print(line)


def described(device: str) -> Iterator[str]:
    """Which tables are in use for a GPU."""
    for name, path in table.paths(device).items():
        if not path.exists():
            yield f"{name}: none, {path} does not exist"
            continue
        found = table.load(path)
        dates = sorted(str(run.get("date", "?"))[:10] for run in found.runs)
        yield f"{name}: {path}, {len(found.rows)} rows, {dates[0] if dates else '?'} to {dates[-1] if dates else '?'}"
        yield summary(found)
