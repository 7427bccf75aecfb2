"""What a type checker knows of every public function, as a user's code has it. It is checked and not run."""

from __future__ import annotations

from typing import Any, assert_type

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx

import jax_sparse_conv as jsc
from jax_sparse_conv import linen

x = jnp.ones((1, 8, 8, 4))
kernel = jnp.ones((3, 3, 4, 4))
bias = jnp.ones((4,))


def operations(count: bool) -> None:
    assert_type(jsc.conv(x, kernel), jax.Array)
    assert_type(jsc.conv(x, kernel, bias, residual=x, activation="relu", implementation="ecr"), jax.Array)
    assert_type(jsc.conv(x, kernel, count_nonzeros=False, activation=jax.nn.relu), jax.Array)
    y, counts = jsc.conv(x, kernel, strides=(1, 1), padding=[(1, 1), (1, 1)], count_nonzeros=True)
    assert_type(y, jax.Array)
    assert_type(jsc.conv(y, kernel, nonzeros=counts, implementation="adaptive"), jax.Array)
    assert_type(jsc.conv(x, kernel, count_nonzeros=count), jax.Array | tuple[jax.Array, jax.Array])
    assert_type(jsc.conv_pool(x, kernel, pool="avg", window_shape=2, implementation="pecr"), jax.Array)
    assert_type(jsc.conv_pool(x, kernel, count_nonzeros=True), tuple[jax.Array, jax.Array])
    assert_type(jsc.dense(np.ones((1, 4), np.float32), kernel[0, 0], bias, implementation="xla"), jax.Array)
    assert_type(jsc.conv_general_dilated(x, kernel, (1, 1), "SAME", implementation="direct"), jax.Array)
    assert_type(jsc.density(x, axis=(1, 2)), jax.Array)
    packed = jsc.pack(kernel)
    assert_type(packed, jsc.PackedKernel)
    assert_type(jsc.conv(x, packed), jax.Array)


def mistakes() -> None:
    """Each line is an error to the checker; one that is none any more is an unused comment, which is an error, too."""
    jsc.conv(x, kernel, implementation="ercs")  # type: ignore[call-overload]
    jsc.conv(x, kernel, implementation="pecr")  # type: ignore[call-overload]
    jsc.conv(x, kernel, activation="gelu")  # type: ignore[call-overload]
    jsc.conv_pool(x, kernel, pool="sum")  # type: ignore[call-overload]
    jsc.dense(x, kernel, implementation="coo")  # type: ignore[arg-type]
    jsc.dense(jsc.CooStar.fromdense(x), kernel)  # type: ignore[arg-type]
    jsc.models.build("vgg20", rngs=nnx.Rngs(0))  # type: ignore[arg-type]
    jsc.nnx.SparseConv(4, 4, (3, 3), implementation="pecr", rngs=nnx.Rngs(0))  # type: ignore[arg-type]


def formats() -> None:
    ecr = jsc.ECR.fromdense(x, (3, 3))
    assert_type(ecr, jsc.ECR)
    assert_type(ecr.todense(), jax.Array)
    stored = jsc.CooStar.fromdense(x, kernel_shape=(3, 3, 4, 8), strides=2)
    assert_type(stored.todense(), jax.Array)
    assert_type(jsc.conv(stored, kernel, bias, implementation="coo"), jax.Array)
    assert_type(jsc.conv_pool(stored, kernel, count_nonzeros=True), tuple[jax.Array, jax.Array])
    assert_type(jsc.PECR.fromdense(x, (3, 3)).todense(), jax.Array)


def any_function() -> None:
    def function(weights: dict[str, jax.Array], images: jax.Array, scale: float = 1.0) -> dict[str, jax.Array]:
        return {"logits": scale * jsc.conv(images, weights["kernel"])}

    fast = jsc.accelerate(function)
    assert_type(fast({"kernel": kernel}, x, scale=2.0), dict[str, jax.Array])
    print(fast.report({"kernel": kernel}, jax.eval_shape(jnp.negative, x)))
    predict = jsc.jit_inference(function, {"kernel": kernel})
    assert_type(predict(x, scale=2.0), dict[str, jax.Array])
    predict.update({"kernel": 2 * kernel})
    print(predict.report(x), predict.lower(x).as_text())
    predict("x")  # type: ignore[arg-type]
    print(jax.jit(lambda x: x, compiler_options=jsc.compiler_options())(x))


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv = jsc.nnx.SparseConv(4, 4, (3, 3), activation="relu", implementation="ecr", rngs=rngs)
        self.pooled = jsc.nnx.SparseConvPool(4, 4, (3, 3), pool="max", implementation="pecr", rngs=rngs)
        self.dense = jsc.nnx.SparseLinear(4, 2, implementation=None, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        return jnp.asarray(self.dense(self.pooled(self.conv(images)).mean((1, 2))))


def with_map(model: Model, images: jax.Array) -> tuple[jax.Array, jax.Array]:
    return model(images), model.conv(images)


def layers() -> None:
    model = Model(nnx.Rngs(0))
    report = jsc.nnx.replace(model, implementation="direct", fold=True)
    assert_type(report, jsc.nnx.Report)
    jsc.nnx.set_implementation(model, conv="coo", conv_pool="pecr", dense="xla")
    assert_type(jsc.nnx.pack(model), int)
    jsc.nnx.unpack(model)
    assert_type(jsc.nnx.unreplace(model), jsc.nnx.Report)
    predict = jsc.nnx.jit_inference(model)
    assert_type(predict(x), jax.Array)
    predict.update(model)
    print(predict.report(x), jsc.export_checks())
    assert_type(predict.export(x, platforms=["cpu"]), jax.export.Exported)
    assert_type(jsc.nnx.jit_inference(model, with_map)(x), tuple[jax.Array, jax.Array])
    assert_type(jsc.nnx.jit_inference(nnx.Conv(4, 4, (3, 3), rngs=nnx.Rngs(0)))(x), jax.Array)
    plan = jsc.calibrate(model, [x])
    plan.save("plan.json")
    jsc.apply_plan(model, jsc.Plan.load("plan.json"))
    with jsc.nnx.record_calls() as calls:
        model(x)
    print([jsc.nnx.layer_paths(model)[id(call.layer)] for call in calls])


class Linen(nn.Module):
    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        y = linen.SparseConv(4, (3, 3), activation="relu", implementation="adaptive")(images)
        y = linen.SparseConvPool(4, (3, 3), pool="avg")(y)
        return jnp.asarray(linen.SparseDense(2, implementation="ecr")(y.mean((1, 2))))


def flax_linen() -> Any:
    with linen.sparse_layers("ecr"):
        return Linen().init(jax.random.key(0), x)


def networks() -> None:
    for name in jsc.models.NETWORKS:
        network = jsc.models.build(name, 10, rngs=nnx.Rngs(0))
        assert_type(network, jsc.models.ConvNet)
    images = np.zeros((1, 224, 224, 3), np.uint8)
    assert_type(jsc.models.preprocess(images, "keras"), jax.Array)
    model = jsc.models.vgg19(rngs=nnx.Rngs(0), implementation="pecr", precision="highest")
    assert_type(jsc.models.find_convention(model, ["features.0.weight"]), str)
    loaded = jsc.models.load_weights(model, "vgg19.safetensors")
    images_of = jsc.models.NETWORKS["vgg19"].preprocess(images, loaded.convention)
    assert_type(jsc.models.fold_batch_norm(model), int)
    jsc.models.set_network_implementation(model, "adaptive")
    jsc.models.set_sparsity_profile(model, images_of)
    assert_type(jsc.nnx.jit_inference(model)(images_of), jax.Array)
    print(jsc.models.layer_inputs(model, images_of), jsc.models.profile_of(model))


def blocks() -> None:
    one = jnp.ones((4,))
    layer = jsc.DenseBlockLayer(one, one, kernel[:1, :1], bias, kernel)
    transition = jsc.DenseTransition(jnp.ones((8,)), jnp.ones((8,)), jnp.ones((1, 1, 8, 4)))
    assert_type(jsc.dense_block(x, [layer], transition=transition), jax.Array)
    packed = jsc.pack_dense_block([layer], transition)
    assert_type(packed, jsc.PackedDenseBlock)
    assert_type(jsc.dense_block(x, packed, implementation=None), jax.Array)
