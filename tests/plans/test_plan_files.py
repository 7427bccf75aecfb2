"""Files of plans: what is in the place of a plan, or damaged, is refused by its entry."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import operator
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from plan_checks import Small, calibrated, with_choices

import jax_sparse_conv as jsc


def test_a_file_with_an_unknown_implementation_is_no_plan(tmp_path: Path) -> None:
    with_choices(calibrated(), ["xla", "xla", "xla", "pecr"]).save(tmp_path / "plan.json")
    wanted = r"holds no plan: layers\[3\] \('dense'\): implementation='pecr' is not one that dense has: 'xla', 'ecr'"
    with pytest.raises(ValueError, match=wanted):
        jsc.Plan.load(tmp_path / "plan.json")


def test_a_path_is_named() -> None:
    for use in (jsc.Plan.load, calibrated().save):
        with pytest.raises(TypeError, match=r"path=None is no path; a str or an os\.PathLike of one is"):
            use(None)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", r"Expecting value: line 1"),
        ("[]", r"\[\] is not an object with the entries device, versions, "),
        ("{}", r"its format is null, not 2 or 3"),
        ('{"format": 7}', r"its format is 7, not 2 or 3"),
        ('{"format": true}', r"its format is true, not 2 or 3"),
        ('{"format": 2}', r"device is missing; it must be a string"),
        ("[" * 100_000, r"its entries are nested too deeply"),
        ("\x81", r"'utf-8' codec can't decode"),
    ],
)
def test_a_file_without_a_plan_is_refused(content: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(content, encoding="latin-1")
    with pytest.raises(ValueError, match=rf"plan.json holds no plan: {sentence}"):
        jsc.Plan.load(tmp_path / "plan.json")


# Values of every type of JSON, and of sizes that fit nothing.
_OTHERS: tuple[Any, ...] = (None, True, 0, -3, 10**400, 2.5, math.nan, "", "ecr", [], [1, 2], [[]], {}, {"pool": None})


def _damaged(value: Any, *place: str | int) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """(where, a copy of the content with one value replaced or left out), for every value in it in turn."""
    for other in _OTHERS:
        yield place, other
    if isinstance(value, dict):
        for name, entry in value.items():
            yield (*place, name), {other: kept for other, kept in value.items() if other != name}
            yield from ((where, {**value, name: damaged}) for where, damaged in _damaged(entry, *place, name))
        yield place, {**value, "surplus": 1}
    if isinstance(value, list):
        for index, entry in enumerate(value):
            yield (*place, index), value[:index] + value[index + 1 :]
            around = value[:index], value[index + 1 :]
            for where, damaged in _damaged(entry, *place, index):
                yield where, [*around[0], damaged, *around[1]]


def test_a_damaged_plan_is_refused_by_a_sentence_or_can_be_printed_and_applied(tmp_path: Path) -> None:
    made, file, model = calibrated(), tmp_path / "plan.json", Small()
    made.save(file)
    content = json.loads(file.read_text())
    del content["layers"][1]  # leaves a layer of each kind
    refusals = []
    for where, damaged in _damaged(content):
        file.write_text(json.dumps(damaged))
        try:
            loaded = jsc.Plan.load(file, any_device=True)
        except ValueError as error:
            refusals.append((where, str(error)))
            continue
        assert str(loaded), where
        with contextlib.suppress(ValueError):  # of another device or model
            jsc.apply_plan(model, loaded)
    assert [(where, said) for where, said in refusals if not said.startswith(f"{file} holds no plan: ")] == []
    assert len(refusals) > 1000


@pytest.mark.parametrize(
    ("place", "value", "sentence"),
    [
        (("versions",), [], r"versions=\[\] is not an object"),
        (("versions", "jax"), 1, r"versions\['jax'\]=1 is not a string"),
        (("seconds",), "fast", r'seconds="fast" is not a number'),
        (("seconds",), 10**400, r"seconds=10+\.\.\. is beyond the range of a number"),
        (("layers",), {}, r"layers=\{\} is not a list"),
        (("layers", 0), None, r"layers\[0\]=null is not an object with the entries path, call, "),
        (("layers", 0, "call", "bias"), 1, r"layers\[0\].call.bias=1 is not true or false"),
        (("layers", 0, "call", "activation"), 1, r"layers\[0\].call.activation=1 is not a string or null"),
        (("layers", 0, "call", "op"), "conf", r"layers\[0\] \('conv'\): call: op='conf' is not one of 'conv', "),
        (("layers", 0, "call", "dtype"), "f", r"layers\[0\] \('conv'\): call: dtype='f' is not the name of a dtype"),
        (("layers", 0, "call", "x_shape", 0), True, r"layers\[0\].call.x_shape\[0\]=true is not an int"),
        (("layers", 0, "call", "x_shape", 0), -2, r".*: call: x_shape=\(-2, 8, 8, 4\) is not a shape"),
        (("layers", 0, "call", "x_shape"), [8, 4], r".*: call: x.shape=\(8, 4\) has 2 dimensions"),
        (("layers", 0, "call", "geometry", "strides"), [1], r".*geometry.strides=\[1\] is not a list of 2"),
        (("layers", 0, "call", "geometry", "strides", 0), 0, r".*: call: strides=\(0, 1\) is not an int or two ints"),
        (("layers", 2, "call", "geometry", "pool"), None, r".*: call: geometry.pool=None is not of op='conv_pool'"),
        (("layers", 2, "call", "geometry", "pool", "kind"), "m", r'.*pool.kind="m" is not one of "max", "avg"'),
        (("layers", 2, "call", "residual"), True, r".*: call: residual=True is not of op='conv_pool'"),
        (("layers", 3, "call", "geometry", "groups"), 2, r".*: call: geometry=.* is not what dense resolves it to"),
        (("layers", 3, "call", "kernel_shape"), [5], r".*: call: x_shape=.* are not \[..., C\] and \[C, K\]"),
        (("layers", 0, "kernel_dtype"), "float", r".*: kernel_dtype='float' is not the name of a dtype"),
        (("layers", 0, "densities"), [], r".*: densities=\(\) is empty"),
        (("layers", 0, "candidates", 0, "implementation"), "eer", r".*: candidates\[0\].implementation='eer' is not "),
        (("surplus",), 1, r"surplus=1 is not one of the entries device, "),
    ],
)
def test_a_damaged_entry_is_refused_by_name_and_value(
    place: tuple[str | int, ...], value: Any, sentence: str, tmp_path: Path
) -> None:
    calibrated().save(tmp_path / "plan.json")
    content = json.loads((tmp_path / "plan.json").read_text())
    *outer, last = place
    functools.reduce(operator.getitem, outer, content)[last] = value
    (tmp_path / "plan.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"plan.json holds no plan: {sentence}"):
        jsc.Plan.load(tmp_path / "plan.json")
