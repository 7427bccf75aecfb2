"""Inputs, weights and float64 results of a benchmark's layer."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.common.cases import Layer

Array = npt.NDArray[np.float64]
Map = npt.NDArray[np.float32]


def iid_map(layer: Layer, batch: int, zeros: int, seed: int) -> Map:
    """Positive halves of normal values, each replaced by zero with probability zeros / 100."""
    rng = np.random.default_rng([seed, zeros, batch])
    values = np.abs(rng.standard_normal(layer.x_shape(batch), np.float32)) + np.float32(1e-3)
    return np.where(rng.random(values.shape, np.float32) < zeros / 100, np.float32(0), values)


def read_maps(path: Path) -> dict[str, Map]:
    """Real maps by "network/layer", [N, H, W, C], from an npz file or from a folder of `jax_sparse_conv maps`.

    Keys lose Keras's ending "_conv", with and without which layers are found.

    Raises:
      ValueError: a file that is not an npz file of arrays.
    """
    file = path / "maps.npz" if path.is_dir() else path
    try:
        with np.load(file) as arrays:
            return {key.removesuffix("_conv"): arrays[key] for key in arrays.files}
    except (AttributeError, EOFError, TypeError, ValueError, zipfile.BadZipFile) as error:
        raise ValueError(f"--maps {path} is not an npz file of arrays") from error


def real_map(maps: Mapping[str, Map], layer: Layer, batch: int, first: int) -> Map:
    """`batch` images of the layer's real maps from image `first` on.

    A batch larger than the file has images goes on with mirrored, then with shifted copies.
    """
    images = maps[_key(layer)]
    if images.shape[1:] != layer.x_shape(1)[1:]:
        raise ValueError(f"maps[{layer.maps!r}] has shape {images.shape}, but the layer takes {layer.x_shape(1)}")
    chosen = []
    for index in range(first, first + batch):
        image, round_ = images[index % len(images)], (index - first) // len(images)
        shifted = np.roll(image, round_ // 2, axis=1)
        chosen.append(shifted[:, ::-1] if round_ % 2 else shifted)
    return np.stack(chosen)


def has_maps(maps: Mapping[str, Map], layer: Layer) -> bool:
    """Whether there are real maps of the layer."""
    return layer.maps is not None and _key(layer) in maps


def _key(layer: Layer) -> str:
    return (layer.maps or "").removesuffix("_conv")


def weights(layer: Layer, seed: int) -> tuple[Map, Map]:
    """Kernel (He initialisation) and bias."""
    rng = np.random.default_rng(seed)
    fan_in = np.prod(layer.kernel_shape[:-1])
    kernel = rng.standard_normal(layer.kernel_shape, np.float32) * np.float32(np.sqrt(2 / fan_in))
    return kernel, 0.1 * rng.standard_normal(layer.out_channels, np.float32)


def float64_result(layer: Layer, x: Array, kernel: Array, bias: Array) -> Array:
    """The layer in float64 on the host, by a matrix product for each tap of the kernel."""
    if layer.op == "dense":
        return np.maximum(x @ kernel + bias, 0)
    out = -(-layer.size // layer.strides)
    missing = max(0, (out - 1) * layer.strides + layer.kernel - layer.size)
    sides = (missing // 2, missing - missing // 2)
    padded = np.pad(x, ((0, 0), sides, sides, (0, 0)))
    y = np.zeros((x.shape[0], out, out, layer.out_channels)) + bias
    span = (out - 1) * layer.strides + 1
    for row in range(layer.kernel):
        for column in range(layer.kernel):
            tap = padded[:, row : row + span : layer.strides, column : column + span : layer.strides]
            y += tap @ kernel[row, column]
    y = np.maximum(y, 0)
    if layer.op == "conv":
        return y
    even = y[:, : out // 2 * 2, : out // 2 * 2]
    return even.reshape(x.shape[0], out // 2, 2, out // 2, 2, layer.out_channels).max(axis=(2, 4))


def frobenius(found: Array, expected: Array) -> float:
    """|found - expected| / |expected|."""
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
