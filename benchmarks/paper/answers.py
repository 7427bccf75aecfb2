"""How our number for a claim is read from a result file: functions from the file's content to text."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from benchmarks.paper.cusparse import WHOLE
from benchmarks.paper.layers import TABLE3
from jax_sparse_conv._src.plans.timing import geometric_mean

Content: TypeAlias = dict[str, Any]
Row: TypeAlias = dict[str, Any]
Keep: TypeAlias = Callable[[Row], bool]
Answer: TypeAlias = Callable[[Content], str]
NOT_YET = "-"

_PRECISIONS = ("highest", "default")
_REAL = ("real", "profile")
_OCPA = "ocpa"
_SMALL = 14  # rows of a deep layer's map
_FIRST = 4  # kinds of layer of VGG-19, up to 112x112


# --- rows ------------------------------------------------------------------------------------------------------------


def is_own(row: Row) -> bool:
    """Whether the map has a layer's own zeros, drawn independently."""
    return row.get("zeros") == "own"


def is_empty(row: Row) -> bool:
    """Whether the map is all zeros, so that what is left of the time is the conversion and what a call costs anyway."""
    return row["zeros_target"] == 100


def has_no_zeros(row: Row) -> bool:
    return row["zeros_target"] == 0


def is_real(row: Row) -> bool:
    return row["source"] in _REAL


def of_network(name: str) -> Keep:
    """Rows of a network or its layers, with the zeros that it has."""
    return lambda row: row.get("network") == name and row["source"] == "profile"


def all_of(*tests: Keep) -> Keep:
    return lambda row: all(test(row) for test in tests)


def starts(text: str) -> Keep:
    return lambda row: row["layer"].startswith(text)


def op(name: str) -> Keep:
    return lambda row: row["op"] == name


def source(name: str) -> Keep:
    return lambda row: row["source"] == name


# --- ratios to XLA ---------------------------------------------------------------------------------------------------


def over_xla(sides: Sequence[str], keep: Keep = lambda row: True, spread: bool = False) -> Answer:
    """Geometric means of the ratios to XLA at HIGHEST and at its default precision, of the rows to keep.

    "ocpa", where no row has it, is PECR where a pool follows and ECR elsewhere. With `spread` the smallest and the
    largest ratio too.
    """

    def text(content: Content) -> str:
        rows = [row for row in content["rows"] if keep(row)]
        parts = []
        for side in sides:
            found = {precision: ratios(rows, side, precision) for precision in _PRECISIONS}
            means = [_mean(values, precision, spread) for precision, values in found.items() if values]
            if means:
                parts.append(f"{side} {', '.join(means)}")
        return "; ".join(parts) or NOT_YET

    return text


def ratios(rows: Iterable[Row], side: str, precision: str) -> list[float]:
    """XLA's time over the side's, each row as often as its network has the layer."""
    found = []
    for row in rows:
        own = row.get("ratio", {}).get(precision, {})
        name = side
        if side == _OCPA and side not in own:
            name = "pecr" if row["op"] == "conv_pool" else "ecr"
        found += [own[name]] * row.get("count", 1) if name in own else []
    return found


def _mean(values: Sequence[float], precision: str, spread: bool) -> str:
    limits = f", {min(values):.2f}x to {max(values):.2f}x" if spread else ""
    return f"{geometric_mean(values):.2f}x ({precision}{limits})"


def each(side: str, keep: Keep, key: str) -> Answer:
    """The ratio to XLA at HIGHEST against a quantity of the rows: "1: 5.1x, 8: 3.0x"."""

    def text(content: Content) -> str:
        groups: dict[Any, list[Row]] = {}
        for row in content["rows"]:
            if keep(row):
                groups.setdefault(row[key], []).append(row)
        means = {value: geometric_mean(ratios(rows, side, "highest")) for value, rows in groups.items()}
        return f"{side} " + ", ".join(f"{value}: {mean:.2f}x" for value, mean in means.items() if mean == mean)

    return text


def by_theta(content: Content) -> str:
    """ECR's ratio against zeros in percent over size of the map."""
    rows = sorted(filter(is_own, content["rows"]), key=lambda row: row["theta"])
    return "ecr " + ", ".join(f"{row['theta']:.1f}: {row['ratio']['highest']['ecr']:.2f}x" for row in rows)


# --- other baselines -------------------------------------------------------------------------------------------------


def over_cusparse(keep: Keep) -> Answer:
    """ECR over im2col, CSR and SpMM."""

    def text(content: Content) -> str:
        rows = [row for row in content["rows"] if keep(row) and {WHOLE, "ecr"} <= row.get("us", {}).keys()]
        found = [row["us"][WHOLE] / row["us"]["ecr"] for row in rows]
        if not found:
            return NOT_YET
        kinds = "one kind of layer"
        if len(found) > 1:
            kinds = f"{len(found)} kinds of layer, {min(found):.1f}x to {max(found):.1f}x"
        return f"ecr {geometric_mean(found):.1f}x over the three steps ({kinds})"

    return text


def sums_over_cusparse(names: Sequence[str]) -> Answer:
    """ECR over im2col, CSR and SpMM, of the sums of a network's layers, each as often as the network has it."""

    def text(content: Content) -> str:
        parts = []
        for name in names:
            rows = [row for row in content["rows"] if of_network(name)(row) and {WHOLE, "ecr"} <= row["us"].keys()]
            if rows:
                steps, ours = (sum(row["us"][side] * row["count"] for row in rows) for side in (WHOLE, "ecr"))
                parts.append(f"{name} {steps / ours:.1f}x")
        return f"sums of layers: {', '.join(parts)}" if parts else NOT_YET

    return text


def is_table3(row: Row) -> bool:
    """Whether it is one of Table 3's layers with the zeros that it has there."""
    layers = {layer.name: layer.zeros[0] for layer in TABLE3}
    return row["source"] == "iid" and layers.get(row["layer"]) == row["zeros_target"]


def is_table_of_2019(row: Row) -> bool:
    """Whether the layer is in the table of the 2019 versions, which the first ten of Table 3 are."""
    return row["layer"] in {layer.name for layer in TABLE3[:10]}


def workspace(content: Content) -> str:
    """Bytes beside operands and result, of im2col's."""
    rows = content["rows"]
    shares = {}
    for side in dict.fromkeys(side for row in rows for side in row["workspace_bytes"]):
        having = [row for row in rows if side in row["workspace_bytes"]]
        own = sum(row["workspace_bytes"][side] for row in having)
        shares[side] = 100 * own / sum(row["im2col_bytes"] for row in having)
    return ", ".join(f"{side} {share:.0f} %" for side, share in shares.items()) + " of im2col's matrices"


def peak(side: str, keep: Keep) -> Answer:
    """The layer with the largest ratio to XLA at either precision."""

    def text(content: Content) -> str:
        parts = []
        for precision in _PRECISIONS:
            rows = [row for row in content["rows"] if keep(row) and ratios([row], side, precision)]
            if rows:
                best = max(rows, key=lambda row: ratios([row], side, precision)[0])
                parts.append(f"{ratios([best], side, precision)[0]:.2f}x ({precision}, {best['layer']})")
        return f"{side} {', '.join(parts)}" if parts else NOT_YET

    return text


def over_algorithms(name: str) -> Answer:
    """OCPA over cuDNN's algorithms on a network's layers, with its zeros and without any."""

    def text(content: Content) -> str:
        rows = [row for row in content["rows"] if row["network"] == name]
        own, empty = (_over_each([row for row in rows if test(row)]) for test in (is_real, has_no_zeros))
        return f"ocpa {own}; without zeros {empty}" if own and empty else NOT_YET

    return text


def _over_each(rows: Sequence[Row]) -> str:
    parts = []
    for algorithm in dict.fromkeys(key for row in rows for key in (*row["cudnn_us"], *row["cudnn_skipped"])):
        found = [over_algorithm(row, algorithm) for row in rows for _ in range(row.get("count", 1))]
        ran = [ratio for ratio in found if ratio]
        mean = f"{geometric_mean(ran):.2f}x" if ran else NOT_YET
        parts.append(f"{mean} {algorithm} ({len(ran)} of {len(found)} layers)")
    return ", ".join(parts)


def over_algorithm(row: Row, algorithm: str) -> float | None:
    """An algorithm's time over that of PECR where a pool follows and of ECR elsewhere, where both ran."""
    ours = row["us"].get("pecr" if row["op"] == "conv_pool" else "ecr")
    theirs = row["cudnn_us"].get(algorithm)
    return theirs / ours if ours and theirs else None


def conversion_over_im2col(content: Content) -> str:
    """ECR's time on a map of zeros over that of building im2col's matrix, on maps of up to 14x14."""
    empty = {row["layer"]: row["us"]["ecr"] for row in content["rows"] if is_empty(row) and "ecr" in row["us"]}
    small = [row for row in content["rows"] if row.get("steps_us") and row["x_shape"][1] <= _SMALL]
    built = {row["layer"]: row["steps_us"]["im2col"] for row in small if row["layer"] in empty}
    if not built:
        return NOT_YET
    mean = geometric_mean([empty[layer] / us for layer, us in built.items()])
    return f"ecr on maps of zeros {mean:.1f}x im2col's time ({len(built)} layers)"


def transfers(content: Content) -> str:
    """Share of moving maps in a layer's time, of the first layers and of the others."""
    rows = content["rows"]
    parts = []
    for side in dict.fromkeys(side for row in rows for side in row["transfer_percent"]):
        found = [row["transfer_percent"][side] for row in rows if side in row["transfer_percent"]]
        first, others = found[:_FIRST], found[_FIRST:]
        if first and others:
            parts.append(f"{statistics.mean(first):.0f} % and {statistics.mean(others):.0f} % ({side})")
    return f"first {_FIRST} kinds of layer and the others: {', '.join(parts)}" if parts else NOT_YET


def micro_kernel(content: Content) -> str:
    """Plain loops over the micro-kernel: each in its best configuration, and both in the same."""
    rows = content["rows"]
    gains = [row["gain"] for row in rows]
    same = [gain for row in rows for gain in row["gains"].values()]
    best = f"{geometric_mean(gains):.1f}x ({len(gains)} layers, {min(gains):.1f}x to {max(gains):.1f}x)"
    return f"{best}; in the same configuration {geometric_mean(same):.1f}x ({min(same):.1f}x to {max(same):.1f}x)"


# --- shares of time ---------------------------------------------------------------------------------------------------


def time_by_zeros(key: str) -> Answer:
    """Shares of a network's dense time, the first of each percentage that of layers with under 50 % of zeros."""

    def text(content: Content) -> str:
        parts = []
        for row in content["rows"]:
            for side, percent in row[key].items():
                found = ", ".join(f"{name} {share:.0f} %" for name, share in percent.items())
                parts.append(f"{row['layer']} ({side}) {found}")
        return "; ".join(parts) or NOT_YET

    return text


# --- energy ----------------------------------------------------------------------------------------------------------


def energy(content: Content, zeros: bool = True) -> str:
    """What a side needs less than XLA at either precision, with the networks' zeros or without any."""
    measured = [row for row in content["rows"] if any((row.get("millijoules") or {}).values())]
    rows = [row for row in measured if (row.get("source") != "no zeros") == zeros]
    names = list(dict.fromkeys(side for row in rows for side in row["millijoules"] if not side.startswith("xla ")))
    parts = []
    for side in names:
        means = [_saving(rows, side, precision) for precision in _PRECISIONS]
        parts.append(f"{side} {', '.join(filter(None, means))}")
    return "; ".join([*parts, _spread(rows)]) if parts else NOT_YET


def _saving(rows: Sequence[Row], side: str, precision: str) -> str:
    pairs = [(row["millijoules"].get(side), row["millijoules"].get(f"xla {precision}")) for row in rows]
    shares = [own / dense for own, dense in pairs if own and dense]
    if not shares:
        return ""
    percent = 100 * (1 - geometric_mean(shares))
    return f"{abs(percent):.0f} % {'less' if percent >= 0 else 'more'} ({precision})"


def _spread(rows: Sequence[Row]) -> str:
    """How far the loops of a side are apart at the most, in that side's median; older files have one loop."""
    ranges = [
        (row["millijoules"][each], ends) for row in rows for each, ends in row.get("millijoules_range", {}).items()
    ]
    if not ranges:
        return "one loop each"
    return f"loops within {max(100 * (most - least) / of for of, (least, most) in ranges):.0f} %"


def median_loss(key: str) -> Answer:
    """Of the cost model's choice: over all maps, on each kind of map, and by the paper's own rule where it is known."""

    def text(content: Content) -> str:
        rows = content["rows"]
        kinds = dict.fromkeys(row["source"] for row in rows)
        parts = [f"{kind} {_median([row for row in rows if row['source'] == kind], key)}" for kind in kinds]
        losses = f"median {_median(rows, key)}, largest {max(row[key] for row in rows):.1%} ({', '.join(parts)})"
        if key != "model_loss" or not all("published_loss" in row for row in rows):
            return losses
        return f"{losses}; by the paper's own rule {_median(rows, 'published_loss')}"

    return text


def _median(rows: Sequence[Row], key: str) -> str:
    return f"{statistics.median(row[key] for row in rows):.1%}"


# --- conversion ------------------------------------------------------------------------------------------------------


def empty_share(kind: str) -> Answer:
    """Time on a map of zeros, in that on the layer's own zeros."""

    def text(content: Content) -> str:
        rows = [row for row in content["rows"] if row["op"] == kind and row["zeros_target"] not in (0, 100)]
        found = [f"{row['layer']} {100 * row['empty_share']:.0f} %" for row in rows if row["source"] == "iid"]
        return "; ".join(found) or NOT_YET

    return text


def empty_share_of_networks(side: str, kind: str, names: Sequence[str]) -> Answer:
    """The same over all layers of a kind of each network, on the maps that it has."""

    def text(content: Content) -> str:
        parts = []
        for name in names:
            rows = [row for row in content["rows"] if row.get("network") == name and row["op"] == kind]
            own, empty = ({row["layer"]: row for row in rows if test(row)} for test in (is_real, is_empty))
            both = [layer for layer in own if layer in empty and side in own[layer]["us"]]
            if both:
                times = [sum(row[layer]["us"][side] * own[layer]["count"] for layer in both) for row in (empty, own)]
                parts.append(f"{name} {100 * times[0] / times[1]:.0f} %")
        return f"{side}: {', '.join(parts)}" if parts else NOT_YET

    return text


def zeros_lines(name: str, content: Content) -> list[str]:
    """An experiment's ratios at HIGHEST on each kind of map and the share of a map of zeros, a table's line a side."""
    rows = [row for row in content["rows"] if row.get("ratio", {}).get("highest")]
    middle = [row for row in rows if row["source"] == "iid" and row["zeros_target"] not in (0, 100)]
    columns = [list(filter(is_real, rows)), middle, list(filter(has_no_zeros, rows))]
    lines = []
    for side in ("ecr", "pecr", "coo", _OCPA, "auto"):
        if side == _OCPA and not any(side in row["us"] for row in rows):
            continue
        found = [ratios(column, side, "highest") for column in columns]
        cells = [f"{geometric_mean(values):.2f}x" if values else NOT_YET for values in found]
        if any(found):
            lines.append(f"| `{name}` | {side} | {' | '.join(cells)} | {_conversion(rows, side)} |")
    return lines


def _conversion(rows: Sequence[Row], side: str) -> str:
    if side == "auto":
        return NOT_YET  # it may not convert at all
    keys = ("layer", "batch", "strides")
    times: dict[tuple[Any, ...], dict[bool, float]] = {}
    for row in rows:
        if side in row["us"] and (is_own(row) or is_real(row) or is_empty(row)):
            times.setdefault(tuple(row[key] for key in keys), {}).setdefault(is_empty(row), row["us"][side])
    shares = [both[True] / both[False] for both in times.values() if len(both) == 2]
    return f"{100 * geometric_mean(shares):.0f} %" if shares else NOT_YET
