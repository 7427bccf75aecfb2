"""Arguments as paths of files, and what is said of those that are none."""

from __future__ import annotations

import reprlib
from pathlib import Path
from typing import Any


def as_path(name: str, value: Any) -> Path:
    """An argument as the path of a file.

    Raises:
      TypeError: names the argument that is none.
    """
    try:
        return Path(value)
    except TypeError as error:
        raise TypeError(f"{name}={reprlib.repr(value)} is no path; a str or an os.PathLike of one is") from error
