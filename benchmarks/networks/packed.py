"""What packing kernels once is worth for whole networks whose weights are arguments of the jitted program.

    python -m benchmarks packed --networks resnet50 vgg19 --json results.json

Networks have seeded weights, folded batch norms and the zeros of a trained network. In turns: dense XLA ("xla"),
`implementation=None` ("plain") and None after `jax_sparse_conv.nnx.pack(model)` ("packed"), each with the model's state
as an argument of `jax.jit`; as "nnx_..." under `nnx.jit`, which returns a copy of the state from every call; as
"nnx_read_..." under `nnx.jit` with `graph_updates=False`, which does not; and dense XLA and None with the weights as
constants, "constant_...", which packs while it traces.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

import jax_sparse_conv as jsc
from benchmarks.common import command, results, tables
from jax_sparse_conv import models
from jax_sparse_conv._src import environment
from jax_sparse_conv._src.cli import photograph
from jax_sparse_conv._src.plans import timing

NETWORKS = ("vgg19", "resnet50", "densenet169", "regnetx_400mf")
_ALL = ("xla", "plain", "packed")
GROUPS = {"": _ALL, "nnx_": _ALL, "nnx_read_": _ALL, "constant_": ("xla", "plain")}
SIDES = tuple(prefix + side for prefix, sides in GROUPS.items() for side in sides)
RATIOS = tuple(side for side in SIDES if not side.endswith("xla"))
_COLUMNS = (
    ("network", "network", "<", "{}"),
    ("batch", "batch", ">", "{}"),
    *((f"{side}_us", f"{side} us", ">", "{:.0f}") for side in SIDES if side.endswith("xla")),
    *((f"{side}_ratio", side, ">", "{:.2f}") for side in RATIOS),
    ("weights_mb", "weights MB", ">", "{:.0f}"),
    ("copies_mb", "copies MB", ">", "{:.0f}"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Time every network, print a table and write a JSON file; the result is the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = _parser().parse_args(arguments)
    try:
        command.check_folder("--json", options.json)
        rows = [measure(name, *prepare(name), options.repeats, options.batch) for name in options.networks]
    except (OSError, ValueError) as error:
        print(f"benchmarks packed: {error}", file=sys.stderr)
        return 1
    report(rows, options, command.portable("packed", arguments))
    return 0


def prepare(name: str) -> tuple[models.ConvNet, jax.Array]:
    """A network and the photograph that its profile was set on."""
    network = models.NETWORKS[name]
    x = network.preprocess(photograph.batch_of(photograph.load(None, network.input_size), 1))
    model = models.build(name, rngs=nnx.Rngs(0))
    models.fold_batch_norm(model)
    models.set_sparsity_profile(model, x)
    return model, x


def measure(name: str, model: models.ConvNet, x: jax.Array, repeats: int, batch: int) -> tables.Row:
    """Times of all sides, their ratios to XLA's of the same kind, and what the copies take."""
    functions, copies = _sides(model)
    x = jax.numpy.concatenate([jax.numpy.roll(x, 3 * image, 2) for image in range(batch)])
    results = [np.asarray(function(x)) for function in functions.values()]
    error = max(np.linalg.norm(result - results[0]) / np.linalg.norm(results[0]) for result in results[1:])
    times = timing.streaks(functions, [(each,) for each in timing.rotations(x)], repeats)
    row: tables.Row = {"network": name, "batch": batch, "error": float(error)}
    row |= {f"{side}_us": found.microseconds for side, found in times.items()}
    row |= {f"{side}_best_us": 1e6 * found.best for side, found in times.items()}
    for side in RATIOS:
        dense = times[side.replace("plain", "xla").replace("packed", "xla")]
        row |= {f"{side}_ratio": dense.median / times[side].median}
        row |= {f"{side}_best_ratio": dense.best / times[side].best}
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))
    return row | {"weights_mb": weights / 1e6, "copies_mb": copies / 1e6}


def report(rows: Sequence[tables.Row], options: argparse.Namespace, line: str) -> None:
    """Print the table and write the file."""
    print(tables.aligned(rows, _COLUMNS))
    if options.json:
        content = {**environment.describe_run(), "command": line, "repeats": options.repeats, "rows": rows}
        results.add(options.json, "packed", content)


def _sides(model: models.ConvNet) -> tuple[dict[str, Callable[[jax.Array], Any]], int]:
    """The sides as functions of the images, and the bytes of the packed copies."""
    chosen = {"xla": _copy(model, "xla"), "plain": _copy(model, None), "packed": _copy(model, None)}
    jsc.nnx.pack(chosen["packed"])
    read = functools.partial(_under_nnx, graph_updates=False)
    kinds = {"": _with_state, "nnx_": _under_nnx, "nnx_read_": read, "constant_": _constant}
    functions = {prefix + side: kinds[prefix](chosen[side]) for prefix, sides in GROUPS.items() for side in sides}
    held = {side: sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(each))) for side, each in chosen.items()}
    return functions, held["packed"] - held["plain"]


def _copy(model: models.ConvNet, implementation: str | None) -> models.ConvNet:
    """The network with the same arrays and an implementation of its own."""
    other = nnx.merge(*nnx.split(model))
    models.set_network_implementation(other, implementation)
    return other


def _with_state(model: models.ConvNet) -> Callable[[jax.Array], Any]:
    graph, state = nnx.split(model)
    leaves, structure = jax.tree.flatten(state)
    run = jax.jit(lambda leaves, x: nnx.merge(graph, jax.tree.unflatten(structure, leaves))(x))
    return lambda x: run(leaves, x)


def _under_nnx(model: models.ConvNet, **arguments: Any) -> Callable[[jax.Array], Any]:
    run = nnx.jit(lambda model, x: model(x), **arguments)
    return lambda x: run(model, x)


def _constant(model: models.ConvNet) -> Callable[[jax.Array], Any]:
    return jax.jit(lambda x: model(x))  # type: ignore[no-any-return]


def _parser() -> argparse.ArgumentParser:
    parser = command.parser("packed", __doc__)
    add = parser.add_argument
    add("--networks", nargs="+", choices=sorted(models.NETWORKS), default=list(NETWORKS), metavar="NAME")
    add("--batch", type=int, default=1)
    add("--repeats", type=int, default=10)
    add("--json", type=Path)
    return parser
