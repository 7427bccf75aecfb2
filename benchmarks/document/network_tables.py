"""Tables of the suites that time whole networks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.common.results import Row
from benchmarks.document.markdown import KINDS, MODELS, kind, mean, microseconds, network, rank, ratio, table
from benchmarks.networks import network_rows
from benchmarks.networks.network_cases import XLA
from benchmarks.networks.peer_sides import PEERS

_SIDES = {"auto": "`None`", "fused": "all chains"}
_SAME = 0.03  # of a time: that with all chains has a line where it differs by more from `None`
_MORE = 1.005  # times as much memory as XLA's
_OF_PEERS = ("network", "kind", "batch", "threads")
_BY_NETWORK = ("network", "weights", "batch", "side")
_HOST = {"nnx.jit": "`nnx.jit`", "cached_partial": "`nnx.cached_partial`", "state": "`jax.jit` of the state"} | {
    "jit_inference": "`jit_inference`",
    "constants": "constants",
}


def networks(rows: Sequence[Row]) -> list[str]:
    """Of whole networks: the ratios of each precision, and what takes more memory than XLA."""
    found = sorted(by_faster_flags(rows), key=lambda row: (row["weights"], row["batch"], rank(row["network"])))
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    for row in found:
        for side in _SIDES:
            if side in row["ratio"] and not _is_as_auto(row, side):
                where = (network(row["network"]), row["weights"], str(row["batch"]), _SIDES[side])
                lines.setdefault(where, {})[row["kind"]] = _cell(row, side)
    kinds = [name for name in KINDS if any(name in cells for cells in lines.values())]
    titles = (*_BY_NETWORK, *(KINDS[name] for name in kinds))
    text = table(titles, ((*where, *(cells.get(name, "") for name in kinds)) for where, cells in lines.items()))
    return [text, _losses(found), *_memory(found)]


def by_faster_flags(rows: Sequence[Row]) -> list[Row]:
    """Of every case each side's time under the faster of XLA's flag sets."""
    by_flags: dict[str, dict[tuple[str, str], Row]] = {}
    for row in rows:
        by_flags.setdefault(row["flags"], {})[row["case"], row["weights"]] = row
    return network_rows.best({flags: list(chosen.values()) for flags, chosen in by_flags.items()})


def _cell(row: Row, side: str) -> str:
    without = f" ({ratio(row['no_zeros_ratio'][side])})" if side in row["no_zeros_ratio"] else ""
    return f"{ratio(row['ratio'][side])}{without}, {microseconds(row['us'][side])} us"


def _is_as_auto(row: Row, side: str) -> bool:
    return side != "auto" and "auto" in row["us"] and abs(row["us"][side] / row["us"]["auto"] - 1) <= _SAME


def _losses(rows: Sequence[Row]) -> str:
    lost = [
        f"{network(row['network'])}, {row['weights']}, batch {row['batch']}, {KINDS[row['kind']]}, {_SIDES[side]}: "
        f"{ratio(min(found[side], row['no_zeros_ratio'].get(side, found[side])))}"
        for row in rows
        for found in (row["ratio"],)
        for side in _SIDES
        if side in found and min(found[side], row["no_zeros_ratio"].get(side, found[side])) < 1
    ]
    return "**Slower than XLA**, with or without zeros: " + ("; ".join(lost) or "none") + "."


def _memory(rows: Sequence[Row]) -> list[str]:
    lines = []
    for row in rows:
        for side in _SIDES:
            if side in row["memory"] and XLA in row["memory"]:
                ours, xla = (sum(row["memory"][each].values()) / 1e6 for each in (side, XLA))
                if ours > _MORE * xla:
                    where = (network(row["network"]), row["weights"], str(row["batch"]), _SIDES[side])
                    lines.append((*where, KINDS[row["kind"]], f"{ours:.1f}", f"{xla:.1f}"))
    if not lines:
        return ["**More device memory than XLA**, by over half a percent: none."]
    titles = (*_BY_NETWORK, "precision", "ours MB", "XLA MB")
    return ["**More device memory than XLA**, by over half a percent:", table(titles, lines)]


def run(rows: Sequence[Row]) -> list[str]:
    """Of `python -m jax_sparse_conv run`: a network and its layers."""
    titles = ("network", "batch", "precision", "sparse", "XLA us", "ours us", "ratio", "layer of the least ratio")
    chosen = sorted(rows, key=lambda row: (rank(row["network"]), row["batch"], row["precision"], bool(row["plan"])))
    return [table(titles, map(_run_line, chosen))]


def _run_line(row: Row) -> tuple[str, ...]:
    times = row["totals"]["network"]
    least = min(row["layers"], key=lambda layer: layer["ratio"])
    about = (network(row["network"]), str(row["batch"]), kind(row["precision"], row), _chosen(row))
    measured = (microseconds(times["dense_us"]), microseconds(times["sparse_us"]), ratio(times["ratio"]))
    return (*about, *measured, f"{least['path']}: {ratio(least['ratio'])}")


def _chosen(row: Row) -> str:
    if row["plan"]:
        return "a plan"
    return f"`{None if row['implementation'] in (None, 'auto') else row['implementation']}`"


def host(rows: Sequence[Row]) -> list[str]:
    """What a call costs its host, by the way weights get in."""
    chosen = sorted(rows, key=lambda row: (rank(row["network"]), row["what"]))
    lines = (
        (network(row["network"]), str(row["weights"]), row["what"], *(microseconds(row["us"][key]) for key in _HOST))
        for row in chosen
    )
    return [table(("network", "arrays", "what", *_HOST.values()), lines)]


def latency(rows: Sequence[Row]) -> list[str]:
    """What one call costs that is waited for."""
    titles = ("network", "kind", "side", "dispatched us", "waited for", "polled")
    lines = (
        (
            network(row["network"]),
            row["kind"],
            row["side"],
            *(microseconds(row[f"{way}_us"]) for way in ("dispatched", "waited", "polled")),
        )
        for row in sorted(rows, key=lambda row: (rank(row["network"]), row["kind"], row["side"]))
    )
    return [table(titles, lines)]


def others(rows: Sequence[Row]) -> list[str]:
    """Models that others wrote."""
    titles = (
        "model",
        "images",
        "precision",
        "weights",
        "zeros",
        "`jit` us",
        "as graphs",
        "`accelerate`",
        "`jit_inference`",
        "ratio",
        "waited for",
        "memory",
    )
    about = ("model", "batch", "kind", "weights")
    lines = (
        (
            MODELS.get(row["model"], row["model"]),
            str(row["batch"]),
            kind(row["kind"], row),
            row["weights"],
            f"{row['zeros_percent']:.0f} %" if "zeros_percent" in row else "",
            *(_microseconds_of(row, side) for side in ("jit", "graphs", "accelerate", "jit_inference")),
            ratio(row["jit_inference_ratio"]),
            ratio(min(_waited(row, "jit"), _waited(row, "graphs")) / _waited(row, "jit_inference")),
            ratio(row["jit_bytes"] / row["jit_inference_bytes"]) if "jit_inference_bytes" in row else "",
        )
        for row in sorted(rows, key=lambda row: tuple(row.get(key, "") for key in about))
    )
    return [table(titles, lines)]


def _microseconds_of(row: Row, side: str) -> str:
    return microseconds(row[f"{side}_us"]) if f"{side}_us" in row else ""


def _waited(row: Row, side: str) -> float:
    return float(row.get(f"{side}_waited_us", math.inf))


def peers(rows: Sequence[Row]) -> list[str]:
    """Whole networks beside other frameworks, and which of those were skipped and why."""
    names = (*PEERS.values(), "XLA", "ours")
    titles = ("network", "precision", "batch", "threads", *(f"{name} ms" for name in names))
    found: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in _OF_PEERS), {})[row["zeros"]] = row
    lines = (
        (
            network(case[0]),
            *map(str, case[1:]),
            *(_milliseconds(by_zeros.get("profile"), side) for side in (*PEERS, XLA, "ours")),
            *(_ratio_and_peer(by_zeros.get(zeros)) for zeros in ("profile", "none")),
            f"{by_zeros['profile']['error']['ours']:.0e}" if "profile" in by_zeros else "",
        )
        for case, by_zeros in sorted(found.items(), key=lambda item: (item[0][1], rank(item[0][0]), item[0][2:]))
    )
    skipped = dict.fromkeys(
        f"{PEERS.get(side, side)}, {row['kind']}: {reason}" for row in rows for side, reason in row["skipped"].items()
    )
    text = [table((*titles, "ratio", "without zeros", "error"), lines)]
    return text + ([f"**Skipped**: {'; '.join(skipped)}."] if skipped else [])


def _milliseconds(row: Row | None, side: str) -> str:
    return f"{row['ms'][side]:.1f}" if row is not None and side in row["ms"] else ""


def _ratio_and_peer(row: Row | None) -> str:
    """The ratio, and whose time it is of."""
    return "" if row is None or row["ratio"] is None else f"{ratio(row['ratio'])} ({PEERS[row['fastest']]})"


def training(rows: Sequence[Row]) -> list[str]:
    """Training steps."""
    titles = ("network", "batch", "precision", "XLA ms", "PyTorch ms", "ours ms", "over XLA", "over PyTorch", "error")
    lines = (
        (
            row["network"],
            str(row["batch"]),
            row.get("precision", ""),
            f"{row['xla_ms']:.0f}",
            f"{row['torch_ms']:.0f}" if "torch_ms" in row else "",
            f"{row['ours_ms']:.0f}",
            ratio(row["ratio"]),
            ratio(row["torch_ratio"]) if "torch_ratio" in row else "",
            f"{row['error']:.0e}",
        )
        for row in rows
    )
    return [table(titles, lines)]


def _kind_of(operation: str) -> str:
    """Of an operation of this package, as the suite profile names it."""
    if operation.startswith(("channel sums", "channel affine")):
        return "batch norms"
    return "gradients" if "gradient" in operation or operation == "turned kernel" else "convolutions"


def profile(rows: Sequence[Row]) -> list[str]:
    """Where time goes, by kind of operation."""
    kinds = ("convolutions", "gradients", "batch norms", "XLA", "waiting")
    titles = ("network", "batch", "what", "ms", *(f"{kind} %" for kind in kinds), "longest")
    lines = []
    for row in rows:
        sums = dict.fromkeys(kinds, 0.0)
        for name, percent in row["shares"].items():
            sums[name if name in sums else _kind_of(name)] += percent
        longest = row["operations"][0]
        lines.append((
            network(row["network"]),
            str(row["batch"]),
            row["what"],
            f"{row['ms']:.1f}",
            *(f"{percent:.0f}" for percent in sums.values()),
            f"{longest['kind']} {longest['operation']}".strip(),
        ))  # fmt: skip
    return [table(titles, lines)]


def packed(rows: Sequence[Row]) -> list[str]:
    """Networks with packed kernels as arguments."""
    titles = ("network", "XLA us", "arguments", "packed", "constants", "`nnx.jit`", "packed", "copies MB", "weights MB")
    keys = ("plain", "packed", "constant_plain", "nnx_plain", "nnx_packed")
    lines = (
        (
            network(row["network"]),
            microseconds(row["xla_us"]),
            *(ratio(row[f"{key}_ratio"]) for key in keys),
            f"{row['copies_mb']:.0f}",
            f"{row['weights_mb']:.0f}",
        )
        for row in sorted(rows, key=lambda row: rank(row["network"]))
    )
    return [table(titles, lines)]


def real_weights(rows: Sequence[Row]) -> list[str]:
    """ImageNet weights on photographs: how far from XLA, and how fast."""
    titles = ("network", "implementation", "images", "XLA us", "ours us", "ratio", "relative difference")
    return [table(titles, map(_real_line, sorted(rows, key=lambda row: (row.get("network", ""), row["batch"]))))]


def _real_line(row: Row) -> tuple[str, ...]:
    times: Mapping[str, float] = row.get("times", {})
    measured = [microseconds(times[key]) if times else "" for key in ("dense_us", "sparse_us")]
    about = (network(row.get("network", "resnet50")), f"`{row['implementation']}`", str(row["batch"]))
    return (*about, *measured, ratio(times["ratio"]) if times else "", f"{row['relative_frobenius']:.1e}")


def chain_tiles(rows: Sequence[Row]) -> list[str]:
    """Fused chains with the tiles of the model, and with those that a search kept."""
    titles = ("network", "precision", "batch", "layers", "by the model us", "by the search us", "gain")
    lines = (
        (
            network(row["network"]),
            KINDS[row["kind"]],
            str(row["batch"]),
            str(row["layers"]),
            *(microseconds(row["us"][key]) for key in ("model", "kept")),
            mean([row["us"]["model"] / row["us"]["kept"]]),
        )
        for row in sorted(rows, key=lambda row: (rank(row["network"]), list(KINDS).index(row["kind"]), row["batch"]))
    )
    return [table(titles, lines)]
