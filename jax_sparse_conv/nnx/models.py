"""What is done to all layers of an nnx model, in place: replacing, choosing implementations, packing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NoReturn

from flax import nnx

from jax_sparse_conv._src.api import ops
from jax_sparse_conv._src.api.arguments import (
    ConvImplementation,
    ConvPoolImplementation,
    DenseImplementation,
    check_flag,
)
from jax_sparse_conv._src.layers import layers, packed_params
from jax_sparse_conv._src.layers.packed_params import PackedParam
from jax_sparse_conv.nnx import folding
from jax_sparse_conv.nnx.layers import SparseConv, SparseConvPool, SparseLinear


@dataclasses.dataclass(frozen=True)
class ReportEntry:
    """What `replace` or `unreplace` did with one layer.

    Attributes:
      path: where the layer is, such as `"layers.0"`; empty for the model itself.
      old_type: name of its class before.
      new_type: name of its class now, or None where it was left.
      reason: why it was swapped or left.
      folded_into: path of the layer that a batch norm was folded into; None for any other entry.
    """

    path: str
    old_type: str
    new_type: str | None
    reason: str
    folded_into: str | None = None

    def __str__(self) -> str:
        now = f"-> {self.new_type}" if self.new_type else "left"
        return f"{self.path or '(model)'}: {self.old_type} {now} ({self.reason})"

    __repr__ = __str__


@dataclasses.dataclass(frozen=True)
class Report:
    """What `replace` or `unreplace` swapped and left, in the order of `nnx.iter_modules`; `print` shows it.

    Attributes:
      entries: of layers, then of folded batch norms.
      fold: whether batch norms were to be folded.
    """

    entries: tuple[ReportEntry, ...]
    fold: bool = False

    @property
    def swapped(self) -> tuple[ReportEntry, ...]:
        return tuple(entry for entry in self.entries if entry.new_type and entry.folded_into is None)

    @property
    def left(self) -> tuple[ReportEntry, ...]:
        return tuple(entry for entry in self.entries if not entry.new_type)

    @property
    def folded(self) -> tuple[ReportEntry, ...]:
        return tuple(entry for entry in self.entries if entry.folded_into is not None)

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: this is no model.

        Raises:
          TypeError: always.
        """
        raise TypeError(
            "replace changes the model in place and returns a report, which is no model; call the model (unreplace "
            "does so, too)"
        )

    def __str__(self) -> str:
        summary = f"{len(self.swapped)} layers swapped, {len(self.left)} left"
        if self.fold:
            summary += f", {len(self.folded)} batch norms folded"
            summary += "" if self.folded else " (the model has none)"
        return "\n".join([summary, *(f"  {entry}" for entry in self.entries)])

    __repr__ = __str__


def replace(model: nnx.Module, *, implementation: ConvImplementation | None = None, fold: bool = False) -> Report:
    """Make every `nnx.Conv` and `nnx.Linear` of `model` sparse, in place, and report what was left and why.

    Parameters stay where they are, and so does the state tree: only the layers' classes change. Subclasses of
    `nnx.Conv` and `nnx.Linear` may compute something else, so they are left. So is what would run densely anyway.

    With `fold=True`, every `nnx.BatchNorm` directly behind a convolution or dense layer goes into its kernel and bias.
    That is for inference, by the running averages, and cannot be undone. The results are the same up to rounding in the
    parameters' dtype. This changes the state tree: the batch norm's parameters and statistics are gone, and a layer
    without a bias gets one. **Checkpoints of the unfolded model no longer load**, so load them before. In the batch
    norm's place stands a function that keeps the dtype of its result. Other entries keep their places.

    Only an `nnx.Sequential`, nested ones included, says what a batch norm follows: the entry in front of it. Code of
    your own that runs an entry by itself is not seen, and would run the folded one. Use
    `jax_sparse_conv.nnx.jit_inference(model)` for all other models. It folds by itself and leaves the model as it is.

    Args:
      model: any nnx module, a layer itself included.
      implementation: of all swapped layers, as in `jax_sparse_conv.conv`. Dense layers have None where they lack it.
      fold: whether to fold batch norms, all or none.

    Returns:
      A `Report` with one entry for every convolution and dense layer, and one for every folded batch norm. A Linen
      module in an `nnx.bridge.ToNNX` has one, which says what takes its layers.

    Raises:
      ValueError: an unknown implementation. With `fold=True` also a batch norm that cannot be folded: no `Sequential`
        says what it follows, that is no such layer or applies an activation, or it computes statistics of the batch
        (`model.eval()` stops that). Or it, the layer, or the layer's kernel or bias is used in several places. Then
        nothing is changed.
      TypeError: a model that is not an nnx module, or a fold that is no bool.
    """
    check_module(model)
    layers.check_choice("implementation", implementation, (None, *ops.CONV_IMPLEMENTATIONS))
    check_flag("fold", fold)
    folds = folding.plan(list(_modules(model))) if fold else []
    entries = [_replace_layer(path, module, implementation) for path, module in _modules(model) if _is_layer(module)]
    for each in folds:
        reason = f"folded into {each.layer_path}"
        entries.append(ReportEntry(each.path, "BatchNorm", "FoldedBatchNorm", reason, each.layer_path))
        each.run()
    return Report(tuple(entries), bool(fold))


def unreplace(model: nnx.Module) -> Report:
    """Undo `replace`, in place: every `SparseConv` is an `nnx.Conv` again, every `SparseLinear` an `nnx.Linear`.

    Parameters and the state tree stay as they are. A model that `replace` changed is afterwards what it was before.
    Layers that compute more than Flax's own are left: those with an activation, a pool, or a packed kernel, and
    subclasses. Batch norms that were folded stay folded.

    Args:
      model: any nnx module, a layer itself included.

    Returns:
      A `Report` with one entry for every such layer.

    Raises:
      TypeError: a model that is not an nnx module.
    """
    check_module(model)
    kinds = SparseConv, SparseLinear, folding.FoldedBatchNorm
    return Report(tuple(_unreplaced(path, module) for path, module in _modules(model) if isinstance(module, kinds)))


def _unreplaced(path: str, module: Any) -> ReportEntry:
    old, reason = type(module).__name__, _why_kept(module)
    if reason is not None:
        return ReportEntry(path, old, None, reason)
    del module.activation, module.implementation
    new = nnx.Conv if isinstance(module, SparseConv) else nnx.Linear
    object.__setattr__(module, "__class__", new)
    return ReportEntry(path, old, new.__name__, "parameters kept")


def _why_kept(module: Any) -> str | None:
    """Why a layer cannot be Flax's own, or None."""
    if isinstance(module, folding.FoldedBatchNorm):
        return "it is part of the layer in front of it, which cannot be undone"
    if isinstance(module, SparseConvPool):
        return "Flax's layers have no pool"
    if type(module) not in (SparseConv, SparseLinear):
        return f"a subclass of {'SparseConv' if isinstance(module, SparseConv) else 'SparseLinear'}"
    if module.activation is not None:
        return f"activation={module.activation!r} is part of it"
    return "its kernel is packed; unpack the model first" if isinstance(module.kernel, PackedParam) else None


def set_implementation(
    model: nnx.Module,
    *,
    conv: ConvImplementation | None = None,
    conv_pool: ConvPoolImplementation | None = None,
    dense: DenseImplementation | None = None,
) -> None:
    """Set the implementation of every sparse layer of `model`, in place.

    Args:
      model: any nnx module.
      conv: for `SparseConv`.
      conv_pool: for `SparseConvPool`.
      dense: for `SparseLinear`.

    Raises:
      ValueError: a name that the operation does not have, or a model without such layers.
      TypeError: a model that is not an nnx module.
    """
    check_module(model)
    layers.check_choice("conv", conv, (None, *SparseConv.implementations))
    layers.check_choice("conv_pool", conv_pool, (None, *SparseConvPool.implementations))
    layers.check_choice("dense", dense, (None, *SparseLinear.implementations))
    found = [module for _, module in _modules(model) if isinstance(module, (SparseConv, SparseConvPool, SparseLinear))]
    if not found:
        kind = type(model).__name__
        raise ValueError(f"the {kind} has no layer of this package; jax_sparse_conv.nnx.replace(model) puts some in")
    for module in found:
        if isinstance(module, SparseConvPool):
            module.implementation = conv_pool
        elif isinstance(module, SparseConv):
            module.implementation = conv
        else:
            module.implementation = dense


def pack(model: nnx.Module) -> int:
    """Have `model` hold packed parameters, in place, for inference with weights as arguments of a jitted function.

    Only on a CPU: under `nnx.jit` or `jax.jit(lambda model, x: model(x))` a convolution packs its kernel in every call.
    Packed parameters spare that, at the price of a second copy. A packed parameter (`PackedParam`) is the kernel to
    Flax, and new weights are packed when they are assigned. Gradients by it are refused, so `unpack` before training.
    A state, as in a checkpoint or for `nnx.update`, is for a model that is packed in the same way. These layers are
    left as they are:

    - Those that would not read the copy, by their window, strides, dtype or implementation.
    - Those whose kernel is shared with a layer that would not read it.
    - Those whose kernel is no plain `nnx.Param`, or has hooks.

    `jit_inference` packs by itself, on a GPU too.

    Args:
      model: any nnx module, a layer itself included.

    Returns:
      How many convolutions are packed now.

    Raises:
      TypeError: a model that is not an nnx module.
    """
    return packed_params.pack(_convs(model), packed_params.references(model))


def unpack(model: nnx.Module) -> int:
    """Undo `pack`, in place: every layer has `nnx.Param`s of its own. Returns how many convolutions were packed.

    Raises:
      TypeError: a model that is not an nnx module.
    """
    return packed_params.unpack(_convs(model))


def layer_paths(model: nnx.Module) -> dict[int, str]:
    """`id(layer)` -> path, such as `"layers.0"`, of every sparse layer of `model`. It names the layers of
    `record_calls`.

    Raises:
      TypeError: a model that is not an nnx module.
    """
    check_module(model)
    return {id(module): path for path, module in _modules(model) if isinstance(module, (SparseConv, SparseLinear))}


def _modules(model: nnx.Module) -> Iterator[tuple[str, nnx.Module]]:
    for path, module in nnx.iter_modules(model):
        yield ".".join(map(str, path)), module


def check_module(model: Any) -> None:
    """Raise a TypeError for a model that is not an nnx module, which `nnx.iter_modules` may find nothing in."""
    if not isinstance(model, nnx.Module):
        raise TypeError(f"model is a {type(model).__name__}, which is not an nnx.Module")


def _convs(model: nnx.Module) -> list[SparseConv]:
    check_module(model)
    return [module for _, module in _modules(model) if isinstance(module, SparseConv)]


def _is_layer(module: nnx.Module) -> bool:
    kinds = nnx.Conv, nnx.ConvTranspose, nnx.Linear, nnx.LinearGeneral, nnx.Einsum, nnx.bridge.ToNNX
    return isinstance(module, kinds)


def _replace_layer(path: str, module: Any, implementation: ConvImplementation | None) -> ReportEntry:
    old = type(module).__name__
    reason = _why_left(module)
    if reason is not None:
        return ReportEntry(path, old, None, reason)
    new = SparseConv if type(module) is nnx.Conv else SparseLinear
    object.__setattr__(module, "__class__", new)  # past nnx, which would record an attribute of that name
    module.activation = None
    module.implementation = implementation if implementation in (None, *new.implementations) else None
    return ReportEntry(path, old, new.__name__, f"implementation={module.implementation!r}, parameters kept")


def _why_left(module: Any) -> str | None:
    if isinstance(module, nnx.bridge.ToNNX):
        return (
            "its layers are Linen's: jax_sparse_conv.linen.sparse_layers() swaps them while it runs, and "
            "jax_sparse_conv.nnx.jit_inference takes the model as it is"
        )
    if isinstance(module, (SparseConv, SparseLinear)):
        return "already sparse"
    if type(module) is nnx.Conv:
        return layers.why_dense_conv(module)
    if type(module) is nnx.Linear:
        return layers.why_dense_product(module)
    if isinstance(module, (nnx.Conv, nnx.Linear)):
        return f"a subclass of {'Conv' if isinstance(module, nnx.Conv) else 'Linear'} may compute something else"
    return f"there is no sparse {type(module).__name__}"
