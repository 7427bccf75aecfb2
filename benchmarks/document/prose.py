"""Sentences of README.md and docs/ whose figures are computed from the files of results.

`sentences.py` and `kernel_sentences.py` have them: the page, the words with a {} for each figure, and the function that
computes the figures. `document` writes the figures into the pages and leaves the words and their lines alone. Where a
paragraph, an item or a table cites a file of results, each of its figures has to be of such a sentence.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.results import RESULTS

Figures = Callable[[Path], Sequence[str]]

_NUMBER = r"[+-]?\d+(?:,\d{3})*(?:\.\d+)?"
# Not the digits of a name (ResNet-50, TF32, batch 8) or of a shape (3x3).
_FIGURE = re.compile(rf"(?<![\w.-])(?<!\dx)(?<!batch ){_NUMBER}(?!\w*\d|x\d)")
_TABLE = r"(?:^ *\|.*\n)+"
_ITEM = r"^ *(?:[-*]|\d+\.) .*\n(?:^(?! *\|| *[-*] | *\d+\. |\s*$).*\n)*"
_PARAGRAPH = r"(?:^(?! *\|| *[-*] | *\d+\. |\s*$).*\n)+"
_BLOCK = re.compile(f"{_TABLE}|{_ITEM}|{_PARAGRAPH}", re.MULTILINE)
_CODE = re.compile(r"^```.*?^```|`[^`]*`|\]\([^)]*\)", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Sentence:
    """Words of a page, the figures in them, and where those are from."""

    page: str
    words: str
    figures: Figures

    def pattern(self) -> re.Pattern[str]:
        """The words with any figures, whatever the lines that they are on."""
        parts = self.words.split("{}")
        return re.compile(f"({_NUMBER})".join(r"\s+".join(map(re.escape, re.split(r"\s+", part))) for part in parts))

    def find(self, text: str) -> re.Match[str]:
        """Where a page has the sentence.

        Raises:
          ValueError: it has none, or several.
        """
        found = list(self.pattern().finditer(text))
        if len(found) != 1:
            raise ValueError(f"{self.page} has {len(found)} times, not once: {self.words!r} (document/sentences.py)")
        return found[0]


def register(sentences: list[Sentence], page: str, words: str) -> Callable[[Figures], Figures]:
    """Adds a sentence, whose figures the decorated function computes."""

    def add(figures: Figures) -> Figures:
        sentences.append(Sentence(page, words, figures))
        return figures

    return add


def page(sentences: Sequence[Sentence], name: str, text: str, results: Path = RESULTS) -> str:
    """A page with the figures that the results give.

    Raises:
      ValueError: a sentence is not in the page, or has more or fewer places than there are figures.
    """
    for sentence in (each for each in sentences if each.page == name):
        found, figures = sentence.find(text), sentence.figures(results)
        if len(figures) != len(found.groups()):
            raise ValueError(f"{name}: {len(figures)} figures for {len(found.groups())} places in {sentence.words!r}")
        for place, figure in reversed(list(enumerate(figures, 1))):
            text = text[: found.start(place)] + figure + text[found.end(place) :]
    return text


def unknown(sentences: Sequence[Sentence], name: str, text: str, results: Path = RESULTS) -> list[str]:
    """Lines with a figure beside a file of results, or with such a file that is not there, that no sentence has."""
    spans = [each.find(text).span() for each in sentences if each.page == name]
    plain = _CODE.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)
    lines = {}
    for start, end in _citing(text, results):
        for figure in _FIGURE.finditer(plain, start, end):
            if not any(first <= figure.start() < last for first, last in spans):
                number = text.count("\n", 0, figure.start()) + 1
                lines[number] = f"{name}:{number}: {figure[0]} is of no sentence in document/sentences.py"
    for number, line in enumerate(text.splitlines(), 1):
        for file in _files(line, results):
            if not any((results / folder / file).is_file() for folder in ("", *_folders(results))):
                lines[number] = f"{name}:{number}: there is no {file} in benchmarks/results"
    return [line for _, line in sorted(lines.items())]


def _citing(text: str, results: Path) -> Iterator[tuple[int, int]]:
    """Where the paragraphs, items and rows of tables are that cite a file of results.

    A table whose titles cite one, or which a paragraph with one ends with a colon for, counts as a whole.
    """
    led = False  # by a paragraph with a file
    for block in _BLOCK.finditer(text):
        is_table = block[0].lstrip().startswith("|")
        titles, *rows = block[0].splitlines(keepends=True) if is_table else [block[0]]
        cites = bool(_files(titles, results))
        if cites or (is_table and led):
            yield block.span()
        else:
            start = block.start() + len(titles)
            for row in rows:
                if _files(row, results):
                    yield start, start + len(row)
                start += len(row)
        led = cites and not is_table and block[0].rstrip().endswith(":")


def _files(text: str, results: Path) -> list[str]:
    """Files of results that are cited, as `device/suite.json` or `paper/experiment.json`."""
    folders = "|".join(map(re.escape, (*_folders(results), "paper")))
    return re.findall(rf"`((?:{folders})/[\w/.]+\.jsonl?)`", text)


def _folders(results: Path) -> list[str]:
    return sorted(path.name for path in results.iterdir() if path.is_dir())
