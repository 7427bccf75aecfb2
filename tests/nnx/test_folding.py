"""`replace(model, fold=True)`: batch norms in the kernels and biases of the layers in front of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_checks import close, expected, feature_map

import jax_sparse_conv as jsc
from jax_sparse_conv.nnx import SparseConv, SparseConvPool, SparseLinear, jit_inference, pack, replace
from jax_sparse_conv.nnx.folding import FoldedBatchNorm

pytestmark = pytest.mark.usefixtures("float32_products")

X = feature_map((2, 8, 8, 3))


def norm(features: int, seed: int = 1, **arguments: Any) -> nnx.BatchNorm:
    """A batch norm with statistics, scale and bias as of a trained network."""
    rng = np.random.default_rng(seed)
    made = nnx.BatchNorm(features, use_running_average=True, rngs=nnx.Rngs(0), **arguments)
    for variable, low, high in ((made.mean, -1, 1), (made.var, 0.3, 2), (made.scale, -1, 2), (made.bias, -1, 1)):
        if variable is not None:
            variable[...] = jnp.asarray(rng.uniform(low, high, features), variable.dtype)
    return made


def conv(c: int = 3, k: int = 8, **arguments: Any) -> nnx.Conv:
    return nnx.Conv(c, k, (3, 3), rngs=nnx.Rngs(0), bias_init=nnx.initializers.normal(), **arguments)


def folded(report: jsc.nnx.Report) -> dict[str, str | None]:
    return {entry.path: entry.folded_into for entry in report.folded}


def test_values_are_the_same() -> None:
    model = nnx.Sequential(
        conv(),
        norm(8),
        nnx.relu,
        conv(8, 8, use_bias=False, strides=2, padding="VALID", feature_group_count=2),
        norm(8, 2, use_scale=False),
        nnx.relu,
        conv(8, 6, padding="CIRCULAR"),
        norm(6, 3, use_bias=False, epsilon=0.1),
        conv(6, 6, use_bias=False),
        norm(6, 4, use_bias=False, use_scale=False),
        lambda x: x.mean((1, 2)),
        nnx.Linear(6, 5, use_bias=False, rngs=nnx.Rngs(0)),
        norm(5, 5),
        nnx.Linear(5, 4, rngs=nnx.Rngs(0)),
    )
    wanted = expected(model, X)
    paths = set(nnx.to_pure_dict(nnx.state(model))["layers"])
    report = replace(model, fold=True)
    close(model(X), wanted)
    close(jit_inference(model)(X), wanted)
    assert folded(report) == {f"layers.{n}": f"layers.{n - 1}" for n in (1, 4, 7, 9, 12)}
    assert [type(model.layers[n]) for n in (0, 1, 6)] == [SparseConv, FoldedBatchNorm, nnx.Conv]
    state = nnx.to_pure_dict(nnx.state(model))["layers"]
    assert set(state) == {0, 3, 6, 8, 11, 13} < paths
    assert set(state[3]) == set(state[11]) == {"kernel", "bias"}
    assert "5 layers swapped, 1 left, 5 batch norms folded" in str(report)
    assert "layers.4: BatchNorm -> FoldedBatchNorm (folded into layers.3)" in str(report)
    assert not replace(model, fold=True).folded


@pytest.mark.parametrize("kind", ["conv", "linear"])
@pytest.mark.parametrize(
    ("layer", "batch_norm", "given"),
    [
        ({"param_dtype": jnp.bfloat16}, {}, jnp.float32),
        ({"param_dtype": jnp.bfloat16}, {"param_dtype": jnp.bfloat16, "dtype": jnp.bfloat16}, jnp.bfloat16),
        ({"param_dtype": jnp.bfloat16}, {"param_dtype": jnp.bfloat16}, jnp.bfloat16),
        ({"dtype": jnp.bfloat16}, {"dtype": jnp.float16}, jnp.float32),
    ],
)
def test_dtypes_stay(kind: str, layer: dict[str, Any], batch_norm: dict[str, Any], given: Any) -> None:
    made = conv(**layer) if kind == "conv" else nnx.Linear(3, 8, rngs=nnx.Rngs(0), **layer)
    model = nnx.Sequential(made, norm(8, **batch_norm))
    x = X.astype(given)
    before, dtypes = model(x), (made.kernel.dtype, made.bias.dtype)
    replace(model, fold=True)
    after = model(x)
    assert (made.kernel.dtype, made.bias.dtype) == dtypes
    assert after.dtype == before.dtype
    np.testing.assert_allclose(np.asarray(after, np.float64), np.asarray(before, np.float64), rtol=5e-2, atol=1e-1)


class Model(nnx.Module):
    """`Sequential`s inside of `Sequential`s and of code of the model's own."""

    def __init__(self) -> None:
        self.stem = nnx.Sequential(conv(), nnx.Sequential(norm(8, 1), nnx.relu))
        self.blocks = nnx.List([nnx.Sequential(nnx.Sequential(conv(8, 8)), norm(8, n), nnx.relu) for n in range(2)])
        self.twice = nnx.Sequential(nnx.Sequential(), conv(8, 8), norm(8, 4))

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.twice(self.twice(x))


def test_nested_sequentials() -> None:
    model = Model()
    wanted = expected(model, X)
    report = replace(model, fold=True, implementation="xla")
    close(model(X), wanted)
    assert folded(report) == {
        "stem.layers.1.layers.0": "stem.layers.0",
        "blocks.0.layers.1": "blocks.0.layers.0.layers.0",
        "blocks.1.layers.1": "blocks.1.layers.0.layers.0",
        "twice.layers.2": "twice.layers.1",
    }
    assert model.stem.layers[0].implementation == "xla"


def test_sparse_masked_and_packed_layers() -> None:
    mask = jnp.asarray(np.tril(np.ones((3, 3, 8, 8), np.float32)))
    layer = SparseConv(3, 8, (3, 3), rngs=nnx.Rngs(0))
    model = nnx.Sequential(layer, norm(8), conv(8, 8, mask=mask), norm(8, 2))
    wanted = expected(model, X)
    pack(model)
    kind = type(layer.kernel)
    replace(model, fold=True)
    assert type(layer.kernel) is kind
    close(model(X), wanted, 1e-4)


def test_it_runs_under_transformations() -> None:
    def make() -> nnx.Module:
        model = nnx.Sequential(nnx.Conv(3, 8, (3, 3), rngs=nnx.Rngs(0)), norm(8))
        replace(model, fold=True)
        return model

    shapes, model = nnx.eval_shape(make), make()
    assert nnx.graphdef(shapes) == nnx.graphdef(model)
    close(nnx.jit(lambda model, x: model(x))(nnx.clone(model), X), np.asarray(model(X), np.float64))
    nnx.update(shapes, nnx.state(model))
    np.testing.assert_array_equal(shapes(X), model(X))


def test_a_model_without_batch_norms_says_so() -> None:
    model = nnx.Sequential(conv(), nnx.relu)
    report = replace(model, fold=True)
    assert not report.folded
    assert "1 layers swapped, 0 left, 0 batch norms folded (the model has none)" in str(report)
    assert "batch norm" not in str(replace(model))


class OwnNorm(nnx.BatchNorm):
    pass


class OwnSequential(nnx.Sequential):
    def __call__(self, x: jax.Array) -> jax.Array:  # type: ignore[override]
        return self.layers[1](self.layers[0](x) + 1)


class Attributes(nnx.Module):
    def __init__(self) -> None:
        self.conv, self.norm = conv(), norm(8)


class Holder(nnx.Module):
    """A model with some of what it has in several places."""

    def __init__(self, **attributes: Any) -> None:
        for name, value in attributes.items():
            setattr(self, name, value)


def shared_layer() -> nnx.Module:
    layer = conv()
    return Holder(a=nnx.Sequential(layer, norm(8)), b=layer)


def shared_layer_in_a_dict() -> nnx.Module:
    layer = conv()
    return Holder(a=nnx.Sequential(layer, norm(8)), b=nnx.data({"layer": layer}))


def shared_kernel() -> nnx.Module:
    one, two = conv(), conv()
    two.kernel = one.kernel
    return Holder(a=nnx.Sequential(one, norm(8)), b=two)


def shared_bias() -> nnx.Module:
    one, two = conv(), conv()
    two.bias = one.bias
    return Holder(a=nnx.Sequential(one, norm(8)), b=two)


def shared_norm() -> nnx.Module:
    batch_norm = norm(8)
    return nnx.Sequential(conv(), batch_norm, conv(8, 8), batch_norm)


def shared_inner() -> nnx.Module:
    inner = nnx.Sequential(conv(3, 3))
    return nnx.Sequential(inner, inner, norm(3))


def shared_list() -> nnx.Module:
    model = nnx.Sequential(conv(), norm(8))
    return Holder(a=model, layers=model.layers)


def stacked() -> nnx.Module:
    return nnx.vmap(lambda _: nnx.Sequential(nnx.Linear(3, 8, rngs=nnx.Rngs(0)), norm(8)))(jnp.arange(2))


def hooked() -> nnx.Module:
    layer = nnx.Linear(3, 8, rngs=nnx.Rngs(0), kernel_metadata={"on_get_value": lambda _, value: 2 * value})
    return nnx.Sequential(layer, norm(8))


def with_layer(layer: Any, **arguments: Any) -> Callable[[], nnx.Module]:
    return lambda: nnx.Sequential(layer, norm(8, **arguments))


def training() -> nnx.Module:
    model = nnx.Sequential(conv(), norm(8))
    model.train()
    return model


REFUSED: dict[str, tuple[Callable[[], nnx.Module], str]] = {
    "attributes": (Attributes, r"norm: no nnx\.Sequential says what it follows\. jax_sparse_conv\.nnx\.jit_inference"),
    "alone": (lambda: norm(8), r"\(model\): no nnx\.Sequential says"),
    "first": (lambda: nnx.Sequential(norm(3), conv()), r"layers\.0: no nnx\.Sequential says"),
    "own_sequential": (lambda: OwnSequential(conv(), norm(8)), r"layers\.1: no nnx\.Sequential says"),
    "own_norm": (
        lambda: nnx.Sequential(conv(), OwnNorm(8, use_running_average=True, rngs=nnx.Rngs(0))),
        "a subclass of BatchNorm may compute something else",
    ),
    "relu_between": (lambda: nnx.Sequential(conv(), nnx.relu, norm(8)), "relu in front of it is none of Conv, Sparse"),
    "norm_between": (lambda: nnx.Sequential(conv(), norm(8), norm(8)), "1 of 2.*BatchNorm in front of it is none of"),
    "pooled": (with_layer(SparseConvPool(3, 8, (3, 3), rngs=nnx.Rngs(0))), "SparseConvPool in front of it is none of"),
    "transposed": (
        with_layer(nnx.ConvTranspose(3, 8, (3, 3), rngs=nnx.Rngs(0))),
        "ConvTranspose in front of it is none of",
    ),
    "activation": (
        with_layer(SparseLinear(3, 8, activation="relu", rngs=nnx.Rngs(0))),
        "SparseLinear in front of it has activation='relu'",
    ),
    "own_function": (
        with_layer(conv(conv_general_dilated=lambda *a, **k: jax.lax.conv_general_dilated(*a, **k))),
        "Conv in front of it: conv_general_dilated=.* is a function of your own",
    ),
    "training": (training, r"use_running_average=False normalizes by .* model\.eval\(\)"),
    "axis": (with_layer(conv(), axis=1), "axis=1 is not -1"),
    "features": (
        lambda: nnx.Sequential(conv(3, 6), norm(8)),
        r"its kernel has shape \(3, 3, 3, 6\), not \(3, 3, 3, 8\)",
    ),
    "stacked": (stacked, r"its scale has shape \(2, 8\), not \(8,\)"),
    "hooked": (hooked, "its kernel has hooks"),
    "no_values": (lambda: nnx.eval_shape(with_layer(conv())), "has no value, only a shape"),
    "shared_layer": (shared_layer, r"a\.layers\.1: the Conv in front of it is used in several places"),
    "shared_layer_in_a_dict": (shared_layer_in_a_dict, "the Conv in front of it is used in several places"),
    "shared_kernel": (shared_kernel, "the kernel of the Conv in front of it is shared with another layer"),
    "shared_bias": (shared_bias, "the bias of the Conv in front of it is shared with another layer"),
    "shared_norm": (shared_norm, "it is used in several places"),
    "shared_inner": (shared_inner, "the Conv in front of it is used in several places"),
    "shared_list": (shared_list, "the list of layers that has it is used in several places"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_folded_is_named_and_nothing_changes(name: str) -> None:
    make, message = REFUSED[name]
    model = make()
    before = nnx.split(model)
    with pytest.raises(ValueError, match=rf"^fold=True folds all batch norms or none.*{message}"):
        replace(model, fold=True)
    after = nnx.split(model)
    assert before[0] == after[0]
    jax.tree.map(lambda a, b: a is b or np.testing.assert_array_equal(a, b), before[1], after[1])


def test_bad_arguments() -> None:
    model = nnx.Sequential(conv(), norm(8))
    for value in (X, "yes", 1, None):
        with pytest.raises(TypeError, match="is not True or False"):
            replace(model, fold=value)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="implementation='pecr' is not one of"):
        replace(model, fold=True, implementation="pecr")
    assert type(model.layers[0]) is nnx.Conv


def test_the_packages_networks_are_pointed_to_their_own_way() -> None:
    model = nnx.eval_shape(lambda: jsc.models.build("resnet18", rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"cannot fold 20 of 20.*jax_sparse_conv\.models\.fold_batch_norm"):
        replace(model, fold=True)
