"""The papers' experiments that count, move maps, or time kernels that are no part of the package."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.common import cudnn, data, prepared, results
from benchmarks.paper import (
    algorithms,
    answers,
    command,
    cusparse,
    document,
    networks,
    shares,
    zeros,
)
from benchmarks.paper.cusnn import density, microkernel, searched
from benchmarks.paper.layers import PaperLayer
from benchmarks.paper.registry import EXPERIMENTS
from jax_sparse_conv._src import _native
from jax_sparse_conv._src.devices import Device
from jax_sparse_conv._src.dispatch.coo import configurations, cost_model
from jax_sparse_conv._src.primitive import custom_call
from jax_sparse_conv._src.primitive.primitives import Config

SMALL = PaperLayer("small", "conv", 3, 4, 7)
STRIDED = PaperLayer("strided", "conv", 4, 6, 8, strides=2, padding=((1, 1), (1, 1)), groups=2)
UNEVEN = PaperLayer("uneven", "conv", 3, 4, 8, strides=2)  # "SAME" pads behind alone
LAYERS = pytest.mark.parametrize("layer", [SMALL, STRIDED, UNEVEN], ids=lambda layer: layer.name)


def test_experiments_without_a_sparse_side_run_and_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("sklearn")
    names = ["fig2", "fig3", "cusnn_fig2", "cusnn_fig3"]
    assert command.main([*names, "--quick", "--repeats", "1", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    found = {name: json.loads((tmp_path / f"{name}.json").read_text("utf-8")) for name in names}
    for name, content in found.items():
        assert content["rows"]
        assert EXPERIMENTS[name].summary in printed
        assert (tmp_path / f"{name}.png").stat().st_size > 0
    assert {row["network"] for row in found["cusnn_fig2"]["rows"]} == {"densenet201", "resnet152", "vgg19"}
    assert answers.transfers(found["fig3"]) == "-"  # of three layers there is none behind the first four
    for row in found["cusnn_fig3"]["rows"]:
        (percent,) = [row["percent"][side] for side in row["us"] if side.endswith("highest")]
        assert sum(percent.values()) == pytest.approx(100)


def test_networks_are_run_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "found.json"
    line = ["cusnn_fig2", "--quick", "--add", "--json", str(path), "--networks"]
    assert command.main([*line, "vgg19"]) == command.main([*line, "resnet152"]) == command.main([*line, "vgg19"]) == 0
    found = json.loads(path.read_text("utf-8"))
    assert [row["network"] for row in found["rows"]] == ["resnet152"] * 3 + ["vgg19"] * 3
    assert found["command"].count("; python -m benchmarks paper") == 2
    assert {row["flags"] for row in found["rows"]} == {"default"}
    assert found["rows"][0]["date"] <= found["rows"][-1]["date"] == found["date"]
    path.write_text(json.dumps(found | {"device": "another"}), "utf-8")
    assert command.main([*line, "vgg19"]) == 1
    assert capsys.readouterr().err.endswith("found.json has another device\n")


def test_maps_of_a_cpu_do_not_move(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert command.main(["fig3"]) == 1
    assert capsys.readouterr().err.endswith("fig3 needs a GPU: a CPU moves no maps\n")


# --- counts ----------------------------------------------------------------------------------------------------------


@LAYERS
def test_zeros_of_the_matrix_are_counted(layer: PaperLayer) -> None:
    x = data.iid_map(layer, 1, 60, 0)
    found = zeros._matrix(layer, x)
    matrix = np.asarray(cusparse._im2col(layer)(jnp.asarray(x)))
    assert found["im2col_zeros_percent"] == pytest.approx(100 * np.mean(matrix == 0))
    assert found["im2col_bytes"] == matrix.nbytes
    assert found["filled_bytes"] == 8 * np.count_nonzero(matrix) + 4 * len(matrix)
    valid = dataclasses.replace(layer, padding=((0, 0), (0, 0)))
    unpadded = np.asarray(cusparse._im2col(valid)(jnp.asarray(x)))
    assert found["unpadded_zeros_percent"] == pytest.approx(100 * np.mean(unpadded == 0))


def test_coo_star_has_room_for_every_element() -> None:
    x = np.zeros((1, 7, 7, 3), np.float32)
    found = zeros._coo_star(x)
    assert found["coo_star_bytes"]["7x7x1"] == 3 * (49 * 5 + 4)
    assert found["coo_star_bytes"]["4x4x1"] == 3 * 4 * (16 * 5 + 4)
    assert zeros.coo_star_bytes({"rows": [found, {"source": "real"}]}) == "1.27x (7x7x1), 1.71x (4x4x1)"


def test_what_counts_say() -> None:
    row = {"layer": "a", "network": "n", "source": "profile", "unpadded_zeros_percent": 50.0}
    row |= {"im2col_bytes": 100, "format_bytes": 200, "filled_bytes": 80}
    rows = [
        row | {"zeros_percent": 0.0, "im2col_zeros_percent": 9.0},  # the image
        row | {"zeros_percent": 60.0, "im2col_zeros_percent": 70.0, "filled_bytes": 40},
        row | {"zeros_percent": 80.0, "im2col_zeros_percent": 80.0, "layer": "b"},
    ]
    assert zeros.zeros_of_matrices({"rows": rows}) == (
        "70.0 % of maps, 75.0 % of matrices (more in 1 of 2 layers), 50.0 % without padding; b 80.0 % and 80.0 %"
    )
    assert zeros.format_bytes({"rows": rows}) == (
        "2.00x im2col's bytes with room for every element, 0.67x filled (0.40x to 0.80x)"
    )
    real = {"network": "", "source": "real", "zeros_percent": 90.0}
    assert zeros.layers_by_zeros({"rows": rows}) == "over 50 % and over 75 %: n 2 and 1 of 3"
    assert zeros.layers_by_zeros({"rows": [*rows, real]}).endswith("; maps of trained networks 90 to 90 %")


def test_time_by_zeros() -> None:
    found = shares.shares([(10.0, 0.0), (20.0, 50.0), (30.0, 75.0), (0.0, 100.0)], 100.0)
    assert found == {"under 50 %": 10, "50 to 75 %": 20, "over 75 %": 30, shares.OTHER: pytest.approx(40)}
    assert shares.shares([(10.0, 0.0), (30.0, 60.0)]) == {"under 50 %": 25, "50 to 75 %": 75, "over 75 %": 0}
    assert shares.shares([(60.0, 0.0)], 30.0)[shares.OTHER] == 0  # layers alone take longer than the network
    content = {"rows": [{"layer": "n", "percent": {"xla highest": {"under 50 %": 25.0}}}]}
    assert answers.time_by_zeros("percent")(content) == "n (xla highest) under 50 % 25 %"


# --- other kernels ---------------------------------------------------------------------------------------------------


class _Fake:
    """A library whose functions succeed, but for one, and are noted."""

    def __init__(self, failing: str = "") -> None:
        self.called: list[str] = []
        self.arguments: dict[str, tuple[Any, ...]] = {}
        self._failing = failing

    def __getattr__(self, name: str) -> Any:
        def function(*arguments: Any) -> int:
            self.called.append(name)
            self.arguments[name] = arguments
            if name == "cudaEventElapsedTime":
                arguments[0]._obj.value = 8.0
            return 9 if name == self._failing else 0

        return function


def test_cudnn_is_given_the_layer_and_timed_by_a_graph() -> None:
    fake, cudart = _Fake(), _Fake()
    library = cudnn.Library(fake, cudart)
    xs = [jnp.asarray(data.iid_map(UNEVEN, 1, 50, seed)) for seed in range(2)]
    kernel = jnp.asarray(data.weights(UNEVEN, 0)[0])
    convolution = cudnn.Convolution(library, UNEVEN, cudnn.ALGORITHMS["GEMM"], xs, kernel)
    assert convolution.result().shape == (1, 4, 4, 4)
    assert fake.arguments["cudnnSetTensor4dDescriptor"][3:] == (1, 4, 4, 4)
    assert fake.arguments["cudnnSetConvolution2dDescriptor"][1:7] == (0, 0, 2, 2, 1, 1)  # x itself is padded
    assert convolution._xs[0].shape == (1, 3, 9, 9)
    assert convolution.microseconds(repeats=3) == pytest.approx(8e3 / cudnn._CALLS)
    assert fake.called.count("cudnnConvolutionForward") == 1 + cudnn._CALLS
    assert cudart.called.count("cudaGraphLaunch") == 3 + cudnn._WARM_UP


def test_an_algorithm_that_cudnn_does_not_have_says_so() -> None:
    library = cudnn.Library(_Fake("cudnnGetConvolutionForwardWorkspaceSize"), _Fake())
    kernel = jnp.asarray(data.weights(SMALL, 0)[0])
    with pytest.raises(ValueError, match="cudnnGetConvolutionForwardWorkspaceSize: cuDNN's status 9"):
        cudnn.Convolution(library, SMALL, 5, [jnp.asarray(data.iid_map(SMALL, 1, 50, 0))], kernel)


def test_cudnn_needs_a_gpu() -> None:
    if jax.default_backend() == "gpu":
        pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match="need a GPU"):
        cudnn.Library()


@LAYERS
@pytest.mark.parametrize("name", ["GEMM", "IMPLICIT_GEMM"])
def test_cudnns_algorithms_are_the_convolution(gpu: jax.Device, layer: PaperLayer, name: str) -> None:
    library, plain = cudnn.Library(), dataclasses.replace(layer, activation=None)
    kernel, x = jnp.asarray(data.weights(layer, 0)[0]), jnp.asarray(data.iid_map(layer, 1, 50, 0))
    try:
        convolution = cudnn.Convolution(library, layer, cudnn.ALGORITHMS[name], [x], kernel)
    except ValueError as error:
        pytest.skip(str(error))
    bias = jnp.zeros(layer.out_channels)
    expected = algorithms.sides.function(plain, algorithms.sides.HIGHEST)(x, kernel, bias)
    np.testing.assert_allclose(convolution.result(), expected, rtol=1e-4, atol=1e-4)
    assert convolution.microseconds(repeats=1) > 0


def test_results_that_are_not_the_convolution_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(algorithms, "Library", lambda: cudnn.Library(_Fake(), _Fake()))  # computes nothing
    path = tmp_path / "found.json"
    line = ["fig9_algorithms", "--quick", "--repeats", "1", "--networks", "vgg19", "--json", str(path)]
    assert command.main(line) == 0
    rows = json.loads(path.read_text("utf-8"))["rows"]
    assert {row["source"] for row in rows} == {"profile", "iid"}
    for row in rows:
        assert row["cudnn_us"] == {}
        assert row["cudnn_skipped"] == dict.fromkeys(cudnn.ALGORITHMS, "its result differs by 1.0e+00")
        assert row["us"].keys() & {"ecr", "pecr"}


def test_ocpa_over_algorithms() -> None:
    row = {"network": "n", "source": "profile", "zeros_target": None, "op": "conv", "us": {"ecr": 2.0}, "count": 2}
    rows = [
        row | {"cudnn_us": {"GEMM": 8.0}, "cudnn_skipped": {"FFT_TILING": "status 3000"}},
        row | {"op": "conv_pool", "us": {"pecr": 4.0}, "count": 1, "cudnn_us": {"GEMM": 2.0}, "cudnn_skipped": {}},
        row | {"source": "iid", "zeros_target": 0, "cudnn_us": {"GEMM": 1.0}, "cudnn_skipped": {}},
    ]
    assert answers.over_algorithms("n")({"rows": rows}) == (
        "ocpa 2.00x GEMM (3 of 3 layers), - FFT_TILING (0 of 3 layers); without zeros 0.50x GEMM (2 of 2 layers)"
    )
    assert answers.over_algorithms("m")({"rows": rows}) == "-"


def test_the_micro_kernel_is_compared_in_the_best_and_in_the_same_configuration() -> None:
    row = {"layer": "a", "zeros_percent": 50, "out_channel_warps": 1, "slices": 1, "local_bytes": 0, "error": 1e-7}
    measured = [
        row | {"kernel": kernel, "tile": tile, "us": us}
        for tile, micro, plain in (("4x4x4", 2.0, 8.0), ("7x7x2", 4.0, 6.0))
        for kernel, us in ((microkernel.MICRO, micro), (microkernel.PLAIN, plain))
    ]
    (found,) = microkernel.rows_of(measured)
    assert found["gain"] == 3
    assert sorted(found["gains"].values()) == [1.5, 4]
    assert answers.micro_kernel({"rows": [found]}) == (
        "3.0x (1 layers, 3.0x to 3.0x); in the same configuration 2.4x (1.5x to 4.0x)"
    )
    with pytest.raises(ValueError, match=r"a, plain: the result differs by 1\.0e-03"):
        microkernel.rows_of([row | {"kernel": "plain", "error": 1e-3}])


def test_both_kernels_run(gpu: jax.Device, tmp_path: Path) -> None:
    program = tmp_path / "coo_ablation"
    try:
        microkernel.build(program)
    except ValueError as error:
        pytest.skip(str(error))
    found = microkernel._microkernel(types.SimpleNamespace(program=str(program)))  # type: ignore[arg-type]
    assert {row["local_bytes"][microkernel.MICRO] for row in found} == {0}
    assert all(row["local_bytes"][microkernel.PLAIN] > 0 for row in found)


def test_a_search_needs_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert command.main(["cusnn_search"]) == 1
    assert capsys.readouterr().err.endswith("needs a GPU: COO* has one configuration on the CPU\n")


def test_layers_get_the_configuration_that_was_found(monkeypatch: pytest.MonkeyPatch, h200: Any) -> None:
    """By what the lowering asks."""
    geometry = searched._geometry(SMALL)
    wide = dataclasses.replace(SMALL, channels=64)
    found = next(iter(configurations.configurations(configurations.variants()[:1], _call_of(SMALL), Device())))
    table = {searched._key(SMALL.x_shape(1), searched._stacked(SMALL), geometry): found}
    of_model = [cost_model.by_density(wide.x_shape(1), searched._stacked(wide), geometry, 4).attributes]
    monkeypatch.setattr(cost_model, "by_density", searched._lookup(table))
    for layer, wanted in ((SMALL, [found.attribute]), (wide, *of_model)):
        types_of = [jax.core.ShapedArray(shape, jnp.float32) for shape in (layer.x_shape(1), searched._stacked(layer))]
        assert custom_call.variants(*types_of, Config(geometry, "coo"))[0] == wanted


def test_choosing_by_density_needs_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert command.main(["cusnn_density"]) == 1
    assert capsys.readouterr().err.endswith("needs a GPU: COO* has one configuration on the CPU\n")


def test_sides_have_the_configurations_that_they_are_to_have(monkeypatch: pytest.MonkeyPatch, h200: Any) -> None:
    """By what is lowered for an H200."""
    monkeypatch.setattr(_native, "why_missing", lambda *_: None)
    monkeypatch.setattr(_native, "workspace_bytes", lambda *_: 0)
    cases = list(density._cases(is_quick=False))
    monkeypatch.setattr(cost_model, "by_density", density._told(cost_model.by_density))
    assert {case.batch for case in cases} == {1, 8, 32}
    assert all(case.has_several for case in cases if case.batch == 32)
    case = next(case for case in cases if case.batch == 8 and case.has_several)
    expected = {density.COO: 1, density.STORED: 1, density.SAMPLED: 2, **density.COUNTED}
    for side, copies in expected.items():
        traced: Any = density._function(side).trace(*case.shapes)  # type: ignore[attr-defined]
        text = density._call(side, lambda traced: traced.lower(lowering_platforms=("cuda",)).as_text(), traced)
        assert density._configurations_in(text, side) == copies
        assert ("densities = dense<1.0" in text) == ("first" in side)
        assert ("stablehlo.reduce" in text) == (side == density.SAMPLED)
    with pytest.raises(ValueError, match="coo: the program has 2 configurations"):
        density._configurations_in("coo = dense<[0, 1, 1, 1, 0, 1, 1, 1]> : tensor<8xi64>", "coo")


def test_what_choosing_by_density_costs() -> None:
    """A closed kernel 2 us and a sample 3 us, by the times of each row."""
    row = {"op": "conv", "zeros_target": 50, "skipped": {}}
    rows = [
        density.derived(row | {"layer": layer, "batch": 8, "us": _times_of_sides(us)})
        for layer, us in (("a", 10.0), ("b", 20.0), ("c", 40.0))
    ]
    assert all(row["closed_kernel_us"] == pytest.approx(2.0) for row in rows)
    assert rows[0]["us"].keys() == {"coo", *density.COUNTED, density.SAMPLED, *density.MODEL}
    assert rows[0]["model_gain"] == {"model, counted": 2, "model, sampled": 1}
    assert rows[0]["stored_ratio"] == {"stored": 2, "stored and conversion": pytest.approx(0.4)}
    found = density.costs(rows)
    assert found["seconds, closed kernel"] == pytest.approx((2e-6, 2e-6, 2e-6))
    assert found["seconds, sample"] == pytest.approx((3e-6, 3e-6, 3e-6))
    assert density.costs(rows, batch=1) == {}
    assert '"seconds, closed kernel" 2e-06, "seconds, sample" 3e-06; all batches: ' in density.costs_line(rows)
    assert density.by_density({"rows": rows}) == (
        "batches with counts, over the one configuration: 50 % zeros 2.00x; "
        "a kernel that returns 2.00 us (2.00 to 2.00); a sample 3.00 us (3.00 to 3.00)"
    )
    assert density.stored_lists({"rows": rows[:1]}) == (
        "coo's time over batch 8: 2.00x stored, 0.40x stored and conversion"
    )
    few = density.derived(row | {"layer": "d", "batch": 8, "us": {"coo": 5.0, "stored": 4.0}})
    assert not few.keys() & {"closed_kernel_us", "sample_us", "stored_ratio", "model_gain"}
    assert (density.by_density({"rows": [few]}), density.stored_lists({"rows": [few]})) == ("-", "-")


def _times_of_sides(us: float) -> dict[str, float]:
    counted = {side: us + 2 * (copies - 1) for side, copies in density.COUNTED.items()}
    of_model = dict(zip(density.MODEL, (us / 2, us), strict=True))
    return {"coo": us, **counted, density.SAMPLED: us + 5, **of_model, "stored": us / 2, "conversion": 2 * us}


def _call_of(layer: PaperLayer) -> configurations.CooCall:
    return cost_model.call_of(layer.x_shape(1), searched._stacked(layer), searched._geometry(layer), 4)


def test_a_search_takes_the_fastest(monkeypatch: pytest.MonkeyPatch, h200: Any) -> None:
    x = data.iid_map(wide := dataclasses.replace(SMALL, channels=64, out_channels=64), 1, 50, 0)
    network: Any = types.SimpleNamespace(inputs={wide.name: x})
    monkeypatch.setattr(searched.suite, "chained", lambda geometry, attribute: attribute)
    monkeypatch.setattr(searched.suite, "microseconds", lambda chain, operands, repeats: float(sum(chain)))
    monkeypatch.setattr(searched, "_compile", lambda chain, shapes: None)
    key, best = searched._search(network, wide)
    assert key == searched._key(wide.x_shape(1), searched._stacked(wide), searched._geometry(wide))
    assert best.attribute == (0, 1, 1, 1)


def test_a_network_with_a_table_is_the_network() -> None:
    network = prepared.load("resnet50", quick=True)
    operands = network.operands()[0]
    expected = networks.function(network, networks.COO)(*operands)
    np.testing.assert_array_equal(searched._with_table(network, {})(*operands), expected)
    assert any(layer.kernel == 3 for layer in searched._layers_of_coo(network))


def test_parts_of_chengs_kernel_have_lines_once_measured() -> None:
    row = {"layer": "the paper's", "step": "parts", "engine": "local sums"}
    row |= {"compute_percent": 90.0, "load_percent": 10.0, "local_bytes": 64}
    lines = list(document._parts_lines([row]))
    assert any("D8" in line and "| 90 % |" in line and "the paper's" in line for line in lines)
    assert any("D9" in line and "| 64 bytes |" in line for line in lines)
    assert any("D25" in line and "| - |" in line for line in lines)
    assert any(line.startswith("| D1 |") and "32x32" in line for line in lines)


def test_pointers_are_of_the_arrays_own_memory() -> None:
    array = jnp.arange(3, dtype=jnp.float32)
    if array.devices().pop().platform != "cpu":
        pytest.skip("the host cannot read a GPU's memory")
    pointer = cudnn._pointer(array)
    assert list((ctypes.c_float * 3).from_address(pointer.value or 0)) == [0, 1, 2]


def test_another_gpus_files_fill_what_the_first_has_not(tmp_path: Path) -> None:
    row = {"layer": "l", "step": "parts", "error": 0.0}
    for device, rows in (("h200", [row]), ("h100", [row, row | {"step": "baseline"}])):
        (tmp_path / device).mkdir()
        content = {"date": "2026-11-27", "command": "c", "device": f"NVIDIA {device.upper()}", "rows": rows}
        results.add(tmp_path / device / "direct_ablation.json", "direct_ablation", content)
    found = document._of_ablation(tmp_path)
    assert [(row["step"], document._card(row)) for row in found] == [("parts", ""), ("baseline", " (H100)")]
    files = {"h200": {"a": {"device": "one"}}, "h100": {"a": {"device": "two"}, "b": {"device": "two"}}}
    assert document._first(files, ("h200", "h100")) == {"a": {"device": "one"}, "b": {"device": "two"}}
    assert document._card({"device": "AMD EPYC"}) == ""
