"""Times of a layer among others in one program, as the layers of a network run: without Python between two calls."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_sparse_conv._src.plans import timing

CALLS = 8  # in one program


def times(
    programs: Mapping[str, timing.Function],
    xs: Sequence[jax.Array],
    weights: tuple[Any, jax.Array],
    repeats: int,
) -> dict[str, timing.Timing]:
    """Time per call of each of these `of` functions in turn, in streaks.

    A program in front of each streak is not timed: it finds what another function left in the caches, and the first
    calls of a layer whose kernel was driven out of them take twice to four times as long.

    Args:
      programs: by name.
      xs: the inputs that calls rotate through.
      weights: kernel and bias.
      repeats: samples.
    """
    inputs = tuple(itertools.islice(itertools.cycle(xs), CALLS))
    whole = timing.streaks(programs, [(inputs, *weights)], repeats, untimed=1)
    return {name: _per_call(found) for name, found in whole.items()}


def of(call: Callable[..., jax.Array], constants: tuple[Any, jax.Array] | None) -> timing.Function:
    """A program of `CALLS` inputs, kernel and bias that calls a function of x, kernel and bias for each input.

    Args:
      call: not jitted.
      constants: kernel and bias to take instead of those that are given.
    """

    @jax.jit
    def program(inputs: tuple[jax.Array, ...], kernel: Any, bias: jax.Array) -> jax.Array:
        if constants is not None:
            kernel, bias = constants
        given, found = bias, []
        for x in inputs:
            # The barrier keeps the result whole. The next bias needs it, so that one call follows the other; XLA may
            # still begin its next convolution before, which takes no bias.
            found.append(lax.optimization_barrier(call(x, kernel, given)).reshape(-1)[0])
            given = bias + 0 * found[-1]
        return jnp.stack(found)

    return program


def _per_call(whole: timing.Timing) -> timing.Timing:
    parts = {name: getattr(whole, name) / CALLS for name in ("best", "median", "low", "high")}
    return dataclasses.replace(whole, **parts, samples=tuple(sample / CALLS for sample in whole.samples))
