"""Networks that Keras itself builds and saves, against the same networks of this package."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import nnx
from networks import assert_close

from jax_sparse_conv import models

os.environ.setdefault("KERAS_BACKEND", "jax")
keras = pytest.importorskip("keras", reason="Keras needs the extra [frameworks]")
numpy_files = pytest.importorskip("safetensors.numpy", reason="weights files need the extra [examples]")
if keras.backend.backend() != "jax":
    pytest.skip(f"KERAS_BACKEND is {keras.backend.backend()!r}, not 'jax'", allow_module_level=True)


NETWORKS = {"resnet50": "ResNet50", "densenet121": "DenseNet121"}
SIZE = 64

pytestmark = pytest.mark.usefixtures("float32_products")


@pytest.mark.parametrize("name", NETWORKS)
def test_weights_that_keras_saves(name: str, tmp_path: Path) -> None:
    theirs = build(NETWORKS[name])
    fill(theirs)
    x = np.random.default_rng(1).standard_normal((2, SIZE, SIZE, 3)).astype(np.float32)
    expected = np.asarray(theirs(x, training=False))

    theirs.save_weights(tmp_path / "w.weights.h5")
    again = build(NETWORKS[name])  # as a user who has Keras' file alone
    again.load_weights(tmp_path / "w.weights.h5")
    numpy_files.save_file({v.path: np.asarray(v) for v in again.variables}, tmp_path / "w.safetensors")
    ours = models.build(name, num_classes=10, rngs=nnx.Rngs(0))
    loaded = models.load_weights(ours, tmp_path / "w.safetensors")
    assert loaded == models.LoadedWeights("keras", (), ())
    ours.eval()
    assert_close(nnx.jit(lambda model, x: model(x))(ours, x), expected)
    assert np.ptp(expected, axis=0).min() > 0  # logits that tell the images apart


def build(network: str) -> Any:
    shape = (SIZE, SIZE, 3)
    return getattr(keras.applications, network)(weights=None, classes=10, input_shape=shape, classifier_activation=None)


def fill(model: Any) -> None:
    """Batch norms as after training: Keras starts them as the identity, which hides what is mixed up."""
    rng = np.random.default_rng(0)
    for variable in model.variables:
        kind = variable.path.rpartition("/")[2]
        if kind in ("gamma", "moving_variance"):
            variable.assign(rng.uniform(0.7, 1.3, variable.shape))
        elif kind in ("beta", "moving_mean", "bias"):
            variable.assign(0.1 * rng.standard_normal(variable.shape))
