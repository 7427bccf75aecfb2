"""Random cases, each drawn from a seed and a number."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.fuzz.case import GRADIENTS, OPERATIONS, SHARDED, TRANSFORMS, VALUES, Case, out_shape

_DTYPES = ("float32", "float32", "float32", "bfloat16", "float16", "float64")
_ZEROS = (0.0, 0.05, 0.3, 0.5, 0.7, 0.85, 0.95, 0.99, 1.0)
_SIZES = (1, 1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 14, 16, 17, 23, 28, 31)
_CHANNELS = (1, 1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 24, 31, 32, 33, 48, 64, 65, 96, 128, 160, 257)
_MOST_PRODUCTS = 4_000_000  # of a case, so that NumPy and a compiler are quick
_LARGE_PRODUCTS = 40_000_000
_COO_KERNELS = (1, 3, 5, 7)
_SHARDED = 0.2  # of the cases without a transform or with grad
_OF_MESHES, _OF_VALUES = 1, 2  # the streams of these draws


def draw(seed: int, number: int) -> Case:
    """Case `number` of a seed, the same on every machine.

    Meshes came later and are drawn from a stream of their own. A case that is not sharded is what it was before.
    """
    case = _Draw(np.random.default_rng([seed, number])).case(number)
    rng = np.random.default_rng([seed, number, _OF_MESHES])
    return sharded(case, rng) if case.transform in SHARDED and rng.random() < _SHARDED else case


def with_other_values(case: Case, seed: int, number: int) -> Case:
    """The case with other values and zeros, which the same compiled program takes; 0 is the case itself."""
    if number == 0:
        return case
    return _Draw(np.random.default_rng([case.seed, seed, number, _OF_VALUES])).values_of(case)


def sharded(case: Case, rng: np.random.Generator) -> Case:
    """A case split over a mesh: its images, and perhaps rows, columns or channels."""
    images, other = ((1, 2), (2, 1), (2, 2), (2, 2), (4, 1))[int(rng.integers(5))]
    x = (-(-case.x[0] // images) * images, *case.x[1:])
    split = [images, 1, 1, 1, 1]
    others = [axis for axis, size in enumerate((*x[1:], case.out_channels), 1) if size and size % 2 == 0]
    if others:
        split[int(rng.choice(others))] = other
    return dataclasses.replace(
        case, transform=SHARDED[case.transform], jit=True, x=x, split=(split[0], split[1], split[2], split[3], split[4])
    )


class _Draw:
    """Draws of one case."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def case(self, number: int) -> Case:
        operation = self._one(("conv", "conv", "conv_pool", "conv_pool", "dense", *OPERATIONS[3:]))
        most, may_be_empty = _LARGE_PRODUCTS if number % 50 == 7 else _MOST_PRODUCTS, self._is(0.05)
        while True:
            found = self._dense() if operation == "dense" else self._conv(operation)
            if _is_valid(found) and _products(found) <= most and (may_be_empty or 0 not in out_shape(found)):
                return found

    def _one(self, choices: Sequence[Any]) -> Any:
        return choices[int(self._rng.integers(len(choices)))]

    def _is(self, probability: float) -> bool:
        return bool(self._rng.random() < probability)

    def _int(self, low: int, high: int) -> int:
        return int(self._rng.integers(low, high, endpoint=True))

    def _dense(self) -> Case:
        few = self._is(0.5)
        channels = self._int(1, 70) if few else self._one((128, 333, 512, 1000, 1024, 2051, 4100))
        rows = self._one((0, 1, 1, 1, 1, 2, 3, 5, 8, 15, 16, 17, 33, 40))
        shape = (rows, 1, 1, channels)
        out = self._one(_CHANNELS) if few else self._one((1, 10, 64, 100, 130, 257, 1000))
        implementation = self._one((None, None, "ecr", "ecr", "xla"))
        return self._rest(Case("dense", implementation, "float32", "none", True, shape, out, bias=self._is(0.5)))

    def _conv(self, operation: str) -> Case:
        groups = self._one((1, 1, 1, 1, 1, 2, 3, 4, 8))
        channels, out = self._one(_CHANNELS), self._one(_CHANNELS)
        if groups == 8:  # depthwise
            groups, out = channels, channels * self._one((1, 1, 2, 3))
        elif groups > 1:
            channels, out = groups * self._int(1, 33), groups * self._int(1, 40)
        elif self._is(0.02):
            channels, out = self._one(((0, 4), (4, 0)))
        size = (self._one(_SIZES), self._one(_SIZES)) if self._is(0.98) else (0, 5)
        images = self._one((0, 1, 1, 1, 2, 2, 3, 5, 17))
        kernel = self._one(((1, 1), (1, 1), (3, 3), (3, 3), (3, 3), (5, 5), (7, 7), (2, 2), (1, 3), (4, 2), (11, 1)))
        strides = self._one(((1, 1), (1, 1), (1, 1), (2, 2), (2, 2), (3, 1), (1, 2), (3, 3), (5, 8)))
        dilation = self._one(((1, 1), (1, 1), (1, 1), (1, 1), (2, 2), (1, 3), (3, 2)))
        implementation = None
        if operation != "accelerate":
            names = ("ecr", "direct", "adaptive", "xla", "coo", *(("pecr",) * 2 if operation == "conv_pool" else ()))
            implementation = self._one((None, None, *names))
        if implementation == "coo":
            kernel = self._one([(k, k) for k in _COO_KERNELS])
            strides, dilation = self._one(((1, 1), (2, 2))), (1, 1)
        spans = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
        padding = self._padding(size, spans, operation)
        fields: dict[str, Any] = {"strides": strides, "padding": padding, "dilation": dilation, "groups": groups}
        if operation != "conv_general_dilated":
            fields |= {"bias": self._is(0.5), "activation": self._one((None, "relu"))}
        if operation in ("conv", "accelerate"):
            fields["residual"] = self._is(0.3)
        if operation == "conv_pool" or (operation == "accelerate" and not fields["residual"] and self._is(0.5)):
            fields |= self._pool()
        if operation in ("conv", "conv_pool"):
            fields |= {"counts": self._is(0.15), "given": implementation in (None, "adaptive") and self._is(0.2)}
        if operation == "accelerate":
            fields["channels_first"] = self._is(0.4)
        shape = (images, *size, channels)
        return self._rest(Case(operation, implementation, "float32", "none", True, shape, out, kernel, **fields))

    def _padding(self, size: Sequence[int], spans: Sequence[int], operation: str) -> Any:
        is_lax = operation in ("conv_general_dilated", "accelerate")
        kinds = (
            "SAME",
            "SAME",
            "SAME",
            "VALID",
            "VALID",
            "SAME_LOWER",
            "int",
            "any",
            "any",
            "negative",
            "wide",
            "mixed",
        )
        kind = self._one(kinds)
        if kind in ("SAME", "SAME_LOWER", "VALID"):
            return kind
        if kind == "int":
            pad = self._int(0, 3)
            return ((pad, pad), (pad, pad)) if is_lax else pad
        low, high = {"any": (0, 3), "negative": (-3, 0), "wide": (0, 9), "mixed": (-3, 6)}[kind]
        return tuple((self._int(low, high), self._int(low, high)) for _ in size)

    def _pool(self) -> dict[str, Any]:
        window = self._one(((2, 2), (2, 2), (2, 2), (3, 3), (1, 2), (3, 2), (4, 4), (7, 7)))
        strides = self._one((None, None, (2, 2), (1, 1), (3, 2), (4, 4)))
        pads = tuple((self._int(0, 2), self._int(0, 2)) for _ in range(2))
        padding = self._one(("VALID", "VALID", "SAME", pads))
        kind = self._one(("max", "max", "avg"))
        return {"pool": kind, "window": window, "window_strides": strides, "window_padding": padding}

    def _rest(self, case: Case) -> Case:
        """With what every operation has: dtype, transform, values."""
        transform = self._one(("none",) * 6 + TRANSFORMS[1:])
        if transform == "vmap bias" and not case.bias:
            transform = "none"
        differentiates = transform in (*GRADIENTS, "jacfwd")
        may_pack = case.operation in ("conv", "conv_pool") and not differentiates and "kernel" not in transform
        case = dataclasses.replace(
            case,
            dtype=self._one(_DTYPES),
            transform=transform,
            jit=differentiates or self._is(0.85),  # derivatives outside of jit compile dozens of programs
            packed=may_pack and transform != "vmap both" and self._is(0.2),
            counts=case.counts and transform in ("none", "vmap x"),
            given=case.given and transform == "none",
        )
        return self.values_of(case)

    def values_of(self, case: Case) -> Case:
        values = self._one(("positive",) * 6 + VALUES)
        if values in ("large", "small", "spread") and case.transform in (*GRADIENTS, "jacfwd"):
            values = "signed"
        return dataclasses.replace(case, zeros=self._one(_ZEROS), values=values, seed=self._int(0, 2**31 - 1))


def _is_valid(case: Case) -> bool:
    """Whether nothing is cropped that is not there, and the result is not too large."""
    if isinstance(case.padding, tuple):
        for size, pads in zip(case.x[1:3], case.padding, strict=True):
            if size + sum(pads) < 0:
                return False
    return not (case.residual and case.operation == "dense")


def _products(case: Case) -> int:
    """Multiplications of the dense call, roughly, counting a derivative as three."""
    pads = case.padding if isinstance(case.padding, tuple) else (case.padding,) * 2
    wide = [sum(p) if isinstance(p, tuple) else 2 * p if isinstance(p, int) else 2 for p in pads]
    out = math.prod(-(-(n + max(0, w)) // s) for n, w, s in zip(case.x[1:3], wide, case.strides, strict=True))
    times = 3 if case.transform in (*GRADIENTS, "jacfwd") else 1
    return times * case.x[0] * out * math.prod(case.kernel_shape)
