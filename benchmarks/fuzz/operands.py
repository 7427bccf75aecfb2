"""The arrays of a case, made by NumPy from its seed."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

from benchmarks.fuzz.case import Case, conv_size, out_shape

Array = npt.NDArray[Any]

BATCH = 2  # of what `vmap` maps, and directions of `jacfwd`
_EXPONENTS = {"float32": 50, "bfloat16": 50, "float64": 200, "float16": 4}  # of large and small values
_SPREAD = {"float32": 20, "bfloat16": 20, "float64": 100, "float16": 3}
_SUBNORMAL = {"float32": 1e-40, "bfloat16": 1e-40, "float64": 1e-310, "float16": 3e-6}


class Operands(NamedTuple):
    """The arrays of a call; a part that the case does not have is None."""

    x: Any
    kernel: Any
    bias: Any = None
    residual: Any = None


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What a case is called with.

    Attributes:
      operands: in the case's dtype; those that `vmap` maps have a leading axis of `BATCH`.
      mapped: which do.
      directions: of `jacfwd`, each with a leading axis of `BATCH`.
      weights: of the result, which `grad` pulls back.
    """

    operands: Operands
    mapped: Operands
    directions: Operands
    weights: Array


def dtype_of(case: Case) -> Any:
    """The case's dtype, as NumPy has it."""
    return ml_dtypes.bfloat16 if case.dtype == "bfloat16" else np.dtype(case.dtype)


def inputs(case: Case) -> Inputs:
    """The arrays of a case."""
    rng = np.random.default_rng(case.seed)
    shapes = _shapes(case)
    mapped = _mapped(case)
    made = []
    for name, shape, is_mapped in zip(Operands._fields, shapes, mapped, strict=True):
        shape = (BATCH, *shape) if is_mapped and shape is not None else shape
        made.append(None if shape is None else _values(case, name, shape, rng).astype(dtype_of(case)))
    directions = [
        None if shape is None else rng.standard_normal((BATCH, *shape)).astype(dtype_of(case)) for shape in shapes
    ]
    weights = rng.standard_normal(out_shape(case)).astype(dtype_of(case))
    return Inputs(Operands(*made), mapped, Operands(*directions), weights)


def _shapes(case: Case) -> Operands:
    conv = (case.x[0], *conv_size(case), case.out_channels)
    return Operands(
        case.x, case.kernel_shape, (case.out_channels,) if case.bias else None, conv if case.residual else None
    )


def _mapped(case: Case) -> Operands:
    x = case.transform in ("vmap x", "vmap both", "vmap grad")
    kernel = case.transform in ("vmap kernel", "vmap both")
    bias = case.bias and case.transform in ("vmap both", "vmap bias")
    return Operands(x, kernel, bias, case.residual and x)


def _values(case: Case, name: str, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    exponent = {"large": 1, "small": -1}.get(case.values, 0) * _EXPONENTS[case.dtype]
    if name == "x":
        return np.ldexp(_map(case, shape, rng), exponent) * _spread(case)
    values = rng.standard_normal(shape)
    if name != "kernel":  # of the size that a sum of products has
        return np.ldexp(values, 2 * exponent)
    values /= np.sqrt(max(1, np.prod(case.kernel_shape[:3])))
    if case.values == "sparse kernel":
        values[rng.random(shape) < 0.9] = 0
    per_group = _spread(case).reshape(case.groups, -1)[:1].reshape(-1, 1)  # groups share it
    return np.ldexp(values, exponent) / per_group


def _map(case: Case, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    values = rng.standard_normal(shape)
    if case.values != "signed":
        values = np.abs(values) + 0.05
    if case.values == "subnormal":
        values = np.where(rng.random(shape) < 0.3, values * _SUBNORMAL[case.dtype], values)
    zero = np.where(rng.random(shape) < 0.1, -0.0, 0.0)
    return np.where(rng.random(shape) < case.zeros, zero, values)


def _spread(case: Case) -> Array:
    """Powers of two of the channels of x, the same for each group; weights have the inverse."""
    channels = case.x[3] // case.groups
    if case.values != "spread":
        return np.ones(case.x[3])
    most = _SPREAD[case.dtype]
    exponents = np.random.default_rng(case.seed + 1).integers(-most, most, channels, endpoint=True)
    return np.tile(np.exp2(exponents), case.groups)
