"""The benchmarks of the CPU: rows, shares of its limits, threads, instructions, packed networks; crossings of 1."""

from __future__ import annotations

import json
import os
from pathlib import Path

import jax
import networks
import numpy as np
import pytest
from benchmark_layers import CPU_EXTENSION, LAYERS
from flax import nnx

from benchmarks.common import results
from benchmarks.common.cases import SETS, conv3x3
from benchmarks.document import network_tables
from benchmarks.networks import host, packed, profile
from benchmarks.suites import cpu, crossover, instructions, loops, scaling
from jax_sparse_conv import models
from jax_sparse_conv._src import _native

LIMITS = {
    "threads": 1,
    "flops": 1e12,
    "loaded_flops": 6e11,
    "cache_bytes_per_second": 1e9,
    "memory_bytes_per_second": 1e8,
}

LOOPS_OF_FEW = ("auto", "direct", "pixels", "dots")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SETS, "cpu", LAYERS)


@CPU_EXTENSION
def test_cpu_table(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "cpu_limits", lambda: LIMITS)
    out = tmp_path / "rows.json"
    arguments = ["--set", "cpu", "--zeros", "50", "--batch", "1", "2", "--repeats", "2", "--json", str(out)]
    assert cpu.main(arguments) == 0
    content = json.loads(out.read_text())
    assert len(content["rows"]) == 2 * 2 * len(LAYERS)
    assert all(0 < row["fma_percent"] <= row["roof_percent"] for row in content["rows"] if row["zeros_percent"] < 99)
    assert all(row["then_pool_ratio"] > 0 for row in content["rows"] if row["op"] == "conv_pool")
    assert "FMA %" in capsys.readouterr().out
    assert cpu.main(["--layers", "nothing"]) == 1
    assert crossover.main([str(out), "--out", str(tmp_path / "plot.png")]) == 0
    assert (tmp_path / "plot.png").stat().st_size > 1000
    assert crossover.main([str(tmp_path / "nowhere.json"), "--out", str(tmp_path / "plot.png")]) == 1


@CPU_EXTENSION
def test_cpu_in_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "cpu_limits", lambda: LIMITS)
    monkeypatch.setitem(SETS, "cpu", (conv3x3("4->8 6"), *LAYERS[2:]))
    out = tmp_path / "rows.json"
    common = ["--set", "cpu", "--repeats", "1", "--in-program", "--json", str(out)]
    assert cpu.main([*common, "--zeros", "50"]) == 0
    first = results.load(out)
    assert cpu.main([*common, "--zeros", "50", "80", "--layers", "3x3"]) == 0
    content = results.load(out)
    assert len(content["runs"]) == 2
    layers = [(row["layer"], row["zeros_target"]) for row in content["rows"]]
    assert layers == [(row["layer"], row["zeros_target"]) for row in first["rows"]] + [("conv 3x3 4->8 6x6", 80)]
    assert content["rows"][2:6] == first["rows"][2:6]
    assert [row["run"] for row in content["rows"]] == [1, 1, 0, 0, 0, 0, 1]
    assert content["rows"][0]["peak_gflops"] == 1000
    assert all(0 < row["fma_program_percent"] <= row["bound_program_percent"] for row in content["rows"])
    assert [mean["zeros_target"] for mean in cpu.fma_means(content["rows"])] == [0, 50, 80]
    assert all(row["free_pool_ratio"] > 0 for row in content["rows"] if row["op"] == "conv_pool")


def test_instructions_are_counted_where_they_were_executed() -> None:
    dump = """events: Ir
ob=(1) /site/jax_sparse_conv/_cpu.so
fl=(1) a.cc
fn=(1) sweep
10 100
+2 20
cob=(2) /lib/libc.so
cfn=(2) memset
calls=1 30
10 5000
* 3
ob=(2)
fn=(2)
0 7
totals: 5130
"""
    assert instructions.count(dump.splitlines()) == {"/site/jax_sparse_conv/_cpu.so": 123, "/lib/libc.so": 7}


@CPU_EXTENSION
def test_instructions_say_what_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", "")
    assert instructions.main([]) == 1
    assert capsys.readouterr().err == "benchmarks instructions: valgrind is not on the path\n"


@CPU_EXTENSION
def test_cpu_with_packed_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "cpu_limits", lambda: LIMITS)
    monkeypatch.setitem(SETS, "cpu", (conv3x3("16->32 6"), *LAYERS))
    out = tmp_path / "rows.json"
    options = ["--set", "cpu", "--zeros", "50", "--repeats", "1", "--weights", "packed", "--json", str(out)]
    assert cpu.main(options) == 0
    content = json.loads(out.read_text())
    assert {row["weights"] for row in content["rows"]} == {"packed"}
    assert max(row["error"] for row in content["rows"]) < 2e-6


def test_roofline() -> None:
    row = {"op": "conv", "dense_flops": 2e6, "zeros_percent": 50.0, "kernel_shape": [3, 3, 10, 10], "batch": 1}
    found = cpu.roofline(row | {"ours_us": 10.0}, LIMITS)
    assert found["fma_percent"] == pytest.approx(10)
    assert found["roof_percent"] == pytest.approx(36)  # 3600 bytes at 1 GB/s
    dense = row | {"op": "dense", "kernel_shape": [100, 1000], "ours_us": 400.0}
    assert cpu.roofline(dense, LIMITS)["roof_percent"] == pytest.approx(50)  # half of the rows


def test_crossover_of_sides(tmp_path: Path) -> None:
    rows = [
        {"op": "conv", "kernel_shape": [3, 3, 8, 8], "source": source, "zeros_target": zeros, "zeros_percent": zeros}
        | {"us": {"xla highest": 8.0, "direct": 2.0, "ecr": 4.0 - zeros / 25}}
        for source, zeros in (("iid", 0), ("iid", 75), ("real", 50))
    ]
    assert crossover.gains(rows, "ecr", "direct") == [(0, pytest.approx(0.5)), (75, pytest.approx(2.0))]
    file, plot = tmp_path / "fig11.json", tmp_path / "plot.png"
    file.write_text(json.dumps({"rows": rows}))
    assert crossover.main([str(file), "--out", str(plot)]) == 0
    assert plot.stat().st_size > 1000


def test_crossover() -> None:
    assert crossover.crossover([(0, 0.5), (50, 2.0)]) == pytest.approx(25)
    assert crossover.crossover([(0, 1.1), (50, 2.0)]) == 0
    assert crossover.crossover([(0, 0.5), (50, 0.9)]) is None


@CPU_EXTENSION
def test_limits_are_measured() -> None:
    limits = _native.cpu_limits()
    assert limits["threads"] >= 1
    assert min(limits["flops"], limits["cache_bytes_per_second"], limits["memory_bytes_per_second"]) > 1e8


@CPU_EXTENSION
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system does not bind processes to cores")
def test_scaling_runs_a_process_for_each_number_of_threads(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    cores = scaling.cores_in_order()
    assert sorted(cores) == sorted(os.sched_getaffinity(0))
    several = [1, 2] if len(cores) > 1 else [1]
    options = ["--layers", "128->32 7x7", "--repeats", "1", "--json", str(tmp_path / "rows.json"), "--threads"]
    assert scaling.main([*options, *map(str, several), "100000"]) == 0
    found = json.loads((tmp_path / "rows.json").read_text())
    assert [len(run["cores"]) for run in found["runs"][0]["limits"]] == several
    assert [(row["maps"], row["threads"]) for row in found["rows"]] == [(k, t) for k in scaling.KINDS for t in several]
    assert all(row["uneven"] == 1 for row in found["rows"] if row["maps"] == "iid")
    assert scaling.main([*options, "100000"]) == 1
    assert "this process may use" in capfd.readouterr().err


def test_uneven_maps_have_as_many_zeros() -> None:
    found = scaling.uneven((2, 28, 28, 64), 85, 0)
    assert np.mean(found == 0) == pytest.approx(0.85, abs=0.01)
    assert not found[:, 14:].any()


@CPU_EXTENSION
def test_packed_networks(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model = networks.small_resnet()
    models.fold_batch_norm(model)
    x = jax.random.normal(jax.random.key(0), (1, 32, 32, 3))
    monkeypatch.setattr(packed, "prepare", lambda name: (model, x))
    options = ["--networks", "resnet50", "--repeats", "1", "--batch", "2", "--json", str(tmp_path / "rows.json")]
    assert packed.main(options) == 0
    (row,) = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert row["error"] < 1e-5
    assert row["packed_ratio"] == pytest.approx(row["xla_us"] / row["packed_us"])
    assert row["nnx_plain_ratio"] == pytest.approx(row["nnx_xla_us"] / row["nnx_plain_us"])
    assert "copies MB" in capsys.readouterr().out
    assert packed.main(["--json", "nowhere/rows.json"]) == 1


@pytest.mark.usefixtures("float32_products")
def test_every_way_to_call_a_network_gives_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = networks.small_resnet()
    models.fold_batch_norm(model)
    x = jax.random.normal(jax.random.key(0), (1, 32, 32, 3))
    found = {side: np.asarray(function(x)) for side, function in host.sides(model, host.RUNS["network"]).items()}
    assert tuple(found) == host.SIDES
    for result in found.values():
        np.testing.assert_allclose(result, found["state"], rtol=1e-5, atol=1e-5)
    monkeypatch.setattr(host, "prepare", lambda name: (model, x))
    assert host.main(["--networks", "resnet50", "--repeats", "1", "--json", str(tmp_path / "rows.json")]) == 0
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["what"] for row in rows] == ["host", "network"]
    assert {row["weights"] for row in rows} == {len(jax.tree.leaves(nnx.state(model)))}
    assert all(min(row["us"].values()) > 0 for row in rows)
    assert "jit_inference" in capsys.readouterr().out
    assert host.main(["--json", "nowhere/rows.json"]) == 1


_HLO = """
  %jsc_conv.54 = f32[1,56,56,64]{3,2,1,0} custom-call(%x.1, %bitcast), custom_call_target="jsc_pecr", \
operand_layout_constraints={f32[1,224,224,3]{3,2,1,0}, f32[1,7,7,3,64]{4,3,2,1,0}, f32[1,64]{1,0}}, api_version=TYPED
  %add.1 = f32[8]{0} add(%a, %b)
  ROOT %ffi_call.3 = f32[2,3,3,16,32]{4,3,2,1,0} custom-call(%x, %g), custom_call_target="jsc_kernel_gradient", \
operand_layout_constraints={f32[4,8,8,16]{3,2,1,0}, f32[4,8,8,32]{3,2,1,0}}, api_version=TYPED
""".replace("\\\n", "")


def test_profile_knows_custom_calls_by_their_hlo() -> None:
    found = profile.operations(_HLO)
    assert found["jsc_conv.54"] == {
        "kind": "pecr",
        "operation": "1x224x224x3 * 1x7x7x3x64 -> 1x56x56x64",
        "flops": 2 * 56 * 56 * 64 * 7 * 7 * 3,
    }
    assert found["ffi_call.3"]["kind"] == "kernel gradient"
    assert found["ffi_call.3"]["flops"] == 2 * 4 * 8 * 8 * 16 * 32 * 9
    assert list(found) == ["jsc_conv.54", "ffi_call.3"]


@CPU_EXTENSION
@pytest.mark.parametrize("step", [False, True])
def test_profile_adds_up(tmp_path: Path, step: bool, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "profile.json"
    line = ["--networks", "squeezenet1_1", "--repeats", "2", "--json", str(out), *(["--step"] if step else [])]
    assert profile.main(line) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert sum(each["ms"] for each in row["operations"]) >= 0.999 * row["ms"]
    assert sum(row["shares"].values()) == pytest.approx(sum(each["percent"] for each in row["operations"]))
    kinds = {each["kind"] for each in row["operations"]}
    assert {"ecr", "waiting"} <= kinds
    assert ("kernel gradient" in kinds) is step
    assert max(each.get("gflops", 0) for each in row["operations"]) > 0
    assert "GFLOP/s" in capsys.readouterr().out
    assert "| squeezenet" in network_tables.profile([row])[0].lower()


@CPU_EXTENSION
def test_loops_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(loops.CHOICES, "many", (loops.Layer(1, 6, 16, 3, 16), loops.Layer(1, 6, 16, 1, 16)))
    assert loops.main(["--zeros", "0", "50", "--repeats", "2", "--json", str(tmp_path / "rows.json")]) == 0
    printed = capsys.readouterr().out
    assert all(f"{_native.cpu_isa()}, weights as {weights}s: regret" in printed for weights in loops.WEIGHTS)
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [(row["layer"], row["weights"], row["zeros_percent"]) for row in rows] == [
        (f"1x6x6, {window}x{window} 16->16", weights, zeros)
        for window in (3, 1)
        for weights in loops.WEIGHTS
        for zeros in (0, 50)
    ]
    for row in rows:
        of_loops = [row[f"{loop}_us"] for loop in loops.LOOPS[1:] if f"{loop}_us" in row]
        assert len(of_loops) == (3 if "3x3" in row["layer"] else 2)  # Winograd's is for 3x3 kernels
        assert row["regret"] == pytest.approx(row["auto_us"] / min(of_loops))


@CPU_EXTENSION
def test_loops_of_few_output_channels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "FEW", (loops.Layer(1, 6, 32, 3, 2),))
    monkeypatch.setitem(loops.CHOICES, "few", loops.FEW)
    line = ["--layers", "few", "--zeros", "50", "--repeats", "2", "--json", str(tmp_path / "rows.json")]
    assert loops.main(line) == 0
    for row in json.loads((tmp_path / "rows.json").read_text())["rows"]:
        assert {key for key in row if key.endswith("_us")} == {f"{side}_us" for side in (*LOOPS_OF_FEW, "xla")}
        assert row["regret"] == pytest.approx(row["auto_us"] / min(row[f"{loop}_us"] for loop in LOOPS_OF_FEW[1:]))
