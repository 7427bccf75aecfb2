"""What the three kinds of tables have in common: their files, and their rows by class and key."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from jax_sparse_conv._src.dispatch import folders

FORMAT = 1
WRONG_CONTENT = (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError)
"""What reading JSON raises where values are of other kinds than they should be."""

_Table = TypeVar("_Table")
_Row = TypeVar("_Row")


def load(path: str | os.PathLike[str], what: str, table_of: Callable[[Any], _Table]) -> _Table:
    """Read a table.

    Args:
      path: of its file.
      what: a table, in the message of errors.
      table_of: makes it of the file's content.

    Raises:
      ValueError: a file that is no such table; names the first thing that is wrong.
      OSError: the file cannot be read.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']!r}, not {FORMAT}")
        return table_of(content)
    except WRONG_CONTENT as error:
        named = f"{os.fspath(path)} holds no {what}: {type(error).__name__}: {error}"
        raise ValueError(f"{named}; without the file other tables and rules decide") from error


def save(path: str | os.PathLike[str], head: Mapping[str, Any], rows: Iterable[Any]) -> None:
    """Write a table, a row a line, so that changes can be read.

    Raises:
      OSError: the file cannot be written.
    """
    text = json.dumps({"format": FORMAT, **head}, indent=1, sort_keys=True).removesuffix("\n}")
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    folders.write_whole(path, f'{text},\n "rows": [\n  {lines}\n ]\n}}\n')


def indexed(
    paths: Mapping[str, Path],
    rows_of: Callable[[Path], Sequence[_Row]],
    class_and_key: Callable[[_Row], tuple[Any, Any]],
) -> Mapping[Any, Mapping[Any, _Row]]:
    """Rows of all files that exist, by class and key; where several have a key, the first file's."""
    found: dict[Any, dict[Any, _Row]] = {}
    for path in reversed([*paths.values()]):
        for row in rows_of(path) if path.exists() else ():
            class_, key = class_and_key(row)
            found.setdefault(class_, {})[key] = row
    return found
