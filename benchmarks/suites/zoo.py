"""Every distinct layer of every network under `implementation=None` against XLA: does None lose anywhere?

    python -m benchmarks zoo --json results.json
    python -m benchmarks zoo --networks resnet50 --batch 8 --weights packed --json results.json
    python -m benchmarks zoo --networks resnet50 --plan resnet50.json --json results.json
    python -m benchmarks zoo --networks regnetx_16gf --kinds default bfloat16 --zeros none --also direct --json gpu.json
    python -m benchmarks zoo --networks vgg19 --batch 1 8 --zeros none 50 95 profile --json gpu.json
    python -m benchmarks zoo --kinds default highest --batch 8 32 --part 1 2 --seconds 300 --again 30 --json first.json
    python -m benchmarks zoo --kinds bfloat16 --batch 8 --zeros none --left-to-xla --also direct --json left.json
    python -m benchmarks zoo --list first.json second.json
    python -m benchmarks zoo --kinds default --batch 8 --below 1 --of first.json second.json --json again.json
    python -m benchmarks zoo --batch 1 8 32 128 --changed --of first.json second.json --json changed.json

Layers are those of `models.NETWORKS` with folded batch norms, equal ones once, each at 0 % zeros and with as many as
the networks' sparsity profiles give its input (the fewest of them), in patches as in `jax_sparse_conv.models.profile`
(`zoo_layers.py` makes both).
A layer that None leaves to XLA, whose program has no kernel of ours in it, is listed and not timed: both sides are the
same (with `--also` it is, beside what None could take; with `--left-to-xla` no others are). One whose kernels skip
nothing ("direct") is timed with the first of the zeros only. Timing is `jax_sparse_conv.timing.per_call`;
implementations that `--also` names take turns with both sides. What comes out below 0.97 is timed again, longer, when
everything else is done. So are as many others, drawn at random, and the second times count ("first_ratio" keeps the
first): other work on the machine may lead either way. What fails, as XLA's own convolutions do in some command buffers,
is listed with the reason. With `--changed` only what None runs otherwise by now than in the files of
`--of`, the last of which counts, is timed.
A run takes up where the file's last one stopped, but for rows for which None takes something else by now, and
`--seconds` ends it early ("left" in the file: how many rows are missing), with `--again` of them kept for what is timed
again. Kinds and batches come in the order given, of each the most frequent layers first. `--part 1 2` and `--part 2 2`
are for two GPUs, with a file each; `--list` takes both.

With `--plan`, what `jax_sparse_conv calibrate` wrote for the one network runs in the place of None, on the profile's
zeros alone and for the layers that the plan does not leave to XLA.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import math
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

import jax_sparse_conv as jsc
from benchmarks.common import command, losing, results, tables, zoo_layers
from benchmarks.common.cases import KINDS
from benchmarks.common.zoo_layers import ZooLayer
from benchmarks.suites import zoo_rows
from benchmarks.suites.layers import WEIGHTS, WEIGHTS_HELP
from jax_sparse_conv import models
from jax_sparse_conv._src import environment
from jax_sparse_conv._src.layers.calls import Call
from jax_sparse_conv._src.plans import timing

LAYER_KINDS = KINDS | {"float16": ("float16", None)}
_LONGER = 4  # times as many repeats where a layer is timed again
_SEED = 0  # of what is timed again though it does not lose
_WRITE_SECONDS = 5.0  # between two versions of the file
_USERS = 3  # layers of a kind that are named
_Wanted: TypeAlias = tuple[Call, tables.Row]  # a call, and what is known of one of its rows before it is timed
_WEIGHTS_HELP = f"{WEIGHTS_HELP}; cold: arguments, up to 32 copies of the kernel in turn"
_COLD_BYTES = 2**28  # of kernels, so that none is still in a cache when its turn comes again
_MOST_KERNELS = 32
_TARGET = re.compile(r"@jsc_(\w+)")
_SKIPS_NOTHING = ("direct", "xla")  # implementations whose time does not depend on zeros


def main(argv: Sequence[str] | None = None) -> int:
    """Time what is left to be timed, list what loses and write a JSON file; the result is the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = _parser().parse_args(arguments)
    try:
        if options.list:
            print(zoo_rows.summary(zoo_rows.read(options.list)))
            return 0
        command.check_folder("--json", options.json)
        content = _content(options, command.portable("zoo", arguments))
        left = _measure_all(options, content)
    except (OSError, ValueError) as error:
        print(f"benchmarks zoo: {error}", file=sys.stderr)
        return 1
    print(zoo_rows.summary(content["rows"]))
    print(f"{left} left to be timed" if left else "all timed")
    return 0


def _content(options: argparse.Namespace, line: str) -> dict[str, Any]:
    """What describes this run, with the rows that the file has of the same commit and flags."""
    content: dict[str, Any] = {**environment.describe_run(), "command": line, "repeats": options.repeats}
    content |= {"plan": options.plan is not None, "rows": []}
    if options.json and options.json.is_file():
        now = (results.flags_of(content["xla_flags"]), results.commit(), content["plan"], None)
        content["rows"] = [row for row in results.load(options.json)["rows"] if now == _state(row)]
    return content


def _state(row: tables.Row) -> tuple[str, str | None, bool, str | None]:
    """What rows must have in common to be of one run that was cut short."""
    return row["flags"], row["commit"], row.get("plan", False), row.get("label")


def _measure_all(options: argparse.Namespace, content: dict[str, Any]) -> int:
    """Add a row for everything that the file lacks; returns how many did not fit into the time."""
    start = written = time.monotonic()
    planned = _planned(options.plan)
    rows = {zoo_rows.key(row): row for row in content["rows"]}
    waiting = _waiting(options, planned)
    if options.changed and not options.of:
        raise ValueError("--changed: --of must name the files of earlier runs")
    if options.of:
        waiting = _of_earlier(options, waiting)
    for key, (_, about) in waiting.items():
        row = rows.get(key, about)
        if about["implementation"] != row["implementation"] or (options.also and "ratio" not in row):
            rows.pop(key, None)  # None takes something else by now
    if not options.also:
        rows |= {key: about for key, (_, about) in waiting.items() if about["implementation"] == "xla"}
    left = 0
    for round_ in range(2):
        due = _again(waiting, rows) if round_ else [key for key in waiting if key not in rows]
        end = start + options.seconds - (0 if round_ else options.again)
        while due and time.monotonic() <= end:
            key = due.pop(0)
            next_ = waiting[due[0]] if due else None
            new = _row(options, planned, *waiting[key], round_, next_)
            kept = rows[key] if round_ and "failed" in new else {}  # the first time stays where another try fails
            first = {"first_ratio": rows[key]["ratio"]} if round_ else {}
            rows[key] = {k: v for k, v in kept.items() if k != "run"} | {"rounds": round_ + 1} | first | new
            if time.monotonic() > written + _WRITE_SECONDS:
                written = time.monotonic()
                _write(options, content, rows, left + len(due))
        left += len(due)
    _write(options, content, rows, left)
    return left


def _of_earlier(options: argparse.Namespace, waiting: dict[tuple[Any, ...], _Wanted]) -> dict[tuple[Any, ...], _Wanted]:
    """Of what is to be timed what lost in earlier files or, with --changed, what runs otherwise than there."""
    if options.changed:
        ran = {zoo_rows.key(row): row["implementation"] for path in options.of for row in zoo_rows.of_file(path)}
        return {key: each for key, each in waiting.items() if ran.get(key, "") not in ("", each[1]["implementation"])}
    below = {zoo_rows.key(row) for row in zoo_rows.losses(zoo_rows.read(options.of), options.below)}
    chosen = {key: each for key, each in waiting.items() if key in below}
    if below and not chosen:
        raise ValueError("--of: what lost there is not among these networks, kinds, batches, zeros and weights")
    return chosen


def _waiting(options: argparse.Namespace, planned: dict[Call, str] | None) -> dict[tuple[Any, ...], _Wanted]:
    return {
        zoo_rows.key(about): (layer.call, about)
        for layer in _chosen(options)
        for about in _about(layer, options, planned)
        if planned is None or planned.get(layer.call, "xla") != "xla"
        if about["implementation"] == "xla" or not options.left_to_xla
    }


def _row(
    options: argparse.Namespace,
    planned: dict[Call, str] | None,
    call: Call,
    about: tables.Row,
    round_: int,
    next_: _Wanted | None,
) -> tables.Row:
    """A row of times, or of why there are none."""
    repeats = options.repeats * (_LONGER if round_ else 1)
    requested = planned and planned[call]
    beside = next_ and functools.partial(zoo_layers.profile_map, next_[0].x_shape, next_[1]["zeros_target"], 0)
    try:
        found = _measure(call, about["zeros_target"], requested, options.also, options.weights, repeats, beside)
    except jax.errors.JaxRuntimeError as error:
        found = {"failed": " ".join(str(error).split())[:200]}
    row = about | found
    said = row.get("failed") or f"{row['ratio']:.2f} ({row['best_ratio']:.2f})"
    print(f"{zoo_rows.kind(row)}, {row['call']}, {row['zeros_target']} %: {said}", file=sys.stderr)
    return row


def _write(
    options: argparse.Namespace, content: dict[str, Any], rows: dict[tuple[Any, ...], tables.Row], left: int
) -> None:
    content["rows"], content["left"] = list(rows.values()), left
    results.add(options.json, "zoo", content | {"rows": list(map(_short, rows.values()))})


def _chosen(options: argparse.Namespace) -> Iterator[ZooLayer]:
    """The layers to be timed, of every kind and batch the most frequent ones first."""
    part, parts = options.part
    if not 1 <= part <= parts:
        raise ValueError(f"--part {part} {parts}: the first must be 1 to the second")
    of_size = (layer for layer in _layers(options) if _flops(layer.call) <= options.most_flops)
    found = (layer for layer in of_size if re.search(options.calls, layer.call.describe()))
    return itertools.islice(found, part - 1, None, parts)


def _flops(call: Call) -> float:
    if call.op == "dense":
        return 2.0 * math.prod(call.x_shape[:-1]) * math.prod(call.kernel_shape)
    size = call.geometry.conv_size(call.x_shape[1:3], call.kernel_shape[:2])
    return 2.0 * call.x_shape[0] * math.prod(size) * math.prod(call.kernel_shape)


def _layers(options: argparse.Namespace) -> Iterator[ZooLayer]:
    for kind, batch in itertools.product(options.kinds, options.batch):
        dtype, precision = LAYER_KINDS[kind]
        for layer in sorted(zoo_layers.layers_of(tuple(options.networks), batch), key=lambda layer: -len(layer.users)):
            call = dataclasses.replace(layer.call, dtype=dtype, precision=precision or layer.call.precision)
            yield dataclasses.replace(layer, call=call)


def _about(
    layer: ZooLayer, options: argparse.Namespace, planned: dict[Call, str] | None = None
) -> Iterator[tables.Row]:
    """What is known of the rows of a layer before they are timed."""
    call = layer.call
    about = {"call": call.describe(), "op": call.op, "batch": call.x_shape[0], "details": repr(call)}
    about["implementation"] = implementation = will_run(call, planned and planned.get(call))
    of_zeros = {"none": 0, "profile": round(layer.zeros), "50": 50, "95": 95}
    names = ("profile",) if options.plan else options.zeros
    if implementation in _SKIPS_NOTHING and not options.also:
        names = names[:1]
    for zeros in dict.fromkeys(of_zeros[name] for name in names):
        users = {"users": list(layer.users[:_USERS]), "layers": len(layer.users)}
        yield about | users | {"weights": options.weights, "zeros_target": zeros}


@functools.lru_cache(maxsize=4096)
def will_run(call: Call, implementation: str | None = None, platform: str | None = None) -> str:
    """The native kernels in a call's program by name, as in `timing.what_ran`, but without compiling it.

    Args:
      call: what is traced.
      implementation: as the call takes it.
      platform: for which the program is lowered; the default one's without it.
    """
    shapes = [jax.ShapeDtypeStruct(call.x_shape, call.dtype), jax.ShapeDtypeStruct(call.kernel_shape, call.dtype)]
    if call.bias:
        shapes.append(jax.ShapeDtypeStruct(call.kernel_shape[-1:], call.dtype))
    if call.residual:
        size = call.geometry.conv_size(call.x_shape[1:3], call.kernel_shape[:2])
        shapes.append(jax.ShapeDtypeStruct((call.x_shape[0], *size, call.kernel_shape[-1]), call.dtype))
    traced = jax.jit(call.function(implementation)).trace(*shapes)
    text = traced.lower(lowering_platforms=None if platform is None else (platform,)).as_text()
    names = dict.fromkeys(timing.NAME_OF_TARGET.get(name, name) for name in _TARGET.findall(text))
    ran = "+".join(names) or "xla"
    return f"{ran}|xla" if names and "stablehlo.case" in text else ran


def _short(row: tables.Row) -> tables.Row:
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}


def _again(waiting: Iterable[tuple[Any, ...]], rows: dict[tuple[Any, ...], tables.Row]) -> list[tuple[Any, ...]]:
    """What is left to be timed again: losers, and as many others."""
    found = {key: rows[key] for key in waiting if key in rows and zoo_rows.timed([rows[key]])}
    ratios = {key: row.get("first_ratio", row["ratio"]) for key, row in found.items()}
    done = [key for key, row in found.items() if row.get("rounds", 1) > 1]
    return [key for key in losing.again(ratios, _SEED, done) if key not in done]


def _planned(path: Path | None) -> dict[Call, str] | None:
    """The implementation of each call by a plan."""
    if path is None:
        return None
    return {layer.call: layer.implementation for layer in jsc.Plan.load(path).layers}


def _measure(
    call: Call,
    zeros: int,
    implementation: str | None,
    also: Sequence[str],
    weights: str,
    repeats: int,
    beside: Callable[[], Any] | None = None,
) -> tables.Row:
    """Times of all sides; `beside` is done while other sides than XLA's compile."""
    functions, operands = _sides(call, zeros, implementation, also, weights)
    jobs: list[tuple[Callable[[], Any], bool]] = [
        (functools.partial(timing.compile_ahead, each, operands), name == "xla") for name, each in functions.items()
    ]
    list(timing.compile_each(jobs if beside is None else [*jobs, (beside, False)]))
    times = timing.per_call(functions, operands, repeats)
    row: tables.Row = {"zeros_percent": 100 * float(np.mean(np.asarray(operands[0][0]) == 0))}
    row |= {f"{side}_us": found.microseconds for side, found in times.items()}
    row |= {f"{side}_best_us": 1e6 * found.best for side, found in times.items()}
    return row | {"ratio": row["xla_us"] / row["ours_us"], "best_ratio": row["xla_best_us"] / row["ours_best_us"]}


def _sides(
    call: Call, zeros: int, implementation: str | None, also: Sequence[str], weights: str
) -> tuple[dict[str, timing.Function], list[timing.Operands]]:
    """All sides, and what they are called with: maps in turn, weights unless they are constants."""
    functions = {"xla": call.function("xla"), "ours": call.function(implementation)}
    functions |= {name: call.function(name) for name in also if name in call.implementations}
    maps = timing.rotations(jnp.asarray(zoo_layers.profile_map(call.x_shape, zeros, 0), call.dtype))
    kernel, *others = present = tuple(zoo_layers.operands_of(call, weights))
    if weights != "constant":
        copies = min(_MOST_KERNELS, 1 + _COLD_BYTES // kernel.nbytes) if weights == "cold" else 1
        kernels = [kernel, *(jnp.copy(kernel) for _ in range(copies - 1))]
        return functions, [(maps[i % len(maps)], kernels[i % copies], *others) for i in range(max(len(maps), copies))]

    def constant(function: Any) -> timing.Function:
        inner = function.__wrapped__  # not jitted twice, which would make arguments of them again
        return jax.jit(lambda x: inner(x, *present))

    return {side: constant(function) for side, function in functions.items()}, [(x,) for x in maps]


def _parser() -> argparse.ArgumentParser:
    parser = command.parser("zoo", __doc__)
    add = parser.add_argument
    add("--networks", nargs="+", choices=sorted(models.NETWORKS), default=list(models.NETWORKS), metavar="NAME")
    add("--batch", type=int, nargs="+", default=[1])
    add("--kinds", nargs="+", choices=tuple(LAYER_KINDS), default=["default"], help="precision or dtype")
    add("--calls", default="", help="regular expression: only calls in which it is found, as printed")
    add("--most-flops", type=float, default=math.inf, help="only calls of at most so many operations, without zeros")
    add("--zeros", nargs="+", choices=("none", "profile", "50", "95"), default=["none", "profile"])
    add("--also", nargs="+", choices=("direct", "ecr"), default=[], help="timed as well, where a call has it")
    add("--left-to-xla", action="store_true", help="only calls in which None takes no kernel of ours; for --also")
    add("--weights", choices=(*WEIGHTS, "cold"), default="arguments", help=_WEIGHTS_HELP)
    add("--plan", type=Path, help="a plan of the network, whose choices take None's place")
    add("--repeats", type=int, default=5)
    add("--seconds", type=float, default=math.inf, help="stop after this time; run again to go on")
    add("--again", type=float, default=0.0, help="of these, seconds kept for what is timed again")
    add("--part", type=int, nargs=2, default=(1, 1), metavar=("I", "N"), help="the I-th call of every N")
    add(
        "--below",
        type=float,
        default=losing.LEAST,
        help="with --of: what came out below this in those files, and nothing else",
    )
    add("--changed", action="store_true", help="with --of: what None runs otherwise than there, whatever it took")
    add("--of", type=Path, nargs="+", default=[], help="files of earlier runs")
    add("--json", type=Path, help="read first, where it is there, and written every few seconds")
    add("--list", type=Path, nargs="+", help="print what loses in these files and measure nothing")
    return parser
