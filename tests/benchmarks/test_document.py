"""The pages of figures are what the files of results give."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common import results
from benchmarks.document import command, layer_tables, measured, network_tables, readme

pages = functools.cache(command.pages)


def row(**more: Any) -> dict[str, Any]:
    about = {"date": "2026-11-26", "commit": "abc1234", "flags": "default", "backend": "gpu", "device": "a GPU"}
    return about | more


def network(case: str, auto: float, **more: Any) -> dict[str, Any]:
    name, kind, batch = case.split("/")
    us = {"xla": 300.0, "auto": auto, "fused": 100.0}
    found = {"case": case, "network": name, "kind": kind, "batch": int(batch), "weights": "arguments"}
    found |= {"us": us, "no_zeros_us": us | {"auto": 150.0}, "roofline": {"us": 30.0}, "skipped": {}}
    found |= {key: dict.fromkeys(us) for key in ("error", "program")}
    found["memory"] = {side: {"argument": 1e6 * megabytes} for side, megabytes in zip(us, (10, 11, 9), strict=True)}
    return row(**found | more)


def layer(details: str, ours: float, **more: Any) -> dict[str, Any]:
    found = {"call": "8x7x7x64 * 1x1x64x64", "batch": 8, "weights": "arguments", "implementation": "direct"}
    found |= {"details": f"Call(dtype='float32', precision='default', {details})", "zeros_target": 0}
    found |= {"zeros_percent": 0.0, "xla_us": 10.0, "ours_us": ours, "ratio": 10 / ours, "best_ratio": 10 / ours}
    return row(**found | more)


@pytest.mark.parametrize("name", pages())
def test_the_page_is_what_the_results_say(name: str) -> None:
    assert (results.ROOT / name).read_text(encoding="utf-8") == pages()[name]


def test_figures_beside_a_file_are_of_sentences() -> None:
    assert command.unknown() == []


def test_a_stale_page_is_said_and_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    stale = {command.PAPERS: "stale", command.README: "| VGG16, Keras | 1", "docs/guide/cpu.md": "run VGG-19 9.9 times"}
    for name, text in pages().items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        text = re.sub(r"run VGG-19 \S+ times|\| VGG16, Keras \| 5", stale[name], text) if name in stale else text
        path.write_text(text, encoding="utf-8")
    monkeypatch.setattr(command, "ROOT", tmp_path)
    monkeypatch.setattr(command.document, "document", lambda: "as the results say\n")
    assert command.main(["--check"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        f"{name} is not what the results say: run python -m benchmarks document" for name in stale
    ]
    assert command.main([]) == 0
    assert command.main(["--check"]) == 0
    pictures = (tmp_path / command.MEASURED).parent.glob("*.png")
    assert {path.name for path in pictures} == {name for name, _ in measured.PICTURES.values()}


def test_a_page_without_its_sentence_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in pages().items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("Nine 3x3 layers", "Some layers"), encoding="utf-8")
    monkeypatch.setattr(command, "ROOT", tmp_path)
    assert command.main(["--check"]) == 1
    assert capsys.readouterr().err.startswith("benchmarks document: README.md has 0 times, not once: 'Nine 3x3 layers")


def test_every_table_names_its_file() -> None:
    named = re.findall(r"^- file: `(.*?)`", pages()[command.MEASURED], re.MULTILINE)
    files = (path for path in results.RESULTS.glob("*/*.json") if path.stem in measured.SUITES)
    assert sorted(named) == sorted(path.relative_to(results.RESULTS).as_posix() for path in files)


def test_a_file_without_a_table_is_refused(tmp_path: Path) -> None:
    (tmp_path / "h200").mkdir()
    (tmp_path / "h200" / "new.json").write_text("{}")
    with pytest.raises(ValueError, match="h200: the page has no table for new"):
        measured.page(tmp_path)


def test_a_readme_without_its_table_is_refused() -> None:
    with pytest.raises(ValueError, match="0 tables"):
        readme.page("# A title\n")


def test_networks_have_a_line_for_each_side_that_differs() -> None:
    text, losses, _, memory = network_tables.networks(
        [network("vgg19/default/1", 150.0), network("new/default/8", 101)]
    )
    assert text.splitlines()[2:] == [
        "| VGG-19 | arguments | 1 | `None` | 2.00 (2.00), 150 us |",
        "| VGG-19 | arguments | 1 | all chains | 3.00 (3.00), 100 us |",
        "| new | arguments | 8 | `None` | 2.97 (2.00), 101 us |",
    ]
    assert losses.endswith("none.")
    assert memory.splitlines()[2:] == [
        "| VGG-19 | arguments | 1 | `None` | TF32 | 11.0 | 10.0 |",
        "| new | arguments | 8 | `None` | TF32 | 11.0 | 10.0 |",
    ]
    slower = network("vgg19/default/1", 400.0)
    assert network_tables.networks([slower])[1].endswith("VGG-19, arguments, batch 1, TF32, `None`: 0.75.")


def test_the_faster_flags_of_each_side_count() -> None:
    times = {"xla": 200.0, "auto": 160.0}
    other = network("vgg19/default/1", 0) | {"us": times, "no_zeros_us": times, "flags": "command buffers"}
    text = network_tables.networks([network("vgg19/default/1", 150.0), other])[0]
    assert "| `None` | 1.33 (1.33), 150 us |" in text


def test_of_layers_the_newest_row_counts_and_losses_have_a_line() -> None:
    rows = [layer("a", 20.0), layer("a", 5.0), layer("b", 12.5), layer("c", 2.5, zeros_target=50)]
    left = layer("d", 10.0, implementation="xla", direct_us=8.0)
    table, said, beside, losses, lost = layer_tables.zoo([*rows, left])
    assert table.splitlines()[2:] == ["| TF32 | 8 | arguments | 1.26 (0.80 to 2.00) | 2 | 4.00 | 1 | 1 |"]
    assert said.startswith("What `None` left to XLA")
    assert beside.splitlines()[2:] == ["| TF32 | 8 | 1 | 1.25 | 1 |"]
    assert losses == "**Losses**, below 0.97 by medians: 1."
    where = "8x7x7x64 by 1x1x64x64 | TF32 | 0 % | `direct`"
    assert lost.splitlines()[2:] == [f"| {where} | 10.0 | 12.5 | 0.80 | 0.80 | 2026-11-26 |"]


def test_cells_of_a_line_are_of_the_same_layers() -> None:
    about = {"op": "conv", "kernel_shape": [3, 3, 8, 8], "dtype": "float32", "precision": None, "requested": None}
    about |= {"batch": 1, "source": "iid", "best_ratio": 1.0, "backend": "cpu"}
    timed = [("a", 0, 2.0), ("a", 50, 4.0), ("b", 0, 2.0), ("b", 50, 9.0), ("c", 0, 0.5)]
    rows = [row(**about | {"layer": name, "zeros_target": zeros, "ratio": ratio}) for name, zeros, ratio in timed]
    table, _ = layer_tables.layers(rows)
    assert table.splitlines()[2:] == [
        "| `None` | 3x3 | float32 | 1 | arguments | default | 2 | 2.00 | 6.00 |",
        "| `None` | 3x3 | float32 | 1 | arguments | default | 1 | 0.50 | |",
    ]
