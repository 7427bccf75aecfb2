"""Places of arrays in one allocation: nothing that is needed is written over, and how much they take."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from jax_sparse_conv._src.fusion import placement
from jax_sparse_conv._src.fusion.placement import Span


def most_needed(spans: list[Span]) -> int:
    """By one step."""
    return max(sum(each.size for each in spans if each.first <= span.first <= each.last) for span in spans)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_needed_at_once_lies_apart(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.geometric(0.4, size=rng.integers(1, 60))
    spans = [Span(i, i + int(length), int(rng.integers(1, 9)) * 256) for i, length in enumerate(lengths)]
    places = placement.place(spans)
    assert min(places) == 0
    for (one, at), (other, beside) in itertools.combinations(zip(spans, places, strict=True), 2):
        if one.first <= other.last and other.first <= one.last:
            assert at + one.size <= beside or beside + other.size <= at
    assert most_needed(spans) <= placement.size_of(spans, places) <= sum(span.size for span in spans)
    assert placement.place(spans) == places


def test_a_chain_takes_what_its_largest_layer_does() -> None:
    spans = [Span(i, i + 1, size) for i, size in enumerate((1, 4, 2, 4, 8, 2, 1))]
    assert placement.size_of(spans, placement.place(spans)) == 12


def test_large_arrays_come_first_where_time_alone_leaves_gaps() -> None:
    spans = [Span(0, 1, 1), Span(1, 4, 1), Span(2, 2, 1), Span(3, 3, 3)]
    assert placement.size_of(spans, placement.place(spans)) == most_needed(spans) == 4


def test_nothing_takes_nothing() -> None:
    assert placement.place([]) == []
    assert placement.size_of([], []) == 0
