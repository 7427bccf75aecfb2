"""The papers' experiments: their own arithmetic, and every experiment at tiny sizes."""

from __future__ import annotations

import json
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.common import data, prepared, results
from benchmarks.paper import (
    answers,
    claims,
    command,
    cusparse,
    document,
    experiment,
    layers,
    networks,
    sides,
    whole,
)
from benchmarks.paper.cusnn import figures
from benchmarks.paper.layers import PaperLayer
from benchmarks.paper.registry import EXPERIMENTS
from benchmarks.paper.runner import Context
from jax_sparse_conv import models

SMALL = PaperLayer("small", "conv", 3, 4, 7)
STRIDED = PaperLayer("strided", "conv", 3, 4, 8, strides=2, padding=((1, 1), (1, 1)))


@pytest.mark.parametrize(
    "names",
    [
        ["table3", "fig14", "memory", "size"],
        ["fig9", "fig10", "networks", "cusnn_fig13", "--networks", "vgg19"],
        ["fig12", "cusnn_fig10", "cusnn_density"],
    ],
    ids=lambda names: names[0],
)
def test_every_kind_of_experiment_runs_and_writes(
    names: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("sklearn")
    assert command.main([*names, "--quick", "--repeats", "1", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    for name in names[: names.index("--networks")] if "--networks" in names else names:
        found = json.loads((tmp_path / f"{name}.json").read_text("utf-8"))
        assert found["rows"]
        assert {"date", "device", "environment", "command", "xla_flags", "repeats"} <= found.keys()
        assert (tmp_path / f"{name}.png").stat().st_size > 0
        assert EXPERIMENTS[name].summary in printed
        _check_rows(found["rows"])


def _check_rows(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert row.get("skipped", {}).keys() <= {"coo", "direct"}, row["skipped"]
        for side, ratio in row.get("ratio", {}).get("highest", {}).items():
            assert ratio == pytest.approx(row["us"][sides.HIGHEST] / row["us"][side])
        for side, error in row.get("error", {}).items():
            if side.endswith("default") and jax.default_backend() == "gpu":
                assert error < 1e-2, side  # TF32, through all layers of a network
            elif row["op"] in ("conv", "conv_pool"):
                assert error < 4e-6, side
            else:
                assert error < 1e-4, side  # a whole network's logits differ by some 1e-5


def test_kernels_of_layers_have_groups() -> None:
    layer = PaperLayer("grouped", "conv", 8, 6, 5, groups=2)
    assert layer.kernel_shape == (3, 3, 4, 6)
    assert layer.dense_flops(1) == 2 * 5 * 5 * 9 * 8 * 6 // 2


def test_layers_of_a_network_are_those_that_run() -> None:
    vgg = layers.of_network("vgg19")
    assert len(vgg) == 16
    assert [layer.op for layer in vgg].count("conv_pool") == 5
    assert (vgg[0].channels, vgg[0].out_channels, vgg[0].size) == (3, 64, 224)
    assert (vgg[-1].channels, vgg[-1].out_channels, vgg[-1].size) == (512, 512, 14)
    kinds = layers.distinct(vgg)
    assert sum(kind.count for kind in kinds) == 16
    assert len(kinds) < 16


@pytest.mark.parametrize("layer", [SMALL, STRIDED], ids=lambda layer: layer.name)
def test_the_steps_of_cusparse_are_the_convolution(layer: PaperLayer) -> None:
    x = data.iid_map(layer, 1, 60, 0)
    pipeline = cusparse._Pipeline(layer, x)
    assert pipeline.capacity == np.count_nonzero(cusparse._im2col(layer)(jnp.asarray(x)))
    assert pipeline.error() < 1e-6


def test_the_better_of_two_runs_keeps_the_faster_time_of_each_side() -> None:
    row = {"layer": "a", "source": "iid", "zeros_target": 0, "batch": 1, "strides": 1}
    one = row | {"us": {"xla highest": 10.0, "ecr": 2.0}, "ran": {"ecr": "ecr", "xla highest": "xla"}}
    other = row | {"us": {"xla highest": 8.0, "ecr": 4.0}, "ran": {"ecr": "ecr", "xla highest": "xla"}}
    (found,) = experiment.better_of([one], [other], ("one", "other"))
    assert found["us"] == {"xla highest": 8.0, "ecr": 2.0}
    assert found["flags"] == {"xla highest": "other", "ecr": "one"}
    assert found["ratio"] == {"highest": {"ecr": 4.0}}
    assert found["ran"] == {"xla highest": "xla", "ecr": "ecr"}
    (found,) = experiment.better_of([one], [other | {"ran": {"ecr": "direct"}}], ("one", "other"))
    assert (found["us"]["ecr"], found["ran"]["ecr"], found["flags"]["ecr"]) == (4.0, "direct", "other")
    row_of_one = one | {"source": "real"}
    lost = other | {"us": {"ecr": 4.0}}  # XLA's side was skipped
    found, kept = experiment.better_of([one, row_of_one], [lost], ("one", "other"))
    assert found["flags"] == {"xla highest": "one", "ecr": "one"}
    assert (kept["us"], kept["flags"]) == (one["us"], {"xla highest": "one", "ecr": "one"})
    with pytest.raises(ValueError, match="different rows"):
        experiment.better_of([one], [other | {"batch": 2}], ("one", "other"))


def test_the_better_of_two_runs_keeps_the_energy_of_the_faster_and_what_neither_could_run() -> None:
    row = {"layer": "a", "source": "profile", "zeros_target": None, "batch": 1, "strides": None}
    one = row | {
        "us": {"xla highest": 10.0, "coo": 2.0},
        "millijoules": {"xla highest": 6.0, "coo": 3.0},
        "millijoules_range": {"xla highest": [5.0, 7.0], "coo": [2.5, 3.5]},
        "skipped": {"auto": "no room", "ocpa": "no room"},
    }
    other = row | {
        "us": {"coo": 1.0, "ocpa": 3.0},
        "millijoules": {"coo": 2.0, "ocpa": 4.0},
        "millijoules_range": {"coo": [1.5, 2.5], "ocpa": [4.0, 4.0]},
        "skipped": {"xla highest": "status 5003", "auto": "no room"},
    }
    (found,) = experiment.better_of([one], [other], ("one", "other"))
    assert found["millijoules"] == {"xla highest": 6.0, "coo": 2.0, "ocpa": 4.0}
    assert found["millijoules_range"] == {"xla highest": [5.0, 7.0], "coo": [1.5, 2.5], "ocpa": [4.0, 4.0]}
    assert found["energy_ratio"] == {"xla highest": 1.0, "coo": 3.0, "ocpa": 1.5}
    assert found["skipped"] == {"auto": "no room"}


@pytest.mark.parametrize("name", ["vgg19", "resnet50", "densenet121", "regnetx_16gf"])
def test_weights_that_clip_everything(name: str) -> None:
    network = prepared.load(name, quick=True)
    inputs = models.layer_inputs(network.model(network.empty_weights()), network.x)
    image, *maps = [x for x, _ in inputs.values()]
    assert (np.asarray(image) != 0).any()
    assert not any(np.asarray(x).any() for x in maps)


def test_maps_on_a_photograph_are_cut_and_shifted(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = layers.of_network("alexnet")[3]
    x = np.random.default_rng(0).random(kept.x_shape(1), np.float32)
    network = types.SimpleNamespace(layers=(kept,), inputs={kept.name: x})
    monkeypatch.setattr(networks, "prepared", lambda context, name: network)
    layer = next(layer for layer in layers.TABLE3 if layer.name == "AlexNetI conv4")
    found = networks.profile_map(Context(), layer, *layers.TABLE3_MAPS[layer.name], batch=2)["profile"]
    assert found.shape == layer.x_shape(2)
    assert np.array_equal(found[0], x[0, 4:9, 4:9])
    assert np.array_equal(found[1], np.roll(found[0], 3, axis=1))
    assert networks.profile_map(Context(quick=True), layer, "alexnet", "conv4") == {}


def test_the_layers_of_table_3_have_maps() -> None:
    for layer in layers.TABLE3:
        assert (layer.maps is None) == (layer.name in layers.TABLE3_MAPS)
    for name, like in layers.TABLE3_MAPS.values():
        found = next(found for found in layers.of_network(name) if found.name == f"{name} {like}")
        (layer,) = {layer.channels for layer in layers.TABLE3 if layers.TABLE3_MAPS.get(layer.name) == (name, like)}
        assert layer == found.channels


def test_means_count_a_layer_as_often_as_its_network_has_it() -> None:
    row = {"source": "profile", "zeros_target": None, "batch": 1, "strides": 1, "op": "conv", "network": "n"}
    rows = [
        row | {"count": 1, "ratio": {"highest": {"ecr": 8.0}}},
        row | {"count": 2, "ratio": {"highest": {"ecr": 1.0}}},
    ]
    (mean,) = experiment.means(rows)
    assert mean["layers"] == 3
    assert mean["ratio"]["ecr"] == pytest.approx(2)


def test_the_two_processes_get_no_outputs() -> None:
    given = ["table3", "--json", "a.json", "--both-flags", "--out=b", "--prepared", "c", "--maps", "m.npz", "--quick"]
    assert command._without_outputs(given) == ["table3", "--maps", "m.npz", "--quick"]


def test_mistakes_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["table3", "fig11", "--json", "a.json"]) == 1
    assert "--json and --plot are for one experiment" in capsys.readouterr().err
    (tmp_path / "maps.npz").write_text("no maps")
    assert command.main(["table3", "--maps", str(tmp_path)]) == 1
    assert "is not an npz file of arrays" in capsys.readouterr().err


def test_the_figures_of_the_cost_model_are_its_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    row = {"layer": "a", "x_shape": [1, 7, 7, 8], "source": "real", "density": 0.25, "us": {"one": 2.0, "two": 3.0}}
    measured = row | {"best_us": 2.0, "model_us": 3.0, "model_loss": 0.5}
    monkeypatch.setattr(figures.cost_model, "_search", lambda layer, maps, options: [dict(measured)])
    monkeypatch.setattr(figures, "_searched", {})
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert command.main(["cusnn_fig8", "cusnn_fig9", "--quick", "--out", str(tmp_path)]) == 0
    (found,) = json.loads((tmp_path / "cusnn_fig8.json").read_text("utf-8"))["rows"]
    assert found["offline_loss"] == pytest.approx(0.5)
    assert found["zeros_percent"] == 75
    assert found["configurations_us"] == row["us"]
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert command.main(["cusnn_fig9"]) == 1
    assert capsys.readouterr().err.endswith("need a GPU: COO* has one configuration on the CPU\n")


def test_claims_have_numbers_of_their_own_and_known_experiments() -> None:
    numbers = [claim.number for claim in claims.claims()]
    assert len(set(numbers)) == len(numbers)
    assert {claim.experiment for claim in claims.claims()} <= {*EXPERIMENTS, "-"}


def test_whole_networks_are_in_the_document_once_measured(tmp_path: Path) -> None:
    path = tmp_path / "networks.json"
    assert document._network_lines(path) == []
    row = {"case": "vgg19/default/1", "network": "vgg19", "kind": "default", "batch": 1, "zeros_percent": 60.0}
    row |= {"us": {"xla": 300.0, "auto": 100.0}, "no_zeros_us": {"xla": 300.0, "auto": 150.0}, "skipped": {}}
    row |= {key: {"xla": 0, "auto": 0} for key in ("error", "program", "memory")} | {"roofline": {"us": 30.0}}
    constants = row | {"weights": "constants", "us": {"xla": 200.0, "auto": 100.0}}
    run = {"date": "2026-11-26", "command": "python", "device": "a GPU", "weights": "arguments"}
    results.add(path, "networks", run | {"rows": [row, constants]})
    found = ["| vgg19 | default | 1 | 60 % | auto | 300 | 100 | 3.00x | 2.00x | 30 % |"]
    assert document._network_lines(path)[1:] == found


def test_energy_is_compared_with_both_precisions() -> None:
    row = {"millijoules": {"xla highest": 4.0, "xla default": 1.0, "coo": 2.0}}
    assert answers.energy({"rows": [row]}) == "coo 50 % less (highest), 100 % more (default); one loop each"
    spread = row | {"millijoules_range": {"xla highest": [3.9, 4.1], "coo": [1.9, 2.2]}}
    assert answers.energy({"rows": [spread]}) == "coo 50 % less (highest), 100 % more (default); loops within 15 %"
    assert answers.energy({"rows": [{"millijoules": {"xla highest": None, "coo": None}}]}) == "-"
    beside = row | {"source": "no zeros", "millijoules": {"xla highest": 4.0, "coo": 8.0}}
    assert answers.energy({"rows": [row, beside]}) == answers.energy({"rows": [row]})
    assert answers.energy({"rows": [row, beside]}, zeros=False) == "coo 100 % more (highest); one loop each"


def test_energy_is_of_loops_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(whole, "_function", lambda network, side: side)
    monkeypatch.setattr(whole, "_millijoules", lambda _, side, *more: order.append(side) or float(len(order)))
    network: Any = types.SimpleNamespace(operands=lambda: [(None, None)])
    meters: list[Any] = [types.SimpleNamespace(works=works) for works in (True, False)]
    found = [whole._loops(Context(energy_repeats=2), network, [], ("xla", "coo"), meter) for meter in meters]
    assert found == [{"xla": [1.0, 3.0], "coo": [2.0, 4.0]}, {"xla": [], "coo": []}]


def test_networks_over_cusparse_are_sums_of_their_layers() -> None:
    shared = {"network": "n", "source": "profile", "layer": "a"}
    rows = [
        shared | {"count": 3, "us": {cusparse.WHOLE: 10.0, "ecr": 1.0}},
        shared | {"count": 1, "us": {cusparse.WHOLE: 10.0, "ecr": 5.0}},
        shared | {"count": 1, "us": {"ecr": 100.0}},
        shared | {"count": 1, "us": {cusparse.WHOLE: 10.0, "ecr": 100.0}, "source": "iid"},
    ]
    assert answers.sums_over_cusparse(("n", "m"))({"rows": rows}) == "sums of layers: n 5.0x"
    assert answers.sums_over_cusparse(("m",))({"rows": rows}) == "-"


def test_losses_of_the_cost_model_by_kind_of_map() -> None:
    rows = [{"source": "real", "model_loss": 0.1}, {"source": "0 % i.i.d.", "model_loss": 0.3}]
    assert answers.median_loss("model_loss")({"rows": rows}) == (
        "median 20.0%, largest 30.0% (real 10.0%, 0 % i.i.d. 30.0%)"
    )
    rows = [row | {"published_loss": 0.5} for row in rows]
    assert answers.median_loss("model_loss")({"rows": rows}).endswith("; by the paper's own rule 50.0%")


def test_ocpa_of_layers_is_pecr_where_a_pool_follows() -> None:
    rows = [
        {"op": "conv", "ratio": {"highest": {"ecr": 2.0}}, "count": 2},
        {"op": "conv_pool", "ratio": {"highest": {"ecr": 1.0, "pecr": 4.0}}},
        {"op": "network", "ratio": {"highest": {"ocpa": 8.0}}},
    ]
    assert answers.ratios(rows, "ocpa", "highest") == [2.0, 2.0, 4.0, 8.0]


def test_conversion_is_the_time_on_a_map_of_zeros() -> None:
    shared = {"layer": "a", "batch": 1, "strides": 1, "op": "conv", "count": 1, "network": "n"}
    rows = [
        shared | {"source": source, "zeros_target": zeros, "us": {"ecr": us}, "ratio": {"highest": {"ecr": 8.0 / us}}}
        for source, zeros, us in (("profile", None, 4.0), ("iid", 0, 8.0), ("iid", 100, 1.0))
    ]
    assert answers.zeros_lines("x", {"rows": rows}) == ["| `x` | ecr | 2.00x | - | 1.00x | 25 % |"]
    assert answers.empty_share_of_networks("ecr", "conv", ("n", "m"))({"rows": rows}) == "ecr: n 25 %"


def test_two_runs_made_apart_are_merged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    row = {
        "layer": "a",
        "op": "conv",
        "source": "iid",
        "zeros_target": 0,
        "zeros_percent": 0.0,
        "batch": 1,
        "strides": 1,
    }
    shared = {"experiment": "fig11", "device": "d", "repeats": 3, "environment": {}, "command": "c"}
    runs = {"one": ("", 10.0), "two": ("--xla_gpu_enable_command_buffer=FUSION", 8.0)}
    for name, (flags, dense) in runs.items():
        (tmp_path / name).mkdir()
        content = shared | {"xla_flags": flags, "rows": [row | {"us": {"xla highest": dense, "ecr": 2.0}}]}
        content["date"] = "2026-11-21" if name == "one" else "2026-11-22"
        (tmp_path / name / "fig11.json").write_text(json.dumps(content))
    folders = [str(tmp_path / name) for name in runs]
    assert command.main(["fig11", "--merge", *folders, "--out", str(tmp_path / "both")]) == 0
    found = json.loads((tmp_path / "both" / "fig11.json").read_text("utf-8"))
    assert found["xla_flags"] == [flags for flags, _ in runs.values()]
    assert found["date"] == "2026-11-22"  # of the later run
    assert found["rows"][0]["ratio"] == {"highest": {"ecr": 4.0}}
    assert found["rows"][0]["date"] == "2026-11-21"  # of the earlier time that it has
    assert found["rows"][0]["flags"] == {"xla highest": "command buffers", "ecr": "default"}
    assert command.main(["fig11", "--merge", *reversed(folders), "--out", str(tmp_path / "both")]) == 1
    assert "the second must be the run with command buffers" in capsys.readouterr().err


def test_a_search_made_before_serves_its_figures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    searched = results.RESULTS / "h200" / "cost_model.json"
    assert command.main(["cusnn_fig9", "--searched", str(searched), "--out", str(tmp_path)]) == 0
    found, original = (json.loads(path.read_text("utf-8")) for path in (tmp_path / "cusnn_fig9.json", searched))
    assert len(found["rows"]) == len(original["rows"])
    assert {row["searched"] for row in found["rows"]} == {searched.name}
    assert (found["device"], found["date"]) == (original["runs"][0]["device"], original["runs"][0]["date"])
