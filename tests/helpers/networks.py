"""Small networks for tests, and the same networks written in plain lax from a dict of their parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jax_sparse_conv import models
from jax_sparse_conv.models import inception, squeezenet
from jax_sparse_conv.models.units import Pool

VGG_DEPTHS, VGG_FEATURES, VGG_HIDDEN, VGG_POOL, CLASSES = (1, 2), (8, 16), 24, 3, 10
RESNET_DEPTHS, RESNET_WIDTH = (1, 2), 8
REGNET = ((1, 2), (8, 24), 8, CLASSES)  # depths, widths, group width
DENSENET = ((2, 1, 1), CLASSES)
INCEPTIONS = {
    "inception3a": inception.Module(4, 3, 5, 2, 3, 4),
    "inception3b": inception.Module(5, 4, 6, 2, 3, 2, Pool(3, 2, (0, 1))),
    "inception4a": inception.Module(3, 2, 4, 3, 5, 4, Pool(2, 2, (0, 1))),
}

FIRES = {
    "fire2": squeezenet.Module(3, 4),
    "fire3": squeezenet.Module(2, 5, True),
    "fire4": squeezenet.Module(4, 6),
}

_Build = TypeVar("_Build", bound=Callable[..., Any])


def copied(build: _Build) -> _Build:
    """`build`, whose model is made once for the same arguments, which takes a second, and copied for every call."""

    @functools.cache
    def made(*arguments: Any, **options: Any) -> Any:
        with jax.ensure_compile_time_eval():  # the first call may be traced
            return build(*arguments, **options)

    @functools.wraps(build)
    def copy(*arguments: Any, **options: Any) -> Any:
        return nnx.clone(made(*arguments, **options))

    return cast(_Build, copy)


@copied
def small_vgg(batch_norm: bool = False, seed: int = 0, **arguments: Any) -> models.VGG:
    model = models.VGG(
        VGG_DEPTHS,
        CLASSES,
        features=VGG_FEATURES,
        hidden=VGG_HIDDEN,
        pool_size=VGG_POOL,
        batch_norm=batch_norm,
        rngs=nnx.Rngs(seed),
        **arguments,
    )
    return randomized(model, seed)


@copied
def small_resnet(seed: int = 0, depths: tuple[int, ...] = RESNET_DEPTHS, **arguments: Any) -> models.ResNet:
    return randomized(models.ResNet(depths, CLASSES, width=RESNET_WIDTH, rngs=nnx.Rngs(seed), **arguments), seed)


def small_basic_resnet(seed: int = 0, **arguments: Any) -> models.ResNet:
    return small_resnet(seed, block="basic", **arguments)


@copied
def small_regnet(seed: int = 0, **arguments: Any) -> models.RegNetX:
    return randomized(models.RegNetX(*REGNET, stem_width=6, rngs=nnx.Rngs(seed), **arguments), seed)


@copied
def small_densenet(seed: int = 0, **arguments: Any) -> models.DenseNet:
    return randomized(models.DenseNet(*DENSENET, growth=4, width=8, rngs=nnx.Rngs(seed), **arguments), seed)


@copied
def small_googlenet(seed: int = 0, **arguments: Any) -> models.GoogLeNet:
    model = models.GoogLeNet(CLASSES, modules=INCEPTIONS, widths=(4, 5, 6), rngs=nnx.Rngs(seed), **arguments)
    return randomized(model, seed)


@copied
def small_squeezenet(seed: int = 0, **arguments: Any) -> models.SqueezeNet:
    stem = squeezenet.Stem(6, 3)
    return randomized(models.SqueezeNet(CLASSES, stem=stem, modules=FIRES, rngs=nnx.Rngs(seed), **arguments), seed)


@copied
def small_alexnet(seed: int = 0, **arguments: Any) -> models.AlexNet:
    model = models.AlexNet(CLASSES, widths=(4, 6, 8, 5, 6), hidden=12, pool_size=2, rngs=nnx.Rngs(seed), **arguments)
    return randomized(model, seed)


@copied
def small_alexnet_cifar(seed: int = 0, **arguments: Any) -> models.AlexNetCifar:
    return randomized(models.AlexNetCifar(CLASSES, widths=(4, 6, 8, 5, 6), rngs=nnx.Rngs(seed), **arguments), seed)


@copied
def small_lenet(seed: int = 0, **arguments: Any) -> models.LeNet5:
    return randomized(models.LeNet5(rngs=nnx.Rngs(seed), **arguments), seed)


def randomized(model: Any, seed: int) -> Any:
    """Biases and batch-norm statistics that are neither zero nor one."""
    rng = np.random.default_rng(seed)
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        if path[-1] != "kernel":
            positive = path[-1] in ("var", "scale")
            value = rng.uniform(0.5, 1.5, variable.shape) if positive else 0.3 * rng.standard_normal(variable.shape)
            variable.set_value(jnp.asarray(value, variable.dtype))
    return model


def tabulated(model: nnx.Module, x: jax.Array) -> str:
    """`nnx.tabulate`'s text. What it leaves in classes of the methods that they inherit, `nnx.capture` cannot wrap."""
    classes = {type(module): set(vars(type(module))) for _, module in nnx.iter_modules(model)}
    text = nnx.tabulate(model, x, console_kwargs={"width": 400})
    for kind, before in classes.items():
        for name in vars(kind).keys() - before:
            delattr(kind, name)
    return text


def parameters(model: nnx.Module) -> Any:
    """Nested dict of arrays, lists as dicts of ints."""
    return nnx.to_pure_dict(nnx.state(model))


def photographs(batch: int, height: int, width: int, seed: int = 0, channels: int = 3) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal((batch, height, width, channels)), jnp.float32)


# --- the networks in plain lax, from the nested dict of their parameters ----------------------------------------------


def dense_vgg(params: Any, x: jax.Array, epsilon: float = 1e-5) -> jax.Array:
    convs = iter(params["convs"].values())
    for depth in VGG_DEPTHS:
        for _ in range(depth):
            x = jax.nn.relu(dense_layer(next(convs), x, 1, 1, epsilon))
        x = max_pool(x, 2, 2)
    return dense_heads(params, average_to(x, VGG_POOL))


def dense_alexnet(params: Any, x: jax.Array) -> jax.Array:
    x = alexnet_features(params, x, 2, 3)
    return dense_heads(params, average_to(x, 2))


def dense_alexnet_cifar(params: Any, x: jax.Array) -> jax.Array:
    return dense_heads(params, average_to(alexnet_features(params, x, 5, 2), 1))


def alexnet_features(params: Any, x: jax.Array, padding: int, pool: int) -> jax.Array:
    for i, (strides, pad) in enumerate(((4, padding), (1, 2), (1, 1), (1, 1), (1, 1))):
        x = jax.nn.relu(dense_layer(params["convs"][i], x, strides, pad))
        x = max_pool(x, pool, 2) if i in (0, 1, 4) else x
    return x


def dense_lenet(params: Any, x: jax.Array) -> jax.Array:
    for i in (0, 1):
        x = max_pool(jax.nn.relu(dense_layer(params["convs"][i], x, 1, 0)), 2, 2)
    return dense_heads(params, average_to(x, 5))


def dense_heads(params: Any, x: jax.Array) -> jax.Array:
    x = x.reshape(x.shape[0], -1)
    *hidden, last = params["heads"].values()
    for head in hidden:
        x = jax.nn.relu(x @ head["kernel"] + head["bias"])
    return x @ last["kernel"] + last["bias"]


def dense_resnet(params: Any, x: jax.Array, version: str, epsilon: float = 1e-5) -> jax.Array:
    x = jax.nn.relu(dense_layer(params["stem"], x, 2, 3, epsilon))
    x = max_pool(x, 3, 2, (1, 1))
    for s, stage in params["stages"].items():
        for b, block in stage.items():
            strides = 2 if s > 0 and b == 0 else 1
            x = dense_block(block, x, strides, 0 if version == "v1" or len(block["convs"]) == 2 else 1, epsilon)
    return dense_average(params, x)


def dense_regnet(params: Any, x: jax.Array) -> jax.Array:
    x = jax.nn.relu(dense_layer(params["stem"], x, 2, 1))
    for stage in params["stages"].values():
        for b, block in stage.items():
            x = dense_block(block, x, 2 if b == 0 else 1, 1)
    return dense_average(params, x)


def dense_block(params: Any, x: jax.Array, strides: int, strided: int, epsilon: float = 1e-5) -> jax.Array:
    y, last = x, len(params["convs"]) - 1
    for i, layer in params["convs"].items():
        y = dense_layer(layer, y, strides if i == strided else 1, layer["conv"]["kernel"].shape[0] // 2, epsilon)
        y = y if i == last else jax.nn.relu(y)
    return jax.nn.relu(y + (dense_layer(params["shortcut"], x, strides, 0, epsilon) if "shortcut" in params else x))


def dense_densenet(params: Any, x: jax.Array, epsilon: float = 1e-5) -> jax.Array:
    x = max_pool(jax.nn.relu(dense_layer(params["stem"], x, 2, 3, epsilon)), 3, 2, (1, 1))
    for b, block in params["blocks"].items():
        if b > 0:
            transition = params["transitions"][b - 1]
            x = dense_layer(transition["conv"], jax.nn.relu(normalized(transition["norm"], x, epsilon)), 1, 0)
            x = lax.reduce_window(x, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") / 4
        for layer in block.values():
            y = jax.nn.relu(normalized(layer["norm"], x, epsilon))
            y = jax.nn.relu(dense_layer(layer["conv1"], y, 1, 0, epsilon))
            x = jnp.concatenate([x, dense_layer(layer["conv2"], y, 1, 1)], -1)
    return dense_average(params, jax.nn.relu(normalized(params["norm"], x, epsilon)))


def dense_googlenet(params: Any, x: jax.Array) -> jax.Array:
    def conv(layer: Any, x: jax.Array, strides: int = 1) -> jax.Array:
        padding = layer["conv"]["kernel"].shape[0] // 2
        return jax.nn.relu(dense_layer(layer, x, strides, padding, 1e-3))

    x = max_pool(conv(params["conv1"], x, 2), 3, 2, (0, 1))
    x = max_pool(conv(params["conv3"], conv(params["conv2"], x)), 3, 2, (0, 1))
    for module, pool in zip(params["inceptions"].values(), (None, 3, 2), strict=True):
        branches = [
            conv(module["conv1"], x),
            conv(module["conv3"], conv(module["conv2"], x)),
            conv(module["conv5"], conv(module["conv4"], x)),
            conv(module["conv7"], max_pool(x, 3, 1, (1, 1))),
        ]
        x = jnp.concatenate(branches, -1)
        x = x if pool is None else max_pool(x, pool, 2, (0, 1))
    return dense_average(params, x)


def dense_squeezenet(params: Any, x: jax.Array) -> jax.Array:
    def conv(layer: Any, x: jax.Array, strides: int = 1, padding: int = 0) -> jax.Array:
        return jax.nn.relu(dense_layer(layer, x, strides, padding))

    x = max_pool(conv(params["conv1"], x, 2), 3, 2, (0, 1))
    for fire, is_pooled in zip(params["fires"].values(), (False, True, False), strict=True):
        y = conv(fire["squeeze"], x)
        x = jnp.concatenate([conv(fire["expand1x1"], y), conv(fire["expand3x3"], y, 1, 1)], -1)
        x = max_pool(x, 3, 2, (0, 1)) if is_pooled else x
    return conv(params["conv10"], x).mean((1, 2))


def dense_average(params: Any, x: jax.Array) -> jax.Array:
    return x.mean((1, 2)) @ params["fc"]["kernel"] + params["fc"]["bias"]


def dense_layer(params: Any, x: jax.Array, strides: int, padding: int, epsilon: float = 1e-5) -> jax.Array:
    """Convolution, bias and batch norm, as far as there are any; as many groups as the kernel's shape says."""
    kernel = params["conv"]["kernel"]
    y = lax.conv_general_dilated(
        x,
        kernel,
        (strides, strides),
        [(padding, padding)] * 2,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=x.shape[-1] // kernel.shape[2],
    )
    return normalized(params, y + params["conv"].get("bias", 0), epsilon)


def normalized(params: Any, x: jax.Array, epsilon: float) -> jax.Array:
    if "batch_norm" not in params:
        return x
    norm = params["batch_norm"]
    return (x - norm["mean"]) / jnp.sqrt(norm["var"] + epsilon) * norm["scale"] + norm["bias"]


def max_pool(x: jax.Array, window: int, strides: int, padding: tuple[int, int] = (0, 0)) -> jax.Array:
    sides = ((0, 0), padding, padding, (0, 0))
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, window, window, 1), (1, strides, strides, 1), sides)


def average_to(x: jax.Array, size: int) -> jax.Array:
    """torch's adaptive average pool, one window at a time."""

    def windows(length: int) -> list[slice]:
        return [slice(i * length // size, -(-(i + 1) * length // size)) for i in range(size)]

    return jnp.stack(
        [jnp.stack([x[:, r, c].mean((1, 2)) for c in windows(x.shape[2])], 1) for r in windows(x.shape[1])], 1
    )


def assert_close(actual: Any, expected: Any, tolerance: float = 1e-5) -> None:
    """Relative to the largest expected value."""
    expected = np.asarray(expected, np.float64)
    np.testing.assert_allclose(
        np.asarray(actual, np.float64), expected, rtol=0, atol=tolerance * np.abs(expected).max()
    )


class Small(NamedTuple):
    """A small network, the same in plain lax, the images' height and width, and how many batch norms it has."""

    build: Callable[..., Any]
    dense: Callable[[Any, jax.Array], jax.Array]
    size: tuple[int, int]
    batch_norms: int


SMALL = {
    "vgg": Small(small_vgg, dense_vgg, (13, 18), 0),
    "vgg_bn": Small(functools.partial(small_vgg, True), dense_vgg, (13, 18), 3),
    "resnet": Small(small_resnet, functools.partial(dense_resnet, version="v1.5"), (33, 42), 12),
    "resnet_v1": Small(
        functools.partial(small_resnet, version="v1"), functools.partial(dense_resnet, version="v1"), (33, 42), 12
    ),
    "resnet_basic": Small(small_basic_resnet, functools.partial(dense_resnet, version="v1.5"), (33, 42), 8),
    "regnet": Small(small_regnet, dense_regnet, (19, 22), 12),
    "densenet": Small(small_densenet, dense_densenet, (34, 45), 12),
    "googlenet": Small(small_googlenet, dense_googlenet, (37, 50), 21),
    "squeezenet": Small(small_squeezenet, dense_squeezenet, (29, 38), 0),
    "alexnet": Small(small_alexnet, dense_alexnet, (67, 75), 0),
    "alexnet_cifar": Small(small_alexnet_cifar, dense_alexnet_cifar, (32, 35), 0),
    "lenet": Small(small_lenet, dense_lenet, (32, 30), 0),
}


def images_of(name: str, batch: int = 2) -> jax.Array:
    """Random images for a network of `SMALL`."""
    return photographs(batch, *SMALL[name].size, channels=1 if name == "lenet" else 3)
