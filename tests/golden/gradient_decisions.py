"""Which gradients are this package's for every convolution of every network, as text: golden files of their own.

`python tests/golden/gradient_decisions.py` writes them anew, beside those of `decisions`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import decisions

from benchmarks.common.as_on import as_on
from jax_sparse_conv._src.dispatch import gradient_table
from jax_sparse_conv._src.dispatch.planner import Layer
from jax_sparse_conv._src.layers.calls import Call
from jax_sparse_conv._src.primitive import cpu_gradient, gpu_gradient
from jax_sparse_conv._src.tune import gradients

FILES = {"gradients_cpu.txt": "cpu", "gradients_h200.txt": "h200", "gradients_h100.txt": "h100"}
"""By name: the platform, of `decisions`; all in float32 at HIGHEST, as other gradients of a GPU are XLA's."""


def text_of(platform: str) -> str:
    """The content of a file: by x and by the kernel, in batches of 1, 8, 32 and 128."""
    with decisions._with_pairs() if platform == "cpu" else as_on(decisions.GPUS[platform]):
        return "\n".join(_lines(platform)) + "\n"


def _lines(platform: str) -> Iterator[str]:
    calls = [dataclasses.replace(call, precision="highest") for call in decisions.calls() if call.op != "dense"]
    plain = dict.fromkeys(gradient.call for gradient in gradients.gradients_of(calls))
    for call in plain:
        found = {"x": "", "kernel": ""}
        for by in found:
            each = [_decided(call, n, by == "kernel", platform) for n in decisions.BATCHES]
            found[by] = each[0] if len(set(each)) == 1 else " | ".join(each)
        yield f"{decisions._named(call).removesuffix(' linear')}: by x {found['x']}; by the kernel {found['kernel']}"


def _decided(call: Call, images: int, by_kernel: bool, platform: str) -> str:
    bound = gradients.bound(call).of_images(images)
    rules: Any = cpu_gradient if platform == "cpu" else gpu_gradient
    if not rules.takes(bound.other(by_kernel), bound.cotangent, **bound.arguments(by_kernel)):
        return "xla"
    if platform == "cpu" or not by_kernel:
        return "ours"
    device = decisions.GPUS[platform]
    row = gradient_table.on_gpu(bound.workload, by_kernel=True, device=device)
    plan = gradient_table.plan_of(row, Layer.of(bound.workload), device)
    assert plan is not None
    return decisions._short("ours", *plan.tile)


def main() -> None:
    """Write all files."""
    os.environ["JSC_TABLES"] = "shipped"
    for name, platform in FILES.items():
        (decisions.FOLDER / name).write_text(text_of(platform), encoding="utf-8")
        print(name)


if __name__ == "__main__":
    main()
