"""The command line that a result file carries."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from jax_sparse_conv import environment


def portable(module: str, arguments: Sequence[str]) -> str:
    """`python -m module arguments` without the folders of this machine: of an absolute path its last part."""
    return shlex.join(["python", "-m", module, *map(environment.without_folders, arguments)])
