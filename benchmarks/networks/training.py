"""A training step of whole networks: loss and gradients, with XLA's convolutions and with this package's.

    python -m benchmarks training --networks vgg16 resnet50 --batch 4 --json results.json
    python -m benchmarks training --networks resnet50 --batch 32 --precision highest
    python -m benchmarks training --networks resnet50 --batch 32 --precision bfloat16

A step is the loss and the gradients of all weights under `jax.jit`, with the statistics of batch norms in training.
Weights are as initialised, so about half of what a ReLU puts out is zero. "nnx_resnet50" is of Flax's own layers:
`jax.grad` of its loss, and of `jsc.accelerate` of its loss. Sides take turns, each with two steps that do not count in
front of one that does: a step follows others of its own, and finds the memory that they gave back. With PyTorch
installed its step of torchvision's network of that name is a side, too, with as many threads and, at HIGHEST, without
TF32. "bfloat16" computes in that, with weights in float32, as PyTorch's autocast does.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jax_sparse_conv as jsc
from benchmarks.common import command, results, tables
from benchmarks.networks import frameworks
from jax_sparse_conv import models
from jax_sparse_conv._src import environment
from jax_sparse_conv._src.cli import photograph
from jax_sparse_conv._src.plans import timing

NETWORKS = ("vgg16", "resnet50", "densenet121")
FLAXS = "nnx_resnet50"  # Flax's own layers
_BFLOAT16 = "bfloat16"
_UNTIMED = 2
_COLUMNS = (
    ("network", "network", "<", "{}"),
    ("batch", "batch", ">", "{}"),
    ("precision", "precision", "<", "{}"),
    ("xla_ms", "XLA ms", ">", "{:.0f}"),
    ("torch_ms", "PyTorch ms", ">", "{:.0f}"),
    ("ours_ms", "ours ms", ">", "{:.0f}"),
    ("ratio", "over XLA", ">", "{:.2f}"),
    ("torch_ratio", "over PyTorch", ">", "{:.2f}"),
    ("error", "error", ">", "{:.1e}"),
)
Side = Callable[[jax.Array], Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Time every network, print a table and write a JSON file; the result is the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = _parser().parse_args(arguments)
    try:
        command.check_folder("--json", options.json)
        if options.precision == _BFLOAT16 and FLAXS in options.networks:
            raise ValueError(f"--precision {_BFLOAT16} is of this package's networks, not of {FLAXS}")
        with jax.default_matmul_precision("default" if options.precision == _BFLOAT16 else options.precision):
            rows = [
                measure(name, options.batch, options.repeats, options.size, options.precision)
                for name in options.networks
            ]
    except (OSError, ValueError) as error:
        print(f"benchmarks training: {error}", file=sys.stderr)
        return 1
    print(tables.aligned(rows, [column for column in _COLUMNS if all(column[0] in row for row in rows)]))
    if options.json:
        content = {**environment.describe_run(), "command": command.portable("training", arguments)}
        results.add(options.json, "training", content | {"repeats": options.repeats, "rows": rows})
    return 0


def measure(name: str, batch: int, repeats: int, size: int | None, precision: str) -> tables.Row:
    """Times of all sides, and how far our gradients are from XLA's."""
    network = models.NETWORKS[_published(name)]
    x = network.preprocess(photograph.batch_of(photograph.load(None, size or network.input_size), batch))
    sides: dict[str, Side] = {side: _step(name, which, precision) for side, which in (("xla", "xla"), ("ours", None))}
    found = {
        side: [np.asarray(leaf, np.float32) for leaf in jax.tree.leaves(step(x)[1])] for side, step in sides.items()
    }
    off = sum(np.linalg.norm(a - b) ** 2 for a, b in zip(found["xla"], found["ours"], strict=True))
    error = float(np.sqrt(off / sum(np.linalg.norm(a) ** 2 for a in found["xla"])))
    other = _of_torch(name, x, precision)
    times = timing.streaks(sides | ({} if other is None else {"torch": other}), [(x,)], repeats, _UNTIMED)
    row: tables.Row = {"network": name, "batch": batch, "size": x.shape[1], "error": error, "precision": precision}
    row |= {f"{side}_ms": each.microseconds / 1e3 for side, each in times.items()}
    row |= {f"{side}_best_ms": 1e3 * each.best for side, each in times.items()}
    row |= {"ratio": row["xla_ms"] / row["ours_ms"], "best_ratio": row["xla_best_ms"] / row["ours_best_ms"]}
    return row | ({} if other is None else {"torch_ratio": row["torch_ms"] / row["ours_ms"]})


def _step(name: str, implementation: str | None, precision: str) -> Side:
    step, weights, rest = step_of(name, implementation, jnp.bfloat16 if precision == _BFLOAT16 else None)
    return lambda x: step(weights, rest, x)


def step_of(name: str, implementation: str | None, dtype: Any = None) -> tuple[Any, Any, Any]:
    """The jitted step of a network in training, and its first two arguments; the third one is x.

    dtype: of the computation, None for x's; not of Flax's own network.
    """
    if name == FLAXS:
        model: nnx.Module = frameworks.nnx_resnet50_in_training()
    else:
        model = models.build(name, rngs=nnx.Rngs(0), implementation=implementation, dtype=dtype)
        model.train()
    graph, weights, rest = nnx.split(model, nnx.Param, ...)

    def loss(weights: Any, rest: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        merged: Any = nnx.merge(graph, weights, rest, copy=True)
        likely = jax.nn.log_softmax(merged(x).astype(jnp.float32))
        return -likely[:, 0].mean(), nnx.state(merged, nnx.Not(nnx.Param))

    used = jsc.accelerate(loss) if name == FLAXS and implementation is None else loss
    return jax.jit(jax.value_and_grad(used, has_aux=True)), weights, rest


def _published(name: str) -> str:
    """The network of `models` and of torchvision that it is."""
    return name.removeprefix("nnx_")


def _of_torch(name: str, x: jax.Array, precision: str) -> Side | None:
    """The same of torchvision's network, None without PyTorch or there."""
    try:
        torch, zoo = importlib.import_module("torch"), importlib.import_module("torchvision").models
    except (ImportError, RuntimeError):  # the latter of a torchvision that is for another torch
        return None
    name = _published(name)
    if not hasattr(zoo, name):
        return None
    on = "cuda" if jax.default_backend() == "gpu" else "cpu"
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.backends.cudnn.allow_tf32 = precision != "highest"
    model = getattr(zoo, name)().to(on).train().to(memory_format=torch.channels_last)
    images = torch.from_numpy(np.array(jnp.transpose(x, (0, 3, 1, 2)))).to(on, memory_format=torch.channels_last)
    labels = torch.zeros(len(images), dtype=torch.long, device=on)

    def step(_: Any) -> np.ndarray:
        model.zero_grad()
        with torch.autocast(on, torch.bfloat16, enabled=precision == _BFLOAT16):
            loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        return np.asarray(loss.detach().cpu())  # which waits

    return step


def _parser() -> argparse.ArgumentParser:
    parser = command.parser("training", __doc__)
    add: Any = parser.add_argument
    add("--networks", nargs="+", choices=sorted([*models.NETWORKS, FLAXS]), default=list(NETWORKS), metavar="NAME")
    add("--batch", type=int, default=4)
    add("--size", type=int, help="height and width of the images; the network's own without it")
    add("--precision", choices=("default", "highest", _BFLOAT16), default="default")
    add("--repeats", type=int, default=5)
    add("--json", type=Path)
    return parser
