"""Random calls against NumPy: some of them, and that what is wrong, raises or ends the process is found."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from benchmarks.fuzz import calls, checks, command, draws, worker
from benchmarks.fuzz.case import GRADIENTS, OPERATIONS, SHARDED, TRANSFORMS, VALUES, Case, from_text
from benchmarks.fuzz.operands import inputs
from jax_sparse_conv._src.api import ops

CASE = Case("conv", "xla", "float32", "none", True, (1, 6, 7, 5), 9, (3, 3), padding="SAME", bias=True, seed=3)
DERIVATIVES = (*GRADIENTS, "jacfwd")
NUMBERS = range(60)


def run(case: Case) -> None:
    try:
        assert checks.run(case) is None, case.text()
    except checks.SkippedError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("number", [n for n in NUMBERS if draws.draw(0, n).transform not in DERIVATIVES])
def test_values(number: int) -> None:
    run(draws.draw(0, number))


@pytest.mark.parametrize("number", [n for n in NUMBERS if draws.draw(0, n).transform in DERIVATIVES])
@pytest.mark.usefixtures("optimized")
def test_derivatives(number: int) -> None:
    run(draws.draw(0, number))


@pytest.mark.parametrize("split", [(2, 1, 1, 1, 1), (2, 2, 1, 1, 1), (1, 1, 2, 1, 1), (2, 1, 1, 2, 1), (1, 1, 1, 1, 2)])
def test_sharded_calls_and_gradients(split: Any) -> None:
    """In a process that has the devices."""
    process = worker.Worker(120)
    for transform in SHARDED.values():
        case = dataclasses.replace(CASE, x=(4, 6, 8, 16), out_channels=8, implementation="ecr", split=split)
        found = process.run(dataclasses.replace(case, transform=transform))
        assert found["outcome"] == "right" or "devices is more than there are" in found["message"], found
    process.close()


def test_draws_of_meshes_leave_other_cases_as_they_were() -> None:
    plain = [draws._Draw(np.random.default_rng([5, number])).case(number) for number in range(300)]
    drawn = [draws.draw(5, number) for number in range(300)]
    assert all(a == b for a, b in zip(plain, drawn, strict=True) if b.transform not in SHARDED.values())
    splits = [case.split for case in drawn if case.transform in SHARDED.values()]
    assert all(any(split[axis] > 1 for split in splits) for axis in range(5))
    assert all(size % parts == 0 for case in drawn for size, parts in zip(case.x, case.split, strict=False))


def test_draws_have_all_kinds_and_are_repeatable() -> None:
    drawn = [draws.draw(5, number) for number in range(600)]
    assert drawn[:20] == [draws.draw(5, number) for number in range(20)]
    assert {case.operation for case in drawn} == set(OPERATIONS)
    assert {case.transform for case in drawn} == {*TRANSFORMS, *SHARDED.values()}
    assert {case.values for case in drawn} == set(VALUES)
    for operation in ("conv", "conv_pool", "dense"):
        names = {case.implementation for case in drawn if case.operation == operation}
        assert names == {None, *ops.IMPLEMENTATIONS[operation]}
    assert {case.zeros for case in drawn} >= {0.0, 1.0}
    assert any(0 in case.x for case in drawn)
    for case in drawn:
        assert from_text(case.text()) == case


@pytest.mark.parametrize("text", ["{", "[]", '{"operation": "conv"}', '{"depth": 3}'])
def test_what_is_no_case_is_said(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--case", text]) == 2
    assert "is no case" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (lambda y: y.at[0, 2, 3, 4].add(1e-4), r"1 of 378 elements; \[0, 2, 3, 4\] is "),
        (lambda y: y.at[0, 0, 0, 0].set(np.nan), r"1 of 378 elements; \[0, 0, 0, 0\] is nan"),
        (lambda y: y[:, 1:], r"the result is float32\[1, 5, 7, 9\], not float32\[1, 6, 7, 9\]"),
        (lambda y: y.astype("float16"), r"the result is float16\[1, 6, 7, 9\], not float32"),
    ],
)
@pytest.mark.parametrize("transform", ["none", "grad"])
def test_a_wrong_result_is_found(wrong: Any, sentence: str, transform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = calls.transformed

    def transformed(*args: Any) -> Any:
        function, arguments = made(*args)
        return (lambda *given: jax.tree.map(lambda y: wrong(y) if y.ndim == 4 else y, function(*given))), arguments

    monkeypatch.setattr(calls, "transformed", transformed)
    case = dataclasses.replace(CASE, out_channels=5, kernel=(5, 5), x=(5, 5, 5, 5)) if transform == "grad" else CASE
    found = checks.run(dataclasses.replace(case, transform=transform))
    assert found is not None
    if transform == "none":
        assert re.search(sentence, found)
    else:
        assert found.startswith("gradient by ")


@pytest.mark.parametrize(
    ("platform", "window", "channels", "is_wrong"),
    [("cpu", 1, 16, True), ("cpu", 3, 15, True), ("cpu", 3, 16, False), ("gpu", 1, 1, False)],
)
def test_transforms_mix_the_elements_of_a_tile(
    platform: str, window: int, channels: int, is_wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuDNN's leave 1e-8 where the derivative is 0."""
    monkeypatch.setattr(checks.devices, "default_platform", lambda: platform)
    sizes: Any = {"x": (1, 2, 2, channels), "out_channels": channels, "kernel": (window, window)}
    case = Case("conv", None, "float32", "grad", jit=True, **sizes)
    found, wanted, bound = np.full(4, 1e-8), np.zeros(4), np.array([1e-6, 0, 0, 0])
    assert (checks._differs(case, found, wanted, bound, None, 0) is not None) == is_wrong


def test_a_process_that_ends_or_hangs_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = worker.Worker(60)
    assert ended.run(CASE) == {"outcome": "right", "message": ""}
    raised = ended.run(dataclasses.replace(CASE, activation="gelu"))
    assert raised["outcome"] == "raised"
    assert raised["message"].startswith("ValueError: activation='gelu' is not one of None, 'relu'")
    ended._process.kill()
    assert ended.run(CASE) == {"outcome": "died", "message": "the process ended with status -9"}
    ended.close()
    monkeypatch.setattr(worker, "_START_SECONDS", 0)
    hung = worker.Worker(0.01)
    assert hung.run(CASE) == {"outcome": "hung", "message": "did not end in 0.01 s"}
    hung.close()


@pytest.mark.parametrize("transform", ["none", "grad", "jacfwd"])
@pytest.mark.parametrize("padding", [((4, 1), (-3, 4)), ((-2, 5), (6, -4)), ((-1, -1), (0, 9))])
@pytest.mark.usefixtures("optimized")
def test_paddings_that_crop_all_of_x_and_more(padding: Any, transform: str) -> None:
    run(dataclasses.replace(CASE, x=(1, 4, 2, 3), padding=padding, transform=transform))


def test_cases_of_one_program_differ_in_their_values() -> None:
    for number in range(40):
        case = draws.draw(3, number)
        alike = [draws.with_other_values(case, 3, index) for index in range(6)]
        assert alike[0] == case
        assert len({each.seed for each in alike}) == 6
        assert len({each.zeros for each in alike}) > 1
        for each in alike:
            assert dataclasses.replace(each, zeros=case.zeros, values=case.values, seed=case.seed) == case
            assert each.values not in ("large", "small", "spread") or case.transform not in DERIVATIVES


@pytest.mark.parametrize("transform", ["none", "grad"])
def test_cases_of_one_program_are_compiled_once(transform: str) -> None:
    case = dataclasses.replace(CASE, transform=transform)
    functions = {id(calls.transformed(each, inputs(each))[0]) for each in (case, dataclasses.replace(case, seed=8))}
    assert len(functions) == 1
    assert id(calls.transformed(other := dataclasses.replace(case, bias=False), inputs(other))[0]) not in functions


class _Finds:
    """In the place of a process: one case ends it."""

    started = 0

    def __init__(self, seconds: float) -> None:
        type(self).started += 1

    is_mended = False

    def run(self, case: Case) -> dict[str, Any]:
        died = draws.draw(4, 2) == case and not self.is_mended
        return {"outcome": "died", "message": "status -11"} if died else {"outcome": "right", "message": ""}

    def close(self) -> None:
        pass


def test_a_run_goes_on_where_the_file_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "Worker", _Finds)
    path = tmp_path / "fuzz.json"
    line = ["--seed", "4", "--json", str(path)]
    assert command.main([*line, "--cases", "2"]) == 0
    assert command.main([*line, "--cases", "6"]) == 1
    assert _Finds.started == 3  # one for each run, and one after the case that ended it
    assert command.main(["--seed", "5", "--json", str(path), "--cases", "1"]) == 0
    rows = {row["seed"]: row for row in json.loads(path.read_text())["rows"]}
    assert {seed: row["cases"] for seed, row in rows.items()} == {4: 6, 5: 1}
    assert sum(rows[4]["operations"].values()) == 6
    (finding,) = rows[4]["findings"]
    assert from_text(finding["case"]) == draws.draw(4, 2)
    assert (finding["number"], finding["outcome"]) == (2, "died")
    printed = capsys.readouterr().out
    assert "case 2 died: status -11\n  python -m benchmarks fuzz --case '{" in printed
    assert "seed 4: 6 cases ran, 0 skipped, 1 findings" in printed
    assert command.main([*line, "--cases", "6"]) == 1  # which runs the finding again
    monkeypatch.setattr(_Finds, "is_mended", True)
    assert command.main([*line, "--cases", "6"]) == 0
    assert [row["findings"] for row in json.loads(path.read_text())["rows"]] == [[], []]
    assert command.main([*line, "--values", "2"]) == 2
    assert "--values 2 is not the 1 of seed 4 in " in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--cases", "--minutes", "--timeout", "--values"])
def test_fuzz_names_a_bad_option(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([option, "0"]) == 2
    assert f"{option} 0" in capsys.readouterr().err
