"""Models that others wrote, in several frameworks, as functions of images; weights as each initialises them.

`shares_of` says how many zeros the layers of such a model have when it is trained.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

from jax_sparse_conv import models
from jax_sparse_conv.models.layers import LAST

Function = Callable[[Any, jax.Array], jax.Array]
Built = tuple[Function, Any]
"""A function of weights and images, and its weights."""

_STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))  # of ResNet-50: width, blocks, stride


class _Bottleneck(nnx.Module):
    def __init__(self, channels: int, width: int, stride: int, dtype: Any, rngs: nnx.Rngs) -> None:
        def conv(inputs: int, outputs: int, size: int, stride: int = 1) -> nnx.Conv:
            return nnx.Conv(inputs, outputs, (size, size), strides=stride, use_bias=False, dtype=dtype, rngs=rngs)

        self.conv1, self.norm1 = conv(channels, width, 1), nnx.BatchNorm(width, dtype=dtype, rngs=rngs)
        self.conv2, self.norm2 = conv(width, width, 3, stride), nnx.BatchNorm(width, dtype=dtype, rngs=rngs)
        self.conv3, self.norm3 = conv(width, 4 * width, 1), nnx.BatchNorm(4 * width, dtype=dtype, rngs=rngs)
        self.projects = stride != 1 or channels != 4 * width
        if self.projects:
            self.shortcut = conv(channels, 4 * width, 1, stride)
            self.norm4 = nnx.BatchNorm(4 * width, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = nnx.relu(self.norm1(self.conv1(x)))
        y = self.norm3(self.conv3(nnx.relu(self.norm2(self.conv2(y)))))
        return nnx.relu(y + (self.norm4(self.shortcut(x)) if self.projects else x))


class _ResNet(nnx.Module):
    """ResNet-50 as Flax's documentation would write it."""

    def __init__(self, dtype: Any, rngs: nnx.Rngs) -> None:
        self.stem = nnx.Conv(3, 64, (7, 7), strides=2, padding=3, use_bias=False, dtype=dtype, rngs=rngs)
        self.norm, channels, blocks = nnx.BatchNorm(64, dtype=dtype, rngs=rngs), 64, []
        for width, count, stride in _STAGES:
            for index in range(count):
                blocks.append(_Bottleneck(channels, width, 1 if index else stride, dtype, rngs))
                channels = 4 * width
        self.blocks = nnx.List(blocks)
        self.head = nnx.Linear(2048, 1000, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.norm(self.stem(x)))
        x = nnx.max_pool(x, (3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))
        for block in self.blocks:
            x = block(x)
        return self.head(jnp.mean(x, axis=(1, 2)))


class _LinenVgg(linen.Module):
    """VGG-16 with batch norms."""

    dtype: Any

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
            for _ in range(count):
                x = linen.Conv(width, (3, 3), dtype=self.dtype)(x)
                x = linen.relu(linen.BatchNorm(use_running_average=True, dtype=self.dtype)(x))
            x = linen.max_pool(x, (2, 2), strides=(2, 2))
        x = x.reshape(x.shape[0], -1)
        for _ in range(2):
            x = linen.relu(linen.Dense(4096, dtype=self.dtype)(x))
        return linen.Dense(1000, dtype=self.dtype)(x)


def _nnx_resnet50(x: jax.Array) -> Built:
    model = _ResNet(x.dtype, nnx.Rngs(0))
    model.eval()
    graph, state = nnx.split(model)
    return lambda state, x: nnx.merge(graph, state)(x), state


def nnx_resnet50_in_training() -> nnx.Module:
    """ResNet-50 of Flax's own layers, with the statistics of batch norms in training."""
    model = _ResNet(jnp.float32, nnx.Rngs(0))
    model.train()
    return model


def _own(name: str) -> Callable[[jax.Array], Built]:
    def build(x: jax.Array) -> Built:
        model = models.build(name, rngs=nnx.Rngs(0), dtype=x.dtype, param_dtype=x.dtype)
        model.eval()
        graph, state = nnx.split(model)
        return lambda state, x: nnx.merge(graph, state)(x), state

    return build


def _linen_vgg16(x: jax.Array) -> Built:
    model = _LinenVgg(x.dtype)
    return model.apply, jax.jit(model.init)(jax.random.key(0), x)  # type: ignore[return-value]


def _haiku_resnet50(x: jax.Array) -> Built:
    import haiku as hk

    def forward(x: jax.Array, is_training: bool) -> jax.Array:
        head = {"w_init": None}  # linear layers' own: this network's are zeros, and so would the results be
        return hk.nets.ResNet50(1000, logits_config=head)(x, is_training)

    network = hk.transform_with_state(forward)
    params, _ = weights = jax.jit(network.init, static_argnums=2)(jax.random.key(0), x, True)
    state = jax.tree.map(np.asarray, weights[1])  # averages of nothing: a mean of 0 and a variance of 1
    state = {name: {"average": np.full_like(v["average"], "var" in name), **_rest(v)} for name, v in state.items()}
    return lambda weights, x: network.apply(*weights, None, x, False)[0], (params, state)


def _rest(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: value for name, value in values.items() if name != "average"}


def _keras(name: str) -> Callable[[jax.Array], Built]:
    def build(x: jax.Array) -> Built:
        os.environ.setdefault("KERAS_BACKEND", "jax")
        import keras

        keras.utils.set_random_seed(0)
        keras.config.set_floatx(str(x.dtype))
        keras.config.set_dtype_policy(str(x.dtype))
        model = getattr(keras.applications, name)(
            weights=None, input_shape=x.shape[1:], classifier_activation=None, classes=1000
        )
        weights = [[v.value for v in each] for each in (model.trainable_variables, model.non_trainable_variables)]
        return lambda weights, x: model.stateless_call(*weights, x)[0], weights

    return build


def _equinox_resnet(x: jax.Array) -> Built:
    """A ResNet-50 with channels first; images come as [N, H, W, 3] as everywhere."""
    import equinox as eqx

    keys = iter(jax.random.split(jax.random.key(0), 64))

    def unit(inputs: int, outputs: int, size: int, stride: int = 1) -> Any:
        conv = eqx.nn.Conv2d(inputs, outputs, size, stride, size // 2, use_bias=False, dtype=x.dtype, key=next(keys))
        return conv.weight, jnp.ones(outputs, x.dtype), jnp.zeros(outputs, x.dtype)

    def run(unit: Any, y: jax.Array, stride: int = 1) -> jax.Array:
        kernel, scale, shift = unit
        pad = kernel.shape[2] // 2
        y = jax.lax.conv_general_dilated(y, kernel, (stride, stride), ((pad, pad), (pad, pad)))
        return y * scale[:, None, None] + shift[:, None, None]

    channels, weights, strides = 64, [unit(3, 64, 7)], []
    for width, count, first in _STAGES:
        for index in range(count):
            stride = 1 if index else first
            block = [unit(channels, width, 1), unit(width, width, 3), unit(width, 4 * width, 1)]
            block += [unit(channels, 4 * width, 1)] if not index else []
            weights.append(block)
            strides.append(stride)
            channels = 4 * width
    head = eqx.nn.Linear(2048, 1000, dtype=x.dtype, key=next(keys))
    pool = eqx.nn.MaxPool2d(3, 2, 1)

    def function(weights: Any, x: jax.Array) -> jax.Array:
        (stem, *blocks), head = weights
        y = jax.vmap(pool)(jax.nn.relu(run(stem, x.transpose(0, 3, 1, 2), 2)))
        for block, stride in zip(blocks, strides, strict=True):
            z = run(block[2], jax.nn.relu(run(block[1], jax.nn.relu(run(block[0], y)), stride)))
            y = jax.nn.relu(z + (run(block[3], y, stride) if len(block) == 4 else y))
        return jax.vmap(head)(y.mean((2, 3)))

    return function, (weights, head)


MODELS: dict[str, Callable[[jax.Array], Built]] = {
    "jsc_resnet50": _own("resnet50"),
    "nnx_resnet50": _nnx_resnet50,
    "linen_vgg16": _linen_vgg16,
    "haiku_resnet50": _haiku_resnet50,
    "keras_resnet50": _keras("ResNet50"),
    "keras_vgg16": _keras("VGG16"),
    "keras_densenet121": _keras("DenseNet121"),
    "keras_mobilenet": _keras("MobileNet"),
    "equinox_resnet50": _equinox_resnet,
}
"""By name: what builds the model for images [N, H, W, 3] of a dtype."""

ARCHITECTURES = {
    "jsc_resnet50": "resnet50",
    "nnx_resnet50": "resnet50",
    "linen_vgg16": "vgg16",
    "haiku_resnet50": "resnet50",
    "keras_resnet50": "resnet50",
    "keras_vgg16": "vgg16",
    "keras_densenet121": "densenet121",
    "equinox_resnet50": "resnet50",
}
"""The package's network of the same layers, where there is one."""


def shares_of(name: str) -> list[float]:
    """Shares of zeros that a model's ReLUs leave in a trained network, in order; empty where nothing is known.

    They are those of the layers behind, `jax_sparse_conv.models.profile_of`.
    """
    if name not in ARCHITECTURES:
        return []
    model = nnx.eval_shape(lambda: models.build(ARCHITECTURES[name], rngs=nnx.Rngs(0)))
    profile = models.profile_of(model)
    _, *shares = (profile[layer] for layer, _ in model.named_layers() if layer in profile)  # the first sees the image
    if isinstance(model, models.DenseNet):
        shares = [shares[0], *shares]  # its stem's ReLU is in front of a batch norm: as the first one behind
    return [*shares, profile[LAST]] if LAST in profile else shares
