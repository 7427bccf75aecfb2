"""Where arrays lie in one allocation: side by side if a step needs both, else anywhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence


@dataclasses.dataclass(frozen=True)
class Span:
    """An array to be placed.

    Attributes:
      first: the first step that needs it.
      last: the last step that needs it.
      size: in the unit of the places.
    """

    first: int
    last: int
    size: int


# In each order an array takes the lowest place that the arrays before it leave. The better order wins. The networks
# then take no more memory than the step that needs most.
_ORDERS: tuple[Callable[[Span], tuple[int, int]], ...] = (
    lambda span: (span.first, 0),
    lambda span: (-span.size, span.first),
)


def place(spans: Sequence[Span]) -> list[int]:
    """A place from 0 on for each array, the same for the same arrays."""
    return min((_place_in_order(spans, order) for order in _ORDERS), key=lambda places: size_of(spans, places))


def size_of(spans: Sequence[Span], places: Sequence[int]) -> int:
    """What arrays in these places take together."""
    return max((at + span.size for at, span in zip(places, spans, strict=True)), default=0)


def _place_in_order(spans: Sequence[Span], order: Callable[[Span], tuple[int, int]]) -> list[int]:
    places: dict[int, int] = {}
    for index in sorted(range(len(spans)), key=lambda index: order(spans[index])):
        span = spans[index]
        beside = (other for other in places if spans[other].first <= span.last and span.first <= spans[other].last)
        at = 0
        for low, size in sorted((places[other], spans[other].size) for other in beside):
            if at + span.size <= low:
                break
            at = max(at, low + size)
        places[index] = at
    return [places[index] for index in range(len(spans))]
