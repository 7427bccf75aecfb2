"""The command line, in-process on a tiny network: what it prints, what it writes, and how it fails."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from networks import SMALL
from safetensors.numpy import save_file

import jax_sparse_conv
from jax_sparse_conv import models
from jax_sparse_conv.__main__ import main
from jax_sparse_conv._src import _native
from jax_sparse_conv._src.cli import commands, comparison, networks, progress
from jax_sparse_conv._src.cli.errors import UserError
from jax_sparse_conv._src.plans import timing
from jax_sparse_conv._src.plans.calibration import Progress
from jax_sparse_conv.models import VGG, Network, preprocess

LAYERS = ["conv1_1", "conv2_1", "conv2_2", "fc6", "fc7", "fc8"]
# VGG's sequence with one convolution in its first stage and two in its second: conv, ReLU, pool, conv, ReLU, conv, ...
_TORCH_NAMES = {"conv1_1": "features.0", "conv2_1": "features.3", "conv2_2": "features.5"}
_TORCH_NAMES |= {"fc6": "classifier.0", "fc7": "classifier.3", "fc8": "classifier.6"}


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> Network:
    """A network of three convolutions, registered as "tiny"."""
    build = functools.partial(VGG, (1, 2), features=(4, 8), hidden=16, pool_size=2)
    network = Network("tiny", build, 16, "three convolutions", preprocess)
    monkeypatch.setitem(models.NETWORKS, "tiny", network)
    return network


def run(*arguments: str | Path) -> int:
    return main(["run", "--network", "tiny", "--repeats", "2", *map(str, arguments)])


@pytest.fixture
def weights(tiny: Network) -> dict[str, np.ndarray]:
    """The tiny network's parameters under torchvision's names."""
    tensors = {}
    for name, layer in tiny.build(1000, rngs=nnx.Rngs(1)).named_layers():
        conv = getattr(layer, "conv", layer)
        kernel = np.asarray(conv.kernel[...])
        kernel = kernel.transpose(3, 2, 0, 1) if kernel.ndim == 4 else kernel.T
        tensors[_TORCH_NAMES[name] + ".weight"] = np.ascontiguousarray(kernel)
        tensors[_TORCH_NAMES[name] + ".bias"] = np.asarray(conv.bias[...])
    return tensors


def test_run_prints_every_layer_the_totals_and_the_classes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 0
    out = capsys.readouterr().out
    for expected in (
        *LAYERS,
        "sum of the layers",
        "whole network",
        "zeros %",
        "ratio",
    ):
        assert expected in out
    assert "largest relative difference of the outputs: " in out
    assert "top 5 dense: class " in out
    assert "top 5 sparse: class " in out
    assert "Without --weights the weights are seeded (seed 0): the classes mean nothing." in out


def test_run_writes_json_and_a_plot(tmp_path: Path) -> None:
    target, picture = tmp_path / "run.json", tmp_path / "run.png"
    assert run("--batch", "3", "--json", target, "--plot", picture, "--implementation", "xla") == 0
    found = json.loads(target.read_text())
    assert [row["path"] for row in found["layers"]] == LAYERS
    for row in found["layers"]:
        assert row["input_shape"][0] == 3
        assert 0 <= row["zeros_percent"] < 100
        assert row["implementation"] == "xla"
        assert row["ratio"] == pytest.approx(row["dense_us"] / row["sparse_us"])
    assert found["layers"][2]["zeros_percent"] > 20  # the profile, not the photograph
    assert found["totals"]["layers"]["dense_us"] == pytest.approx(sum(row["dense_us"] for row in found["layers"]))
    assert set(found["totals"]["network"]) == {"dense_us", "sparse_us", "ratio"}
    assert found["difference"] == {"max_relative": 0.0, "frobenius": 0.0}
    assert [len(image) for image in found["top5"]["dense"]] == [5, 5, 5]
    assert found["network"] == "tiny"
    assert found["size"] == 16
    assert found["images"] == ["china.jpg"]
    assert found["repeats"] == 2
    files = f"--json {target.name} --plot {picture.name}"
    assert found["command"].endswith(f"run --network tiny --repeats 2 --batch 3 {files} --implementation xla")
    assert {"date", "device", "environment"} <= found.keys()
    assert {"versions", "build", "targets", "devices", "gpu_driver"} <= found["environment"].keys()
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("implementation", ["auto", "ecr", "pecr"])
def test_run_skips_zeros_and_says_what_ran(implementation: str, tmp_path: Path) -> None:
    if _native.why_missing("ecr", "cuda" if jax.default_backend() == "gpu" else "cpu", "float32"):
        pytest.skip("no native kernels here")
    target = tmp_path / "run.json"
    assert run("--implementation", implementation, "--json", target, "--precision", "highest") == 0
    found = json.loads(target.read_text())
    ran = {row["path"]: row["implementation"] for row in found["layers"]}
    on_gpu = jax.default_backend() == "gpu"
    # None takes layers without a pool, by PECR too, which has pools alone.
    of_none = {"ecr", "direct", "xla"} if on_gpu and implementation != "ecr" else {"ecr"}
    pooled_of_none = {"pecr", "direct"} if on_gpu else {"pecr"}
    assert ran["conv2_1"] in of_none
    assert ran["fc7"] in of_none
    assert ran["conv2_2"] in (pooled_of_none if implementation == "auto" else {implementation})
    assert found["difference"]["max_relative"] < 1e-5


@pytest.mark.parametrize("thresholds", [False, True])
def test_calibrate_looks_for_thresholds_if_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], thresholds: bool
) -> None:
    def calibrate(*_: Any, **options: Any) -> Any:
        raise UserError(f"thresholds={options['thresholds']}")

    monkeypatch.setattr(commands.calibration, "calibrate", calibrate)
    flags = ["--thresholds"] if thresholds else []
    assert main(["calibrate", "--network", "tiny", *flags, "--out", str(tmp_path / "plan.json")]) != 0
    assert f"thresholds={thresholds}" in capsys.readouterr().err


def test_calibrate_writes_a_plan_that_run_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, written = tmp_path / "plan.json", tmp_path / "run.json"
    assert main(["calibrate", "--network", "tiny", "--batch", "2", "--repeats", "2", "--out", str(target)]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in (*LAYERS, "choice", "zeros %"))
    chosen = {layer["path"]: layer["implementation"] for layer in json.loads(target.read_text())["layers"]}
    assert list(chosen) == LAYERS
    assert run("--batch", "2", "--plan", target, "--json", written) == 0
    found = json.loads(written.read_text())
    assert {row["path"]: row["implementation"] for row in found["layers"]} == chosen
    assert found["plan"] == target.name  # without the folders of this machine
    out = capsys.readouterr().out
    assert "plan plan.json" in " ".join(out.split())  # wrapped behind a long name of a device
    assert "The plan has nothing for" not in out
    assert run("--plan", target) == 0  # one image
    out = " ".join(capsys.readouterr().out.split())
    assert f"The plan has nothing for {len(LAYERS)} of {len(LAYERS)} layers as they are called here" in out
    assert "it has conv1_1 for inputs of (2, " in out
    assert run("--batch", "2", "--precision", "highest", "--plan", target) == 1
    assert "--plan: layer 'conv1_1' has precision='highest', not 'default'" in capsys.readouterr().err
    assert run("--plan", target, "--implementation", "xla") == 1
    assert "--implementation xla and --plan exclude each other" in capsys.readouterr().err
    assert run("--plan", tmp_path / "none.json") == 1
    assert "none.json: there is no such file" in capsys.readouterr().err


@pytest.mark.parametrize("seed", ["-1", "1.5", str(2**32), "a"])
def test_seeds_are_of_32_bits(seed: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--network", "tiny", "--seed", seed])
    assert f"'{seed}' is not a whole number from 0 to 2**32 - 1" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["densenet", "regnet"])
def test_run_of_a_network_of_another_kind(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = SMALL[name]
    network = Network("other", lambda *_, rngs: small.build(), 32, "few layers", preprocess)
    monkeypatch.setitem(models.NETWORKS, "other", network)
    assert run("--network", "other", "--precision", "highest", "--json", tmp_path / "run.json") == 0
    found = json.loads((tmp_path / "run.json").read_text())
    named = [layer for layer, _ in small.build().named_layers()]
    assert [row["path"] for row in found["layers"]] == [layer for layer in named if not layer.endswith("norm")]
    assert found["difference"]["max_relative"] < 1e-4


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_run_in_16_bits(dtype: str, tmp_path: Path) -> None:
    target = tmp_path / "run.json"
    assert run("--dtype", dtype, "--json", target, "--size", "20") == 0
    found = json.loads(target.read_text())
    assert found["layers"][0]["input_shape"] == [1, 20, 20, 3]
    assert found["difference"]["frobenius"] < 0.05


def test_run_shows_progress_from_the_start(
    weights: dict[str, np.ndarray], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[tuple[str, int | None]] = []

    @contextlib.contextmanager
    def recorded() -> Iterator[Progress]:
        steps.clear()
        yield lambda step, count: steps.append((step, count))

    monkeypatch.setattr(progress, "progress", recorded)
    measured = ["compiling the whole network", "timing the whole network"]
    measured += [f"compiling and timing {name}" for name in LAYERS]
    save_file(weights, tmp_path / "tiny.safetensors")
    for arguments, preparation in (
        ([], ["building tiny", "giving the layers their zeros"]),
        (
            ["--weights", tmp_path / "tiny.safetensors"],
            ["looking for the weights", "building tiny", "loading the weights"],
        ),
    ):
        assert run(*arguments) == 0
        uncounted = ["reading the photographs", *preparation, "recording the layers"]
        assert steps == [*((step, None) for step in uncounted), *((step, len(measured)) for step in measured)]


def test_run_with_weights_and_labels(
    weights: dict[str, np.ndarray], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file(weights, tmp_path / "tiny.safetensors")
    (tmp_path / "labels.txt").write_text("\n".join(f"name{i}" for i in range(1000)))
    image = np.random.default_rng(0).integers(0, 256, (40, 30, 3), np.uint8)
    pytest.importorskip("PIL.Image").fromarray(image).save(tmp_path / "photo.png")
    files = ["--weights", tmp_path / "tiny.safetensors", "--labels", tmp_path / "labels.txt"]
    assert run(*files, "--image", tmp_path / "photo.png") == 0
    out = capsys.readouterr().out
    assert "top 5 dense: name" in out
    assert "seeded" not in out


def test_run_of_several_photographs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image_module = pytest.importorskip("PIL.Image")
    values = np.random.default_rng(0).integers(0, 256, (2, 16, 16, 3), np.uint8)
    for name, value in zip("ab", values, strict=True):
        image_module.fromarray(value).save(tmp_path / f"{name}.png")
    files = [tmp_path / "a.png", tmp_path / "b.png"]
    assert run("--json", tmp_path / "run.json", "--batch", "2", "--image", *files) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "batch 4" in out
    assert all(f"top 5 {side} of {name}.png: class" in out for side in ("dense", "sparse") for name in "ab")
    found = json.loads((tmp_path / "run.json").read_text())
    assert found["images"] == ["a.png", "b.png"]
    assert len(found["top5"]["dense"]) == 4
    options = argparse.Namespace(image=files, batch=2)
    np.testing.assert_array_equal(networks.images_of(options, 16)[::2], values)


def test_run_by_itself_takes_few_samples_of_what_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(comparison, "_SECONDS", 0)
    samples: list[tuple[int, float]] = []
    measured = timing.per_call

    def per_call(functions: Any, operands: Any, repeats: int, seconds: float) -> Any:
        times = measured(functions, operands, repeats, seconds)
        samples.extend((each.repeats, seconds) for each in times.values())
        return times

    monkeypatch.setattr(timing, "per_call", per_call)
    assert main(["run", "--network", "tiny", "--json", str(tmp_path / "run.json")]) == 0
    assert samples == [(3, 0)] * 2 * len(LAYERS)
    assert json.loads((tmp_path / "run.json").read_text())["repeats"] is None


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"jax_sparse_conv {jax_sparse_conv.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--network", "vgg18"], "--network 'vgg18' is not one of alexnet, alexnet_cifar, "),
        (["--image", "nowhere.jpg"], "--image nowhere.jpg: there is no such file"),
        (["--image", "text.txt"], "--image text.txt cannot be read as an image: "),
        (["--labels", "nowhere.txt"], "--labels nowhere.txt cannot be read: "),
        (["--weights", "nowhere.safetensors"], "--weights nowhere.safetensors: there is no such file"),
        (["--weights", "text.txt"], "--weights text.txt is not a safetensors file: "),
        (["--weights", "."], "--weights . is a folder, not a weights file"),
        (["--implementation", "fast"], "--implementation 'fast' is not one of auto, xla, ecr,"),
        (["--size", "2"], "--size 2: x.shape=(1, 2, 2, 3) is too small"),
        (["--json", "nowhere/run.json"], "nowhere does not exist"),
        (["--plot", "nowhere/run.png"], "nowhere does not exist"),
        (["--json", "."], "is a folder"),
        (["--html", "nowhere/run.html"], "nowhere does not exist"),
        (["--html", "."], "is a folder"),
        (["--plot", "run.txt"], "--plot run.txt: the plot is a PNG, so the name must end in .png"),
        (["--plot", "run"], "--plot run: the plot is a PNG, so the name must end in .png"),
    ],
)
def test_run_fails_with_one_sentence(
    arguments: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("no photograph and no weights")
    assert run(*arguments) == 1
    _one_sentence(capsys, sentence)


@pytest.mark.parametrize("option", ["--batch", "--size", "--repeats"])
@pytest.mark.parametrize("text", ["abc", "0", "-1", "1.5"])
def test_run_says_which_counts_it_takes(option: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(f"{option}={text}")
    assert f"argument {option}: '{text}' is not a whole number of at least 1" in capsys.readouterr().err


def test_run_names_missing_and_misshapen_tensors(
    weights: dict[str, np.ndarray], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tiny.safetensors"
    save_file({name: value for name, value in weights.items() if name != "features.3.bias"}, path)
    assert run("--weights", path) == 1
    _one_sentence(capsys, f"jax_sparse_conv: --weights {path} does not fit the network", "features.3.bias")
    save_file(weights | {"features.5.weight": np.zeros((8, 8, 5, 5), np.float32)}, path)
    assert run("--weights", path) == 1
    _one_sentence(capsys, "features.5.weight")


@pytest.mark.parametrize(
    ("module", "package", "arguments"),
    [
        ("rich.console", "rich", []),
        ("matplotlib.figure", "matplotlib", ["--plot", "run.png"]),
        ("sklearn.datasets", "scikit-learn", []),
        ("PIL.Image", "Pillow", []),
        ("safetensors", "safetensors", ["--weights", "tiny.safetensors"]),
    ],
)
def test_run_says_how_to_install_what_is_missing(
    module: str, package: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    assert run(*arguments) == 1
    _one_sentence(capsys, package, "install it with pip install ", "jax-sparse-conv[examples]")


def test_run_says_why_an_implementation_cannot_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_native, "why_missing", lambda *_: "the extension is on holiday")
    assert run("--implementation", "ecr") == 1
    _one_sentence(capsys, "implementation='ecr' cannot run here: the extension is on holiday")


def _one_sentence(capsys: pytest.CaptureFixture[str], *parts: str) -> None:
    captured = capsys.readouterr()
    error = captured.err.strip().splitlines()[-1]
    assert error.startswith("jax_sparse_conv: ")
    assert "Traceback" not in captured.err
    for part in parts:
        assert part in error
