"""Whole networks with seeded weights and a trained network's zeros, built once and run with any implementation."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks import data
from benchmarks.paper import layers, sides
from benchmarks.paper.layers import PaperLayer
from benchmarks.paper.runner import Context, progress
from jax_sparse_conv import cost_model, geometry, models, photograph, timing
from jax_sparse_conv import nnx as sparse_nnx
from jax_sparse_conv.comparison import IMPLEMENTATIONS_OF

OCPA = "ocpa"
COO = "coo"
_PRECISION = "highest"
_QUICK_SIZE = 16
_ANY_SIZE = 64  # of a map, for a question whose answer does not depend on it


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A network ready to run.

    Attributes:
      name: its name in the registry.
      graph: nnx's graph definition.
      structure: of the state.
      weights: the state's leaves.
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


def available(context: Context, names: Sequence[str]) -> list[str]:
    """The names, or those that the command line gave instead, that this version of the package has."""
    wanted = context.networks or names
    missing = [name for name in wanted if name not in models.NETWORKS]
    if missing:
        progress(f"networks that this version does not have: {', '.join(missing)}")
    return [name for name in wanted if name in models.NETWORKS]


def prepare(context: Context, name: str) -> Prepared:
    """A network of the registry on a photograph, from the folder of prepared networks where it is there."""
    path = Path(context.prepared) / f"{name}{'_quick' if context.quick else ''}.npz"
    arrays = _saved(path) if context.prepared else None
    if arrays is None:
        progress(f"building {name}")
        with jax.default_device(jax.devices("cpu")[0]):  # compiling its hundred small steps for a GPU takes longer
            arrays = _build(name, context.quick)
        if context.prepared:
            path.parent.mkdir(parents=True, exist_ok=True)
            np.savez(path, **arrays)  # type: ignore[arg-type]
    return _of_arrays(name, context.quick, arrays)


_prepared: dict[tuple[str, bool], Prepared] = {}


def prepared(context: Context, name: str) -> Prepared:
    """`prepare`, once for all experiments of a run."""
    key = (name, context.quick)
    if key not in _prepared:
        _prepared[key] = prepare(context, name)
    return _prepared[key]


def network_sides(names: Sequence[str]) -> tuple[str, ...]:
    """XLA's precisions here, and those of the names that the package has."""
    has = set(IMPLEMENTATIONS_OF["conv"])
    return (*sides.dense_sides(), *(name for name in names if name != COO or name in has))


def function(network: Prepared, side: str) -> timing.Function:
    """The whole network as a jitted function of (weights, x)."""
    precision = side.split()[-1] if " " in side else _PRECISION

    @jax.jit
    def run(weights: list[jax.Array], x: jax.Array) -> Any:
        model = nnx.merge(network.graph, jax.tree.unflatten(network.structure, weights))
        _choose(model, side)
        with jax.default_matmul_precision(precision):
            return model(x)

    return run


def operands(network: Prepared, batch: int = 1) -> list[timing.Operands]:
    """Shifted copies of the input, so that no call finds its own in a cache."""
    x = jnp.concatenate([jnp.roll(network.x, 3 * image, axis=2) for image in range(batch)])
    return [(network.weights, jnp.roll(x, shift, axis=2)) for shift in range(timing.ROTATIONS)]


def _choose(model: Any, side: str) -> None:
    """ocpa: PECR where a pool follows, ECR elsewhere (Xu et al. 2023, section 7); coo: COO* where it has the operation.

    Both leave the fully connected layers to XLA, as the papers leave them to cuBLAS.
    """
    if sides.is_dense(side):
        sparse_nnx.set_implementation(model, conv="xla", conv_pool="xla", dense="xla")
    elif side == OCPA:
        sparse_nnx.set_implementation(model, conv="ecr", conv_pool="pecr", dense="xla")
    elif side == COO:
        sparse_nnx.set_implementation(model, conv="xla", conv_pool="xla", dense="xla")
        for _, layer in nnx.iter_modules(model):
            if isinstance(layer, sparse_nnx.SparseConv) and _coo_has(layer):
                layer.implementation = COO
    else:
        sparse_nnx.set_implementation(model)


def _coo_has(layer: sparse_nnx.SparseConv) -> bool:
    shape = layer.kernel.shape
    resolved = geometry.resolve(
        (1, _ANY_SIZE, _ANY_SIZE, shape[2] * layer.feature_group_count),
        shape,
        strides=layer.strides or 1,
        padding=layer.padding,
        kernel_dilation=layer.kernel_dilation or 1,
        feature_group_count=layer.feature_group_count,
    )
    return cost_model.why_not(shape, resolved) is None


def _saved(path: Path) -> dict[str, np.ndarray] | None:
    if not path.is_file():
        return None
    with np.load(path) as arrays:
        return dict(arrays)


def _build(name: str, quick: bool) -> dict[str, np.ndarray]:
    """The weights, the input and the inputs of one of each kind of convolution, as arrays."""
    model = _model(name, quick)
    size = _size(name, quick)
    x = models.NETWORKS[name].preprocess(photograph.batch_of(photograph.load(None, size), 1))
    models.fold_batch_norm(model)
    models.set_sparsity_profile(model, x)
    models.set_network_implementation(model, "xla")
    inputs = {layer: np.asarray(pair[0]) for layer, pair in models.layer_inputs(model, x).items()}
    kinds = layers.distinct(layers.of_model(model, size, name))
    found = {f"input/{kind.name}": inputs[kind.name.removeprefix(f"{name} ")] for kind in kinds}
    leaves = jax.tree.leaves(nnx.state(model))
    maps = [value for value in inputs.values() if value.ndim == 4]
    return {
        **{f"weight/{index}": np.asarray(leaf) for index, leaf in enumerate(leaves)},
        **found,
        "x": np.asarray(x),
        "zeros_percent": np.asarray(100 * np.mean([np.mean(value == 0) for value in maps])),
    }


def _of_arrays(name: str, quick: bool, arrays: Mapping[str, np.ndarray]) -> Prepared:
    def folded() -> Any:
        model = _model(name, quick)
        models.fold_batch_norm(model)
        return model

    graph, state = nnx.split(nnx.eval_shape(folded))
    leaves, structure = jax.tree.flatten(state)
    size = _size(name, quick)
    return Prepared(
        name,
        graph,
        structure,
        [jnp.asarray(arrays[f"weight/{index}"]) for index in range(len(leaves))],
        jnp.asarray(arrays["x"]),
        float(arrays["zeros_percent"]),
        layers.distinct(layers.of_model(nnx.merge(graph, state), size, name)),
        {key.removeprefix("input/"): value for key, value in arrays.items() if key.startswith("input/")},
    )


def _size(name: str, quick: bool) -> int:
    return _QUICK_SIZE if quick else models.NETWORKS[name].input_size


def _model(name: str, quick: bool) -> models.ConvNet:
    if not quick:
        return models.build(name, rngs=nnx.Rngs(0))
    if name.startswith("vgg"):
        return models.VGG((1, 2), 10, features=(4, 8), hidden=8, pool_size=2, rngs=nnx.Rngs(0))
    return models.ResNet((1, 1), 10, width=4, rngs=nnx.Rngs(0))
