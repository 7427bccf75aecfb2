"""The layers of the zoo: what every network calls, and the maps and weights that a call is timed with.

Nothing is computed to find them: networks are traced with shapes alone.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_sparse_conv as jsc
from benchmarks.common import data
from jax_sparse_conv import models
from jax_sparse_conv._src.layers import layers
from jax_sparse_conv._src.layers.calls import Call
from jax_sparse_conv._src.tune.workloads import OneKey
from jax_sparse_conv.models.layers import layer_names

_BLUR = (-1, 0, 1)
_MAP_ELEMENTS = 2**24  # drawn for a map; the images of a larger one repeat
_BLOCK = 2**20 + 7  # random values that repeat


@dataclasses.dataclass(frozen=True)
class ZooLayer:
    """A call that networks make.

    Attributes:
      call: of `conv`, `conv_pool` or `dense`.
      users: "network/layer" of each layer that makes it.
      zeros: fewest zeros of their inputs by the profiles, in percent; 0 where a profile says nothing.
    """

    call: Call
    users: tuple[str, ...]
    zeros: float


def layers_of(names: tuple[str, ...], batch: int) -> list[ZooLayer]:
    """The distinct calls of these networks, in the order of their first users; no weights are made."""
    found = _layers_of_one_image(names)
    calls = [dataclasses.replace(layer.call, x_shape=(batch, *layer.call.x_shape[1:])) for layer in found]
    return [dataclasses.replace(layer, call=call) for layer, call in zip(found, calls, strict=True)]


@functools.lru_cache(maxsize=8)
def _layers_of_one_image(names: tuple[str, ...]) -> list[ZooLayer]:
    users: dict[Call, list[str]] = collections.defaultdict(list)
    zeros: dict[Call, list[float]] = collections.defaultdict(list)
    for name in names:
        for call, layer, fraction in _calls(name):
            users[call].append(f"{name}/{layer}")
            zeros[call].append(100 * fraction)
    return [ZooLayer(call, tuple(users[call]), min(zeros[call])) for call in users]


def _calls(name: str) -> list[tuple[Call, str, float]]:
    """(call, the layer's name, zero fraction of its input) of every layer of a network on one image."""
    network = models.NETWORKS[name]
    found: list[tuple[Call, str, float]] = []

    def run(images: jax.Array) -> jax.Array:
        model = models.build(name, rngs=OneKey())
        models.fold_batch_norm(model)
        names, profile = layer_names(model), models.profile_of(model)

        def observe(layer: Any, call: Call, operands: Any, arguments: Any) -> jax.Array:
            found.append((call, names[id(layer)], profile.get(names[id(layer)], 0.0)))
            return call.function("xla")(*call.present(operands))

        with layers.observed(observe):
            return model(network.preprocess(images))

    jax.eval_shape(run, jax.ShapeDtypeStruct((1, network.input_size, network.input_size, 3), jnp.uint8))
    return found


# --- operands --------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4)
def profile_map(shape: tuple[int, ...], zeros: float, seed: int) -> data.Map:
    """Non-negative values [N, H, W, C] or [..., C] with `zeros` percent of zeros.

    In a map they lie in patches, and channels differ in them as in `jax_sparse_conv.models.profile`. The same array for
    the same arguments: not to be written to.
    """
    images = max(1, _MAP_ELEMENTS // math.prod(shape[1:]))
    if len(shape) == 4 and images < shape[0]:
        return np.resize(profile_map((images, *shape[1:]), zeros, seed), shape)
    if zeros <= 0:
        return np.abs(_normal(shape, seed)) + np.float32(1e-3)
    rng = np.random.default_rng([seed, round(zeros)])
    field = rng.standard_normal(shape, np.float32)
    if len(shape) != 4:
        return np.where(rng.random(shape, np.float32) < zeros / 100, np.float32(0), np.abs(field) + np.float32(1e-3))
    for axis in (1, 2):
        field = sum(np.roll(field, shift, axis) for shift in _BLUR)
    share = zeros / 100
    spread = models.profile.CHANNEL_SPREAD * rng.standard_normal(shape[-1])
    shares = 1 / (1 + np.exp(-math.log(share / (1 - share)) - spread))
    ranks = np.argsort(np.argsort(field.reshape(-1, shape[-1]), axis=0), axis=0).reshape(shape)
    is_zero = ranks < shares * share / shares.mean() * math.prod(shape[:-1])
    return np.where(is_zero, np.float32(0), np.abs(field) + np.float32(1e-3))


def _normal(shape: tuple[int, ...], seed: int) -> data.Map:
    """Normal values, which repeat in large arrays."""
    return np.resize(_normal_block(seed), shape)


@functools.lru_cache(maxsize=4)
def _normal_block(seed: int) -> data.Map:
    return np.random.default_rng(seed).standard_normal(_BLOCK, np.float32)


def operands_of(call: Call, weights: str) -> Iterator[Any]:
    """Kernel, bias and residual, where the call has them; the kernel with its copy where `weights` is "packed"."""
    kernel, bias, residual = _values(call)
    packed = weights == "packed" and call.op != "dense"
    yield jsc.pack(kernel, feature_group_count=call.geometry.groups) if packed else kernel
    if call.bias:
        yield bias
    if call.residual:
        yield residual


@functools.lru_cache(maxsize=1)
def _values(call: Call) -> tuple[jax.Array, jax.Array, jax.Array]:
    scale = np.float32(math.sqrt(2 / math.prod(call.kernel_shape[:-1])))
    kernel = scale * _normal(call.kernel_shape, 0)
    bias = np.float32(0.1) * _normal(call.kernel_shape[-1:], 1)
    residual = np.zeros(0, np.float32)
    if call.residual:
        size = call.geometry.conv_size(call.x_shape[1:3], call.kernel_shape[:2])
        residual = _normal((call.x_shape[0], *size, call.kernel_shape[-1]), 2)
    return jnp.asarray(kernel, call.dtype), jnp.asarray(bias, call.dtype), jnp.asarray(residual, call.dtype)
