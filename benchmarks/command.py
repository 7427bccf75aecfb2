"""The command line that a result file carries."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path


def portable(module: str, arguments: Sequence[str]) -> str:
    """`python -m module arguments` without the folders of this machine: of an absolute path its last part."""
    return shlex.join(["python", "-m", module, *map(_without_folders, arguments)])


def _without_folders(argument: str) -> str:
    option, equals, value = argument.partition("=") if argument.startswith("-") else ("", "", argument)
    return f"{option}{equals}{Path(value).name if Path(value).is_absolute() else value}"
