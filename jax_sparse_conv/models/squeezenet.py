"""SqueezeNet 1.0 and 1.1 (Iandola et al. 2016), as torchvision has them: convolutions with bias and ReLU throughout."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from flax import nnx

from jax_sparse_conv._src.api.arguments import check_positive
from jax_sparse_conv._src.primitive.reference import average_of_pixels
from jax_sparse_conv.models.layers import BeforeLayer, ConvNet, check_images, check_implementation, run_layer
from jax_sparse_conv.models.units import ConvUnit, Layer, Pool, Shared, smallest_size

POOL = Pool(3, 2, (0, 1))
_WITHOUT_NORM: dict[str, Any] = {"use_bias": True, "batch_norm": False}


class Stem(NamedTuple):
    """The first convolution, which has a stride of 2 and no padding."""

    features: int
    kernel: int


class Module(NamedTuple):
    """Channels of a fire module: of the squeezing 1x1, and of each expanding one; and whether a pool follows."""

    squeeze: int
    expand: int
    pooled: bool = False


_NAMES = tuple(f"fire{i}" for i in range(2, 10))
_CHANNELS = ((16, 64), (16, 64), (32, 128), (32, 128), (48, 192), (48, 192), (64, 256), (64, 256))
MODULES = {
    "1_0": {n: Module(*c, n in ("fire4", "fire8")) for n, c in zip(_NAMES, _CHANNELS, strict=True)},
    "1_1": {n: Module(*c, n in ("fire3", "fire5")) for n, c in zip(_NAMES, _CHANNELS, strict=True)},
}
STEMS = {"1_0": Stem(96, 7), "1_1": Stem(64, 3)}


class Fire(nnx.Module):
    """A 1x1 convolution to few channels, and behind it a 1x1 and a 3x3 side by side.

    A max pool of the concatenation is the concatenation of max pools, so a pool belongs to the two expanding ones.
    """

    def __init__(self, in_features: int, module: Module, **shared: Unpack[Shared]) -> None:
        last: dict[str, Any] = {"pool": POOL if module.pooled else None, **_WITHOUT_NORM, **shared}
        self.squeeze = ConvUnit(in_features, module.squeeze, 1, **_WITHOUT_NORM, **shared)
        self.expand1x1 = ConvUnit(module.squeeze, module.expand, 1, **last)
        self.expand3x3 = ConvUnit(module.squeeze, module.expand, 3, padding=1, **last)

    def named_layers(self, prefix: str) -> Iterator[tuple[str, ConvUnit]]:
        yield f"{prefix}_squeeze", self.squeeze
        yield f"{prefix}_expand1x1", self.expand1x1
        yield f"{prefix}_expand3x3", self.expand3x3

    def __call__(self, x: jax.Array, prefix: str, before_layer: BeforeLayer | None) -> jax.Array:
        x = run_layer(f"{prefix}_squeeze", self.squeeze, x, before_layer=before_layer)
        one = run_layer(f"{prefix}_expand1x1", self.expand1x1, x, before_layer=before_layer)
        three = run_layer(f"{prefix}_expand3x3", self.expand3x3, x, before_layer=before_layer)
        return jnp.concatenate([one, three], axis=-1)


class SqueezeNet(ConvNet):
    """A convolution, eight fire modules, and a 1x1 convolution whose ReLU's result is averaged to the logits.

    Layers are named conv1, fire2_squeeze, fire2_expand1x1, fire2_expand3x3, ..., fire9_expand3x3, conv10.

    Args:
      num_classes: logits.
      stem: the first convolution.
      modules: the fire modules by name.
      **shared: see `Shared`.

    Raises:
      ValueError: an unknown implementation, or a num_classes that is no int of at least 1.
    """

    def __init__(
        self,
        num_classes: int = 1000,
        *,
        stem: Stem = STEMS["1_0"],
        modules: Mapping[str, Module] = MODULES["1_0"],
        **shared: Unpack[Shared],
    ) -> None:
        check_implementation(shared.get("implementation"))
        check_positive("num_classes", num_classes)
        channels = stem.features
        self.conv1 = ConvUnit(3, channels, stem.kernel, 2, pool=POOL, **_WITHOUT_NORM, **shared)
        self.module_names = tuple(modules)
        fires = []
        for module in modules.values():
            fires.append(Fire(channels, module, **shared))
            channels = 2 * module.expand
        self.fires = nnx.List(fires)
        self.conv10 = ConvUnit(channels, num_classes, 1, **_WITHOUT_NORM, **shared)

    def named_layers(self) -> Iterator[tuple[str, Layer]]:
        """(name, layer) of every layer with weights, in the order they run."""
        yield "conv1", self.conv1
        for prefix, fire in self.named_modules():
            yield from fire.named_layers(prefix)
        yield "conv10", self.conv10

    def named_modules(self) -> Iterator[tuple[str, Fire]]:
        """(name, module) of the fire modules, in order."""
        yield from zip(self.module_names, self.fires, strict=True)

    def feeds(self) -> dict[str, str]:
        """Both expanding convolutions feed the next module's squeezing one."""
        inputs = [*(f"{name}_squeeze" for name in self.module_names), "conv10"]
        found = {"conv1": inputs[0]}
        for name, consumer in zip(self.module_names, inputs[1:], strict=True):
            found |= {f"{name}_squeeze": f"{name}_expand1x1"}
            found |= {f"{name}_expand1x1": consumer, f"{name}_expand3x3": consumer}
        return found

    def features(self, x: jax.Array, *, before_layer: BeforeLayer | None = None) -> jax.Array:
        """The last fire module's map: x [N, H, W, 3] -> [N, h, w, 512], of 13 x 13 pixels at 224 x 224.

        Raises:
          ValueError: x is not [N, H, W, 3], or so small that a window has nothing to see.
        """
        check_images(x, smallest_size([self.conv1, *(fire.expand3x3 for fire in self.fires)]))
        x = run_layer("conv1", self.conv1, x, before_layer=before_layer)
        for prefix, fire in zip(self.module_names, self.fires, strict=True):
            x = fire(x, prefix, before_layer)
        return x

    def logits(self, x: jax.Array, *, before_layer: BeforeLayer | None = None) -> jax.Array:
        """x [N, H, W, 3] -> logits [N, num_classes]; none is negative."""
        x = self.features(x, before_layer=before_layer)
        return average_of_pixels(run_layer("conv10", self.conv10, x, before_layer=before_layer))


# Parameters at 1000 classes.
squeezenet1_0 = SqueezeNet  # 1,248,424
squeezenet1_1 = functools.partial(SqueezeNet, stem=STEMS["1_1"], modules=MODULES["1_1"])  # 1,235,496
