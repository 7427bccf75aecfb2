"""Where a network's time goes on a CPU: every operation of the compiled program, ours and XLA's.

    python -m benchmarks profile --networks resnet50 vgg19 --batch 1 --json profile.json
    python -m benchmarks profile --networks densenet121 --batch 4 --step

Without --step it is inference by `jax_sparse_conv.nnx.jit_inference`, with seeded weights and the zeros of a trained
network; with it the training step of the suite `training`. Times are XLA's own, of a trace by `jax.profiler`: medians
over the calls of one operation, then added up over all operations of a kind and of the same shapes. "waiting" is the
rest of the call: between operations, and before the first and after the last. A convolution's rate counts the products
with zeros, too.

What a call of a kernel spends on lists and on products is a count of instructions by function, in the suite
`instructions`.
"""

from __future__ import annotations

import argparse
import collections
import gzip
import json
import math
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

import jax_sparse_conv as jsc
from benchmarks.common import command, suite, tables
from benchmarks.networks import training
from benchmarks.networks.packed import prepare
from jax_sparse_conv import models
from jax_sparse_conv._src.cli import photograph

NETWORKS = ("vgg19", "resnet50", "densenet121")
XLA, WAITING = "XLA", "waiting"
_CALL = re.compile(
    r'%(\S+) = \S+\[([\d,]*)\].*custom_call_target="jsc_(\w+)", operand_layout_constraints=\{(.*?)\}, api'
)
_SHAPE = re.compile(r"\w+\[([\d,]*)\]")
_HOLDS_OTHERS = re.compile(r"(cond|while|call)\b")  # whose own operations are events, too
_COLUMNS = (
    ("kind", "kind", "<", "{}"),
    ("operation", "operation", "<", "{}"),
    ("calls", "calls", ">", "{}"),
    ("ms", "ms", ">", "{:.3f}"),
    ("percent", "%", ">", "{:.1f}"),
    ("rate", "GFLOP/s", ">", "{}"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Profile every network, print its operations and write a JSON file; the result is the exit status."""
    return suite.run("profile", _parser(), argv, _cases, _table)


def _cases(options: argparse.Namespace) -> Iterator[list[tables.Row]]:
    if jax.default_backend() != "cpu":
        raise SystemExit("benchmarks profile: this is for CPUs; on a GPU nsys and ncu show each kernel")
    for name in options.networks:
        call, text = _step(name, options.batch) if options.step else _inference(name, options.batch)
        named = {"network": name, "batch": options.batch, "what": "training step" if options.step else "inference"}
        yield [named | measure(call, operations(text), options.repeats)]


def _table(rows: list[tables.Row]) -> str:
    (row,) = rows
    shares = ", ".join(f"{kind} {percent:.1f} %" for kind, percent in row["shares"].items())
    title = f"{row['network']}, batch {row['batch']}, {row['what']}, {row['ms']:.1f} ms: {shares}"
    shown = [each | {"rate": f"{each['gflops']:.0f}" if "gflops" in each else ""} for each in row["operations"]]
    return f"{title}\n{tables.aligned(shown, _COLUMNS)}\n"


def _inference(name: str, batch: int) -> tuple[Callable[[], Any], str]:
    model, x = prepare(name)
    x = x.repeat(batch, 0)
    function = jsc.nnx.jit_inference(model)
    return lambda: function(x), function.lower(x).compile().as_text() or ""


def _step(name: str, batch: int) -> tuple[Callable[[], Any], str]:
    network = models.NETWORKS[name]
    x = network.preprocess(photograph.batch_of(photograph.load(None, network.input_size), batch))
    step, weights, rest = training.step_of(name, None)
    return lambda: step(weights, rest, x), step.lower(weights, rest, x).compile().as_text() or ""


def operations(text: str) -> dict[str, tables.Row]:
    """The custom calls of compiled HLO, by their names in it: kind, shapes and dense operations."""
    return {match[1]: _described(*match.groups()[1:]) for match in map(_CALL.search, text.splitlines()) if match}


def _described(result: str, target: str, operands: str) -> tables.Row:
    shapes = [tuple(map(int, filter(None, each.split(",")))) for each in _SHAPE.findall(operands)]
    out = tuple(map(int, filter(None, result.split(","))))
    text = " * ".join("x".join(map(str, shape)) for shape in shapes[:2])
    row: tables.Row = {"kind": target.replace("_", " "), "operation": f"{text} -> {'x'.join(map(str, out))}"}
    if target == "kernel_gradient":
        row["flops"] = 2 * math.prod(shapes[1]) * math.prod(out[-4:-1])
    elif len(shapes) > 1 and len(shapes[1]) == 5 and len(out) == 4:
        row["flops"] = 2 * math.prod(out) * math.prod(shapes[1][1:4])
    return row


def measure(call: Callable[[], Any], known: Mapping[str, tables.Row], repeats: int) -> tables.Row:
    """Milliseconds of a call, percentages by kind, and each kind of operation and what is between them, longest first.

    Args:
      call: of a compiled program.
      known: its custom calls, as `operations` has them.
      repeats: how often it is traced.
    """
    for _ in range(2):
        jax.block_until_ready(call())
    walls, times = [], collections.defaultdict[str, list[float]](list)
    for _ in range(repeats):
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                start = time.perf_counter()
                jax.block_until_ready(call())
                walls.append(1e3 * (time.perf_counter() - start))
            for name, milliseconds in _events(Path(folder)).items():
                times[name].append(milliseconds)
    groups = collections.defaultdict[tuple[str, str], list[str]](list)
    for name in times:
        row = known.get(name, {"kind": XLA, "operation": re.sub(r"[.\d]+(clone)?$", "", name)})
        groups[row["kind"], row["operation"]].append(name)
    whole, rows = statistics.median(walls), []
    for (kind, operation), names in groups.items():
        ms = sum(statistics.median(times[name]) for name in names)
        row = {"kind": kind, "operation": operation, "calls": len(names), "ms": ms, "percent": 100 * ms / whole}
        flops = sum(known[name].get("flops", 0) for name in names if name in known)
        rows.append(row | ({"gflops": flops / ms / 1e6} if flops else {}))
    rest = max(0.0, whole - sum(row["ms"] for row in rows))
    rows.append({"kind": WAITING, "operation": "", "calls": 1, "ms": rest, "percent": 100 * rest / whole})
    shares = collections.Counter[str]()
    for row in rows:
        shares[row["kind"]] += row["percent"]
    return {"ms": whole, "shares": dict(shares.most_common()), "operations": sorted(rows, key=lambda row: -row["ms"])}


def _events(folder: Path) -> dict[str, float]:
    """Milliseconds of each operation in a trace."""
    found = collections.Counter[str]()
    for path in folder.rglob("*.trace.json.gz"):
        for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]:
            name = event.get("args", {}).get("hlo_op")
            if name is not None and not _HOLDS_OTHERS.match(name):
                found[name] += event["dur"] / 1e3
    return dict(found)


def _parser() -> argparse.ArgumentParser:
    parser = command.parser("profile", __doc__)
    add: Any = parser.add_argument
    add("--networks", nargs="+", choices=sorted(models.NETWORKS), default=list(NETWORKS), metavar="NAME")
    add("--batch", type=int, default=1)
    add("--step", action="store_true", help="a training step in the place of inference")
    add("--repeats", type=int, default=7)
    add("--json", type=Path)
    return parser
