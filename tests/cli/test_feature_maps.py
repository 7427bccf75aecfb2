"""The command `maps`: what it writes, and how it fails."""

from __future__ import annotations

import csv
import functools
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from networks import SMALL, images_of

from jax_sparse_conv import models
from jax_sparse_conv.__main__ import main
from jax_sparse_conv._src.cli import feature_maps


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    build = functools.partial(models.VGG, (1, 2), features=(4, 8), hidden=16, pool_size=2)
    network = models.Network("tiny", build, 16, "three convolutions", models.preprocess)
    monkeypatch.setitem(models.NETWORKS, "tiny", network)


def maps(*arguments: str | Path) -> int:
    return main(["maps", "--network", "tiny", *map(str, arguments)])


def photograph(path: Path, seed: int) -> Path:
    values = np.random.default_rng(seed).integers(0, 256, (20, 30, 3), np.uint8)
    pytest.importorskip("PIL.Image").fromarray(values).save(path)
    return path


def test_maps_of_several_photographs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photographs = [photograph(tmp_path / f"{i}.png", i) for i in range(2)]
    out = tmp_path / "out"
    assert maps("--image", *photographs, "--batch", "2", "--out", out) == 0
    assert "3 maps of 4 images" in capsys.readouterr().out
    assert sorted(path.name for path in out.iterdir()) == sorted(feature_maps.FILES)
    arrays = dict(np.load(out / "maps.npz"))
    assert list(arrays) == ["tiny/conv1_1", "tiny/conv2_1", "tiny/conv2_2"]
    assert arrays["tiny/conv2_2"].shape == (4, 8, 8, 8)
    assert arrays["tiny/conv2_2"].dtype == np.float32
    content = json.loads((out / "maps.json").read_text())
    assert content["images"] == [Path(each).name for each in photographs]  # without folders
    assert {"date", "device", "environment", "command", "network", "seed"} <= content.keys()
    with (out / "maps.csv").open() as file:
        rows = {row["key"]: row for row in csv.DictReader(file)}
    for entry in content["layers"]:
        values = arrays[entry["key"]]
        assert entry["shape"] == list(values.shape)
        assert entry["zeros"]["1x1"] == pytest.approx(np.mean(values == 0))
        np.testing.assert_allclose(entry["channel_zeros"], np.mean(values == 0, axis=(0, 1, 2)))
        row = rows[entry["key"]]
        assert float(row["zeros_4x4"]) == pytest.approx(entry["zeros"]["4x4"], abs=1e-6)
        assert [int(row[n]) for n in ("images", "height", "width", "in_channels")] == list(values.shape)
        assert (row["kernel"], row["stride"], row["groups"]) == ("3", "1", "1")
    assert 0.3 < content["layers"][2]["zeros"]["1x1"] < 0.8
    with (out / "channels.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 3 + 4 + 8
    assert maps("--out", out) == 0  # again, with the sample photograph, over what is there
    assert np.load(out / "maps.npz")["tiny/conv1_1"].shape == (1, 16, 16, 3)


@pytest.mark.parametrize("name", ["densenet", "regnet"])
def test_every_convolution_and_nothing_else(name: str, tmp_path: Path) -> None:
    model, x = SMALL[name].build(), images_of(name, 1)
    models.fold_batch_norm(model)
    entries = feature_maps.write(tmp_path / "out", name, model, x, {})
    convolutions = {n: layer.conv for n, layer in model.named_layers() if isinstance(layer, models.ConvUnit)}
    assert [entry["layer"] for entry in entries] == list(convolutions)
    arrays, inputs = np.load(tmp_path / "out" / "maps.npz"), models.layer_inputs(model, x)
    for entry in entries:
        np.testing.assert_array_equal(arrays[entry["key"]], inputs[entry["layer"]][0])
        assert entry["groups"] == convolutions[entry["layer"]].feature_group_count
    assert max(entry["groups"] for entry in entries) == (3 if name == "regnet" else 1)


@pytest.mark.parametrize("size", [(4, 8), (5, 7), (1, 1)])
def test_groups_are_zero_where_all_their_pixels_are(size: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    values = np.where(rng.random((2, *size, 3)) < 0.8, -0.0, rng.standard_normal((2, *size, 3)))
    for rows, columns in feature_maps.GROUPS:
        groups = [
            not np.any(values[n, r : r + rows, c : c + columns, k])
            for n in range(2)
            for r in range(0, size[0], rows)
            for c in range(0, size[1], columns)
            for k in range(3)
        ]
        assert feature_maps.group_zeros(values, rows, columns) == pytest.approx(np.mean(groups))
    assert feature_maps.group_zeros(np.zeros((1, *size, 2)), 2, 4) == 1
    assert feature_maps.group_zeros(np.full((1, *size, 2), np.nan), 2, 4) == 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--network", "vgg18", "--out", "out"], "--network 'vgg18' is not one of alexnet"),
        (["--out", "nowhere/out"], "nowhere does not exist"),
        (["--out", "file"], "--out file is a file, not a folder to write to"),
        (["--out", "out", "--image", "nowhere.jpg"], "--image nowhere.jpg: there is no such file"),
        (["--out", "out", "--weights", "nowhere.safetensors"], "there is no such file"),
        (["--out", "out", "--size", "2"], "--size 2: x.shape=(1, 2, 2, 3) is too small"),
    ],
)
def test_maps_fails_with_one_sentence(
    arguments: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    assert maps(*arguments) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("jax_sparse_conv: ")
    assert sentence in error
    assert not (tmp_path / "out" / "maps.npz").exists()


def test_nothing_is_left_of_maps_that_failed(tmp_path: Path) -> None:
    model = SMALL["lenet"].build()
    with pytest.raises(ValueError, match="too small"):
        feature_maps.write(tmp_path / "out", "lenet", model, jax.numpy.zeros((1, 4, 4, 1)), {})
    assert not list((tmp_path / "out").iterdir())
