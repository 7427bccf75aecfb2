"""Tables of the suites that time single layers."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from benchmarks.common.losing import LEAST, is_loss
from benchmarks.common.results import Row
from benchmarks.document.markdown import KINDS, kind, mean, mean_and_range, microseconds, ratio, table
from benchmarks.suites import zoo_rows

_REAL = "real"  # in the place of a percentage of zeros
_BELOW = f"below {LEAST}"
_SHOWN = 12  # losses of a file that have a line


def layers(rows: Sequence[Row]) -> list[str]:
    """Named layers by an implementation: layers that were timed at the same zeros share a line."""
    timed: dict[tuple[str, str, str, int, str, str], dict[str, dict[str, float]]] = {}
    for row in rows:
        requested = "`None`" if row["requested"] in (None, "auto") else f"`{row['requested']}`"
        kernel = "dense" if row["op"] == "dense" else f"{row['kernel_shape'][0]}x{row['kernel_shape'][1]}"
        what = f"{kernel} and pool" if row["op"] == "conv_pool" else kernel
        weights = row.get("weights") or "arguments"
        where = (requested, what, _kind(row), row["batch"], weights, row["flags"])
        zeros = _REAL if row["source"] == _REAL else f"{row['zeros_target'] or 0}"
        timed.setdefault(where, {}).setdefault(row["layer"], {})[zeros] = row["ratio"]
    columns = sorted({zeros for found in timed.values() for each in found.values() for zeros in each}, key=_place)
    lines: list[tuple[str, ...]] = []
    for where, by_layer in sorted(timed.items()):
        groups: dict[tuple[str, ...], list[dict[str, float]]] = {}
        for each in by_layer.values():
            groups.setdefault(tuple(sorted(each, key=_place)), []).append(each)
        for zeros, chosen in groups.items():
            cells = (mean([each[column] for each in chosen]) if column in zeros else "" for column in columns)
            lines.append((*map(str, where), str(len(chosen)), *cells))
    titles = ("ours", "layers", "precision", "batch", "weights", "flags", "number")
    zeros_titles = ("real maps" if column == _REAL else f"{column} % zeros" for column in columns)
    return [table((*titles, *zeros_titles), lines), _lost(rows)]


def _kind(row: Row) -> str:
    name = row["precision"] if row["dtype"] == "float32" else row["dtype"]
    return kind(name or "default", row)


def _place(zeros: str) -> float:
    return 101.0 if zeros == _REAL else float(zeros)


def _lost(rows: Sequence[Row]) -> str:
    lost = [row for row in rows if is_loss(row["ratio"])]
    return f"{_BELOW.capitalize()}, by medians: {len(lost)} of {len(rows)} rows" + (
        f", the least {ratio(min(row['ratio'] for row in lost))}." if lost else "."
    )


def zoo(rows: Sequence[Row]) -> list[str]:
    """Every layer of networks: geometric means and losses by precision and batch."""
    newest = zoo_rows.newest(rows)
    groups: dict[tuple[int, int, str], list[Row]] = {}
    for row in newest:
        weights = row["weights"] + (", by a plan" if row.get("plan") else "")
        groups.setdefault((list(KINDS).index(zoo_rows.kind(row)), row["batch"], weights), []).append(row)
    titles = ("precision", "batch", "weights", "without zeros", "layers", "with zeros", "layers", _BELOW)
    lines = []
    for (place, batch, weights), chosen in sorted(groups.items()):
        timed = zoo_rows.timed(chosen)
        without, with_ = ([row["ratio"] for row in timed if bool(row["zeros_target"]) == some] for some in (0, 1))
        counts = [str(len(found)) if found else "" for found in (without, with_)]
        means = [mean_and_range(found) for found in (without, with_)]
        lost = str(len(zoo_rows.losses(timed)))
        where = (kind(list(KINDS)[place], chosen[0]), str(batch), weights)
        lines.append((*where, means[0], counts[0], means[1], counts[1], lost))
    return [table(titles, lines), *_left_to_xla(newest), *_losses(newest)]


def _losses(rows: Sequence[Row]) -> list[str]:
    lost = sorted(zoo_rows.losses(rows), key=lambda row: row["ratio"])
    if not lost:
        return [f"**Losses**, {_BELOW} by medians: none."]
    titles = ("call", "precision", "zeros", "ran", "XLA us", "ours us", "ratio", "by best times", "date")
    lines = (
        (
            row["call"].replace(" * ", " by ").replace("*", "by"),
            kind(zoo_rows.kind(row), row),
            f"{row['zeros_percent']:.0f} %",
            f"`{row['implementation']}`".replace("|", " or "),
            *(microseconds(row[key]) for key in ("xla_us", "ours_us")),
            *(ratio(row[key]) for key in ("ratio", "best_ratio")),
            row["date"][:10],
        )
        for row in lost[:_SHOWN]
    )
    shown = "" if len(lost) <= _SHOWN else f" The worst {_SHOWN}:"
    said = f"**Losses**, {_BELOW} by medians: {len(lost)}.{shown}"
    return [said, table(titles, lines)]


def _left_to_xla(rows: Iterable[Row]) -> list[str]:
    left = [row for row in rows if row["implementation"] == "xla" and "direct_us" in row]
    if not left:
        return []
    groups: dict[tuple[int, int], list[float]] = {}
    for row in left:
        faster = min(row[key] for key in ("xla_us", "ours_us") if key in row)
        where = (list(KINDS).index(zoo_rows.kind(row)), row["batch"])
        groups.setdefault(where, []).append(faster / row["direct_us"])
    titles = ("precision", "batch", "calls", "XLA over `direct`", "`direct` is over 3 % faster in")
    lines = (
        (list(KINDS.values())[place], str(batch), str(len(found)), mean_and_range(found), _count(found))
        for (place, batch), found in sorted(groups.items())
    )
    return ["What `None` left to XLA, timed beside `direct`:", table(titles, lines)]


def _count(ratios: Sequence[float]) -> str:
    return str(sum(each > 1.03 for each in ratios))


def adaptive(rows: Sequence[Row]) -> list[str]:
    """What choosing on the device costs."""
    titles = ("precision", "maps", "rows", "within", "behind us, median", "at most")
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["precision"], row["source"]), []).append(row)
    lines = []
    for (precision, source), chosen in sorted(groups.items()):
        costs = [row["overhead_us"]["adaptive"] for row in chosen]
        within = sum(row["adaptive_within"] for row in chosen)
        found = (f"{statistics.median(costs):.1f}", f"{max(costs):.1f}")
        lines.append((KINDS[precision], source, str(len(chosen)), str(within), *found))
    return [table(titles, lines)]


def calls(rows: Sequence[Row]) -> list[str]:
    """What a call costs before it computes anything."""
    lines = ((f"`{row['side']}`", f"{row['us']:.2f}", f"{row['over_xla_us']:.2f}") for row in rows)
    return [table(("side", "us", "over XLA's us"), lines)]


def accuracy(rows: Sequence[Row]) -> list[str]:
    """Errors of every kernel, beside XLA's."""
    sides = list(dict.fromkeys(row["implementation"] for row in rows))
    found: dict[tuple[str, str, str], dict[str, float]] = {}
    for row in rows:
        where = (row["case"], row["precision"], f"{row['xla_error']:.1e}")
        found.setdefault(where, {})[row["implementation"]] = row["error"]
    lines = (
        (*where, *(f"{each[side]:.1e}" if side in each else "" for side in sides)) for where, each in found.items()
    )
    return [table(("case", "precision", "XLA", *(f"`{side}`" for side in sides)), lines)]


def scaling(rows: Sequence[Row]) -> list[str]:
    """Layers on more and more cores."""
    threads = sorted({row["threads"] for row in rows})
    found: dict[tuple[str, ...], dict[int, Row]] = {}
    for row in rows:
        found.setdefault((row["layer"], str(row["batch"]), row["maps"]), {})[row["threads"]] = row
    lines = (
        (*where, *(ratio(each[count]["ratio"]) if count in each else "" for count in threads), _speedups(each))
        for where, each in sorted(found.items())
    )
    cores = (f"{count} core{'s' if count > 1 else ''}" for count in threads)
    return [table(("layer", "batch", "maps", *cores, "speedup, ours and XLA's"), lines)]


def _speedups(by_threads: dict[int, Row]) -> str:
    most = by_threads[max(by_threads)]
    return f"{most['ours_speedup']:.1f}, {most['xla_speedup']:.1f}"


def sorting(rows: Sequence[Row]) -> list[str]:
    """Channels sorted by how often they fire."""
    titles = ("layer", "zeros", "as given us", "sorted", "at random")
    lines = (
        (
            row["layer"],
            f"{row['zeros_percent']:.0f} %",
            microseconds(row["given_us"]),
            ratio(row["sorted_gain"]),
            ratio(row["random_gain"]),
        )
        for row in rows
    )
    return [table(titles, lines)]


def instructions(rows: Sequence[Row]) -> list[str]:
    """Instructions of each loop of the CPU kernels."""
    loops = list(dict.fromkeys(row["loop"] for row in rows))
    found: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        where = (row["layer"], f"{row['zeros_percent']:.0f} %")
        found.setdefault(where, {})[row["loop"]] = row["thousands"]
    lines = (
        (*where, *(f"{each[loop]:,.0f}" if loop in each else "" for loop in loops)) for where, each in found.items()
    )
    return [table(("layer", "zeros", *loops), lines)]


def loops(rows: Sequence[Row]) -> list[str]:
    """Microseconds of the chosen loop of the CPU kernels and of each, and what the choice loses."""
    names = ("auto", "direct", "pixels", "winograd", "dots", "xla")
    lines = (
        (
            row["layer"],
            row["dtype"],
            row["weights"],
            f"{row['zeros_percent']:.0f} %",
            *(microseconds(row[f"{name}_us"]) if f"{name}_us" in row else "" for name in names),
            ratio(row["regret"]),
        )
        for row in rows
    )
    return [table(("layer", "dtype", "weights", "zeros", *(f"{name} us" for name in names), "regret"), lines)]


def sweep(rows: Sequence[Row]) -> list[str]:
    """Random layers: the geometric mean, and how many lose; those with a label by themselves."""
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        where = (row["op"], row["dtype"], row["precision"], row["weights"], row.get("label", ""))
        found.setdefault(where, []).append(row)
    lines = (
        (
            *where,
            str(len(each)),
            mean([row.get("first_ratio", row["ratio"]) for row in each]),
            str(sum(is_loss(row["ratio"]) for row in each)),
        )
        for where, each in sorted(found.items())
    )
    return [table(("layers", "dtype", "precision", "weights", "device", "number", "geometric mean", _BELOW), lines)]


def fuzz(rows: Sequence[Row]) -> list[str]:
    """Random calls: how many ran, how many had no kernel, what was found, and how many were drawn of each operation."""
    names = sorted({name for row in rows for name in row["operations"]})

    def line(seed: str, chosen: Sequence[Row]) -> tuple[str, ...]:
        skipped = sum(row["skipped"] for row in chosen)
        ran = sum(row["cases"] for row in chosen) - skipped
        drawn = (sum(row["operations"].get(name, 0) for row in chosen) for name in names)
        programs = sum(-(-row["cases"] // row.get("values", 1)) for row in chosen)
        counts = (ran, skipped, sum(len(row["findings"]) for row in chosen), programs, *drawn)
        return (seed, *(f"{count:,}" for count in counts))

    lines = [line(str(row["seed"]), [row]) for row in rows] + [line("all", rows)]
    return [table(("seed", "ran", "skipped", "findings", "programs", *(f"drawn: {name}" for name in names)), lines)]


def tests(rows: Sequence[Row]) -> list[str]:
    """Runs of the package's tests."""
    counts = ("passed", "failed", "skipped")
    lines = (
        (f"`{row['tests_of']}`", row["date"][:10], row["commit"], *(f"{row[name]:,}" for name in counts))
        for row in rows
    )
    return [table(("tests of", "date", "commit", *counts), lines)]


def gradients(rows: Sequence[Row]) -> list[str]:
    """Gradients of single layers; at HIGHEST where they say so."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        name = row["layer"] + ", HIGHEST" * (row.get("precision") == "highest")
        found.setdefault(name, {})[row["by"]] = row
    lines = (
        (layer, *(cell for by in ("x", "kernel") for cell in _cells(each.get(by)))) for layer, each in found.items()
    )
    heads = ("lax / ours us", "ratio", "errors")
    by_x, by_kernel = (tuple(f"by {by}: {head}" for head in heads) for by in ("x", "the kernel"))
    return [table(("layer", *by_x, *by_kernel), lines)]


def _cells(row: Row | None) -> tuple[str, str, str]:
    if row is None:
        return "-", "-", "-"
    errors = f"{row['xla_error']:.1e} / {row['ours_error']:.1e}" if "ours_error" in row else "-"
    return f"{row['xla_us']:,.0f} / {row['ours_us']:,.0f}", ratio(row["ratio"]), errors
