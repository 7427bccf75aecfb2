"""Whole networks with seeded weights and a trained network's zeros, built once and kept in files between runs."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jax_sparse_conv as jsc
from benchmarks.common import data
from benchmarks.paper import layers
from benchmarks.paper.layers import PaperLayer
from jax_sparse_conv import models
from jax_sparse_conv._src.cli import photograph
from jax_sparse_conv._src.plans import timing

REFERENCE_IMAGES = 8
"""Images of a batch whose logits are kept."""
SHIFT = 3
"""Columns between the images of a batch."""

_QUICK_SIZE = 16
_BELOW_ALL = 1e6  # a bias so low that its ReLU clips everything
_APART = 1e-3  # deviation of the channels' scales and biases where all were equal


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A network ready to run.

    Attributes:
      name: its name in the registry.
      graph: nnx's graph definition.
      structure: of the state.
      weights: the state's leaves, batch norm folded.
      x: its input, float32 [1, H, W, 3].
      zeros_percent: of its convolutions' inputs, their mean.
      layers: one of each kind of its convolutions.
      inputs: their inputs on `x`, by their names.
    """

    name: str
    graph: Any
    structure: Any
    weights: list[jax.Array]
    x: jax.Array
    zeros_percent: float
    layers: tuple[PaperLayer, ...]
    inputs: Mapping[str, data.Map]

    def model(self, weights: list[jax.Array] | None = None) -> models.ConvNet:
        """The network with these weights, by default its own."""
        state = jax.tree.unflatten(self.structure, self.weights if weights is None else weights)
        return nnx.merge(self.graph, state)

    def packed(self) -> Prepared:
        """The network as `jax_sparse_conv.nnx.pack` leaves it.

        Raises:
          ValueError: nothing of it would be packed here.
        """
        model = self.model()
        if jsc.nnx.pack(model) == 0:
            raise ValueError(f"nothing of {self.name} would be packed in {self.weights[0].dtype} on this device")
        graph, state = nnx.split(model)
        weights, structure = jax.tree.flatten(state)
        return dataclasses.replace(self, graph=graph, structure=structure, weights=weights)

    def empty_weights(self) -> list[jax.Array]:
        """The weights with biases so low that every ReLU clips everything: all maps but the image are zeros."""
        state = jax.tree.unflatten(self.structure, self.weights)
        return [
            leaf - _BELOW_ALL if "'bias'" in jax.tree_util.keystr(path) else leaf
            for path, leaf in jax.tree_util.tree_leaves_with_path(state)
        ]

    def batch(self, images: int, shift: int = 0) -> jax.Array:
        """Shifted copies of the input, float32 [images, H, W, 3], all shifted by another `shift` columns."""
        return jnp.concatenate([jnp.roll(self.x, SHIFT * image + shift, axis=2) for image in range(images)])

    def operands(self, images: int = 1) -> list[timing.Operands]:
        """(weights, batch), rotated so that no call finds its own in a cache."""
        return [(self.weights, self.batch(images, shift)) for shift in range(timing.ROTATIONS)]


@dataclasses.dataclass(frozen=True)
class Beside:
    """What comparisons need beside a network.

    Attributes:
      weights: its state's leaves with biases so high that no ReLU clips anything.
      zeros_percent: of the convolutions' inputs then.
      logits: of the network's own weights on a batch of `REFERENCE_IMAGES`, float32, dense, on the host.
    """

    weights: list[jax.Array]
    zeros_percent: float
    logits: np.ndarray


def load(name: str, folder: Path | None = None, quick: bool = False, say: Callable[[str], None] = print) -> Prepared:
    """A network of the registry on a photograph, from a folder where it is there, else built and kept there."""
    arrays = _kept(folder, f"{name}{'_quick' if quick else ''}", lambda: _build(name, quick), say)
    graph, state = shapes(name, quick)
    leaves, structure = jax.tree.flatten(state)
    return Prepared(
        name,
        graph,
        structure,
        [jnp.asarray(arrays[f"weight/{index}"]) for index in range(len(leaves))],
        jnp.asarray(arrays["x"]),
        float(arrays["zeros_percent"]),
        layers.distinct(layers.of_model(nnx.merge(graph, state), input_size(name, quick), name)),
        {key.removeprefix("input/"): value for key, value in arrays.items() if key.startswith("input/")},
    )


def shapes(name: str, quick: bool = False) -> tuple[Any, Any]:
    """A network's graph definition and state, batch norm folded: shapes and dtypes, no weights."""
    graph, state = nnx.split(nnx.eval_shape(lambda: _folded(name, quick)))
    return graph, state


def beside(
    network: Prepared, folder: Path | None = None, quick: bool = False, say: Callable[[str], None] = print
) -> Beside:
    """As `load`, of what comparisons need beside the network."""
    file = f"{network.name}_beside{'_quick' if quick else ''}"
    arrays = _kept(folder, file, lambda: _build_beside(network, quick), say)
    weights = [jnp.asarray(arrays[f"weight/{index}"]) for index in range(len(network.weights))]
    return Beside(weights, float(arrays["zeros_percent"]), arrays["logits"])


def _kept(
    folder: Path | None, file: str, build: Callable[[], dict[str, np.ndarray]], say: Callable[[str], None]
) -> dict[str, np.ndarray]:
    path = None if folder is None else folder / f"{file}.npz"
    if path is not None and path.is_file():
        with np.load(path) as arrays:
            return dict(arrays)
    say(f"building {file}")
    with jax.default_device(jax.devices("cpu")[0]):  # compiling its hundred small steps for a GPU takes longer
        built = build()
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.npz")  # a run that is stopped leaves no file that looks complete
        np.savez(partial, **built)  # type: ignore[arg-type]
        partial.replace(path)
    return built


def _build(name: str, quick: bool) -> dict[str, np.ndarray]:
    """The weights, the input and the inputs of one of each kind of convolution, as arrays."""
    model, x = _folded(name, quick), _image(name, quick)
    models.set_sparsity_profile(model, x)
    _set_apart(model)
    models.set_network_implementation(model, "xla")
    inputs = {layer: np.asarray(pair[0]) for layer, pair in models.layer_inputs(model, x).items()}
    kinds = layers.distinct(layers.of_model(model, input_size(name, quick), name))
    found = {f"input/{kind.name}": inputs[kind.name.removeprefix(f"{name} ")] for kind in kinds}
    maps = [value for value in inputs.values() if value.ndim == 4]
    zeros = np.asarray(100 * np.mean([np.mean(value == 0) for value in maps]))
    return {**_weights(model), **found, "x": np.asarray(x), "zeros_percent": zeros}


def _build_beside(network: Prepared, quick: bool) -> dict[str, np.ndarray]:
    model, x = _folded(network.name, quick), np.asarray(network.x)
    names = [name for name, _ in model.named_layers()]
    found = models.set_sparsity_profile(model, jnp.asarray(x), dict.fromkeys(names, 0.0))
    _set_apart(model)
    convolutions = [name for name in names if name in found and name != "fc"]
    return {
        **_weights(model),
        "zeros_percent": np.asarray(100 * np.mean([found[name] for name in convolutions])),
        "logits": _logits(network),
    }


def _logits(network: Prepared) -> np.ndarray:
    """One image after another, so that whoever computes a batch wrongly is found out."""

    @jax.jit
    def run(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        model = network.model(weights)
        models.set_network_implementation(model, "xla")
        return model(x)

    weights = [jnp.asarray(np.asarray(leaf)) for leaf in network.weights]
    images = np.asarray(network.batch(REFERENCE_IMAGES))
    return np.concatenate([np.asarray(run(weights, jnp.asarray(image[None]))) for image in images])


def _weights(model: models.ConvNet) -> dict[str, np.ndarray]:
    return {f"weight/{index}": np.asarray(leaf) for index, leaf in enumerate(jax.tree.leaves(nnx.state(model)))}


def _set_apart(model: models.ConvNet) -> None:
    """Vectors of one number become vectors of many, as training leaves them.

    XLA makes one number again in every call, by a kernel of its own, where such a vector is a constant that a custom
    call reads.
    """
    rng = np.random.default_rng(0)

    def apart(leaf: jax.Array) -> jax.Array:
        if leaf.ndim != 1 or bool((leaf != leaf[0]).any()):
            return leaf
        return leaf + jnp.asarray(_APART * rng.standard_normal(leaf.shape), leaf.dtype)

    nnx.update(model, jax.tree.map(apart, nnx.state(model)))


def _folded(name: str, quick: bool) -> models.ConvNet:
    model = _model(name, quick)
    models.fold_batch_norm(model)
    return model


def _image(name: str, quick: bool) -> jax.Array:
    return models.NETWORKS[name].preprocess(photograph.batch_of(photograph.load(None, input_size(name, quick)), 1))


def input_size(name: str, quick: bool = False) -> int:
    """Rows and columns of a network's images."""
    return _QUICK_SIZE if quick else models.NETWORKS[name].input_size


def _model(name: str, quick: bool) -> models.ConvNet:
    rngs = nnx.Rngs(0)
    if not quick:
        return models.build(name, rngs=rngs)
    if name.startswith("vgg"):
        return models.VGG((1, 2), 10, features=(4, 8), hidden=8, pool_size=2, rngs=rngs)
    if name.startswith("densenet"):
        return models.DenseNet((1, 2), 10, growth=4, width=8, rngs=rngs)
    if name.startswith("regnet"):
        return models.RegNetX((1, 1), (8, 16), 4, 10, stem_width=4, rngs=rngs)
    return models.ResNet((1, 1), 10, width=4, rngs=rngs)
