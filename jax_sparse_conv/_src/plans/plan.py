"""A plan: which implementation each layer of a network takes, by times measured on its real inputs.

`calibration.calibrate` makes one, and `apply_plan` has a model use it. The papers choose by a rule (Xu et al. 2023,
section 7: PECR where a pool follows, ECR elsewhere) or by a model (Xiang et al. 2022, section 3.5). A plan takes the
fastest that was measured, dense convolution included.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from flax import linen, nnx

from jax_sparse_conv import nnx as sparse_nnx
from jax_sparse_conv._src import typed_json
from jax_sparse_conv._src.api.arguments import is_dtype
from jax_sparse_conv._src.layers import layers
from jax_sparse_conv._src.layers.calls import Call
from jax_sparse_conv._src.layers.layers import Planned
from jax_sparse_conv._src.paths import as_path
from jax_sparse_conv._src.plans import plan_table
from jax_sparse_conv._src.plans.machine import device_label, versions
from jax_sparse_conv.models.layers import layer_names
from jax_sparse_conv.nnx.models import check_module

_FORMAT = 3
_WITHOUT_THRESHOLDS = 2  # a format that is read, too


@dataclasses.dataclass(frozen=True)
class Candidate:
    """How long one implementation took for one call, in microseconds: the median and quartiles of its samples."""

    implementation: str
    us: float
    low_us: float
    high_us: float


@dataclasses.dataclass(frozen=True)
class Threshold:
    """An implementation for maps of at most this density, which the running program looks at.

    Attributes:
      density: fraction of non-zeros of the layer's input, between 0 and 1.
      implementation: what runs such maps.
    """

    density: float
    implementation: str


@dataclasses.dataclass(frozen=True)
class LayerPlan:
    """One call of one layer.

    Attributes:
      path: the layer's name in its network, or its place in the model.
      call: shapes, dtypes, precision, strides, ...
      kernel_dtype: of the layer's parameters; `call.dtype` may be wider.
      densities: fraction of non-zeros of its input in each batch.
      candidates: what was timed, "xla" first.
      left_out: (implementation, why it could not run).
      implementation: the choice, of maps that are denser than every threshold.
      thresholds: what runs sparser maps in its place, the least density first; none where there is one choice.
    """

    path: str
    call: Call
    kernel_dtype: str
    densities: tuple[float, ...]
    candidates: tuple[Candidate, ...]
    left_out: tuple[tuple[str, str], ...]
    implementation: str
    thresholds: tuple[Threshold, ...] = ()

    @property
    def density(self) -> float:
        """Mean over the batches; NaN for empty inputs."""
        return sum(self.densities) / len(self.densities)

    def us(self, implementation: str) -> float | None:
        """Microseconds of a candidate, None where it was left out."""
        return next((c.us for c in self.candidates if c.implementation == implementation), None)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The choices for a network on one device, made by `calibrate`. `print` shows it as a table.

    Attributes:
      device: what it was measured on: a GPU's kind, or a CPU's model, cores and instruction set.
      versions: of the packages that decide how long an implementation takes.
      xla_flags: of the process that measured, for information.
      date: of the measurement.
      seconds: that calibration took, compilation included.
      model: the model's class, for information.
      layers: one entry for each call, in the order of the calls.
      uncalled: sparse layers of the model that did none of the package's operations.
    """

    device: str
    versions: Mapping[str, str]
    xla_flags: str
    date: str
    seconds: float
    model: str
    layers: tuple[LayerPlan, ...]
    uncalled: tuple[str, ...]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON.

        Raises:
          TypeError: a path that is none.
          OSError: the file cannot be written.
        """
        content = {"format": _FORMAT, **dataclasses.asdict(self), "versions": dict(self.versions)}
        as_path("path", path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, any_device: bool = False) -> Plan:
        """Read what `save` wrote.

        Args:
          path: the file.
          any_device: also return a plan of another device or other versions, to look at. `apply_plan` will not take it.

        Raises:
          TypeError: a path that is none.
          ValueError: no plan in the file. It names the file, the first entry that is wrong, its value and what is
            accepted. Or a plan for another device or other versions; it names the first difference.
          OSError: the file cannot be read.
        """
        path = as_path("path", path)
        try:
            plan = _from_json(json.loads(path.read_text(encoding="utf-8")))
        except RecursionError as error:  # of a file of many brackets
            raise ValueError(f"{path} holds no plan: its entries are nested too deeply") from error
        except ValueError as error:
            raise ValueError(f"{path} holds no plan: {error}") from error
        if not any_device:
            plan.check_device()
        return plan

    def check_device(self) -> None:
        """Raise a ValueError that names the first thing in which this device or its software is not the plan's."""
        device = device_label()
        if device != self.device:
            raise ValueError(f"the plan is for device {self.device!r}, and this is {device!r}; calibrate here")
        for name, (here, there) in _pairs(versions(), self.versions):
            if here != there:
                raise ValueError(f"the plan is for {name} {there}, and this is {here}; calibrate again")

    def __str__(self) -> str:
        return plan_table.as_text(self)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return plan_table.as_html(self)


def apply_plan(model: nnx.Module, plan: Plan, *, pack: bool = True) -> None:
    """Have `model` use the plan's choices, in place, eagerly and under `jax.jit`.

    Inputs of shapes that were not calibrated run as `implementation=None`. Dense blocks that are packed are unpacked,
    because a planned layer runs by itself. `jax_sparse_conv.nnx.set_implementation(model)` and
    `jax_sparse_conv.nnx.unpack(model)` undo it.

    Args:
      model: the nnx model that the plan was made with, or one built in the same way.
      plan: of `calibrate` or `Plan.load`.
      pack: whether to pack kernels on a CPU, as `jax_sparse_conv.nnx.pack` does. It packs those of layers whose choice
        reads packed kernels, which is how they were timed. Without it these layers pack in every call, unless the
        weights are constants of a jitted function.

    Raises:
      TypeError: a model that is not an nnx module, or no plan.
      ValueError: the plan is for another device, other versions or another model; names the first difference. Or two
        layers of the model have one name.
    """
    check_model(model)
    if not isinstance(plan, Plan):
        raise TypeError(f"plan is a {type(plan).__name__}, not a jax_sparse_conv.Plan")
    _check_layers(plan)
    plan.check_device()
    found = layers_by_name(model)
    planned = {layer.path for layer in plan.layers} | set(plan.uncalled)
    for path in sorted(planned - found.keys()):
        raise ValueError(f"the plan has a layer {path!r}, and the model has none of that name; {_ANOTHER_MODEL}")
    for path in sorted(found.keys() - planned):
        raise ValueError(f"the model has a layer {path!r}, and the plan has none of that name; {_ANOTHER_MODEL}")
    choices: dict[str, list[tuple[Call, str]]] = {}
    steps: dict[str, list[tuple[Call, tuple[tuple[float, str], ...]]]] = {}
    for layer_plan in plan.layers:
        _check_layer(found[layer_plan.path], layer_plan)
        choices.setdefault(layer_plan.path, []).append((layer_plan.call, layer_plan.implementation))
        if layer_plan.thresholds:
            of_call = tuple((each.density, each.implementation) for each in layer_plan.thresholds)
            steps.setdefault(layer_plan.path, []).append((layer_plan.call, of_call))
    for path, chosen in choices.items():
        found[path].implementation = Planned(tuple(chosen), tuple(steps.get(path, ())))
    if pack:
        sparse_nnx.pack(model)


_ANOTHER_MODEL = "it is for another model: calibrate this one"


def check_model(model: Any) -> None:
    """Raise a TypeError that says what to do with a model that cannot be planned."""
    if isinstance(model, linen.Module):
        raise TypeError(
            f"model is a Linen module ({type(model).__name__}), whose layers cannot be set after they are made; "
            "calibrate its layers in an nnx model, or give the Linen layers their implementation= by name"
        )
    check_module(model)


def sparse_layers(model: nnx.Module) -> Iterator[tuple[str, Any]]:
    """(name, layer) of every sparse layer: the network's own name where it has one, else the place in the model."""
    names = layer_names(model)
    for _, module in nnx.iter_modules(model):
        if id(module) in names:
            yield names[id(module)], module


def layers_by_name(model: nnx.Module) -> dict[str, Any]:
    """Every sparse layer by the name that a plan has it under.

    Raises:
      ValueError: two layers have one name; says which two. A layer of a subclass may stand at a place that is a
        network's name for another layer.
    """
    found: dict[str, Any] = {}
    for name, layer in sparse_layers(model):
        other = found.setdefault(name, layer)
        if other is not layer:
            first, second = (_place(model, each) for each in (other, layer))
            raise ValueError(
                f"two layers of the {type(model).__name__} are named {name!r}, those at {first} and {second}; a plan "
                "tells layers apart by their names, so rename one"
            )
    return found


def _place(model: nnx.Module, layer: Any) -> str:
    """Where a layer is, with the names of attributes and keys apart even if they have dots."""
    path = next(path for path, module in nnx.iter_modules(model) if module is layer)
    return " > ".join(map(repr, path))


def _check_layer(layer: Any, planned: LayerPlan) -> None:
    """Raise a ValueError where the layer could not have made the planned call."""
    kernel = layer.kernel
    expected, call = planned.call.kernel_shape, planned.call
    difference = None
    if tuple(kernel.shape) != expected:
        difference = f"kernel.shape={tuple(kernel.shape)}, not {expected}"
    elif str(kernel.dtype) != planned.kernel_dtype:
        difference = f"kernel.dtype={kernel.dtype}, not {planned.kernel_dtype}"
    elif (layer.bias is not None) != call.bias:
        difference = f"{'a' if layer.bias is not None else 'no'} bias, unlike the plan's"
    else:
        difference = call.first_difference(_call_of(layer, call))
    if difference is not None:
        raise ValueError(f"layer {planned.path!r} has {difference}; {_ANOTHER_MODEL}")


def _call_of(layer: Any, call: Call) -> Call:
    """What the layer would do with the planned call's operands; a bare convolution's activation is taken over."""
    x, kernel = (jax.ShapeDtypeStruct(shape, call.dtype) for shape in (call.x_shape, call.kernel_shape))
    arguments: dict[str, Any]
    if call.op == "dense":
        arguments = layers.dense_arguments(layer)
    else:
        arguments = layers.conv_arguments(layer)
        if call.op == "conv_pool":
            if not isinstance(layer, sparse_nnx.SparseConvPool):
                return dataclasses.replace(call, op="conv")
            arguments |= layers.pool_arguments(layer)
        elif call.activation is None:
            arguments["activation"] = None
    return Call.of(call.op, (x, kernel, call.bias or None, call.residual or None), arguments)


def _from_json(content: Any) -> Plan:
    if isinstance(content, dict):
        found = content.get("format")
        if type(found) is not int or found not in (_WITHOUT_THRESHOLDS, _FORMAT):
            raise ValueError(f"its format is {json.dumps(found)}, not {_WITHOUT_THRESHOLDS} or {_FORMAT}")
        content = {name: value for name, value in content.items() if name != "format"}
        if found == _WITHOUT_THRESHOLDS and isinstance(content.get("layers"), list):
            content["layers"] = [_with_thresholds(layer) for layer in content["layers"]]
    plan: Plan = typed_json.read(Plan, content, "")
    _check_layers(plan)
    return plan


def _check_layers(plan: Plan) -> None:
    for index, layer in enumerate(plan.layers):
        try:
            _check_loaded(layer)
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"layers[{index}] ({layer.path!r}): {error}") from error


def _with_thresholds(layer: Any) -> Any:
    """A layer of a file whose format has none."""
    return {**layer, "thresholds": []} if isinstance(layer, dict) and "thresholds" not in layer else layer


def _check_loaded(layer: LayerPlan) -> None:
    """Raise a ValueError for what no calibration could have found, though it has the right types."""
    try:
        layer.call.check()
    except ValueError as error:
        raise ValueError(f"call: {error}") from error
    if not is_dtype(layer.kernel_dtype):
        raise ValueError(f"kernel_dtype={layer.kernel_dtype!r} is not the name of a dtype, such as 'float32'")
    if not layer.densities:
        raise ValueError("densities=() is empty; there is one for each batch")
    if not all(math.isnan(density) or 0 <= density <= 1 for density in layer.densities):
        raise ValueError(f"densities={layer.densities!r} are not from 0 to 1, or NaN where there was nothing")
    names = {"implementation": layer.implementation}
    names |= {f"candidates[{i}].implementation": each.implementation for i, each in enumerate(layer.candidates)}
    names |= {f"left_out[{i}][0]": name for i, (name, _) in enumerate(layer.left_out)}
    names |= {f"thresholds[{i}].implementation": each.implementation for i, each in enumerate(layer.thresholds)}
    least = 0.0
    for i, threshold in enumerate(layer.thresholds):
        if not least < threshold.density < 1:
            accepted = "0" if i == 0 else f"thresholds[{i - 1}].density={least}"
            raise ValueError(f"thresholds[{i}].density={threshold.density} must be between {accepted} and 1")
        least = threshold.density
    for name, implementation in names.items():
        if implementation not in layer.call.implementations:
            raise ValueError(
                f"{name}={implementation!r} is not one that {layer.call.op} has: "
                f"{', '.join(map(repr, layer.call.implementations))}"
            )
        runs = not name.startswith("left_out")
        if runs and implementation == "coo" and (reason := layer.call.why_not_coo()) is not None:
            raise ValueError(f"{name}='coo' cannot run: {reason}")


def _pairs(here: Mapping[str, str], there: Mapping[str, str]) -> Iterator[tuple[str, tuple[str, str]]]:
    for name in dict.fromkeys([*there, *here]):
        yield name, (here.get(name, "(none)"), there.get(name, "(none)"))
