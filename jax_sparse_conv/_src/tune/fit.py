"""`tune --fit`: fits the models' constants to raw times.

Every group of constants and kind of products is fitted alone, by least squares of logarithms, so that constants stay
positive and a short time counts as much as a long one. Times that are far off count less. Every constant is drawn to
its first value, so one that no time depends on has that. A group with fewer times than `_LEAST` stays as it is. So does
ECR by density (`model.sparse_us`), as raw times are of one density.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from jax_sparse_conv._src.devices import Device
from jax_sparse_conv._src.dispatch import model
from jax_sparse_conv._src.dispatch.model import Group, Model
from jax_sparse_conv._src.dispatch.planner import Candidate
from jax_sparse_conv._src.dispatch.table import Key
from jax_sparse_conv._src.tune.raw_times import Time

Logs: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]

_LEAST = 5  # times of a group and kind
_ROUNDS = 12
_STEP = 1e-3  # of a logarithm, for derivatives
_FAR = 0.15  # residuals beyond it count less
_DRAWN = 0.5  # a constant that moved by a factor of e^_DRAWN costs as much as a residual of _FAR
_CALIBRATED = ("ecr", "few_channels")  # of these few tiles were timed: times say nothing of their order


def fitted(start: Model, times: Sequence[Time], say: Callable[[str], None] = lambda _: None) -> Model:
    """The model with constants that fit the times; `fit` has the residuals, before and after.

    Args:
      start: the model whose first values constants begin with and are drawn to.
      times: of any GPUs.
      say: told of every group, as it is done.
    """
    residuals: dict[str, Any] = {}

    def fit(name: str, group: Group, kind: str, of_kind: Sequence[Time], expected: Expected) -> Group:
        free = [name not in _CALIBRATED or each.startswith("us ") for each in group.names]
        values = _fitted(group.first[kind], free, of_kind, expected)
        before, after = (_rms(expected(np.asarray(each)), of_kind) for each in (group.first[kind], values))
        residuals[f"{name}/{kind}"] = {"times": len(of_kind), "rms": round(after, 3), "rms_before": round(before, 3)}
        say(f"{name}/{kind}: {len(of_kind)} times, rms {before:.3f} before, {after:.3f} after")
        return dataclasses.replace(group, kinds={**group.kinds, kind: tuple(values)})

    kernels, xla = dict(start.kernels), dict(start.xla)
    for (family, kind), timed in _by(times, _family_of).items():
        taken = _taken(timed, _Kernels(start, family, kind, timed)(np.asarray(kernels[family].first[kind])))
        if len(taken) >= _LEAST:
            kernels[family] = fit(family, kernels[family], kind, taken, _Kernels(start, family, kind, taken))
    for (class_, kind), found in _by(times, _class_of).items():
        if len(found) >= _LEAST:
            xla[class_] = fit(f"xla {class_}", xla[class_], kind, found, _Xla(found))
    others = dict(start.others)
    pooled = [time for time in times if time.candidate is None and time.key.pool]
    if len(pooled) >= _LEAST:
        others["pool"] = fit("pool", others["pool"], model.ALL, pooled, _Pool(pooled, xla))
    return dataclasses.replace(
        start, kernels=kernels, xla=xla, others=others, fit={**start.fit, "residuals": residuals}
    )


# --- what a group expects --------------------------------------------------------------------------------------------

Expected: TypeAlias = Callable[[Logs], Logs]
"""From a group's constants to microseconds, in the order of the times."""


def _family_of(time: Time) -> tuple[str, str] | None:
    return None if time.candidate is None else time.key.layer.model_group(time.candidate, time.device)


def _taken(times: Sequence[Time], expected: Logs) -> list[Time]:
    """The times without those of calls that a planner has no kernel for by the first values: it expects infinity."""
    return [time for time, us in zip(times, expected, strict=True) if np.isfinite(us)]


def _class_of(time: Time) -> tuple[str, str] | None:
    if time.candidate is not None or time.key.pool:
        return None
    return model.class_of(time.key.workload), time.key.kind


def _by(
    times: Iterable[Time], name: Callable[[Time], tuple[str, str] | None]
) -> Mapping[tuple[str, str], Sequence[Time]]:
    found: dict[tuple[str, str], list[Time]] = collections.defaultdict(list)
    for time in times:
        names = name(time)
        if names is not None:
            found[names].append(time)
    return found


class _Kernels:
    """Of a family of kernels, by its planner."""

    def __init__(self, start: Model, family: str, kind: str, times: Sequence[Time]) -> None:
        self._start, self._family, self._kind = start, family, kind
        self._times: dict[tuple[Key, Device], list[tuple[int, Candidate]]] = collections.defaultdict(list)
        for index, time in enumerate(times):
            assert time.candidate is not None
            self._times[time.key, time.device].append((index, time.candidate))
        self._count = len(times)

    def __call__(self, constants: Logs) -> Logs:
        group = self._start.kernels[self._family]
        group = dataclasses.replace(group, kinds={**group.kinds, self._kind: tuple(constants)})
        every = dataclasses.replace(self._start, kernels={**self._start.kernels, self._family: group}).of_planners
        found = np.empty(self._count)
        for (key, device), candidates in self._times.items():
            expected = key.layer.expected([candidate for _, candidate in candidates], device, every, any_build=True)
            found[[index for index, _ in candidates]] = expected
        return found


class _Xla:
    """Of a class of XLA's convolutions."""

    def __init__(self, times: Sequence[Time]) -> None:
        self._features = np.array([model.features(time.key.workload, time.device) for time in times]).T

    def __call__(self, constants: Logs) -> Logs:
        return np.asarray(model.xla_of(constants, self._features))


class _Pool:
    """Of XLA's convolutions with a pool, by constants of the pool; those of convolutions are fitted before."""

    def __init__(self, times: Sequence[Time], xla: Mapping[str, Group]) -> None:
        workloads = [(time.key.workload, time.device) for time in times]
        found = [model.pool_features(workload, device) for workload, device in workloads]
        self._features = np.array(found).T
        self._alone = np.empty(len(times))
        for index, (workload, device) in enumerate(workloads):
            plain = workload.unpooled()
            constants = xla[model.class_of(plain)].kinds[model.kind_of(plain)]
            self._alone[index] = model.xla_of(constants, model.features(plain, device))

    def __call__(self, constants: Logs) -> Logs:
        return self._alone + np.asarray(model.pool_of(constants, self._features))


# --- least squares ---------------------------------------------------------------------------------------------------


def _rms(expected: Logs, times: Sequence[Time]) -> float:
    return float(np.sqrt(np.mean(_errors(expected, times) ** 2)))


def _errors(expected: Logs, times: Sequence[Time]) -> Logs:
    return np.log(np.clip(expected, 1e-3, 1e9)) - np.log([time.us for time in times])


def _fitted(start: Sequence[float], may_move: Sequence[bool], times: Sequence[Time], expected: Expected) -> list[float]:
    """Gauss-Newton steps in the logarithms of the constants that are not 0 and may move."""
    values = np.asarray(start, np.float64)
    free = np.flatnonzero((values > 0) & np.asarray(may_move))
    first = np.log(values[free])
    logs = first.copy()

    def constants(of_free: Logs) -> Logs:
        found = values.copy()
        found[free] = np.exp(of_free)
        return found

    def cost(errors: Logs, of_free: Logs) -> float:
        robust = np.sum(np.sqrt(1 + (errors / _FAR) ** 2) - 1)
        return float(2 * robust + np.sum(((of_free - first) / _DRAWN) ** 2))

    errors = _errors(expected(constants(logs)), times)
    for _ in range(_ROUNDS):
        columns = []
        for index in range(len(free)):
            moved = logs.copy()
            moved[index] += _STEP
            columns.append((_errors(expected(constants(moved)), times) - errors) / _STEP)
        derivatives = np.stack(columns, axis=1)
        weights = 1 / np.sqrt(1 + (errors / _FAR) ** 2) / _FAR**2
        left = derivatives.T @ (weights[:, None] * derivatives) + np.eye(len(free)) / _DRAWN**2
        right = derivatives.T @ (weights * errors) + (logs - first) / _DRAWN**2
        step, before = np.linalg.solve(left, right), cost(errors, logs)
        for _ in range(6):  # halved until it helps
            found = logs - np.clip(step, -1, 1)
            found_errors = _errors(expected(constants(found)), times)
            if cost(found_errors, found) < before:
                break
            step /= 2
        else:
            break
        logs, errors = found, found_errors
        if before - cost(errors, logs) < 1e-4 * before:
            break
    return list(constants(logs))
