"""`benchmarks check`: figures of sentences, the age of results, and what loses."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.document import age, check, losses, prose

PAGE = """\
# A page

On a device a layer is 2.5x
as fast as XLA and takes 10 us (`h100/zoo.json`). Nothing else is said of ResNet-50.

- An item of 3x3 layers at batch 8, `h100/zoo.json`.
- An item without a file, 7 us.
"""


def sentence(words: str, *figures: str) -> prose.Sentence:
    return prose.Sentence("page.md", words, lambda results: figures)


WORDS = "a layer is {}x as fast as XLA and takes {} us (`h100/zoo.json`)"


def row(**more: Any) -> dict[str, Any]:
    return {"run": 0, "date": "2026-11-26T10:00:00", "commit": "abc1234", "flags": "default"} | more


def write(folder: Path, file: str, rows: Sequence[Mapping[str, Any]]) -> None:
    path = folder / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"suite": path.stem, "runs": [{"device": "a device"}], "rows": rows}))


@pytest.fixture
def results(tmp_path: Path) -> Path:
    folder = tmp_path / "results"
    write(folder, "h100/zoo.json", [layer("a", 2.5)])
    return folder


def layer(details: str, ratio: float, **more: Any) -> dict[str, Any]:
    call = {"call": f"call {details}", "details": f"Call(dtype='float32', precision='default', {details})"}
    return row(**call, weights="arguments", implementation="direct", zeros_target=0, ratio=ratio) | more


# --- sentences -------------------------------------------------------------------------------------------------------


def test_figures_are_written_and_words_and_lines_stay(results: Path) -> None:
    text = prose.page([sentence(WORDS, "1,234.5", "-3")], "page.md", PAGE, results)
    assert text == PAGE.replace("2.5x", "1,234.5x").replace("10 us", "-3 us")
    assert prose.page([sentence(WORDS, "2.5", "10")], "page.md", text, results) == PAGE
    assert prose.page([sentence(WORDS, "1", "1")], "another.md", PAGE, results) == PAGE


@pytest.mark.parametrize(
    ("words", "figures", "message"),
    [
        ("a layer is {}x as slow", ["1"], "page.md has 0 times, not once: 'a layer is {}x as slow'"),
        ("An item", [], "page.md has 2 times"),
        (WORDS, ["1"], "1 figures for 2 places"),
    ],
)
def test_a_sentence_that_is_not_in_its_page_is_refused(
    results: Path, words: str, figures: list[str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        prose.page([sentence(words, *figures)], "page.md", PAGE, results)


def test_a_figure_beside_a_file_has_to_be_of_a_sentence(results: Path) -> None:
    assert prose.unknown([sentence(WORDS, "2.5", "10")], "page.md", PAGE, results) == []
    assert prose.unknown([], "page.md", PAGE, results) == [
        "page.md:3: 2.5 is of no sentence in document/sentences.py",
        "page.md:4: 10 is of no sentence in document/sentences.py",
    ]


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("| layer | us (`h100/zoo.json`) |\n|---|---|\n| a | 5 |\n", [3]),
        ("| layer | us | file |\n|---|---|---|\n| a | 5 | harness |\n| b | 6 | `h100/zoo.json` |\n", [4]),
        ("Times, us (`h100/zoo.json`):\n\n| layer | us |\n|---|---|\n| a | 5 |\n", [5]),
        ("Times are in `h100/zoo.json`.\n\n| layer | us |\n|---|---|\n| a | 5 |\n", []),
        ("- One has 5 us.\n- Another is in\n  `h100/zoo.json`, 6 us.\n", [3]),
        ("Constants are in `dispatch/model.json`, 5 of them.\n", []),
        ("VGG-19 in TF32 at batch 8, a 2x2 pool, `x[5]`: `h100/zoo.json`.\n", []),
    ],
)
def test_tables_and_items_count_too(results: Path, text: str, lines: list[int]) -> None:
    found = prose.unknown([], "page.md", text, results)
    assert [int(line.split(":")[1]) for line in found] == lines


def test_a_file_that_is_not_there_is_said(results: Path) -> None:
    assert prose.unknown([], "page.md", "See `h100/new.json`.\n", results) == [
        "page.md:1: there is no h100/new.json in benchmarks/results"
    ]


# --- losses ----------------------------------------------------------------------------------------------------------


def test_losses_are_below_097_by_medians(tmp_path: Path) -> None:
    rows = [layer("a", 0.5), layer("a", 0.96, date="2026-11-27"), layer("b", 0.97), layer("c", 3.0)]
    rows += [layer("d", 0.9, implementation="xla"), layer("e", 0.1, label="another engine")]
    write(tmp_path, "h100/zoo.json", rows)
    random = {"layer": "conv 1x1", "dtype": "float32", "precision": "highest", "implementation": "ecr"}
    write(tmp_path, "cpu_x/sweep.json", [row(**random, ratio=0.2)])
    write(tmp_path, "cpu_x/calls.json", [row(side="xla", us=1.0)])
    first, second = losses.of_files(tmp_path)
    assert first == losses.Losses("cpu_x/sweep.json", 1, 1, 0.2, "conv 1x1, float32 highest, ecr")
    assert second == losses.Losses("h100/zoo.json", 3, 1, 0.96, "call a, default, 0 % zeros, direct")


def test_networks_lose_with_or_without_zeros_and_models_by_jit_inference(tmp_path: Path) -> None:
    times = {"us": {"xla": 10.0, "auto": 5.0}, "no_zeros_us": {"xla": 9.0, "auto": 10.0}}
    case = {"case": "vgg19/default/1", "network": "vgg19", "kind": "default", "batch": 1, "weights": "arguments"}
    found = case | times | {"roofline": {"us": 1.0}, "skipped": {}}
    found |= {key: dict.fromkeys(times["us"]) for key in ("error", "program", "memory")}
    write(tmp_path, "h100/networks.json", [row(**found)])
    model = {"model": "keras_vgg16", "kind": "default", "batch": 1, "weights": "dense", "jit_inference_ratio": 0.99}
    write(tmp_path, "h100/models.json", [row(**model)])
    networks, models = losses.of_files(tmp_path)
    assert (networks.lost, networks.least, networks.case) == (1, 0.9, "VGG-19, default, batch 1")
    assert (models.lost, models.case) == (0, "VGG16, Keras, default, batch 1, dense weights")


# --- age -------------------------------------------------------------------------------------------------------------


def git(root: Path, *arguments: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    return subprocess.run(
        ["git", *who, *arguments], cwd=root, capture_output=True, text=True, check=True
    ).stdout.strip()


def commit(root: Path, file: str) -> str:
    path = root / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(path.read_text() + "a line\n" if path.is_file() else "a line\n")
    git(root, "add", file)
    git(root, "commit", "-m", file)
    return git(root, "rev-parse", "--short", "HEAD")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    root = tmp_path / "clone"
    root.mkdir()
    git(root, "init")
    commit(root, "README.md")
    return root


def test_commits_to_the_sources_of_a_device_count(clone: Path, tmp_path: Path) -> None:
    first = commit(clone, "cuda/a.cu")
    second = commit(clone, "native/a.cc")
    commit(clone, "cpu/a.cc")
    commit(clone, "cpu/a.cc")
    commit(clone, "docs/a.md")
    labelled = row(side="old", commit="0000000", date="2026-11-01", label="another engine")
    rows = [labelled, row(side="a", commit=second, date="2026-11-27"), row(side="b", commit=first)]
    write(tmp_path / "results", "h100/calls.json", rows)
    write(tmp_path / "results", "cpu_x/calls.json", rows)
    write(tmp_path / "results", "h200/calls.json", [row(side="a", commit="0123456")])
    assert age.no_history(clone) is None
    assert age.of_files(tmp_path / "results", clone) == [
        age.Age("cpu_x/calls.json", 2, "2026-11-26 to 2026-11-27", first, 3),
        age.Age("h100/calls.json", 2, "2026-11-26 to 2026-11-27", first, 1),
        age.Age("h200/calls.json", 1, "2026-11-26", "0123456", None),
    ]
    assert age.without_log(tmp_path / "results") == ["cpu_x", "h100", "h200"]


def test_files_of_papers_age_by_the_dates_of_their_rows(clone: Path, tmp_path: Path) -> None:
    first = commit(clone, "cuda/a.cu")
    second = commit(clone, "native/a.cc")
    folder = tmp_path / "results" / "h100" / "paper"
    folder.mkdir(parents=True)
    content = {"date": "2026-11-27T10:00", "commit": second, "xla_flags": "", "rows": [{"layer": "a"}, {"layer": "b"}]}
    (folder / "fig9.json").write_text(json.dumps(content))
    content["rows"] = [{"layer": "a"}, {"layer": "b", "date": "2026-11-26T10:00", "commit": first, "flags": "default"}]
    (folder / "fig10.json").write_text(json.dumps(content))
    assert age.of_files(tmp_path / "results", clone) == [
        age.Age("h100/paper/fig10.json", 2, "2026-11-26 to 2026-11-27", first, 1),
        age.Age("h100/paper/fig9.json", 2, "2026-11-27", second, 0),
    ]


def test_history_may_be_missing(clone: Path, tmp_path: Path) -> None:
    assert age.no_history(tmp_path) == "this is no clone"
    assert age.no_history(clone / "docs") == "this is no clone"
    commit(clone, "cuda/a.cu")
    git(tmp_path, "clone", "--depth", "1", clone.as_uri(), "shallow")
    assert age.no_history(tmp_path / "shallow") == "this clone is shallow"


def test_old_logs_of_tests_on_a_gpu_are_refused() -> None:
    def log(device: str, behind: int | None) -> age.Age:
        return age.Age(f"{device}/tests.json", 1, "2026-11-26", "abc1234", behind)

    others = [log("cpu_x", 99), age.Age("h200/zoo.json", 1, "", "", 99)]
    assert age.old_logs(others) == []
    assert age.old_logs([*others, log("h100", 99), log("h200", 20)]) == []  # one GPU has run what is there
    assert age.old_logs([*others, log("h100", 99), log("h200", None)]) == []  # nor is it known that none has
    (line,) = age.old_logs([*others, log("h100", 99), log("h200", 21)])
    assert line.startswith(
        "h200/tests.json, the newest log, is 21 commits to cuda and native behind, more than 20: run"
    )


def test_of_a_log_parts_count_until_all_tests_have_run() -> None:
    part, whole = {"tests_of": "tests/cuda"}, {"tests_of": "tests"}
    assert age.counted_tests([part, part]) == [part, part]
    assert age.counted_tests([part, whole, part]) == [whole, part]


def test_failures_of_logs_are_listed_and_many_are_refused(tmp_path: Path) -> None:
    def log(of: str, failed: int) -> dict[str, Any]:
        return row(tests_of=of, failed=failed, failures=[f"tests.a::test_{n}" for n in range(failed)])

    write(tmp_path, "h100/tests.json", [log("tests", 30), log("tests", 1), log("tests/cuda", 11)])
    notes, refused = age.failures(tmp_path)
    assert notes[:3] == [
        "h100/tests.json: 1 failed of tests, commit abc1234:",
        "  tests.a::test_0",
        "h100/tests.json: 11 failed of tests/cuda, commit abc1234:",
    ]
    assert refused == []
    write(tmp_path, "h200/tests.json", [log("tests", 11)])
    assert age.failures(tmp_path)[1] == ["h200/tests.json: 11 tests of the newest run failed, more than 10"]


def test_the_command_reports_and_fails(
    results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ages = [
        age.Age("h100/tests.json", 1, "2026-11-26", "abc1234", 30),
        age.Age("h100/zoo.json", 9, "", "0123456", None),
    ]
    monkeypatch.setattr(check.command, "main", lambda arguments: 0)
    monkeypatch.setattr(check.age, "no_history", lambda: None)
    monkeypatch.setattr(check.age, "of_files", lambda: ages)
    monkeypatch.setattr(check.age, "without_log", lambda: ["h200"])
    monkeypatch.setattr(check.age, "failures", lambda: (["h200/tests.json: 1 failed"], []))
    monkeypatch.setattr(check.losses, "of_files", lambda: [losses.of_file(results / "h100" / "zoo.json", results)])
    assert check.main([]) == 1
    said = capsys.readouterr()
    assert said.err.startswith("h100/tests.json, the newest log, is 30 commits")
    for text in (
        "abc1234      30",
        "does not know the commit",
        "h200 has no log of the tests",
        "h100/zoo.json     1",
        "h200/tests.json: 1 failed",
    ):
        assert text in said.out
    monkeypatch.setattr(check.age, "no_history", lambda: "this is no clone")
    assert check.main([]) == 0
    assert "skipped: this is no clone" in capsys.readouterr().out
    monkeypatch.setattr(check.command, "main", lambda arguments: 1)
    assert check.main([]) == 1
