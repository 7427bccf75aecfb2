"""What became of every convolution of a function that was accelerated, as a table."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Sequence
from typing import Any

import jax

from jax_sparse_conv._src import _native, devices
from jax_sparse_conv._src.accelerate.rows import COLUMNS, Row
from jax_sparse_conv._src.fusion import chains, rewrite
from jax_sparse_conv._src.fusion.jaxprs import FlatJaxpr
from jax_sparse_conv._src.html_table import html_table
from jax_sparse_conv._src.primitive import lowering, primitives


@dataclasses.dataclass(frozen=True)
class Report:
    """What became of every convolution and dense layer; printed as a table, in notebooks too.

    Attributes:
      rows: in the order of the function.
      reason: why nothing was rewritten at all, or None.
    """

    rows: tuple[Row, ...]
    reason: str | None = None

    def __str__(self) -> str:
        if self.reason is not None:
            return f"Nothing was rewritten: {self.reason}."
        if not self.rows:
            return "Nothing was rewritten: there is no convolution, and no product of few rows with a matrix."
        cells = [COLUMNS, *(row.cells() for row in self.rows)]
        widths = [max(len(row[index]) for row in cells) for index in range(len(COLUMNS))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
        ]
        return "\n".join([*lines, self.summary()])

    __repr__ = __str__

    @property
    def flops(self) -> Any:
        """Operations of all rows, as `Row.flops` counts them; XLA's cost analysis knows none of custom calls."""
        return sum(row.flops for row in self.rows)

    @property
    def bytes(self) -> Any:
        """Bytes of all rows, as `Row.bytes` counts them."""
        return sum(row.bytes for row in self.rows)

    def summary(self) -> str:
        """One line."""
        rewritten = sum(row.reason is None for row in self.rows)
        chained = [row.chain for row in self.rows if row.chain is not None]
        text = f"{rewritten} of {len(self.rows)} layers are calls of jax_sparse_conv"
        of_xla = sum(row.runs == "xla" for row in self.rows)
        text += f", {of_xla} of which XLA runs" if of_xla else ""
        count = len(set(chained))
        return f"{text}, {len(chained)} of them in {count} chain{'s' if count > 1 else ''}" if chained else text

    def _repr_html_(self) -> str:
        if self.reason is not None or not self.rows:
            return f"<p>{html.escape(str(self))}</p>"
        return html_table(COLUMNS, [row.cells() for row in self.rows]) + f"<p>{html.escape(self.summary())}</p>"


def report_of(every: Any, rows: Sequence[Row]) -> Report:
    """The report of a rewritten function, whose closed jaxpr is `every`."""
    numbers = _chains(every)
    kinds = _kinds(every)

    def placed(row: Row) -> Row:
        if row.block is not None:
            return dataclasses.replace(row, runs=f"dense block {row.block}")
        if row.call is None:
            return dataclasses.replace(row, runs="in its loop")
        chain = numbers.get(row.call)
        return dataclasses.replace(row, runs=kinds[row.call] if chain is None else "chain", chain=chain)

    return Report(tuple(map(placed, rows)))


def _chains(every: Any) -> dict[int, int]:
    """By layer, the number of the chain that runs as one call on the default device."""
    layers: list[tuple[int, ...]] = []

    def placed(*values: Any) -> list[Any]:
        out, found = rewrite.evaluate(every, values)
        layers.extend(found)
        return out

    program = jax.make_jaxpr(placed)(*every.in_avals)
    fused = [equation for equation in program.jaxpr.eqns if equation.primitive is chains.fused_chain_p]
    if devices.default_platform() != "gpu":
        return {}
    one_call = [each for each, equation in zip(layers, fused, strict=True) if chains.is_one_call_of(equation)]
    return {layer: number for number, each in enumerate(one_call, 1) for layer in each}


def _kinds(every: Any) -> list[str]:
    """Of every call in order, what runs it on the default device."""
    platform = "cuda" if devices.default_platform() == "gpu" else devices.default_platform()
    equations = [each.equation for each in FlatJaxpr(every, every.in_avals).equations]
    calls = [equation for equation in equations if equation.primitive is primitives.conv_p]
    return [_kind(equation, platform) for equation in calls]


def _kind(equation: Any, platform: str) -> str:
    x, kernel = (variable.aval for variable in equation.invars[:2])
    if platform not in _native.PLATFORMS:
        return "xla"
    chosen = lowering.resolved(x, kernel, equation.params["config"], platform)
    if chosen is None:
        return "xla"
    if chosen.below is not None:
        return f"{chosen.method} from {1 - chosen.below:.0%} zeros on, else xla"
    return f"{chosen.method} or dense, by the zeros" if chosen.may_be_dense else chosen.method
