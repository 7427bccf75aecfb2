"""The command `run`: a network on photographs, dense and sparse."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import jax

from jax_sparse_conv._src import environment
from jax_sparse_conv._src.cli import comparison, networks, page, progress, report
from jax_sparse_conv._src.cli.comparison import Comparison
from jax_sparse_conv._src.cli.errors import UserError, optional
from jax_sparse_conv._src.cli.outputs import check_writable
from jax_sparse_conv._src.plans.plan import Plan

_CHOSEN = ("network", "batch", "dtype", "precision", "implementation", "seed", "repeats")


def run(options: argparse.Namespace) -> None:
    """Compare, print, and write what `--json`, `--html` and `--plot` ask for."""
    out = report.console()
    _check_outputs(options)
    implementation = _implementation(options)
    network = networks.named(options.network)
    size = options.size or network.input_size
    with jax.default_matmul_precision(options.precision), progress.progress() as advance:
        advance("reading the photographs", None)
        labels = _labels(options.labels)
        images = networks.images_of(options, size)
        prepared = networks.prepare(network, images, options, advance)
        found = comparison.compare(prepared.model, prepared.x, implementation, options.repeats, advance)
    labels = labels or prepared.labels
    notes = list(prepared.notes)
    if not isinstance(implementation, str):
        notes += _beyond_plan(implementation, found)
    chosen = f"plan {options.plan.name}" if options.plan else f"implementation {implementation}"
    title = (
        f"{network.name}, {environment.device_name()}, batch {len(images)}, {size}x{size}, {options.dtype}, "
        f"precision {options.precision}, {chosen}"
    )
    report.print_comparison(found, out, title, labels, notes, networks.image_names(options))
    if options.json or options.html or options.plot:
        content = _record(options, size) | report.as_json(found, labels) | {"notes": notes}
        _write(options, content, found, title)


def _write(options: argparse.Namespace, content: dict[str, Any], found: Comparison, title: str) -> None:
    try:
        if options.json:
            report.write_json(options.json, content)
        if options.html:
            options.html.write_text(page.of(content), encoding="utf-8")
        if options.plot:
            report.plot(found.layers, options.plot, title)
    except OSError as error:
        raise UserError(f"the results cannot be written: {error}") from error


def _implementation(options: argparse.Namespace) -> str | Plan:
    """What the sparse side runs."""
    if options.plan is None:
        options.implementation = options.implementation or "auto"
        comparison.check_implementation(options.implementation)
        return str(options.implementation)
    if options.implementation is not None:
        raise UserError(f"--implementation {options.implementation} and --plan exclude each other")
    try:
        return Plan.load(options.plan)
    except FileNotFoundError as error:
        raise UserError(f"--plan {options.plan}: there is no such file") from error
    except (OSError, ValueError) as error:
        raise UserError(f"--plan: {error}") from error


def _beyond_plan(plan: Plan, found: Comparison) -> list[str]:
    """What the plan says nothing of: it is for calls of the shapes that it was made with."""
    planned = {(layer.path, layer.call.x_shape) for layer in plan.layers}
    others = [row for row in found.layers if (row.path, row.input_shape) not in planned]
    if not others:
        return []
    made = dict.fromkeys(layer.call.x_shape for layer in plan.layers if layer.path == others[0].path)
    return [
        f"The plan has nothing for {len(others)} of {len(found.layers)} layers as they are called here, which choose "
        f"for themselves: it has {others[0].path} for inputs of {' and '.join(map(str, made)) or 'no shape'}, not "
        f"{others[0].input_shape}."
    ]


def _check_outputs(options: argparse.Namespace) -> None:
    for name in ("json", "html", "plot"):
        path = getattr(options, name)
        if path is not None:
            check_writable(name, path)
    if options.plot is not None:
        if options.plot.suffix.lower() != ".png":
            raise UserError(f"--plot {options.plot}: the plot is a PNG, so the name must end in .png")
        optional("matplotlib.figure", "matplotlib")


def _labels(path: Path | None) -> list[str] | None:
    try:
        return None if path is None else path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--labels {path} cannot be read: {error}") from error


def _record(options: argparse.Namespace, size: int) -> dict[str, Any]:
    """What was run: the first part of the JSON file."""
    return {
        **environment.describe_run(options.argv),
        **{name: getattr(options, name) for name in _CHOSEN},
        "size": size,
        "images": networks.image_names(options),
        "weights": None if options.weights is None else environment.without_folders(options.weights),
        "plan": None if options.plan is None else environment.without_folders(str(options.plan)),
    }
