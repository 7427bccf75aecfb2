"""How objects that hold arrays are shown: their types in the arrays' place, as in a traced program."""

from __future__ import annotations

import dataclasses
from typing import Any


def without_values(instance: Any) -> str:
    """A dataclass by its fields, such as `CooStar(values=float32[1, 4, 4, 2, 32], ..., channels=2)`."""
    fields = (f"{field.name}={type_of(getattr(instance, field.name))}" for field in dataclasses.fields(instance))
    return f"{type(instance).__name__}({', '.join(fields)})"


def type_of(value: Any) -> str:
    """dtype and shape of an array, anything else as it is shown."""
    is_array = hasattr(value, "dtype") and hasattr(value, "shape")
    return f"{value.dtype}{list(value.shape)}" if is_array else repr(value)
