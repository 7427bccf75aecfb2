"""DenseNet-BC (Huang et al. 2017): every layer of a block sees the maps of all before it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from flax import nnx

from jax_sparse_conv._src.fusion import dense_blocks
from jax_sparse_conv._src.fusion.block_parameters import (
    BlockSizes,
    DenseBlockLayer,
    DenseTransition,
    PackedDenseBlock,
    pack_dense_block,
)
from jax_sparse_conv._src.layers import layer_calls, packed_blocks
from jax_sparse_conv._src.layers import layers as sparse_layers
from jax_sparse_conv._src.layers.packed_blocks import Place, WithDenseBlocks
from jax_sparse_conv._src.layers.packed_params import PackedParam
from jax_sparse_conv.models.layers import (
    LAST,
    BeforeLayer,
    ConvNet,
    check_images,
    check_implementation,
    run_layer,
)
from jax_sparse_conv.models.units import ConvUnit, Layer, Pool, PreActivation, Shared, fully_connected, smallest_size
from jax_sparse_conv.nnx import SparseConv

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

    def _joins(self, dtype: Any) -> bool:
        """Whether the layer is what `dense_block` computes of maps of this dtype."""
        convs = self.conv1.conv, self.conv2.conv
        if self.norm.scale is None or self.norm.bias is None or self.conv1.batch_norm is not None:
            return False
        return convs[0].bias is not None and convs[1].bias is None and all(_is_plain(conv, dtype) for conv in convs)

    def _parameters(self, dtype: Any) -> DenseBlockLayer:
        """What `dense_block` takes of a layer that may join, for maps of this dtype."""
        return DenseBlockLayer(*(getattr(module, name)[...].astype(dtype) for module, name in self._own_places()))

    def _own_places(self) -> list[Place]:
        """Where the parameters are, in the order of `DenseBlockLayer`."""
        first, second = self.conv1.conv, self.conv2.conv
        return [*_places(self.norm), (first, "kernel"), (first, "bias"), (second, "kernel")]


def _places(norm: PreActivation) -> list[Place]:
    return [(norm, "scale"), (norm, "bias")]


def _is_plain(conv: SparseConv, dtype: Any) -> bool:
    """Whether a convolution leaves the choice of what runs open and multiplies maps of this dtype as they are."""
    if isinstance(conv.kernel, PackedParam) or conv.mask is not None or sparse_layers.why_dense_conv(conv) is not None:
        return False
    return conv.implementation is None and conv.dtype in (None, dtype) and conv.kernel.dtype == dtype


def _joined(
    block: Sequence[DenseLayer], behind: Transition | None, packed: PackedDenseBlock | None, x: jax.Array
) -> tuple[jax.Array, bool] | None:
    """A block as one call: its result, and whether that includes the transition. None: its layers run one by one."""
    if layer_calls.are_observed() or not dense_blocks.is_available(x.dtype):
        return None
    if not _may_join(block, x.dtype):
        return None
    precision = block[0].conv1.conv.precision
    if behind is not None and (behind.conv.conv.precision != precision or not behind._joins(x.dtype)):
        behind = None
    for given, transition, is_whole in _choices(block, behind, packed, x.dtype):
        if dense_blocks.is_one_call(x, given, precision, transition):
            return dense_blocks.dense_block(x, given, transition=transition, precision=precision), is_whole
    return None


def _may_join(block: Sequence[DenseLayer], dtype: Any) -> bool:
    """Whether all layers of a block may join, at one precision."""
    precisions = [conv.conv.precision for layer in block for conv in (layer.conv1, layer.conv2)]
    return precisions.count(precisions[0]) == len(precisions) and all(layer._joins(dtype) for layer in block)


def _choices(
    block: Sequence[DenseLayer], behind: Transition | None, packed: PackedDenseBlock | None, dtype: Any
) -> Iterator[tuple[Sequence[DenseBlockLayer] | PackedDenseBlock, DenseTransition | None, bool]]:
    """(layers, transition, whether that is all) for `dense_block`, all of it first."""
    if packed is not None:
        if behind is not None and packed.sizes.features is not None:
            yield packed, None, True
        yield packed.without_transition(), None, False
        return
    layers = [layer._parameters(dtype) for layer in block]
    if behind is not None:
        yield layers, behind._parameters(dtype), True
    yield layers, None, False


def _packed(
    block: Sequence[DenseLayer], behind: Transition | None, references: Mapping[int, int]
) -> PackedDenseBlock | None:
    """The parameters of a block and of the transition behind it, if they may be joined, as one; None where not."""
    dtype = block[0].conv1.conv.kernel.dtype
    if not _may_join(block, dtype) or not all(_may_move(layer._own_places(), dtype, references) for layer in block):
        return None
    layers = [layer._parameters(dtype) for layer in block]
    if not dense_blocks.reads_packed(layers):
        return None
    if behind is not None and behind._joins(dtype) and _may_move(behind._own_places(), dtype, references):
        transition = behind._parameters(dtype)
        if dense_blocks.reads_packed(layers, transition):
            return pack_dense_block(layers, transition)
    return pack_dense_block(layers)


def _may_move(places: Iterable[Place], dtype: Any, references: Mapping[int, int]) -> bool:
    """Whether parameters are arrays of this dtype that nothing shares, and `nnx.Param`s with nothing to lose."""
    parameters = [getattr(module, name) for module, name in places]
    return all(_is_bare(param, dtype) and references[id(param)] == 1 for param in parameters)


def _is_bare(param: Any, dtype: Any) -> bool:
    """Whether a parameter is an array in an `nnx.Param` without metadata: mesh axes, hooks or what a user gave it."""
    if type(param) is not nnx.Param or not isinstance(param.get_value(), jax.Array) or param.dtype != dtype:
        return False
    usual = nnx.Param(0).get_metadata()
    return all(value is None for name, value in param.get_metadata().items() if name not in usual)


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

    def _joins(self, dtype: Any) -> bool:
        """Whether the transition is what `dense_block` computes behind a block of maps of this dtype."""
        if self.norm.scale is None or self.norm.bias is None or self.conv.batch_norm is not None:
            return False
        return self.conv.conv.bias is None and _is_plain(self.conv.conv, dtype)

    def _parameters(self, dtype: Any) -> DenseTransition:
        """What `dense_block` takes of a transition that may join, for maps of this dtype."""
        return DenseTransition(*(getattr(module, name)[...].astype(dtype) for module, name in self._own_places()))

    def _own_places(self) -> list[Place]:
        """Where the parameters are, in the order of `DenseTransition`."""
        return [*_places(self.norm), (self.conv.conv, "kernel")]


def _parameter_places(block: Iterable[DenseLayer], behind: Transition | None, sizes: BlockSizes) -> list[Place]:
    """Where the parameters are that a block packs, in order."""
    places = [place for layer in block for place in layer._own_places()]
    return places if behind is None or sizes.features is None else [*places, *behind._own_places()]


class DenseNet(ConvNet, WithDenseBlocks):
    """A stem, dense blocks with transitions between them, a global average and one fully connected layer.

    `jax_sparse_conv.nnx.pack` leaves one parameter of each block and the transition behind it, in `packed`.

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
        self.packed: nnx.Dict[nnx.Param[PackedDenseBlock]] = nnx.Dict()
        self.norm = PreActivation(channels, **shared)
        self.fc = fully_connected(channels, num_classes, relu=False, **shared)

    def named_parts(self) -> Iterator[tuple[str, DenseLayer | Transition]]:
        """(name, part) of the layers of the blocks and the transitions between them, in order."""
        for index, block in enumerate(self.blocks):
            if index:
                yield f"pool{index + 1}", self.transitions[index - 1]
            yield from _named(index, block)

    def named_layers(self) -> Iterator[tuple[str, Layer]]:
        """(name, layer) of every layer with weights, in the order they run."""
        yield "conv1", self.stem
        for prefix, part in self.named_parts():
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
          ValueError: x is not [N, H, W, 3], or so small that a pool has nothing to pool. Or a packed block whose layers
            have parameters of their own too.
        """
        check_images(x, smallest_size([self.stem, *(transition.conv for transition in self.transitions)]))
        self._check_packed()
        x = run_layer("conv1", self.stem, x, before_layer=before_layer)
        packed = {name: self.packed[name].get_value() for name, *_ in self._blocks() if name in self.packed}
        with packed_blocks.lent(packed):
            for index, (name, block, transition) in enumerate(self._blocks()):
                may_join = before_layer is None and self.fuses
                joined = _joined(block, transition, packed.get(name), x) if may_join else None
                if joined is None:
                    for prefix, layer in _named(index, block):
                        x = layer(x, prefix, before_layer)
                else:
                    x = joined[0]
                if transition is not None and (joined is None or not joined[1]):
                    x = transition(x, f"pool{index + 2}", before_layer)
        return run_layer("norm", self.norm, x, before_layer=before_layer)

    def _blocks(self) -> Iterator[tuple[str, Sequence[DenseLayer], Transition | None]]:
        """(name, layers, the transition behind them) of every block."""
        for index, block in enumerate(self.blocks):
            yield f"conv{index + 2}", block, self.transitions[index] if index < len(self.transitions) else None

    def pack_blocks(self) -> int:
        """Have each block, and the transition behind it, hold one parameter, in place, where a GPU would read that.

        A block stays as it is in these cases, and on other devices always:

        - Its batch norms are not folded.
        - A layer names an implementation, follows a plan or is masked.
        - Its parameters are of several dtypes, are shared, or have metadata.

        Returns:
          How many convolutions are in packed blocks now.

        Raises:
          ValueError: a packed block whose layers have parameters of their own too.
        """
        self._check_packed()
        references = packed_blocks.references(self)
        for name, block, transition in self._blocks():
            made = None if name in self.packed else _packed(block, transition, references)
            if made is not None:
                packed_blocks.take(name, _parameter_places(block, transition, made.sizes), made)
                self.packed[name] = nnx.Param(made)
        return self._packed_convolutions()

    def unpack_blocks(self) -> int:
        """Undo `pack_blocks`; returns how many convolutions have their own parameters again."""
        count = self._packed_convolutions()
        for name, block, transition in self._blocks():
            if name in self.packed:
                packed = self.packed[name].get_value()
                packed_blocks.give_back(_parameter_places(block, transition, packed.sizes), packed)
                del self.packed[name]
        return count

    def _check_packed(self) -> None:
        for name, block, transition in self._blocks():
            if name in self.packed:
                sizes = self.packed[name].get_value().sizes
                packed_blocks.check_taken(name, _parameter_places(block, transition, sizes))

    def _packed_convolutions(self) -> int:
        sizes = [param.get_value().sizes for param in self.packed.values()]
        return sum(2 * each.layers + (each.features is not None) for each in sizes)


# Parameters at 1000 classes.
densenet121 = partial(DenseNet, (6, 12, 24, 16))  # 7,978,856
densenet169 = partial(DenseNet, (6, 12, 32, 32))  # 14,149,480
densenet201 = partial(DenseNet, (6, 12, 48, 32))  # 20,013,928
