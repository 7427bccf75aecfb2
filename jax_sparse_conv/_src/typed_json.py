"""Frozen dataclasses from JSON, every value checked by its field's type: a damaged file is refused by its entry."""

from __future__ import annotations

import dataclasses
import functools
import json
import types
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin, get_type_hints

_SHOWN = 80  # characters of a refused value
_SCALARS = {str: "a string", bool: "true or false", int: "an int", float: "a number", types.NoneType: "null"}


def read(kind: Any, value: Any, place: str) -> Any:
    """The inverse of `dataclasses.asdict`, of what `json` has read: lists become tuples.

    Args:
      kind: a dataclass, str, bool, int, float, or a `Literal`, `tuple`, `Mapping[str, ...]` or union of these.
      value: dicts, lists, strings, numbers, bools and None.
      place: what errors call the value, such as "layers[0].call"; "" for a whole file.

    Raises:
      ValueError: a value of another type, an entry that is missing, or one too many; names it and what is accepted.
    """
    choices = get_args(kind) if get_origin(kind) is types.UnionType else (kind,)
    for choice in choices:
        if _is_alike(choice, value):
            return _read(choice, value, place)
    raise ValueError(f"{_named(place, value)} is not {' or '.join(map(_description, choices))}")


def _is_alike(kind: Any, value: Any) -> bool:
    """Whether the value itself is of the type; what it contains is not looked at."""
    origin = get_origin(kind)
    if origin is Literal:
        return isinstance(value, str) and value in get_args(kind)
    if origin is tuple:
        length = _length(kind)
        return isinstance(value, list) and length in (None, len(value))
    if origin is Mapping or _is_dataclass(kind):
        return isinstance(value, dict)
    return type(value) in ((int, float) if kind is float else (kind,))  # a bool is no int


def _read(kind: Any, value: Any, place: str) -> Any:
    origin = get_origin(kind)
    if origin is tuple:
        entries = get_args(kind)
        kinds = entries[:1] * len(value) if _length(kind) is None else entries
        return tuple(
            read(each, entry, f"{place}[{i}]") for i, (each, entry) in enumerate(zip(kinds, value, strict=True))
        )
    if origin is Mapping:
        return {name: read(get_args(kind)[1], entry, f"{place}[{name!r}]") for name, entry in value.items()}
    if _is_dataclass(kind):
        return _read_fields(kind, value, place)
    if kind is float:
        try:
            return float(value)
        except OverflowError as error:  # of an int
            raise ValueError(f"{_named(place, value)} is beyond the range of a number") from error
    return value


def _read_fields(kind: Any, value: Mapping[str, Any], place: str) -> Any:
    hints, prefix = _hints(kind), f"{place}." if place else ""
    for name in hints:
        if name not in value:
            raise ValueError(f"{prefix}{name} is missing; it must be {_description(hints[name])}")
    for name in value:
        if name not in hints:
            raise ValueError(f"{_named(prefix + name, value[name])} is not one of the entries {', '.join(hints)}")
    return kind(**{name: read(hint, value[name], prefix + name) for name, hint in hints.items()})


def _is_dataclass(kind: Any) -> bool:
    return dataclasses.is_dataclass(kind)


@functools.cache
def _hints(kind: Any) -> Mapping[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _length(kind: Any) -> int | None:
    """Of a tuple, None where any is right."""
    entries = get_args(kind)
    return None if entries[-1] is ... else len(entries)


def _description(kind: Any) -> str:
    origin = get_origin(kind)
    if origin is types.UnionType:
        return " or ".join(map(_description, get_args(kind)))
    if origin is Literal:
        return f"one of {', '.join(map(json.dumps, get_args(kind)))}"
    if origin is tuple:
        length = _length(kind)
        return "a list" if length is None else f"a list of {length}"
    if origin is Mapping:
        return "an object"
    if _is_dataclass(kind):
        return f"an object with the entries {', '.join(_hints(kind))}"
    return _SCALARS[kind]


def _named(place: str, value: Any) -> str:
    text = json.dumps(value)
    if len(text) > _SHOWN:
        text = f"{text[:_SHOWN]}..."
    return f"{place}={text}" if place else text
