"""Checks of the files that a command will write, before it works for a minute."""

from __future__ import annotations

import os
from pathlib import Path

from jax_sparse_conv._src.cli.errors import UserError


def check_writable(name: str, path: Path) -> None:
    """Raise a `UserError` where the file of `--name` cannot be written."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise UserError(f"--{name} {path}: the folder {folder} does not exist")
    if path.is_dir():
        raise UserError(f"--{name} {path} is a folder, not a file to write")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise UserError(f"--{name} {path} cannot be written: no permission")


def check_folder(name: str, path: Path) -> None:
    """Raise a `UserError` where the folder of `--name` cannot be made or written to."""
    above = path.absolute().parent
    if not above.is_dir():
        raise UserError(f"--{name} {path}: the folder {above} does not exist")
    if path.exists() and not path.is_dir():
        raise UserError(f"--{name} {path} is a file, not a folder to write to")
    if not os.access(path if path.exists() else above, os.W_OK):
        raise UserError(f"--{name} {path} cannot be written to: no permission")
