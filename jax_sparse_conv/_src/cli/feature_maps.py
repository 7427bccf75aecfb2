"""Every convolution input of a network on images, as a data set: one npz of the maps and lists of their zeros.

Xu et al. published such maps of VGG-19 beside the 2019 version of their paper; they can no longer be had. A folder
holds four files:

- `maps.npz`: float32 [N, H, W, C] under "network/layer", exact zeros kept.
- `maps.json` and `maps.csv`: an entry per layer, with shapes and zero fractions.
- `channels.csv`: a row per layer and channel.
"""

from __future__ import annotations

import csv
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jax_sparse_conv.models.layers import ConvNet, set_network_implementation
from jax_sparse_conv.models.units import ConvUnit, Layer

FILES = ("maps.npz", "maps.json", "maps.csv", "channels.csv")
# Rows and columns of the groups of pixels for which a kernel may skip a channel if it is zero in all of them.
GROUPS = ((1, 1), (2, 2), (2, 4), (4, 4))


def write(
    folder: Path,
    network: str,
    model: ConvNet,
    x: jax.Array,
    header: dict[str, Any],
    advance: Callable[[str, int | None], None] = lambda step, steps: None,
) -> list[dict[str, Any]]:
    """Run a network densely and write every convolution's input and the lists into `folder`.

    Args:
      folder: where to; made if it does not exist. Files of that name are replaced, once all is there.
      network: first part of the maps' keys.
      model: left with implementation "xla".
      x: its input, [N, H, W, C].
      header: what `maps.json` says beside the list.
      advance: called before every layer with what it is and with the number of layers.

    Returns:
      The list, an entry per layer.

    Raises:
      OSError: a file that cannot be written.
    """
    folder.mkdir(exist_ok=True)
    temporary = folder / f".{FILES[0]}.part"
    set_network_implementation(model, "xla")
    steps = sum(isinstance(layer, ConvUnit) for _, layer in model.named_layers())
    entries = []
    try:
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as archive:

            def keep(name: str, layer: Layer, value: jax.Array, residual: jax.Array | None) -> None:
                if isinstance(layer, ConvUnit):
                    advance(f"writing the input of {name}", steps)
                    values = np.asarray(value, np.float32)
                    with archive.open(f"{network}/{name}.npy", "w", force_zip64=True) as file:
                        np.lib.format.write_array(file, values, allow_pickle=False)
                    entries.append(_entry(network, name, layer, values))

            model.features(x, before_layer=keep)
        os.replace(temporary, folder / FILES[0])
    finally:
        temporary.unlink(missing_ok=True)
    _write_lists(folder, header, entries)
    return entries


def group_zeros(values: np.ndarray, rows: int, columns: int) -> float:
    """Share of (group of rows x columns pixels, channel) entries of [N, H, W, C] that are zero throughout.

    Groups at the lower and right edge may be smaller.
    """
    nonzero = values != 0
    for axis, size in ((1, rows), (2, columns)):
        nonzero = np.logical_or.reduceat(nonzero, np.arange(0, values.shape[axis], size), axis=axis)
    return 1 - float(np.mean(nonzero))


def _entry(network: str, name: str, layer: ConvUnit, values: np.ndarray) -> dict[str, Any]:
    conv = layer.conv
    strides: Any = conv.strides
    return {
        "network": network,
        "layer": name,
        "key": f"{network}/{name}",
        "shape": list(values.shape),
        "kernel_shape": list(conv.kernel.shape),
        "strides": list(strides),
        "groups": conv.feature_group_count,
        "zeros": {f"{rows}x{columns}": group_zeros(values, rows, columns) for rows, columns in GROUPS},
        "channel_zeros": np.mean(values == 0, axis=(0, 1, 2)).tolist(),
    }


def _write_lists(folder: Path, header: dict[str, Any], entries: list[dict[str, Any]]) -> None:
    content = header | {"layers": entries}
    (folder / "maps.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    with (folder / "maps.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        sizes = [f"zeros_{rows}x{columns}" for rows, columns in GROUPS]
        table.writerow(["key", "images", "height", "width", "in_channels", "out_channels", "kernel", "stride", "groups",
                        *sizes])  # fmt: skip
        for entry in entries:
            kernel = entry["kernel_shape"]
            zeros = [f"{fraction:.6f}" for fraction in entry["zeros"].values()]
            shape = [*entry["shape"], kernel[3], kernel[0], entry["strides"][0], entry["groups"]]
            table.writerow([entry["key"], *shape, *zeros])
    with (folder / "channels.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["key", "channel", "zeros"])
        for entry in entries:
            table.writerows([entry["key"], c, f"{zeros:.6f}"] for c, zeros in enumerate(entry["channel_zeros"]))
