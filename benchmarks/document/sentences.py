"""The sentences that cite a file of results, and what computes their figures; those of kernels are a file of their own.

A {} is a figure that the function computes. Figures in the words themselves say which rows are meant.
"""

from __future__ import annotations

import collections
import functools
import itertools
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.losing import is_loss
from benchmarks.common.results import Row, read
from benchmarks.document import losses
from benchmarks.document.network_tables import by_faster_flags
from benchmarks.document.prose import Sentence, register
from benchmarks.tune import gradient_regret, regret
from jax_sparse_conv._src.plans.timing import geometric_mean
from jax_sparse_conv._src.tune import gradients
from jax_sparse_conv.models import profile_tables

_GUIDE = "docs/guide/"
_KINDS = ("highest", "tf32", "16bit")

SENTENCES: list[Sentence] = []

_says = functools.partial(register, SENTENCES)


def rows_of(path: Path, label: str | None = None, **about: Any) -> list[Row]:
    """The rows of a file that are so; without a label those of today's package.

    Raises:
      ValueError: there is none.
    """
    wanted = about | {"label": label}
    found = [row for row in read(path) if all(row.get(key) == value for key, value in wanted.items())]
    if not found:
        raise ValueError(f"{path} has no row with {wanted}")
    return found


def one_digit(values: Iterable[float]) -> list[str]:
    return [f"{value:.1f}" for value in values]


# --- zeros -----------------------------------------------------------------------------------------------------------


@_says("README.md", "ReLU leaves {} to {} % exact zeros in the feature maps of a trained network")
@_says("docs/api/models.md", "from {} to {} % of a layer's input")
def _measured_zeros(results: Path) -> Sequence[str]:
    """Of the package's own table; no file of results has them."""
    of_stages = {"resnet": ("conv2_", "conv3_", "conv4_"), "densenet": ("conv2_", "conv3_", "conv4_", "conv5_", "pool")}
    found = [
        100 * zeros
        for family, stages in of_stages.items()
        for layer, zeros in profile_tables.PROFILES[family].items()
        if layer.startswith(stages)
    ]
    return f"{min(found):.0f}", f"{max(found):.0f}"


# --- README.md -------------------------------------------------------------------------------------------------------


@_says(
    "README.md",
    "Nine 3x3 layers are {}x without zeros, {}x at 50 % and {}x at 85 % (`cpu_amd_epyc/cpu.json`)",
)
def _nine_by_none(results: Path) -> Sequence[str]:
    return one_digit(nine_layers(results, zeros, requested="auto") for zeros in (0, 50, 85))


def nine_layers(results: Path, zeros: int, key: str = "ratio", **more: Any) -> float:
    """The geometric mean of the CPU's nine 3x3 layers."""
    about: dict[str, Any] = {"op": "conv", "batch": 1, "weights": "constant", "source": "iid", "zeros_target": zeros}
    rows = rows_of(results / "cpu_amd_epyc" / "cpu.json", **about | more)
    return geometric_mean(row[key] for row in rows if row["layer"].startswith("conv 3x3"))


@_says(
    "README.md",
    """\
At batch 32 on an H200, VGG-19, ResNet-50, DenseNet-121 and RegNetX-16GF are {}x to {}x at `HIGHEST`. In TF32 and
bfloat16 DenseNet-121 is {}x and {}x, the others {}x to {}x (`h200/networks.json`).""",
)
def _batch_32(results: Path) -> Sequence[str]:
    rows = rows_of(results / "h200" / "networks.json", batch=32, weights="arguments")
    found = {(row["network"], row["kind"]): row["ratio"]["auto"] for row in by_faster_flags(rows)}
    highest = [found[network, kind] for network, kind in found if kind == "highest"]
    others = [found[network, kind] for network, kind in found if kind != "highest" and network != "densenet121"]
    densenet = [found["densenet121", kind] for kind in ("default", "bfloat16")]
    return *one_digit([min(highest), max(highest), *densenet]), f"{min(others):.2f}", f"{max(others):.2f}"


@_says(
    "README.md",
    "The fastest of onnxruntime, OpenVINO and PyTorch takes {} to {} times as long as ResNet-50, DenseNets and "
    "VGG-19 do in float32, without zeros {} to {} times (`cpu_amd_epyc/peers.json`)",
)
def _beside_other_frameworks(results: Path) -> Sequence[str]:
    path = results / "cpu_amd_epyc" / "peers.json"
    ratios = []
    for zeros in ("profile", "none"):
        found = [row["ratio"] for row in rows_of(path, kind="float32", batch=1, zeros=zeros)]
        ratios += [min(found), max(found)]
    return one_digit(ratios)


@_says(
    _GUIDE + "cpu.md",
    "With AMX OpenVINO takes {} to {} times as long as ResNet-50, DenseNet-121 and VGG-19 do in bfloat16, XLA {} to {} "
    "times (`cpu_intel_xeon/peers.json`)",
)
def _with_amx(results: Path) -> Sequence[str]:
    rows = rows_of(results / "cpu_intel_xeon" / "peers.json", kind="bfloat16", zeros="profile")
    openvino, xla = ([row["ms"][side] / row["ms"]["ours"] for row in rows] for side in ("openvino", "xla"))
    return [*(f"{value:.2f}" for value in (min(openvino), max(openvino))), *one_digit([min(xla), max(xla)])]


@_says(
    _GUIDE + "cpu.md",
    "In bfloat16 a ResNet-50 with a trained network's zeros takes {} ms an image, in float32 {} ms "
    "(`cpu_amd_epyc/peers.json`). OpenVINO, which skips none, takes {} ms in bfloat16 and {} ms in float32",
)
def _in_bfloat16(results: Path) -> Sequence[str]:
    path = results / "cpu_amd_epyc" / "peers.json"
    rows = [
        rows_of(path, network="resnet50", kind=kind, batch=1, zeros="profile")[0]["ms"]
        for kind in ("bfloat16", "float32")
    ]
    return one_digit(row[side] for side in ("ours", "openvino") for row in rows)


@_says(
    "README.md",
    "On an H200 at `HIGHEST`, errors are {} to {} times XLA's, DenseNet-121's with 8 images {} (`h200/networks.json`)",
)
def _errors_of_networks(results: Path) -> Sequence[str]:
    errors: dict[tuple[str, int], float] = {}
    about = {"kind": "highest", "flags": "command buffers", "weights": "arguments"}
    for row in sorted(rows_of(results / "h200" / "networks.json", **about), key=lambda row: str(row["date"])):
        if row["batch"] in (1, 8, 32) and {"xla", "auto"} <= set(row["error"]):
            errors[row["network"], row["batch"]] = row["error"]["auto"] / row["error"]["xla"]
    apart = errors.pop(("densenet121", 8))
    return one_digit([min(errors.values()), max(errors.values()), apart])


@_says(
    "README.md",
    "Of {} calls of networks' layers on an H100 {} are below 0.97x, the least {}x (`h100/zoo.json`)",
)
def _layers_that_lose(results: Path) -> Sequence[str]:
    return _lost(results / "h100" / "zoo.json", results)


@_says(
    "README.md",
    "Of {} random layers on a CPU {} are, the least {}x (`cpu_amd_epyc/sweep.json`)",
)
def _random_layers_that_lose(results: Path) -> Sequence[str]:
    return _lost(results / "cpu_amd_epyc" / "sweep.json", results)


def _lost(path: Path, results: Path) -> Sequence[str]:
    found = losses.of_file(path, results)
    return f"{found.rows:,}", f"{found.lost:,}", f"{found.least:.2f}"


# --- guides ----------------------------------------------------------------------------------------------------------


@_says(_GUIDE + "cpu.md", "two cores run VGG-19 {} times as fast as XLA (`cpu_amd_epyc/run.json`)")
def _vgg_on_two_cores(results: Path) -> Sequence[str]:
    (row,) = rows_of(results / "cpu_amd_epyc" / "run.json", network="vgg19", batch=1, implementation="auto")
    return one_digit([row["totals"]["network"]["ratio"]])


@_says(_GUIDE + "cpu.md", "VGG-19 holds {} MB beside its {} (`cpu_amd_epyc/packed.json`)")
def _packed_copies(results: Path) -> Sequence[str]:
    (row,) = rows_of(results / "cpu_amd_epyc" / "packed.json", network="vgg19")
    return f"{row['copies_mb']:.0f}", f"{row['weights_mb']:.0f}"


@_says(
    _GUIDE + "training.md",
    "ResNet-50's with 8 images is {} times as fast as XLA's and {} times as fast as PyTorch's. DenseNet-121's is {} "
    "and {} times as fast, VGG-16's with 4 images {} and {} times (`cpu_amd_epyc/training.json`)",
)
def _steps(results: Path) -> Sequence[str]:
    found = []
    for network, batch in (("resnet50", 8), ("densenet121", 8), ("vgg16", 4)):
        (row,) = rows_of(results / "cpu_amd_epyc" / "training.json", network=network, batch=batch)
        found += [row["ratio"], row["torch_ratio"]]
    return [f"{value:.2f}" for value in found]


@_says(
    _GUIDE + "training.md",
    "At HIGHEST on an H200, ResNet-50's with 32 images is {} times as fast as XLA's and {} times as fast as PyTorch's, "
    "VGG-16's {} and {} times (`h200/training.json`)",
)
def _steps_at_highest(results: Path) -> Sequence[str]:
    found = []
    for network in ("resnet50", "vgg16"):
        (row,) = rows_of(results / "h200" / "training.json", network=network, batch=32, precision="highest")
        found += [row["ratio"], row["torch_ratio"]]
    return [f"{value:.2f}" for value in found]


@_says(
    _GUIDE + "your_model.md",
    "On an H200, ResNet-50 takes {} ms by `nnx.jit` and {} ms by `jit_inference` (`h200/host.json`)",
)
def _host(results: Path) -> Sequence[str]:
    (row,) = rows_of(results / "h200" / "host.json", network="resnet50", what="network")
    return f"{row['us']['nnx.jit'] / 1000:.1f}", f"{row['us']['jit_inference'] / 1000:.2f}"


@_says(
    _GUIDE + "batches_and_devices.md",
    "On an H200 the choice costs {} us at the median (`h200/adaptive.json`)",
)
def _choice(results: Path) -> Sequence[str]:
    return one_digit([statistics.median(choices(results))])


def choices(results: Path) -> list[float]:
    """What a call that holds both sides costs more than the side that runs."""
    rows = rows_of(results / "h200" / "adaptive.json")
    return [row["overhead_us"][side] for row in rows for side in ("sparse", "dense")]


# --- choices ---------------------------------------------------------------------------------------------------------


_CALLS = """\
On an {0}, {{}} calls (`{1}/tune.times.jsonl`, `{1}/xla.times.jsonl`):

| calls | wanted: mean, worst | HIGHEST | TF32 | 16 bits |
|---|---|---|---|---|
| with their row | 1 %, 5 % | {{}} %, {{}} % | {{}} %, {{}} % | {{}} %, {{}} % |
"""


@_says(
    "docs/design/tuning.md",
    _CALLS.format("H100", "h100")
    + """\
| without it | 5 % | {} % | {} % | {} % |
| by the models alone | 5 % | {} % | {} % | {} % |

Losses are calls that take longer than XLA's time over 0.97. With rows there are {}, the worst {}x. Without their rows
there are {}, the worst {}x; by the models alone {}.""",
)
def _regret(results: Path) -> Sequence[str]:
    ways = ("tables", "no row", "models")
    figures = _regrets(results, "h100", ways)
    for way in ways:
        outcomes = [each for kind in _KINDS for each in _outcomes(results, "h100")[way, kind]]
        figures += [str(sum(map(regret.is_loss, outcomes))), f"{min(each.ratio for each in outcomes):.2f}"]
    return figures[:-1]  # the last worst is that of the way before


@_says(
    "docs/design/tuning.md",
    _CALLS.format("H200", "h200")
    + """\
| by the H100's rows, else by the models | 5 % | {} % | {} % | {} % |
| by the models alone | 5 % | {} % | {} % | {} % |""",
)
def _regret_of_sibling(results: Path) -> Sequence[str]:
    return _regrets(results, "h200", ("tables", "sibling", "models"))


@_says(
    "docs/design/tuning.md",
    """\
On an H200, {} gradients of 1, 8 and 32 images (`h200/gradients.times.jsonl`):

| choice | by x: mean, worst | by the kernel: mean, worst | losses |
|---|---|---|---|
| with their row | {} %, {} % | {} %, {} % | {} |
| by near rows, else by the rules | {} %, {} % | {} %, {} % | {} |
| by the rules alone | {} %, {} % | {} %, {} % | {} |""",
)
@functools.cache  # it takes seconds
def _regret_of_gradients(results: Path) -> Sequence[str]:
    entries = gradients.read(results / "h200" / "gradients.times.jsonl")
    figures = [str(len(entries))]
    for way in gradient_regret.WAYS:
        ratios: list[float] = []
        for by_kernel in (False, True):
            chosen = [entry for entry in entries if entry.by_kernel == by_kernel]
            regrets, of_xla = zip(*gradient_regret.outcomes_of(chosen, way), strict=True)
            figures += [f"{100 * (geometric_mean(regrets) - 1):.1f}", f"{100 * (max(regrets) - 1):.0f}"]
            ratios += of_xla
        figures.append(str(sum(map(is_loss, ratios))))
    return figures


def _regrets(results: Path, device: str, ways: Sequence[str]) -> list[str]:
    """How many calls, and the percentages lost by way and kind: means, of "tables" the worst, too."""
    found = _outcomes(results, device)
    figures = [f"{sum(len(found['tables', kind]) for kind in _KINDS):,}"]
    for way, kind in itertools.product(ways, _KINDS):
        lost = [100 * (each.regret - 1) for each in found[way, kind]]
        figures.append(f"{100 * (geometric_mean(each.regret for each in found[way, kind]) - 1):.1f}")
        figures += [f"{max(lost):.0f}"] if way == "tables" else []
    return figures


@functools.cache
def _outcomes(results: Path, device: str) -> dict[tuple[str, str], list[regret.Outcome]]:
    """By way and kind; it takes some seconds."""
    files = [results / device / f"{whose}.times.jsonl" for whose in ("tune", "xla")]
    outcomes: dict[tuple[str, str], list[regret.Outcome]] = collections.defaultdict(list)
    for _, way, kind, found in regret.of_files(files):
        outcomes[way, kind] += found.values()
    return outcomes
