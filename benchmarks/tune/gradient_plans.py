"""Every plan of the gradients of kernels at HIGHEST on a Hopper GPU: what the planner's model picks, and the fastest.

    python -m benchmarks gradient_plans
    python -m benchmarks gradient_plans --layers 3 --most 200

For each layer of `gradients --set large` without groups, the plans that the model expects to be fastest. "kernel
gradient" of `dispatch/model.json` is chosen by hand after this.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from benchmarks.common import command, tables
from benchmarks.suites import gradients
from jax_sparse_conv._src import devices
from jax_sparse_conv._src.dispatch.planner import Layer, numbers
from jax_sparse_conv._src.plans import timing
from jax_sparse_conv._src.primitive import gpu_gradient
from jax_sparse_conv._src.problem.geometry import Geometry

_COLUMNS = (
    ("layer", "layer", "<", "{}"),
    ("plans", "plans", ">", "{}"),
    ("picked", "picked", "<", "{}"),
    ("expected_us", "expected us", ">", "{:.0f}"),
    ("us", "us", ">", "{:.0f}"),
    ("best", "fastest", "<", "{}"),
    ("best_us", "us", ">", "{:.0f}"),
    ("regret", "ratio", ">", "{:.3f}"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Time plans and print a table; the result is the exit status."""
    options = _parser().parse_args(sys.argv[1:] if argv is None else argv)
    if not devices.current().has_warpgroups:
        print("benchmarks gradient_plans: this needs a Hopper GPU, and a build with code for it", file=sys.stderr)
        return 1
    rows = []
    for row in _rows(options):
        rows.append(row)
        print(tables.aligned([row], _COLUMNS), flush=True)
    mean = float(np.exp(np.mean([np.log(row["regret"]) for row in rows])))
    print(f"ratio: {mean:.3f} in geometric mean, {max(row['regret'] for row in rows):.3f} at most")
    return 0


def _rows(options: argparse.Namespace) -> Iterator[tables.Row]:
    for layer in [each for each in gradients.LARGE if each.groups == 1][: options.layers]:
        x, kernel, cotangent = gradients.operands(layer)
        pads = lax.padtype_to_pads(x.shape[1:3], kernel.shape[:2], (layer.stride,) * 2, "SAME")
        geometry = Geometry((layer.stride,) * 2, (pads[0], pads[1]), (1, 1), 1)
        sizes, _ = numbers(x.shape, (1, *kernel.shape), geometry)
        plans = Layer(sizes, (), x.dtype.itemsize, precise=True).kernel_gradients(devices.current(), options.most)
        if not plans:
            continue
        like = jax.ShapeDtypeStruct((1, *kernel.shape), kernel.dtype)
        sides = {
            str(plan.tile): jax.jit(functools.partial(gpu_gradient.of_kernel, geometry=geometry, like=like, plan=plan))
            for plan in plans
        }
        times = timing.per_call(sides, [(x, cotangent)], options.repeats)
        us = {name: each.microseconds for name, each in times.items()}
        picked, best = str(plans[0].tile), min(us, key=us.__getitem__)
        row = {"layer": layer.name, "plans": len(plans), "picked": picked, "expected_us": plans[0].us}
        yield row | {"us": us[picked], "best": best, "best_us": us[best], "regret": us[picked] / us[best]}


def _parser() -> argparse.ArgumentParser:
    parser = command.parser("gradient_plans", __doc__)
    add: Any = parser.add_argument
    add("--layers", type=int, help="only so many of the layers")
    add("--most", type=int, default=24, help="plans of a layer, at most")
    add("--repeats", type=int, default=5)
    return parser
