"""`python -m jax_sparse_conv tune`: times what is due, makes the table, fits the models, and prints them."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jax_sparse_conv import models
from jax_sparse_conv._src import devices, environment
from jax_sparse_conv._src.dispatch import folders, model, table
from jax_sparse_conv._src.dispatch.table import Key, Row, Table
from jax_sparse_conv._src.layers.calls import Call
from jax_sparse_conv._src.plans.timing import geometric_mean
from jax_sparse_conv._src.tune import fit, measure, raw_times, workloads

NETWORKS = ("vgg19", "resnet50", "densenet121", "regnetx_400mf")
_LEAST_GAIN = 0.98  # of XLA's time: what gains less is XLA's
_CLEAR_ACROSS_RUNS = 1.08  # times of two runs differ by less for the same kernel


def run(options: argparse.Namespace) -> None:
    """The command.

    Raises:
      ValueError: an option that cannot be, or no GPU to tune for.
      OSError: a file that cannot be read or written.
    """
    if options.fit is not None:
        _fit(options.fit, options.out)
        return
    if options.show:
        _show(_gpu(options.device).device_kind if jax.default_backend() == "gpu" else "NVIDIA H200")
        return
    gpu = _gpu(options.device)
    folder = options.out or folders.cache_folder()
    raw = folder / f"{folders.slug(gpu.device_kind)}.times.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    with jax.default_device(gpu):
        _time_all(_calls(options), gpu.local_hardware_id or 0, raw, 60 * options.budget, not options.no_xla)
    made = table_of(devices.Device.of(gpu.local_hardware_id or 0), raw_times.read(raw))
    table.save(folder / f"{folders.slug(gpu.device_kind)}.json", made)
    table.forget()
    print(summary(made))
    print(f"table: {folder / (folders.slug(gpu.device_kind) + '.json')}, raw times: {raw}")


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


def _time_all(calls: Sequence[Call], ordinal: int, raw: Path, seconds: float, xla: bool) -> None:
    """Time the calls that have no times yet, and write each down at once, so that nothing is lost by stopping."""
    raw_times.cut_off(raw)
    known = {entry.key for entry in raw_times.read(raw)}
    keys = {measure.key_of(call): call for call in calls}
    due = {key: call for key, call in keys.items() if key is not None and key not in known}
    start, device = time.monotonic(), devices.Device.of(ordinal)
    with raw.open("a", encoding="utf-8") as file:
        raw_times.write(file, {"run": raw_times.described(device)})
        for index, call in enumerate(due.values()):
            if time.monotonic() - start > seconds:
                print(f"\n{len(due) - index} of {len(due)} are left: the budget is spent", file=sys.stderr)
                return
            raw_times.write(file, raw_times.line_of(measure.measure(call, device, xla=xla)))
            done, spent = index + 1, time.monotonic() - start
            left = spent / done * (len(due) - done)
            print(f"\r{done}/{len(due)}  {spent:.0f} s, some {left:.0f} s left ", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)


def table_of(device: devices.Device, entries: Sequence[raw_times.Entry]) -> Table:
    """The table of a GPU from raw times."""
    runs = list({json.dumps(entry.run, sort_keys=True): entry.run for entry in entries}.values())
    of_key: dict[Key, list[raw_times.Entry]] = collections.defaultdict(list)
    for entry in entries:
        if not entry.key.pool:
            of_key[entry.key].append(entry.of_candidates_left(device))
    rows = [row for row in (_row(found, runs) for found in of_key.values()) if row is not None]
    used = sorted({row.run for row in rows})
    rows = [dataclasses.replace(row, run=used.index(row.run)) for row in rows]
    return Table(device.name, device.multiprocessors, tuple(runs[run] for run in used), tuple(rows))


def _row(entries: Sequence[raw_times.Entry], runs: Sequence[Mapping[str, Any]]) -> Row | None:
    """The latest entry that timed XLA and kernels side by side, or of all times what is clear across runs.

    Of what was timed side by side those timed twice count. None where nothing is clear.
    """
    for entry in reversed(entries):
        ours = {name: entry.times[name] for name in entry.again if name != measure.XLA}
        if measure.XLA in entry.times and entry.again:
            best = min(ours, key=lambda name: ours[name], default=measure.XLA)
            return _of_times(entry, best, entry.times[best], entry.times[measure.XLA], runs)
    xla = [entry.times[measure.XLA] for entry in entries if measure.XLA in entry.times]
    timed = [(us, name, entry) for entry in entries for name, us in entry.times.items() if name != measure.XLA]
    if not xla or not timed:
        return None
    us, best, entry = min(timed, key=lambda each: each[0])
    of_xla = statistics.median(xla)
    is_clear = max(us, of_xla) > _CLEAR_ACROSS_RUNS * min(us, of_xla)
    return _of_times(entry, best, us, of_xla, runs) if is_clear else None


def _of_times(entry: raw_times.Entry, best: str, us: float, xla: float, runs: Sequence[Mapping[str, Any]]) -> Row:
    if us > _LEAST_GAIN * xla:
        best, us = measure.XLA, xla
    return Row(entry.key, measure.candidate_of(best), us, xla, runs.index(entry.run))


# --- models ----------------------------------------------------------------------------------------------------------


def _fit(files: Sequence[Path], out: Path | None) -> None:
    """Fit the models' constants to raw times, and write them: of one GPU for it, of several as the shipped file is.

    The tables of these GPUs are made again, too.
    """
    folder = out or folders.cache_folder()
    files = files or sorted(folders.cache_folder().glob("*.times.jsonl"))
    entries = [entry for file in files for entry in raw_times.read(file)]
    times = raw_times.times_of(entries)
    names = {each.device.name for each in times}
    if not times:
        raise ValueError(f"no raw times of a known GPU in {', '.join(map(str, files)) or folders.cache_folder()}")
    fitted = fit.fitted(model.load(model.SHIPPED), times, print)
    run = environment.describe_run()
    found = {name: run[name] for name in ("date", "command")} | {"devices": sorted(names), "times": len(times)}
    fitted = dataclasses.replace(fitted, fit={**found, "residuals": fitted.fit["residuals"]})
    target = folder / (f"{folders.slug(min(names))}.model.json" if len(names) == 1 else "model.json")
    model.save(target, fitted)
    print(f"model: {target}")
    for device in {each.device.name: each.device for each in times}.values():
        of_device = [entry for entry in entries if entry.run.get("device") == device.name]
        table.save(folder / f"{folders.slug(device.name)}.json", table_of(device, of_device))
        print(f"table: {folder / folders.slug(device.name)}.json")
    model.forget()
    table.forget()


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
