"""Writes the pages of figures: docs/papers.md, docs/results/measured.md with its pictures, docs/results/kernels.md, the
README's table, and the figures of sentences that cite a file of results.

python -m benchmarks document            # writes them from benchmarks/results/
python -m benchmarks document --check    # only says whether the pages are what this would write
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common import help
from benchmarks.common.results import ROOT
from benchmarks.document import kernel_sentences, kernels_page, measured, pictures, prose, readme, sentences
from benchmarks.paper import document

PAPERS = "docs/papers.md"
MEASURED = "docs/results/measured.md"
KERNELS = "docs/results/kernels.md"
README = "README.md"
SENTENCES = (*sentences.SENTENCES, *kernel_sentences.SENTENCES)


def pages(root: Path = ROOT) -> dict[str, str]:
    """What each page should be.

    Raises:
      ValueError: a page has no place for its table or for a sentence's figures.
    """
    found = {PAPERS: document.document(), MEASURED: measured.page(), KERNELS: kernels_page.page()}
    found[README] = readme.page((root / README).read_text(encoding="utf-8"))
    for name in dict.fromkeys(sentence.page for sentence in SENTENCES):
        text = found.get(name) or (root / name).read_text(encoding="utf-8")
        found[name] = prose.page(SENTENCES, name, text)
    return found


def unknown(root: Path = ROOT) -> list[str]:
    """Figures beside a file of results, in pages written by hand, that are of no sentence.

    Raises:
      ValueError: a sentence is not in its page.
    """
    names = [README, *(path.relative_to(root).as_posix() for path in sorted((root / "docs").rglob("*.md")))]
    return [
        line
        for name in names
        if name not in (PAPERS, MEASURED, KERNELS)
        for line in prose.unknown(SENTENCES, name, (root / name).read_text(encoding="utf-8"))
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Write or check the pages; the result is the exit status."""
    parser = help.parser("document", __doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; pictures are not checked")
    options = parser.parse_args(argv)
    try:
        found = pages(ROOT)
        if options.check:
            return _check(found)
    except (OSError, ValueError) as error:
        print(f"benchmarks document: {error}", file=sys.stderr)
        return 1
    for name, text in found.items():
        (ROOT / name).write_text(text, encoding="utf-8")
    pictures.write((ROOT / MEASURED).parent)
    return 0


def _check(found: dict[str, str]) -> int:
    wrong = [
        f"{name} is not what the results say: run python -m benchmarks document"
        for name, text in found.items()
        if (ROOT / name).read_text(encoding="utf-8") != text
    ]
    wrong += unknown(ROOT)
    for line in wrong:
        print(line, file=sys.stderr)
    return int(bool(wrong))
