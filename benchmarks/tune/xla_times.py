"""XLA's times of the suite zoo as raw times of `tune`, which `tune --fit` reads beside those of kernels.

    python -m benchmarks xla_times benchmarks/results/h100

Reads zoo.json, and the description of the GPU in tune.times.jsonl; writes xla.times.jsonl beside them. bfloat16 and
float16 are one kind. Of a call that a run timed several times it is the median. Calls with a pool are kept, too: the
model of XLA's pool is fitted to them.
"""

from __future__ import annotations

import ast
import collections
import dataclasses
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import command
from jax_sparse_conv._src.dispatch import planner
from jax_sparse_conv._src.dispatch.table import Key
from jax_sparse_conv._src.layers.calls import Call
from jax_sparse_conv._src.primitive import lowering
from jax_sparse_conv._src.problem.geometry import Geometry, Pool
from jax_sparse_conv._src.tune import measure

FLAGS = "command buffers"
_KEPT = ("date", "command", "device", "xla_flags", "commit", "versions", "driver")
_TYPES = {"Call": Call, "Geometry": Geometry, "Pool": Pool}


def main(argv: Sequence[str] | None = None) -> int:
    """Write the file; the result is the exit status."""
    parser = command.parser("xla_times FOLDER", __doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="of one device's results")
    folder = parser.parse_args(argv).folder
    zoo = json.loads((folder / "zoo.json").read_text(encoding="utf-8"))
    lines = list(_lines(zoo, _gpu(folder / "tune.times.jsonl")))
    (folder / "xla.times.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    print(f"{sum('key' in line for line in lines)} calls")
    return 0


def call_of(text: str) -> Call:
    """A call from what its `repr` says.

    Raises:
      ValueError: another text.
    """

    def value(node: ast.expr) -> Any:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _TYPES:
            return _TYPES[node.func.id](**{str(each.arg): value(each.value) for each in node.keywords})
        return ast.literal_eval(node)

    found = value(ast.parse(text, mode="eval").body)
    if not isinstance(found, Call):
        raise ValueError(f"{text!r} is no call")
    return found


def key_of(call: Call) -> Key:
    """As `tune` has it; 16 bits as bfloat16."""
    config, x, kernel, _ = measure.bound(call)
    workload = lowering.workload_of(x, kernel, config)
    key = Key.of(workload.unpooled())
    assert key is not None
    return dataclasses.replace(key, pool=planner.numbers(x.shape, kernel.shape, workload.geometry)[1])


def _gpu(raw: Path) -> Mapping[str, Any]:
    with raw.open(encoding="utf-8") as file:
        found: Mapping[str, Any] = json.loads(file.readline())["run"]["gpu"]
    return found


def _lines(zoo: Mapping[str, Any], gpu: Mapping[str, Any]) -> list[dict[str, Any]]:
    times: dict[int, dict[Key, list[float]]] = collections.defaultdict(lambda: collections.defaultdict(list))
    for row in zoo["rows"]:
        call = call_of(row["details"])
        if row["flags"] == FLAGS and call.op != "dense":
            times[row["run"]][key_of(call)] += _xla(row)
    found: list[dict[str, Any]] = []
    for run, keys in sorted(times.items()):
        described = {name: zoo["runs"][run].get(name) for name in _KEPT} | {"gpu": gpu, "gpu_by_name": True}
        entries = [_entry(key, us) for key, us in keys.items() if us]
        found += [{"run": described}, *entries] if entries else []
    return found


def _xla(row: Mapping[str, Any]) -> list[float]:
    names = ("xla_us", "ours_us") if row.get("implementation") == "xla" else ("xla_us",)
    return [row[name] for name in names if name in row]


def _entry(key: Key, us: Sequence[float]) -> dict[str, Any]:
    named = {"sizes": key.sizes, "kind": key.kind, "residual": key.residual} | ({"pool": key.pool} if key.pool else {})
    return {"key": named, "times": {measure.XLA: round(statistics.median(us), 3)}, "again": [], "failed": {}}
