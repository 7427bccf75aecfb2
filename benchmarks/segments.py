"""Chains of layers as one kernel (`jsc.fuse`) against the same layers one by one and against XLA.

    python -m benchmarks.segments --both-flags --json results.json

ResNet-50 without its classifier, with seeded weights, and one of its blocks, all sides in turns: the network as calls
that are dispatched without waiting, the block as many calls in one jit. All three sides are dense: none of the gain
comes from zeros.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jax_sparse_conv as jsc
from benchmarks import command
from jax_sparse_conv import environment, timing
from jax_sparse_conv.models.resnet import resnet50

KINDS = {"highest": ("float32", "highest"), "default": ("float32", None), "bfloat16": ("bfloat16", None)}
_BLOCK = (1, 14, 14, 1024)  # of conv4, whose residual is its input
_CALLS = 20  # of a network before it is waited for


def main(argv: Sequence[str] | None = None) -> int:
    """Time both, print a line each and write a JSON file; the result is the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = _parser().parse_args(arguments)
    try:
        content = _both_flags(arguments) if options.both_flags else _one_process(options)
    except (OSError, ValueError) as error:
        print(f"benchmarks.segments: {error}", file=sys.stderr)
        return 1
    content["command"] = command.portable("benchmarks.segments", arguments)
    print("\n".join(map(_line, content["rows"])))
    command.write(options.json, content)
    return 0


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['network']} {row['kind']}, flags {row['flags']}: XLA {row['xla_us']:.1f} us, direct "
        f"{row['direct_us']:.1f}, fused {row['fused_us']:.1f}, XLA / fused {row['ratio']:.2f}, error {row['error']:.1e}"
    )


def _parser() -> argparse.ArgumentParser:
    parser = command.parser("benchmarks.segments", __doc__)
    add = parser.add_argument
    add("--kinds", nargs="+", choices=tuple(KINDS), default=list(KINDS), help="precision or dtype")
    add("--networks", nargs="+", choices=("block", "resnet50"), default=["block", "resnet50"])
    add("--batch", type=int, default=1)
    add("--size", type=int, default=224, help="rows and columns of ResNet-50's images")
    add("--repeats", type=int, default=30)
    add("--both-flags", action="store_true", help="XLA's default flags, then command buffers, a process each")
    add("--json", type=Path)
    return parser


def _one_process(options: argparse.Namespace) -> dict[str, Any]:
    header = environment.describe_run()
    flags = "command buffers" if "command_buffer" in os.environ.get("XLA_FLAGS", "") else "default"
    rows = []
    keys = [(network, kind) for network in options.networks for kind in options.kinds]
    sides = {key: _prepare(*key, options) for key in keys}
    for (network, kind), (functions, x) in sides.items():
        row = _measure(network, functions, x, options)
        rows.append({"network": network, "kind": kind, "flags": flags, "batch": options.batch, **row})
        print(_line(rows[-1]), file=sys.stderr)
    return {**header, "xla_flags": os.environ.get("XLA_FLAGS", ""), "repeats": options.repeats, "rows": rows}


def _prepare(network: str, kind: str, options: argparse.Namespace) -> tuple[dict[str, timing.Function], jax.Array]:
    """The sides by name, compiled for the network, and an input."""
    dtype, precision = KINDS[kind]
    function, x = (_block if network == "block" else _resnet)(dtype, precision, options)
    sides: dict[str, Any] = {
        "xla": jax.jit(functools.partial(function, "xla")),
        "direct": jax.jit(functools.partial(function, "direct")),
        "fused": jax.jit(jsc.fuse(functools.partial(function, "direct"))),
    }
    if network == "block":
        return sides, x
    # One after another: XLA tunes its convolutions by timing them.
    return {name: side.lower(x).compile() for name, side in sides.items()}, x


def _measure(
    network: str, sides: dict[str, timing.Function], x: jax.Array, options: argparse.Namespace
) -> dict[str, Any]:
    operands = [(each,) for each in timing.rotations(x)]
    if network == "block":
        times = timing.per_call(sides, operands, options.repeats)
    else:
        times = timing.blocked(sides, operands, options.repeats, _CALLS)
    single = timing.blocked(sides, operands, options.repeats)
    results = {name: np.asarray(side(x), np.float64) for name, side in sides.items()}
    difference = np.linalg.norm(results["fused"] - results["xla"]) / np.linalg.norm(results["xla"])
    return {
        **{f"{name}_us": timed.microseconds for name, timed in times.items()},
        **{f"{name}_latency_us": timed.microseconds for name, timed in single.items()},
        "ratio": times["xla"].median / times["fused"].median,
        "over_direct": times["direct"].median / times["fused"].median,
        "error": float(difference),  # of the features, against XLA's in the same precision
    }


def _resnet(dtype: str, precision: Any, options: argparse.Namespace) -> tuple[Callable[..., jax.Array], jax.Array]:
    model = resnet50(num_classes=10, rngs=nnx.Rngs(0), precision=precision)
    jsc.models.fold_batch_norm(model)
    nnx.update(model, jax.tree.map(lambda leaf: leaf.astype(dtype), nnx.state(model)))
    models = {implementation: nnx.clone(model) for implementation in ("xla", "direct")}
    for implementation, each in models.items():
        jsc.models.set_network_implementation(each, implementation)
    x = jax.random.normal(jax.random.key(1), (options.batch, options.size, options.size, 3)).astype(dtype)
    return lambda implementation, x: models[implementation].features(x), x


def _block(dtype: str, precision: Any, options: argparse.Namespace) -> tuple[Callable[..., jax.Array], jax.Array]:
    rng = np.random.default_rng(0)
    shape = (options.batch, *_BLOCK[1:])
    width, features = shape[3] // 4, shape[3]
    shapes = [(1, 1, features, width), (3, 3, width, width), (1, 1, width, features)]
    kernels = [jnp.asarray(rng.standard_normal(s) * np.sqrt(2 / np.prod(s[:3])), dtype) for s in shapes]

    def run(implementation: str, x: jax.Array) -> jax.Array:
        common: dict[str, Any] = {"activation": "relu", "precision": precision, "implementation": implementation}
        y = jsc.conv(jsc.conv(x, kernels[0], **common), kernels[1], **common)
        return jsc.conv(y, kernels[2], residual=x, **common)

    return run, jnp.asarray(np.maximum(rng.standard_normal(shape), 0), dtype)


def _both_flags(arguments: Sequence[str]) -> dict[str, Any]:
    """Two processes, because XLA reads its flags once."""
    rest = [argument for argument in arguments if argument != "--both-flags"]
    default, buffers = (_subprocess(rest, flags) for flags in ("", command.COMMAND_BUFFERS))
    flags = [default["xla_flags"], buffers["xla_flags"]]
    return {**default, "xla_flags": flags, "rows": default["rows"] + buffers["rows"]}


def _subprocess(arguments: Sequence[str], flags: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        command.run("benchmarks.segments", [*arguments, "--json", str(path)], flags)
        return dict(json.loads(path.read_text(encoding="utf-8")))


if __name__ == "__main__":
    sys.exit(main())
