"""Whole networks on a CPU beside other frameworks: onnxruntime, OpenVINO, PyTorch and its compiler Inductor.

    python -m benchmarks peers --prepared networks --json peers.json
    python -m benchmarks peers --networks resnet50 --batch 1 --threads 1 --repeats 5

All sides have the same network with the same weights. The dense network of this package is translated to PyTorch,
channels first, with biases in the convolutions and batch norms where there is a factor and a summand for each channel
(`to_torch`). From there it goes to onnxruntime and OpenVINO as ONNX. PyTorch runs it as it is, channels last, and
compiled by Inductor with frozen weights. "ours" is `jit_inference` of the network with `implementation=None`, "xla" is
dense XLA with constant weights.

Weights are seeded, with the zeros of a trained network ("profile"), and once more with biases so high that no ReLU
clips anything ("none"). Errors are relative (Frobenius) to XLA in float64. A side that is further off than rounding
explains is left out. In bfloat16 OpenVINO is told so by its precision hint, and onnxruntime is skipped. What is not
installed is skipped, too, and the row says why.

All sides have the same number of threads. XLA's pool, and so ours, has one for each core that the process may use:
each row is of a process of its own on the first `--threads` cores. Sides take turns in streaks of calls on several
images, each waited for, and the first call of a streak is not timed. The ratio is the time of the fastest other
framework over ours; XLA is not among them. "others %" says how much of the cores other processes took meanwhile:
such work slows some sides more than others, PyTorch most.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import command, prepared, results, tables
from benchmarks.networks import peer_sides
from benchmarks.networks.peer_sides import KINDS, OURS, PEERS, XLA
from benchmarks.suites.scaling import cores_in_order
from jax_sparse_conv import models
from jax_sparse_conv._src import environment
from jax_sparse_conv._src.plans import timing

NETWORKS = ("vgg19", "resnet50", "densenet121", "densenet169")
BATCHES = (1, 8)
PROFILE, NONE = "profile", "none"
ZEROS = (PROFILE, NONE)

_SUITE = "peers"
_MOST_OFF = {"float32": 1e-3, "bfloat16": 0.7}  # ResNet-50 with trained zeros is off by 0.4, by any
_MESSAGE = 300  # characters
_RAISED = (ArithmeticError, AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError)
_COLUMNS = (
    ("network", "network", "<", "{}"),
    ("kind", "kind", "<", "{}"),
    ("batch", "batch", ">", "{}"),
    ("threads", "threads", ">", "{}"),
    ("zeros_percent", "zeros %", ">", "{:.1f}"),
    *((side, f"{name} ms", ">", "{}") for side, name in {**PEERS, XLA: "XLA", OURS: "ours"}.items()),
    ("ratio", "ratio", ">", "{}"),
    ("best_ratio", "of best", ">", "{}"),
    ("error", "error", ">", "{}"),
    ("others_percent", "others %", ">", "{:.0f}"),
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A row: a network in a kind, with a batch of images and with or without zeros."""

    network: str
    kind: str
    batch: int
    zeros: str

    @property
    def name(self) -> str:
        return f"{self.network}/{self.kind}/{self.batch}/{self.zeros}"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every case, print its table and write a JSON file; the result is the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = _parser().parse_args(arguments)
    if options.child:
        options.child.write_text(json.dumps(_child(options)), encoding="utf-8")
        return 0
    try:
        _check(options)
        failed = _measured(options, command.portable(_SUITE, arguments))
    except (OSError, ValueError) as error:
        print(f"benchmarks {_SUITE}: {error}", file=sys.stderr)
        return 1
    for name, reason in failed.items():
        print(f"benchmarks {_SUITE}: {name}: {reason}", file=sys.stderr)
    return int(bool(failed))


def _parser() -> argparse.ArgumentParser:
    parser = command.parser(_SUITE, __doc__)
    add: Any = parser.add_argument
    add("--networks", nargs="+", choices=sorted(models.NETWORKS), default=list(NETWORKS), metavar="NAME")
    add("--kinds", nargs="+", choices=KINDS, default=["float32"])
    add("--batch", nargs="+", type=int, default=list(BATCHES))
    add("--zeros", nargs="+", choices=ZEROS, default=list(ZEROS), help="a trained network's, or none at all")
    add("--peers", nargs="*", choices=tuple(PEERS), default=list(PEERS))
    add("--threads", type=int, help="of each side; by default a thread for each core that the process may use")
    add("--prepared", type=Path, help="keep networks with their weights here, for the next run")
    add("--repeats", type=int, default=20)
    add("--seconds", type=float, default=120.0, help="no further repeats after so long, but three")
    add("--quick", action="store_true", help="tiny networks: does everything run?")
    add("--json", type=Path)
    add("--child", type=Path, help=argparse.SUPPRESS)
    return parser


def _check(options: argparse.Namespace) -> None:
    command.check_folder("--json", options.json)
    cores = len(os.sched_getaffinity(0))
    options.threads = options.threads or cores
    if not 1 <= options.threads <= cores:
        raise ValueError(f"--threads {options.threads}: this process may use {cores} cores")
    if min(options.repeats, *options.batch) < 1:
        raise ValueError("--repeats and --batch must be at least 1")


# --- the process that starts others -----------------------------------------------------------------------------------


def _measured(options: argparse.Namespace, line: str) -> dict[str, str]:
    """Why cases have no row, by name; the others' rows are printed and written."""
    every = itertools.product(options.networks, options.kinds, options.batch, options.zeros)
    content: results.Content = {"command": line, "repeats": options.repeats, "quick": options.quick}
    rows: list[results.Row] = []
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        options.prepared = options.prepared or Path(folder) / "networks"
        for case in itertools.starmap(Case, every):
            try:
                found = _isolated(options, case, Path(folder))
            except ValueError as error:
                failed[case.name] = str(error)
                continue
            rows.append(found["row"])
            content = {**found["header"], **content}  # of the first
            print(table(rows[-1:]), flush=True)
            results.add(options.json, _SUITE, {**content, "rows": rows, "failed": failed})
    return failed


def _isolated(options: argparse.Namespace, case: Case, folder: Path) -> dict[str, Any]:
    """The row of a case and what its process says of itself, on the first cores."""
    path = folder / "row.json"
    line = [sys.executable, "-m", "benchmarks", _SUITE, "--child", str(path), "--threads", str(options.threads)]
    line += ["--networks", case.network, "--kinds", case.kind, "--batch", str(case.batch), "--zeros", case.zeros]
    line += ["--repeats", str(options.repeats), "--seconds", str(options.seconds)]
    line += ["--prepared", str(options.prepared), "--peers", *options.peers, *["--quick"] * options.quick]
    environ = {**os.environ, "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": str(options.threads)}
    environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores_in_order()[: options.threads])  # a process inherits its parent's
    try:
        status = subprocess.run(line, env=environ).returncode
    finally:
        os.sched_setaffinity(0, allowed)
    if status:
        raise ValueError(f"its process ended with {signal.Signals(-status).name if status < 0 else status}")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def table(rows: Sequence[results.Row]) -> str:
    """Rows as text, and below them what was skipped and why.

    "ratio" is the fastest peer's median over ours, "of best" the same of best times. The error is ours, to float64.
    "others %" is the share of the machine's cores that other processes took meanwhile.
    """
    lines = [
        {
            **row,
            **{side: f"{row['ms'][side]:.1f}" if side in row["ms"] else "-" for side in (*PEERS, XLA, OURS)},
            **{key: "-" if row[key] is None else f"{row[key]:.2f}" for key in ("ratio", "best_ratio")},
            "error": f"{row['error'][OURS]:.1e}" if OURS in row["error"] else "-",
        }
        for row in rows
    ]
    skipped = [f"{side} skipped: {reason}" for row in rows for side, reason in row["skipped"].items()]
    return "\n".join([tables.aligned(lines, _COLUMNS), *dict.fromkeys(skipped)])


# --- the process of one row -------------------------------------------------------------------------------------------


def _child(options: argparse.Namespace) -> dict[str, Any]:
    case = Case(options.networks[0], options.kinds[0], options.batch[0], options.zeros[0])
    return {"header": environment.describe_run(), "row": measure(case, options)}


def measure(case: Case, options: argparse.Namespace) -> results.Row:
    """The row of a case, in this process, whose cores are as many as `options.threads`."""

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    network = prepared.load(case.network, options.prepared, options.quick, say)
    if case.zeros == NONE:
        beside = prepared.beside(network, options.prepared, options.quick, say)
        network = dataclasses.replace(network, weights=beside.weights, zeros_percent=beside.zeros_percent)
    images = [network.batch(case.batch, shift) for shift in range(timing.ROTATIONS)]
    exact = peer_sides.exact(network, images[0])
    skipped = {peer: reason for peer in options.peers if (reason := peer_sides.missing(peer))}
    wanted = [OURS, XLA, *(peer for peer in options.peers if peer not in skipped)]
    with tempfile.TemporaryDirectory() as folder:
        sides = peer_sides.Sides(network, images, case.kind, options.threads, Path(folder))
        calls, errors = _made(sides, wanted, exact, skipped)
        others = _OtherWork()
        times = timing.streaks(calls, [(index,) for index in range(len(images))], options.repeats, 1, options.seconds)
    ms, best = ({side: 1e3 * getattr(each, key) for side, each in times.items()} for key in ("median", "best"))
    return {
        **dataclasses.asdict(case),
        "threads": options.threads,
        "zeros_percent": network.zeros_percent,
        "ms": ms,
        "best_ms": best,
        "quartiles_ms": {side: [1e3 * each.low, 1e3 * each.high] for side, each in times.items()},
        "error": errors,
        "fastest": fastest(ms),
        **{key: ratio_of(found) for key, found in (("ratio", ms), ("best_ratio", best))},
        "others_percent": others.percent(),
        "peer_versions": peer_sides.versions(),
        "skipped": skipped,
    }


def _made(
    sides: peer_sides.Sides, wanted: Sequence[str], exact: np.ndarray, skipped: dict[str, str]
) -> tuple[dict[str, peer_sides.Call], dict[str, float]]:
    """The sides that compute the network, and how far each is off; why others are none goes into `skipped`."""
    calls, errors = {}, {}
    for side in wanted:
        try:
            call = sides.made(side)
            found = np.asarray(call(0), np.float64)
        except _RAISED as error:
            skipped[side] = f"{type(error).__name__}: {' '.join(str(error).split())}"[:_MESSAGE]
            continue
        off = float(np.linalg.norm(found - exact) / np.linalg.norm(exact))
        if off <= _MOST_OFF[sides.kind]:
            calls[side], errors[side] = call, off
        else:
            skipped[side] = f"its result is off by {off:.1e}"
    return calls, errors


class _OtherWork:
    """What other processes do on the machine, from when this is made."""

    def __init__(self) -> None:
        self.before = self._now()

    def percent(self) -> float:
        """Of the time of all cores."""
        work, own, seconds = (now - before for now, before in zip(self._now(), self.before, strict=True))
        return max(0.0, 100 * (work - own) / (seconds * (os.cpu_count() or 1)))

    @staticmethod
    def _now() -> tuple[float, float, float]:
        """Seconds of work of all cores, of this process, and on the clock."""
        user, nice, system, _, _, *interrupts = Path("/proc/stat").read_text(encoding="utf-8").split()[1:9]
        work = sum(map(int, (user, nice, system, *interrupts))) / os.sysconf("SC_CLK_TCK")
        return work, time.process_time(), time.perf_counter()


def fastest(times: Mapping[str, float]) -> str | None:
    """The peer of the least time; None without any."""
    return min((peer for peer in PEERS if peer in times), key=lambda peer: times[peer], default=None)


def ratio_of(times: Mapping[str, float]) -> float | None:
    """The fastest peer's time over ours; None without both."""
    peer = fastest(times)
    return None if peer is None or OURS not in times else times[peer] / times[OURS]
