"""Any implementation against XLA, layer by layer.

    python -m benchmarks layers --set cpu --maps feature_maps.npz --json results.json
    python -m benchmarks layers --set gpu --precision highest default --both-flags --json results.json

Both sides run in one process and in turns, on rotated inputs; times are medians and include the conversion to a sparse
format. On a CPU a turn is a streak of calls, each waited for; on a GPU they are device times of many calls in one jit.
`*_latency_us` are turns of one call, waited for. Every layer is timed with 0 % zeros too: a gain that stays there does
not come from the zeros.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_sparse_conv as jsc
from benchmarks.common import command, data, programs, results, tables
from benchmarks.common.cases import SETS, Layer
from jax_sparse_conv._src import environment
from jax_sparse_conv._src.cli.comparison import IMPLEMENTATIONS_OF
from jax_sparse_conv._src.plans import timing
from jax_sparse_conv._src.primitive import reference
from jax_sparse_conv._src.problem.geometry import Pool

_POOL = Pool("max", (2, 2), (2, 2), ((0, 0), (0, 0)))
_COLD_BYTES = 2**28  # of kernels, so that none is still in the cache when its turn comes again
_MAX_KERNELS = 32
WEIGHTS_HELP = "of each call, constants of the jitted program, or of each call and packed by jax_sparse_conv.pack"
WEIGHTS = ("arguments", "constant", "packed")

_THEN_POOL: tuple[tables.Column, ...] = (("then_pool_ratio", "then pool", ">", "{:.2f}"),)


def main(argv: Sequence[str] | None = None) -> int:
    """Time the chosen layers, print a table and write a JSON file; the result is the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = _parser().parse_args(arguments)
    try:
        command.check_folder("--json", options.json)
        content = _both_flags(arguments) if options.both_flags else _one_process(options)
    except (OSError, ValueError) as error:
        print(f"benchmarks layers: {error}", file=sys.stderr)
        return 1
    content["command"] = command.portable("layers", arguments)
    pooled = all("then_pool_ratio" in row for row in content["rows"])
    print(tables.table(content["rows"], _THEN_POOL if pooled else ()))
    print(tables.means_table(content["geometric_means"]))
    results.add(options.json, "layers", content)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = command.parser("layers", __doc__)
    add = parser.add_argument
    add("--set", choices=SETS, default="cpu", help="layers (benchmarks/common/cases.py)")
    add("--layers", default="", help="only layers whose name matches this regular expression")
    add("--implementation", help="instead of each layer's own, where the operation has it; auto is None")
    add(
        "--zeros",
        type=int,
        nargs="+",
        help="percentages of i.i.d. zeros; 0 is always added (default: each layer's own)",
    )
    add(
        "--maps",
        type=Path,
        help="real maps, an npz file or the folder of the command maps; timed as well where the layer has them",
    )
    add("--batch", type=int, nargs="+", default=[1])
    add("--dtype", nargs="+", default=["float32"], help="float32, bfloat16, float16")
    add("--precision", nargs="+", default=["highest"], help="of XLA's side: default, high, highest")
    add("--repeats", type=int, default=30)
    add("--cold-weights", action="store_true", help="rotate copies of the kernel too, more than a cache holds")
    add("--weights", choices=WEIGHTS, default="arguments", help=WEIGHTS_HELP)
    add("--seed", type=int, default=0)
    add("--label", default="", help="written into the file, e.g. the XLA flags' name")
    add(
        "--both-flags",
        action="store_true",
        help="run with XLA's default flags and with command buffers; keep the faster",
    )
    add("--json", type=Path)
    parser.set_defaults(in_program=False)
    return parser


def _one_process(options: argparse.Namespace) -> dict[str, Any]:
    # Read here: rows are printed while they come in, and a missing file should be known before the first.
    maps = data.read_maps(options.maps) if options.maps else {}
    header = environment.describe_run()
    rows = []
    for row in rows_of(options, maps):
        print(f"{row['layer']}, {row['source']} {row['zeros_percent']:.0f} %: {row['ratio']:.2f}", file=sys.stderr)
        rows.append(row)
    return {
        **header,
        "label": options.label,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "repeats": options.repeats,
        "cold_weights": options.cold_weights,
        "weights": options.weights,
        "rows": rows,
        "geometric_means": tables.geometric_means(rows),
    }


def rows_of(options: argparse.Namespace, maps: Mapping[str, data.Map]) -> Iterator[tables.Row]:
    """Time the layers that the options (this module's, or those of a benchmark built on it) choose, one by one.

    Raises:
      ValueError: no such layer, or maps that do not fit it.
    """
    layers = [layer for layer in SETS[options.set] if re.search(options.layers, layer.name)]
    if not layers:
        raise ValueError(f"--layers {options.layers!r} matches no layer of --set {options.set}")
    if options.weights != "constant":  # programs with constants are compiled where the constants are made
        calls = itertools.product(layers, options.dtype, options.batch, options.precision)
        functions = itertools.chain.from_iterable(_to_compile(*call, options) for call in calls)
        list(timing.compile_each([(functools.partial(_compile, *each), name == "xla") for name, *each in functions]))
    for layer in layers:
        for dtype in options.dtype:
            for batch in options.batch:
                for source, zeros, inputs in _inputs(layer, batch, options, maps):
                    for precision in options.precision:
                        row = _measure(layer, dtype, precision, inputs, options)
                        yield {**row, "source": source, "zeros_target": zeros, "batch": batch}


def _inputs(
    layer: Layer, batch: int, options: argparse.Namespace, maps: Mapping[str, data.Map]
) -> Iterator[tuple[str, int | None, list[data.Map]]]:
    """(source, percentage asked for, rotated inputs) of every kind of map this layer is timed on."""
    if data.has_maps(maps, layer):
        yield "real", None, [data.real_map(maps, layer, batch, first) for first in range(timing.ROTATIONS)]
    for zeros in sorted({0, *(options.zeros or layer.zeros)}):
        seeds = range(options.seed, options.seed + timing.ROTATIONS)
        yield "iid", zeros, [data.iid_map(layer, batch, zeros, seed) for seed in seeds]


def _to_compile(
    layer: Layer, dtype: str, batch: int, precision: str, options: argparse.Namespace
) -> Iterator[tuple[Any, ...]]:
    """(side, its function, its operands) of a layer."""
    shapes = (layer.x_shape(batch), layer.kernel_shape, (layer.out_channels,))
    x, kernel, bias = (jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)
    operands = (x, jax.eval_shape(jsc.pack, kernel) if options.weights == "packed" else kernel, bias)
    for name, function in _functions(layer, precision, _requested(layer, options.implementation)).items():
        yield name, function, operands


def _compile(function: Any, operands: timing.Operands) -> None:
    function.lower(*operands).compile()
    timing.compile_ahead(function, [operands])


def _measure(
    layer: Layer, dtype: str, precision: str, inputs: list[data.Map], options: argparse.Namespace
) -> tables.Row:
    requested = _requested(layer, options.implementation)
    functions = _functions(layer, precision, requested)
    kernel, bias = _weights(layer, dtype, options.seed)
    if options.weights == "constant":
        functions = _with_constants(layer, precision, requested, dtype, options.seed)
    elif options.weights == "packed":
        kernel = jsc.pack(kernel)
    xs = [jnp.asarray(x, dtype) for x in inputs]
    operands = _operands(xs, kernel, bias, options.cold_weights)
    errors = _errors(layer, {side: functions[side] for side in ("xla", "ours")}, operands[0])
    times = timing.per_call(functions, operands, options.repeats)
    batch = xs[0].shape[0]
    row = {
        "layer": layer.name,
        "op": layer.op,
        "x_shape": list(xs[0].shape),
        "kernel_shape": list(kernel.shape),
        "dtype": dtype,
        "precision": precision,
        "zeros_percent": 100 * float(np.mean([np.mean(x == 0) for x in inputs])),
        "requested": "auto" if requested is None else requested,
        "implementation": timing.what_ran(functions["ours"], *operands[0]),
        "xla_us": times["xla"].microseconds,
        "ours_us": times["ours"].microseconds,
        "ratio": times["xla"].median / times["ours"].median,
        "xla_best_us": 1e6 * times["xla"].best,
        "ours_best_us": 1e6 * times["ours"].best,
        "best_ratio": times["xla"].best / times["ours"].best,
        "xla_quartiles_us": [1e6 * times["xla"].low, 1e6 * times["xla"].high],
        "ours_quartiles_us": [1e6 * times["ours"].low, 1e6 * times["ours"].high],
        "dense_flops": layer.dense_flops(batch),
        "ours_tflops": layer.dense_flops(batch) / times["ours"].median / 1e12,
        "error": errors["ours"],
        "xla_error": errors["xla"],
    }
    single = timing.blocked(functions, operands, options.repeats)
    row |= {f"{side}_latency_us": timed.microseconds for side, timed in single.items()}
    if "then_pool" in times:
        row |= _beside_pool(times)
    if options.in_program:
        chains = _chains(layer, precision, requested, dtype if options.weights == "constant" else None, options.seed)
        row |= _in_program(programs.times(chains, xs, (kernel, bias), options.repeats))
    return row | {"latency_ratio": single["xla"].median / single["ours"].median}


def _beside_pool(times: Mapping[str, timing.Timing]) -> dict[str, float]:
    """What ours is beside a convolution and XLA's pool, and what it would be if a pool cost nothing."""
    ours, then_pool, alone = times["ours"], times["then_pool"], times["without_pool"]
    return {
        "then_pool_ratio": then_pool.median / ours.median,
        "then_pool_best_ratio": then_pool.best / ours.best,
        "free_pool_ratio": then_pool.median / alone.median,
        "free_pool_best_ratio": then_pool.best / alone.best,
    }


def _in_program(times: Mapping[str, timing.Timing]) -> dict[str, float]:
    found = {f"{side}_program_us": timed.microseconds for side, timed in times.items()}
    found |= {f"{side}_program_best_us": 1e6 * timed.best for side, timed in times.items()}
    return found | {"program_ratio": times["xla"].median / times["ours"].median}


@functools.lru_cache(maxsize=1)
def _chains(
    layer: Layer, precision: str, requested: str | None, constants: str | None, seed: int
) -> dict[str, timing.Function]:
    """Programs of both sides; `constants` is the dtype of weights that belong to them, or None."""
    weights = None if constants is None else _weights(layer, constants, seed)
    functions = _functions(layer, precision, requested)
    return {side: programs.of(functions[side].__wrapped__, weights) for side in ("xla", "ours")}  # type: ignore[attr-defined]


def _requested(layer: Layer, implementation: str | None) -> str | None:
    if implementation == "auto":
        return None
    return implementation if implementation in IMPLEMENTATIONS_OF[layer.op] else layer.implementation


@functools.lru_cache(maxsize=1024)
def _functions(layer: Layer, precision: str, requested: str | None) -> dict[str, timing.Function]:
    """Both sides jitted; the same objects for the same call, so that each compiles once.

    Where ours is a convolution with its pool, there are two more: ours without the pool, alone and with XLA's pool.
    """
    calls = {"xla": _call(layer, precision, "xla"), "ours": _call(layer, precision, requested)}
    if layer.op == "conv_pool":
        alone = "ecr" if requested == "pecr" or jax.default_backend() == "cpu" else requested
        conv = _call(dataclasses.replace(layer, op="conv"), precision, alone)
        calls |= {"then_pool": lambda *operands: reference.pool(conv(*operands), _POOL), "without_pool": conv}
    return {side: jax.jit(call) for side, call in calls.items()}


@functools.lru_cache(maxsize=1)
def _weights(layer: Layer, dtype: str, seed: int) -> tuple[jax.Array, jax.Array]:
    kernel, bias = data.weights(layer, seed)
    return jnp.asarray(kernel, dtype), jnp.asarray(bias, dtype)


@functools.lru_cache(maxsize=1)
def _with_constants(
    layer: Layer, precision: str, requested: str | None, dtype: str, seed: int
) -> dict[str, timing.Function]:
    """Functions of the same operands that take their weights from the program, not from them."""
    kernel, bias = _weights(layer, dtype, seed)

    def constant(call: timing.Function) -> timing.Function:
        return jax.jit(lambda x, *_: call(x, kernel, bias))

    # Not jitted twice: an inner jit would make arguments of them again.
    return {
        side: constant(function.__wrapped__)  # type: ignore[attr-defined]
        for side, function in _functions(layer, precision, requested).items()
    }


def _call(layer: Layer, precision: str, implementation: str | None) -> timing.Function:
    common: dict[str, Any] = {"activation": "relu", "precision": precision, "implementation": implementation}
    if layer.op == "dense":
        return functools.partial(jsc.dense, **common)
    common["strides"] = layer.strides
    return functools.partial(jsc.conv_pool if layer.op == "conv_pool" else jsc.conv, **common)


def _operands(xs: Sequence[jax.Array], kernel: Any, bias: jax.Array, cold_weights: bool) -> list[timing.Operands]:
    copies = min(_MAX_KERNELS, 1 + _COLD_BYTES // kernel.nbytes) if cold_weights else 1
    kernels = [kernel, *(jax.tree.map(jnp.copy, kernel) for _ in range(copies - 1))]
    return [(xs[i % len(xs)], kernels[i % copies], bias) for i in range(max(len(xs), copies))]


def _errors(layer: Layer, functions: Mapping[str, timing.Function], operands: timing.Operands) -> dict[str, float]:
    """Relative Frobenius error of the batch's first image against float64."""
    x, kernel, bias = (np.asarray(value, np.float64) for value in operands)
    expected = data.float64_result(layer, x[:1], kernel, bias)
    return {
        side: data.frobenius(np.asarray(function(*operands), np.float64)[:1], expected)
        for side, function in functions.items()
    }


def _both_flags(arguments: Sequence[str]) -> dict[str, Any]:
    """Two processes, because XLA reads its flags once; this one must not take the GPU, so it asks nothing of JAX."""
    rest = [argument for argument in arguments if argument != "--both-flags"]
    default, buffers = (_subprocess(rest, flags) for flags in ("", command.COMMAND_BUFFERS))
    rows = tables.better_of(default["rows"], buffers["rows"], ("default", "command buffers"))
    return {
        **default,
        "xla_flags": [default["xla_flags"], buffers["xla_flags"]],
        "rows": rows,
        "geometric_means": tables.geometric_means(rows),
        "runs": {"default": default["rows"], "command buffers": buffers["rows"]},
    }


def _subprocess(arguments: Sequence[str], flags: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        command.run("layers", [*arguments, "--json", str(path)], flags)
        return results.content_of(path)
