"""Whole networks with seeded weights and a trained network's zeros, run with any implementation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from benchmarks.common.data import Map
from benchmarks.common.prepared import SHIFT, Beside, Prepared, load
from benchmarks.common.prepared import beside as load_beside
from benchmarks.paper import layers, sides
from benchmarks.paper.layers import PaperLayer
from benchmarks.paper.runner import Context, progress
from jax_sparse_conv import models
from jax_sparse_conv import nnx as sparse_nnx
from jax_sparse_conv._src.cli.comparison import IMPLEMENTATIONS_OF
from jax_sparse_conv._src.dispatch.coo import configurations
from jax_sparse_conv._src.plans import timing
from jax_sparse_conv._src.problem import geometry

OCPA = "ocpa"
COO = "coo"
_PRECISION = "highest"
_ANY_SIZE = 64  # of a map, for a question whose answer does not depend on it


def available(context: Context, names: Sequence[str]) -> list[str]:
    """The names, or those that the command line gave instead, that this version of the package has."""
    wanted = context.networks or names
    missing = [name for name in wanted if name not in models.NETWORKS]
    if missing:
        progress(f"networks that this version does not have: {', '.join(missing)}")
    return [name for name in wanted if name in models.NETWORKS]


_prepared: dict[tuple[str, bool], Prepared] = {}
_beside: dict[tuple[str, bool], Beside] = {}


def prepared(context: Context, name: str) -> Prepared:
    """A network of the registry, loaded or built once for all experiments of a run."""
    key = (name, context.quick)
    if key not in _prepared:
        _prepared[key] = load(name, Path(context.prepared) if context.prepared else None, context.quick, progress)
    return _prepared[key]


def profile_map(context: Context, layer: PaperLayer, name: str, like: str, batch: int = 1) -> dict[str, Map]:
    """The map of a layer of a network on a photograph, as the inputs of a `Case`; nothing for tiny layers.

    Args:
      context: what the command line asked for.
      layer: the layer that takes the map; a larger map is cut to its size.
      name: the network, of the registry.
      like: its layer, or one of the same shape in the place of which another was kept.
      batch: images; all but the first are shifted.
    """
    if context.quick:
        return {}
    network = prepared(context, name)
    wanted = next(found for found in layers.of_network(name) if found.name == f"{name} {like}")
    kept = next(found for found in network.layers if layers.kind(found) == layers.kind(wanted))
    x = network.inputs[kept.name]
    first = (x.shape[1] - layer.size) // 2
    cut = x[:, first : first + layer.size, first : first + layer.size]
    return {"profile": np.concatenate([np.roll(cut, SHIFT * image, axis=2) for image in range(batch)])}


def beside(context: Context, name: str) -> Beside:
    """What comparisons need beside the network, once for all experiments of a run."""
    key = (name, context.quick)
    if key not in _beside:
        folder = Path(context.prepared) if context.prepared else None
        _beside[key] = load_beside(prepared(context, name), folder, context.quick, progress)
    return _beside[key]


def network_sides(names: Sequence[str]) -> tuple[str, ...]:
    """XLA's precisions here, and those of the names that the package has."""
    has = set(IMPLEMENTATIONS_OF["conv"])
    return (*sides.dense_sides(), *(name for name in names if name != COO or name in has))


def function(network: Prepared, side: str) -> timing.Function:
    """The whole network as a jitted function of (weights, x)."""
    precision = side.split()[-1] if " " in side else _PRECISION

    @jax.jit
    def run(weights: list[jax.Array], x: jax.Array) -> Any:
        model = network.model(weights)
        _choose(model, side)
        with jax.default_matmul_precision(precision):
            return model(x)

    return run


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
    return configurations.why_not(shape, resolved) is None
