"""Writes the pages of figures: docs/papers.md, docs/results/measured.md with its pictures, and the README's table.

python -m benchmarks document            # writes them from benchmarks/results/
python -m benchmarks document --check    # only says whether the pages are what this would write
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common import help
from benchmarks.common.results import ROOT
from benchmarks.document import measured, pictures, readme
from benchmarks.paper import document

PAPERS = ROOT / "docs" / "papers.md"
MEASURED = ROOT / "docs" / "results" / "measured.md"
README = ROOT / "README.md"


def pages() -> dict[Path, str]:
    """What each page should be."""
    return {
        PAPERS: document.document(),
        MEASURED: measured.page(),
        README: readme.page(README.read_text(encoding="utf-8")),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Write or check the pages; the result is the exit status."""
    parser = help.parser("document", __doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; pictures are not checked")
    options = parser.parse_args(argv)
    if not options.check:
        for path, text in pages().items():
            path.write_text(text, encoding="utf-8")
        pictures.write(MEASURED.parent)
        return 0
    stale = [path for path, text in pages().items() if path.read_text(encoding="utf-8") != text]
    for path in stale:
        print(f"{path} is not what the results say: run python -m benchmarks document", file=sys.stderr)
    return bool(stale)
