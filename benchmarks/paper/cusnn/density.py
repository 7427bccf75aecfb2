"""cuSNN, sections 3.2 and 3.4: COO* whose configuration the density of the map chooses, and COO* of stored lists.

Sides, all in turns on the same maps:

- coo: one configuration, the model's at a density of 0.25;
- counted, first of 2 (last of 2, first of 4, last of 4): so many copies of that configuration in one call. A count that
  is handed in lets the first or the last of them run, so that the others are what a closed kernel costs;
- sampled, last of 2: the same where the program takes a sample of the map;
- model, counted and model, sampled: the configurations that the model has for the call, where it has several;
- stored: a `CooStar` in the place of the map; conversion: making it, which "stored" does not contain;
- direct, and XLA at HIGHEST, for scale.

"coo variants" of `dispatch/model.json` are medians of these: `costs` gives them.
"""

from __future__ import annotations

import contextvars
import dataclasses
import functools
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import jax_sparse_conv as jsc
from benchmarks.common import data
from benchmarks.paper import runner, sides
from benchmarks.paper.answers import NOT_YET, Content
from benchmarks.paper.experiment import Experiment
from benchmarks.paper.layers import PaperLayer, shrunk
from benchmarks.paper.runner import Context, Row
from jax_sparse_conv._src.dispatch.coo import cost_model
from jax_sparse_conv._src.dispatch.coo.cost_model import Variants
from jax_sparse_conv._src.plans import timing
from jax_sparse_conv._src.plans.timing import geometric_mean
from jax_sparse_conv._src.primitive import sampling
from jax_sparse_conv._src.primitive.coo_star import CooStar
from jax_sparse_conv._src.problem import geometry as geo

COO, DIRECT, STORED, CONVERSION = "coo", "direct", "stored", "conversion"
SAMPLED = "sampled, last of 2"
COUNTED = {f"counted, {place} of {copies}": copies for copies in (2, 4) for place in ("first", "last")}
MODEL = ("model, counted", "model, sampled")
_COPIES = {**COUNTED, SAMPLED: 2}  # of the usual configuration
_ALL_AT_MOST, _ALL_ABOVE = 1.0, 0.0  # densities: of no map above, and of no map but an empty one at most
_SCALE = (DIRECT, sides.HIGHEST)

LAYERS = tuple(
    PaperLayer(
        f"{kernel}x{kernel} {channels}->{out_channels} {size}x{size}", "conv", channels, out_channels, size, kernel
    )
    for kernel, channels, out_channels, size in (
        (3, 64, 64, 56),
        (3, 128, 128, 28),
        (3, 256, 256, 14),
        (3, 512, 512, 7),
        (3, 128, 32, 14),
        (1, 256, 64, 56),
    )
)
ZEROS = (50, 75, 85, 90, 95)
BATCHES = (1, 8)
_LARGE_BATCH = 32  # where only the model's configurations are compared with the usual one
_SECONDS = 0.5  # of samples of a map, beyond three of each side

_nonzeros = jax.jit(sampling.all_nonzeros)
_side: contextvars.ContextVar[str] = contextvars.ContextVar("side")  # that is lowered


@dataclasses.dataclass(frozen=True)
class Case:
    """A layer, a number of images, and whether the model has several configurations for them."""

    layer: PaperLayer
    batch: int
    has_several: bool

    def sides_at(self, zeros: int) -> tuple[str, ...]:
        """What is timed at a percentage of zeros: without any, nothing that only costs are taken from."""
        of_model = MODEL if self.has_several else ()
        if self.batch == _LARGE_BATCH:
            return (COO, *of_model)
        return (COO, *(_COPIES if zeros else ()), *of_model, STORED, CONVERSION, *_SCALE)

    @property
    def shapes(self) -> timing.Operands:
        """The operands of every side: x, its lists, its counts, kernel and bias."""
        shapes = (self.layer.x_shape(self.batch), self.layer.kernel_shape, (self.layer.out_channels,))
        x, kernel, bias = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
        return x, jax.eval_shape(_stored, x, kernel), jax.eval_shape(_nonzeros, x), kernel, bias

    @property
    def rotations(self) -> int:
        return runner._rotations(runner.Case(self.layer, self.batch))


def _density(context: Context) -> list[Row]:
    if jax.default_backend() == "cpu" and not context.quick:
        raise ValueError("cusnn_density needs a GPU: COO* has one configuration on the CPU")
    cases = list(_cases(context.quick))
    zeros = (0, ZEROS[0], ZEROS[-1]) if context.quick else (0, *ZEROS)
    rows = []
    with mock.patch.object(cost_model, "by_density", _told(cost_model.by_density)):  # asked when a side is lowered
        compiled = _compile_all(cases)
        runner.progress(f"{len(compiled)} programs are compiled")
        for case in cases:
            for percent in zeros:
                rows.append(_row(context, case, percent, compiled))
                runner.progress(_line(rows[-1]))
    runner.progress(costs_line(rows))
    return rows


def _cases(is_quick: bool) -> Iterator[Case]:
    layers = [shrunk(layer) for layer in (LAYERS[0], LAYERS[-1])] if is_quick else LAYERS
    for batch in (1, 2) if is_quick else (*BATCHES, _LARGE_BATCH):
        for layer in layers:
            case = Case(layer, batch, _has_several(layer, batch))
            if case.has_several or batch != _LARGE_BATCH:
                yield case


def _has_several(layer: PaperLayer, batch: int) -> bool:
    x_shape = layer.x_shape(batch)
    geometry = geo.resolve(x_shape, layer.kernel_shape)
    found = cost_model.by_density(x_shape, (1, *layer.kernel_shape), geometry, 4, is_counted=True)
    return len(found.configurations) > 1


# --- the sides -------------------------------------------------------------------------------------------------------


def _told(modelled: Callable[..., Variants]) -> Callable[..., Variants]:
    """In the place of `cost_model.by_density`: what the side that is lowered is to have."""

    def by_density(
        x_shape: Any, kernel_shape: Any, geometry: geo.Geometry, element_bytes: int, **more: Any
    ) -> Variants:
        side = _side.get()
        if side in MODEL:
            return modelled(x_shape, kernel_shape, geometry, element_bytes, **more)
        copies = _COPIES.get(side, 1)
        end = _ALL_AT_MOST if "first" in side else _ALL_ABOVE
        usual = cost_model.for_operands(x_shape, kernel_shape, geometry, element_bytes)
        return Variants((usual,) * copies, (end,) * (copies - 1))

    return by_density


def _call(side: str, function: Callable[..., Any], *operands: Any) -> Any:
    """What is lowered meanwhile in this thread is that side's."""
    before = _side.set(side)
    try:
        return function(*operands)
    finally:
        _side.reset(before)


@jax.jit
def _stored(x: jax.Array, kernel: jax.Array) -> CooStar:
    return CooStar.fromdense(x, kernel_shape=kernel.shape)


@functools.cache
def _function(side: str) -> timing.Function:
    """A jitted function of (x, its lists, its counts, kernel, bias), of each of which a side takes what it needs."""
    conv = functools.partial(jsc.conv, activation="relu", precision="highest")

    def run(x: jax.Array, stored: CooStar, nonzeros: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
        if side == CONVERSION:
            return _stored(x, kernel).counts
        if side in _SCALE:
            return conv(x, kernel, bias, implementation=side.split()[0])
        if side == STORED:
            return conv(stored, kernel, bias, implementation="coo")
        has_counts = side in COUNTED or side == MODEL[0]
        return conv(x, kernel, bias, implementation="coo", nonzeros=nonzeros if has_counts else None)

    return jax.jit(run)


_Compiled = dict[tuple[Case, str], str | int]  # configurations, 0 where it has none of COO*'s, or why it cannot run


def _compile_all(cases: Sequence[Case]) -> _Compiled:
    jobs = [(case, side) for case in cases for side in case.sides_at(ZEROS[0])]
    found = runner.compiled([functools.partial(_compile, *job) for job in jobs], [sides.is_dense(s) for _, s in jobs])
    return dict(zip(jobs, found, strict=True))


def _compile(case: Case, side: str) -> str | int:
    function, shapes = _function(side), case.shapes
    try:
        _call(side, timing.compile_ahead, function, [shapes] * case.rotations)
        lowered = _call(side, function.lower, *shapes)  # type: ignore[attr-defined]
        lowered.compile()
        return _configurations_in(lowered.as_text(), side)
    except (ValueError, jax.errors.JaxRuntimeError) as error:
        return " ".join(str(error).split())[:300]


def _configurations_in(text: str, side: str) -> int:
    """How many configurations a lowered program has.

    Raises:
      ValueError: not those that the side is to have.
    """
    found = re.search(r"\bcoo = dense<[^>]*> : tensor<(\d+)xi64>", text)
    count = int(found[1]) // 4 if found else 0
    if found and side not in MODEL and count != _COPIES.get(side, 1):
        raise ValueError(f"{side}: the program has {count} configurations")
    return count


# --- rows ------------------------------------------------------------------------------------------------------------


def _row(context: Context, case: Case, percent: int, compiled: _Compiled) -> Row:
    layer, operands = case.layer, _operands(case, percent)
    wanted = case.sides_at(percent)
    skipped = {side: found for side in wanted if isinstance(found := compiled[case, side], str)}
    functions = {side: _function(side) for side in wanted if side not in skipped}
    for side, function in functions.items():  # each by itself, should anything still be lowered
        skipped |= _call(side, functools.partial(timing.failures, chained=True), {side: function}, operands)
    functions = {side: function for side, function in functions.items() if side not in skipped}
    times = _times(functions, operands, context.repeats)
    called = {side: functools.partial(_call, side, function) for side, function in functions.items()}
    called.pop(CONVERSION, None)
    row = {
        "layer": layer.name,
        **{key: getattr(layer, key) for key in ("op", "strides", "groups", "count")},
        "x_shape": list(operands[0][0].shape),
        "kernel_shape": list(layer.kernel_shape),
        "batch": case.batch,
        "source": "iid",
        "zeros_target": percent,
        "zeros_percent": 100 * float(np.mean([1 - counts[0, 0] / counts[0, 1] for _, _, counts, *_ in operands])),
        "configurations": {side: n for side in functions if isinstance(n := compiled[case, side], int) and n},
        "us": {side: timed.microseconds for side, timed in times.items()},
        "quartiles_us": {side: [1e6 * timed.low, 1e6 * timed.high] for side, timed in times.items()},
        "ran": {s: _call(s, timing.what_ran, functions[s], *operands[0]) for s in called if not sides.is_dense(s)},
        "error": runner._errors(called, operands[0]),
        "skipped": skipped,
    }
    return derived(row)


def _operands(case: Case, percent: int) -> list[timing.Operands]:
    kernel, bias = map(jnp.asarray, data.weights(case.layer, 0))
    maps = [jnp.asarray(data.iid_map(case.layer, case.batch, percent, seed)) for seed in range(case.rotations)]
    return [(x, _stored(x, kernel), _nonzeros(x), kernel, bias) for x in maps]


def _times(
    functions: Mapping[str, timing.Function], operands: Sequence[timing.Operands], repeats: int
) -> dict[str, timing.Timing]:
    """The conversion by itself: its result is of another size, so that its chains have another length."""
    groups = [{side: f for side, f in functions.items() if (side == CONVERSION) == apart} for apart in (False, True)]
    found: dict[str, timing.Timing] = {}
    for group in filter(None, groups):
        found |= timing.per_call(group, operands, repeats, _SECONDS)
    return found


def derived(row: Row) -> Row:
    """The row with its ratios and with what follows from its times, where it has them.

    Keys: "closed_kernel_us" and "sample_us", microseconds; "stored_us" in the place of times of "us" that leave the
    conversion out; "stored_ratio" and "model_gain", times of "coo" over others.
    """
    us = row["us"]
    copies = {1: [us[COO]] if COO in us else []}
    for side, count in COUNTED.items():
        copies.setdefault(count, []).extend([us[side]] if side in us else [])
    if all(len(times) == min(count, 2) for count, times in copies.items()):
        means = [statistics.mean(times) for times in copies.values()]
        row["closed_kernel_us"] = statistics.linear_regression(list(copies), means).slope
    if {SAMPLED, "counted, last of 2"} <= us.keys():
        row["sample_us"] = us[SAMPLED] - us["counted, last of 2"]
    row["stored_us"] = {side: us.pop(side) for side in (STORED, CONVERSION) if side in us}
    if {STORED, CONVERSION} == row["stored_us"].keys() and COO in us:
        both = {STORED: row["stored_us"][STORED], f"{STORED} and {CONVERSION}": sum(row["stored_us"].values())}
        row["stored_ratio"] = {what: us[COO] / time for what, time in both.items()}
    if COO in us and us.keys() & set(MODEL):
        row["model_gain"] = {side: us[COO] / us[side] for side in MODEL if side in us}
    return runner.add_ratios(row)


def _line(row: Row) -> str:
    times = ", ".join(f"{side} {time:.1f}" for side, time in {**row["us"], **row["stored_us"]}.items())
    failed = f"; skipped: {row['skipped']}" if row["skipped"] else ""
    return f"{row['layer']}, {row['zeros_target']} % zeros, batch {row['batch']}: {times} us{failed}"


# --- what follows from them ------------------------------------------------------------------------------------------

_COSTS = {"seconds, closed kernel": "closed_kernel_us", "seconds, sample": "sample_us"}


def costs(rows: Sequence[Row], batch: int | None = None) -> dict[str, tuple[float, float, float]]:
    """By the names of "coo variants": the lower quartile, the median and the upper one over layers, in seconds.

    A layer's is its median over zeros. Of one batch, or of all of them where that is None; a name without two layers
    is left out.
    """
    found = {}
    for name, key in _COSTS.items():
        layers: dict[tuple[str, int], list[float]] = {}
        for row in rows:
            if key in row and batch in (None, row["batch"]):
                layers.setdefault((row["layer"], row["batch"]), []).append(row[key])
        if len(layers) > 1:
            medians = [1e-6 * statistics.median(values) for values in layers.values()]
            low, median, high = statistics.quantiles(medians, n=4, method="inclusive")
            found[name] = (low, median, high)
    return found


def costs_line(rows: Sequence[Row]) -> str:
    """What to write into "coo variants" of `dispatch/model.json`, and how far layers are apart."""
    numbers = ", ".join(f'"{name}" {median:.2g}' for name, (_, median, _) in costs(rows).items())
    parts = [f'"coo variants" of dispatch/model.json: {numbers or NOT_YET}']
    for batch in (None, *sorted({row["batch"] for row in rows if "sample_us" in row})):
        of = "all batches" if batch is None else f"batch {batch}"
        texts = (f"{name} {_quartiles(found)}" for name, found in costs(rows, batch).items())
        parts.append(f"{of}: {', '.join(texts) or NOT_YET}")
    return "; ".join(parts)


def _quartiles(seconds: tuple[float, float, float]) -> str:
    low, median, high = (1e6 * each for each in seconds)
    return f"{median:.2f} us ({low:.2f} to {high:.2f})"


def by_density(content: Content) -> str:
    """What the model's configurations gain over the usual one with counts, by the zeros, and what choosing costs."""
    rows = content["rows"]
    gains: dict[int, list[float]] = {}
    for row in rows:
        if MODEL[0] in row.get("model_gain", {}):
            gains.setdefault(row["zeros_target"], []).append(row["model_gain"][MODEL[0]])
    means = ", ".join(f"{zeros} % zeros {geometric_mean(gains[zeros]):.2f}x" for zeros in sorted(gains))
    parts = [f"batches with counts, over the one configuration: {means}"] if means else []
    for found, what in zip(costs(rows).values(), ("a kernel that returns", "a sample"), strict=False):
        parts.append(f"{what} {_quartiles(found)}")
    return "; ".join(parts) or NOT_YET


def stored_lists(content: Content) -> str:
    """The time of COO* that lists the map over that of stored lists, without and with their conversion."""
    rows = [row for row in content["rows"] if "stored_ratio" in row and row["zeros_target"]]
    parts = []
    for batch in sorted({row["batch"] for row in rows}):
        found = [row["stored_ratio"] for row in rows if row["batch"] == batch]
        means = (f"{geometric_mean([each[what] for each in found]):.2f}x {what}" for what in found[0])
        parts.append(f"batch {batch}: {', '.join(means)}")
    return f"coo's time over {'; '.join(parts)}" if parts else NOT_YET


def _draw(figure: Any, rows: Sequence[Row]) -> None:
    left, right = figure.subplots(1, 2)
    costly = [row for row in rows if "sample_us" in row and "closed_kernel_us" in row]
    names = [f"{row['layer']}, batch {row['batch']}" for row in costly]
    for name, key in _COSTS.items():
        left.plot(names, [row[key] for row in costly], ".", label=name.removeprefix("seconds, "))
    left.tick_params("x", rotation=90, labelsize=6)
    left.set_ylabel("microseconds")
    for key, style in (("stored_ratio", "."), ("model_gain", "x")):
        for what in dict.fromkeys(each for row in rows for each in row.get(key, {})):
            points = [(row["zeros_percent"], row[key][what]) for row in rows if what in row.get(key, {})]
            right.plot(*zip(*points, strict=True), style, label=what)
    right.axhline(1, color="0.4", linewidth=0.8)
    right.set_xlabel("zeros, %")
    right.set_ylabel("time of coo / time")
    for axes in (left, right):
        axes.legend(fontsize=7)


EXPERIMENTS = (
    Experiment(
        "cusnn_density",
        "cuSNN, sections 3.2 and 3.4",
        "COO* with several configurations, one of which the density of the map chooses, and with stored lists.",
        _density,
        _draw,
        (
            *("layer", "zeros_percent", "batch", "configurations", "stored_us", "stored_ratio", "closed_kernel_us"),
            *("sample_us", "model_gain"),
        ),
    ),
)
