"""ImageNet weights on photographs: is the port right, and does skipping change anything?

    python -m benchmarks real_weights --data DIR [--network densenet169] [--json PATH]

`resnet50` is its stages 1 to 4 in Keras's v1 layout, `densenet169` all but its classifier. DIR holds their weights,
`resnet50_stages1to4.safetensors` or `densenet169_features.safetensors` (Keras names), `images.npz` (`images`, uint8
[N, 224, 224, 3]) and perhaps `sparsity.csv` (zero fraction of every layer's input). Three checks, exit status 1 if one
fails:

1. dense ("xla") against sparse at the last feature map, float32: relative Frobenius difference of at most 1e-5;
2. the per-channel mean of what each batch norm sees correlates above 0.9 with its stored moving mean on at least 95 %
   of the layers, which a wrong stride, padding or order of channels does not survive;
3. with `sparsity.csv`, zero fractions of the layers' inputs within 0.005 of it (all its images).

With `--repeats N` both sides are timed as well, `--batch` images at a time, their weights constants of the jitted
program.
"""

from __future__ import annotations

import argparse
import csv
import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
from flax import nnx

from benchmarks.common import command, results
from jax_sparse_conv import models
from jax_sparse_conv._src import environment
from jax_sparse_conv._src.plans import timing
from jax_sparse_conv.models.layers import BeforeLayer
from jax_sparse_conv.models.names import rules
from jax_sparse_conv.models.units import ConvUnit, Layer, PreActivation

IMAGES = "images.npz"
MOST_DIFFERENCE = 1e-5
LEAST_CORRELATION = 0.9
LEAST_SHARE = 0.95
MOST_ZERO_DIFFERENCE = 0.005


class Source(NamedTuple):
    """A file of weights, and the forward pass to the last feature map that it is enough for."""

    weights: str
    features: Callable[..., jax.Array]  # (model, x, before_layer=None)


def _stages_1_to_4(model: Any, x: jax.Array, before_layer: BeforeLayer | None = None) -> jax.Array:
    return model.features(x, last_stage=4, before_layer=before_layer)


def _features(model: models.ConvNet, x: jax.Array, before_layer: BeforeLayer | None = None) -> jax.Array:
    return model.features(x, before_layer=before_layer)


SOURCES = {
    "resnet50": Source("resnet50_stages1to4.safetensors", _stages_1_to_4),
    "densenet169": Source("densenet169_features.safetensors", _features),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the checks, print a table and write a JSON file; the result is the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = _parser().parse_args(arguments)
    try:
        failures = _run(options, command.portable("real_weights", arguments))
    except (OSError, ValueError) as error:
        print(f"benchmarks real_weights: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    return 1 if failures else 0


def _run(options: argparse.Namespace, command_line: str) -> list[str]:
    """The sentences of the checks that failed."""
    command.check_folder("--json", options.json)
    source = SOURCES[options.network]
    weights = options.data / source.weights
    images = read_images(options.data, source.weights)
    if not 1 <= options.batch <= len(images):
        raise ValueError(f"--batch {options.batch} must be 1 to {len(images)}, the photographs in {IMAGES}")
    model = models.build(options.network, precision="highest", rngs=nnx.Rngs(0))
    loaded = models.load_weights(model, weights, partial=True)
    if loaded.convention != "keras":
        raise ValueError(f"{weights} has names of {loaded.convention}, not of keras")
    x = models.NETWORKS[options.network].preprocess(images, loaded.convention)
    zeros, means = statistics(model, x, source.features)
    correlations = correlate(model, means, weights)
    difference = compare(model, x, options.implementation, source.features)
    zero_differences = compare_zeros(zeros, options.data / "sparsity.csv", options.network)
    times = None
    if options.repeats:
        times = time_both(model, x, options.implementation, source.features, options.repeats, options.batch)
    result = environment.describe_run() | {
        "command": command_line,
        "network": options.network,
        "batch": options.batch,
        "images": len(images),
        "implementation": options.implementation,
        "relative_frobenius": difference,
        "times": times,
        "correlations": correlations,
        "zero_fractions": zeros,
        "zero_differences": zero_differences,
    }
    failures = report(result, loaded.missing)
    result["failures"] = failures
    results.add(options.json, "real_weights", result)
    return failures


def read_images(folder: Path, weights: str) -> np.ndarray:
    """The photographs, uint8 [N, 224, 224, 3], of a folder that has weights too."""
    if not folder.is_dir():
        raise ValueError(f"--data {folder} is not a folder")
    for name in (weights, IMAGES):
        if not (folder / name).is_file():
            raise ValueError(f"--data {folder} has no file {name}")
    try:
        images: np.ndarray = np.load(folder / IMAGES)["images"]
    except (EOFError, IndexError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise ValueError(f"{folder / IMAGES} is not an npz file with an array images") from error
    return images


def statistics(
    model: models.ConvNet, x: jax.Array, features: Callable[..., jax.Array]
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """By layer, dense: the zero fraction of a convolution's input, and the mean [C] of what a batch norm sees."""

    @nnx.jit
    def run(model: models.ConvNet, x: jax.Array) -> tuple[dict[str, jax.Array], dict[str, jax.Array], jax.Array]:
        zeros, means = {}, {}

        def measure(name: str, layer: Layer, value: jax.Array, residual: jax.Array | None) -> None:
            if isinstance(layer, PreActivation):
                means[name] = jnp.mean(value, axis=(0, 1, 2))
            elif isinstance(layer, ConvUnit):
                zeros[name] = jnp.mean(value == 0, dtype=jnp.float32)
                if layer.batch_norm is not None:
                    means[name] = jnp.mean(layer.convolved(value), axis=(0, 1, 2))

        last = features(model, x, before_layer=measure)
        return zeros, means, jnp.mean(last == 0, dtype=jnp.float32)

    models.set_network_implementation(model, "xla")
    zeros, means, last = run(model, x)
    return zeros | {"features": last}, means


def correlate(model: models.ConvNet, means: dict[str, jax.Array], weights: Path) -> dict[str, float]:
    """Correlation over channels of the measured and the stored mean of each batch norm's input."""
    found, prefixes = {}, rules(model)["keras"](model)
    with safetensors.safe_open(weights, framework="numpy") as file:
        names = set(file.keys())
        for name, mean in means.items():
            conv, norm = prefixes[name]
            bias = file.get_tensor(f"{conv}/bias") if f"{conv}/bias" in names else 0
            stored = file.get_tensor(f"{norm}/moving_mean")
            found[name] = float(np.corrcoef(np.asarray(mean) + bias, stored)[0, 1])
    return found


def compare(
    model: models.ConvNet, x: jax.Array, implementation: str | None, features: Callable[..., jax.Array]
) -> float:
    """Relative Frobenius difference of the last feature map, sparse and folded against dense and folded."""
    models.fold_batch_norm(model)
    forward = nnx.jit(features)
    results = []
    for name in ("xla", implementation):
        models.set_network_implementation(model, name)
        results.append(np.asarray(forward(model, x), np.float64))
    dense, sparse = results
    return float(np.linalg.norm(sparse - dense) / np.linalg.norm(dense))


def time_both(
    model: models.ConvNet,
    x: jax.Array,
    implementation: str | None,
    features: Callable[..., jax.Array],
    repeats: int,
    batch: int = 1,
) -> dict[str, float]:
    """Microseconds of so many images, dense and sparse, to the last feature map, and their ratio."""
    functions = {}
    for side, name in (("dense", "xla"), ("sparse", implementation)):
        models.set_network_implementation(model, name)
        graph, state = nnx.split(model)

        def forward(image: jax.Array, graph: Any = graph, state: Any = state) -> jax.Array:
            return features(nnx.merge(graph, state), image)

        functions[side] = jax.jit(forward)
    operands = [(jnp.roll(x, -index, axis=0)[:batch],) for index in range(min(len(x), timing.ROTATIONS))]
    found = timing.per_call(functions, operands, repeats)
    times = {f"{side}_us": timed.microseconds for side, timed in found.items()}
    return times | {"batch": batch, "ratio": found["dense"].median / found["sparse"].median}


def compare_zeros(zeros: dict[str, jax.Array], table: Path, network: str) -> dict[str, float]:
    """Measured less tabulated zero fraction by layer, of the layers that the table has; empty without a table."""
    if not table.is_file():
        return {}
    with table.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["network"] == network]
    expected = {row["layer"].removesuffix("_conv"): float(row["zero_fraction"]) for row in rows}
    return {name: float(zeros[name]) - fraction for name, fraction in expected.items() if name in zeros}


def report(result: dict[str, Any], missing: tuple[str, ...]) -> list[str]:
    """Print the table and the three checks; returns the sentences of those that failed."""
    result["zero_fractions"] = {name: float(value) for name, value in result["zero_fractions"].items()}
    correlations, differences = result["correlations"], result["zero_differences"]
    print(f"{'layer':<24}{'zeros %':>9}{'table %':>9}{'batch norm':>12}")
    zeros = result["zero_fractions"]
    for name in dict.fromkeys([*zeros, *correlations]):
        measured = f"{100 * zeros[name]:9.1f}" if name in zeros else f"{'':9}"
        table = f"{100 * (zeros[name] - differences[name]):9.1f}" if name in differences else f"{'':9}"
        print(f"{name:<24}{measured}{table}{correlations.get(name, float('nan')):12.3f}")
    print(f"not in the file and not used: {len(missing)} tensors of the network's end")

    above = sum(value > LEAST_CORRELATION for value in correlations.values())
    difference = result["relative_frobenius"]
    furthest = max(map(abs, differences.values()), default=0.0)
    print(f"batch-norm inputs correlated above {LEAST_CORRELATION}: {above} of {len(correlations)}")
    print(f"largest difference from the table of zero fractions: {furthest:.4f} ({len(differences)} layers)")
    print(f"relative Frobenius difference of the last feature map: {difference:.2e}")
    if times := result["times"]:
        print("{batch} at once: {dense_us:.0f} us dense, {sparse_us:.0f} us sparse, ratio {ratio:.2f}".format(**times))
    checks = (
        (difference <= MOST_DIFFERENCE, f"dense and sparse differ by {difference:.2e}, more than {MOST_DIFFERENCE}"),
        (above >= LEAST_SHARE * len(correlations), f"only {above} of {len(correlations)} batch norms correlate"),
        (furthest <= MOST_ZERO_DIFFERENCE, f"zero fractions are off by {furthest:.4f}"),
    )
    return [sentence for passed, sentence in checks if not passed]


def _parser() -> argparse.ArgumentParser:
    parser = command.parser("real_weights", __doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of the weights and the photographs")
    parser.add_argument("--network", choices=SOURCES, default="resnet50")
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--repeats", type=int, default=0, help="samples for the time of each side; 0 times nothing")
    parser.add_argument("--batch", type=int, default=1, help="images of a call that is timed")
    parser.add_argument(
        "--implementation",
        type=lambda name: None if name == "auto" else name,
        default="pecr",
        help='of the sparse side: "pecr" (PECR where a pool follows, ECR elsewhere), "ecr" or "auto"',
    )
    return parser
