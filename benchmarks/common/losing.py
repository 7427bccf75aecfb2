"""What counts as a loss, wherever one is counted, listed or timed again."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Mapping
from typing import TypeVar

import numpy as np

LEAST = 0.97

_Case = TypeVar("_Case", bound=Hashable)


def is_loss(ratio: float, least: float | None = None) -> bool:
    """Whether XLA's median time over ours is below 0.97, or another ratio; best times do not count."""
    return ratio < (LEAST if least is None else least)


def again(ratios: Mapping[_Case, float], seed: int, known: Iterable[_Case] = ()) -> list[_Case]:
    """What is timed again: all that lose, and as many that do not, drawn at random, in a drawn order.

    Args:
      ratios: of every case, by its first times.
      seed: of what is drawn.
      known: cases that have been timed again already, which are drawn before others.
    """
    done = set(known)
    losing = [case for case, ratio in ratios.items() if is_loss(ratio)]
    others = [case for case, ratio in ratios.items() if not is_loss(ratio)]
    rng = np.random.default_rng(seed)
    drawn = sorted((others[index] for index in rng.permutation(len(others))), key=lambda case: case not in done)
    chosen = [*losing, *itertools.islice(drawn, len(losing))]
    return [chosen[index] for index in rng.permutation(len(chosen))]
