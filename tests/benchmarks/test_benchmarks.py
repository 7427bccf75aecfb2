"""The benchmarks' own arithmetic, and one small run."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from benchmark_layers import CPU_EXTENSION, LAYERS
from flax import nnx

from benchmarks.common import command, data, tables
from benchmarks.common.cases import SETS, Layer, conv3x3
from benchmarks.suites import adaptive, calls, direct_ablation, layers, sorting
from jax_sparse_conv import models


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SETS, "cpu", LAYERS)


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.name)
def test_float64_result_is_the_layer(layer: Layer) -> None:
    x, (kernel, bias) = data.iid_map(layer, 2, 50, 0), data.weights(layer, 0)
    found = layers._call(layer, "highest", "xla")(*map(jnp.asarray, (x, kernel, bias)))
    expected = data.float64_result(layer, *(value.astype(np.float64) for value in (x, kernel, bias)))
    assert found.shape == expected.shape
    assert data.frobenius(np.asarray(found, np.float64), expected) < 1e-6


def test_iid_zeros_are_as_many_as_asked_for() -> None:
    layer = conv3x3("64->64 14")
    assert np.mean(data.iid_map(layer, 2, 85, 0) == 0) == pytest.approx(0.85, abs=0.01)
    assert np.all(data.iid_map(layer, 1, 0, 0) > 0)


def test_real_maps_rotate_and_do_not_repeat() -> None:
    maps = {"a/b": np.random.default_rng(0).random((3, 7, 7, 5), np.float32)}
    np.testing.assert_array_equal(data.real_map(maps, LAYERS[0], 1, 4)[0], maps["a/b"][1])
    assert len({image.tobytes() for image in data.real_map(maps, LAYERS[0], 8, 0)}) == 8
    with pytest.raises(ValueError, match="the layer takes"):
        data.real_map({"a/b": maps["a/b"][:, :5]}, LAYERS[0], 1, 0)


def test_maps_are_read_from_a_file_or_a_folder(tmp_path: Path) -> None:
    values = np.random.default_rng(0).random((3, 7, 7, 5), np.float32)
    np.savez(tmp_path / "maps.npz", **{"a/b_conv": values})
    for path in (tmp_path, tmp_path / "maps.npz"):
        maps = data.read_maps(path)
        for key in ("a/b", "a/b_conv"):
            layer = dataclasses.replace(LAYERS[0], maps=key)
            assert data.has_maps(maps, layer)
            np.testing.assert_array_equal(data.real_map(maps, layer, 3, 0), values)
    assert not data.has_maps(maps, dataclasses.replace(LAYERS[0], maps=None))
    assert not data.has_maps(maps, dataclasses.replace(LAYERS[0], maps="a/c"))
    (tmp_path / "text.npz").write_text("no maps")
    np.save(tmp_path / "one.npy", values)
    for name in ("text.npz", "one.npy"):
        with pytest.raises(ValueError, match=f"{name} is not an npz file of arrays"):
            data.read_maps(tmp_path / name)


def test_run_writes_a_row_for_every_case(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(tmp_path / "maps.npz", **{"a/b": np.maximum(np.random.default_rng(0).normal(size=(2, 7, 7, 5)), 0)})
    arguments = [
        "--maps",
        tmp_path / "maps.npz",
        "--json",
        tmp_path / "rows.json",
        "--zeros",
        "50",
        "--batch",
        "1",
        "2",
    ]
    assert layers.main([*map(str, arguments), "--repeats", "2", "--implementation", "auto", "--cold-weights"]) == 0
    found = json.loads((tmp_path / "rows.json").read_text())
    kinds = [(row["layer"], row["source"], row["zeros_target"], row["batch"]) for row in found["rows"]]
    assert ("odd", "real", None, 2) in kinds
    assert len(kinds) == len(set(kinds)) == 2 * (1 + 2 * len(LAYERS))  # 0 % is always there
    for row in found["rows"]:
        assert row["ratio"] == pytest.approx(row["xla_us"] / row["ours_us"])
        assert row["error"] < 2e-6
        assert row["xla_error"] < 2e-6
    (run,) = found["runs"]
    assert {"date", "commit", "device", "driver", "versions", "command", "xla_flags"} <= run.keys()
    assert run["command"].startswith("python -m benchmarks layers --maps maps.npz --json rows.json --zeros 50 ")
    assert "geometric mean of 2 conv, iid, 50 % zeros, batch 2, float32" in capsys.readouterr().out


def test_run_fails_with_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert layers.main(["--layers", "nothing"]) == 1
    assert capsys.readouterr().err.strip() == "benchmarks layers: --layers 'nothing' matches no layer of --set cpu"
    assert layers.main(["--maps", "nowhere.npz"]) == 1
    assert layers.main(["--json", "nowhere/rows.json"]) == 1
    assert "nowhere does not exist" in capsys.readouterr().err


def test_real_weights_fails_with_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("safetensors")
    from benchmarks.networks import real_weights

    def sentence(*arguments: str) -> str:
        assert real_weights.main(["--data", str(tmp_path), *arguments]) == 1
        return capsys.readouterr().err.strip()

    start = f"benchmarks real_weights: --data {tmp_path}"
    assert sentence("--data", str(tmp_path / "nowhere")) == f"{start}/nowhere is not a folder"
    assert sentence() == f"{start} has no file resnet50_stages1to4.safetensors"
    (tmp_path / "resnet50_stages1to4.safetensors").write_text("no weights")
    assert sentence() == f"{start} has no file images.npz"
    (tmp_path / real_weights.IMAGES).write_text("no images")
    assert sentence().endswith("images.npz is not an npz file with an array images")
    np.savez(tmp_path / real_weights.IMAGES, photographs=np.zeros(1))
    assert sentence().endswith("images.npz is not an npz file with an array images")
    assert sentence("--json", str(tmp_path / "nowhere" / "rows.json")).endswith("nowhere does not exist")


def test_commands_in_result_files_have_no_local_folders() -> None:
    arguments = ["--data", "/home/me/weights", "--json=../out.json", "--maps", "maps/a.npz", "--layers", "a b", "-x"]
    expected = "python -m benchmarks layers --data weights --json=out.json --maps maps/a.npz --layers 'a b' -x"
    assert command.portable("layers", arguments) == expected


def test_the_better_of_two_runs_keeps_the_faster_time_of_each_side() -> None:
    row: dict[str, Any] = dict.fromkeys(tables._IDENTITY, "same") | {"ours_tflops": 1.0, "error": 1.0, "xla_error": 1.0}
    row |= {"xla_latency_us": 20.0, "ours_latency_us": 5.0}
    one = row | {"xla_us": 10.0, "ours_us": 2.0, "xla_best_us": 9.0, "ours_best_us": 2.0}
    other = row | {"xla_us": 8.0, "ours_us": 4.0, "xla_best_us": 7.0, "ours_best_us": 3.5}
    (found,) = tables.better_of([one], [other], ("one", "other"))
    assert (found["xla_us"], found["ours_us"], found["ratio"]) == (8.0, 2.0, 4.0)
    assert found["best_ratio"] == 3.5
    assert found["latency_ratio"] == 4.0
    assert (found["xla_flags"], found["ours_flags"]) == ("other", "one")


def test_every_set_names_its_layers_once() -> None:
    for chosen in SETS.values():
        assert len({layer.name for layer in chosen}) == len(chosen)
        assert all(dataclasses.replace(layer).dense_flops(1) > 0 for layer in chosen)


def test_direct_ablation_compares_each_figure_with_its_predecessor_and_names_wrong_results() -> None:
    steps = ["baseline", *dict.fromkeys(step for _, _, step, _, _ in direct_ablation.FIGURES), "figure 24, without"]
    sizes = "images_per_thread filters_per_thread threads_x threads_y cached_pixels stages copy_bytes"
    row: dict[str, Any] = dict.fromkeys(sizes.split(), 4)
    row |= {"layer": "l", "engine": "outer products", "addresses": "reduced", "hoisted_checks": False}
    row |= {"us": 2.0, "error": 1e-7}
    rows: list[dict[str, Any]] = [row | {"step": step} for step in steps]
    rows[0]["us"] = 8.0
    assert [f["change_percent"] for f in direct_ablation.figures(rows)] == [-75, 0, 0, 0, 0, 0, -75, -75]
    assert direct_ablation.wrong(rows) == []
    rows[2]["error"] = 1e-4  # would do for TF32
    assert direct_ablation.wrong(rows) == [rows[2]]
    assert direct_ablation.report(direct_ablation.figures(rows), rows).count("WRONG") == 1
    assert direct_ablation.wrong([rows[2] | {"engine": "tensor cores"}]) == []
    without_table = [row for row in rows if row["step"] != "figure 34"]
    assert [f["figure"] for f in direct_ablation.figures(without_table)] == ["14", "20", "24", "28", "31", "0", "0t"]


def test_adaptive_times_every_side(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tiny = (conv3x3("16->8 6"), Layer("pooled", "conv_pool", 16, 8, 6))
    monkeypatch.setattr(adaptive, "LAYERS", tiny)
    path = tmp_path / "rows.json"
    assert adaptive.main(["--zeros", "50", "--repeats", "2", "--precision", "highest", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["layer"] for row in rows] == [layer.name for layer in tiny]
    for row in rows:
        assert row["same_results"]
        assert set(row["us"]) == {"ecr", "direct", "counted_ecr", "sparse", "dense", "adaptive"}
        better = min(row["us"]["ecr"], row["us"]["direct"])
        assert row["adaptive_over_better"] == pytest.approx(row["us"]["adaptive"] / better)
        assert row["adaptive_within"] == (row["us"]["adaptive"] <= 1.03 * better + 2)
        assert row["overhead_us"]["dense"] == row["us"]["dense"] - row["us"]["direct"]


@CPU_EXTENSION
def test_the_cost_of_a_call_is_the_difference_between_chains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "calls.json"
    assert calls.main(["--repeats", "2", "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["side"] for row in rows] == list(calls.SIDES)
    assert rows[0]["over_xla_us"] == 0
    assert "us a call" in capsys.readouterr().out
    x, kernel = jnp.full((1, 1, 1, 64), 2.0), jnp.eye(64).reshape(1, 1, 64, 64)
    for side in calls.SIDES:
        np.testing.assert_array_equal(calls._chain(side, 3)(x, kernel), x + 3 * (side == "xla"))


def test_both_sides_of_a_network_are_timed() -> None:
    pytest.importorskip("safetensors")
    from benchmarks.networks import real_weights

    model = models.lenet5(rngs=nnx.Rngs(0))
    model.eval()
    times = real_weights.time_both(model, jnp.ones((2, 28, 28, 1)), None, lambda m, x: m(x), 2)
    assert times["ratio"] == pytest.approx(times["dense_us"] / times["sparse_us"])


def test_sorting_permutes_maps_and_kernels_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = np.linspace(0.1, 0.9, 5)
    values = np.random.default_rng(0).random((4, 7, 7, 5), np.float32)
    maps = {"a/b": np.where(np.random.default_rng(1).random(values.shape) < rates, values, 0).astype(np.float32)}
    found = sorting.orders(maps["a/b"], 0)
    np.testing.assert_array_equal(found["sorted"], np.arange(5)[::-1])
    assert {name: sorted(order) for name, order in found.items()} == {name: [0, 1, 2, 3, 4] for name in found}
    np.savez(tmp_path / "maps.npz", **maps)
    monkeypatch.setattr(sorting.cases, "MAPS", LAYERS)
    options = ["--maps", str(tmp_path / "maps.npz"), "--repeats", "1", "--implementation", "xla"]
    assert sorting.main([*options, "--json", str(tmp_path / "rows.json")]) == 0
    (row,) = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert row["sorted_gain"] == pytest.approx(row["given_us"] / row["sorted_us"])
    assert sorting.main([*options, "--layers", "nothing"]) == 1
    kernel, bias = (jnp.asarray(value) for value in data.weights(LAYERS[0], 0))
    results = [
        sorting._function(0, kernel[:, :, order], bias, "xla")(jnp.asarray(maps["a/b"][..., order]))
        for order in found.values()
    ]
    for result in results[1:]:
        np.testing.assert_allclose(result, results[0], rtol=1e-5, atol=1e-6)
