"""What choices lose against the best that was measured, from raw times of `tune`; it needs no GPU.

    python -m benchmarks regret benchmarks/results/h100/{tune,xla}.times.jsonl
    python -m benchmarks regret benchmarks/results/h100/{tune,xla}.times.jsonl --json regret.json

Four ways to choose: "tables" as on that GPU, "sibling" by the rows of other GPUs of the same build and else the models,
"no row" as for a shape that no table has seen (near rows count), "models" without any table. Regret is a choice's time
over that of the best, XLA or a kernel. XLA's time over a choice's says whether `None` is slower than what the user had.
Where the chosen tile was not timed, the fastest of its family stands for it.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.common import command, losing
from benchmarks.common.as_on import as_on
from jax_sparse_conv._src.devices import Device
from jax_sparse_conv._src.dispatch import choice, table
from jax_sparse_conv._src.dispatch.planner import Candidate
from jax_sparse_conv._src.dispatch.table import Key
from jax_sparse_conv._src.plans.timing import geometric_mean
from jax_sparse_conv._src.tune import measure, raw_times

Times: TypeAlias = Mapping[Key, Mapping[str, float]]
Way: TypeAlias = Callable[[Key, Device], "Candidate | None"]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A choice for a workload.

    Attributes:
      regret: its time over the best one's.
      ratio: XLA's time over its.
      chosen: the candidate, or "xla".
    """

    regret: float
    ratio: float
    chosen: str


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; the result is the exit status."""
    parser = command.parser("regret FILE ...", __doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="raw times, .times.jsonl")
    parser.add_argument("--json", type=Path, help="every outcome")
    options = parser.parse_args(argv)
    found: list[dict[str, Any]] = []
    print(f"{'device':24} {'kind':8} {'choice':8} {'calls':>6} {'regret':>7} {'worst':>6} {'losses':>7} {'least':>6}")
    for device, name, kind, outcomes in of_files(options.files):
        print(f"{device.name:24} {kind:8} {name:8} {_summary(list(outcomes.values()))}")
        found += [_row(device, kind, name, key, each) for key, each in outcomes.items()]
    if options.json:
        options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return 0


def of_files(files: Sequence[Path]) -> Iterator[tuple[Device, str, str, Mapping[Key, Outcome]]]:
    """Of files of raw times: device, way of `WAYS`, kind and outcomes."""
    for device, times in _of_devices(files).items():
        for name, way in WAYS.items():
            for kind, outcomes in sorted(_by_kind(device, times, way).items()):
                yield device, name, kind, outcomes


def is_loss(outcome: Outcome) -> bool:
    """Whether the choice is slower than what the user had."""
    return losing.is_loss(outcome.ratio)


def _summary(outcomes: Sequence[Outcome]) -> str:
    regrets, ratios = [each.regret for each in outcomes], [each.ratio for each in outcomes]
    losses = sum(map(is_loss, outcomes))
    return f"{len(outcomes):6} {geometric_mean(regrets):7.3f} {max(regrets):6.2f} {losses:7} {min(ratios):6.2f}"


def _row(device: Device, kind: str, name: str, key: Key, outcome: Outcome) -> dict[str, Any]:
    named = {"device": device.name, "kind": kind, "choice": name, "sizes": key.sizes, "residual": key.residual}
    return named | dataclasses.asdict(outcome)


def _of_devices(files: Sequence[Path]) -> Mapping[Device, Times]:
    """Of what XLA and kernels were timed for; of several times XLA's median, and the least of a kernel's."""
    entries: dict[Device, dict[Key, dict[str, list[float]]]] = collections.defaultdict(dict)
    for time in raw_times.times_of([entry for file in files for entry in raw_times.read(file)]):
        if not time.key.pool:
            name = measure.XLA if time.candidate is None else measure.name_of(time.candidate)
            entries[time.device].setdefault(time.key, {}).setdefault(name, []).append(time.us)
    return {
        device: {
            key: {name: statistics.median(us) for name, us in times.items()}
            for key, times in keys.items()
            if measure.XLA in times and len(times) > 1
        }
        for device, keys in entries.items()
    }


def _by_kind(device: Device, times: Times, way: Way) -> Mapping[str, Mapping[Key, Outcome]]:
    found: dict[str, dict[Key, Outcome]] = collections.defaultdict(dict)
    with as_on(device):
        for key, of_key in times.items():
            outcome = _outcome(of_key, way(key, device))
            if outcome is not None:
                found[key.kind][key] = outcome
    return found


def _outcome(times: Mapping[str, float], candidate: Candidate | None) -> Outcome | None:
    name = measure.XLA if candidate is None else measure.name_of(candidate)
    of_family = [us for each, us in times.items() if each.split()[0] == name.split()[0]]
    if name not in times and not of_family:
        return None
    us = times.get(name, min(of_family))
    return Outcome(us / min(times.values()), times[measure.XLA] / us, name)


# --- ways to choose --------------------------------------------------------------------------------------------------


def _by_tables(key: Key, device: Device) -> Candidate | None:
    return choice.on_gpu(key.workload).candidate


def _without_its_row(key: Key, device: Device) -> Candidate | None:
    row = table.near(key, device)
    return _by_models(key, device) if row is None else row.candidate


def _by_siblings(key: Key, device: Device) -> Candidate | None:
    row = table.of_sibling(key, device)
    return _by_models(key, device) if row is None else row.candidate


def _by_models(key: Key, device: Device) -> Candidate | None:
    return choice.by_models(key.workload, device).candidate


WAYS: Mapping[str, Way] = {
    "tables": _by_tables,
    "sibling": _by_siblings,
    "no row": _without_its_row,
    "models": _by_models,
}
