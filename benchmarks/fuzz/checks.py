"""A case beside the oracle: what is called, how exact it has to be, and what was wrong."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from benchmarks.fuzz import calls, oracle
from benchmarks.fuzz.case import GRADIENTS, Case, out_shape
from benchmarks.fuzz.operands import BATCH, Array, Inputs, Operands, dtype_of, inputs
from benchmarks.fuzz.oracle import Rounding
from jax_sparse_conv._src import devices
from jax_sparse_conv._src.dispatch import model

TOLERANCE = {"float32": 2e-6, "bfloat16": 6e-3, "float16": 8e-4, "float64": 1e-14}
"""Of the norm of a result, as the package's tests have it; those of long sums are larger."""


def run(case: Case) -> str | None:
    """Why a case's result is not the oracle's; None where it is.

    Raises:
      SkippedError: this machine has no kernel for it.
    """
    reason = calls.why_not(case)
    if reason is not None:
        raise SkippedError(reason)
    given = inputs(case)
    wide = jax.enable_x64(True) if case.dtype == "float64" else contextlib.nullcontext()
    with wide, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of accelerate, where nothing is to be done
        if case.transform in GRADIENTS:
            given = _without_open(case, given)
        function, arguments = calls.transformed(case, given)
        _poison(out_shape(case), dtype_of(case))
        result = jax.block_until_ready(function(*arguments))
    if case.counts:
        result, counts = result
        wrong = _wrong_counts(case, result, counts)
        if wrong is not None:
            return wrong
    if case.transform in GRADIENTS:
        return _wrong_gradients(case, given, result)
    if case.transform == "jacfwd":
        return _wrong_tangents(case, given, result)
    return _wrong_values(case, given, result)


class SkippedError(Exception):
    """A case that this machine cannot run."""


def _poison(shape: tuple[int, ...], dtype: Any) -> None:
    """Leave NaN in freed memory of the result's size, so that an element nobody writes is seen."""
    buffers = [jax.device_put(np.full(shape, np.nan, dtype)) for _ in range(3)]
    for buffer in buffers:
        buffer.block_until_ready().delete()


def _of_batch(operands: Operands, mapped: Operands, index: int) -> list[Any]:
    """One element of what is mapped, in float64."""
    chosen = (v[index] if v is not None and m else v for v, m in zip(operands, mapped, strict=True))
    return [None if v is None else v.astype(np.float64) for v in chosen]


def _elements(case: Case) -> Sequence[int]:
    return range(BATCH) if case.transform.startswith("vmap") else range(1)


# --- values ----------------------------------------------------------------------------------------------------------


def _wrong_values(case: Case, given: Inputs, result: Any) -> str | None:
    is_batch = case.transform.startswith("vmap")
    if (problem := _misshapen(case, result, (*((BATCH,) if is_batch else ()), *out_shape(case)))) is not None:
        return problem
    found = np.asarray(result).astype(np.float64)
    for index in _elements(case):
        wanted = oracle.forward(case, *_of_batch(given.operands, given.mapped, index))
        products = math.prod(case.kernel_shape[:3])
        wrong = _differs(case, found[index] if is_batch else found, wanted.out, wanted.bound, wanted.typical, products)
        if wrong is not None:
            return wrong
    return None


def _misshapen(case: Case, result: Any, shape: tuple[int, ...]) -> str | None:
    if result.shape != shape or result.dtype != dtype_of(case):
        return f"the result is {result.dtype}{list(result.shape)}, not {case.dtype}{list(shape)}"
    return None


def _differs(case: Case, found: Array, wanted: Array, bound: Array, typical: Array | None, products: int) -> str | None:
    """What is wrong with a result: an element beyond its bound, or the norm of all errors."""
    with np.errstate(invalid="ignore"):
        error = np.where(found == wanted, 0, np.abs(found - wanted))  # also of infinities
    error = np.where(np.isfinite(error), error, np.inf)
    if not error.size:
        return None
    if _may_be_transformed(case):
        bound = np.maximum(bound, np.max(bound, initial=0.0, where=np.isfinite(bound)))
    if (error > bound).any():
        place = np.unravel_index(np.argmax(error / np.maximum(bound, np.finfo(np.float64).tiny)), error.shape)
        number = int((error > bound).sum())
        at = ", ".join(map(str, place))
        return (
            f"{number} of {error.size} elements; [{at}] is {found[place]:.9g}, not {wanted[place]:.9g} "
            f"within {bound[place]:.2g}"
        )
    if typical is None:
        return None
    finite = np.isfinite(wanted)
    size = max(np.linalg.norm(wanted[finite]), np.linalg.norm(typical[finite]))
    rounding = Rounding.of(case.dtype)
    most = min(TOLERANCE[case.dtype], rounding.out + rounding.sums * (4 + math.sqrt(products)))
    off = np.linalg.norm(error[finite])
    if off > most * size + math.sqrt(error.size) * (rounding.least + products * rounding.tiny):
        return f"the norm of all errors is {off / size:.2g} of the result's, more than {most:.2g}"
    return None


def _may_be_transformed(case: Case) -> bool:
    """Whether results may share what a tile of elements has lost: by cuDNN's transforms, where XLA may have computed it
    on a GPU, or by a CPU's loop for 3x3 kernels in float32.
    """
    is_derivative = case.transform in (*GRADIENTS, "jacfwd")
    if devices.default_platform() == "gpu":
        return case.implementation in (None, "xla") or is_derivative
    least = min(case.x[3] // case.groups, case.out_channels // case.groups)
    is_large = least >= model.shipped("cpu winograd")["channels, least"]
    is_winograds = case.dtype == "float32" and tuple(case.kernel) == (3, 3) and is_large
    return is_winograds and (case.implementation is None or is_derivative)


def _wrong_counts(case: Case, result: Any, counts: Any) -> str | None:
    """What is wrong with the counted non-zeros of a result."""
    rows, values = np.asarray(counts), np.asarray(result)
    rows = rows.reshape(BATCH if rows.ndim > 2 else 1, *rows.shape[-2:]).sum(1)
    for (nonzeros, elements), each in zip(rows, np.split(values.ravel(), len(rows)), strict=True):
        actual = int(np.count_nonzero(each))
        is_whole = elements == each.size
        if not 0 <= nonzeros <= elements <= each.size or (is_whole and nonzeros != actual):
            return f"the counts are {nonzeros} non-zeros of {elements}; there are {actual} of {each.size}"
        if actual in (0, each.size) and nonzeros != (elements if actual else 0):
            return f"the counts are {nonzeros} non-zeros of {elements}; there are {actual} of {each.size}"
    return None


# --- derivatives -----------------------------------------------------------------------------------------------------


def _without_open(case: Case, given: Inputs) -> Inputs:
    """With weights of 0 where rounding leaves it open what the derivative is."""
    weights = given.weights.copy()
    for index in _elements(case):
        clear = oracle.forward(case, *_of_batch(given.operands, given.mapped, index)).clear
        weights[~clear] = 0
    return Inputs(given.operands, given.mapped, given.directions, weights)


def _wrong_gradients(case: Case, given: Inputs, result: Sequence[Any]) -> str | None:
    names = [name for name in Operands._fields if getattr(given.operands, name) is not None]
    is_batch = case.transform == "vmap grad"
    weights = given.weights.astype(np.float64)
    for index in _elements(case):
        x, kernel, bias, residual = _of_batch(given.operands, given.mapped, index)
        passed = oracle.forward(case, x, kernel, bias, residual)
        dy, absolute = oracle.pull(case, passed, weights), oracle.pull(case, passed, np.abs(weights))
        wanted = _cotangents(case, x, kernel, dy)
        sizes = _cotangents(case, np.abs(x), np.abs(kernel), absolute)
        for name, gradient in zip(names, result, strict=True):
            shape = wanted[name].shape
            if (problem := _misshapen(case, gradient, (*((BATCH,) if is_batch else ()), *shape))) is not None:
                return f"gradient by {name}: {problem}"
            found = np.asarray(gradient).astype(np.float64)
            found = found[index] if is_batch else found
            bound = _derivative_bound(case, sizes[name], dy.size if name in ("kernel", "bias") else _met(case))
            wrong = _differs(case, found, wanted[name], bound, None, 0)
            if wrong is not None:
                return f"gradient by {name}: {wrong}"
    return None


def _met(case: Case) -> int:
    return math.prod(case.kernel) * case.out_channels // case.groups


def _cotangents(case: Case, x: Array, kernel: Array, dy: Array) -> dict[str, Array]:
    return {
        "x": oracle.to_x(case, kernel, dy),
        "kernel": oracle.to_kernel(case, x, dy),
        "bias": dy.sum((0, 1, 2)),
        "residual": dy,
    }


def _derivative_bound(case: Case, absolute: Array, products: int) -> Array:
    """Derivatives are rounded to the dtype on the way, which XLA's sums of 16-bit types are, too."""
    rounding = Rounding.of(case.dtype)
    long = 4 + math.sqrt(products)
    return (rounding.out * long) * absolute + products * rounding.tiny + 2 * rounding.least


def _wrong_tangents(case: Case, given: Inputs, result: Any) -> str | None:
    if (problem := _misshapen(case, result, (*out_shape(case), BATCH))) is not None:
        return problem
    found = np.asarray(result).astype(np.float64)
    x, kernel, bias, residual = _of_batch(given.operands, given.mapped, 0)
    passed = oracle.forward(case, x, kernel, bias, residual)
    for index in range(BATCH):
        dx, dkernel, dbias, dresidual = (None if d is None else d[index].astype(np.float64) for d in given.directions)
        tangent = oracle.conv(case, dx, kernel) + oracle.conv(case, x, dkernel)
        absolute = oracle.conv(case, np.abs(dx), np.abs(kernel)) + oracle.conv(case, np.abs(x), np.abs(dkernel))
        for added in (dbias, dresidual):
            if added is not None:
                tangent, absolute = tangent + added, absolute + np.abs(added)
        wanted = oracle.push(case, passed, tangent)
        bound = _derivative_bound(case, oracle.push(case, passed, absolute), math.prod(case.kernel_shape[:3]))
        bound = np.where(passed.clear, bound, np.inf)
        wrong = _differs(
            case, np.where(passed.clear, found[..., index], 0), np.where(passed.clear, wanted, 0), bound, None, 0
        )
        if wrong is not None:
            return f"tangent {index}: {wrong}"
    return None
