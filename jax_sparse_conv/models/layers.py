"""The base class of the networks, which names their layers, and what can be done to any of them."""

from __future__ import annotations

import abc
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import jax
from flax import nnx

from jax_sparse_conv import nnx as sparse_nnx
from jax_sparse_conv._src import _native
from jax_sparse_conv._src.accelerate import transform
from jax_sparse_conv._src.api import ops
from jax_sparse_conv._src.api.arguments import ConvPoolImplementation
from jax_sparse_conv._src.layers import layer_calls, layers
from jax_sparse_conv._src.primitive.reference import average_of_pixels
from jax_sparse_conv._src.problem.geometry import is_symbolic
from jax_sparse_conv.models.units import ConvUnit, Layer, PreActivation, dense_implementation, without_pool
from jax_sparse_conv.nnx import SparseConv, SparseConvPool, SparseLinear
from jax_sparse_conv.nnx.models import check_module

# Called before every layer with its name, the layer, its input and its residual.
BeforeLayer: TypeAlias = Callable[[str, Layer, jax.Array, jax.Array | None], None]
# The name of the feature map after the last convolution, in networks that average it.
LAST = "features"


class ConvNet(nnx.Module):
    """Base of the networks: layers by name, in the order they run.

    What is here serves networks that average their last feature map before one fully connected layer, `fc`.

    Attributes:
      fuses: whether a network under `jit` is run as by `accelerate`, its layers and dense blocks in one call where that
        is expected to be faster. That needs a GPU. True unless it is set.
    """

    fuses: bool = True
    fc: SparseLinear

    @abc.abstractmethod
    def named_layers(self) -> Iterator[tuple[str, Layer]]:
        """(name, layer) of every layer with weights, in the order they run."""

    @abc.abstractmethod
    def features(self, x: jax.Array, *, before_layer: BeforeLayer | None = None) -> jax.Array:
        """The last feature map: x [N, H, W, C] -> [N, h, w, K]."""

    @abc.abstractmethod
    def feeds(self) -> dict[str, str]:
        """By layer, the one whose input is this layer's result (or "features"), where that is a ReLU's."""

    def __call__(self, x: jax.Array, *, before_layer: BeforeLayer | None = None) -> jax.Array:
        """x [N, H, W, C] -> logits [N, num_classes]."""
        if before_layer is None and self._may_fuse(x):
            return transform.accelerate(self.logits)(x)
        return self.logits(x, before_layer=before_layer)

    def logits(self, x: jax.Array, *, before_layer: BeforeLayer | None = None) -> jax.Array:
        """As the network itself, layer by layer: x [N, H, W, C] -> [N, num_classes]."""
        x = self.features(x, before_layer=before_layer)
        return run_layer("fc", self.fc, average_of_pixels(x), before_layer=before_layer)

    def _may_fuse(self, x: jax.Array) -> bool:
        """Whether to run the layers as by `accelerate`.

        Only where a function is traced for x itself, and where running the network changes nothing. It must have no
        statistics, random streams or captured values (`nnx.capture`), and all layers must be this package's own. No
        public method may be called for it: `nnx.tabulate` compiles those that are called.
        """
        if not self.fuses or type(x).__name__ != "DynamicJaxprTracer" or layer_calls.are_observed():
            return False
        if _native.why_missing("chain", "cuda", x.dtype) is not None or is_symbolic(*x.shape):
            return False
        if x.ndim != 4 or hasattr(self, "__captures__"):
            return False
        modules = (module for _, module in nnx.iter_modules(self))
        layers: list[Any] = [each for each in modules if any(map(_is_variable, vars(each).values()))]
        if any(type(layer) not in (SparseConv, SparseConvPool, SparseLinear, PreActivation) for layer in layers):
            return False
        if jax.tree.leaves(nnx.state(self, nnx.Not(nnx.Param))):
            return False
        return any(getattr(layer, "implementation", "") is None for layer in layers)


def _is_variable(value: object) -> bool:
    return isinstance(value, nnx.Variable)


def run_layer(
    name: str,
    layer: Layer,
    x: jax.Array,
    residual: jax.Array | None = None,
    *,
    before_layer: BeforeLayer | None,
) -> jax.Array:
    """One layer of a forward pass, announced to `before_layer`."""
    if before_layer is not None:
        before_layer(name, layer, x, residual)
    out: jax.Array = layer(x) if residual is None else layer(x, residual)  # type: ignore[call-arg]
    return out


def run_units(
    units: Iterable[tuple[str, ConvUnit]],
    x: jax.Array,
    residual: jax.Array | None = None,
    *,
    before_layer: BeforeLayer | None,
) -> jax.Array:
    """Convolutions by name, one after the other, the residual added by the last.

    Where two neighbours are "adaptive", the first counts the non-zeros that the second goes by.
    """
    chain, nonzeros = list(units), None
    for (name, unit), following in itertools.zip_longest(chain, chain[1:]):
        added = residual if following is None else None
        if before_layer is not None:
            before_layer(name, unit, x, added)
        counts = following is not None and unit.is_adaptive and following[1].is_adaptive
        y = unit(x, added, nonzeros=nonzeros, count_nonzeros=counts)
        x, nonzeros = y if counts else (y, None)
    return x


def pairs(names: Iterator[str] | list[str]) -> dict[str, str]:
    """Each name with the next one."""
    return dict(itertools.pairwise(names))


def layer_inputs(model: ConvNet, x: jax.Array) -> dict[str, tuple[jax.Array, jax.Array | None]]:
    """Input and residual (or None) of every layer by name, for network input x [N, H, W, C]. Works under jit.

    Raises:
      TypeError: a model that is no network of this package.
    """
    if not isinstance(model, ConvNet):
        raise TypeError(f"model is a {type(model).__name__}, which is no network of jax_sparse_conv.models")
    inputs: dict[str, tuple[jax.Array, jax.Array | None]] = {}

    def keep(name: str, layer: Layer, value: jax.Array, residual: jax.Array | None) -> None:
        inputs[name] = (value, residual)

    model(x, before_layer=keep)
    return inputs


def layer_names(model: nnx.Module) -> dict[int, str]:
    """`id(layer)` -> name of every sparse layer: the network's own where it is one of this package, else its place."""
    names = dict(sparse_nnx.layer_paths(model))
    if isinstance(model, ConvNet):
        owners = ((getattr(layer, "conv", layer), name) for name, layer in model.named_layers())
        names |= {id(layer): name for layer, name in owners if not isinstance(layer, PreActivation)}
    return names


def fold_batch_norm(model: nnx.Module) -> int:
    """Fold every batch norm into its convolution's kernel and bias, in place. Returns how many there were.

    Exact up to float32 rounding. From then on each layer is one operation, its residual, ReLU and pool included. A
    batch norm in front of a convolution (DenseNet) becomes a scale and a shift. Where it fails, nothing is folded.

    Raises:
      TypeError: a model that is not an nnx module.
      ValueError: a parameter without a value, as of `nnx.eval_shape`. Or a convolution that several units share, at
        least one of them with a batch norm. Or a batch norm of a model that this package has not built.
    """
    check_module(model)
    units = list(_units(model))
    _check_known(model, units)
    _check_unshared([(path, unit) for path, unit in units if isinstance(unit, ConvUnit)])
    for path, unit in units:
        if unit.batch_norm is not None:
            _check_values(path, unit)
    return sum([unit.fold_batch_norm() for _, unit in units])


def is_folded(model: nnx.Module) -> bool:
    """Whether a batch norm of the network has been folded."""
    return any(unit.folded for _, unit in _units(model))


def _units(model: nnx.Module) -> Iterator[tuple[str, ConvUnit | PreActivation]]:
    for path, module in nnx.iter_modules(model):
        if isinstance(module, (ConvUnit, PreActivation)):
            yield ".".join(map(str, path)), module


def _check_known(model: nnx.Module, units: Iterable[tuple[str, ConvUnit | PreActivation]]) -> None:
    """Raise for a batch norm that no unit has: which convolution it follows is the model's own code."""
    known = {id(unit.batch_norm) for _, unit in units}
    for path, module in nnx.iter_modules(model):
        if isinstance(module, nnx.BatchNorm) and id(module) not in known:
            raise ValueError(
                f"the model's {'.'.join(map(str, path))} is a batch norm of code of your own, which says what it "
                "follows; jax_sparse_conv.nnx.jit_inference(model) folds it into the convolution in front"
            )


def _check_unshared(units: Iterable[tuple[str, ConvUnit]]) -> None:
    """Raise where one convolution would take several batch norms, or one that another unit does without."""
    users: dict[int, list[tuple[str, ConvUnit]]] = {}
    for path, unit in units:
        users.setdefault(id(unit.conv), []).append((path, unit))
    for sharing in users.values():
        if len(sharing) > 1 and any(unit.batch_norm is not None for _, unit in sharing):
            raise ValueError(
                f"{' and '.join(repr(path) for path, _ in sharing)} share one convolution, whose kernel can take in "
                "one batch norm, for all of them; give each a convolution of its own, by nnx.clone, before folding"
            )


def _check_values(path: str, unit: nnx.Module) -> None:
    for place, variable in nnx.to_flat_state(nnx.state(unit)):
        value = variable.get_value()
        if isinstance(value, jax.ShapeDtypeStruct):
            name = ".".join(map(str, (path, *place) if path else place))
            raise ValueError(
                f"the model's {name} has no value, it is {value.dtype}{list(value.shape)} only, and folding computes "
                "with values; nnx.update gives it one, or fold inside of nnx.eval_shape"
            )


def set_network_implementation(model: nnx.Module, implementation: ConvPoolImplementation | None) -> None:
    """Set one implementation for a whole network, in place: None, "xla", "ecr", "coo", "direct", "adaptive" or "pecr".

    Fully connected layers choose for themselves where they lack it. "pecr" is the paper's OCPA rule (Xu et al. 2023,
    section 7): PECR where a pool follows, ECR elsewhere. `jax_sparse_conv.nnx.set_implementation` sets convolutions,
    those with a pool, and fully connected layers separately.

    Raises:
      ValueError: another name.
    """
    check_implementation(implementation)
    sparse_nnx.set_implementation(
        model, conv=without_pool(implementation), conv_pool=implementation, dense=dense_implementation(implementation)
    )
    for _, module in nnx.iter_modules(model):
        if isinstance(module, PreActivation):
            module.implementation = without_pool(implementation)


def check_implementation(implementation: str | None) -> None:
    """Raise a ValueError for an implementation that a network does not have."""
    layers.check_choice("implementation", implementation, (None, *ops.CONV_POOL_IMPLEMENTATIONS))


def check_images(x: jax.Array, smallest: int = 1, channels: int = 3) -> None:
    """Raise a ValueError for an x that is not [N, H, W, channels] with H and W of at least `smallest`."""
    if x.ndim != 4 or x.shape[3] != channels:
        raise ValueError(f"x.shape={x.shape} must be [N, H, W, {channels}]")
    if any(not is_symbolic(size) and size < smallest for size in x.shape[1:3]):
        raise ValueError(f"x.shape={x.shape} is too small: height and width must be at least {smallest}")
