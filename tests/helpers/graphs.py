"""Random functions of convolutions and what surrounds them, in any spelling, order of axes and dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_LAYOUTS = ("NHWC", "NCHW", "HWNC")
_KERNELS = ("HWIO", "OIHW")

Step = Callable[[dict[int, jax.Array], Sequence[jax.Array]], jax.Array]


class Graph:
    """A function of an image and weights, drawn from a seed. `steps` says what it does.

    Args:
      seed: of the draws.
      dtype: of all values, or drawn where it is None.
      zero_at_zero: whether ReLUs are spelled so that their derivative at 0 is 0.
    """

    def __init__(self, seed: int, dtype: str | None = None, zero_at_zero: bool = False) -> None:
        self._rng, self._zero_at_zero = np.random.default_rng(seed), zero_at_zero
        self.weights: list[np.ndarray] = []
        self.steps: list[str] = []
        self._run: list[Step] = []
        self._shapes: list[tuple[int, int, int, int]] = []  # [N, H, W, C] of every value
        self.layout = self._pick(_LAYOUTS)
        drawn = self._pick(("float32", "float32", "float32", "bfloat16", "float16"))
        self.dtype = drawn if dtype is None else dtype
        size = int(self._rng.integers(5, 12))
        self._shapes.append((int(self._rng.integers(1, 3)), size, size + 1, int(self._pick((3, 4, 8)))))
        self.image = self._normal(self._arranged(self._shapes[0]))
        for _ in range(int(self._rng.integers(1, 4))):
            self._block()
        self._head()

    def __call__(self, x: jax.Array, weights: Sequence[jax.Array]) -> Any:
        values = {0: x}
        for number, step in enumerate(self._run, 1):
            values[number] = step(values, weights)
        return values[len(self._run)], values[len(self._run) // 2 + 1].sum(dtype=jnp.float32)

    # --- drawing -----------------------------------------------------------------------------------------------------

    def _pick(self, choices: Sequence[Any]) -> Any:
        return choices[int(self._rng.integers(len(choices)))]

    def _normal(self, shape: Sequence[int], scale: float = 1.0, at: float = 0.0) -> np.ndarray:
        return np.asarray(at + scale * self._rng.normal(size=shape), jnp.dtype(self.dtype))

    def _weight(self, *args: Any, **kwargs: Any) -> int:
        self.weights.append(self._normal(*args, **kwargs))
        return len(self.weights) - 1

    def _arranged(self, shape: Sequence[int]) -> tuple[int, ...]:
        return tuple(shape["NHWC".index(axis)] for axis in self.layout)

    def _per_channel(self) -> tuple[int, ...]:
        return tuple(-1 if axis == "C" else 1 for axis in self.layout)

    def _add(self, name: str, step: Step, shape: tuple[int, int, int, int]) -> None:
        self.steps.append(name)
        self._run.append(step)
        self._shapes.append(shape)

    @property
    def _last(self) -> int:
        return len(self._shapes) - 1

    # --- steps -------------------------------------------------------------------------------------------------------

    def _block(self) -> None:
        shortcut = self._last
        if self._rng.random() < 0.2:
            self._affine()
            self._relu()
        self._conv()
        if self._rng.random() < 0.6:
            self._affine()
        elif self._rng.random() < 0.5:
            self._bias()
        if self._rng.random() < 0.5:
            self._relu()
        if self._rng.random() < 0.4:
            self._conv(keeps=True)
            if self._rng.random() < 0.7:
                self._affine()
        if self._shapes[shortcut] == self._shapes[self._last] and self._rng.random() < 0.8:
            self._residual(shortcut)
        if self._rng.random() < 0.6:
            self._relu()
        if self._rng.random() < 0.2:
            self._cast_and_back()
        same_size = self._shapes[shortcut][:3] == self._shapes[self._last][:3]
        if same_size and shortcut and self._rng.random() < 0.5:
            self._concat(shortcut)
        if min(self._shapes[self._last][1:3]) >= 4 and self._rng.random() < 0.4:
            self._pool()
        if self._rng.random() < 0.15:
            self._odd()

    def _conv(self, keeps: bool = False) -> None:
        source, (n, h, w, c) = self._last, self._shapes[self._last]
        groups = int(self._pick([g for g in (1, 1, 2, 4) if c % g == 0]))
        out = c if keeps else int(self._pick((4, 8, 16)))
        size = (1, 1) if self._rng.random() < 0.3 else (3, 3)
        strides = (1, 1) if keeps or self._rng.random() < 0.7 else (2, 2)
        dilation = (2, 2) if size == (3, 3) and min(h, w) > 6 and self._rng.random() < 0.1 else (1, 1)
        order = self._pick(_KERNELS)
        kernel_shape = tuple({"H": size[0], "W": size[1], "I": c // groups, "O": out}[axis] for axis in order)
        kernel = self._weight(kernel_shape, 1 / np.sqrt(size[0] * size[1] * c / groups))
        paddings = ("SAME", ((1, 1), (2, 2)), "VALID") if size == (3, 3) and min(h, w) > 5 else ("SAME",)
        padding: Any = "SAME" if keeps else self._pick(paddings)
        pads = padding == "SAME" and strides == (1, 1) and dilation == (1, 1) and self._rng.random() < 0.3
        numbers = lax.conv_dimension_numbers(
            self._arranged((n, h, w, c)), kernel_shape, (self.layout, order, self.layout)
        )
        around = (size[0] // 2,) * 2, (size[1] // 2,) * 2

        def step(values: dict[int, jax.Array], weights: Sequence[jax.Array]) -> jax.Array:
            x = values[source]
            if pads:
                amounts = {"H": around[0], "W": around[1]}
                x = jnp.pad(x, [amounts.get(axis, (0, 0)) for axis in self.layout])
            return lax.conv_general_dilated(
                x,
                weights[kernel],
                strides,
                "VALID" if pads else padding,
                rhs_dilation=dilation,
                dimension_numbers=numbers,
                feature_group_count=groups,
            )

        abstract = {source: jax.ShapeDtypeStruct(self._arranged((n, h, w, c)), jnp.dtype(self.dtype))}
        made = jax.eval_shape(lambda x: step({source: x}, self.weights), abstract[source]).shape
        sizes = {axis: made[place] for place, axis in enumerate(self.layout)}
        self._add("pad, conv" if pads else "conv", step, (n, sizes["H"], sizes["W"], out))

    def _affine(self) -> None:
        source, channels = self._last, self._shapes[self._last][3]
        mean, gain, offset = (self._weight((channels,), 0.3) for _ in range(3))
        variance = self._weight((channels,), 0.1, 1.0)
        spelling, shape = int(self._rng.integers(4)), self._per_channel()

        def step(values: dict[int, jax.Array], weights: Sequence[jax.Array]) -> jax.Array:
            x = values[source]
            m, g, b, v = (weights[each].reshape(shape) for each in (mean, gain, offset, variance))
            if spelling == 0:
                return (x - m) * (lax.rsqrt(v + 1e-3) * g) + b
            if spelling == 1:
                inverse = g * lax.rsqrt(v + 1e-3)
                return x * inverse + (b - m * inverse)
            if spelling == 2:
                return g * ((x - m) / jnp.sqrt(v + 1e-3)) + b
            wide = x.astype(jnp.float32)
            return ((wide - m) * lax.rsqrt(v.astype(jnp.float32) + 1e-3) * g + b).astype(x.dtype)

        self._add(f"affine {spelling}", step, self._shapes[source])

    def _bias(self) -> None:
        source, channels = self._last, self._shapes[self._last][3]
        bias, full, shape = self._weight((channels,)), self._rng.random() < 0.5, self._per_channel()

        def step(values: dict[int, jax.Array], weights: Sequence[jax.Array]) -> jax.Array:
            x = values[source]
            b = weights[bias].reshape(shape)
            return x + (jnp.broadcast_to(b, x.shape) if full else b)

        self._add("bias", step, self._shapes[source])

    def _relu(self) -> None:
        source, spelling = self._last, int(self._pick((0, 3) if self._zero_at_zero else range(6)))
        spellings: list[Callable[[jax.Array], jax.Array]] = [
            jax.nn.relu,
            lambda x: jnp.maximum(x, 0),
            lambda x: jnp.maximum(0, x),
            lambda x: jnp.where(x > 0, x, 0),
            lambda x: jnp.clip(x, 0),
            jax.nn.relu6,
        ]
        self._add(f"relu {spelling}", lambda values, _: spellings[spelling](values[source]), self._shapes[source])

    def _residual(self, shortcut: int) -> None:
        source, is_first = self._last, self._rng.random() < 0.5

        def step(values: dict[int, jax.Array], _: Sequence[jax.Array]) -> jax.Array:
            one, other = values[source], values[shortcut]
            return one + other if is_first else other + one

        self._add("residual", step, self._shapes[source])

    def _cast_and_back(self) -> None:
        source = self._last

        def step(values: dict[int, jax.Array], _: Sequence[jax.Array]) -> jax.Array:
            return (values[source].astype(jnp.float32) * 0.5).astype(self.dtype)

        self._add("cast", step, self._shapes[source])

    def _concat(self, other: int) -> None:
        source, axis = self._last, self.layout.index("C")
        n, h, w, c = self._shapes[source]

        def step(values: dict[int, jax.Array], _: Sequence[jax.Array]) -> jax.Array:
            return jnp.concatenate([values[other], values[source]], axis)

        self._add("concatenate", step, (n, h, w, c + self._shapes[other][3]))

    def _pool(self) -> None:
        source, (n, h, w, c) = self._last, self._shapes[self._last]
        kind, size, stride = self._pick(("max", "avg")), int(self._pick((2, 3))), int(self._pick((1, 2)))
        window, strides = ({"H": each, "W": each} for each in (size, stride))
        dimensions, steps = (tuple(each.get(axis, 1) for axis in self.layout) for each in (window, strides))

        def step(values: dict[int, jax.Array], _: Sequence[jax.Array]) -> jax.Array:
            x = values[source]
            if kind == "max":
                return lax.reduce_window(x, np.asarray(-np.inf, x.dtype), lax.max, dimensions, steps, "VALID")
            return lax.reduce_window(x, np.asarray(0, x.dtype), lax.add, dimensions, steps, "VALID") / (size * size)

        self._add(f"{kind} pool", step, (n, (h - size) // stride + 1, (w - size) // stride + 1, c))

    def _odd(self) -> None:
        """What no call takes in."""
        source, shape, kind = self._last, self._shapes[self._last], int(self._rng.integers(4))
        axis = self.layout.index("W")
        steps: list[Callable[[jax.Array], jax.Array]] = [
            lambda x: jnp.flip(x, axis),
            lambda x: jax.nn.silu(x),
            lambda x: x * jax.nn.sigmoid(x.mean([self.layout.index("H"), axis], keepdims=True)),
            lambda x: jnp.swapaxes(jnp.swapaxes(x, 0, 2) * 2, 0, 2),
        ]
        self._add(f"odd {kind}", lambda values, _: steps[kind](values[source]), shape)

    def _head(self) -> None:
        source, (n, h, w, c) = self._last, self._shapes[self._last]
        kind, out = int(self._rng.integers(4)), 6
        if kind == 3:
            return
        matrix, bias = self._weight((c if kind < 2 else h * w * c, out), 0.2), self._weight((out,))
        space = tuple(self.layout.index(axis) for axis in "HW")
        moved = tuple(self.layout.index(axis) for axis in "NHWC")

        def step(values: dict[int, jax.Array], weights: Sequence[jax.Array]) -> jax.Array:
            x = values[source]
            if kind == 0:
                rows = x.mean(space)
            elif kind == 1:
                rows = jnp.transpose(x, moved).max((1, 2))
            else:
                rows = jnp.moveaxis(x, self.layout.index("N"), 0).reshape(n, -1)
            return rows @ weights[matrix] + weights[bias]

        self._add("head", step, (n, 1, 1, out))
