"""GoogLeNet (Szegedy et al. 2015), Inception v1 with batch norm as torchvision has it.

As in torchvision each convolution has a batch norm (epsilon 1e-3) and no bias, and the branch called 5x5 has 3x3
kernels. The two auxiliary heads, which serve training only, are left out; `load_weights` ignores their tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jax_sparse_conv._src.primitive import max_pool
from jax_sparse_conv._src.problem import geometry
from jax_sparse_conv.models.layers import (
    LAST,
    BeforeLayer,
    ConvNet,
    check_images,
    check_implementation,
    run_layer,
)
from jax_sparse_conv.models.units import ConvUnit, Layer, Pool, Shared, fully_connected, smallest_size

EPSILON = 1e-3


class Module(NamedTuple):
    """Channels of an inception module's convolutions, and the pool behind it."""

    one: int
    three_reduce: int
    three: int
    five_reduce: int
    five: int
    projection: int
    pool: Pool | None = None


MODULES = {
    "inception3a": Module(64, 96, 128, 16, 32, 32),
    "inception3b": Module(128, 128, 192, 32, 96, 64, Pool(3, 2, (0, 1))),
    "inception4a": Module(192, 96, 208, 16, 48, 64),
    "inception4b": Module(160, 112, 224, 24, 64, 64),
    "inception4c": Module(128, 128, 256, 24, 64, 64),
    "inception4d": Module(112, 144, 288, 32, 64, 64),
    "inception4e": Module(256, 160, 320, 32, 128, 128, Pool(2, 2, (0, 1))),
    "inception5a": Module(256, 160, 320, 32, 128, 128),
    "inception5b": Module(384, 192, 384, 48, 128, 128),
}


class Inception(nnx.Module):
    """Four branches side by side: 1x1, 3x3, "5x5" and a max pool with a 1x1; each ends in the pool behind the module.

    A max pool of the concatenation is the concatenation of max pools, so the pool belongs to the branches' last
    convolutions. These are numbered as in the papers' Table 3: 1 is the 1x1, 2 and 3 are the 3x3's, 4 and 5 the 5x5's.
    6 is the pool, and 7 its projection.
    """

    def __init__(self, in_features: int, module: Module, **shared: Unpack[Shared]) -> None:
        last: dict[str, Any] = {"pool": module.pool, "epsilon": EPSILON, **shared}
        inner: dict[str, Any] = {"epsilon": EPSILON, **shared}
        self.conv1 = ConvUnit(in_features, module.one, 1, **last)
        self.conv2 = ConvUnit(in_features, module.three_reduce, 1, **inner)
        self.conv3 = ConvUnit(module.three_reduce, module.three, 3, padding=1, **last)
        self.conv4 = ConvUnit(in_features, module.five_reduce, 1, **inner)
        self.conv5 = ConvUnit(module.five_reduce, module.five, 3, padding=1, **last)
        self.conv7 = ConvUnit(in_features, module.projection, 1, **last)

    @property
    def branches(self) -> tuple[tuple[int, ...], ...]:
        """Numbers of each branch's convolutions."""
        return ((1,), (2, 3), (4, 5), (7,))

    def named_layers(self, prefix: str) -> Iterator[tuple[str, ConvUnit]]:
        for branch in self.branches:
            yield from ((f"{prefix}_{i}", getattr(self, f"conv{i}")) for i in branch)

    def __call__(self, x: jax.Array, prefix: str, before_layer: BeforeLayer | None) -> jax.Array:
        results = []
        for branch in self.branches:
            y = _max_pool(x, by_xla=self.conv7.conv.implementation == "xla") if branch == (7,) else x
            for i in branch:
                y = run_layer(f"{prefix}_{i}", getattr(self, f"conv{i}"), y, before_layer=before_layer)
            results.append(y)
        return jnp.concatenate(results, axis=-1)


class GoogLeNet(ConvNet):
    """Three convolutions, nine inception modules, a global average and one fully connected layer.

    Layers are named conv1, conv2, conv3, inception3a_1 ... inception5b_7 (see `Inception`), fc.

    Args:
      num_classes: logits.
      modules: the inception modules by name.
      widths: channels of the first three convolutions.
      **shared: see `Shared`.

    Raises:
      ValueError: an unknown implementation, or a num_classes that is no int of at least 1.
    """

    def __init__(
        self,
        num_classes: int = 1000,
        *,
        modules: Mapping[str, Module] = MODULES,
        widths: tuple[int, int, int] = (64, 64, 192),
        **shared: Unpack[Shared],
    ) -> None:
        check_implementation(shared.get("implementation"))
        pool = Pool(3, 2, (0, 1))
        first, second, channels = widths
        self.conv1 = ConvUnit(3, first, 7, 2, 3, pool=pool, epsilon=EPSILON, **shared)
        self.conv2 = ConvUnit(first, second, 1, epsilon=EPSILON, **shared)
        self.conv3 = ConvUnit(second, channels, 3, padding=1, pool=pool, epsilon=EPSILON, **shared)
        self.module_names = tuple(modules)
        inceptions = []
        for module in modules.values():
            inceptions.append(Inception(channels, module, **shared))
            channels = module.one + module.three + module.five + module.projection
        self.inceptions = nnx.List(inceptions)
        self.fc = fully_connected(channels, num_classes, relu=False, **shared)

    def named_layers(self) -> Iterator[tuple[str, Layer]]:
        """(name, layer) of every layer with weights, in the order they run."""
        yield from (("conv1", self.conv1), ("conv2", self.conv2), ("conv3", self.conv3))
        for prefix, inception in self.named_modules():
            yield from inception.named_layers(prefix)
        yield "fc", self.fc

    def named_modules(self) -> Iterator[tuple[str, Inception]]:
        """(name, module) of the inception modules, in order."""
        yield from zip(self.module_names, self.inceptions, strict=True)

    def feeds(self) -> dict[str, str]:
        """A branch's last convolution feeds the next module's first."""
        inputs = [f"{name}_1" for name in self.module_names]
        found = {"conv1": "conv2", "conv2": "conv3", "conv3": inputs[0]}
        for name, consumer in zip(self.module_names, [*inputs[1:], LAST], strict=True):
            found |= {f"{name}_{i}": consumer for i in (1, 3, 5, 7)}
            found |= {f"{name}_2": f"{name}_3", f"{name}_4": f"{name}_5"}
        return found

    def features(self, x: jax.Array, *, before_layer: BeforeLayer | None = None) -> jax.Array:
        """The last feature map: x [N, H, W, 3] -> [N, ceil(H / 32), ceil(W / 32), 1024] at multiples of 32.

        Raises:
          ValueError: x is not [N, H, W, 3], or so small that a pool has nothing to pool.
        """
        check_images(x, smallest_size([self.conv1, self.conv3, *(module.conv1 for module in self.inceptions)]))
        for name, layer in (("conv1", self.conv1), ("conv2", self.conv2), ("conv3", self.conv3)):
            x = run_layer(name, layer, x, before_layer=before_layer)
        for prefix, inception in zip(self.module_names, self.inceptions, strict=True):
            x = inception(x, prefix, before_layer)
        return x


def _max_pool(x: jax.Array, *, by_xla: bool) -> jax.Array:
    """3x3 windows, stride 1: [N, H, W, C] -> [N, H, W, C]."""
    if by_xla:
        return lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 1, 1, 1), "SAME")
    return max_pool.pool(x, geometry.Pool("max", (3, 3), (1, 1), ((1, 1), (1, 1))))


googlenet = GoogLeNet  # 6,624,904 parameters at 1000 classes
