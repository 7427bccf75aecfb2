"""DenseNet-BC (Huang et al. 2017): every layer of a block sees the maps of all before it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Unpack

import jax
import jax.numpy as jnp
from flax import nnx

from jax_sparse_conv._src.layers import layer_calls
from jax_sparse_conv._src.layers.batch_norms import DenseMap
from jax_sparse_conv.models.layers import (
    LAST,
    BeforeLayer,
    ConvNet,
    check_images,
    check_implementation,
    run_layer,
)
from jax_sparse_conv.models.units import (
    ConvUnit,
    Layer,
    Pool,
    PreActivation,
    Shared,
    fully_connected,
    smallest_size,
    takes_dense_map,
)

_BOTTLENECK = 4


class DenseLayer(nnx.Module):
    """Batch norm, ReLU, 1x1 convolution, batch norm, ReLU, 3x3 convolution; the result is appended to x.

    The second batch norm and its ReLU belong to the first convolution. The first ones stand alone, because other layers
    see the same map under batch norms of their own.
    """

    def __init__(self, in_features: int, growth: int, **shared: Unpack[Shared]) -> None:
        inner = _BOTTLENECK * growth
        self.norm = PreActivation(in_features, **shared)
        self.conv1 = ConvUnit(in_features, inner, 1, **shared)
        self.conv2 = ConvUnit(inner, growth, 3, padding=1, batch_norm=False, relu=False, **shared)

    def named_layers(self, prefix: str) -> Iterator[tuple[str, Layer]]:
        yield from self._named(prefix)

    def _named(self, prefix: str) -> Iterator[tuple[str, Layer]]:
        yield from ((f"{prefix}_1_norm", self.norm), (f"{prefix}_1", self.conv1), (f"{prefix}_2", self.conv2))

    def __call__(self, x: jax.Array, prefix: str, before_layer: BeforeLayer | None) -> jax.Array:
        y = x
        for name, layer in self._named(prefix):
            y = run_layer(name, layer, y, before_layer=before_layer)
        return jnp.concatenate([x, y], axis=-1)

    def _append_to(self, x: DenseMap) -> None:
        """The same in training, without a map of all channels."""
        x.append(self.conv2(self.conv1(x.normalized(self.norm.in_training))))


def _named(index: int, block: Iterable[DenseLayer]) -> Iterator[tuple[str, DenseLayer]]:
    """(name, layer) of the layers of a block."""
    yield from ((f"conv{index + 2}_block{i}", layer) for i, layer in enumerate(block, 1))


class Transition(nnx.Module):
    """Batch norm, ReLU, then a 1x1 convolution that halves the channels and a 2x2 average pool, in one operation."""

    def __init__(self, in_features: int, **shared: Unpack[Shared]) -> None:
        pool = Pool(2, 2, kind="avg")
        self.norm = PreActivation(in_features, **shared)
        self.conv = ConvUnit(in_features, in_features // 2, 1, batch_norm=False, relu=False, pool=pool, **shared)

    def named_layers(self, prefix: str) -> Iterator[tuple[str, Layer]]:
        yield from self._named(prefix)

    def _named(self, prefix: str) -> Iterator[tuple[str, Layer]]:
        yield from ((f"{prefix}_norm", self.norm), (prefix, self.conv))

    def __call__(self, x: jax.Array, prefix: str, before_layer: BeforeLayer | None) -> jax.Array:
        for name, layer in self._named(prefix):
            x = run_layer(name, layer, x, before_layer=before_layer)
        return x

    def _of_dense_map(self, x: DenseMap) -> jax.Array:
        """The same in training. It averages first, as that leaves a convolution of one pixel less to do."""
        _, height, width, _ = x.maps[0].shape
        averages = height % 2 == width % 2 == 0
        y = x.last_normalized(self.norm.in_training, averages=averages)
        return self.conv.convolved(y if averages else self.conv.pooled(y))


class DenseNet(ConvNet):
    """A stem, dense blocks with transitions between them, a global average and one fully connected layer.

    Layers are named as in Keras: conv1, conv2_block1_1, conv2_block1_2, ..., pool2 (the transition's convolution), ...,
    fc. The batch norm and ReLU in front of a layer is <layer>_norm, the last one norm.

    Args:
      depths: layers per dense block; the blocks are conv2, conv3, ...
      num_classes: logits.
      growth: channels that a layer adds.
      width: channels of the stem.
      **shared: see `Shared`.

    Raises:
      ValueError: an unknown implementation, or a num_classes that is no int of at least 1.
    """

    def __init__(
        self,
        depths: Sequence[int],
        num_classes: int = 1000,
        *,
        growth: int = 32,
        width: int = 64,
        **shared: Unpack[Shared],
    ) -> None:
        check_implementation(shared.get("implementation"))
        self.stem = ConvUnit(3, width, 7, 2, 3, pool=Pool(3, 2, (1, 1)), **shared)
        blocks, transitions = [], []
        channels = width
        for index, depth in enumerate(depths):
            if index:
                transitions.append(Transition(channels, **shared))
                channels //= 2
            blocks.append(nnx.List([DenseLayer(channels + i * growth, growth, **shared) for i in range(depth)]))
            channels += depth * growth
        self.blocks, self.transitions = nnx.List(blocks), nnx.List(transitions)
        self.norm = PreActivation(channels, **shared)
        self.fc = fully_connected(channels, num_classes, relu=False, **shared)

    def _parts(self) -> Iterator[tuple[str, DenseLayer | Transition]]:
        """(name, part) of the layers of the blocks and the transitions between them, in order."""
        for index, block in enumerate(self.blocks):
            if index:
                yield f"pool{index + 1}", self.transitions[index - 1]
            yield from _named(index, block)

    def named_layers(self) -> Iterator[tuple[str, Layer]]:
        """(name, layer) of every layer with weights, in the order they run."""
        yield "conv1", self.stem
        for prefix, part in self._parts():
            yield from part.named_layers(prefix)
        yield from (("norm", self.norm), ("fc", self.fc))

    def feeds(self) -> dict[str, str]:
        """Each batch norm with its convolution, and of each dense layer the first convolution with the second."""
        names = [name for name, _ in self.named_layers()]
        first = {name: f"{name[:-1]}2" for name in names if name.endswith("_1")}
        return first | {name: name.removesuffix("_norm") for name in names if name.endswith("_norm")} | {"norm": LAST}

    def features(self, x: jax.Array, *, before_layer: BeforeLayer | None = None) -> jax.Array:
        """The last feature map, after batch norm and ReLU: x [N, H, W, 3] -> [N, ceil(H / 4) // 8, ..., K].

        Raises:
          ValueError: x is not [N, H, W, 3], or so small that a pool has nothing to pool.
        """
        check_images(x, smallest_size([self.stem, *(transition.conv for transition in self.transitions)]))
        x = run_layer("conv1", self.stem, x, before_layer=before_layer)
        if before_layer is None and self._has_dense_maps(x):
            return self._features_of_dense_maps(x)
        for prefix, part in self._parts():
            x = part(x, prefix, before_layer)
        return run_layer("norm", self.norm, x, before_layer=before_layer)

    def _has_dense_maps(self, x: jax.Array) -> bool:
        """Whether batch norms are in training, by this package's operations, on maps that begin with x.

        Not where somebody looks at each layer, as `nnx.capture` and `nnx.tabulate` do.
        """
        if layer_calls.are_observed() or hasattr(self, "__captures__") or hasattr(self, "_nnx_tabulate_id"):
            return False
        parts = [part for _, part in self._parts()]
        if any(type(part) not in (DenseLayer, Transition) for part in parts):
            return False  # which may do something else
        convs = (part.conv for part in parts if isinstance(part, Transition))
        norms = (self.norm, *(part.norm for part in parts))
        return all(type(conv) is ConvUnit for conv in convs) and all(takes_dense_map(norm, x) for norm in norms)

    def _features_of_dense_maps(self, x: jax.Array) -> jax.Array:
        whole = DenseMap.of(x)
        for _, part in self._parts():
            if isinstance(part, Transition):
                whole = DenseMap.of(part._of_dense_map(whole))
            else:
                part._append_to(whole)
        return whole.last_normalized(self.norm.in_training)


# Parameters at 1000 classes.
densenet121 = partial(DenseNet, (6, 12, 24, 16))  # 7,978,856
densenet169 = partial(DenseNet, (6, 12, 32, 32))  # 14,149,480
densenet201 = partial(DenseNet, (6, 12, 48, 32))  # 20,013,928
