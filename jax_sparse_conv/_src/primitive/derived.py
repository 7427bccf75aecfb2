"""What is computed of an array that is a constant once, for as long as the array is alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable

import jax


class Derived:
    """Arrays by the array that they were computed of, and a key. Arrays of JAX do not change, so they stay right."""

    def __init__(self) -> None:
        # By id, as arrays do not hash.
        self._made: dict[int, tuple[weakref.ref[jax.Array], dict[Hashable, jax.Array]]] = {}

    def of(self, array: jax.Array, key: Hashable, make: Callable[[], jax.Array]) -> jax.Array:
        """What `make` returns, computed also where a function is traced."""
        known = self._made.get(id(array))
        if known is None or known[0]() is not array:
            place = id(array)
            known = (weakref.ref(array, lambda _: self._made.pop(place, None)), {})
            self._made[place] = known
        if key not in known[1]:
            with jax.ensure_compile_time_eval():
                known[1][key] = make()
        return known[1][key]
