"""Schedules of fused chains: no map is written over while it is needed, and how much memory all take."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chains import block, block_parameters, equations, weights

import jax_sparse_conv as jsc
from jax_sparse_conv._src.dispatch import chain_tiles
from jax_sparse_conv._src.fusion import chains, rewrite
from jax_sparse_conv._src.fusion.schedule import _ALIGNMENT, Schedule, TakesPool, Where


def test_the_schedule_reuses_memory() -> None:
    def function(x: jax.Array) -> jax.Array:
        y = jsc.conv_pool(jsc.conv(x, weights(1, 3, 3, 8, 8)), weights(2, 3, 3, 8, 8))
        return block(y, block_parameters())

    schedule = schedule_of(function, weights(0, 1, 40, 40, 8))
    assert len(schedule.steps) == 7  # the pool is one of its own
    for number, step in enumerate(schedule.steps):
        assert schedule.values[step.out].first == number - step.kind  # a convolution's kernel may write its pool
        for value in (step.x, step.residual):
            assert value < 0 or schedule.values[value].first < number <= schedule.values[value].last
    check_places(schedule)
    stored = [value for value in schedule.values if value.where is Where.WORKSPACE]
    assert schedule.workspace_bytes < 4 * sum(int(np.prod(value.shape)) for value in stored)


def with_pools(x: jax.Array) -> jax.Array:
    """x [1, 40, 40, 8], the first map by far the largest."""
    first, second, third = (
        weights(*of).astype(x.dtype) for of in ((1, 3, 3, 8, 32), (2, 3, 3, 32, 8), (3, 3, 3, 8, 8))
    )
    y = jsc.conv_pool(x, first, precision="highest")
    y = jsc.conv_pool(y, second, window_shape=3, window_strides=2, precision="highest")
    return jsc.conv(y, third, precision="highest")


def test_a_map_has_no_place_where_the_kernel_takes_the_pool() -> None:
    x = weights(0, 1, 40, 40, 8)
    asked: list[Any] = []

    def first_only(*layer: Any) -> bool:
        asked.append(layer)
        return len(asked) == 1

    reserved, taken = (schedule_of(with_pools, x, takes_pool=answer) for answer in (None, first_only))
    by_model = chain_tiles.BY_MODEL
    first = (1, 40, 40, 8, 3, 3, 32, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 0, 0, 0, 0)
    second = (1, 20, 20, 32, 3, 3, 8, 1, 1, 1, 1, 1, 1, 1, 1, 1, 3, 3, 2, 2, 0, 0, 0, 0)
    assert asked == [(first, by_model, 4, True), (second, by_model, 4, True)]
    assert [step.kind for step in taken.steps] == [0, 1, 0, 1, 0]
    of_taken, of_reserved = ([each.values[step.out].where for step in each.steps] for each in (taken, reserved))
    assert of_taken == [Where.NOWHERE, *3 * [Where.WORKSPACE], Where.RESULT]
    assert of_reserved == [*4 * [Where.WORKSPACE], Where.RESULT]
    maps = 4 * np.array([40 * 40 * 32, 20 * 20 * 32, 20 * 20 * 8, 9 * 9 * 8])
    maps[3] = -(-maps[3] // 256) * 256
    assert reserved.workspace_bytes == maps[0] + 2 * maps[1]  # those that convolutions read, with their low parts
    assert taken.workspace_bytes == 2 * maps[1] + maps[2] + 2 * maps[3]
    check_places(taken)
    rows = taken.attributes()["values"].reshape(-1, 7)  # type: ignore[union-attr]
    assert rows[taken.steps[0].out].tolist() == [3, 0, 1, 40, 40, 32, -1]
    assert np.array_equal(taken.attributes()["layers"], reserved.attributes()["layers"])


def test_dense_layers_are_the_last_steps() -> None:
    def function(x: jax.Array, dtype: str = "float32") -> jax.Array:
        y = jsc.conv(jsc.conv(x, weights(1, 3, 3, 8, 8)), weights(2, 3, 3, 8, 16))
        row = jsc.dense(jnp.mean(y, (1, 2)), weights(3, 16, 8), activation="relu")
        return jsc.dense(row, weights(4, 8, 4), weights(5, 4))

    schedule = schedule_of(function, weights(0, 1, 9, 7, 8))
    first, second = schedule.steps[2:]
    assert [step.kind for step in schedule.steps] == [0, 0, 2, 2]
    assert first.numbers == (9, 7, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1)  # of all pixels, with ReLU
    assert second.numbers == (1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 0, 1)
    assert (first.x, second.x) == (schedule.steps[1].out, first.out)
    assert [schedule.values[step.out].shape for step in (first, second)] == [(1, 1, 1, 8), (1, 1, 1, 4)]
    assert schedule.values[second.out].where is Where.RESULT
    assert (first.bias, second.bias >= 0) == (-1, True)
    check_places(schedule)
    check_reads(schedule, inside=False)


def test_no_convolution_waits_behind_a_dense_layer() -> None:
    """As it would for the sake of memory: the wide map is needed at the end only."""

    def towers(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = jsc.conv(x, weights(1, 1, 1, 8, 8))
        wide = jsc.conv(y, weights(2, 1, 1, 8, 512))
        other = jsc.conv(jsc.conv(y, weights(3, 1, 1, 8, 8)), weights(4, 1, 1, 8, 512))
        flat = jsc.dense(wide.reshape(1, -1), weights(5, 16 * 16 * 512, 8))
        return flat, jsc.dense(jnp.mean(other, (1, 2)), weights(6, 512, 8))

    schedule = schedule_of(towers, weights(0, 1, 16, 16, 8))
    assert [step.kind for step in schedule.steps] == [0, 0, 0, 0, 2, 2]
    check_places(schedule)
    check_reads(schedule, inside=False)


def test_answers_are_for_the_tile_that_the_call_has() -> None:
    (equation,) = equations(rewrite.fuse(with_pools), weights(0, 1, 40, 40, 8).astype(jnp.bfloat16))
    first, *rest = equation.params["layers"]
    layers = [dataclasses.replace(first, tile=(64, 112, 1, 2)), *rest]
    operands = [v.aval for v in equation.invars]
    asked: list[Any] = []
    Schedule(operands, layers, equation.params["results"], takes_pool=lambda *of: bool(asked.append(of)))
    assert [of[1:] for of in asked] == [((64, 112, 1, 2), 2, True), (chain_tiles.BY_MODEL, 2, True)]


def check_places(schedule: Schedule) -> None:
    """No two arrays share memory while both are needed, but a residual and the result that takes its place."""
    stored = [(value, value.index) for value in schedule.values if value.where is Where.WORKSPACE]
    stored += [(value, value.low_part) for value in schedule.values if value.is_split]
    for (a, at), (b, b_at) in itertools.combinations(stored, 2):
        if b.over is a and (at, b_at) == (a.index, b.index):
            assert a.last == b.first
            assert (at, a.shape) == (b_at, b.shape)
        elif a.first <= b.last and b.first <= a.last:
            sizes = [int(np.prod(value.shape)) * schedule._itemsize for value in (a, b)]
            assert at + sizes[0] <= b_at or b_at + sizes[1] <= at
    assert schedule.workspace_bytes <= max(_ALIGNMENT, sum(schedule._bytes(value) for value, _ in stored))


def schedule_of(
    function: Callable[..., Any], x: jax.Array, least: bool = True, takes_pool: TakesPool | None = None
) -> Schedule:
    (equation,) = equations(rewrite.fuse(function), x)
    make = Schedule.in_least_memory if least else Schedule
    operands = [v.aval for v in equation.invars]
    return make(operands, equation.params["layers"], equation.params["results"], takes_pool=takes_pool)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("precision", ["highest", "high", "default"])
def test_low_parts_of_what_convolutions_read_at_highest(precision: str, dtype: str) -> None:
    def function(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        conv = functools.partial(jsc.conv, precision=precision)
        y = conv(x, weights(1, 3, 3, 8, 8).astype(dtype))
        pooled = jsc.conv_pool(y, weights(2, 3, 3, 8, 8).astype(dtype), precision=precision)
        also_read = conv(pooled, weights(3, 3, 3, 8, 8).astype(dtype))
        last = conv(also_read, weights(4, 1, 1, 8, 8).astype(dtype), residual=pooled)
        row = jsc.dense(jnp.mean(last, (1, 2)), weights(5, 8, 8).astype(dtype), precision=precision)
        return also_read, last, row

    schedule = schedule_of(function, weights(0, 1, 14, 14, 8).astype(dtype))
    read = {step.x for step in schedule.steps if step.kind == 0} - {schedule.steps[0].x}
    split = {number for number, value in enumerate(schedule.values) if value.is_split}
    assert len(read) == 3
    assert split == (read if (precision, dtype) == ("highest", "float32") else set())
    assert all((value.low_part >= 0) == value.is_split for value in schedule.values)
    check_places(schedule)
    check_reads(schedule, inside=False)


def test_a_result_takes_the_place_of_a_residual_that_nothing_reads_behind_it() -> None:
    def function(x: jax.Array) -> jax.Array:
        y = block(jsc.conv(x, weights(1, 1, 1, 8, 8)), block_parameters())
        return jsc.conv(y, weights(2, 1, 1, 16, 8))

    schedule = schedule_of(function, weights(0, 1, 40, 40, 8))
    (step,) = [step for step in schedule.steps if step.residual >= 0]
    assert schedule.values[step.out].over is schedule.values[step.residual]
    check_places(schedule)


@pytest.mark.parametrize("kind", ["is x", "read behind it"])
def test_a_residual_that_is_read_elsewhere_keeps_its_place(kind: str) -> None:
    def function(x: jax.Array) -> jax.Array:
        y = jsc.conv(x, weights(1, 1, 1, 8, 8))
        z = jsc.conv(y if kind == "is x" else x, weights(2, 3, 3, 8, 8), residual=y)
        return jsc.conv(z, weights(3, 1, 1, 8, 8), residual=None if kind == "is x" else y)

    schedule = schedule_of(function, weights(0, 1, 40, 40, 8))
    assert all(value.over is None for value in schedule.values)
    check_places(schedule)


def test_a_projection_waits_where_that_takes_less_memory() -> None:
    def function(x: jax.Array, wide: int) -> jax.Array:
        y = jsc.conv(x, weights(1, 1, 1, 8, 8))
        shortcut = jsc.conv(y, weights(2, 1, 1, 8, wide), strides=2)
        z = jsc.conv(y, weights(3, 1, 1, 8, wide))
        z = jsc.conv(z, weights(4, 3, 3, wide, 16), strides=2, padding=1)
        return jsc.conv(jsc.conv(z, weights(5, 1, 1, 16, wide), residual=shortcut), weights(6, 1, 1, wide, 8))

    for wide, moved in ((64, True), (8, False)):
        plain, least = (
            schedule_of(lambda x, wide=wide: function(x, wide), weights(0, 1, 40, 40, 8), least)
            for least in (False, True)
        )
        assert (least.workspace_bytes < plain.workspace_bytes) == moved
        assert ([step.kernel for step in least.steps] != [step.kernel for step in plain.steps]) == moved
        for number, step in enumerate(least.steps):
            for value in (step.x, step.residual):
                assert value < 0 or least.values[value].first < number <= least.values[value].last
        check_places(least)


@pytest.mark.parametrize("wide", [8, 64])
def test_a_projection_stands_beside_the_first_layer_of_its_block(wide: int) -> None:
    """Wherever the model has it, so that kernels overlap; it waits where that takes more memory, and of more images."""

    def function(x: jax.Array, is_last: bool) -> jax.Array:
        y = jsc.conv(x, weights(1, 1, 1, 8, 8))
        shortcut = None if is_last else jsc.conv(y, weights(2, 3, 3, 8, wide), strides=2, padding=1)
        z = jsc.conv(y, weights(3, 3, 3, 8, wide), padding=1)
        z = jsc.conv(z, weights(4, 3, 3, wide, 16), strides=2, padding=1)
        if shortcut is None:
            shortcut = jsc.conv(y, weights(2, 3, 3, 8, wide), strides=2, padding=1)
        return jsc.conv(jsc.conv(z, weights(5, 1, 1, 16, wide), residual=shortcut), weights(6, 1, 1, wide, 8))

    def is_first(schedule: Schedule) -> bool:
        reads_y = [step.out for step in schedule.steps if step.x == schedule.steps[0].out]
        return reads_y[0] == next(step.residual for step in schedule.steps if step.residual >= 0)

    for is_last in (False, True):
        schedule = schedule_of(lambda x, is_last=is_last: function(x, is_last), weights(0, 1, 40, 40, 8))
        assert is_first(schedule) == (wide == 8)
        assert (
            schedule.workspace_bytes
            == schedule_of(
                lambda x, is_last=not is_last: function(x, is_last), weights(0, 1, 40, 40, 8)
            ).workspace_bytes
        )
        check_places(schedule)
        check_reads(schedule, inside=False)
    assert not is_first(schedule_of(lambda x: function(x, True), weights(0, 2, 40, 40, 8)))


def check_pairs(schedule: Schedule) -> None:
    """What a kernel of two 1x1 layers writes last lies over nothing that it reads, nor over the map between them."""
    for step, following in itertools.pairwise(schedule.steps):
        if following.x != step.out or following.residual >= 0 or not schedule._may_be_pair(step, following):
            continue
        last = spans(schedule, following.out)
        for number in {step.x, step.out, step.residual} - {-1}:
            small = number != step.residual  # a residual's are not read
            for read, written in itertools.product(spans(schedule, number, small), last):
                assert read.stop <= written.start or written.stop <= read.start


def spans(schedule: Schedule, number: int, small: bool = True) -> list[range]:
    """What a value, and its low parts, take of the workspace, in units of its alignment."""
    value = schedule.values[number]
    firsts = [value.index] if value.where is Where.WORKSPACE else []
    firsts += [value.low_part] if small and value.is_split else []
    return [range(at // _ALIGNMENT, (at + schedule._bytes(value)) // _ALIGNMENT) for at in firsts]


def check_reads(schedule: Schedule, inside: bool) -> None:
    """Plays the steps in a workspace: each finds what it reads, whole, and leaves it whole but for a residual.

    inside: kernels take the pools behind them, and write where the pool would while they read x.
    """
    lies: list[tuple[int, int, int] | None]  # (value, whether of its low parts, which part of it)
    lies = [None] * (schedule.workspace_bytes // _ALIGNMENT)

    def check(number: int, small: bool = False) -> None:
        assert number < 0 or schedule.values[number].where is not Where.NOWHERE
        for kind, span in enumerate(spans(schedule, number, small) if number >= 0 else []):
            assert [lies[at] for at in span] == [(number, kind, part) for part in range(len(span))]

    steps = iter(zip(schedule.steps, [*schedule.steps[1:], None], strict=True))
    for step, behind in steps:
        check(step.x, small=step.kind == 0)
        check(step.residual)
        out = step.out
        is_pooled = behind is not None and step.kind == 0 and (behind.kind, behind.x) == (1, out)
        if behind is not None and is_pooled and (inside or schedule.values[out].where is Where.NOWHERE):
            out = behind.out
            next(steps)
        for kind, span in enumerate(spans(schedule, out)):
            for part, at in enumerate(span):
                lies[at] = out, kind, part
        check(step.x, small=step.kind == 0)
        if schedule.values[out].over is None:
            check(step.residual)


@pytest.mark.parametrize("takes", [None, 0, 2, 1])
@pytest.mark.parametrize("seed", range(20))
def test_places_and_order_of_chains_of_any_form(seed: int, takes: int | None) -> None:
    """With pools that are not known to be taken, or known: none, those behind some numbers of output channels, or all.

    Layers of odd seeds are so wide that one kernel may run two.
    """
    rng = np.random.default_rng(seed)
    widths = [64, 128, 192] if seed % 2 else [8, 16, 32]
    precision = "highest" if seed % 4 < 2 else "default"

    def function(x: jax.Array) -> list[jax.Array]:
        maps, results = [x], []
        for _ in range(rng.integers(4, 16)):
            source = maps[-1 - int(rng.integers(min(4, len(maps))))]
            out_channels, window = int(rng.choice(widths)), int(rng.choice([1, 3]))
            alike = [y for y in maps[1:] if y.shape == (*source.shape[:3], out_channels)]
            residual = alike[rng.integers(len(alike))] if alike and rng.random() < 0.6 else None
            kernel = jnp.zeros((window, window, source.shape[3], out_channels))
            if source.shape[1] > 3 and rng.random() < 0.2:
                maps.append(jsc.conv_pool(source, kernel, padding="SAME", precision=precision))
            else:
                maps.append(jsc.conv(source, kernel, padding="SAME", residual=residual, precision=precision))
            if rng.random() < 0.1:
                results.append(maps[-1])
        return [*results, maps[-1]]

    def takes_pool(key: chain_tiles.Key, *_: Any) -> bool:
        return bool(takes) and key[6] % (16 // takes) == 0

    found = [
        e for e in equations(rewrite.fuse(function), weights(0, 1, 17, 17, 8)) if e.primitive is chains.fused_chain_p
    ]
    assert found
    for equation in found:
        options = {} if takes is None else {"takes_pool": takes_pool}
        plain, least = (
            make([v.aval for v in equation.invars], equation.params["layers"], equation.params["results"], **options)
            for make in (Schedule, Schedule.in_least_memory)
        )
        assert sorted(step.kernel for step in plain.steps) == sorted(step.kernel for step in least.steps)
        assert least.workspace_bytes <= plain.workspace_bytes
        for schedule in (plain, least):
            check_reads(schedule, inside=False)
            check_reads(schedule, inside=True)
            check_places(schedule)
            check_pairs(schedule)
