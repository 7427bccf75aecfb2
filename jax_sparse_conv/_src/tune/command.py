"""`python -m jax_sparse_conv tune`: times what is due, makes the table, fits the models, and prints them."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax

from jax_sparse_conv import models
from jax_sparse_conv._src import devices, environment
from jax_sparse_conv._src.dispatch import cpu_table, folders, gradient_table, model, table
from jax_sparse_conv._src.dispatch.table import Key, Row, Table
from jax_sparse_conv._src.layers.calls import Call
from jax_sparse_conv._src.plans.timing import geometric_mean
from jax_sparse_conv._src.tune import cpu, fit, gradients, measure, raw_times, workloads

CPU = "cpu"
"""The name of this device among those of `--device`."""
BATCHES = (1, 8, 32)
NETWORKS = ("vgg19", "resnet50", "densenet121", "regnetx_400mf")
_ENDINGS = (".json", ".times.jsonl")  # of a table and of its raw times
_CLEAR_ACROSS_RUNS = 1.08  # times of two runs differ by less for the same kernel

_Key = TypeVar("_Key")
_Timed = TypeVar("_Timed")


def run(options: argparse.Namespace) -> None:
    """The command.

    Raises:
      ValueError: an option that cannot be, or no such device to tune for.
      OSError: a file that cannot be read or written.
    """
    is_of_cpu = options.device == CPU or (options.device is None and jax.default_backend() != "gpu")
    if options.gradients:
        _gradients(options, devices.cpu() if is_of_cpu else None)
    elif options.fit is not None:
        _fit(options.fit, options.out)
    elif options.show:
        _print(described_cpu(devices.cpu()) if is_of_cpu else described(_gpu(options.device or 0).device_kind))
    elif is_of_cpu:
        _tune_cpu(options, options.out or folders.cache_folder())
    else:
        _tune_gpu(options, _gpu(options.device or 0), options.out or folders.cache_folder())


def _tune_gpu(options: argparse.Namespace, gpu: jax.Device, folder: Path) -> None:
    device = devices.Device.of(gpu.local_hardware_id or 0)
    path, raw = (folder / f"{folders.slug(gpu.device_kind)}{ending}" for ending in _ENDINGS)
    calls = workloads.expanded(workloads.convolutions(_layers(options)), *_expansion(options))
    due = _due(calls, measure.key_of, options.part, [entry.key for entry in raw_times.read(raw)])

    def line_of(_: Key, call: Call) -> Mapping[str, Any]:
        return raw_times.line_of(measure.measure(call, device, xla=not options.no_xla))

    with jax.default_device(gpu):
        _time_all(due, raw, options.budget, raw_times.described(device), line_of)
    made = table_of(device, raw_times.read(raw))
    table.save(path, made)
    table.forget()
    print(f"{summary(made)}\ntable: {path}, raw times: {raw}")


def _tune_cpu(options: argparse.Namespace, folder: Path) -> None:
    if options.no_xla:
        raise ValueError("--no-xla is for GPUs: a CPU's table compares the native call with XLA")
    here = devices.cpu()
    path, raw = (folder / f"{here.slug}{ending}" for ending in _ENDINGS)
    calls = workloads.expanded(_layers(options), *_expansion(options))
    due = _due(calls, cpu.key_of, options.part, [entry.key for entry in cpu.read(raw)])

    def line_of(key: Key, call: Call) -> Mapping[str, Any]:
        return cpu.line_of(key, *cpu.times_of(call))

    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        _time_all(due, raw, options.budget, cpu.described(here), line_of)
    made = cpu.table_of(here, cpu.read(raw))
    cpu_table.save(path, made)
    cpu_table.forget()
    print(f"{cpu_summary(made)}\ntable: {path}, raw times: {raw}")


def _gradients(options: argparse.Namespace, here: devices.Cpu | None) -> None:
    """All of it with `--gradients`: on a CPU, else on a GPU."""
    folder = gradient_table.folder_in(options.out or folders.cache_folder())
    if options.fit is not None:
        files = options.fit or sorted(folder.glob(f"*{_ENDINGS[1]}"))
        entries = [entry for file in files for entry in gradients.read(file, must_exist=True)]
        return _save_gradients(entries, folder, files)
    if options.no_xla:
        raise ValueError("--no-xla is not for --gradients: their table compares with XLA")
    device = jax.local_devices(backend="cpu")[0] if here is not None else _gpu(options.device or 0)
    machine = devices.Device.of(device.local_hardware_id or 0) if here is None else here
    if options.show:
        return _print(_described(gradient_table.paths(machine), gradient_table.load, gradients.summary))
    raw = folder / f"{gradient_table.slug_of(machine)}{_ENDINGS[1]}"
    calls = workloads.expanded(_layers(options), *_expansion(options))

    def line_of(key: tuple[Key, bool], gradient: gradients.Gradient) -> Mapping[str, Any]:
        return gradients.line_of(*key, gradients.times_of(gradient))

    before = [entry for entry in gradients.read(raw) if gradients.machine_of(entry.run) == machine]
    known = [(entry.key, entry.by_kernel) for entry in before]
    run = cpu.described(machine) if isinstance(machine, devices.Cpu) else raw_times.described(machine)
    with jax.default_device(device):
        due = _due(gradients.gradients_of(calls), gradients.key_of, options.part, known)
        _time_all(due, raw, options.budget, run, line_of)
    return _save_gradients(gradients.read(raw), folder, [raw])


def _save_gradients(entries: Sequence[gradients.Entry], folder: Path, files: Sequence[Path]) -> None:
    """The tables of all machines that raw times are of."""
    if not entries:
        named = ", ".join(map(str, files)) or folder
        raise ValueError(f"no times of gradients in {named}; a GPU's are of convolutions of --kinds highest")
    for machine in {gradients.machine_of(entry.run) for entry in entries}:
        made = gradients.table_of(machine, [entry for entry in entries if gradients.machine_of(entry.run) == machine])
        path = folder / f"{gradient_table.slug_of(machine)}{_ENDINGS[0]}"
        gradient_table.save(path, made)
        print(f"{gradients.summary(made)}\ntable: {path}, raw times: {', '.join(map(str, files))}")
    gradient_table.forget()


def _gpu(number: int) -> jax.Device:
    gpus = jax.local_devices() if jax.default_backend() == "gpu" else []
    found = next((gpu for gpu in gpus if (gpu.local_hardware_id or 0) == number), None)
    if found is None:
        raise ValueError(f"--device {number}: JAX has no such GPU here, its devices are {jax.local_devices()}")
    return found


def _expansion(options: argparse.Namespace) -> tuple[Sequence[int] | None, Sequence[str] | None]:
    """Batches and kinds of products; calls of a file have their own."""
    if options.layers:
        return options.batch, options.kinds
    return options.batch or BATCHES, options.kinds or model.KINDS


def _layers(options: argparse.Namespace) -> list[Call]:
    if min(options.batch or BATCHES) < 1:
        raise ValueError(f"--batch {min(options.batch)} is not 1 or more")
    unknown = [name for name in options.network or () if name not in models.NETWORKS]
    if unknown:
        raise ValueError(f"--network {unknown[0]!r} is not one of {', '.join(models.NETWORKS)}")
    return workloads.of_file(options.layers) if options.layers else workloads.of_networks(options.network or NETWORKS)


# --- raw times -------------------------------------------------------------------------------------------------------


def _due(
    calls: Iterable[_Timed], key_of: Callable[[_Timed], _Key | None], part: tuple[int, int], known: Sequence[_Key]
) -> dict[_Key, _Timed]:
    """The calls of a part, such as (1, 4), that have no times yet, by key."""
    first, step = part
    keys = {key: call for call in calls if (key := key_of(call)) is not None}
    done = set(known)
    return {key: call for key, call in itertools.islice(keys.items(), first - 1, None, step) if key not in done}


def _time_all(
    due: Mapping[_Key, _Timed],
    raw: Path,
    minutes: float,
    run: Mapping[str, Any],
    line_of: Callable[[_Key, _Timed], Mapping[str, Any]],
) -> None:
    """Time calls and write each down at once, so that nothing is lost by stopping."""
    raw.parent.mkdir(parents=True, exist_ok=True)
    raw_times.cut_off(raw)
    start = time.monotonic()
    with raw.open("a", encoding="utf-8") as file:
        raw_times.write(file, {"run": run})
        for done, (key, call) in enumerate(due.items()):
            spent = time.monotonic() - start
            if spent > 60 * minutes:
                print(f"\n{len(due) - done} of {len(due)} are left: the budget is spent", file=sys.stderr)
                return
            left = f", some {spent / done * (len(due) - done):.0f} s left" if done else ""
            print(f"\r{done}/{len(due)}  {spent:.0f} s{left} ", end="", file=sys.stderr, flush=True)
            raw_times.write(file, line_of(key, call))
    print(file=sys.stderr)


# --- the table of a GPU ----------------------------------------------------------------------------------------------


def table_of(device: devices.Device, entries: Sequence[raw_times.Entry]) -> Table:
    """The table of a GPU from raw times."""
    runs = list({json.dumps(entry.run, sort_keys=True): entry.run for entry in entries}.values())
    of_key: dict[Key, list[raw_times.Entry]] = collections.defaultdict(list)
    for entry in entries:
        if not entry.key.pool:
            of_key[entry.key].append(entry.of_candidates_left(device))
    rows = [row for row in (_row(found, runs) for found in of_key.values()) if row is not None]
    return Table(device.name, device.multiprocessors, *raw_times.with_used_runs(rows, runs))


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
    if us > table.LEAST_GAIN * xla:
        best, us = measure.XLA, xla
    return Row(entry.key, measure.candidate_of(best), us, xla, runs.index(entry.run))


# --- models ----------------------------------------------------------------------------------------------------------


def _fit(files: Sequence[Path], out: Path | None) -> None:
    """Make the models and tables of GPUs, and the tables of CPUs, from raw times."""
    folder = out or folders.cache_folder()
    files = files or sorted(folders.cache_folder().glob(f"*{_ENDINGS[1]}"))
    entries = [entry for file in files for entry in raw_times.read(file, must_exist=True)]
    of_cpus = [entry for file in files for entry in cpu.read(file, must_exist=True)]
    times = raw_times.times_of(entries)
    if not times and not of_cpus:
        raise ValueError(f"no raw times of a known device in {', '.join(map(str, files)) or folders.cache_folder()}")
    if times:
        _fit_gpus(times, entries, folder)
    for here in {devices.Cpu(**entry.run["cpu"]) for entry in of_cpus}:
        of_one = [entry for entry in of_cpus if devices.Cpu(**entry.run["cpu"]) == here]
        cpu_table.save(folder / f"{here.slug}.json", cpu.table_of(here, of_one))
        print(f"table: {folder / here.slug}.json")
    cpu_table.forget()


def _fit_gpus(times: Sequence[raw_times.Time], entries: Sequence[raw_times.Entry], folder: Path) -> None:
    """Fit the models' constants, of one GPU for it, of several as the shipped file is; make the GPUs' tables again."""
    names = {each.device.name for each in times}
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


def cpu_summary(made: cpu_table.Table) -> str:
    """A CPU's rows by kind and operation: how many, for which zeros the native call runs, and its gains over XLA."""
    groups: dict[tuple[str, str], list[cpu_table.Row]] = collections.defaultdict(list)
    for row in made.rows:
        groups[row.key.kind, "dense" if row.key.is_dense else "conv_pool" if row.key.pool else "conv"].append(row)
    heads = ("always", "below", "never", "sparsest", "densest")
    lines = [f"{'kind':8} {'op':10} {'rows':>5} " + " ".join(f"{head:>8}" for head in heads)]
    for (kind, op), rows in sorted(groups.items()):
        counts = [sum(row.below == cpu_table.ALWAYS for row in rows), 0, sum(row.below == 0 for row in rows)]
        counts[1] = len(rows) - sum(counts)
        gains = [geometric_mean(each) for each in zip(*(row.gains for row in rows), strict=True)]
        numbers = [*(f"{count:8}" for count in counts), *(f"{gain:8.2f}" for gain in gains)]
        lines.append(f"{kind:8} {op:10} {len(rows):5} " + " ".join(numbers))
    return "\n".join(lines)


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        print(line)


def described(device: str) -> Iterator[str]:
    """Which tables are in use for a GPU."""
    return _described(table.paths(device), table.load, summary)


def described_cpu(here: devices.Cpu) -> Iterator[str]:
    """Which tables are in use for a CPU."""
    return _described(cpu_table.paths(here), cpu_table.load, cpu_summary)


def _described(paths: Mapping[str, Path], load: Callable[[Path], Any], text_of: Callable[[Any], str]) -> Iterator[str]:
    for name, path in paths.items():
        if not path.exists():
            yield f"{name}: none of this device; it would be {path}"
            continue
        found = load(path)
        dates = sorted(str(run.get("date", "?"))[:10] for run in found.runs)
        yield f"{name}: {path}, {len(found.rows)} rows, {dates[0] if dates else '?'} to {dates[-1] if dates else '?'}"
        yield text_of(found)
