"""Tables as notebooks show them."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence


def html_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of texts, which are escaped."""
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"
