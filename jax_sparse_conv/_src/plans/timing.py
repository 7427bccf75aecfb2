"""How this package times calls: both sides alternate in one process, on rotated operands, and medians count.

On a CPU a call is timed from its start to `block_until_ready`, in streaks of one function. On an accelerator such a
call is mostly the host's latency. There the device time comes from many calls inside one jit, dispatched while the
device still has other work.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import itertools
import math
import os
import re
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_sparse_conv._src import devices

Operands: TypeAlias = tuple[Any, ...]
Function: TypeAlias = Callable[..., Any]
_Result = TypeVar("_Result")

ROTATIONS = 4  # inputs that successive calls are given

_LARGER_THAN_CACHES = 2**28
_TARGET = re.compile(r'custom_call_target="jsc_(\w+)"')
# Targets whose name is not the one that `implementation=` takes.
NAME_OF_TARGET = {"dense": "ecr", "coo_by_density": "coo", "coo_lists": "coo"}
_WARM_UP = 3
_FEWEST_SAMPLES = 3
_MANY_CALLS = 8  # of a sample, so that one more before it costs little
_MAX_CALLS = 32  # in one chain
_CHAIN_BYTES = 2**31  # of operands and results alive in one chain
_CHAINS_PER_SAMPLE = 16  # dispatching and waiting cost the host some 0.4 ms a sample: under 1 us a call this way
_SAMPLE_SECONDS = 0.04  # fewer chains where that is 1 % of the sample
_BUSY_SIZE, _BUSY_SECONDS = 1024, 2e-4  # of the other work, at least: products of matrices
_MOST_BUSY = 12  # such products, because JAX lets 32 executions wait on a GPU
_MARGIN = 1.3  # of their time over that of dispatching
_TRIES = 4  # of a sample, while dispatching takes longer
_STREAK_SECONDS = 0.01
_MAX_STREAK = 200  # calls


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds per call: the median of `repeats` samples, their quartiles and the best of them.

    Other work on the machine disturbs the best least. Not so for device times: they are differences, which other work
    can make smaller (`on_device`). `samples` are in the order they were taken, so those of functions that alternated
    pair up.
    """

    best: float
    median: float
    low: float
    high: float
    repeats: int
    samples: tuple[float, ...]

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        if len(samples) < 2:
            return cls(samples[0], samples[0], samples[0], samples[0], len(samples), tuple(samples))
        low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(min(samples), median, low, high, len(samples), tuple(samples))

    @property
    def microseconds(self) -> float:
        return self.median * 1e6


def blocked(
    functions: Mapping[str, Function],
    operands: Sequence[Operands],
    repeats: int = 30,
    calls: int | Mapping[str, int] = 1,
    seconds: float = math.inf,
) -> dict[str, Timing]:
    """Time of `function(*operands[i])` until its result is there; the functions alternate.

    Args:
      functions: compiled functions by name; each is called with the same operands.
      operands: argument tuples that successive calls rotate through.
      repeats: samples per function.
      calls: calls dispatched before waiting, in one sample, of every function or of each; the time is per call.
      seconds: no further samples after so long, but three of each function.
    """
    for function in functions.values():
        for index in range(_WARM_UP):
            jax.block_until_ready(function(*operands[index % len(operands)]))
    calls_of = calls if isinstance(calls, Mapping) else dict.fromkeys(functions, calls)
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for repeat in _repeats(repeats, seconds):
        for position, (name, function) in enumerate(functions.items()):
            # Everyone meets all operands, but not those that the one before has just left in the cache.
            first = repeat * calls_of[name] + position * max(1, len(operands) // 2)
            chosen = [operands[(first + call) % len(operands)] for call in range(calls_of[name])]
            if len(chosen) >= _MANY_CALLS:  # the first finds what another function left: caches, graphs, free memory
                jax.block_until_ready(function(*chosen[-1]))
            start = time.perf_counter()
            for arguments in chosen:
                # The result before is given back. Kept, each call would have buffers at new addresses, which every node
                # of a CUDA graph has to be told.
                result = function(*arguments)
            jax.block_until_ready(result)
            samples[name].append((time.perf_counter() - start) / calls_of[name])
    return {name: Timing.of(values) for name, values in samples.items()}


def streaks(
    functions: Mapping[str, Function],
    operands: Sequence[Operands],
    repeats: int = 30,
    untimed: int = 0,
    seconds: float = math.inf,
) -> dict[str, Timing]:
    """Time of a call until its result is there, among calls of the same function; streaks of some 10 ms alternate.

    A call that follows another function's finds that one's data in the caches, and its threads asleep or on another
    core. Such times say more of the neighbour than of the function; `blocked` measures them. Each streak has as many
    calls as the slowest function needs for 10 ms, but at least one for every tuple of operands. The `untimed` calls in
    front of each streak do not count. Where a streak is one call, they leave it the caches as the function leaves them.
    There are no further streaks after so many `seconds`, but three of each function.
    """
    slowest = max(timed.best for timed in blocked(functions, operands, 1).values())  # which warms them, too
    if slowest < _STREAK_SECONDS:
        slowest = max(_seconds(function, operands) for function in functions.values())
    length = max(len(operands), min(_MAX_STREAK, math.ceil(_STREAK_SECONDS / slowest)))
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for _ in _repeats(repeats, seconds):
        for name, function in functions.items():
            for arguments in itertools.islice(itertools.cycle(operands), untimed):
                jax.block_until_ready(function(*arguments))
            chosen = list(itertools.islice(itertools.cycle(operands), length))
            samples[name].append(_seconds(function, chosen))
    return {name: Timing.of(values) for name, values in samples.items()}


def on_device(
    functions: Mapping[str, Function], operands: Sequence[Operands], repeats: int = 30, seconds: float = math.inf
) -> dict[str, Timing]:
    """Device time per call, from up to 32 calls inside one jit; the functions alternate.

    For the compiler every call of such a series has operands of its own, because they are separate parameters.
    Something of every result is returned. So nothing is merged or dropped.

    Passing 100 parameters takes the host longer than small layers take the device. So the series wait for a device that
    is busy until the last of them is dispatched. A sample is the difference between several series and one. Two things
    stay in the time. One is what a call makes the host wait for, as a `lax.cond` may. The other is dispatching that
    takes longer than the device can be kept busy. There are no further samples after so many `seconds`, but three of
    each function.
    """
    chained = _rotated(functions.values(), operands)
    chains = {name: _chain(function) for name, function in functions.items()}
    counts = {name: _chains_per_sample(chain, chained) for name, chain in chains.items()}
    busy = _busy(_device_of(chained))
    ahead = dict.fromkeys(chains, _MOST_BUSY)  # products in front of each chain's samples; 0 where they hide nothing

    def fit(name: str, dispatching: float) -> None:
        """As many chains as are dispatched while the device is busy, and products for no more than that."""
        products = _MARGIN * dispatching / (1 + counts[name]) / busy.seconds  # for each chain
        counts[name] = max(1, min(counts[name], int(_MOST_BUSY / products) - 1))
        ahead[name] = min(_MOST_BUSY, math.ceil(products * (1 + counts[name])))

    for name, chain in chains.items():
        # Twice, because a pause of the host's is not how fast it dispatches.
        longest = _MOST_BUSY * busy.seconds
        if all(_behind(busy, _MOST_BUSY, chain, chained, 1)[1] >= longest for _ in range(2)):
            ahead[name] = 0
        else:
            fit(name, min(_behind(busy, _MOST_BUSY, chain, chained, 1 + counts[name])[1] for _ in range(2)))
    samples: dict[str, list[float]] = {name: [] for name in chains}
    for _ in _repeats(repeats, seconds):
        for name, chain in chains.items():
            for number in range(_TRIES):
                one, of_one = _behind(busy, ahead[name], chain, chained, 1)
                more, of_more = _behind(busy, ahead[name], chain, chained, 1 + counts[name])
                of_call = (more - one) / counts[name] / len(chained)
                most = ahead[name] * busy.seconds  # beyond it the host was late: its time, not the device's
                if of_call > 0 and (ahead[name] == 0 or max(of_one, of_more) < most):
                    break
                if number > 0 and of_more >= most:  # once may be a pause, and fewer chains are for all samples to come
                    fit(name, of_more)
            # With other work on the device the one chain may take longer than the several, every time.
            samples[name].append(of_call if of_call > 0 else more / (1 + counts[name]) / len(chained))
    return {name: Timing.of(values) for name, values in samples.items()}


def per_call(
    functions: Mapping[str, Function], operands: Sequence[Operands], repeats: int = 30, seconds: float = math.inf
) -> dict[str, Timing]:
    """The time a call costs its user on the default device: `streaks` on a CPU, `on_device` elsewhere.

    There are no further samples after so many `seconds`, but three of each function.
    """
    if devices.default_platform() == "cpu":
        return streaks(functions, operands, repeats, seconds=seconds)
    return on_device(functions, operands, repeats, seconds)


def failures(functions: Mapping[str, Function], operands: Sequence[Operands], chained: bool = False) -> dict[str, str]:
    """Why functions do not run, by name; those that run are not in it. What compiles may still fail when it is run.

    XLA's own convolutions do in some command buffers, by the algorithm that its tuning took (cuDNN status 5003).

    Args:
      functions: compiled functions by name.
      operands: argument tuples; the functions are called with the first.
      chained: call the chains of calls that `on_device` times.
    """
    if chained and devices.default_platform() != "cpu":
        arguments: Operands = (_rotated(functions.values(), operands),)
        functions = {name: _chain(function) for name, function in functions.items()}
    else:
        arguments = operands[0]
    reasons = {}
    for name, function in functions.items():
        try:
            jax.block_until_ready(function(*arguments))
        except (ValueError, jax.errors.JaxRuntimeError) as error:
            reasons[name] = " ".join(str(error).split())[:300]
    return reasons


def rotations(x: jax.Array) -> list[jax.Array]:
    """`x` and shifted copies, with as many zeros in other places, so that no call finds its input in a cache."""
    if x.nbytes > _LARGER_THAN_CACHES:
        return [x]
    axis = 2 if x.ndim == 4 else -1
    host = np.asarray(x)  # rolled there: XLA would compile it for every shape
    placed = x.sharding if x.committed else None  # as x is, or the same function would be compiled twice
    return [x, *(jax.device_put(np.roll(host, shift, axis), placed) for shift in range(1, ROTATIONS))]


def compile_each(
    jobs: Sequence[tuple[Callable[[], _Result], bool]], threads: int | None = None
) -> Iterator[tuple[int, _Result]]:
    """Run jobs that compile, several side by side; yields (index, result) as they end.

    On an accelerator XLA chooses the algorithms of its own convolutions and products by timing them. Other work on the
    device spoils that choice: float32 convolutions came out up to twice as slow. Such jobs run alone, one after
    another, before the others.

    Args:
      jobs: (job, whether XLA chooses algorithms in it).
      threads: at most so many at a time; None for a thread a core.
    """
    is_alone = [tuned and devices.default_platform() != "cpu" for _, tuned in jobs]
    for index in itertools.compress(range(len(jobs)), is_alone):
        yield index, jobs[index][0]()
    with concurrent.futures.ThreadPoolExecutor(threads or os.cpu_count()) as pool:
        waiting = {
            pool.submit(job): i for i, ((job, _), alone) in enumerate(zip(jobs, is_alone, strict=True)) if not alone
        }
        try:
            for future in concurrent.futures.as_completed(waiting):
                yield waiting[future], future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # of an interruption, which need not wait for the others


def compile_ahead(function: Function, operands: Sequence[Operands]) -> None:
    """Compile what `per_call` will run for a jitted function, so that it need not; threads may do so side by side."""
    if devices.default_platform() == "cpu":
        function.lower(*operands[0]).compile()  # type: ignore[attr-defined]
        return
    _chain(function).lower(_rotated([function], operands)).compile()  # type: ignore[attr-defined]


def what_ran(function: Function, *arguments: Any) -> str:
    """The native kernels in what a jitted function compiles to, by implementation name; "xla" without one.

    "|xla" after them says that the device may take dense convolution in their place.
    """
    text = function.lower(*arguments).compile().as_text() or ""  # type: ignore[attr-defined]
    names = dict.fromkeys(NAME_OF_TARGET.get(name, name) for name in _TARGET.findall(text))
    ran = "+".join(names) or "xla"
    return f"{ran}|xla" if names and " conditional(" in text else ran


def geometric_mean(values: Iterable[float]) -> float:
    """Geometric mean; NaN of nothing."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


@functools.lru_cache(maxsize=4096)
def _chain(function: Function) -> Function:
    """Many calls of a function in one jit; the same object for the same function, so that it compiles once."""

    @jax.jit
    def chain(chained: tuple[Operands, ...]) -> jax.Array:
        # The barrier keeps every result whole; returning one element of each spares the host hundreds of buffers.
        results = [lax.optimization_barrier(jax.tree.leaves(function(*arguments))[0]) for arguments in chained]
        return jnp.stack([result.reshape(-1)[0] for result in results])

    return chain


def _rotated(functions: Iterable[Function], operands: Sequence[Operands]) -> tuple[Operands, ...]:
    """The operands of a chain of calls of any of the functions."""
    return tuple(itertools.islice(itertools.cycle(operands), _chain_length(functions, operands)))


def _chain_length(functions: Iterable[Function], operands: Sequence[Operands]) -> int:
    results = max(_nbytes(jax.eval_shape(function, *operands[0])) for function in functions)
    return max(2, min(_MAX_CALLS, _CHAIN_BYTES // max(1, results * _CHAINS_PER_SAMPLE)))


class _Busy(NamedTuple):
    """A function that keeps the device busy for some milliseconds."""

    function: Function
    operand: jax.Array
    seconds: float


def _device_of(tree: Any) -> jax.Device | None:
    """Of the arrays in a tree, or None where they are on several, or there are none."""
    found = {device for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array) for device in leaf.devices()}
    return found.pop() if len(found) == 1 else None


@functools.cache
def _busy(device: jax.Device | None) -> _Busy:
    """Products of matrices as large as that takes, on a device; None for JAX's default."""
    function = jax.jit(functools.partial(jnp.matmul, precision="highest"))
    size, seconds = _BUSY_SIZE // 2, 0.0
    while seconds < _BUSY_SECONDS:
        size *= 2
        operand = jnp.zeros((size, size), jnp.float32, device=device)
        seconds = blocked({"": functools.partial(function, operand)}, [(operand,)], 3, _MOST_BUSY)[""].best
    return _Busy(function, operand, seconds)


def _behind(busy: _Busy, ahead: int, chain: Function, chained: tuple[Operands, ...], count: int) -> tuple[float, float]:
    """Seconds of so many chains behind so many products, and of dispatching the chains."""
    start = time.perf_counter()
    for _ in range(ahead):
        busy.function(busy.operand, busy.operand)
    dispatched = time.perf_counter()
    result = None
    for _ in range(count):
        del result  # its memory is free again: new addresses would have to be told to every node of a CUDA graph
        result = chain(chained)
    dispatching = time.perf_counter() - dispatched
    jax.block_until_ready(result)
    return time.perf_counter() - start, dispatching


def _chains_per_sample(chain: Function, chained: tuple[Operands, ...]) -> int:
    jax.block_until_ready(chain(chained))
    start = time.perf_counter()
    jax.block_until_ready(chain(chained))
    return max(1, min(_CHAINS_PER_SAMPLE, math.ceil(_SAMPLE_SECONDS / (time.perf_counter() - start))))


def _repeats(most: int, seconds: float) -> Iterator[int]:
    """0, 1, ... below `most`, and beyond the fewest until so many seconds have passed."""
    start = time.perf_counter()
    for repeat in range(most):
        if repeat >= _FEWEST_SAMPLES and time.perf_counter() - start > seconds:
            return
        yield repeat


def _seconds(function: Function, operands: Sequence[Operands]) -> float:
    """Per call, each waited for before the next."""
    start = time.perf_counter()
    for arguments in operands:
        jax.block_until_ready(function(*arguments))
    return (time.perf_counter() - start) / len(operands)


def _nbytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
