"""Up to which density of its input a layer's sparse kernel is faster: times of maps with other zeros than recorded.

Xiang et al. 2022, section 3.2: code versions are run before, and the least sparsity is found at which a sparse one is
faster than dense convolution; the running program then goes by the zeros of the map that comes in.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from jax_sparse_conv._src import devices
from jax_sparse_conv._src.layers.calls import Call
from jax_sparse_conv._src.plans import timing
from jax_sparse_conv._src.plans.plan import Threshold

DENSITIES = (0.05, 0.2, 0.4, 0.6, 0.8, 1.0)
"""Of the maps that are timed."""

SPARSE = ("pecr", "ecr", "coo")
"""Implementations whose time depends on the zeros."""

_LEAST_GAIN = math.log(1.03)  # of a threshold over one implementation for all maps, in the mean over densities


def of_layer(
    call: Call, operands: tuple[jax.Array, ...], names: Sequence[str], repeats: int
) -> tuple[str, Threshold] | None:
    """What runs dense maps of a layer, and up to which density what else does; None where one is enough.

    Args:
      call: of the layer.
      operands: that it was given, whose x other maps are made of.
      names: implementations that run here.
      repeats: samples of each implementation and map.
    """
    sparse, dense = [name for name in names if name in SPARSE], [name for name in names if name not in SPARSE]
    if not sparse or not dense or 0 in operands[0].shape:
        return None
    functions = {name: call.function(name) for name in names}
    times: list[tuple[float, Mapping[str, float]]] = []
    for density in DENSITIES:
        x = at_density(operands[0], density)
        maps = [(each, *operands[1:]) for each in timing.rotations(x)]
        found = timing.per_call(functions, maps, repeats)
        times.append((density, {name: each.median for name, each in found.items()}))
    best = min(dense, key=lambda name: sum(each[name] for _, each in times))
    if devices.default_platform() != "cpu" and call.op == "conv" and "direct" in names:
        best = "direct"  # which a GPU chooses beside "ecr" or "coo" without the host
    found_steps = [(name, _threshold([(d, each[best], each[name]) for d, each in times])) for name in sparse]
    gains = [(gain, name, density) for name, (density, gain) in found_steps if density is not None]
    if not gains:
        return None
    _, name, density = max(gains)
    return best, Threshold(round(density, 3), name)


def at_density(x: jax.Array, density: float) -> jax.Array:
    """A map like x with another share of non-zeros: of x's own first, then of others with values of x.

    Where x has none, values are 1.
    """
    host = np.asarray(x)
    rng = np.random.default_rng(0)
    kept = host != 0
    values = host[kept] if kept.any() else np.ones(1, host.dtype)
    order = np.argsort(rng.random(host.size) + ~kept.reshape(-1), kind="stable")[: round(density * host.size)]
    made = np.zeros(host.size, host.dtype)
    made[order] = np.where(kept.reshape(-1), host.reshape(-1), rng.choice(values, host.size))[order]
    return jax.device_put(made.reshape(host.shape), x.sharding if x.committed else None)


def crossing(densities: Sequence[float], gains: Sequence[float]) -> tuple[float, float]:
    """The density up to which a side pays, and the sum of its gains up to there; infinite where it pays at all.

    By the product of what is gained at all densities, so that one density decides nothing alone, at which other work or
    a change of loops slowed a side.

    Args:
      densities: the least first.
      gains: logarithms of the other side's time over this side's.
    """
    products = list(itertools.accumulate(gains))
    last = products.index(max(products))
    if last == len(products) - 1 or gains[last] <= 0:
        return (math.inf if gains[last] > 0 else 0.0), products[last]
    sparser, denser = densities[last : last + 2]
    return sparser + (denser - sparser) * gains[last] / (gains[last] - gains[last + 1]), products[last]


def _threshold(times: Sequence[tuple[float, float, float]]) -> tuple[float | None, float]:
    """The density up to which a sparse kernel is to run, and what that gains over one side alone; None without any.

    Args:
      times: density, seconds of the dense side and of the sparse one, the least density first.
    """
    gains = [math.log(dense / sparse) for _, dense, sparse in times]
    density, most = crossing([density for density, _, _ in times], gains)
    gained = (most - max(0.0, sum(gains))) / len(times)
    return (density, gained) if gained > _LEAST_GAIN and density < math.inf else (None, 0.0)
