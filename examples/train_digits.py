"""Train a small residual network twice from one seed: with XLA's convolutions, and with this package's choice.

    python examples/train_digits.py
    python examples/train_digits.py --epochs 20 --plot digits.png --json digits.json

Needs the examples extra: pip install "jax-sparse-conv[examples]".
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import time
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]
from flax import nnx
from sklearn.datasets import load_digits  # type: ignore[import-untyped]

import jax_sparse_conv as jsc

SIDES: dict[str, Literal["xla"] | None] = {"xla": "xla", "ours": None}


class Block(nnx.Module):
    """Two convolutions with batch norms, and a shortcut around them."""

    def __init__(self, inputs: int, outputs: int, strides: int, conv: Any, rngs: nnx.Rngs) -> None:
        self.first = conv(inputs, outputs, (3, 3), strides=strides, use_bias=False, rngs=rngs)
        self.second = conv(outputs, outputs, (3, 3), use_bias=False, rngs=rngs)
        self.shortcut = conv(inputs, outputs, (1, 1), strides=strides, use_bias=False, rngs=rngs)
        self.norms = nnx.List([nnx.BatchNorm(outputs, momentum=0.9, rngs=rngs) for _ in range(2)])

    def __call__(self, x: jax.Array, training: bool) -> jax.Array:
        first, second = (functools.partial(norm, use_running_average=not training) for norm in self.norms)
        return nnx.relu(second(self.second(nnx.relu(first(self.first(x))))) + self.shortcut(x))


class Network(nnx.Module):
    """A stem and three blocks; the result has the zeros of the maps between them, too."""

    def __init__(self, implementation: Literal["xla"] | None, width: int, rngs: nnx.Rngs) -> None:
        conv = functools.partial(jsc.nnx.SparseConv, implementation=implementation)
        self.stem = conv(1, width, (3, 3), use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(width, momentum=0.9, rngs=rngs)
        sizes = ((width, width, 1), (width, 2 * width, 2), (2 * width, 4 * width, 2))
        self.blocks = nnx.List([Block(*each, conv=conv, rngs=rngs) for each in sizes])
        self.head = nnx.Linear(4 * width, 10, rngs=rngs)

    def __call__(self, x: jax.Array, training: bool) -> tuple[jax.Array, jax.Array]:
        maps = [nnx.relu(self.norm(self.stem(x), use_running_average=not training))]
        for block in self.blocks:
            maps.append(block(maps[-1], training))
        return self.head(maps[-1].mean((1, 2))), 1 - jnp.stack([jsc.density(y) for y in maps])


@dataclasses.dataclass
class Epoch:
    """What one pass over the images left: seconds are of training alone, from the start, without compiling."""

    loss: float
    accuracy: float
    seconds: float
    zeros: list[float]


def loss_of(model: Network, images: jax.Array, labels: jax.Array) -> jax.Array:
    logits, _ = model(images, training=True)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


@nnx.jit
def step(
    model: Network, optimizer: nnx.Optimizer[Network], images: jax.Array, labels: jax.Array
) -> tuple[jax.Array, Any]:
    loss, gradients = nnx.value_and_grad(loss_of)(model, images, labels)
    optimizer.update(model, gradients)
    return loss, gradients


@nnx.jit
def predict(model: Network, images: jax.Array) -> tuple[jax.Array, jax.Array]:
    return model(images, training=False)


class Run:
    """One side's training, an epoch at a time."""

    def __init__(self, implementation: Literal["xla"] | None, seed: int, options: argparse.Namespace) -> None:
        self.model = Network(implementation, options.width, nnx.Rngs(seed))
        self.optimizer = nnx.Optimizer(self.model, optax.adam(options.rate), wrt=nnx.Param)
        self.shuffle = np.random.default_rng(seed)
        self.batch, self.epochs, self.seconds = options.batch, list[Epoch](), 0.0

    def compile(self, images: np.ndarray, labels: np.ndarray) -> jax.Array:
        """The gradients of a step whose effects are undone, so that no epoch's time has the compiler's."""
        before = jax.tree.map(jnp.copy, nnx.state((self.model, self.optimizer)))
        _, gradients = step(self.model, self.optimizer, *_batch(images, labels, slice(self.batch)))
        nnx.update((self.model, self.optimizer), before)
        return jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(gradients)])

    def epoch(self, train: tuple[np.ndarray, np.ndarray], test: tuple[jax.Array, np.ndarray]) -> None:
        order = self.shuffle.permutation(len(train[1]))
        batches = order[: len(order) // self.batch * self.batch].reshape(-1, self.batch)
        start = time.perf_counter()
        losses = [step(self.model, self.optimizer, *_batch(*train, rows))[0] for rows in batches]
        loss = np.mean([float(each) for each in losses])  # which waits
        self.seconds += time.perf_counter() - start
        logits, zeros = predict(self.model, test[0])
        accuracy = float(np.mean(np.asarray(logits).argmax(1) == test[1]))
        self.epochs.append(Epoch(float(loss), accuracy, self.seconds, np.asarray(zeros).tolist()))


def _batch(images: np.ndarray, labels: np.ndarray, rows: Any) -> tuple[jax.Array, jax.Array]:
    return jnp.asarray(images[rows]), jnp.asarray(labels[rows])


def main(argv: list[str] | None = None) -> dict[str, list[Epoch]]:
    """Train both sides; returns what each epoch left."""
    options = _parser().parse_args(argv)
    pixels, targets = load_digits(return_X_y=True)
    # 8x8 pixels, each repeated, so that the last maps are not of a pixel or two; 4 times makes them 32x32.
    images = np.repeat(np.repeat(pixels.reshape(-1, 8, 8), options.repeat, 1), options.repeat, 2)[..., None] / 16
    order = np.random.default_rng(0).permutation(len(images))
    images, labels = images[order].astype(np.float32), targets[order].astype(np.int32)
    held = len(images) // 5
    train, test = (images[held:], labels[held:]), (jnp.asarray(images[:held]), labels[:held])

    # 1. Both sides from one seed, and ours from a second one: how far apart are runs that differ by chance?
    runs = {name: Run(implementation, 0, options) for name, implementation in SIDES.items()}
    runs["ours, other seed"] = Run(None, 1, options)
    gradients = {name: run.compile(*train) for name, run in runs.items()}
    apart = jnp.linalg.norm(gradients["xla"] - gradients["ours"]) / jnp.linalg.norm(gradients["xla"])
    print(f"relative difference of the first gradients: {apart:.1e}")

    # 2. Sides take turns, an epoch each, so that both have the same machine.
    for number in range(1, options.epochs + 1):
        for run in runs.values():
            run.epoch(train, test)
        xla, ours = (runs[name].epochs[-1] for name in SIDES)
        zeros = " ".join(f"{100 * share:.0f}" for share in ours.zeros)
        print(
            f"epoch {number}: loss {xla.loss:.4f} and {ours.loss:.4f}, test accuracy {xla.accuracy:.3f} and "
            f"{ours.accuracy:.3f}, {xla.seconds:.2f} s and {ours.seconds:.2f} s (xla and ours); zeros in % {zeros}"
        )

    # 3. What it took, and whether the curves are one.
    epochs = {name: run.epochs for name, run in runs.items()}
    print(_summary(epochs, options.target, held))
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({name: [dataclasses.asdict(each) for each in side] for name, side in epochs.items()}, file)
    if options.plot:
        _plot(epochs, options.plot)
    return epochs


def _summary(epochs: dict[str, list[Epoch]], target: float, held: int) -> str:
    lines = []
    for name in SIDES:
        reached = next((each for each in epochs[name] if each.accuracy >= target), None)
        took = "not reached" if reached is None else f"{reached.seconds:.2f} s"
        lines.append(f"{name}: test accuracy {target:.2f} {'' if reached is None else 'after '}{took}")
    xla, ours, other = (np.array([each.accuracy for each in side]) for side in epochs.values())
    apart, by_seed = np.abs(xla - ours).mean(), np.abs(ours - other).mean()
    by_sample = np.sqrt(2 * ours * (1 - ours) / held).mean()  # of the difference of two accuracies on so many images
    verdict = "agree within noise" if apart <= max(by_seed, by_sample) else "are further apart than noise"
    lines.append(f"the curves {verdict}: {apart:.4f} on average, two seeds {by_seed:.4f}, few images {by_sample:.4f}")
    return "\n".join(lines)


def _plot(epochs: dict[str, list[Epoch]], path: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for layer, shares in enumerate(np.array([each.zeros for each in epochs["ours"]]).T):
        left.plot(range(1, len(shares) + 1), 100 * shares, label="stem" if layer == 0 else f"block {layer}")
    left.set(xlabel="epoch", ylabel="zeros behind the ReLU (%)")
    for name in SIDES:
        right.plot([each.seconds for each in epochs[name]], [each.accuracy for each in epochs[name]], label=name)
    right.set(xlabel="seconds of training", ylabel="test accuracy")
    for axes in (left, right):
        axes.legend()
    figure.savefig(path)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--width", type=int, default=16, help="channels of the stem")
    parser.add_argument("--rate", type=float, default=2e-3, help="of Adam")
    parser.add_argument("--repeat", type=int, default=2, help="each pixel of 8x8, so many times each way")
    parser.add_argument("--target", type=float, default=0.97, help="test accuracy to be reached")
    parser.add_argument("--plot", help="a picture of zeros and accuracy")
    parser.add_argument("--json", help="a file for the figures of each epoch")
    return parser


if __name__ == "__main__":
    with jax.default_matmul_precision("highest"):  # TF32 of GPUs would hide how little the sides differ
        main()
