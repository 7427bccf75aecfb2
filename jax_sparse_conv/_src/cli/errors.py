"""What a user has to mend, said in one sentence, and packages that may be missing."""

from __future__ import annotations

import importlib
from types import ModuleType


class UserError(Exception):
    """A mistake of the user's that one sentence explains; `python -m jax_sparse_conv` prints it and exits with 1."""


def optional(module: str, package: str, extra: str = "examples") -> ModuleType:
    """Import a dependency of one of this package's extras.

    Raises:
      UserError: it is not installed; says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"{package} is needed here and cannot be imported ({error}); install it with "
            f'pip install "jax-sparse-conv[{extra}]"'
        ) from error
