"""The CPU kernels against XLA and against what the cores can do.

    python -m benchmarks cpu --maps feature_maps.npz --json results.json
    python -m benchmarks cpu --layers "14x14|7x7" --zeros 85 --batch 1 8 --repeats 10

Nine 3x3 layers from 7x7 to 56x56, 1x1 layers, convolutions followed by a pool and a dense layer; by default with
weights that are constants of the program, as those of a model are in `jax.jit(lambda x: model(x))`: kernels are then
packed once, while it is traced. `--weights arguments` gives them to each call, `--weights packed` gives each call what
`jax_sparse_conv.pack` made of them. Timing is `benchmarks layers`'.

In the same run: the peak of multiply-adds in registers, that of those which each read a vector of weights from L1, as
the loop over non-zeros must, and the rates of reading, of all cores together. "FMA %" is the share of the first peak
that the products of non-zeros alone make up, "roof %" the share of the time that they or, if it takes longer, reading
the kernel must take. "in program" is XLA's time over ours, "FMA % in p." that share, of a call among several in one
program, where no Python is between two calls; "bound %" is the share of its time that multiply-adds which each load a
weight, or reading the kernel, must take, and 100 the most there is for this loop.

The limits are the best of those that are measured before and after each row; "peak_gflops" in a row of the JSON file is
the lower one of the two peaks beside it: where it is far below the limit, the machine had other work.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks.common import cases, command, data, results, tables
from benchmarks.suites import layers
from jax_sparse_conv._src import _native, environment
from jax_sparse_conv._src.plans import timing

_CACHE_BYTES = 2**27  # a larger kernel comes from memory
_COLUMNS = (("fma_percent", "FMA %", ">", "{:.0f}"), ("roof_percent", "roof %", ">", "{:.0f}"))
_PROGRAM_COLUMNS = (
    ("program_ratio", "in program", ">", "{:.2f}"),
    ("fma_program_percent", "FMA % in p.", ">", "{:.0f}"),
    ("bound_program_percent", "bound %", ">", "{:.0f}"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Time the chosen layers, print a table and write a JSON file; the result is the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = _parser().parse_args(arguments)
    try:
        command.check_folder("--json", options.json)
        maps = data.read_maps(options.maps) if options.maps else {}
        header = environment.describe_run()
        rows, limits = _measured(options, maps)
    except (OSError, RuntimeError, ValueError) as error:
        print(f"benchmarks cpu: {error}", file=sys.stderr)
        return 1
    rows = [row | roofline(row, limits) for row in rows]
    print(tables.table(rows, _COLUMNS + (_PROGRAM_COLUMNS if options.in_program else ())))
    line = command.portable("cpu", arguments)
    means = [*tables.geometric_means(rows), *_real_means(rows)]
    print(tables.means_table(means))
    print(
        f"{limits['threads']:.0f} threads: {limits['flops'] / 1e9:.0f} GFLOP/s, "
        f"{limits['loaded_flops'] / 1e9:.0f} with a weight from L1 for each multiply-add, reading "
        f"{limits['cache_bytes_per_second'] / 1e9:.0f} GB/s from the outer cache and "
        f"{limits['memory_bytes_per_second'] / 1e9:.0f} GB/s from memory"
    )
    if options.json:
        content = {**header, "command": line, "repeats": options.repeats}
        content |= {"weights": options.weights, "limits": limits, "rows": rows}
        results.add(options.json, "cpu", content)
    return 0


def _measured(options: argparse.Namespace, maps: Mapping[str, data.Map]) -> tuple[list[tables.Row], dict[str, float]]:
    """The rows and the limits, which are measured before and after each row: other work on the machine lowers them."""
    before = best = _native.cpu_limits()
    rows = []
    for row in layers.rows_of(options, maps):
        after = _native.cpu_limits()
        peak = min(before["flops"], after["flops"]) / 1e9
        zeros = f"{row['source']} {row['zeros_percent']:.0f} %"
        print(f"{row['layer']}, {zeros}: {row['ratio']:.2f}, peak {peak:.0f} GFLOP/s", file=sys.stderr)
        rows.append(row | {"peak_gflops": peak})
        before, best = after, _best(best, after)
    return rows, best


def _best(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {key: max(value, other[key]) for key, value in one.items()}


def roofline(row: tables.Row, limits: dict[str, float]) -> dict[str, float]:
    """Shares, in percent, of the peak and of the roof; non-zeros at the edge count as if they met every tap."""
    dense_seconds = row["dense_flops"] / limits["flops"]
    products = dense_seconds * (1 - row["zeros_percent"] / 100)
    kernel_bytes = 4
    for size in row["kernel_shape"]:
        kernel_bytes *= size
    if row["op"] == "dense":  # rows that meet a non-zero of some row of x
        kernel_bytes = int(kernel_bytes * (1 - (row["zeros_percent"] / 100) ** row["batch"]))
    source = "cache" if kernel_bytes <= _CACHE_BYTES else "memory"
    reading = kernel_bytes / limits[f"{source}_bytes_per_second"]
    seconds = row["ours_us"] * 1e-6
    shares = {"fma_percent": 100 * products / seconds, "roof_percent": 100 * max(products, reading) / seconds}
    if "ours_program_us" in row:
        seconds = row["ours_program_us"] * 1e-6
        loaded = products * limits["flops"] / limits["loaded_flops"]
        shares |= {"fma_program_percent": 100 * products / seconds}
        shares |= {"fma_program_best_percent": 1e8 * products / row["ours_program_best_us"]}
        shares |= {"bound_program_percent": 100 * max(loaded, reading) / seconds}
    return shares


def fma_means(rows: Iterable[tables.Row]) -> list[tables.Row]:
    """Geometric means of the 3x3 convolutions' shares of the peak, by zeros and batch."""
    groups: dict[tuple[int, int], list[tables.Row]] = {}
    for row in rows:
        if row["source"] == "iid" and row["op"] == "conv" and row["kernel_shape"][0] == 3:
            groups.setdefault((row["zeros_target"], row["batch"]), []).append(row)
    means = []
    for (zeros, batch), members in sorted(groups.items()):
        mean: tables.Row = {"zeros_target": zeros, "batch": batch, "layers": len(members)}
        for key in ("fma_percent", "fma_program_percent", "fma_program_best_percent", "bound_program_percent"):
            if all(key in row for row in members):
                mean[key] = timing.geometric_mean(row[key] for row in members)
        means.append(mean)
    return means


def _real_means(rows: Iterable[tables.Row]) -> list[tables.Row]:
    """Means of the real maps' 3x3 convolutions by their zeros: the ranges that targets are given for."""
    means = []
    for low, high in ((50, 60), (60, 80), (80, 100)):
        chosen = [row for row in rows if row["source"] == "real" and low <= row["zeros_percent"] < high]
        chosen = [row | {"source": f"real, {low}-{high} % zeros"} for row in chosen if row["kernel_shape"][0] == 3]
        means += tables.geometric_means(chosen)
    return means


def _parser() -> argparse.ArgumentParser:
    parser = command.parser("cpu", __doc__)
    add = parser.add_argument
    add("--layers", default="", help="only layers whose name matches this regular expression")
    add("--set", choices=cases.SETS, default="cpu_kernels", help="layers (benchmarks/common/cases.py)")
    add("--zeros", type=int, nargs="+", default=[50, 70, 85, 95], help="percentages of i.i.d. zeros; 0 is always added")
    add("--maps", type=Path, help="real maps, an npz file or the folder of the command maps")
    add("--batch", type=int, nargs="+", default=[1])
    add("--weights", choices=layers.WEIGHTS, default="constant", help=layers.WEIGHTS_HELP)
    add("--implementation", help="instead of each layer's own, where the operation has it; auto is None")
    add("--repeats", type=int, default=7)
    add("--seed", type=int, default=0)
    add("--in-program", action="store_true", help="time calls among others in one program too")
    add("--json", type=Path)
    parser.set_defaults(dtype=["float32"], precision=["highest"], cold_weights=False)
    return parser
