"""Real feature maps from a file or a folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks import data


def load(path: Path) -> dict[str, data.Map]:
    """Maps float32 [N, H, W, C] by name: every array of an npz file, or of the npz files in a folder.

    In a folder a map's name is `file/array`, or the file's name where it holds one array.
    """
    if not path.is_dir():
        return _read(path)
    files = sorted(path.rglob("*.npz"))
    if not files:
        raise ValueError(f"--maps {path} holds no npz file")
    found: dict[str, data.Map] = {}
    for file in files:
        arrays = _read(file)
        stem = file.relative_to(path).with_suffix("").as_posix()
        found |= {stem if len(arrays) == 1 else f"{stem}/{name}": value for name, value in arrays.items()}
    return found


def _read(path: Path) -> dict[str, data.Map]:
    with np.load(path) as arrays:
        return {name: arrays[name] for name in arrays.files if arrays[name].ndim == 4}
