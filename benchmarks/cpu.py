"""The CPU kernels against XLA and against what the cores can do.

    python -m benchmarks.cpu --maps feature_maps.npz --json results.json
    python -m benchmarks.cpu --layers "14x14|7x7" --zeros 85 --batch 1 8 --repeats 10

Nine 3x3 layers from 7x7 to 56x56, 1x1 layers, convolutions followed by a pool and a dense layer; by default with
weights that are constants of the program, as those of a model are in `jax.jit(lambda x: model(x))`: kernels are then
packed once, while it is traced. `--weights arguments` gives them to each call, `--weights packed` gives each call what
`jax_sparse_conv.pack` made of them. Timing is `benchmarks.layers`'.

In the same run: the peak of multiply-adds in registers, that of those which each read a vector of weights from L1, as
the loop over non-zeros must, and the rates of reading, of all cores together. "FMA %" is the share of the first peak
that the products of non-zeros alone make up, "roof %" the share of the time that they or, if it takes longer, reading
the kernel must take.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks import cases, command, data, layers, tables
from jax_sparse_conv import _native, environment

_CACHE_BYTES = 2**27  # a larger kernel comes from memory
_COLUMNS = (("fma_percent", "FMA %", ">", "{:.0f}"), ("roof_percent", "roof %", ">", "{:.0f}"))


def main(argv: Sequence[str] | None = None) -> int:
    """Time the chosen layers, print a table and write a JSON file; the result is the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = _parser().parse_args(arguments)
    try:
        command.check_folder("--json", options.json)
        maps = data.read_maps(options.maps) if options.maps else {}
        header = environment.describe_run()
        limits = _native.cpu_limits()
        rows = []
        for row in layers.rows_of(options, maps):
            print(f"{row['layer']}, {row['source']} {row['zeros_percent']:.0f} %: {row['ratio']:.2f}", file=sys.stderr)
            rows.append(row | roofline(row, limits))
    except (OSError, RuntimeError, ValueError) as error:
        print(f"benchmarks.cpu: {error}", file=sys.stderr)
        return 1
    means = [*tables.geometric_means(rows), *_real_means(rows)]
    print(tables.table(rows, _COLUMNS))
    print(tables.means_table(means))
    print(
        f"{limits['threads']:.0f} threads: {limits['flops'] / 1e9:.0f} GFLOP/s, "
        f"{limits['loaded_flops'] / 1e9:.0f} with a weight from L1 for each multiply-add, reading "
        f"{limits['cache_bytes_per_second'] / 1e9:.0f} GB/s from the outer cache and "
        f"{limits['memory_bytes_per_second'] / 1e9:.0f} GB/s from memory"
    )
    if options.json:
        content = {**header, "command": command.portable("benchmarks.cpu", arguments), "repeats": options.repeats}
        content |= {"weights": options.weights, "limits": limits, "rows": rows, "geometric_means": means}
        options.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return 0


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
    return {"fma_percent": 100 * products / seconds, "roof_percent": 100 * max(products, reading) / seconds}


def _real_means(rows: Iterable[tables.Row]) -> list[tables.Row]:
    """Means of the real maps' 3x3 convolutions by their zeros: the ranges that targets are given for."""
    means = []
    for low, high in ((50, 60), (60, 80), (80, 100)):
        chosen = [row for row in rows if row["source"] == "real" and low <= row["zeros_percent"] < high]
        chosen = [row | {"source": f"real, {low}-{high} % zeros"} for row in chosen if row["kernel_shape"][0] == 3]
        means += tables.geometric_means(chosen)
    return means


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--layers", default="", help="only layers whose name matches this regular expression")
    add("--set", choices=cases.SETS, default="cpu_kernels", help="layers (benchmarks/cases.py)")
    add("--zeros", type=int, nargs="+", default=[50, 70, 85, 95], help="percentages of i.i.d. zeros; 0 is always added")
    add("--maps", type=Path, help="real maps, an npz file or the folder of the command maps")
    add("--batch", type=int, nargs="+", default=[1])
    add("--weights", choices=layers.WEIGHTS, default="constant", help=layers.WEIGHTS_HELP)
    add("--implementation", help="instead of each layer's own, where the operation has it; auto is None")
    add("--repeats", type=int, default=7)
    add("--seed", type=int, default=0)
    add("--json", type=Path)
    parser.set_defaults(dtype=["float32"], precision=["highest"], cold_weights=False)
    return parser


if __name__ == "__main__":
    sys.exit(main())
