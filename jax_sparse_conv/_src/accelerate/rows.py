"""A layer of a function that was accelerated, and what became of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jax_sparse_conv._src.accelerate import maps
from jax_sparse_conv._src.primitive import jax_internals

UNKNOWN_SIZES = "its sizes are not known yet"  # why a layer of symbolic sizes is left
COLUMNS = ("layer", "input", "kernel", "with", "runs", "chain", "at")


@dataclasses.dataclass
class Row:
    """A convolution or dense layer of the function.

    Attributes:
      operation: "conv" or "dense".
      x_shape: [N, H, W, C] or [N, C].
      kernel_shape: [kh, kw, C / groups, K] or [C, K].
      result_shape: [N, Ho, Wo, K] in front of a pool, or [N, K].
      dtype: of x.
      where: the line of the function that calls it.
      reason: why it was left as it is, None where it is a call of this package.
      joined: what became part of the call, in order, such as ("bias", "relu").
      call: which of the calls of the rewritten function it is, in order; None in the body of a loop or the like.
      runs: what runs it on the default device: an implementation, such as "ecr", "direct" or, of a product, "dense";
        "xla" where XLA's operation is expected to be faster; "" before `report_of` says it.
      chain: the number of its fused chain, from 1 on, or None.
      block: the number of its dense block, from 1 on, which has no `call`; or None.
    """

    operation: str
    x_shape: tuple[Any, ...]
    kernel_shape: tuple[Any, ...]
    result_shape: tuple[Any, ...]
    dtype: str
    where: str
    reason: str | None = None
    joined: tuple[str, ...] = ()
    call: int | None = None
    runs: str = ""
    chain: int | None = None
    block: int | None = None

    @classmethod
    def of_conv(cls, equation: Any, callers: Sequence[Any], reason: str | None) -> Row:
        """Of lax's convolution, which these calls are around, and why it is left as it is."""
        dimensions, (x, kernel, *_) = equation.params["dimension_numbers"], (each.aval for each in equation.invars)
        result = equation.outvars[0].aval.shape
        is_map = len(x.shape) == maps.RANK
        return cls(
            "conv",
            maps.stored_shape(maps.axes_of(dimensions.lhs_spec), x.shape) if is_map else x.shape,
            tuple(kernel.shape[axis] for axis in maps.to_hwio(dimensions)),
            maps.stored_shape(maps.axes_of(dimensions.out_spec), result) if is_map else result,
            str(x.dtype),
            jax_internals.source_of(equation, callers),
            reason,
        )

    @property
    def flops(self) -> Any:
        """Operations of the dense layer, a multiply-add counted as two and padding as data; symbolic with its sizes.

        In a loop those of one pass.
        """
        return 2 * math.prod(self.result_shape) * math.prod(self.kernel_shape[:-1])

    @property
    def bytes(self) -> Any:
        """Bytes of x, the kernel, the result in front of a pool and a residual, each counted once."""
        results = math.prod(self.result_shape) * (2 if "residual" in self.joined else 1)
        return jnp.dtype(self.dtype).itemsize * (math.prod(self.x_shape) + math.prod(self.kernel_shape) + results)

    def cells(self) -> tuple[str, ...]:
        """As `COLUMNS`."""
        runs = self.runs if self.reason is None else f"as it was: {self.reason}"
        chain = "" if self.chain is None else str(self.chain)
        shapes = (_shape(self.x_shape), _shape(self.kernel_shape))
        return (self.operation, *shapes, ", ".join(self.joined), runs, chain, self.where)


def _shape(shape: Sequence[Any]) -> str:
    return "x".join(map(str, shape))
