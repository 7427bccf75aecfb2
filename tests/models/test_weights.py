"""Weights files of torchvision, timm and Keras against the networks they describe in plain lax."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from networks import (
    CLASSES,
    VGG_HIDDEN,
    assert_close,
    dense_resnet,
    photographs,
    small_resnet,
    small_vgg,
)
from weights_files import (
    Tensors,
    keras_resnet,
    keras_resnet_parameters,
    keras_vgg,
    run_keras_vgg,
    run_torch_vgg,
    torch_resnet,
    torch_resnet_parameters,
    torch_vgg,
)

from jax_sparse_conv import models

pytest.importorskip("safetensors", reason="weights files need the extra [examples]")

from safetensors.flax import save_file as save_jax
from safetensors.numpy import save_file

forward = nnx.jit(lambda model, x: model(x))


pytestmark = pytest.mark.usefixtures("float32_products")


# --- round trips -----------------------------------------------------------------------------------------------------

CASES: dict[str, tuple[Callable[[], Any], Callable[[], Tensors], str, Callable[[Tensors, jax.Array], jax.Array]]] = {
    "vgg torchvision": (small_vgg, torch_vgg, "torchvision", run_torch_vgg),
    "vgg_bn torchvision": (lambda: small_vgg(True), lambda: torch_vgg(True), "torchvision", run_torch_vgg),
    "vgg timm": (small_vgg, lambda: torch_vgg(timm=True), "timm", run_torch_vgg),
    "vgg_bn timm": (lambda: small_vgg(True), lambda: torch_vgg(True, True), "timm", run_torch_vgg),
    "vgg keras": (small_vgg, keras_vgg, "keras", run_keras_vgg),
    "resnet torchvision": (
        small_resnet,
        torch_resnet,
        "torchvision",
        lambda tensors, x: dense_resnet(torch_resnet_parameters(tensors), x, "v1.5"),
    ),
    "resnet keras": (
        small_resnet,
        keras_resnet,
        "keras",
        lambda tensors, x: dense_resnet(keras_resnet_parameters(tensors), x, "v1", epsilon=1.001e-5),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_loaded_network_computes_what_its_framework_does(case: str, tmp_path: Path) -> None:
    build, write, convention, run = CASES[case]
    tensors, model, x = write(), build(), photographs(2, 17, 14)
    save_file(tensors, tmp_path / "w.safetensors")
    loaded = models.load_weights(model, tmp_path / "w.safetensors")
    assert loaded == models.LoadedWeights(convention, (), ())
    expected = jax.jit(lambda v: run(tensors, v))(x)
    assert_close(forward(model, x), expected)
    if models.fold_batch_norm(model):
        assert_close(forward(model, x), expected)


def test_keras_sets_what_keras_does_differently(tmp_path: Path) -> None:
    save_file(keras_resnet(), tmp_path / "w.safetensors")
    model = small_resnet(version="v1.5")
    models.load_weights(model, tmp_path / "w.safetensors")
    assert model.version == "v1"
    assert {m.epsilon for _, m in nnx.iter_modules(model) if isinstance(m, nnx.BatchNorm)} == {1.001e-5}


def test_loading_twice_is_loading_once(tmp_path: Path) -> None:
    save_file(keras_resnet(), tmp_path / "w.safetensors")
    model = small_resnet()
    models.load_weights(model, tmp_path / "w.safetensors")
    once = np.asarray(model.stem.batch_norm.mean[...])
    models.load_weights(model, tmp_path / "w.safetensors")
    assert_close(model.stem.batch_norm.mean[...], once, 0)


@pytest.mark.parametrize("stored", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("param_dtype", [jnp.float32, jnp.bfloat16])
def test_stored_dtype_becomes_the_parameter_dtype(stored: Any, param_dtype: Any, tmp_path: Path) -> None:
    tensors = torch_vgg()
    save_jax({name: jnp.asarray(value, stored) for name, value in tensors.items()}, tmp_path / "w.safetensors")
    model = small_vgg(param_dtype=param_dtype)
    models.load_weights(model, tmp_path / "w.safetensors")
    assert {v.dtype for v in jax.tree.leaves(nnx.state(model, nnx.Param))} == {jnp.dtype(param_dtype)}
    expected = tensors["features.0.weight"].transpose(2, 3, 1, 0)
    assert_close(model.convs[0].conv.kernel[...].astype(jnp.float32), expected, 1e-2)


# --- errors ----------------------------------------------------------------------------------------------------------


def test_a_file_that_is_not_there_or_not_one(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no weights file .*none\.safetensors"):
        models.load_weights(small_vgg(), tmp_path / "none.safetensors")
    with pytest.raises(TypeError, match=r"path=None is no path; a str or an os\.PathLike of one is"):
        models.load_weights(small_vgg(), None)  # type: ignore[arg-type]
    with pytest.raises(IsADirectoryError, match="is a folder, not a weights file"):
        models.load_weights(small_vgg(), tmp_path)
    (tmp_path / "text").write_text("not weights at all")
    with pytest.raises(ValueError, match="is not a safetensors file"):
        models.load_weights(small_vgg(), tmp_path / "text")
    save_file({"something": np.zeros(3, np.float32)}, tmp_path / "w.safetensors")
    with pytest.raises(ValueError, match=r"no tensor has a name that torchvision, timm, keras give a VGG.*something"):
        models.load_weights(small_vgg(), tmp_path / "w.safetensors")


def test_tensors_that_do_not_fit_are_named_and_change_nothing(tmp_path: Path) -> None:
    tensors = torch_vgg()
    del tensors["features.3.bias"]
    tensors["features.99.weight"] = np.zeros(3, np.float32)
    tensors["classifier.6.weight"] = np.zeros((7, VGG_HIDDEN), np.float32)
    save_file(tensors, tmp_path / "w.safetensors")
    model = small_vgg()
    before = nnx.to_pure_dict(nnx.state(model))
    with pytest.raises(ValueError, match="does not fit the network") as error:
        models.load_weights(model, tmp_path / "w.safetensors")
    text = str(error.value)
    assert "1 missing: features.3.bias" in text
    assert "1 unexpected: features.99.weight" in text
    assert f"1 misshapen: classifier.6.weight is [7, {VGG_HIDDEN}] and must be [{CLASSES}, {VGG_HIDDEN}]" in text
    after = nnx.to_pure_dict(nnx.state(model))
    jax.tree.map(np.testing.assert_array_equal, before, after)


@pytest.mark.parametrize(("dtype", "name"), [(np.int8, "I8"), (np.bool_, "BOOL")])
@pytest.mark.parametrize("partial", [False, True])
def test_tensors_without_a_float_dtype_are_refused(dtype: Any, name: str, partial: bool, tmp_path: Path) -> None:
    tensors = torch_vgg()
    tensors["features.0.weight"] = tensors["features.0.weight"].astype(dtype)
    save_file(tensors, tmp_path / "w.safetensors")
    sentence = f"1 mistyped: features.0.weight is {name} and must be one of F64, F32, F16, BF16"
    with pytest.raises(ValueError, match=sentence):
        models.load_weights(small_vgg(), tmp_path / "w.safetensors", partial=partial)


def test_partial_reports_what_is_missing_and_what_is_ignored(tmp_path: Path) -> None:
    tensors = {name: value for name, value in keras_resnet().items() if not name.startswith("conv3_block2_3_conv")}
    tensors["conv9/kernel"] = np.zeros(3, np.float32)
    save_file(tensors, tmp_path / "w.safetensors")
    model = small_resnet()
    kept = np.asarray(model.stages[1][1].convs[2].conv.kernel[...])
    loaded = models.load_weights(model, tmp_path / "w.safetensors", partial=True)
    assert loaded == models.LoadedWeights("keras", ("conv3_block2_3_conv/kernel",), ("conv9/kernel",))
    assert_close(model.stages[1][1].convs[2].conv.kernel[...], kept, 0)
    tensors["predictions/bias"] = np.zeros(3, np.float32)
    save_file(tensors, tmp_path / "w.safetensors")
    with pytest.raises(ValueError, match=r"1 misshapen: predictions/bias is \[3\] and must be \[10\]"):
        models.load_weights(model, tmp_path / "w.safetensors", partial=True)


def test_folded_networks_take_no_weights(tmp_path: Path) -> None:
    model = small_resnet()
    models.fold_batch_norm(model)
    with pytest.raises(ValueError, match="load weights before fold_batch_norm"):
        models.load_weights(model, tmp_path / "w.safetensors")


def test_without_safetensors_the_error_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"pip install 'jax-sparse-conv\[examples\]'"):
        models.load_weights(small_vgg(), tmp_path / "w.safetensors")
