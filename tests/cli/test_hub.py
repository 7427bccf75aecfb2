"""`--weights hub`: repositories of the Hugging Face hub, served here by a thread in its place."""

from __future__ import annotations

import functools
import hashlib
import http.server
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save

from jax_sparse_conv import models
from jax_sparse_conv.__main__ import main
from jax_sparse_conv._src.cli import hub

constants = pytest.importorskip("huggingface_hub.constants")
REPOSITORY = "owner/tiny.some_data"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
CLASSES = 7


class Hub(http.server.ThreadingHTTPServer):
    """Files by path, as the hub resolves them; `asked` are those that were read whole."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, bytes] = {}
        self.asked: list[str] = []

    def put(self, name: str, content: bytes) -> None:
        self.files[f"/{REPOSITORY}/resolve/main/{name}"] = content


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        content = self.server.files.get(self.path)
        self.send_response(404 if content is None else 200)
        if content is None:
            self.send_header("X-Error-Code", "EntryNotFound" if REPOSITORY in self.path else "RepoNotFound")
            content = b""
        else:
            self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()

    def do_GET(self) -> None:
        self.do_HEAD()
        if self.path in self.server.files:
            self.server.asked.append(self.path)
            self.wfile.write(self.server.files[self.path])

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The hub for this process, and an empty cache; as HF_ENDPOINT and HF_HUB_CACHE do for a new one."""
    made = Hub()
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    url = f"http://127.0.0.1:{made.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    for name in ("HF_HUB_DISABLE_XET", "HF_HUB_DISABLE_TELEMETRY"):
        monkeypatch.setattr(constants, name, True)
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> models.ConvNet:
    """A network that the registry and `hub` know."""
    build = functools.partial(models.VGG, (1,), features=(4,), hidden=8, pool_size=1)

    def with_classes(*_: Any, **arguments: Any) -> models.VGG:
        return build(CLASSES, **arguments)

    network = models.Network("tiny", with_classes, 8, "one convolution", models.preprocess)
    monkeypatch.setitem(models.NETWORKS, "tiny", network)
    monkeypatch.setitem(hub.REPOSITORIES, "tiny", REPOSITORY)
    return with_classes(rngs=nnx.Rngs(3))


def torchvision_file(model: models.ConvNet) -> bytes:
    names = {"conv1_1": "features.0", "fc6": "classifier.0", "fc7": "classifier.3", "fc8": "classifier.6"}
    tensors = {}
    for name, layer in model.named_layers():
        conv: Any = getattr(layer, "conv", layer)
        kernel = np.asarray(conv.kernel[...])
        kernel = kernel.transpose(3, 2, 0, 1) if kernel.ndim == 4 else kernel.T
        tensors[f"{names[name]}.weight"] = np.ascontiguousarray(kernel)
        tensors[f"{names[name]}.bias"] = np.asarray(conv.bias[...])
    return save(tensors)


def run(*arguments: str) -> int:
    return main(["run", "--network", "tiny", "--repeats", "1", *arguments])


def test_weights_names_and_statistics_come_from_the_hub_once(
    server: Hub, tiny: models.ConvNet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.put("model.safetensors", torchvision_file(tiny))
    settings = {"mean": [0.5, 0.5, 0.5], "std": [0.25, 0.25, 0.25]}
    labels = {"label_names": [f"n{i}" for i in range(CLASSES)], "label_descriptions": {"n0": "tench, a fish"}}
    server.put("config.json", json.dumps({"architecture": "vgg", "pretrained_cfg": settings, **labels}).encode())
    written = tmp_path / "run.json"
    assert run("--weights", "hub", "--precision", "highest", "--json", str(written)) == 0
    found = json.loads(written.read_text())
    assert found["weights"] == "hub"
    assert found["notes"] == [f"Weights of {REPOSITORY}."]
    names = {each["class"]: each["name"] for each in found["top5"]["dense"][0]}
    assert all(name == ("tench, a fish" if index == 0 else f"n{index}") for index, name in names.items())
    from jax_sparse_conv._src.cli import photograph

    image = photograph.load(None, 8)[None]
    with jax.default_matmul_precision("highest"):
        logits = np.asarray(tiny(((image / 255 - 0.5) / 0.25).astype(np.float32)), np.float64)[0]
    expected = np.exp(logits) / np.exp(logits).sum()
    for each in found["top5"]["dense"][0]:
        assert each["probability"] == pytest.approx(expected[each["class"]], rel=1e-4)
    assert run("--weights", f"hub:{REPOSITORY}") == 0  # by its name, and from the cache
    assert sorted(server.asked) == [
        f"/{REPOSITORY}/resolve/main/{name}" for name in ("config.json", "model.safetensors")
    ]
    assert f"Weights of {REPOSITORY}." in capsys.readouterr().out


def test_without_names_of_classes_it_says_so(
    server: Hub, tiny: models.ConvNet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.put("model.safetensors", torchvision_file(tiny))
    server.put("config.json", b'{"architecture": "vgg", "label_names": {"1": "a", "5": "b"}}')
    assert run("--weights", "hub") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "top 5 dense: class " in out
    assert f"{REPOSITORY} has no names of the classes; --labels takes a file of them." in out
    (tmp_path / "labels.txt").write_text("\n".join(f"mine{i}" for i in range(CLASSES)))
    assert run("--weights", "hub", "--labels", str(tmp_path / "labels.txt")) == 0
    assert "top 5 dense: mine" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("weights", "sentence"),
    [
        ("hub:owner/nothing", "--weights hub:owner/nothing: model.safetensors cannot be had: "),
        (f"hub:{REPOSITORY}", f"--weights hub:{REPOSITORY}: model.safetensors cannot be had: "),
        ("hub:a/b/c", "--weights hub:a/b/c: model.safetensors cannot be had: "),
        ("hub:", "--weights hub:: model.safetensors cannot be had: "),
    ],
)
def test_what_cannot_be_had_is_one_sentence(
    weights: str, sentence: str, server: Hub, tiny: models.ConvNet, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--weights", weights) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"jax_sparse_conv: {sentence}")


def test_a_hub_that_is_not_there(
    tiny: models.ConvNet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert run("--weights", "hub") == 1
    assert f"--weights hub:{REPOSITORY}: model.safetensors cannot be had: " in capsys.readouterr().err


def test_networks_without_a_known_repository(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--network", "lenet5", "--weights", "hub"]) == 1
    error = capsys.readouterr().err
    assert "--weights hub: no repository with weights of lenet5 is known, only of densenet121," in error
    assert "hub:OWNER/NAME" in error


def test_the_library_is_optional(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert main(["run", "--network", "vgg19", "--weights", "hub"]) == 1
    assert 'install it with pip install "jax-sparse-conv[hub]"' in capsys.readouterr().err


def test_every_repository_is_of_a_network() -> None:
    assert hub.REPOSITORIES.keys() <= models.NETWORKS.keys()
    assert hub.REPOSITORIES["resnet50"] == "timm/resnet50.tv_in1k"
    assert hub.REPOSITORIES["regnetx_1_6gf"] == "timm/regnetx_016.pycls_in1k"
