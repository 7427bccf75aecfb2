"""`jit_inference`: a model with its weights as one jitted function."""

from __future__ import annotations

import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_checks import feature_map
from networks import small_resnet, small_vgg
from platforms import PLATFORM

import jax_sparse_conv as jsc
from jax_sparse_conv import models
from jax_sparse_conv.nnx import jit_inference

pytestmark = pytest.mark.usefixtures("float32_products")


class Net(nnx.Module):
    """With what writes state while it trains, and a parameter that two layers share."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Conv(3, 8, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.again = nnx.Conv(8, 8, (3, 3), rngs=rngs)
        self.same = self.again
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x: jax.Array, scale: Any = 1.0, *, twice: bool = False) -> jax.Array:
        x = nnx.relu(self.norm(self.first(x)))
        x = nnx.relu(self.same(nnx.relu(self.again(x))))
        return self.head(self.dropout(x).mean((1, 2))) * scale * (2 if twice else 1)


@pytest.fixture
def x() -> jax.Array:
    return feature_map((2, 6, 6, 3))


def evaluating() -> Net:
    model = Net(nnx.Rngs(0))
    model.eval()
    return model


def same(found: Any, wanted: Any) -> None:
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_calls_as_the_model_is_called(x: jax.Array) -> None:
    model = evaluating()
    predict = jit_inference(model, static_argnames="twice")
    same(predict(x), model(x))
    same(predict(x, 0.5), 0.5 * model(x))
    same(predict(x, scale=jnp.float32(3), twice=True), 6 * model(x))


@pytest.mark.parametrize("build", [small_vgg, small_resnet])
def test_networks_give_what_nnx_jit_gives(build: Any) -> None:
    model = build()
    model.eval()
    models.fold_batch_norm(model)
    image = feature_map((1, 32, 32, 3))
    predict = jit_inference(model)
    wanted = nnx.jit(lambda model, x: model(x))(model, image)
    np.testing.assert_allclose(predict(image), wanted, rtol=1e-4, atol=1e-4)


def test_any_function_of_the_model(x: jax.Array) -> None:
    model = evaluating()
    features = jit_inference(model, lambda model, x: {"first": model.first(x)})
    same(features(x)["first"], model.first(x))


def test_weights_are_arguments_that_are_handed_over_flat(x: jax.Array) -> None:
    predict = jit_inference(evaluating())
    lowered = predict.lower(x)
    weights, arguments = lowered.in_tree.children()[0].children()[0], lowered.in_tree.children()[0].children()[1:]
    assert [child.num_leaves for child in weights.children()] == [1] * len(predict.prepared(x))
    assert [child.num_leaves for child in arguments] == [1]
    same(lowered.compile()(predict.prepared(x), x), predict(x))


def test_weights_stay_until_update(x: jax.Array) -> None:
    model, traces = evaluating(), []

    def counted(model: Net, x: jax.Array) -> jax.Array:
        traces.append(x)
        return model(x)

    predict = jit_inference(model, counted)
    before = predict(x)
    model.head.kernel[...] = 2 * model.head.kernel[...] + 1
    same(predict(x), before)
    predict.update(model)
    same(predict(x), model(x))
    assert len(traces) == 1
    assert not np.allclose(predict(x), before)


def test_update_takes_a_model_like_it_only(x: jax.Array) -> None:
    model = evaluating()
    predict, other = jit_inference(model), Net(nnx.Rngs(1))
    other.eval()
    predict.update(other)
    same(predict(x), other(x))
    jsc.nnx.replace(other)
    with pytest.raises(ValueError, match="the Net has other layers, settings or parameters than the model"):
        predict.update(other)
    wider = jit_inference(nnx.Conv(3, 4, (3, 3), rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"made of: bias is float32\[5\], not float32\[4\] \(replace"):
        wider.update(nnx.Conv(3, 5, (3, 3), rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"made of, such as bias, which is gone \(replace"):
        wider.update(nnx.Conv(3, 4, (3, 3), use_bias=False, rngs=nnx.Rngs(0)))
    with pytest.raises(TypeError, match=r"model is a dict, which is not an nnx\.Module"):
        predict.update({})  # type: ignore[arg-type]


@pytest.mark.skipif(PLATFORM != "cpu", reason="kernels have packed copies on a CPU only")
def test_update_takes_weights_that_are_packed_otherwise() -> None:
    model = jsc.nnx.SparseConv(32, 64, (3, 3), rngs=nnx.Rngs(0))
    x = jax.nn.relu(feature_map((1, 7, 7, 32)))
    predict = jit_inference(model)
    predict(x)
    nnx.update(model, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), nnx.state(model)))
    predict.update(model)
    found = predict(x.astype(jnp.bfloat16))
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(found.astype(jnp.float32), model(x), rtol=0.05, atol=0.05)


def test_arguments_of_any_name(x: jax.Array) -> None:
    model = evaluating()
    predict = jit_inference(model, lambda model, x, weights, args: model(x) * weights + args)
    same(predict(x, weights=2.0, args=1.0), 2 * model(x) + 1)


def test_references_are_refused() -> None:
    with nnx.var_defaults(ref=True):
        model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"the model's (kernel|bias) is a reference that anyone may write"):
        jit_inference(model)


def test_a_model_that_writes_its_state_is_refused(x: jax.Array) -> None:
    training = jit_inference(Net(nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"writes \S+ and 2 more while it runs.*model\.eval\(\)"):
        training(x)
    moving = jit_inference(evaluating(), lambda model, x: model.norm(x, use_running_average=False))
    with pytest.raises(ValueError, match=r"the model writes norm\.(mean|var) and 1 more"):
        moving(feature_map((2, 6, 6, 8)))


def test_what_a_model_sows_is_dropped(x: jax.Array) -> None:
    def sowing(model: Net, x: jax.Array) -> jax.Array:
        model.extra = nnx.Intermediate(x)
        return model(x)

    model = evaluating()
    same(jit_inference(model, sowing)(x), model(x))
    assert not hasattr(model, "extra")


def test_transformations(x: jax.Array) -> None:
    model = evaluating()
    predict = jit_inference(model)
    same(jax.vmap(predict)(x[:, None])[:, 0], model(x))
    gradient = jax.grad(lambda x: predict(x).sum())(x)
    same(gradient, jax.grad(lambda x: model(x).sum())(x))
    same(jax.jit(lambda x: predict(x) + 1)(x), model(x) + 1)
    same(jax.lax.map(predict, jnp.stack([x, x]))[1], model(x))
    assert jax.eval_shape(predict, x).shape == (2, 4)


def test_in_several_threads(x: jax.Array) -> None:
    model = evaluating()
    predict, found = jit_inference(model), {}

    def run(i: int) -> None:
        with jax.default_matmul_precision("highest"):  # a setting of each thread's own
            found[i] = predict(i * x)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(4):
        same(found[i], model(i * x))


@pytest.mark.skipif(PLATFORM != "cpu", reason="kernels have packed copies on a CPU only")
@pytest.mark.parametrize("implementation", [None, "ecr"])
def test_packed_kernels_are_read(implementation: str | None) -> None:
    model = jsc.nnx.SparseConv(32, 64, (3, 3), implementation=implementation, rngs=nnx.Rngs(0))
    x = jax.nn.relu(feature_map((1, 7, 7, 32)))
    wanted = model(x)
    shape = "x".join(map(str, jsc.pack(model.kernel[...]).packed.shape))  # type: ignore[union-attr]
    predict = jit_inference(model)
    same(predict(x), wanted)
    assert shape in predict.lower(x).as_text()
    assert not isinstance(model.kernel, jsc.nnx.PackedParam)
    model.kernel[...] = 2 * model.kernel[...]
    predict.update(model)
    same(predict(x), model(x))
    assert jsc.nnx.pack(model) == 1
    same(jit_inference(model)(x), predict(x))


@pytest.mark.skipif(PLATFORM != "cpu", reason="kernels have packed copies on a CPU only")
def test_what_is_not_packed_are_the_model_s_own_arrays() -> None:
    model = small_resnet()
    before = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(nnx.state(model))]
    predict = jit_inference(model)
    found = {leaf.unsafe_buffer_pointer() for leaf in predict._parts.weights}
    assert set(before) <= found


def test_arrays_of_numpy_are_put_on_the_device_once(x: jax.Array) -> None:
    model = evaluating()
    nnx.update(model, jax.tree.map(np.asarray, nnx.state(model, nnx.Param)))
    predict = jit_inference(model)
    wanted = predict(x)
    with jax.transfer_guard("disallow"):
        found = predict(x)
    same(found, wanted)


def test_errors_name_what_is_wrong() -> None:
    with pytest.raises(TypeError, match=r"model is a function, which is not an nnx\.Module"):
        jit_inference(lambda x: x)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="function=3 cannot be called"):
        jit_inference(evaluating(), 3)  # type: ignore[arg-type]
    shapes = nnx.eval_shape(lambda: Net(nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"the model's \S+ has no value, it is \w+\[.*\] only"):
        jit_inference(shapes)
