"""Whole networks against XLA: every precision and batch, with a trained network's zeros and without any.

    python -m benchmarks networks --both-flags --prepared networks --json networks.json
    python -m benchmarks networks --prepare --prepared networks   # in advance: no GPU and no extension is needed
    python -m benchmarks networks --batch 1 --cases 'vgg19|default' --prepared networks --json part.json
    python -m benchmarks networks --list benchmarks/results/h200/networks.json   # measures nothing

Sides: "xla" is the same network in dense XLA, "auto" is `implementation=None`, "fused" is that with all chains (up to 8
images), "planned" is the plan that `--plans FOLDER` holds as NETWORK_KIND_BATCH.json. Batch norm is folded on all of
them, weights are seeded, their zeros those of a trained network, and once more with biases so high that no ReLU clips
anything: a gain that stays there is not from zeros. With `--weights constants` weights are constants of the program, as
in `jax.jit(lambda x: model(x))`: a call then hands over one array, not hundreds. With `--weights packed` "auto" and
"fused" have arguments as `jax_sparse_conv.nnx.pack` leaves them, which is for a CPU; the others have theirs as they
are. Sides take turns on rotated images, calls are dispatched without waiting, times are medians per call
(those of calls that are waited for one by one are in --json, "latency_us").

Every network runs in a process of its own, and what XLA tunes is compiled alone. If the process dies, the side that it
was at is recorded as skipped and the rest goes on in another. Where JAX_COMPILATION_CACHE_DIR is set, later processes
find there what earlier ones compiled. --json is written after every row.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import command, prepared, results
from benchmarks.common.cases import KINDS
from benchmarks.networks import network_rows
from benchmarks.networks.network_cases import (
    ALL,
    ARGUMENTS,
    DUMPED,
    SIDES,
    WEIGHTS,
    Case,
    Limits,
    Row,
    flags_label,
    measure,
)
from jax_sparse_conv import models
from jax_sparse_conv._src import environment

NETWORKS = ("vgg19", "resnet50", "densenet121", "regnetx_16gf")
BATCHES = (1, 8, 32)

_SUITE = "networks"
_TAIL = 20  # lines of a process's output among which the reason of its end is looked for
_REASON = re.compile(r"error|fail|unknown|abort|status|fatal", re.IGNORECASE)
_START = time.perf_counter()


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table and write a JSON file; the result is the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = _parser().parse_args(arguments)
    try:
        if options.child:
            return _child(options, json.loads(options.child))
        _check(options)
        if options.prepare:
            _prepare(options)
            return 0
        rows = network_rows.read(options.list) if options.list else _measured(options, arguments)["rows"]
    except (OSError, ValueError) as error:
        print(f"benchmarks {_SUITE}: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    print(network_rows.table(rows))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = command.parser(_SUITE, __doc__)
    add = parser.add_argument
    add("--networks", nargs="+", choices=sorted(models.NETWORKS), default=list(NETWORKS), metavar="NAME")
    add("--kinds", nargs="+", choices=tuple(KINDS), default=list(KINDS), help="precision or dtype")
    add("--batch", nargs="+", type=int, default=list(BATCHES))
    add("--cases", default="", help="regular expression: only cases NETWORK/KIND/BATCH in which it is found")
    add("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    add("--plans", type=Path, help="folder of plans, NETWORK_KIND_BATCH.json")
    add("--weights", choices=WEIGHTS, default=ARGUMENTS, help="of each call, so packed once, or constants")
    add("--prepared", type=Path, help="keep networks with their weights here, for the next run")
    add("--prepare", action="store_true", help="only build the networks of --prepared, on the CPU")
    add("--repeats", type=int, default=30)
    add("--quick", action="store_true", help="tiny networks: does everything run?")
    add("--json", type=Path)
    flags = parser.add_mutually_exclusive_group()
    flags.add_argument("--both-flags", action="store_true", help="XLA's default flags and command buffers; the faster")
    flags.add_argument("--list", type=Path, nargs="+", metavar="FILE", help="print the table of these; measure nothing")
    add("--child", help=argparse.SUPPRESS)
    return parser


def _check(options: argparse.Namespace) -> None:
    command.check_folder("--json", options.json)
    if options.prepare and options.prepared is None:
        raise ValueError("--prepare wants --prepared FOLDER")
    if min(options.repeats, *options.batch) < 1:
        raise ValueError("--repeats and --batch must be at least 1")
    if not options.list and not _cases(options):
        raise ValueError(f"--cases {options.cases!r} is found in no case, such as {NETWORKS[0]}/default/1")


def _cases(options: argparse.Namespace) -> list[Case]:
    every = itertools.product(options.networks, options.batch, options.kinds)
    cases = [Case(network, kind, batch, options.weights) for network, batch, kind in every]
    return [case for case in cases if re.search(options.cases, case.name)]


def _progress(text: str) -> None:
    print(f"{time.perf_counter() - _START:6.1f} s  {text}", file=sys.stderr, flush=True)


# --- the process that starts others: it asks nothing of JAX, so as not to take the GPU --------------------------------


def _measured(options: argparse.Namespace, arguments: Sequence[str]) -> dict[str, Any]:
    cases = _cases(options)
    content: dict[str, Any] = {"command": command.portable(_SUITE, arguments), "repeats": options.repeats, "rows": []}
    content |= {"weights": options.weights, "quick": options.quick, "runs": {}}
    with tempfile.TemporaryDirectory() as folder:
        options.prepared = options.prepared or Path(folder) / "networks"
        _prepare(options)
        flag_sets = ("", command.COMMAND_BUFFERS) if options.both_flags else ("",)
        for name, flags in itertools.product(_names(cases), flag_sets):
            _isolated(options, [case for case in cases if case.network == name], flags, content, Path(folder))
    return content


def _names(cases: Iterable[Case]) -> list[str]:
    """Of the cases' networks."""
    return list(dict.fromkeys(case.network for case in cases))


def _prepare(options: argparse.Namespace) -> None:
    """Build the networks that are not there yet, side by side, on the CPU."""
    processes = {}
    for name in _names(_cases(options)):
        spec = {"network": name, "prepare": True}
        environ = {**os.environ, "JAX_PLATFORMS": "cpu"}
        processes[name] = subprocess.Popen(_line(options, spec), env=environ, stdout=subprocess.DEVNULL)
    ended = {name: process.wait() for name, process in processes.items()}
    if any(ended.values()):
        failed = ", ".join(f"{name} with status {status}" for name, status in ended.items() if status)
        raise ValueError(f"building networks failed: {failed}")
    _progress("networks are there")


def _isolated(
    options: argparse.Namespace, cases: Sequence[Case], flags: str, content: dict[str, Any], folder: Path
) -> None:
    """The cases of one network, in as many processes as it takes: one more whenever one dies."""
    left = [case.name for case in cases]
    by_name = {case.name: case for case in cases}
    lost: dict[str, dict[str, str]] = {}
    dumps = Path(tempfile.mkdtemp(prefix="dumps", dir=folder))  # programs have the same names under other flags

    def keep(row: Row, label: str) -> None:
        content["runs"].setdefault(label, []).append(row)
        content["rows"] = network_rows.best(content["runs"])
        if "date" in content:  # what the network's process has said first
            results.add(options.json, "networks", content)
        left.remove(row["case"])

    label = "command buffers" if "command_buffer" in flags + os.environ.get("XLA_FLAGS", "") else "default"
    while left:
        spec = {"network": cases[0].network, "cases": left, "skipped": lost, "dumps": str(dumps)}
        running, reason = _one_process(_line(options, spec), flags, dumps, content, lambda row: keep(row, label))
        if reason is None:
            return
        _progress(f"{reason}; at {running or 'the start'}")
        for name, side in running:
            sides = [*by_name[name].sides(tuple(options.sides), options.plans)] if side == ALL else [side]
            lost[name] = {**dict.fromkeys(sides, reason), **lost.get(name, {})}
        for name in [] if running else list(left):
            keep({**_described(by_name[name]), "skipped": dict.fromkeys(options.sides, reason)}, label)


def _described(case: Case) -> Row:
    return {"case": case.name, "network": case.network, "kind": case.kind, "batch": case.batch, "us": {}}


def _line(options: argparse.Namespace, spec: Mapping[str, Any]) -> list[str]:
    """The command of a process that does what `spec` says."""
    line = [sys.executable, "-m", "benchmarks", _SUITE, "--child", json.dumps(spec), "--repeats", str(options.repeats)]
    line += ["--prepared", str(options.prepared), "--weights", options.weights, "--sides", *options.sides]
    line += ["--plans", str(options.plans)] if options.plans else []
    return [*line, "--quick"] if options.quick else line


def _one_process(
    line: Sequence[str], flags: str, dumps: Path, content: dict[str, Any], keep: Callable[[Row], None]
) -> tuple[list[tuple[str, str]], str | None]:
    """What it was at, as (case, side), and why it ended, None if well. XLA's thunks go to the folder of dumps."""
    environ = command.with_flags(flags, f"--xla_dump_to={dumps}", "--xla_dump_hlo_module_re=" + DUMPED)
    running: list[tuple[str, str]] = []
    tail: list[str] = []
    with subprocess.Popen(line, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for text in process.stdout:
            event = _event(text)
            if event is None:
                tail = [*tail[1 - _TAIL :], text.strip()]
                print(text, end="", file=sys.stderr, flush=True)
            elif "begin" in event:
                running.append((event["begin"], event["side"]))
            elif "end" in event:
                running.remove((event["end"], event["side"]))
            elif "row" in event:
                keep(event["row"])
            else:
                content.update({**event["header"], **content})
    if process.returncode == 0:
        return [], None
    return running, f"{_ending(process.returncode)}: {next(filter(_REASON.search, reversed(tail)), '')[:300]}"


def _event(text: str) -> dict[str, Any] | None:
    if not text.startswith('{"event": '):
        return None
    found: dict[str, Any] = json.loads(text)["event"]
    return found


def _ending(status: int) -> str:
    return f"the process ended by {signal.Signals(-status).name}" if status < 0 else f"the process ended with {status}"


# --- the process of one network ---------------------------------------------------------------------------------------


def _child(options: argparse.Namespace, spec: Mapping[str, Any]) -> int:
    lock = threading.Lock()

    def say(event: Mapping[str, Any]) -> None:
        with lock:
            print(json.dumps({"event": event}), flush=True)

    network = prepared.load(spec["network"], options.prepared, options.quick, _progress)
    beside = prepared.beside(network, options.prepared, options.quick, _progress)
    if spec.get("prepare"):
        return 0
    limits = Limits.measured(options.quick)
    flags = command.without_dumps(os.environ.get("XLA_FLAGS", ""))
    say({"header": {**environment.describe_run(), "xla_flags": flags, "limits": {**vars(limits)}}})
    for name in spec["cases"]:
        parts = name.split("/")
        case = Case(parts[0], parts[1], int(parts[2]), options.weights)
        skipped = spec["skipped"].get(name, {})
        row = measure(
            case, network, beside, tuple(options.sides), skipped, say,
            limits=limits, repeats=options.repeats, plans=options.plans, dumps=Path(spec["dumps"]),
        )  # fmt: skip
        row["flags"], row["xla_flags"] = flags_label(), flags
        times = ", ".join(f"{side} {us:.1f} us" for side, us in row["us"].items())
        _progress(f"{name}, {row['flags']} flags: {times}")
        say({"row": row})
    return 0
