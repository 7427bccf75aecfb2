"""The documentation keeps to what it promises its readers: short, in plain sentences, with files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
MOST_WORDS = 40  # of a sentence
GENERATED = {ROOT / "docs" / "papers.md"}
PAGES = sorted(
    {ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")}
    | set((ROOT / "docs").rglob("*.md")) - GENERATED
)

page_of = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def prose(text: str) -> str:
    """Without front matter, code, tables and the targets of links; a full stop behind each item and title."""
    text = re.sub(r"\A---\n.*?^---$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^(```|:::).*?^\1", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^ *\|.*$", ".", text, flags=re.MULTILINE)
    text = re.sub(r"^#+ (.*)$", r"\1.", text, flags=re.MULTILINE)
    text = re.sub(r"^ *(?:[-*]|\d+\.) ", ". ", text, flags=re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    return re.sub(r"\n\n+", " . ", text)


def sentences(text: str) -> list[str]:
    return re.split(r"[.!?]\)?(?:\s+|$)", re.sub(r"`[^`]*`", "code", prose(text)))


@page_of
def test_no_sentence_has_to_be_read_twice(page: Path) -> None:
    long = [" ".join(sentence.split()) for sentence in sentences(page.read_text("utf-8"))]
    assert not [sentence for sentence in long if len(sentence.split()) > MOST_WORDS]


def test_readme_and_changelog_are_short() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").split()) <= 900
    assert len((ROOT / "CHANGELOG.md").read_text("utf-8").splitlines()) <= 80


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text("utf-8"))
    local = [target for target in targets if "://" not in target]
    assert not [target for target in local if not (page.parent / target).exists()]


@pytest.mark.parametrize("name", ["README.md", "docs/results/measured.md", "docs/guide"])
def test_every_result_that_is_named_exists(name: str) -> None:
    pages = [ROOT / name] if name.endswith(".md") else sorted((ROOT / name).glob("*.md"))
    named = {found for page in pages for found in re.findall(r"`([\w*{},/]+)\.json`", page.read_text("utf-8"))}
    results = {path.relative_to(RESULTS).with_suffix("").as_posix() for path in RESULTS.rglob("*.json")}

    def exists(pattern: str) -> bool:
        pattern = re.sub(r"\{([^}]*)\}", lambda found: "(" + found[1].replace(",", "|") + ")", pattern)
        return any(re.search(rf"(^|/){pattern.replace('*', '.*')}$", result) for result in results)

    assert not [pattern for pattern in named if not exists(pattern)]
