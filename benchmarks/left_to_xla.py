"""Convolutions that None had left to XLA, timed beside "direct": how many it takes by now, and what they come to.

    python -m benchmarks.left_to_xla benchmarks/results/h200_network_layers_left_{default,bfloat16}_*.json

Reads what `benchmarks.zoo --left-to-xla --also direct` wrote, of the same call the last file's row, and measures
nothing. What None takes is asked of `direct_choice` for the GPU here or, without one, for an H200; the CUDA extension
must be built for Hopper. A ratio is the faster of XLA's two times, as both sides were XLA's, over that of "direct".
Pools do not count in "taken": a convolution that None takes with its pool in the kernel alone is counted apart.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import tables, zoo_layers, zoo_rows
from benchmarks.zoo import LAYER_KINDS
from jax_sparse_conv._src.dispatch import direct_choice
from jax_sparse_conv._src.layers.calls import Call
from jax_sparse_conv._src.plans import timing
from jax_sparse_conv._src.problem.work import Work

_TITLES = ("kind", "batch", "taken", "geometric mean", "least", "most", "still left", "of these, sums of times")


@dataclasses.dataclass(frozen=True)
class _Timed:
    """A convolution that was XLA's; takes: as it is, "alone", or "with its pool", or None."""

    kind: str
    batch: int
    xla_us: float
    direct_us: float
    takes: str | None

    @property
    def ratio(self) -> float:
        return self.xla_us / self.direct_us


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table by kind and batch; the result is the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.left_to_xla",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    options = parser.parse_args(argv)
    try:
        if not direct_choice.has_warpgroups():
            raise ValueError("the CUDA extension is not built for Hopper, or the GPU here is another")
        print(_report(_timed(options.files)))
    except (OSError, ValueError) as error:
        print(f"benchmarks.left_to_xla: {error}", file=sys.stderr)
        return 1
    return 0


def _timed(paths: Sequence[Path]) -> list[_Timed]:
    rows = {zoo_rows.key(row): row for path in paths for row in zoo_rows.of_file(path) if "direct_us" in row}
    calls = _calls(list(rows.values()))
    return [
        _Timed(
            zoo_rows.kind(row),
            row["batch"],
            min(row["xla_us"], row["ours_us"]),
            row["direct_us"],
            _takes(calls[row["details"]]),
        )
        for row in rows.values()
    ]


def _calls(rows: Sequence[tables.Row]) -> dict[str, Call]:
    """The calls of rows by their details."""
    networks = tuple(dict.fromkeys(user.split("/")[0] for row in rows for user in row["users"]))
    return {
        repr(call): call
        for batch in {row["batch"] for row in rows}
        for layer in zoo_layers.layers_of(networks, batch)
        for dtype, precision in LAYER_KINDS.values()
        for call in [dataclasses.replace(layer.call, dtype=dtype, precision=precision or layer.call.precision)]
    }


def _takes(call: Call) -> str | None:
    shape, exact = (1, *call.kernel_shape), call.precision == "highest"
    work = Work("ecr", call.x_shape, shape, call.geometry, call.dtype, exact, call.residual)
    alone = dataclasses.replace(work, geometry=call.geometry.without_pool())
    if direct_choice.prefers_direct(alone, "cuda"):
        return "alone"
    return "with its pool" if direct_choice.prefers_pooled(work) else None


def _report(timed: Sequence[_Timed]) -> str:
    ratios = [each.ratio for each in timed]
    lines = [
        f"{len(timed)} timed, {sum(r > 1 for r in ratios)} faster by direct, {sum(r > 1.03 for r in ratios)} of them "
        f"by more than 3 %; {sum(each.takes == 'with its pool' for each in timed)} taken with their pool alone"
    ]
    for kind in dict.fromkeys(each.kind for each in timed):
        taken = [each.ratio for each in timed if each.kind == kind and each.takes == "alone"]
        if taken:
            lines.append(f"{kind}: {len(taken)} taken, geometric mean {timing.geometric_mean(taken):.3f}")
    lines += ["", _line(_TITLES), _line(["---"] * len(_TITLES))]
    for kind, batch in sorted({(each.kind, each.batch) for each in timed}):
        group = [each for each in timed if (each.kind, each.batch) == (kind, batch)]
        taken, left = [each.ratio for each in group if each.takes == "alone"], [e for e in group if e.takes is None]
        of_taken = [timing.geometric_mean(taken), min(taken), max(taken)] if taken else []
        sums = [sum(each.xla_us for each in left) / sum(each.direct_us for each in left)] if left else []
        cells = [f"{n:.2f}" for n in of_taken] or ["-"] * 3
        lines.append(_line([kind, batch, len(taken), *cells, len(left), *([f"{n:.2f}" for n in sums] or ["-"])]))
    return "\n".join(lines)


def _line(cells: Sequence[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    sys.exit(main())
