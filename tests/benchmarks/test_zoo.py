"""`benchmarks zoo`: which layers it times, what its files keep, and what it calls a loss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from benchmarks.common import losing, zoo_layers
from benchmarks.suites import zoo, zoo_rows
from jax_sparse_conv._src.dispatch import cpu_choice


@pytest.fixture(autouse=True)
def images_are_xlas(monkeypatch: pytest.MonkeyPatch) -> None:
    """LeNet's first layer is XLA's, so that a network has a layer that is."""
    for rule in ("_is_small_image", "_suits_dense", "suits_few_channels_out"):
        monkeypatch.setattr(cpu_choice, rule, lambda workload: False)


of_the_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="a benchmark of the CPU")


@of_the_cpu
def test_zoo_times_what_its_file_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "rows.json"
    options = ["--networks", "lenet5", "--weights", "packed", "--repeats", "1", "--json", str(out)]
    monkeypatch.setattr(losing, "LEAST", 0.0)
    assert zoo.main([*options, "--seconds", "0"]) == 0
    printed = capsys.readouterr().out
    assert "8 left to be timed" in printed
    assert "1 more are XLA's own operation: 1 default batch 1" in printed
    assert json.loads(out.read_text())["runs"][-1]["left"] == 8
    assert zoo.main(options) == 0
    content = json.loads(out.read_text())
    assert content["runs"][-1]["left"] == 0
    image, *rows = content["rows"]
    assert image["users"] == ["lenet5/conv1"]
    assert (image["implementation"], "ratio" in image) == ("xla", False)
    assert [row["users"] for row in rows if not row["zeros_target"]] == [
        [f"lenet5/{name}"] for name in ("conv2", "fc1", "fc2", "fc3")
    ]
    assert all(row["ratio"] == pytest.approx(row["xla_us"] / row["ours_us"], rel=1e-3) for row in rows)
    assert {row["rounds"] for row in rows} == {1}
    monkeypatch.setattr(losing, "LEAST", 1e9)  # everything loses, and is timed once more
    assert zoo.main(options) == 0
    again = json.loads(out.read_text())["rows"]
    assert {row.get("rounds") for row in again} == {None, 2}
    assert [row["first_ratio"] for row in again[1:]] == [row["ratio"] for row in rows]
    capsys.readouterr()
    assert zoo.main(["--list", str(out)]) == 0
    assert "8 of 8 below 1000000000" in capsys.readouterr().out
    assert zoo.main(["--networks", "lenet5", "--json", "nowhere/rows.json"]) == 1


@of_the_cpu
@pytest.mark.parametrize("calls", [["--calls", "28x28x1|32x32x1"], ["--left-to-xla"]])
def test_zoo_times_what_is_xlas_beside_what_none_could_take(tmp_path: Path, calls: list[str]) -> None:
    out = tmp_path / "rows.json"
    options = ["--networks", "lenet5", *calls, "--zeros", "none", "--repeats", "1", "--json", str(out)]
    assert zoo.main([*options, "--also", "direct"]) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert row["implementation"] == "xla"
    assert row["direct_us"] > 0


@of_the_cpu
@pytest.mark.parametrize(
    ("most", "users"), [("95999", ["fc2", "fc3"]), ("96000", ["fc1", "fc2", "fc3"]), ("235199", ["fc1", "fc2", "fc3"])]
)
def test_zoo_of_calls_with_few_operations(tmp_path: Path, most: str, users: list[str]) -> None:
    """2 x 400 x 120 of the first fully connected layer, 2 x 784 x 25 x 6 of the first convolution."""
    out = tmp_path / "rows.json"
    options = ["--networks", "lenet5", "--zeros", "none", "--repeats", "1", "--json", str(out)]
    assert zoo.main([*options, "--most-flops", most]) == 0
    assert [row["users"] for row in json.loads(out.read_text())["rows"]] == [[f"lenet5/{name}"] for name in users]


@of_the_cpu
def test_zoo_deals_out_calls_and_lists_what_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [tmp_path / "first.json", tmp_path / "second.json"]
    options = ["--networks", "lenet5", "--weights", "packed", "--repeats", "1", "--zeros", "none"]
    for part, path in enumerate(paths, 1):
        assert zoo.main([*options, "--part", str(part), "2", "--seconds", "0", "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "2 left to be timed" in printed
    assert "1 more are XLA's own operation: 1 default batch 1" in printed

    def fails(*_: Any) -> dict[str, Any]:
        raise jax.errors.JaxRuntimeError("INTERNAL: status\n5003")

    assert zoo.main([*options, "--part", "1", "2", "--json", str(paths[0])]) == 0
    monkeypatch.setattr(zoo, "_measure", fails)
    assert zoo.main([*options, "--json", str(paths[1])]) == 0
    assert "failed: INTERNAL: status 5003" in capsys.readouterr().out
    rows = json.loads(paths[1].read_text())["rows"]
    assert sorted(row["users"] for row in rows) == [
        [f"lenet5/{name}"] for name in ("conv1", "conv2", "fc1", "fc2", "fc3")
    ]
    assert zoo.main(["--list", *map(str, paths)]) == 0
    listed = capsys.readouterr().out
    assert "default, batch 1, 2 at 0 % zeros: least" in listed
    assert listed.count(" failed: ") == 2
    assert zoo.main(["--list", *map(str, reversed(paths))]) == 0
    assert capsys.readouterr().out == listed
    assert zoo.main([*options, "--part", "3", "2"]) == 1
    assert "--part 3 2: the first must be 1 to the second" in capsys.readouterr().err


@of_the_cpu
def test_zoo_keeps_a_loss_that_fails_when_it_is_timed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.json"
    options = ["--networks", "lenet5", "--repeats", "1", "--zeros", "none", "--calls", "400", "--json", str(path)]
    assert zoo.main(options) == 0
    content = json.loads(path.read_text())
    content["rows"][0].update(ratio=0.5, best_ratio=0.5, rounds=1)
    path.write_text(json.dumps(content))

    def fails(*_: Any) -> dict[str, Any]:
        raise jax.errors.JaxRuntimeError("INTERNAL: status 5003")

    monkeypatch.setattr(zoo, "_measure", fails)
    assert zoo.main(options) == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert row["ratio"] == 0.5
    assert row["failed"] == "INTERNAL: status 5003"
    assert zoo_rows.losses([row]) == [row]


@of_the_cpu
def test_zoo_times_again_what_came_out_below(tmp_path: Path) -> None:
    first, again = tmp_path / "first.json", tmp_path / "again.json"
    options = ["--networks", "lenet5", "--repeats", "1", "--zeros", "none"]
    assert zoo.main([*options, "--json", str(first)]) == 0
    content = json.loads(first.read_text())
    for row in content["rows"]:
        row.update(ratio=0.99, best_ratio=0.9) if row["users"] == ["lenet5/fc1"] else row.update(ratio=1.2)
    first.write_text(json.dumps(content))
    assert zoo.main([*options, "--below", "1", "--of", str(first), "--also", "ecr", "--json", str(again)]) == 0
    assert zoo.main([*options, "--batch", "2", "--below", "1", "--of", str(first)]) == 1  # none of these lost
    (row,) = json.loads(again.read_text())["rows"]
    assert row["users"] == ["lenet5/fc1"]
    assert row["ecr_us"] > 0


@of_the_cpu
def test_zoo_rotates_kernels_that_are_to_be_cold(monkeypatch: pytest.MonkeyPatch) -> None:
    (layer,) = (layer for layer in zoo_layers.layers_of(("lenet5",), 1) if layer.users == ("lenet5/fc1",))
    monkeypatch.setattr(zoo, "_COLD_BYTES", 10 * 4 * int(np.prod(layer.call.kernel_shape)))
    _, operands = zoo._sides(layer.call, 0, None, (), "cold")
    assert len(operands) == 11
    assert len({id(kernel) for _, kernel, _ in operands}) == 11
    assert len({id(x) for x, _, _ in operands}) == 4


def test_zoo_layers_are_distinct_and_know_their_users() -> None:
    found = zoo_layers.layers_of(("vgg19", "vgg19_bn"), 1)
    assert len(found) == 15  # of 19
    assert all(len(layer.users) % 2 == 0 for layer in found)
    assert [layer.zeros for layer in found[:1]] == [0]


def test_profile_maps_have_the_zeros_asked_for() -> None:
    for shape in ((2, 14, 14, 64), (1, 500)):
        for zeros in (0, 30, 85):
            assert np.mean(zoo_layers.profile_map(shape, zeros, 0) == 0) == pytest.approx(zeros / 100, abs=0.05)
    patches = zoo_layers.profile_map((1, 56, 56, 64), 85, 0) != 0
    groups = patches.reshape(1, 28, 2, 28, 2, 64).any((2, 4)).mean()
    assert groups < 0.9 * (1 - 0.85**4)  # in patches


@of_the_cpu
def test_zoo_times_what_runs_otherwise_by_now(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    earlier, later, out = (tmp_path / f"{name}.json" for name in ("earlier", "later", "out"))
    options = ["--networks", "lenet5", "--zeros", "none", "--repeats", "1"]
    assert zoo.main([*options, "--seconds", "0", "--json", str(earlier)]) == 0
    assert zoo.main([*options, "--json", str(later)]) == 0
    content = json.loads(later.read_text())
    timed = [row for row in content["rows"] if "ratio" in row]
    assert len(timed) > 1
    changed = [*options, "--changed", "--of", str(later), "--json", str(out)]
    assert zoo.main(changed) == 0
    assert json.loads(out.read_text())["rows"] == []
    timed[0]["implementation"] = "another"
    earlier.write_text(json.dumps(content))
    assert zoo.main([*options, "--changed", "--of", str(earlier), "--json", str(out)]) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert row["details"] == timed[0]["details"]
    out.unlink()
    timed[0] |= {"implementation": "xla"}
    del timed[0]["ratio"]  # not timed, as XLA's are, but the newer one
    earlier.write_text(json.dumps(content))
    assert zoo.main([*options, "--changed", "--of", str(later), str(earlier), "--json", str(out)]) == 0
    assert [row["details"] for row in json.loads(out.read_text())["rows"]] == [timed[0]["details"]]
    assert zoo.main([*options, "--changed", "--json", str(out)]) == 1
    assert "--of must name" in capsys.readouterr().err
