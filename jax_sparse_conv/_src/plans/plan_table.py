"""A plan as a table: a row for each layer, with what it was timed with and what was chosen."""

from __future__ import annotations

import html
from collections.abc import Iterator
from typing import TYPE_CHECKING

from jax_sparse_conv._src.html_table import html_table

if TYPE_CHECKING:
    from jax_sparse_conv._src.plans.plan import LayerPlan, Plan


def as_text(plan: Plan) -> str:
    """Columns that are padded, a line for each layer."""
    rows = _cells(plan)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [_title(plan)]
    for row in rows:
        cells = [cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join([*lines, *_notes(plan)])


def as_html(plan: Plan) -> str:
    """As notebooks show it."""
    header, *rows = _cells(plan)
    title, *notes = (f"<p>{html.escape(line)}</p>" for line in (_title(plan), *_notes(plan)))
    return title + html_table(header, rows) + "".join(notes)


def _title(plan: Plan) -> str:
    return f"Plan for {plan.model} on {plan.device}, {plan.date}, made in {plan.seconds:.0f} s"


def _cells(plan: Plan) -> list[list[str]]:
    """A header, and a row for each layer."""
    names = list(dict.fromkeys(c.implementation for layer in plan.layers for c in layer.candidates))
    rows = [["layer", "call", "zeros %", *(f"{name} us" for name in names), "choice", "dense/chosen"]]
    for layer in plan.layers:
        times = [layer.us(name) for name in names]
        dense, chosen = layer.us("xla"), layer.us(layer.implementation)
        rows.append(
            [
                layer.path or "(model)",
                layer.call.describe(),
                f"{100 * (1 - layer.density):.1f}",
                *("-" if us is None else f"{us:.1f}" for us in times),
                _chosen(layer),
                f"{dense / chosen:.2f}" if dense and chosen else "-",
            ]
        )
    return rows


def _notes(plan: Plan) -> Iterator[str]:
    dense_sum = sum(layer.us("xla") or 0 for layer in plan.layers)
    chosen_sum = sum(layer.us(layer.implementation) or 0 for layer in plan.layers)
    ratio = f" ({dense_sum / chosen_sum:.2f}x)" if chosen_sum else ""
    yield f"sum of the layers: dense {dense_sum:.1f} us, planned {chosen_sum:.1f} us{ratio}"
    left_out = dict.fromkeys(f"{name}: {reason}" for layer in plan.layers for name, reason in layer.left_out)
    for line in left_out:
        yield f"left out {line}"


def _chosen(layer: LayerPlan) -> str:
    """The choice, with those of sparser maps in front of it: "ecr from 60 % zeros, xla"."""
    steps = [f"{each.implementation} from {100 * (1 - each.density):.0f} % zeros" for each in layer.thresholds]
    return ", ".join([*steps, layer.implementation])
