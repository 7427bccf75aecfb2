"""Seeded weights with the zeros of a trained network, for when there is no weights file.

Random weights leave about half of every feature map zero, which would mislead. `set_sparsity_profile` keeps the random
directions of the kernels and sets every bias on given images. Each layer's input then has the zero fraction that a
profile gives it.

This is like a trained network:

- The zero fraction of every layer.
- Channels differ in it, and none is dead. Its logit is normal with a deviation of 0.9, as read off feature maps of
  ResNet-50 and DenseNet-169.
- Zeros come in patches, since each channel has its own threshold on a smooth response to the photograph.

The share of 2x2 pixel groups that hold a non-zero, ResNet-50 with this profile, with ImageNet weights, and with zeros
drawn independently:

    conv2_block3_2  56x56x64    .61  .68  .90
    conv3_block4_2  28x28x128   .56  .58  .74
    conv4_block1_2  14x14x256   .74  .75  .91
    conv4_block5_2  14x14x256   .40  .36  .55

This is not: channels respond to texture, never to an object, and the zeros hold for the given images. Another
photograph has fewer of them in deep layers. VGG-19, set on one and run on another, has 0.65 instead of 0.85 at conv5_4.
So give the images that will be run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_sparse_conv._src.api import ops
from jax_sparse_conv.models.chain import Chain
from jax_sparse_conv.models.layers import LAST, ConvNet
from jax_sparse_conv.models.profile_tables import profile_of
from jax_sparse_conv.models.squeezenet import SqueezeNet
from jax_sparse_conv.models.units import ConvUnit, Layer, PreActivation
from jax_sparse_conv.nnx import SparseLinear

# Deviation between channels of log(zeros / non-zeros).
CHANNEL_SPREAD = 0.9
# With fewer positions than this a channel's own zero fraction means little, and one threshold serves the whole layer.
_FEWEST_POSITIONS = 16


def set_sparsity_profile(
    model: ConvNet, images: jax.Array, profile: Mapping[str, float] | None = None, *, seed: int = 0
) -> dict[str, float]:
    """Scale the kernels and set the biases of a network with random weights so that its inputs have a profile's zeros.

    It works layer by layer, in place. First the kernel is scaled so that the convolution's result has a deviation of 1
    about its channels' means, as He initialisation intends. Then each channel's bias, or its batch norm's bias, is set
    so that the ReLU zeroes the channel's share. It is minus a quantile of what it is added to, after the pool where one
    follows. The result is deterministic for a seed. It takes about three times as long as a forward pass.

    Args:
      model: a network of this package.
      images: [N, H, W, 3], preprocessed, as the network will see them.
      profile: zero fraction in [0, 1) of the input of each layer by name. "features" is the last feature map of a
        network that averages it. Layers that it lacks keep a shift of 0. None is `profile_of(model)`,
        which is empty for a network of which no zeros are known (SqueezeNet).
      seed: of the channels' shares.

    Returns:
      The zero fraction that each layer's input (and a last feature map that is averaged) has now, on `images`.

    Raises:
      ValueError: a fraction that is no number in [0, 1), or a name in a given `profile` that is no layer.
    """
    targets = _targets(model, profile)
    rng = np.random.default_rng(seed)
    achieved: dict[str, float] = {}

    def adjust(name: str, layer: Layer, x: jax.Array, residual: jax.Array | None) -> None:
        achieved[name] = zero_fraction(x)
        _adjust(layer, x, residual, targets.get(name), rng)

    if not isinstance(model, (Chain, SqueezeNet)):
        last = model.features(images, before_layer=adjust)
        achieved |= {LAST: zero_fraction(last), "fc": zero_fraction(last.mean((1, 2)))}
    else:
        model(images, before_layer=adjust)
    return achieved


def zero_fraction(x: jax.Array) -> float:
    """Fraction of x that is zero."""
    return float(np.mean(np.asarray(x) == 0))


def _targets(model: ConvNet, profile: Mapping[str, float] | None) -> dict[str, float]:
    """Zero fraction to give the output of each layer: that of the input of the layer it feeds."""
    if profile is None:
        profile = profile_of(model)
    else:
        _check_profile(profile, {*(name for name, _ in model.named_layers()), LAST})
    return {name: profile[consumer] for name, consumer in model.feeds().items() if consumer in profile}


def _check_profile(profile: Mapping[str, float], names: set[str]) -> None:
    for name, fraction in profile.items():
        if name not in names:
            raise ValueError(f"profile has {name!r}, which is none of the network's layers")
        try:
            valid = 0 <= fraction < 1
        except TypeError:
            valid = False
        if not valid:
            raise ValueError(f"profile[{name!r}]={fraction!r} is not a zero fraction in [0, 1)")


def _adjust(
    layer: Layer, x: jax.Array, residual: jax.Array | None, target: float | None, rng: np.random.Generator
) -> None:
    kernel, shift = _parameters(layer)
    if shift is not None:
        shift.set_value(jnp.zeros_like(shift[...]))
    if not isinstance(layer, PreActivation):
        deviation = float(_deviation(layer, x))
        if deviation > 0:
            kernel.set_value((kernel[...] / deviation).astype(kernel.dtype))
    if target is not None:
        before_relu = _before_relu(layer, x, residual)
        values = np.asarray(before_relu, np.float32).reshape(-1, before_relu.shape[-1])
        shift.set_value(jnp.asarray(_shifts(values, target, rng), shift.dtype))


def _parameters(layer: Layer) -> tuple[Any, Any]:
    """The kernel and the bias closest to the ReLU, each None where the layer has none."""
    if isinstance(layer, SparseLinear):
        return layer.kernel, layer.bias
    norm = layer.batch_norm
    if isinstance(layer, PreActivation):
        return None, layer.bias if norm is None else norm.bias
    return layer.conv.kernel, layer.conv.bias if norm is None else norm.bias


@nnx.jit
def _deviation(layer: ConvUnit | SparseLinear, x: jax.Array) -> jax.Array:
    """Deviation of the layer's product about its channels' means."""
    if isinstance(layer, SparseLinear):
        # A channel has one position per image, too few for a mean of its own.
        return jnp.std(_product(layer, x).astype(jnp.float32))
    return jnp.sqrt(jnp.mean(jnp.var(layer.preactivation(x).astype(jnp.float32), axis=(0, 1, 2))))


@nnx.jit
def _before_relu(layer: Layer, x: jax.Array, residual: jax.Array | None) -> jax.Array:
    """What the ReLU takes, after the pool."""
    if isinstance(layer, SparseLinear):
        return _product(layer, x)
    if isinstance(layer, PreActivation):
        return layer.preactivation(x)
    return layer.pooled(layer.preactivation(x, residual))


def _product(layer: SparseLinear, x: jax.Array) -> jax.Array:
    bias = None if layer.bias is None else layer.bias[...]
    x, kernel, bias = layer.promote_dtype((x, layer.kernel[...], bias), dtype=layer.dtype)
    return ops.dense(x, kernel, bias, precision=layer.precision)


def _shifts(values: np.ndarray, target: float, rng: np.random.Generator) -> np.ndarray:
    """What to add to the columns of values [positions, channels] so that a share `target` of them is not positive."""
    positions, channels = values.shape
    if positions < _FEWEST_POSITIONS:
        flat = np.sort(values, axis=None)[None]
        return np.repeat(-_thresholds(flat, np.asarray([round(target * flat.size)])), channels)
    columns = np.sort(np.ascontiguousarray(values.T), axis=1)
    shares = channel_shares(target, channels, rng)
    return -_thresholds(columns, np.rint(shares * positions).astype(int))


def _thresholds(columns: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Between the `counts` smallest and the others of each row of columns [channels, positions], sorted."""
    last = columns.shape[1] - 1
    high = np.take_along_axis(columns, np.minimum(counts, last)[:, None], axis=1)[:, 0]
    low = np.take_along_axis(columns, np.clip(counts - 1, 0, last - 1 if last else 0)[:, None], axis=1)[:, 0]
    thresholds: np.ndarray = (np.where(counts == 0, high - 0.01, low) + high) / 2
    return thresholds


def channel_shares(target: float, channels: int, rng: np.random.Generator) -> np.ndarray:
    """Zero fractions [channels] whose mean is `target` and whose logits are normal with deviation `CHANNEL_SPREAD`."""
    if target == 0:
        return np.zeros(channels)
    spread = CHANNEL_SPREAD * rng.standard_normal(channels)
    low, high = -20.0, 20.0
    for _ in range(60):  # bisection: the mean rises with the centre
        centre = (low + high) / 2
        below = np.mean(1 / (1 + np.exp(-centre - spread))) < target
        low, high = (centre, high) if below else (low, centre)
    shares: np.ndarray = 1 / (1 + np.exp(-centre - spread))
    return shares
