"""The example that classifies a photograph."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

import pytest

from jax_sparse_conv import models
from jax_sparse_conv.models import VGG, Network, preprocess

pytest.importorskip("sklearn")
pytest.importorskip("PIL")


def test_classify_photo_loses_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    build = functools.partial(VGG, (1, 2), features=(4, 8), hidden=16, pool_size=2)
    monkeypatch.setitem(models.NETWORKS, "tiny", Network("tiny", build, 32, "three convolutions", preprocess))
    path = Path(__file__).parents[2] / "examples" / "classify_photo.py"
    spec = importlib.util.spec_from_file_location("classify_photo", path)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    assert example.main(["--network", "tiny", "--size", "32"]) < 2e-3  # TF32
    out = capsys.readouterr().out
    assert "sparse: class " in out
    assert "dense: class " in out
