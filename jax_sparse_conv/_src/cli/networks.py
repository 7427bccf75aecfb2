"""The network that a command runs: its weights, its dtype, and its input."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_sparse_conv import models
from jax_sparse_conv._src import environment
from jax_sparse_conv._src.cli import hub
from jax_sparse_conv._src.cli.errors import UserError
from jax_sparse_conv._src.cli.photograph import SAMPLE, batch_of, load
from jax_sparse_conv._src.plans.calibration import Progress
from jax_sparse_conv.models import Network, registry
from jax_sparse_conv.models.layers import ConvNet


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A network with its weights set, in the wanted dtype.

    Attributes:
      x: its input, [N, H, W, C].
      labels: the classes' names, where the weights came with them.
      notes: sentences about the weights that a user should read.
    """

    model: ConvNet
    x: jax.Array
    labels: list[str] | None
    notes: list[str]


def named(name: str) -> Network:
    """The network that `--network` names."""
    if name not in models.NETWORKS:
        raise UserError(f"--network {name!r} is not one of {', '.join(sorted(models.NETWORKS))}")
    return models.NETWORKS[name]


def images_of(options: argparse.Namespace, size: int) -> np.ndarray:
    """The photographs of `--image`, each `--batch` times: uint8 [N, size, size, 3]."""
    return np.concatenate([batch_of(load(path, size), options.batch) for path in options.image or [None]])


def image_names(options: argparse.Namespace) -> list[str]:
    """The photographs' names, without the folders of this machine."""
    return [environment.without_folders(str(path)) for path in options.image or [SAMPLE]]


def prepare(network: Network, images: np.ndarray, options: argparse.Namespace, advance: Progress) -> Prepared:
    """The network of the options on images, uint8 [N, H, W, 3]."""
    notes: list[str] = []
    files = None
    if options.weights is not None:
        advance("looking for the weights", None)
        files = hub.files_of(options.weights, network.name)
    advance(f"building {network.name}", None)
    model = models.build(network.name, rngs=nnx.Rngs(options.seed))
    if files is None:
        models.fold_batch_norm(model)  # first: the profile runs every layer, and fused ones compile faster
        advance("giving the layers their zeros", None)
        x = network.preprocess(images)
        _set_profile(model, x, options.size)
        notes.append(f"Without --weights the weights are seeded (seed {options.seed}): the classes mean nothing.")
        if not models.profile_of(model):
            notes.append(f"No zeros of a trained {network.name} are known: these are those of random weights.")
    else:
        advance("loading the weights", None)
        convention = _load_weights(model, files.path)
        x = network.preprocess(images, convention)
        if files.statistics is not None:
            x = registry.normalised(images, statistics=files.statistics)
        models.fold_batch_norm(model)
        notes += files.notes
    _cast(model, options.dtype)
    return Prepared(model, x.astype(options.dtype), None if files is None else files.labels, notes)


def _set_profile(model: ConvNet, x: jax.Array, size: int | None) -> None:
    try:
        models.set_sparsity_profile(model, x)
    except ValueError as error:  # the first thing to run the network, so it meets a map that is too small
        raise UserError(f"--size {size}: {error}") from error


def _load_weights(model: ConvNet, path: Path) -> str:
    """Load a file and return its convention."""
    try:
        return models.load_weights(model, path).convention
    except FileNotFoundError as error:
        raise UserError(f"--weights {path}: there is no such file") from error
    except (ImportError, OSError, ValueError) as error:
        message = " ".join(str(error).split())
        named = message if message.startswith(str(path)) else f"{path}: {message}"
        raise UserError(f"--weights {named}") from error


def _cast(model: ConvNet, dtype: str) -> None:
    def cast(value: jax.Array) -> jax.Array:
        return value.astype(dtype) if jnp.issubdtype(value.dtype, jnp.floating) else value

    nnx.update(model, jax.tree.map(cast, nnx.state(model)))
