"""The search of `benchmarks chain_tiles`: one kind of layer at a time, every candidate inside the whole chain."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from jax_sparse_conv._src.dispatch.chain_tiles import Candidate, Key, Tile, Tiles

FACTOR, MOST, MOST_LARGER = 1.5, 16, 4
"""Candidates are expected to take at most so many times the cycles of the model's best, and are at most so many, of
those that the model may not choose at most `MOST_LARGER` beside them."""
PASSES = 2
LEAST_GAIN = 0.002
"""Of the chain's time, below which a tile is not kept; half a microsecond of ResNet-50, where most gains are."""

_AGAIN = 4  # candidates of a layer in the second pass, the best of the first
_FINALISTS = 2
_ROUNDS, _FINAL_ROUNDS = 3, 9  # samples of each side, in turns: of all candidates, of the finalists
_ERRORS = 3.0  # standard errors of the median by which a gain must be more than nothing


@dataclasses.dataclass(frozen=True)
class Group:
    """The layers of a chain that have the same geometry, and so the same tile.

    Attributes:
      key: the geometry.
      count: how many there are.
      candidates: to be timed, the model's choice first.
    """

    key: Key
    count: int
    candidates: tuple[Candidate, ...]

    @property
    def cycles(self) -> float:
        """What the model expects of all of them."""
        return self.count * self.candidates[0].cycles if self.candidates else 0.0


class Chain(Protocol):
    """A chain that can be run with any tiles; layers without one have the model's."""

    def prepare(self, sides: Sequence[Tiles]) -> list[str | None]:
        """Compile the chain with each of these tiles; for each why it does not run, or None."""

    def seconds(self, tiles: Tiles) -> float:
        """One sample of the chain's time."""

    def why_wrong(self, key: Key, tiles: Tiles) -> str | None:
        """Why the results with these tiles are not right, that of the layer `key` by itself above all, or None."""

    def forget(self, kept: Tiles) -> None:
        """Drop what was compiled, but for these tiles."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """A candidate that was timed: medians over turns with the tiles kept so far, in seconds of the whole chain."""

    key: Key
    tile: Tile
    before: float
    gain: float
    error: float
    refused: str | None = None

    @property
    def is_faster(self) -> bool:
        """By more than `LEAST_GAIN`, and by more than the noise."""
        return self.gain > max(LEAST_GAIN * self.before, _ERRORS * self.error)


def chosen_candidates(found: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Those worth timing of all that the planner has, the model's choice first, then the best first of either kind."""
    near = [each for each in found if each.cycles <= FACTOR * found[0].cycles]
    by_model = [each for each in near if each.by_model]
    larger = [each for each in near if not each.by_model]
    return (*by_model[:MOST], *larger[:MOST_LARGER])


def search(
    groups: Sequence[Group],
    chain: Chain,
    kept: Tiles,
    *,
    has_time: Callable[[], bool],
    tried: Callable[[Trial, Tiles], None],
) -> bool:
    """Coordinate descent: for each kind of layer, by its share of the time, the fastest tile with all others as kept.

    Args:
      groups: the kinds of layers.
      chain: what is timed.
      kept: tiles kept so far, which those found are added to.
      has_time: asked before each group.
      tried: told of each finalist, with the tiles that are kept then.

    Returns:
      Whether all passes were made, or one in which nothing was kept.
    """
    again: dict[Key, Sequence[Tile]] = {}
    order = sorted((group for group in groups if len(group.candidates) > 1), key=lambda group: -group.cycles)
    for number in range(PASSES):
        before = dict(kept)
        for group in order:
            if not has_time():
                return False
            tiles = [each.tile for each in group.candidates] if number == 0 else again[group.key]
            again[group.key] = _improve(group, tiles, chain, kept, tried)
        if kept == before:
            break
    return True


def _improve(
    group: Group, tiles: Sequence[Tile], chain: Chain, kept: Tiles, tried: Callable[[Trial, Tiles], None]
) -> list[Tile]:
    """Time tiles of a group of layers, and keep the best if it is faster; all, the best first, but for those that fail.

    The tile that the group has is among them: without one that is the model's first.
    """
    current = kept.get(group.key, group.candidates[0].tile)
    sides = {tile: _with(kept, group, tile) for tile in dict.fromkeys([current, *tiles])}
    reasons = chain.prepare(list(sides.values()))
    sides = {tile: side for (tile, side), reason in zip(sides.items(), reasons, strict=True) if reason is None}
    if current not in sides:
        raise ValueError(f"the chain does not run as it is: {next(filter(None, reasons))}")
    samples = _in_turns(chain, sides, _ROUNDS)
    ranked = sorted(sides, key=lambda tile: statistics.median(samples[tile]))
    finalists = [tile for tile in ranked[:_FINALISTS] if tile != current]
    samples = _in_turns(chain, {tile: sides[tile] for tile in (current, *finalists)}, _FINAL_ROUNDS if finalists else 0)
    trials = [trial_of(group.key, tile, samples[current], samples[tile]) for tile in finalists]
    for trial in sorted(trials, key=lambda trial: -trial.gain):
        refused = chain.why_wrong(group.key, sides[trial.tile]) if trial.is_faster else None
        is_kept = trial.is_faster and refused is None
        if is_kept:
            kept.clear()
            kept.update(sides[trial.tile])
        tried(dataclasses.replace(trial, refused=refused), dict(kept))
        if is_kept:
            break
    chain.forget(kept)
    return ranked[:_AGAIN]


def _with(kept: Tiles, group: Group, tile: Tile) -> Tiles:
    """The tiles kept, and this one; the model's choice is none."""
    others = {key: each for key, each in kept.items() if key != group.key}
    return others if tile == group.candidates[0].tile else {**others, group.key: tile}


def turns(chain: Chain, sides: Sequence[Tiles], rounds: int) -> list[float]:
    """Medians of samples that sides take in turns."""
    for reason in chain.prepare(sides):
        if reason is not None:
            raise ValueError(f"the chain does not run: {reason}")
    samples = [[chain.seconds(side) for side in sides] for _ in range(rounds)]
    return [statistics.median(column) for column in zip(*samples, strict=True)]


def _in_turns(chain: Chain, sides: Mapping[Tile, Tiles], rounds: int) -> dict[Tile, list[float]]:
    samples: dict[Tile, list[float]] = {tile: [] for tile in sides}
    for _ in range(rounds):
        for tile, side in sides.items():
            samples[tile].append(chain.seconds(side))
    return samples


def trial_of(key: Key, tile: Tile, before: Sequence[float], after: Sequence[float]) -> Trial:
    """What samples taken in turns say: the gain is the median of their differences, of which the error is taken too."""
    differences = [one - other for one, other in zip(before, after, strict=True)]
    gain = statistics.median(differences)
    deviation = 1.4826 * statistics.median(abs(each - gain) for each in differences)  # as of a normal distribution
    error = 1.2533 * deviation / len(differences) ** 0.5  # of a median, where a mean's would be without the factor
    return Trial(key, tile, statistics.median(before), gain, error)
