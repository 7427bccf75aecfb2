"""Files of raw times that are damaged or written by hand: an error names the file, its line and the fault."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jax_sparse_conv.__main__ import main
from jax_sparse_conv._src import devices
from jax_sparse_conv._src.tune import cpu, gradients, raw_times

SIZES = [2, 8, 8, 16, 3, 3, 16, *[1] * 9]
GPU = {"gpu": dataclasses.asdict(devices.Device(name="NVIDIA H900"))}
CPU = {"cpu": dataclasses.asdict(devices.cpu())}

READERS: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]] = {
    "gradients": (
        gradients.read,
        GPU,
        {"gradient": {"sizes": SIZES, "kind": "highest", "by": "x"}, "times": {"xla": 2.0, "ours": 1.0}},
    ),
    "GPU": (
        raw_times.read,
        GPU,
        {"key": {"sizes": SIZES, "kind": "highest", "residual": False}, "times": {"xla": 2.0}, "again": []},
    ),
    "CPU": (
        cpu.read,
        CPU,
        {
            "key": {"op": "conv", "sizes": SIZES, "kind": "float32", "residual": False, "pool": []},
            "times": [[0.1, 2.0, 1.0, 2.0, 1.0]],
            "branch": 1.0,
        },
    ),
}


@pytest.fixture(params=READERS)
def reader(request: pytest.FixtureRequest) -> tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]:
    return READERS[request.param]


def with_sizes(line: dict[str, Any], sizes: Any) -> dict[str, Any]:
    name = "gradient" if "gradient" in line else "key"
    return line | {name: line[name] | {"sizes": sizes}}


def test_a_whole_file_is_read(reader: Any, tmp_path: Path) -> None:
    read, run, line = reader
    raw = tmp_path / "times.jsonl"
    raw.write_text(f"{json.dumps({'run': run})}\n{json.dumps(line)}\n{json.dumps(line)}\n" + '{"cut of')
    assert len(read(raw)) == 2
    assert read(tmp_path / "none.jsonl") == []
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "none.jsonl", must_exist=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda line: 3, "TypeError"),
        (lambda line: None, "TypeError"),
        (lambda line: "run", "dict|string|indices"),
        (lambda line: [], "list indices"),
        (lambda line: {"run": None}, "TypeError"),
        (lambda line: {"run": 3}, "TypeError"),
        (lambda line: {}, "KeyError"),
        (lambda line: {name: value for name, value in line.items() if name != "times"}, "KeyError: 'times'"),
        (lambda line: line | {"times": None}, "NoneType"),
        (lambda line: line | {"times": [[1.0]]}, "AttributeError|TypeError"),
        (lambda line: with_sizes(line, None), "TypeError"),
        (lambda line: with_sizes(line, SIZES[:3]), "are not 16 ints"),
        (lambda line: with_sizes(line, [0, *SIZES[1:]]), "are not from 1 to 2.31, but for padding"),
        (lambda line: with_sizes(line, [*SIZES[:6], 10**30, *SIZES[7:]]), "are not from 1 to 2.31"),
    ],
)
def test_what_is_wrong_is_named(reader: Any, change: Callable[[Any], Any], message: str, tmp_path: Path) -> None:
    read, run, line = reader
    raw = tmp_path / "times.jsonl"
    text = "\n".join(json.dumps(each) for each in ({"run": run}, line, change(line), line))
    raw.write_text(text)
    with pytest.raises(ValueError, match=rf"{raw}, line 3 holds no times of `tune`: .*({message})"):
        read(raw)


@pytest.mark.parametrize("time", ["NaN", "Infinity", "0", "-1.0", '"a"', "1" + 400 * "0", "null"])
def test_times_are_above_0(time: str, tmp_path: Path) -> None:
    raw = tmp_path / "times.jsonl"
    for read, run, line in (READERS["gradients"], READERS["GPU"]):
        text = json.dumps(line).replace("2.0", time)
        raw.write_text(f"{json.dumps({'run': run})}\n{text}\n")
        with pytest.raises(ValueError, match=f"{raw}, line 2 holds no times of `tune`"):
            read(raw)


@pytest.mark.parametrize("times", [{"xla": 1.0}, {"ours": 1.0}, {"xla": 1.0, "theirs": 1.0}])
def test_a_gradient_has_times_of_both_sides(times: dict[str, float], tmp_path: Path) -> None:
    read, run, line = READERS["gradients"]
    raw = tmp_path / "times.jsonl"
    raw.write_text(f"{json.dumps({'run': run})}\n{json.dumps(line | {'times': times})}\n")
    with pytest.raises(ValueError, match=r"are not XLA's and this package's|does not begin with 'ours'"):
        read(raw)


@pytest.mark.parametrize("run", [{}, {"gpu": {"color": "green"}}, {"cpu": {"color": "green"}}, {"gpu": None}])
def test_gradients_need_to_know_their_device(run: dict[str, Any], tmp_path: Path) -> None:
    read, _, line = READERS["gradients"]
    raw = tmp_path / "times.jsonl"
    raw.write_text(f"{json.dumps({'run': run})}\n{json.dumps(line)}\n")
    with pytest.raises(ValueError, match="line 2 holds no times of `tune`"):
        read(raw)


def test_what_is_no_text(reader: Any, tmp_path: Path) -> None:
    raw = tmp_path / "times.jsonl"
    raw.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=f"{raw} is no text in UTF-8"):
        reader[0](raw)
    raw.write_text(f"{10_000 * '['}\n{{}}\n")
    with pytest.raises(ValueError, match=f"{raw}, line 1"):
        reader[0](raw)


@pytest.mark.parametrize("more", [[], ["--gradients"]])
def test_fit_takes_no_file_that_does_not_exist(
    more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", *more, "--out", str(tmp_path), "--fit", str(tmp_path / "typo.jsonl")]) == 1
    assert "typo.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--budget", "nan"], "'nan' is not a number of minutes, 0 or more"),
        (["--budget", "-1"], "'-1' is not a number of minutes"),
        (["--show", "--fit"], "not allowed with argument --show"),
    ],
)
def test_options_that_cannot_be(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["tune", *options])
    assert message in capsys.readouterr().err
