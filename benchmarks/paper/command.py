"""The papers' experiments: tables and figures of OCPA (Xu et al. 2023 and 2019) and cuSNN (Xiang et al. 2022).

    python -m benchmarks paper table3 --json table3.json --plot table3.png --maps feature_maps.npz
    python -m benchmarks paper fig11 fig12 fig13 --out results --both-flags
    python -m benchmarks paper fig11 fig12 --merge default/ buffers/ --out results   # two runs made apart

Both sides of every ratio run in one process and in turns, on rotated inputs; times are medians, conversion to a sparse
format included. Every experiment shows 0 % zeros too: a gain that stays there does not come from the zeros.
docs/papers.md holds the results beside the papers' numbers.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common import command, data, paper_rows, results
from benchmarks.paper import experiment, plots
from benchmarks.paper.cusnn.figures import SEARCHES
from benchmarks.paper.experiment import Content, Experiment
from benchmarks.paper.registry import EXPERIMENTS
from benchmarks.paper.runner import Context, progress
from jax_sparse_conv._src import environment
from jax_sparse_conv._src.cli.errors import UserError

_LABELS = ("default", "command buffers")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the named experiments, print and write each as it ends; the result is the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = _parser().parse_args(arguments)
    try:
        _check(options)
        if options.merge:
            for name in options.names:
                _finish(
                    EXPERIMENTS[name], _merged_files(*(folder / f"{name}.json" for folder in options.merge)), options
                )
        elif options.both_flags:
            _both_flags(options, arguments)
        else:
            context = _context(options)
            for name in options.names:
                content = _measured(EXPERIMENTS[name], context)
                content["command"] = command.portable("paper", arguments)
                if options.add:
                    content = _added(content, _json_path(name, options))
                _finish(EXPERIMENTS[name], content, options)
    except (OSError, UserError, ValueError) as error:
        print(f"benchmarks paper: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    names = "\n".join(f"  {e.name:12} {e.source}: {e.summary}" for e in EXPERIMENTS.values())
    parser = command.parser("paper NAME ...", __doc__, f"experiments:\n{names}")
    add = parser.add_argument
    add("names", nargs="+", choices=EXPERIMENTS, metavar="NAME", help="experiments, listed below")
    add("--json", type=Path, help="write the result of the one experiment here")
    add("--plot", type=Path, help="draw the one experiment into this PNG")
    add("--out", type=Path, help="write NAME.json and NAME.png of every experiment into this folder")
    add("--maps", type=Path, help="real maps: an npz file, or the folder of the command maps")
    add("--networks", nargs="+", default=[], help="instead of an experiment's own networks")
    add("--searched", type=Path, help="a result of the suite cost_model, in the place of searching again")
    add("--prepared", type=Path, help="keep networks with their weights here, for the next run")
    add("--program", type=Path, help="run this file instead of compiling kernels")
    add("--add", action="store_true", help="keep the rows of other networks that the file has from such a device")
    add("--repeats", type=int, default=30)
    add("--seconds", type=float, default=Context.seconds, help="length of a loop that energy is measured over")
    add("--energy-repeats", type=int, default=Context.energy_repeats, help="such loops of each side, taking turns")
    add("--quick", action="store_true", help="tiny layers and networks: does everything run?")
    flags = parser.add_mutually_exclusive_group()
    help_text = "with XLA's default flags and with command buffers; keep the faster"
    flags.add_argument("--both-flags", action="store_true", help=help_text)
    help_text = "measure nothing: keep the faster of two folders, of default flags and of command buffers"
    flags.add_argument("--merge", type=Path, nargs=2, metavar=("DEFAULT", "BUFFERS"), help=help_text)
    return parser


def _check(options: argparse.Namespace) -> None:
    if len(options.names) > 1 and (options.json or options.plot):
        raise ValueError("--json and --plot are for one experiment; --out FOLDER is for several")
    for name in ("json", "plot"):
        command.check_folder(f"--{name}", getattr(options, name))
    for name, count in (("--repeats", options.repeats), ("--energy-repeats", options.energy_repeats)):
        if count < 1:
            raise ValueError(f"{name} {count} is not at least 1")
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)


def _context(options: argparse.Namespace) -> Context:
    return Context(
        repeats=min(2, options.repeats) if options.quick else options.repeats,
        quick=options.quick,
        maps=data.read_maps(options.maps) if options.maps else {},
        networks=tuple(options.networks),
        prepared=str(options.prepared or ""),
        searched=str(options.searched or ""),
        program=str(options.program or ""),
        seconds=0.1 if options.quick else options.seconds,
        energy_repeats=min(2, options.energy_repeats) if options.quick else options.energy_repeats,
    )


def _measured(chosen: Experiment, context: Context) -> Content:
    progress(f"== {chosen.name}")
    rows = chosen.run(context)
    run = {**environment.describe_run(), "commit": results.commit(), **_where_searched(chosen, context)}
    run["xla_flags"] = os.environ.get("XLA_FLAGS", "")
    return {
        "experiment": chosen.name,
        "source": chosen.source,
        "summary": chosen.summary,
        **run,
        "repeats": context.repeats,
        "quick": context.quick,
        "rows": paper_rows.stamped(rows, run),
        "geometric_means": experiment.means(rows),
    }


def _where_searched(chosen: Experiment, context: Context) -> Content:
    """Date, device and environment of the search that is drawn, where it was made before."""
    if not (context.searched and chosen.name in SEARCHES):
        return {}
    found = results.content_of(Path(context.searched))
    return {key: found[key] for key in ("date", "commit", "device", "driver", "versions")}


def _finish(chosen: Experiment, content: Content, options: argparse.Namespace) -> None:
    """Print an experiment's table and write its files."""
    print(f"\n{chosen.source}: {chosen.summary}\n{experiment.table(chosen.columns, content['rows'])}")
    print(experiment.means_table(content["geometric_means"]), flush=True)
    json_path = _json_path(chosen.name, options)
    plot_path = options.out / f"{chosen.name}.png" if options.out else options.plot
    command.write(json_path, content, indent=1)
    if plot_path:
        plots.save(chosen.draw, content["rows"], plot_path, f"{chosen.source}: {chosen.summary} {content['device']}")


def _json_path(name: str, options: argparse.Namespace) -> Path | None:
    path: Path | None = options.out / f"{name}.json" if options.out else options.json
    return path


def _added(content: Content, path: Path | None) -> Content:
    """The content with the rows of other networks that a file has, which keep date, commit and environment.

    Raises:
      ValueError: the file is of another device or other flags, or rows are of other repeats.
    """
    if path is None or not path.is_file():
        return content
    old = json.loads(path.read_text("utf-8"))
    for key in ("device", "xla_flags", "repeats", "quick"):
        if old[key] != content[key]:
            raise ValueError(f"--add: {path} has another {key}")
    networks = {row.get("network") for row in content["rows"]}
    kept = [row for row in paper_rows.of(old) if row.get("network") not in networks]
    if old["environment"] != content["environment"]:
        kept = [{"environment": old["environment"], **row} for row in kept]
    rows = kept + content["rows"]
    commands = f"{old['command']}; {content['command']}"
    return {**content, "command": commands, "rows": rows, "geometric_means": experiment.means(rows)}


def _both_flags(options: argparse.Namespace, arguments: Sequence[str]) -> None:
    """Two processes, because XLA reads its flags once; this one must not take the GPU, so it asks nothing of JAX."""
    with tempfile.TemporaryDirectory() as folder:
        shared = [*_without_outputs(arguments), "--prepared", str(options.prepared or Path(folder) / "networks")]
        runs = []
        for number, flags in enumerate(("", command.COMMAND_BUFFERS)):
            out = Path(folder) / str(number)
            command.run("paper", [*shared, "--out", str(out)], flags)
            runs.append({name: json.loads((out / f"{name}.json").read_text("utf-8")) for name in options.names})
        for name in options.names:
            content = _merged(runs[0][name], runs[1][name]) | {"command": command.portable("paper", arguments)}
            _finish(EXPERIMENTS[name], content, options)


def _merged_files(default: Path, buffers: Path) -> Content:
    """As `_merged`, of files; their commands must be the same but for where they wrote."""
    runs = [json.loads(path.read_text("utf-8")) for path in (default, buffers)]
    for key in ("experiment", "device", "repeats", "versions", "gpu_driver"):
        one, other = ({**run["environment"], **run}.get(key) for run in runs)
        if one != other:
            raise ValueError(f"{default} and {buffers} differ in {key}: {one} and {other}")
    if "command_buffer" not in runs[1]["xla_flags"] or "command_buffer" in runs[0]["xla_flags"]:
        raise ValueError(f"--merge {default.parent} {buffers.parent}: the second must be the run with command buffers")
    return _merged(*runs) | {"command": runs[1]["command"]}


def _merged(default: Content, buffers: Content) -> Content:
    rows = experiment.better_of(paper_rows.of(default), paper_rows.of(buffers), _LABELS)
    return {
        **default,
        "date": max(default["date"], buffers["date"]),
        "xla_flags": [default["xla_flags"], buffers["xla_flags"]],
        "rows": rows,
        "geometric_means": experiment.means(rows),
        "runs": {
            label: [{key: row[key] for key in ("layer", "us") if key in row} for row in content["rows"]]
            for label, content in zip(_LABELS, (default, buffers), strict=True)
        },
    }


def _without_outputs(arguments: Sequence[str]) -> list[str]:
    """The arguments for a process of its own: without --both-flags and without where results and networks go."""
    kept: list[str] = []
    skip = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if not skip and name not in ("--json", "--plot", "--out", "--prepared", "--both-flags"):
            kept.append(argument)
        skip = not skip and name in ("--json", "--plot", "--out", "--prepared") and not equals
    return kept
