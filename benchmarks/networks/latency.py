"""What one call costs that is waited for, and how much of that is the device's work.

    python -m benchmarks latency --networks resnet50 densenet121 --kinds default bfloat16 --json results.json

Sides: "nothing" reads one element of the image; "product" is one product of matrices that takes about as long as the
network ("jit_inference"); "xla" is the network by XLA with its weights as constants, "xla graphs" the same as CUDA
graphs; "torch" is torchvision's network of that name in a CUDA graph, channels last, where torch has a GPU. Times of a
call: "dispatched" among many that nothing waits for, which is the device's time unless the host is slower; "waited" by
`block_until_ready`; "polled" by asking `is_ready()` until it is, so that the thread does not sleep. Calls of one side
follow each other. Weights are seeded, with the zeros of a trained network, and batch norms are folded.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jax_sparse_conv as jsc
from benchmarks.common import command, suite, tables
from benchmarks.common.cases import KINDS
from benchmarks.networks.packed import prepare
from jax_sparse_conv import models
from jax_sparse_conv._src import devices

NETWORKS = ("vgg19", "resnet50", "densenet121", "regnetx_16gf")
WAYS = ("dispatched", "waited", "polled")
_WARM_UP, _DISPATCHED = 10, 100  # calls
_SIDE = 2048  # rows and columns of a product
_Call = Callable[[], Any]
_Done = Callable[[Any], bool]


def main(argv: Sequence[str] | None = None) -> int:
    """Time every network, print a table and write a JSON file; the result is the exit status."""
    return suite.run("latency", _parser(), argv, _cases, _table)


def _cases(options: argparse.Namespace) -> Iterator[list[tables.Row]]:
    return (measure(name, kind, options.repeats) for name in options.networks for kind in options.kinds)


def _table(rows: list[tables.Row]) -> str:
    named = [(key, key, "<", "{}") for key in ("network", "kind", "side")]
    return tables.aligned(rows, [*named, *((f"{way}_us", f"{way} us", ">", "{:.0f}") for way in WAYS)])


def measure(name: str, kind: str, repeats: int) -> list[tables.Row]:
    """A row for every side: us of a call that is dispatched, waited for and polled."""
    dtype, precision = KINDS[kind]
    with jax.default_matmul_precision(precision):
        with jax.default_device(jax.devices("cpu")[0]):  # compiling its many small steps for a GPU takes longer
            model, x = prepare(name)
        place = lambda leaf: jax.device_put(leaf, jax.devices()[0]).astype(dtype)  # noqa: E731
        nnx.update(model, jax.tree.map(place, nnx.state(model)))
        x = place(x)
        sides: dict[str, tuple[_Call, _Call, _Done]] = {
            side: _of_jax(function, x) for side, function in _sides(model, x).items()
        }
        us = {"jit_inference": times(*sides["jit_inference"], repeats)}
        sides["product"] = _of_jax(_product(1e-6 * us["jit_inference"]["dispatched"]), x)
        if (torchs := _torch(name, dtype, precision)) is not None:
            sides["torch"] = torchs
        us |= {side: times(*each, repeats) for side, each in sides.items() if side not in us}
    named = {"network": name, "kind": kind}
    return [{**named, "side": side, **{f"{way}_us": us[side][way] for way in WAYS}} for side in us]


def times(call: _Call, wait: _Call, is_done: _Done, repeats: int) -> dict[str, float]:
    """Medians in us of a call, by how it ends."""
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(_WARM_UP):
        wait()
    for _ in range(repeats):
        start = time.perf_counter()
        wait()
        found["waited"].append(time.perf_counter() - start)
    for _ in range(repeats):
        start = time.perf_counter()
        result = call()
        while not is_done(result):
            pass
        found["polled"].append(time.perf_counter() - start)
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(_DISPATCHED - 1):
            call()
        wait()
        found["dispatched"].append((time.perf_counter() - start) / _DISPATCHED)
    return {way: 1e6 * statistics.median(each) for way, each in found.items()}


def _of_jax(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> tuple[_Call, _Call, _Done]:
    return lambda: function(x), lambda: jax.block_until_ready(function(x)), lambda y: bool(y.is_ready())


def _sides(model: models.ConvNet, x: jax.Array) -> dict[str, Callable[[jax.Array], jax.Array]]:
    dense = nnx.clone(model)
    models.set_network_implementation(dense, "xla")
    found: dict[str, Callable[[jax.Array], jax.Array]] = {
        "nothing": jax.jit(lambda x: x[0, 0, 0, 0] + 1),
        "jit_inference": jsc.nnx.jit_inference(model),
        "xla": jax.jit(lambda x: dense(x)),
    }
    if devices.default_platform() == "gpu":
        found["xla graphs"] = jax.jit(lambda x: dense(x), compiler_options=command.GRAPHS)
    return found


def _product(seconds: float) -> Callable[[jax.Array], jax.Array]:
    """One kernel that takes about so long: rows of a matrix times a square one."""
    square = jnp.ones((_SIDE, _SIDE))

    def made(rows: int) -> Callable[[jax.Array], jax.Array]:
        matrix = jnp.ones((rows, _SIDE))
        return jax.jit(lambda x: jnp.matmul(matrix * x[0, 0, 0, 0].astype(jnp.float32), square, precision="highest"))

    x, rows = jnp.ones((1, 1, 1, 1)), 128
    function = made(rows)
    while rows < 2**20 and 1e-6 * times(*_of_jax(function, x), 3)["dispatched"] < 0.8 * seconds:
        rows *= 2
        function = made(rows)
    return function


def _torch(name: str, dtype: Any, precision: str) -> tuple[_Call, _Call, _Done] | None:
    """torchvision's network in a CUDA graph, or None."""
    if any(importlib.util.find_spec(each) is None for each in ("torch", "torchvision")):
        return None
    import torch
    import torchvision

    build = getattr(torchvision.models, name, None)
    if build is None or not torch.cuda.is_available():
        return None
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = precision != "highest"
    kind = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[str(jnp.dtype(dtype))]
    network = build(weights=None).eval().cuda().to(memory_format=torch.channels_last, dtype=kind)
    x = torch.randn(1, 3, 224, 224, device="cuda", dtype=kind).contiguous(memory_format=torch.channels_last)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.stream(stream):
        for _ in range(3):
            network(x)
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            network(x)

    def call() -> Any:
        graph.replay()
        event = torch.cuda.Event()
        event.record()
        return event

    def wait() -> None:
        graph.replay()
        torch.cuda.synchronize()

    return call, wait, lambda event: bool(event.query())


def _parser() -> argparse.ArgumentParser:
    parser = command.parser("latency", __doc__)
    add = parser.add_argument
    add("--networks", nargs="+", choices=sorted(models.NETWORKS), default=list(NETWORKS), metavar="NAME")
    add("--kinds", nargs="+", choices=tuple(KINDS), default=["default"], help="precision or dtype")
    add("--repeats", type=int, default=50)
    add("--json", type=Path)
    return parser
