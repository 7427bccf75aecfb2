"""Where tables and models are, how a GPU is named in file names, and how their files are written."""

from __future__ import annotations

import os
import re
from pathlib import Path

SWITCH = "JSC_TABLES"
"""Environment variable: "off" hides all tables, so that the models choose; "shipped" hides the user's own files."""
CACHE = "JSC_CACHE"
"""Environment variable: the folder of the user's tables and raw times, by default ~/.cache/jax_sparse_conv."""


def slug(device: str) -> str:
    """A GPU's name in file names: "h100" of "NVIDIA H100 80GB HBM3"."""
    words = re.findall(r"[a-z0-9]+", device.lower())
    return next((word for word in words if any(letter.isdigit() for letter in word)), "_".join(words) or "unknown")


def cache_folder() -> Path:
    """Where the user's tables, models and raw times are."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get(CACHE) or base / "jax_sparse_conv")


def switch() -> str:
    """What `SWITCH` says.

    Raises:
      ValueError: it is not one of "", "off", "shipped".
    """
    found = os.environ.get(SWITCH, "")
    if found not in ("", "off", "shipped"):
        raise ValueError(f'{SWITCH}={found!r} is not one of "", "off", "shipped"')
    return found


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Write a file whole, or not at all; its folder is made.

    Raises:
      OSError: it cannot be written.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_suffix(".part")
    beside.write_text(text, encoding="utf-8")
    beside.replace(target)
