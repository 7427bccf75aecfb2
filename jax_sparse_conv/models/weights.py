"""Weights of torchvision, timm and Keras, from a safetensors file into a network of this package.

A convention is recognised by the names in the file. Rules (`names`) give the prefixes of every layer's convolution and
batch norm. A framework gives the suffixes and the layout.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from jax_sparse_conv._src.paths import as_path
from jax_sparse_conv.models import names as rules
from jax_sparse_conv.models.chain import Chain
from jax_sparse_conv.models.layers import ConvNet, is_folded
from jax_sparse_conv.models.resnet import ResNet
from jax_sparse_conv.models.units import ConvUnit, PreActivation

KERAS_EPSILON = 1.001e-5
_DTYPES = ("F64", "F32", "F16", "BF16")  # as safetensors names them


@dataclasses.dataclass(frozen=True)
class LoadedWeights:
    """What `load_weights` did.

    Attributes:
      convention: "torchvision", "timm" or "keras"; what `preprocess` takes.
      missing: tensors the network has and the file does not; their parameters are untouched. Empty unless `partial`.
      ignored: tensors of the file that were not used, without torch's `num_batches_tracked`. Empty unless `partial`,
        but for the auxiliary heads of GoogLeNet, which the network leaves out.
    """

    convention: str
    missing: tuple[str, ...]
    ignored: tuple[str, ...]


def load_weights(model: ConvNet, path: str | os.PathLike[str], *, partial: bool = False) -> LoadedWeights:
    """Load weights from a safetensors file, in place.

    Values are cast to the network's parameter dtype, so files in float16 or bfloat16 do too. Names of Keras also set
    what Keras does differently: a batch-norm epsilon of 1.001e-5 and, for ResNet, version "v1". The bias of a
    convolution goes into the mean of the batch norm behind it.

    Args:
      model: a network of this package whose batch norms are not folded.
      path: a file with the tensor names of torchvision, timm or Keras.
      partial: load what is there and report what is missing and what is ignored, instead of raising.

    Raises:
      TypeError: a path that is none.
      FileNotFoundError: no such file.
      IsADirectoryError: a folder.
      ValueError: not a safetensors file, names of no known convention, two names of one tensor, or batch norms that
        are folded already. Or tensors, which it names, that are missing, unexpected, misshapen or not of a float dtype.
        The network is unchanged then.
      ImportError: safetensors is not installed.
    """
    path = as_path("path", path)
    if is_folded(model):
        raise ValueError("the network's batch norms are folded; load weights before fold_batch_norm")
    with _open(path) as file:
        stored = _by_current_name(path, file.keys())
        slices = {name: file.get_slice(spelled) for name, spelled in stored.items()}
        shapes = {name: tuple(part.get_shape()) for name, part in slices.items()}
        convention = find_convention(model, shapes)
        slots = {slot.tensor: slot for slot in _slots(model, convention)}
        used = {name for name in slots if name in shapes and (slots[name].needs or name) in shapes}
        missing = tuple(name for name, slot in slots.items() if name not in shapes and not slot.optional)
        ignored = tuple(name for name in shapes if name not in used and not name.endswith("num_batches_tracked"))
        found = {
            "missing": () if partial else missing,
            "unexpected": () if partial else tuple(n for n in ignored if not n.startswith(rules.unused(model))),
            "misshapen": _misshapen(slots, shapes),
            "mistyped": _mistyped({name: part.get_dtype() for name, part in slices.items() if name in slots}),
        }
        _check(path, convention, found)
        for name, slot in slots.items():
            if name in used:
                slot.write(slot.convert(file.get_tensor(stored[name])))
    if convention == "keras":
        _follow_keras(model)
    return LoadedWeights(convention, missing, ignored)


def find_convention(model: ConvNet, names: Iterable[str]) -> str:
    """The convention, "torchvision", "timm" or "keras", that gives the network's layers the most of `names`.

    Raises:
      ValueError: none gives it any, or the network is not one with rules.
    """
    available = set(names)
    found = {
        convention: sum(slot.tensor in available for slot in _slots(model, convention))
        for convention in rules.rules(model)
    }
    if not found:
        raise ValueError(
            f"there are no names for a {type(model).__name__}; load_weights knows the networks of this package"
        )
    best = max(found, key=lambda convention: found[convention])
    if found[best] == 0:
        raise ValueError(
            f"no tensor has a name that {', '.join(found)} give a {type(model).__name__}; the first are "
            f"{', '.join(sorted(available)[:3]) or 'none'}"
        )
    return best


_TORCH_NAMES = {
    "kernel": ".weight",
    "bias": ".bias",
    "norm_scale": ".weight",
    "norm_bias": ".bias",
    "norm_mean": ".running_mean",
    "norm_var": ".running_var",
}
_KERAS_NAMES = {
    "kernel": "/kernel",
    "bias": "/bias",
    "norm_scale": "/gamma",
    "norm_bias": "/beta",
    "norm_mean": "/moving_mean",
    "norm_var": "/moving_variance",
}


# --- slots: where each tensor goes -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Slot:
    """One tensor of a file and what to do with it."""

    tensor: str
    shape: tuple[int, ...]  # in the file
    write: Callable[[jax.Array], None]  # takes the converted tensor
    convert: Callable[[jax.Array], jax.Array] = lambda value: value
    optional: bool = False
    needs: str | None = None  # another tensor without which this one is of no use


def _slots(model: ConvNet, convention: str) -> Iterator[_Slot]:
    """Every tensor that a file of this convention should have for the network, in the order to write them."""
    prefixes = rules.rules(model)[convention](model)
    suffixes = _KERAS_NAMES if convention == "keras" else _TORCH_NAMES
    for name, layer in model.named_layers():
        weights, norm = prefixes[name]
        if isinstance(layer, ConvUnit):
            yield from _conv_slots(layer, weights, norm, suffixes)
        elif isinstance(layer, PreActivation):
            yield from _norm_slots(layer, norm, suffixes)
        else:
            yield _linear_kernel(layer.kernel, weights + suffixes["kernel"], convention, _map_size(model, name))
            yield _plain(layer.bias, weights + suffixes["bias"])


def _conv_slots(layer: ConvUnit, weights: str, norm_prefix: str, suffixes: dict[str, str]) -> Iterator[_Slot]:
    conv, norm = layer.conv, layer.batch_norm
    height, width, inputs, outputs = conv.kernel.shape
    tensor = weights + suffixes["kernel"]
    if suffixes is _KERAS_NAMES:
        yield _plain(conv.kernel, tensor)
    else:
        shape = (outputs, inputs, height, width)
        yield _Slot(tensor, shape, _writer(conv.kernel), lambda value: value.transpose(2, 3, 1, 0))
    yield from _norm_slots(layer, norm_prefix, suffixes)
    if conv.bias is not None:
        yield _plain(conv.bias, weights + suffixes["bias"])
    elif norm is not None:
        # norm(conv + bias) is norm(conv) with a mean smaller by the bias. Written after the mean itself.
        mean = norm.mean
        yield _Slot(
            weights + suffixes["bias"],
            mean.shape,
            lambda value: mean.set_value(mean[...] - value.astype(mean.dtype)),
            optional=True,
            needs=norm_prefix + suffixes["norm_mean"],
        )


def _norm_slots(layer: ConvUnit | PreActivation, prefix: str, suffixes: dict[str, str]) -> Iterator[_Slot]:
    norm = layer.batch_norm
    if norm is not None:
        yield _plain(norm.scale, prefix + suffixes["norm_scale"])
        yield _plain(norm.bias, prefix + suffixes["norm_bias"])
        yield _plain(norm.mean, prefix + suffixes["norm_mean"])
        yield _plain(norm.var, prefix + suffixes["norm_var"])


def _linear_kernel(variable: Any, tensor: str, convention: str, map_size: int) -> _Slot:
    """A fully connected kernel; torch flattens a feature map as C, H, W, this package and Keras as H, W, C."""
    inputs, outputs = variable.shape
    if convention == "keras":
        return _plain(variable, tensor)
    channels = inputs // map_size**2
    stored: tuple[int, ...] = (outputs, inputs)
    if convention == "timm":
        stored = (outputs, channels, map_size, map_size) if not tensor.startswith("head.") else stored

    def convert(value: jax.Array) -> jax.Array:
        maps = value.reshape(outputs, channels, map_size, map_size)
        return maps.transpose(2, 3, 1, 0).reshape(inputs, outputs)

    return _Slot(tensor, stored, _writer(variable), convert)


def _map_size(model: ConvNet, name: str) -> int:
    """Rows and columns of the feature map that a fully connected layer takes flattened."""
    return model.pool_size if isinstance(model, Chain) and name == model.head_names[0] else 1


def _plain(variable: Any, tensor: str) -> _Slot:
    return _Slot(tensor, tuple(variable.shape), _writer(variable))


def _writer(variable: Any) -> Callable[[jax.Array], None]:
    def write(value: jax.Array) -> None:
        variable.set_value(value.astype(variable.dtype))

    return write


def _follow_keras(model: ConvNet) -> None:
    for _, module in nnx.iter_modules(model):
        if isinstance(module, nnx.BatchNorm):
            module.epsilon = KERAS_EPSILON
    if isinstance(model, ResNet):
        model.use_version("v1")


# --- errors ----------------------------------------------------------------------------------------------------------


def _misshapen(slots: dict[str, _Slot], shapes: dict[str, tuple[int, ...]]) -> tuple[str, ...]:
    return tuple(
        f"{name} is {list(shapes[name])} and must be {list(slot.shape)}"
        for name, slot in slots.items()
        if name in shapes and shapes[name] != slot.shape
    )


def _by_current_name(path: Path, names: Iterable[str]) -> dict[str, str]:
    """The names in the file by today's.

    Raises:
      ValueError: two names of one tensor.
    """
    stored: dict[str, str] = {}
    for name in names:
        first = stored.setdefault(rules.current(name), name)
        if first != name:
            raise ValueError(
                f"{path} has {first} and {name}, which are two names of one tensor; a file with either of them is read"
            )
    return stored


def _mistyped(dtypes: dict[str, str]) -> tuple[str, ...]:
    accepted = ", ".join(_DTYPES)
    return tuple(
        f"{name} is {dtype} and must be one of {accepted}" for name, dtype in dtypes.items() if dtype not in _DTYPES
    )


def _check(path: Path, convention: str, found: dict[str, tuple[str, ...]]) -> None:
    """Raise a ValueError for the tensors that are found not to fit, by what is wrong with them."""
    kinds = [f"{len(tensors)} {kind}: {_some(tensors)}" for kind, tensors in found.items() if tensors]
    if kinds:
        raise ValueError(f"{path} does not fit the network (names of {convention}); tensors {'; '.join(kinds)}")


def _some(tensors: tuple[str, ...], limit: int = 10) -> str:
    rest = len(tensors) - limit
    return ", ".join(tensors[:limit]) + (f" and {rest} more" if rest > 0 else "")


def _open(path: Path) -> Any:
    """The file as safetensors' reader, which gives JAX arrays (bfloat16 included) one at a time."""
    try:
        import safetensors
    except ImportError as error:
        raise ImportError(
            "load_weights reads safetensors files: install it with pip install 'jax-sparse-conv[examples]'"
        ) from error
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder, not a weights file")
    if not path.is_file():
        raise FileNotFoundError(f"there is no weights file {path}")
    try:
        return safetensors.safe_open(path, framework="flax")
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file: {error}") from error
