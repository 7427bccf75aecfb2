"""Errors against float64: of layers by every kernel, and of whole networks, beside XLA's.

    python -m benchmarks accuracy --json results.json
    python -m benchmarks accuracy --networks vgg19 --layers 0 --batch 1 8

Errors are relative, by the Frobenius norm, to the same in float64 on a CPU. Layers have values of both signs in the
kernel and none below zero in x, as behind a ReLU. Networks have weights as initialised and a photograph, or a
batch of it, mirrored and shifted. On a GPU at HIGHEST the best kernel of each family of "direct" has a row of its own,
and a network has two without `jit_inference`, as it is and with batch norms folded. Their layers are not joined, so
that their errors are the layers' own.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

import jax_sparse_conv as jsc
from benchmarks.common import command, results, tables
from jax_sparse_conv import models
from jax_sparse_conv._src import _native, devices, environment
from jax_sparse_conv._src.cli import photograph
from jax_sparse_conv._src.layers.calls import Call
from jax_sparse_conv._src.tune import measure

Row = dict[str, Any]


class Layer(NamedTuple):
    """x [1, size, size, channels] with zeros, a square kernel and 64 output channels; a dense layer has window 0."""

    window: int
    size: int
    channels: int
    zeros: int

    @property
    def name(self) -> str:
        what = f"{self.window}x{self.window}" if self.window else "dense"
        size = f" {self.size}x{self.size}" if self.window else ""
        return f"{what} {self.channels}->64{size}, {self.zeros} % zeros"

    @property
    def products(self) -> int:
        return max(1, self.window**2) * self.channels


LAYERS = tuple(
    Layer(window, size, channels, zeros)
    for window, size, channels in (
        (3, 28, 128),
        (3, 14, 512),
        (3, 7, 2048),
        (1, 7, 2048),
        (5, 28, 256),
        (7, 56, 3),
        (0, 1, 25088),
    )
    for zeros in (0, 50, 90)
)
NETWORKS = ("vgg19", "resnet50", "densenet121")
LOOPS = ("windows", "pixels", "scatter")  # of the CPU's sparse kernels
_PRECISIONS = {"cpu": ("highest",), "gpu": ("highest", "default")}
_COLUMNS = (
    ("case", "case", "<", "{}"),
    ("products", "products", ">", "{}"),
    ("precision", "precision", "<", "{}"),
    ("implementation", "implementation", "<", "{}"),
    ("error", "error", ">", "{:.1e}"),
    ("xla_error", "XLA's", ">", "{:.1e}"),
    ("ratio", "over XLA's", ">", "{:.2f}"),
    ("bias", "bias", ">", "{:+.1e}"),
    ("xla_bias", "XLA's", ">", "{:+.1e}"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Compute every case, print a table and write a JSON file; the result is the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = _parser().parse_args(arguments)
    try:
        command.check_folder("--json", options.json)
        if min(options.batch) < 1:
            raise ValueError(f"--batch {min(options.batch)} is not at least 1")
        rows = [row for layer in LAYERS[: options.layers] for row in _layer(layer)]
        rows += [row for network in options.networks for row in _network(network, options.batch)]
    except (OSError, ValueError) as error:
        print(f"benchmarks accuracy: {error}", file=sys.stderr)
        return 1
    print(tables.aligned(rows, _COLUMNS))
    if options.json:
        content = {**environment.describe_run(), "command": command.portable("accuracy", arguments), "rows": rows}
        results.add(options.json, "accuracy", content)
    return 0


def _layer(layer: Layer) -> Iterator[Row]:
    x, kernel = _operands(layer)
    exact = _exact(layer, x, kernel)
    for precision in _PRECISIONS[devices.default_platform()]:
        case = {"case": layer.name, "products": layer.products, "precision": precision}
        xla = _run(layer, x, kernel, "xla", precision)
        for implementation, loop in _sides(layer):
            with _cpu_loop(loop):  # it ends before another is told
                found = _run(layer, x, kernel, implementation, precision).block_until_ready()
            named = ", ".join(filter(None, (implementation, loop)))
            yield case | _errors(named, found, xla, exact)
        if layer.window and precision == "highest":
            for family, found in _of_families(layer, x, kernel):
                yield case | _errors(f"direct, {family}", found, xla, exact)


def _sides(layer: Layer) -> list[tuple[str | None, str]]:
    """Implementations, and the loops of a CPU that run them; a named one never runs Winograd's."""
    if not layer.window:
        return [("ecr", "")]
    if devices.default_platform() != "cpu":
        return [("direct", ""), ("coo", ""), ("ecr", "")]
    dense = [("direct", ""), *([(None, "winograd")] if layer.window == 3 else [])]
    return [*dense, ("coo", ""), *(("ecr", loop) for loop in LOOPS)]


def _of_families(layer: Layer, x: np.ndarray, kernel: np.ndarray) -> Iterator[tuple[str, jax.Array]]:
    """The families of dense kernels on a GPU that take the layer, and the result by the best tile of each."""
    call = Call.of("conv", (x, kernel, None, None), {"padding": "SAME", "precision": "highest"})
    key, (config, *_) = measure.key_of(call), measure.bound(call)
    if key is None or devices.default_platform() != "gpu":
        return
    for rated in key.layer.candidates(devices.current(), most=1):
        if rated.candidate.family != "ecr":
            yield rated.candidate.family, jax.jit(measure.told(config, rated.candidate))(x, kernel)


def _operands(layer: Layer) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(layer)
    shape = (1, layer.size, layer.size, layer.channels) if layer.window else (1, layer.channels)
    x = np.abs(rng.standard_normal(shape)) * (rng.random(shape) >= layer.zeros / 100)
    window = (layer.window, layer.window) if layer.window else ()
    kernel = rng.standard_normal((*window, layer.channels, 64)) * np.sqrt(2 / layer.products)
    return x.astype(np.float32), kernel.astype(np.float32)


def _run(layer: Layer, x: Any, kernel: Any, implementation: str | None, precision: str) -> jax.Array:
    function: Any = jsc.conv if layer.window else jsc.dense
    return jax.jit(lambda *given: function(*given, implementation=implementation, precision=precision))(x, kernel)


def _exact(layer: Layer, x: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    if not layer.window:
        return x.astype(np.float64) @ kernel.astype(np.float64)
    with jax.enable_x64(True), jax.default_device(jax.local_devices(backend="cpu")[0]):
        wide = (jnp.asarray(values.astype(np.float64)) for values in (x, kernel))
        found = lax.conv_general_dilated(*wide, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return np.asarray(found)


def _network(name: str, batches: Sequence[int]) -> Iterator[Row]:
    """A network as it is, and by the ways to run it, with the same weights as one that is XLA's."""
    network = models.NETWORKS[name]
    image = photograph.load(None, network.input_size)
    images = network.preprocess(photograph.batch_of(image, max(batches)))  # smaller batches are its first ones
    ours, plain = (models.build(name, rngs=nnx.Rngs(0), implementation=which) for which in (None, "xla"))
    exact = _exact_of_network(plain, images)
    for batch in dict.fromkeys(batches):
        x, wanted = images[:batch], exact[:batch]
        case = {"case": f"{name}, {batch} images" if batch > 1 else name, "products": 0, "batch": batch}
        for precision in _PRECISIONS[devices.default_platform()]:
            with jax.default_matmul_precision(precision):
                xla = _under_jit(plain)(x)
                found = {way: run(x) for way, run in _ways(ours, precision)}
            for way, result in found.items():
                yield case | {"precision": precision} | _errors(way, result, xla, wanted)


def _ways(model: models.ConvNet, precision: str) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """How a network may be run: in chains of layers and, on a GPU at HIGHEST, also layer by layer.

    `jit_inference` folds batch norms as well, so that layers with folded ones are between the two.
    """
    yield "jit_inference", jsc.nnx.jit_inference(model)
    if devices.default_platform() != "cpu" and precision == "highest":
        yield "jax.jit", _under_jit(model)
        folded = nnx.clone(model)
        if models.fold_batch_norm(folded) > 0:
            yield "jax.jit, folded", _under_jit(folded)


def _under_jit(model: models.ConvNet) -> Callable[[Any], Any]:
    graph, state = nnx.split(model)
    return jax.jit(lambda x: nnx.merge(graph, state)(x))


def _exact_of_network(model: models.ConvNet, images: Any) -> np.ndarray:
    """In float64, one image after another: the maps of a batch might not fit into memory."""
    graph, state = nnx.split(model)
    with jax.enable_x64(True), jax.default_device(jax.local_devices(backend="cpu")[0]):
        wide = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf, np.float64)), state)
        run = jax.jit(lambda x: nnx.merge(graph, wide)(x))
        return np.concatenate([np.asarray(run(image[None])) for image in np.asarray(images, np.float64)])


def _error(found: Any, exact: np.ndarray) -> float:
    return float(np.linalg.norm(np.asarray(found, np.float64) - exact) / np.linalg.norm(exact))


def _bias(found: Any, exact: np.ndarray) -> float:
    """By which share of itself a result is too large: its error along itself. Roundings to nearest leave none."""
    return float(np.vdot(np.asarray(found, np.float64) - exact, exact) / np.vdot(exact, exact))


def _errors(implementation: str, found: Any, xla: Any, exact: np.ndarray) -> Row:
    error, of_xla = _error(found, exact), _error(xla, exact)
    row = {"implementation": implementation, "error": error, "xla_error": of_xla, "ratio": error / of_xla}
    return row | {"bias": _bias(found, exact), "xla_bias": _bias(xla, exact)}


@contextlib.contextmanager
def _cpu_loop(name: str) -> Iterator[None]:
    if not name:
        yield
        return
    _native.set_cpu_loop(name)
    try:
        yield
    finally:
        _native.set_cpu_loop("auto")


def _parser() -> argparse.ArgumentParser:
    parser = command.parser("accuracy", __doc__)
    add: Any = parser.add_argument
    add("--layers", type=int, default=len(LAYERS), help="only so many of the layers")
    add("--networks", nargs="*", default=list(NETWORKS), choices=sorted(models.NETWORKS), metavar="NAME")
    add("--batch", type=int, nargs="+", default=[1], help="images of a call of a network")
    add("--json", type=Path)
    return parser
