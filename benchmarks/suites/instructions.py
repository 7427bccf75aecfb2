"""Instructions of the CPU's loops, counted by valgrind's callgrind: figures that repeat on any machine.

    python -m benchmarks instructions --maps feature_maps.npz --json results.json

Three 3x3 layers, each by the dense loop and every sparse one, on one thread, in the AVX2 kernels (valgrind knows no
AVX-512). Counted is one call, inside the package's extension only: lists, packing where the call packs, sums and
results, but nothing of JAX. On the layers' real maps, or on i.i.d. zeros as many without `--maps`.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp

import jax_sparse_conv as jsc
from benchmarks.common import cases, command, data, results, tables
from jax_sparse_conv._src import _native, environment

LAYERS = {"resnet50 conv4_block5 3x3": 82, "resnet50 conv2_block3 3x3": 58, "densenet169 conv5_block20 3x3": 93}
"""By name of `cases.MAPS`, with the zeros in percent of their maps."""

LOOPS = ("direct", "windows", "scatter", "pixels", "pixels, packed")

# Functions of the C library that nothing else calls here: callgrind acts when they are entered.
_ZERO, _DUMP = "getsid", "getpgid"
_EXTENSION = "/jax_sparse_conv/_cpu."
_NAME = re.compile(r"\((\d+)\)(?: (.*))?")
_COLUMNS: tuple[tables.Column, ...] = (
    ("layer", "layer", "<", "{}"),
    ("zeros_percent", "zeros %", ">", "{:.1f}"),
    ("loop", "loop", "<", "{}"),
    ("thousands", "thousands", ">", "{:,.0f}"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Count, print a table and write a JSON file; the result is the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = command.parser("instructions", __doc__)
    parser.add_argument("--maps", type=Path, help="real maps, an npz file or the folder of the command maps")
    parser.add_argument("--layers", default="", help="only layers whose name matches this regular expression")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)  # the process that valgrind runs
    options = parser.parse_args(arguments)
    try:
        command.check_folder("--json", options.json)
        if options.inside:
            for label, call in _calls(options):
                _counted(label, call)
            return 0
        rows = _rows(arguments)
    except (OSError, RuntimeError, ValueError) as error:
        print(f"benchmarks instructions: {error}", file=sys.stderr)
        return 1
    print(tables.aligned(rows, _COLUMNS))
    if options.json:
        content = {**environment.describe_run(), "command": command.portable("instructions", arguments)}
        results.add(options.json, "instructions", content | {"rows": rows})
    return 0


def count(lines: Iterable[str]) -> dict[str, int]:
    """Instructions by object file, of a dump of callgrind: what each executed itself."""
    objects: dict[str, str] = {}
    counts: collections.Counter[str] = collections.Counter()
    here, of_callee = "", False
    for line in lines:
        if line.startswith(("ob=", "cob=")):
            key, value = line.rstrip().split("=", 1)
            match = _NAME.fullmatch(value)
            if match is None:
                raise ValueError(f"callgrind wrote {line.rstrip()!r}")
            name = objects.setdefault(match[1], match[2] or "")
            here = name if key == "ob" else here
        elif line.startswith("calls="):
            of_callee = True  # the next line is what the callee took
        elif line[:1] in "0123456789+-*" and len(line.split()) == 2:
            if not of_callee:
                counts[here] += int(line.split()[1])
            of_callee = False
    return dict(counts)


def _rows(arguments: Sequence[str]) -> list[tables.Row]:
    if shutil.which("valgrind") is None:
        raise ValueError("valgrind is not on the path")
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "counts"
        tool = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={base}"]
        tool += [f"--zero-before={_ZERO}", f"--dump-before={_DUMP}"]
        core = min(os.sched_getaffinity(0))  # XLA's pool has then one thread
        line = ["taskset", "-c", str(core), *tool, sys.executable, "-m", "benchmarks", "instructions", "--inside"]
        result = subprocess.run([*line, *arguments], capture_output=True, text=True)
        if result.returncode:
            raise ValueError(f"valgrind ended with status {result.returncode}: {result.stderr[-2000:]}")
        labels = [json.loads(text) for text in result.stdout.splitlines()]
        dumps = [Path(f"{base}.{index}") for index in range(1, len(labels) + 1)]
        return [label | _thousands(dump) for label, dump in zip(labels, dumps, strict=True)]


def _thousands(dump: Path) -> dict[str, float]:
    with dump.open(encoding="utf-8", errors="replace") as lines:
        counts = count(lines)
    return {"thousands": sum(value for name, value in counts.items() if _EXTENSION in name) / 1000}


def _counted(label: tables.Row, call: jax.stages.Wrapped) -> None:
    """Run a call, counted, and print the label, a line that `_rows` reads."""
    jax.block_until_ready(call())  # compiled, planned, memory taken
    os.getsid(0)
    jax.block_until_ready(call())
    os.getpgid(0)
    print(json.dumps(label), flush=True)


def _calls(options: argparse.Namespace) -> Iterable[tuple[tables.Row, jax.stages.Wrapped]]:
    maps = data.read_maps(options.maps) if options.maps else {}
    layers = {layer.name: layer for layer in cases.MAPS}
    for name, zeros in LAYERS.items():
        if not re.search(options.layers, name):
            continue
        layer = layers[name]
        real = data.has_maps(maps, layer)
        x = data.real_map(maps, layer, 1, 0) if real else data.iid_map(layer, 1, zeros, 0)
        label = {"layer": name, "source": "real" if real else "iid", "zeros_percent": 100 * float((x == 0).mean())}
        kernel, bias = (jnp.asarray(value) for value in data.weights(layer, 0))
        for loop in LOOPS:
            yield label | {"loop": loop}, _call(loop, jnp.asarray(x), kernel, bias)


def _call(loop: str, x: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.stages.Wrapped:
    """The layer by one loop, with weights that are arguments or, packed, constants of the program."""
    _native.set_cpu_loop("auto" if loop == "direct" else loop.split(",")[0])
    implementation = "direct" if loop == "direct" else "ecr"

    def run(x: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
        return jsc.conv(x, kernel, bias, activation="relu", implementation=implementation)

    if loop.endswith("packed"):
        return jax.tree_util.Partial(jax.jit(lambda x: run(x, kernel, bias)), x)
    return jax.tree_util.Partial(jax.jit(run), x, kernel, bias)
