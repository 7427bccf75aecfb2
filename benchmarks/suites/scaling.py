"""How the CPU kernels scale with threads, and whether uneven zeros keep them busy.

    python -m benchmarks scaling --threads 1 2 4 8 16 --json results.json

Every number of threads has a process of its own, bound to as many cores before JAX starts, so that XLA's pool has that
many threads; cores that share their units with another come last. Each layer is timed against XLA:CPU with the same
threads on maps of i.i.d. zeros and on maps with as many zeros of which half of the rows are empty: "uneven" is the time
of the latter over that of the former, 1.0 where the work is dealt out evenly. Weights are constants of the programs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import help

DEFAULT_LAYERS = r"^conv 3x3 (64->64 56|128->128 28|256->256 14|512->512 14|512->512 7|128->32 14)"
KINDS = ("iid", "uneven")

_COLUMNS = (
    ("layer", "layer", "<", "{}"),
    ("batch", "batch", ">", "{}"),
    ("maps", "maps", "<", "{}"),
    ("threads", "threads", ">", "{}"),
    ("xla_us", "XLA us", ">", "{:.0f}"),
    ("ours_us", "ours us", ">", "{:.0f}"),
    ("ratio", "ratio", ">", "{:.2f}"),
    ("xla_speedup", "XLA speed-up", ">", "{:.2f}"),
    ("ours_speedup", "our speed-up", ">", "{:.2f}"),
    ("uneven", "uneven", ">", "{:.2f}"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Time every number of threads, print a table and write a JSON file; the result is the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = _parser().parse_args(arguments)
    cores = cores_in_order()
    threads = [count for count in options.threads if count <= len(cores)]
    if options.bind is not None:
        os.sched_setaffinity(0, options.bind)  # before JAX is imported, whose pool is of this size
        options.json.write_text(json.dumps(_timed(options)), encoding="utf-8")
        return 0
    from benchmarks.common import command, results, tables
    from jax_sparse_conv._src import environment

    try:
        command.check_folder("--json", options.json)
        if not threads:
            raise ValueError(f"--threads {options.threads}: this process may use {len(cores)} cores")
        runs = [_bound(arguments, cores[:count]) for count in threads]
    except (OSError, ValueError) as error:
        print(f"benchmarks scaling: {error}", file=sys.stderr)
        return 1
    rows = rows_of(runs)
    print(tables.aligned(rows, _COLUMNS))
    for run in runs:
        print(f"{len(run['cores'])} threads: {run['peak_flops'] / 1e9:.0f} GFLOP/s in registers")
    if options.json:
        content = {**environment.describe_run(), "command": command.portable("scaling", arguments)}
        content |= {"zeros_percent": options.zeros, "repeats": options.repeats}
        content |= {"limits": [{key: run[key] for key in ("cores", "peak_flops")} for run in runs], "rows": rows}
        results.add(options.json, "scaling", content)
    return 0


def cores_in_order() -> list[int]:
    """The cores of this process, first one of every group that shares its units, then the others."""
    allowed = sorted(os.sched_getaffinity(0))
    seen: dict[str, int] = {}
    ranks = {}
    for core in allowed:
        siblings = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
        group = siblings.read_text(encoding="utf-8") if siblings.is_file() else str(core)
        ranks[core] = seen[group] = seen.get(group, -1) + 1
    return sorted(allowed, key=lambda core: (ranks[core], core))


def uneven(shape: Sequence[int], zeros: int, seed: int) -> Any:
    """A map [N, H, W, C] with `zeros` percent of zeros: all of the lower half of its rows, i.i.d. ones in the upper."""
    import numpy as np

    rng = np.random.default_rng([seed, zeros])
    full = shape[1] // 2
    nonzero = min(1.0, (1 - zeros / 100) * shape[1] / full)
    values = np.abs(rng.standard_normal(shape, np.float32)) + np.float32(1e-3)
    values[rng.random(shape, np.float32) >= nonzero] = 0
    values[:, full:] = 0
    return values


def _bound(arguments: Sequence[str], cores: Sequence[int]) -> dict[str, Any]:
    """What a process on these cores measures."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.json"
        bind = ["--json", str(path), "--bind", *map(str, cores)]
        line = [sys.executable, "-m", "benchmarks", "scaling", *arguments, *bind]
        status = subprocess.run(line).returncode
        if status:
            raise ValueError(f"the process on cores {cores} ended with status {status}")
        return dict(json.loads(path.read_text(encoding="utf-8")))


def _timed(options: argparse.Namespace) -> dict[str, Any]:
    """Every layer on the cores that this process has."""
    import jax.numpy as jnp

    from benchmarks.common import cases, data
    from jax_sparse_conv._src import _native
    from jax_sparse_conv._src.plans import timing

    rows = []
    chosen = [layer for layer in cases.CPU if re.search(options.layers, layer.name)]
    for layer, batch in itertools.product(chosen, options.batch):
        kernel, bias = map(jnp.asarray, data.weights(layer, 0))
        implementations = {"xla": "xla", "ours": None if options.implementation == "auto" else options.implementation}
        functions = {side: _function(kernel, bias, name) for side, name in implementations.items()}
        for kind in KINDS:
            maps = [_map(kind, layer, batch, options.zeros, seed) for seed in range(timing.ROTATIONS)]
            times = timing.streaks(functions, [(jnp.asarray(x),) for x in maps], options.repeats)
            row = {"layer": layer.name, "batch": batch, "maps": kind}
            row |= {f"{name}_us": found.microseconds for name, found in times.items()}
            rows.append(row | {f"{name}_best_us": 1e6 * found.best for name, found in times.items()})
    return {"cores": sorted(os.sched_getaffinity(0)), "peak_flops": _native.cpu_limits()["flops"], "rows": rows}


def _function(kernel: Any, bias: Any, implementation: str | None) -> Any:
    import jax

    import jax_sparse_conv as jsc

    settings = {"activation": "relu", "precision": "highest", "implementation": implementation}
    return jax.jit(lambda x: jsc.conv(x, kernel, bias, **settings))


def _map(kind: str, layer: Any, batch: int, zeros: int, seed: int) -> Any:
    from benchmarks.common import data

    return data.iid_map(layer, batch, zeros, seed) if kind == "iid" else uneven(layer.x_shape(batch), zeros, seed)


def rows_of(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each layer, kind of map and number of threads; speed-ups are over the first run's time."""
    rows = []
    for index, first in enumerate(runs[0]["rows"]):
        for run in runs:
            row, threads = run["rows"][index], len(run["cores"])
            peer = next(other for other in run["rows"] if _same(other, row, KINDS[0]))
            found = {"threads": threads, **row, "ratio": row["xla_us"] / row["ours_us"]}
            found |= {f"{side}_speedup": first[f"{side}_us"] / row[f"{side}_us"] for side in ("xla", "ours")}
            rows.append(found | {"uneven": row["ours_us"] / peer["ours_us"]})
    return rows


def _same(other: dict[str, Any], row: dict[str, Any], kind: str) -> bool:
    return (other["layer"], other["batch"], other["maps"]) == (row["layer"], row["batch"], kind)


def _parser() -> argparse.ArgumentParser:
    parser = help.parser("scaling", __doc__)
    add = parser.add_argument
    add("--threads", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="those beyond this machine's are left out")
    add(
        "--layers",
        default=DEFAULT_LAYERS,
        help="layers of the set cpu, a regular expression",
    )
    add("--zeros", type=int, default=85, help="percentage of zeros, at least 50")
    add("--batch", type=int, nargs="+", default=[1])
    add("--implementation", default="auto", help="auto is None")
    add("--repeats", type=int, default=5)
    add("--json", type=Path)
    add("--bind", type=int, nargs="+", help=argparse.SUPPRESS)
    return parser
