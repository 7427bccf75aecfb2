"""`benchmarks networks`: its arithmetic, what it does about processes that die, and one small run."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jax_sparse_conv as jsc
from benchmarks.common import merge, prepared, program, results
from benchmarks.networks import network_cases, network_rows, networks
from jax_sparse_conv._src import _native

NETWORK = ["--quick", "--networks", "resnet50", "--kinds", "highest", "--batch", "1", "--repeats", "2"]
HLO = """HloModule jit_run

%fused_computation (p: f32[2,3]) -> f32[3,2] {
  %copy.1 = f32[2,3]{1,0} copy(%p)
  ROOT %transpose.2 = f32[3,2]{1,0} transpose(%copy.1), dimensions={1,0}
}

ENTRY %main.1 (a: f32[2,3]) -> f32[3,2] {
  %a = f32[2,3]{1,0} parameter(0)
  %loop_transpose_fusion = f32[3,2]{1,0} fusion(%a), kind=kLoop, calls=%fused_computation
  %call.1 = (f32[3,2]{1,0}, u8[16]{0}) custom-call(%loop_transpose_fusion), custom_call_target="jsc_direct"
  %call.2 = (f32[3,2]{1,0}, u8[16]{0}) custom-call(%loop_transpose_fusion), custom_call_target="__cudnn$convForward"
  %loop_add_fusion = f32[3,2]{1,0} fusion(%call.1), kind=kLoop, calls=%fused_computation
  ROOT %copy.3 = f32[3,2]{0,1} copy(%loop_add_fusion)
}
"""
THUNKS = """000: kCopy	copy
001: kCommandBuffer	command_buffer
  000: kCustomCall	call.1
  001: kKernel	loop_add_fusion
002: kKernel	copy.3
"""


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the network of `NETWORK`, built once."""
    pytest.importorskip("sklearn")
    folder = tmp_path_factory.mktemp("networks")
    assert networks.main([*NETWORK, "--prepared", str(folder), "--prepare"]) == 0
    return folder


@pytest.fixture(scope="module")
def densenet() -> prepared.Prepared:
    pytest.importorskip("sklearn")
    return prepared.load("densenet121", quick=True)


def test_a_program_is_counted() -> None:
    calls = {"jsc_direct": 1, "__cudnn$convForward": 1}
    assert program.counts(HLO) == {"custom_calls": calls, "fusions": 2, "moves": 2}
    assert program.count_thunks(THUNKS) == {"launches": 3, "command_buffers": 1, "inside": 2}


def test_thunks_are_found_by_the_name_of_the_function(tmp_path: Path) -> None:
    assert program.thunks(tmp_path, "run") is None
    (tmp_path / "module_0003.jit_run.sm_9.0_gpu.thunk_sequence.txt").write_text("000: kKernel\tone\n")
    assert program.thunks(tmp_path, "run") == {"launches": 1, "command_buffers": 0, "inside": 0}
    (tmp_path / "module_0003.jit_run.sm_9.0_gpu.thunk_sequence_after_thunk_passes.txt").write_text(THUNKS)
    assert program.thunks(tmp_path, "run") == program.count_thunks(THUNKS)


def test_networks_writes_a_row_for_every_case(kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / name for name in ("one.json", "other.json", "both.json")]
    run = [*NETWORK, "--prepared", str(kept)]
    assert networks.main([*run, "--json", str(files[0])]) == 0
    assert networks.main([*run, "--json", str(files[1]), "--kinds", "bfloat16", "--batch", "2"]) == 0
    assert merge.main([*map(str, files[:2]), "--out", str(files[2])]) == 0
    assert networks.main(["--list", str(files[2])]) == 0
    runs = results.load(files[2])["runs"]
    assert all({"date", "commit", "device", "versions", "command", "limits"} <= run.keys() for run in runs)
    rows = network_rows.read([files[2]])
    assert [row["case"] for row in rows] == ["resnet50/highest/1", "resnet50/bfloat16/2"]
    assert merge.main([str(files[2]), str(files[0]), "--out", str(tmp_path / "again.json")]) == 0
    again = results.load(tmp_path / "again.json")["runs"]
    assert sorted(run["command"] for run in again) == sorted(run["command"] for run in runs)
    for row in rows:
        assert set(row["us"]) == set(row["no_zeros_us"]) == {"xla", "auto", "fused"}
        assert row["latency_us"].keys() == row["us"].keys()
        assert row["ratio"]["auto"] == row["us"]["xla"] / row["us"]["auto"]
        assert row["no_zeros_percent"] < 1 < row["zeros_percent"]
        assert max(row["error"].values()) < (1e-5 if row["kind"] == "highest" and _on_cpu() else 5e-2)
        assert row["skipped"] == {}
        assert row["memory"]["xla"]["argument"] > 0
    printed = capsys.readouterr().out
    assert "resnet50/bfloat16/2  fused" in printed
    assert networks.main([*NETWORK, "--cases", "vgg"]) == networks.main([*NETWORK, "--prepare"]) == 1
    assert networks.main([*NETWORK, "--json", str(tmp_path / "nowhere" / "a.json")]) == 1
    files[0].write_text("{}")
    capsys.readouterr()
    assert networks.main(["--list", str(files[0])]) == 1
    assert "one.json is no file of results" in capsys.readouterr().err


def test_no_vector_of_weights_is_one_number(densenet: prepared.Prepared) -> None:
    """XLA would make it anew in every call."""
    vectors = [np.asarray(leaf) for leaf in densenet.weights if leaf.ndim == 1]
    assert len(vectors) > 10
    assert all(len(np.unique(vector)) > 1 for vector in vectors)


def test_weights_can_be_constants_of_the_program(kept: Path, tmp_path: Path) -> None:
    file = tmp_path / "constants.json"
    run = [*NETWORK, "--prepared", str(kept), "--weights", "constants"]
    assert networks.main([*run, "--json", str(file)]) == 0
    (row,) = results.read(file)
    assert (row["weights"], row["flags"], row["quick"]) == ("constants", "default", True)
    assert row["xla_flags"] == os.environ.get("XLA_FLAGS", "")  # without where dumps went
    assert set(row["us"]) == set(row["no_zeros_us"]) == {"xla", "auto", "fused"}
    assert max(row["error"].values()) < (1e-5 if _on_cpu() else 5e-2)
    weight_bytes = sum(leaf.nbytes for leaf in prepared.load("resnet50", kept, quick=True).weights)
    assert all(memory["argument"] < weight_bytes for memory in row["memory"].values())


@pytest.mark.skipif(
    jax.default_backend() != "cpu" or not _native.cpu_isas(), reason="kernels are packed for the CPU extension only"
)
def test_weights_can_be_packed(tmp_path: Path) -> None:
    """Run without `--prepare` before it."""
    pytest.importorskip("sklearn")
    run = [*NETWORK, "--prepared", str(tmp_path / "networks"), "--weights", "packed"]
    file = tmp_path / "packed.json"
    assert networks.main([*run, "--kinds", "highest", "bfloat16", "--json", str(file)]) == 0
    rows = {row["kind"]: row for row in results.read(file)}
    row = rows["highest"]
    assert row["weights"] == "packed"
    assert set(row["us"]) == set(row["no_zeros_us"]) == {"xla", "auto", "fused"}
    assert max(row["error"].values()) < 1e-5
    network = prepared.load("resnet50", tmp_path / "networks", quick=True)
    copies = sum(leaf.nbytes for leaf in network.packed().weights) - sum(leaf.nbytes for leaf in network.weights)
    memory = {side: found["argument"] for side, found in row["memory"].items()}
    assert memory["auto"] - memory["xla"] == copies > 0
    if _native.cpu_multiplies_pairs():
        assert set(rows["bfloat16"]["us"]) == {"xla", "auto", "fused"}
        return
    assert set(rows["bfloat16"]["us"]) == {"xla"}
    assert set(rows["bfloat16"]["skipped"]) == {"auto", "fused"}
    assert "nothing of resnet50 would be packed in bfloat16" in rows["bfloat16"]["skipped"]["auto"]


def test_a_plan_is_a_side(kept: Path, tmp_path: Path) -> None:
    network = prepared.load("resnet50", kept, quick=True)
    model = network.model()
    with jax.default_matmul_precision("highest"):
        plan = jsc.calibrate(model, [network.batch(1)], repeats=1)
    plan.save(tmp_path / "resnet50_highest_1.json")
    case, other = (network_cases.Case("resnet50", "highest", batch) for batch in (1, 2))
    assert [*case.sides(("xla", "planned"), tmp_path)] == ["xla", "planned"]
    assert [*other.sides(("xla", "planned"), tmp_path)] == ["xla"]
    row = network_cases.measure(
        case, network, prepared.beside(network, kept, quick=True), ("xla", "planned"), {}, lambda event: None,
        limits=network_cases.Limits(1e12, {"highest": None}), repeats=2, plans=tmp_path, dumps=tmp_path,
    )  # fmt: skip
    assert row["skipped"] == {}
    assert set(row["us"]) == {"xla", "planned"}
    assert max(row["error"].values()) < 1e-4
    chosen = {layer.implementation for layer in plan.layers} - {"xla"}
    assert bool(chosen) == any(name.startswith("jsc_") for name in row["program"]["planned"]["custom_calls"])


def _on_cpu() -> bool:
    return jax.default_backend() == "cpu"


def test_a_side_that_ends_the_process_is_skipped_and_the_rest_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "rows.json"
    options = networks._parser().parse_args([*NETWORK, "--batch", "1", "2", "--json", str(path)])
    first, second = networks._cases(options)
    specs: list[dict[str, Any]] = []

    def process(line: list[str], flags: str, dumps: Path, content: dict[str, Any], keep: Any) -> Any:
        specs.append(json.loads(line[line.index("--child") + 1]))
        if len(specs) == 1:
            return [(first.name, "xla")], "the process ended by SIGABRT: unknown cudnn status: 5003"
        if len(specs) == 2:
            keep({**networks._described(first), "no_zeros_us": {}, "skipped": specs[1]["skipped"][first.name]})
            return [], "the process ended by SIGKILL: "
        raise AssertionError(specs)

    monkeypatch.setattr(networks, "_one_process", process)
    content: dict[str, Any] = {"runs": {}, "date": "2026-11-26", "device": "a CPU", "command": "python"} | {
        "weights": "arguments"
    }
    networks._isolated(options, [first, second], "", content, tmp_path)
    assert specs[1]["skipped"] == {first.name: {"xla": "the process ended by SIGABRT: unknown cudnn status: 5003"}}
    rows = network_rows.read([path])
    assert [row["case"] for row in rows] == [first.name, second.name]
    assert set(rows[1]["skipped"]["default"]) == set(network_cases.SIDES)
    assert "resnet50/highest/1 xla, default flags, skipped: the process ended by SIGABRT" in network_rows.table(rows)


def test_every_flag_set_of_every_network_has_dumps_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    options = networks._parser().parse_args(
        ["--networks", "vgg19", "resnet50", "--both-flags", "--prepared", str(tmp_path)]
    )
    used: list[Path] = []

    def process(line: list[str], flags: str, dumps: Path, content: dict[str, Any], keep: Any) -> Any:
        used.append(dumps)
        for name in json.loads(line[line.index("--child") + 1])["cases"]:
            parts = name.split("/")
            keep({**networks._described(network_cases.Case(parts[0], parts[1], int(parts[2]))), "skipped": {}})
        return [], None

    monkeypatch.setattr(networks, "_one_process", process)
    monkeypatch.setattr(networks, "_prepare", lambda options: None)
    content = networks._measured(options, [])
    assert len(used) == len(set(used)) == 4
    assert set(content["runs"]) == {"default", "command buffers"}


def test_the_reason_of_a_process_s_end_is_kept(tmp_path: Path) -> None:
    script = """import os, sys
print('{"event": {"header": {"device": "d"}}}')
print('{"event": {"begin": "a/b/1", "side": "xla"}}')
print('{"event": {"end": "a/b/1", "side": "xla"}}')
print('{"event": {"begin": "a/b/1", "side": "auto"}}', flush=True)
sys.stderr.write("F0000 Check failed: unknown cudnn status: 5003\\n*** somewhere\\n")
sys.stderr.flush()
os.abort()
""".replace("\\\\", "\\")
    content: dict[str, Any] = {"date": "d"}
    found = networks._one_process([sys.executable, "-c", script], "", tmp_path, content, lambda row: None)
    assert found == (
        [("a/b/1", "auto")],
        "the process ended by SIGABRT: F0000 Check failed: unknown cudnn status: 5003",
    )
    assert content == {"date": "d", "device": "d"}


def test_what_stopped_while_it_was_written_is_built_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def stopped(path: Path, **arrays: np.ndarray) -> None:
        path.write_bytes(b"PK")
        raise KeyboardInterrupt

    def kept() -> dict[str, np.ndarray]:
        return prepared._kept(tmp_path, "network", lambda: {"x": np.ones(2)}, lambda text: None)

    with monkeypatch.context() as writing:
        writing.setattr(np, "savez", stopped)
        with pytest.raises(KeyboardInterrupt):
            kept()
    np.testing.assert_array_equal(kept()["x"], np.ones(2))
    assert (tmp_path / "network.npz").is_file()


def test_roofline_of_a_network(kept: Path) -> None:
    network = prepared.load("resnet50", kept, quick=True)
    limits = network_cases.Limits(1e12, {"highest": 1e12, "default": None, "bfloat16": None})
    one, two = (network_cases.roofline(network, network_cases.Case("resnet50", "highest", b), limits) for b in (1, 2))
    weights = 4 * sum(leaf.size for leaf in network.weights)
    assert two["flops"] == 2 * one["flops"]
    assert two["bytes"] - weights == 2 * (one["bytes"] - weights)
    assert one["us"] == max(one["bytes_us"], one["flops_us"])
    half = network_cases.roofline(network, network_cases.Case("resnet50", "bfloat16", 1), limits)
    assert (half["bytes"], half["flops_us"]) == (one["bytes"] / 2, None)
    assert half["us"] == half["bytes_us"]
