"""Inputs, weights and float64 results of a benchmark's layer."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from benchmarks.cases import Layer

Array = npt.NDArray[np.float64]
Map = npt.NDArray[np.float32]


def iid_map(layer: Layer, batch: int, zeros: int, seed: int) -> Map:
    """Positive halves of normal values, each replaced by zero with probability zeros / 100."""
    rng = np.random.default_rng([seed, zeros, batch])
    values = np.abs(rng.standard_normal(layer.x_shape(batch), np.float32)) + np.float32(1e-3)
    return np.where(rng.random(values.shape, np.float32) < zeros / 100, np.float32(0), values)


def real_map(maps: Mapping[str, Map], layer: Layer, batch: int, first: int) -> Map:
    """`batch` images of the layer's real maps from image `first` on.

    A batch larger than the file has images goes on with mirrored, then with shifted copies.
    """
    images = maps[layer.maps or ""]
    if images.shape[1:] != layer.x_shape(1)[1:]:
        raise ValueError(f"maps[{layer.maps!r}] has shape {images.shape}, but the layer takes {layer.x_shape(1)}")
    chosen = []
    for index in range(first, first + batch):
        image, round_ = images[index % len(images)], (index - first) // len(images)
        shifted = np.roll(image, round_ // 2, axis=1)
        chosen.append(shifted[:, ::-1] if round_ % 2 else shifted)
    return np.stack(chosen)


def weights(layer: Layer, seed: int) -> tuple[Map, Map]:
    """Kernel (He initialisation) and bias."""
    rng = np.random.default_rng(seed)
    fan_in = np.prod(layer.kernel_shape[:-1])
    kernel = rng.standard_normal(layer.kernel_shape, np.float32) * np.float32(np.sqrt(2 / fan_in))
    return kernel, 0.1 * rng.standard_normal(layer.features, np.float32)


def float64_result(layer: Layer, x: Array, kernel: Array, bias: Array) -> Array:
    """The layer in float64 on the host, by a matrix product for each tap of the kernel."""
    if layer.op == "dense":
        return np.maximum(x @ kernel + bias, 0)
    out = -(-layer.size // layer.strides)
    missing = max(0, (out - 1) * layer.strides + layer.kernel - layer.size)
    sides = (missing // 2, missing - missing // 2)
    padded = np.pad(x, ((0, 0), sides, sides, (0, 0)))
    y = np.zeros((x.shape[0], out, out, layer.features)) + bias
    span = (out - 1) * layer.strides + 1
    for row in range(layer.kernel):
        for column in range(layer.kernel):
            tap = padded[:, row : row + span : layer.strides, column : column + span : layer.strides]
            y += tap @ kernel[row, column]
    y = np.maximum(y, 0)
    if layer.op == "conv":
        return y
    even = y[:, : out // 2 * 2, : out // 2 * 2]
    return even.reshape(x.shape[0], out // 2, 2, out // 2, 2, layer.features).max(axis=(2, 4))


def frobenius(found: Array, expected: Array) -> float:
    """|found - expected| / |expected|."""
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
