"""The page of `run --html`, parsed as a browser would."""

from __future__ import annotations

import functools
import html.parser
import json
from pathlib import Path
from typing import Any

import pytest

from jax_sparse_conv import models
from jax_sparse_conv.__main__ import main
from jax_sparse_conv._src.cli import page

VOID = {"meta", "link", "br", "img", "hr", "input"}


class Parsed(html.parser.HTMLParser):
    """Elements, text, and what is not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.cells: list[str] = []
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag in ("td", "dd"):
            self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        if self.open and self.open[-1] in ("td", "dd"):
            self.cells[-1] += data


def row(path: str, dense_us: float, sparse_us: float, zeros: float) -> dict[str, Any]:
    return {
        "path": path,
        "kind": "SparseConv",
        "input_shape": [1, 8, 8, 3],
        "output_shape": [1, 8, 8, 4],
        "zeros_percent": zeros,
        "implementation": "ecr",
        "dense_us": dense_us,
        "sparse_us": sparse_us,
        "ratio": dense_us / sparse_us,
    }


def content(name: str = "conv1") -> dict[str, Any]:
    total = {"dense_us": 3000.0, "sparse_us": 1500.0, "ratio": 2.0}
    best = [{"class": 1, "name": name, "probability": 0.5}]
    return {
        "network": "vgg19",
        "device": f"a CPU {name}",
        "images": [name, "b.jpg"],
        "notes": [f"a note {name}"],
        "layers": [row(name, 2000.0, 500.0, 45.5), row("conv2", 1000.0, 1000.0, 0.0)],
        "totals": {"layers": total, "network": total},
        "difference": {"max_relative": 1.5e-6, "frobenius": 1e-7},
        "top5": {"dense": [best] * 4, "sparse": [best] * 4},
        "environment": {"versions": {"jax": "0.10.2"}, "devices": [name], "gpu_driver": None},
        "command": f"python -m jax_sparse_conv run --image {name}",
        "batch": 2,
    }


def test_the_page_has_every_number_and_bars_in_proportion() -> None:
    parsed = Parsed(page.of(content()))
    assert parsed.open == []
    assert parsed.cells[:9] == ["conv1", "1x8x8x3", "1x8x8x4", "ecr", "", "45.5", "2.000", "0.500", "4.00"]
    widths = {"zeros": [], "dense": [], "sparse": []}  # type: ignore[var-annotated]
    for tag, attributes in parsed.elements:
        if tag == "div" and str(attributes.get("class")).startswith("bar "):
            widths[str(attributes["class"]).split()[1]].append(attributes["style"])
    assert widths == {
        "zeros": ["width:45.5%", "width:0.0%"],
        "dense": ["width:100.0%", "width:50.0%"],
        "sparse": ["width:25.0%", "width:50.0%"],
    }
    text = " ".join(parsed.texts)
    for expected in ("a ratio of 2.00", "1.5e-06", "0.10.2", "a note conv1", "conv1 50.0 %", "b.jpg"):
        assert expected in text


def test_the_page_needs_nothing_else_and_runs_nothing() -> None:
    parsed = Parsed(page.of(content()))
    assert {tag for tag, _ in parsed.elements}.isdisjoint({"script", "link", "img", "iframe", "object"})
    named = [
        value for _, attributes in parsed.elements for name, value in attributes.items() if name in ("src", "href")
    ]
    assert named == []
    assert "url(" not in page.of(content())
    assert ("meta", {"charset": "utf-8"}) in parsed.elements


def test_names_are_escaped() -> None:
    hostile = "<script>alert('1')</script>&\"'"
    text = page.of(content(hostile))
    parsed = Parsed(text)
    assert "script" not in {tag for tag, _ in parsed.elements}
    assert parsed.cells[0] == hostile
    assert "<script" not in text


def test_run_writes_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = functools.partial(models.VGG, (1, 2), features=(4, 8), hidden=16, pool_size=2)
    network = models.Network("tiny", build, 16, "three convolutions", models.preprocess)
    monkeypatch.setitem(models.NETWORKS, "tiny", network)
    written, target = tmp_path / "run.json", tmp_path / "run.html"
    arguments = ["run", "--network", "tiny", "--repeats", "2", "--json", str(written), "--html", str(target)]
    assert main(arguments) == 0
    parsed = Parsed(target.read_text(encoding="utf-8"))
    found = json.loads(written.read_text())
    for layer in found["layers"]:
        assert f"{layer['dense_us'] / 1e3:,.3f}" in parsed.cells
        assert layer["path"] in parsed.cells
    assert found["environment"]["versions"]["jaxlib"] in parsed.cells
    assert found["command"] in parsed.cells
