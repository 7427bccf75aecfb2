"""Files of results: one for each device and suite, `results/<device>/<suite>.json`, with the newest row of each case.

A file has "suite", "runs" and "rows". A run says when, of which commit, by which command and on what rows were
measured; a row has the date and the commit of its run, and the run's place in "runs". `add` puts what a suite has
measured into a file: a row takes the place of an older one of the same case, which is the same in `KEYS`, flags, label
and sides. A row with a "label" is of something else than today's package as it comes: an earlier engine, another host.
`read` gives rows with all that their runs say.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jax_sparse_conv._src import environment

Row = dict[str, Any]
Content = dict[str, Any]

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"

_LAYERS = (
    *("layer", "op", "x_shape", "kernel_shape", "dtype", "precision", "source", "zeros_target", "batch"),
    *("requested", "implementation", "weights", "cold_weights"),
)
KEYS: dict[str, tuple[str, ...]] = {
    "accuracy": ("case", "precision", "implementation"),
    "adaptive": ("layer", "precision", "source", "zeros_percent"),
    "calls": ("side",),
    "chain_tiles": ("network", "kind", "batch", "chain", "products"),
    "cost_model": ("layer", "x_shape", "source", "density"),
    "cpu": _LAYERS,
    "direct_ablation": (
        *("layer", "step", "engine", "addresses", "hoisted_checks", "images_per_thread", "filters_per_thread"),
        *("threads_x", "threads_y", "cached_pixels", "stages", "copy_bytes"),
    ),
    "fuzz": ("seed",),
    "gradients": ("layer", "by", "precision"),
    "host": ("network", "what"),
    "instructions": ("layer", "source", "loop"),
    "latency": ("network", "kind", "side"),
    "layers": _LAYERS,
    "models": ("model", "batch", "kind", "size", "weights"),
    "networks": ("network", "kind", "batch", "weights", "quick"),
    "packed": ("network", "batch"),
    "peers": ("network", "kind", "batch", "threads", "zeros", "quick"),
    "profile": ("network", "batch", "what"),
    "real_weights": ("network", "implementation", "batch"),
    "run": ("network", "batch", "dtype", "precision", "implementation", "plan"),
    "scaling": ("layer", "batch", "maps", "threads"),
    "loops": ("layer", "dtype", "weights", "zeros_percent"),
    "sorting": ("layer",),
    "sweep": ("layer", "dtype", "precision", "weights"),
    "tests": ("backend", "tests_of"),
    "training": ("network", "batch", "size", "precision"),
    "zoo": ("details", "zeros_target", "weights", "implementation", "plan"),
}
"""By suite: what tells the cases of its rows apart, beside `_ALWAYS`."""

_ADDED = ("run", "date", "commit", "flags")  # to a row, by `unified`
_FLAGS = ("default", "command buffers")
_ALWAYS = ("flags", "label")
_WITH_SIDES = ("networks", "zoo")  # suites whose rows may have more sides or fewer
_OF_EVERY_ROW = ("weights", "cold_weights", "quick", "label", "plan")  # of a content, which its rows need not repeat
_OF_RUN = ("repeats", "limits", "seconds", "zeros_percent", "device_properties", "gpu", "lengths", "left", "failed")
_ONE_ROW = ("real_weights", "run")  # suites whose content is a row
_ROWS_OF = {"chain_tiles": "chains"}
_NOT_OF_A_ROW = ("date", "commit", "commit_by_date", "command", "commands", "device", "environment", "xla_flags")
_ENVIRONMENT = ("versions", "backend", "build", "cpu")
_DIGITS = 3  # of a percentage or a density that tells cases apart
_OTHER_TIMES = ("_best_us", "_latency_us", "_program_us")


def read(path: Path) -> list[Row]:
    """The rows of a file, oldest first, each with what its run says.

    Raises:
      ValueError: no file of results.
    """
    content = load(path)
    rows = [{**content["runs"][row["run"]], **row} for row in content["rows"]]
    return sorted(rows, key=lambda row: row["date"])


def load(path: Path) -> Content:
    """A file as it is.

    Raises:
      ValueError: no file of results.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or not {"suite", "runs", "rows"} <= content.keys():
        raise ValueError(f"{path} is no file of results: it has no suite, runs and rows")
    return content


def content_of(path: Path) -> Content:
    """What a suite had measured when it made this file."""
    found = load(path)
    rows = [{key: value for key, value in row.items() if key not in _ADDED} for row in found["rows"]]
    return {**found["runs"][-1], "rows": rows}


def add(path: Path | None, suite: str, content: Content) -> None:
    """Put what a suite has measured just now into a file, where one was asked for."""
    if path is not None:
        files = [load(path)] if path.is_file() else []
        save(path, merged([*files, unified(suite, {"commit": commit(), **content})]))


def save(path: Path, content: Content) -> None:
    """Write a file, a row a line."""
    others = {key: value for key, value in content.items() if key != "rows"}
    head = json.dumps(others | {"rows": []}, indent=1).removesuffix("[]\n}")
    path.write_text(head + "[\n" + ",\n".join(map(json.dumps, content["rows"])) + "\n]}\n", encoding="utf-8")


def unified(suite: str, content: Content) -> Content:
    """What a suite has measured, or a file of before there were files of results, as a file of results."""
    run = _run(content)
    rows = [{k: v for k, v in row.items() if k != "xla_flags"} for row in _rows(suite, content) if "run" not in row]
    flags = flags_of(content.get("xla_flags", ""))
    about: Row = {"flags": flags, "run": 0, "date": run["date"], "commit": run["commit"]}
    if suite not in _ONE_ROW:
        about |= {key: content[key] for key in _OF_EVERY_ROW if content.get(key)}
    if about.get("label") in _FLAGS:  # files of before there were "flags"
        del about["label"]
    return {"suite": suite, "runs": [run], "rows": [about | row for row in rows]}


def merged(contents: Sequence[Content]) -> Content:
    """The files as one: of rows of the same case the newest, of those as new the last.

    Raises:
      ValueError: files of different suites or devices.
    """
    suites, devices = ({each for content in contents for each in found(content)} for found in (_suites, _devices))
    if len(suites) > 1 or len(devices) > 1:
        raise ValueError(f"rows of {', '.join(sorted(suites | devices))} do not go into one file")
    runs: list[Content] = []
    rows: dict[str, Row] = {}
    for content in contents:
        for row in content["rows"]:
            case = case_of(content["suite"], row)
            if case not in rows or row["date"] >= rows[case]["date"]:
                rows[case] = {**row, "run": len(runs) + row["run"]}
        runs += content["runs"]
    return _without_idle_runs({"suite": suites.pop(), "runs": runs, "rows": list(rows.values())})


def case_of(suite: str, row: Mapping[str, Any]) -> str:
    """What two rows of the same case have in common."""
    found = [row.get(key) for key in (*KEYS[suite], *_ALWAYS)]
    sides = sides_of(row) if suite in _WITH_SIDES else []
    return json.dumps([[round(each, _DIGITS) if isinstance(each, float) else each or None for each in found], sides])


def sides_of(row: Mapping[str, Any]) -> list[str]:
    """What was timed, by name."""
    if isinstance(row.get("us"), Mapping):
        return sorted(row["us"])
    return sorted(key.removesuffix("_us") for key in row if key.endswith("_us") and not key.endswith(_OTHER_TIMES))


def flags_of(xla_flags: str | Sequence[str]) -> str:
    """XLA's flag set by name."""
    return _FLAGS["command_buffer" in xla_flags]


def commit() -> str | None:
    """The commit that runs: `JSC_COMMIT` or, in a clone, its head."""
    return os.environ.get("JSC_COMMIT") or git("rev-parse", "--short", "HEAD")


def commit_before(date: str) -> str | None:
    """The newest commit before a date, of which rows are that do not name theirs."""
    found = git("rev-list", "-1", "--abbrev-commit", f"--before={date}", "HEAD")
    return found or None


def git(*arguments: str, root: Path = ROOT) -> str | None:
    """What git prints in a folder; None where it fails or is not there."""
    try:
        found = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()


def _run(content: Content) -> Content:
    collected = content.get("environment", {})
    run = {"date": content["date"], "commit": content.get("commit")}
    if run["commit"] is None:
        run |= {"commit": commit_before(content["date"]), "commit_by_date": True}
    run |= {"command": _without_folders(content["command"]), "device": content["device"]}
    run["driver"] = collected.get("gpu_driver", content.get("driver"))
    run |= {key: found[key] for key in _ENVIRONMENT for found in (collected, content) if key in found}
    if "commands" in content:
        run["commands"] = list(map(_without_folders, content["commands"]))
    flags = content.get("xla_flags", "")
    run["xla_flags"] = _without_dumps(flags) if isinstance(flags, str) else list(map(_without_dumps, flags))
    return run | {key: content[key] for key in _OF_RUN if key in content}


def _rows(suite: str, content: Content) -> Iterable[Row]:
    if suite in _ONE_ROW:
        return [{key: value for key, value in content.items() if key not in _NOT_OF_A_ROW}]
    runs = content.get("runs")
    if isinstance(runs, Mapping):  # of both flag sets
        return [{**row, "flags": label} for label, rows in runs.items() for row in rows]
    rows: Iterable[Row] = content[_ROWS_OF.get(suite, "rows")]
    return rows


def _without_dumps(flags: str) -> str:
    return " ".join(dict.fromkeys(flag for flag in flags.split() if "_dump_" not in flag))


def _without_folders(line: str) -> str:
    """A command without temporary and other absolute paths: of each its last part."""
    return shlex.join(map(environment.without_folders, shlex.split(line)))


def _without_idle_runs(content: Content) -> Content:
    """The content without runs that no row is left of, but for the last."""
    used = sorted({row["run"] for row in content["rows"]} | {len(content["runs"]) - 1})
    place = {old: new for new, old in enumerate(used)}
    rows = [{**row, "run": place[row["run"]]} for row in content["rows"]]
    return {**content, "runs": [content["runs"][old] for old in used], "rows": rows}


def _suites(content: Content) -> set[str]:
    return {content["suite"]}


def _devices(content: Content) -> set[str]:
    return {run["device"] for run in content["runs"]}
