"""How calls are timed."""

from __future__ import annotations

import functools
import math
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_sparse_conv._src.plans import timing


def test_blocked_shows_every_function_every_operand() -> None:
    seen: dict[str, list[int]] = {"a": [], "b": []}
    functions = {name: lambda i, name=name: seen[name].append(i) for name in seen}
    found = timing.blocked(functions, [(0,), (1,), (2,), (3,)], repeats=8)
    assert found.keys() == seen.keys()
    for indices in seen.values():
        assert all(indices[3:].count(i) == 2 for i in range(4))  # three calls are the warm-up
    assert found["a"].repeats == 8
    assert 0 < found["a"].best <= found["a"].low <= found["a"].median <= found["a"].high


def test_streaks_are_of_one_function_and_take_every_operand() -> None:
    calls: list[tuple[str, int]] = []
    functions = {name: lambda i, name=name: calls.append((name, i)) for name in "ab"}
    found = timing.streaks(functions, [(0,), (1,), (2,)], repeats=2)
    assert found.keys() == functions.keys()
    assert found["a"].repeats == 2
    names = "".join(name for name, _ in calls[-4 * timing._MAX_STREAK :])
    assert names == ("a" * timing._MAX_STREAK + "b" * timing._MAX_STREAK) * 2
    assert [i for _, i in calls[-6:]] == [(timing._MAX_STREAK - 6 + i) % 3 for i in range(6)]


def test_calls_in_front_of_streaks_are_not_timed() -> None:
    calls: list[int] = []
    timing.streaks({"f": calls.append}, [(0,), (1,)], repeats=1, untimed=3)
    assert calls[-timing._MAX_STREAK - 3 :] == [0, 1, 0, *[i % 2 for i in range(timing._MAX_STREAK)]]


def test_a_single_repeat_is_its_own_median() -> None:
    found = timing.blocked({"f": lambda: None}, [()], repeats=1)["f"]
    assert found.low == found.median == found.high


def test_on_device_calls_are_neither_merged_nor_dropped() -> None:
    with jax.default_device(jax.devices("cpu")[0]):
        x = jnp.ones((4, 4))
        text = timing._chain(jax.jit(lambda x: x @ x)).lower(((x,),) * 3).compile().as_text()
    assert text.count("__onednn$matmul") + text.count(" dot(") >= 3
    x = jnp.ones((512, 512))
    found = timing.on_device({"f": jax.jit(lambda x: x @ x)}, [(x,), (x,)], repeats=2)["f"]
    assert len(found.samples) == found.repeats == 2


class Clock:
    """A host and a device whose times are known, in the place of both for `on_device`: chains are their functions."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.done = 0.0  # the host's clock, and when the device will be done
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(timing.jax, "block_until_ready", lambda _: self.wait(1e-3))
        busy = timing._Busy(lambda *_: self.work(1e-5, 2e-3), jnp.zeros(()), 2e-3)
        monkeypatch.setattr(timing, "_busy", lambda *_: busy)
        monkeypatch.setattr(timing, "_chain", lambda function: lambda _: function())
        monkeypatch.setattr(timing, "_rotated", lambda *_: [()] * 32)

    def work(self, dispatching: float, seconds: float) -> None:
        self.now += dispatching
        self.done = max(self.done, self.now) + seconds

    def wait(self, latency: float = 0.0) -> None:
        self.now = max(self.now, self.done) + latency


def test_chains_wait_for_a_device_that_is_busy_until_all_are_dispatched(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Clock(monkeypatch).work
    functions = {"short": lambda: work(200e-6, 100e-6), "long": lambda: work(200e-6, 3e-3)}
    functions["slow to dispatch"] = lambda: work(4e-3, 1e-3)
    calls = iter(range(10**6))
    functions["late now and then"] = lambda: work(2e-3 if next(calls) % 40 == 39 else 200e-6, 100e-6)
    found = timing.on_device(functions, [()], repeats=3)
    seconds = {name: timed.median * 32 for name, timed in found.items()}
    assert seconds == pytest.approx(
        {"short": 100e-6, "long": 3e-3, "slow to dispatch": 1e-3, "late now and then": 1e-4}
    )


def test_a_pause_of_the_host_neither_counts_nor_makes_samples_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    calls = 0

    def function() -> None:
        nonlocal calls
        calls += 1
        clock.work(50e-3 if calls in (60, 92) else 200e-6, 100e-6)  # in several chains, and in one

    found = timing.on_device({"": function}, [()], repeats=5)[""]
    assert [32 * seconds for seconds in found.samples] == pytest.approx([100e-6] * 5)
    first = 2 + 1 + 2 * (1 + timing._CHAINS_PER_SAMPLE)  # how many, whether the host waits, how fast it dispatches
    assert calls == first + (5 + 2) * (1 + 1 + timing._CHAINS_PER_SAMPLE)


def test_times_are_positive_beside_other_work_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """That always meets the one chain, so that the several seem to take less; all of what they take is counted then."""
    clock = Clock(monkeypatch)
    calls = 0
    first = 2 + 1 + 2 * (1 + timing._CHAINS_PER_SAMPLE)
    of_sample = 1 + 1 + timing._CHAINS_PER_SAMPLE

    def function() -> None:
        nonlocal calls
        calls += 1
        meets = calls > first and (calls - first) % of_sample == 1
        clock.work(200e-6, 10.0 if meets else 100e-6)

    found = timing.on_device({"": function}, [()], repeats=2)[""]
    assert all(100e-6 < 32 * seconds < 10.0 for seconds in found.samples)


def test_functions_that_wait_for_the_device_are_timed_without_other_work(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    waits = 0

    def function() -> None:
        nonlocal waits
        waits += 1
        clock.wait()
        clock.work(200e-6, 100e-6)

    found = timing.on_device({"": function}, [()], repeats=9)[""]
    assert [32 * seconds for seconds in found.samples] == pytest.approx([300e-6] * 9)
    assert waits == 2 + 2 + 9 * (1 + 1 + timing._CHAINS_PER_SAMPLE)


def test_the_device_that_is_kept_busy_is_that_of_the_operands() -> None:
    one = jax.devices()[-1]
    assert timing._device_of([((jax.device_put(1.0, one), np.zeros(3)),)]) == one
    assert timing._device_of([np.zeros(3)]) is None
    if len(jax.devices()) > 1:
        assert timing._device_of([jax.device_put(1.0, device) for device in jax.devices()]) is None


def test_chains_are_fewer_where_a_call_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    x = jnp.ones((4, 4))
    chain = timing._chain(jax.jit(lambda x: x @ x))
    monkeypatch.setattr(timing, "_SAMPLE_SECONDS", 1e-9)
    assert timing._chains_per_sample(chain, ((x,),) * 2) == 1
    monkeypatch.setattr(timing, "_SAMPLE_SECONDS", 1e9)
    assert timing._chains_per_sample(chain, ((x,),) * 2) == timing._CHAINS_PER_SAMPLE


def test_calls_may_differ_between_functions() -> None:
    counts = {"a": 0, "b": 0}

    def count(name: str) -> None:
        counts[name] += 1

    functions = {name: lambda name=name: count(name) for name in counts}
    timing.blocked(functions, [()], repeats=2, calls={"a": 7, "b": 8})
    assert counts == {"a": 3 + 14, "b": 3 + 2 * (8 + 1)}


def test_what_fails_when_it_is_run_is_named_with_the_reason() -> None:
    def refuse(x: np.ndarray) -> np.ndarray:
        raise RuntimeError("refused")

    works = jax.jit(lambda x: x + 1)
    fails = jax.jit(lambda x: jax.pure_callback(refuse, jax.ShapeDtypeStruct((3,), jnp.float32), x))
    operands = [(jnp.ones(3),), (jnp.zeros(3),)]
    for chained in (False, True):
        found = timing.failures({"works": works, "fails": fails}, operands, chained=chained)
        assert list(found) == ["fails"]
        assert "callback" in found["fails"].lower()
        assert len(found["fails"]) <= 300
    # JAX looks at the last callback of a device again when the process ends, so let that be one that works.
    jax.block_until_ready(jax.jit(lambda x: jax.pure_callback(np.asarray, x, x))(jnp.ones(3)))


def test_compiling_ahead_spares_the_measurement_the_compilation() -> None:
    traces = []

    @jax.jit
    def function(x: jax.Array) -> jax.Array:
        traces.append(x.shape)
        return x + 1

    operands = [(jnp.ones(3),)]
    timing.compile_ahead(function, operands)
    before = len(traces)
    timing.per_call({"f": function}, operands, repeats=2)
    assert len(traces) == before


def test_geometric_mean() -> None:
    assert timing.geometric_mean([1.0, 4.0]) == pytest.approx(2)


def test_what_ran_is_read_from_the_compiled_program() -> None:
    assert timing.what_ran(jax.jit(lambda x: x + 1), jnp.ones(3)) == "xla"


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_what_xla_tunes_is_compiled_alone_on_an_accelerator(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    running: list[str] = []
    beside: dict[str, list[str]] = {}
    gate = threading.Barrier(2)

    def job(name: str) -> str:
        running.append(name)
        if name.startswith("plain"):
            gate.wait(60)  # two of them are under way at once
        beside[name] = list(running)
        running.remove(name)
        return name.upper()

    monkeypatch.setattr(timing.devices, "default_platform", lambda: backend)
    names = ["plain 1", "tuned 1", "plain 2", "tuned 2"]
    found = dict(timing.compile_each([(functools.partial(job, name), "tuned" in name) for name in names], threads=4))
    assert [found[index] for index in range(4)] == [name.upper() for name in names]
    if backend == "gpu":
        assert beside["tuned 1"] == ["tuned 1"]
        assert beside["tuned 2"] == ["tuned 2"]


def test_samples_end_with_their_time_but_not_before_the_third() -> None:
    functions = {"one": jax.jit(lambda x: x + 1), "two": jax.jit(lambda x: x + 2)}
    operands = [(jnp.ones(3),)]
    for timed in (timing.blocked, timing.streaks):
        for seconds, repeats in ((0.0, 3), (math.inf, 7)):
            found = timed(functions, operands, 7, seconds=seconds)
            assert [each.repeats for each in found.values()] == [repeats, repeats]
