"""`python -m benchmarks peers`: a tiny network by all that is installed, and what becomes of those that are not."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from benchmarks.common import prepared, results
from benchmarks.document import measured, network_tables
from benchmarks.networks import peer_sides, peers

QUICK = ["--quick", "--networks", "resnet50", "--batch", "2", "--repeats", "2", "--seconds", "1", "--threads", "1"]
SIDES = ("ours", "xla")


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny network, built once."""
    pytest.importorskip("sklearn")
    folder = tmp_path_factory.mktemp("networks")
    prepared.beside(prepared.load("resnet50", folder, quick=True), folder, quick=True)
    return folder


def parsed(*arguments: str) -> argparse.Namespace:
    return peers._parser().parse_args([*QUICK, *arguments])


def test_a_row_has_every_side_that_is_installed(kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = ["onnxruntime", "openvino", "torch"]  # what Inductor compiles takes it half a minute
    file = tmp_path / "peers.json"
    allowed = os.sched_getaffinity(0)
    line = [*QUICK, "--prepared", str(kept), "--zeros", "profile", "--peers", *wanted, "--json", str(file)]
    assert peers.main(line) == 0
    assert os.sched_getaffinity(0) == allowed
    (row,) = results.read(file)
    installed = [peer for peer in wanted if peer_sides.missing(peer) is None]
    assert set(row["ms"]) == set(row["best_ms"]) == set(row["quartiles_ms"]) == {*SIDES, *installed}
    assert row["skipped"] == {peer: peer_sides.missing(peer) for peer in wanted if peer not in installed}
    assert max(row["error"].values()) < 1e-4
    assert (row["network"], row["kind"], row["batch"], row["zeros"]) == ("resnet50", "float32", 2, "profile")
    assert (row["threads"], row["cpu"]["cores"], row["quick"], row["backend"]) == (1, "1", True, "cpu")
    assert 0 < row["zeros_percent"] < 100
    assert 0 <= row["others_percent"] <= 100
    if installed:
        assert row["ratio"] == min(row["ms"][peer] for peer in installed) / row["ms"]["ours"]
        assert row["peer_versions"].keys() >= {"torch"}
    printed = capsys.readouterr().out
    assert printed.splitlines()[0].split()[-4:] == ["best", "error", "others", "%"]
    (table, *_) = network_tables.peers([row])
    assert table.splitlines()[2].startswith("| ResNet-50 | float32 | 2 | 1 |")


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the suite's own processes are on the CPU, this one is not")
def test_nothing_is_installed(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_sides.importlib.util, "find_spec", lambda name: None)
    options = parsed("--prepared", str(kept), "--threads", "1")
    row = peers.measure(peers.Case("resnet50", "bfloat16", 1, "none"), options)
    assert set(row["ms"]) == set(SIDES)
    assert (row["ratio"], row["best_ratio"], row["fastest"], row["zeros_percent"]) == (None, None, None, 0)
    assert row["skipped"].keys() == peer_sides.PEERS.keys()
    assert row["skipped"]["torch"] == "torch not installed: pip install 'jax-sparse-conv[peers]'"
    assert "OpenVINO" in peers.table([row])
    assert "onnxruntime skipped: torch and onnx and onnxscript and onnxruntime not installed" in peers.table([row])
    assert network_tables.peers([row])[1].startswith("**Skipped**: onnxruntime, bfloat16: torch and")


class Made:
    """Stands for `peer_sides.Sides`: one side is right, one is wrong and one raises."""

    kind = "float32"

    def made(self, side: str) -> peer_sides.Call:
        if side == "openvino":
            raise RuntimeError("no\nsuch layer")
        return lambda index: np.ones((1, 4)) * (2 if side == "torch" else 1)


def test_a_side_that_is_wrong_is_left_out() -> None:
    skipped: dict[str, str] = {}
    sides: Any = Made()
    calls, errors = peers._made(sides, ("ours", "torch", "openvino"), np.ones((1, 4)), skipped)
    assert (list(calls), errors) == (["ours"], {"ours": 0})
    assert skipped == {"torch": "its result is off by 1.0e+00", "openvino": "RuntimeError: no such layer"}


@pytest.mark.skipif(peer_sides.missing("torch") is not None, reason=str(peer_sides.missing("torch")))
def test_onnxruntime_has_no_bfloat16(kept: Path, tmp_path: Path) -> None:
    network = prepared.load("resnet50", kept, quick=True)
    sides = peer_sides.Sides(network, [network.batch(1)], "bfloat16", 1, tmp_path)
    with pytest.raises(ValueError, match="no convolution in bfloat16"):
        sides.made("onnxruntime")
    exact = peer_sides.exact(network, network.batch(2))
    assert (exact.dtype, exact.shape) == (np.float64, (2, 10))
    found = np.asarray(sides.made("torch")(0))
    assert np.linalg.norm(found - exact[:1]) < 0.1 * np.linalg.norm(exact[:1])


def test_what_cannot_be_run_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert peers.main([*QUICK, "--json", str(tmp_path / "nowhere" / "peers.json")]) == 1
    assert peers.main([*QUICK, "--threads", "4096"]) == 1
    assert peers.main([*QUICK, "--repeats", "0"]) == 1
    assert "--threads 4096: this process may use" in capsys.readouterr().err
    dies = tmp_path / "python"
    dies.write_text("#!/bin/sh\nkill -SEGV $$\n")
    dies.chmod(0o755)
    monkeypatch.setattr(peers.sys, "executable", str(dies))
    assert peers.main([*QUICK, "--zeros", "none"]) == 1
    assert "resnet50/float32/2/none: its process ended with SIGSEGV" in capsys.readouterr().err


def row(network: str, zeros: str, **ms: float) -> results.Row:
    about = {"network": network, "kind": "float32", "batch": 1, "threads": 2, "zeros": zeros, "skipped": {}}
    found = {"fastest": peers.fastest(ms), "ratio": peers.ratio_of(ms), "error": {"ours": 3.7e-5}}
    return {**about, "ms": ms, **found}


def test_the_table_has_both_ratios_in_a_line() -> None:
    rows = [
        row("resnet50", "none", onnxruntime=18.7, xla=34.0, ours=23.6),
        row("resnet50", "profile", onnxruntime=19.1, openvino=19.3, torch=31.6, inductor=21.1, xla=34.9, ours=15.8),
        row("vgg19", "profile", torch=107.8, openvino=89.0, ours=44.5),
    ]
    (table,) = network_tables.peers(rows)
    titles, _, *lines = table.splitlines()
    assert titles == (
        "| network | precision | batch | threads | onnxruntime ms | OpenVINO ms | PyTorch ms | Inductor ms | XLA ms "
        "| ours ms | ratio | without zeros | error |"
    )
    assert lines == [
        "| VGG-19 | float32 | 1 | 2 | | 89.0 | 107.8 | | | 44.5 | 2.00 (OpenVINO) | | 4e-05 |",
        "| ResNet-50 | float32 | 1 | 2 | 19.1 | 19.3 | 31.6 | 21.1 | 34.9 | 15.8 | 1.21 (onnxruntime) "
        "| 0.79 (onnxruntime) | 4e-05 |",
    ]


def test_a_file_has_a_section_on_the_page(tmp_path: Path) -> None:
    for name in measured.DEVICES:
        (tmp_path / name).mkdir()
    about = {"date": "2026-11-27T10:00:00", "commit": "abc1234", "device": "a CPU", "backend": "cpu"}
    run = about | {"cpu": {"cores": "2", "instruction_set_in_use": "avx512"}}
    rows = [row("resnet50", zeros, onnxruntime=20.0, ours=10.0) | about for zeros in ("profile", "none")]
    file = {"suite": "peers", "runs": [run], "rows": [each | {"run": 0, "flags": "default"} for each in rows]}
    (tmp_path / "cpu_amd_epyc" / "peers.json").write_text(json.dumps(file))
    page = measured.page(tmp_path)
    assert "### AMD EPYC: beside other frameworks" in page
    assert "| ResNet-50 | float32 | 1 | 2 | 20.0 |" in page
