"""The sentences of docs/design/kernels/ that cite a file of results, and what computes their figures."""

from __future__ import annotations

import functools
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import paper_rows
from benchmarks.common.results import Row
from benchmarks.document.markdown import ratio
from benchmarks.document.prose import Sentence, register
from benchmarks.document.sentences import choices, nine_layers, one_digit, rows_of
from benchmarks.paper import answers
from benchmarks.suites import direct_ablation, zoo_rows
from jax_sparse_conv._src.plans.timing import geometric_mean

_KERNELS = "docs/design/kernels/"

SENTENCES: list[Sentence] = []

_says = functools.partial(register, SENTENCES)


# --- kernels of GPUs -------------------------------------------------------------------------------------------------


@_says(
    _KERNELS + "ecr_pecr.md",
    '`"direct"` takes {} to {} of the time of `"ecr"` on Table 3 of the paper (`h200/paper/table3.json`)',
)
def _direct_over_ecr(results: Path) -> Sequence[str]:
    content = json.loads((results / "h200" / "paper" / "table3.json").read_text(encoding="utf-8"))
    found = [row["us"]["direct"] / row["us"]["ecr"] for row in content["rows"] if answers.is_real(row)]
    return f"{min(found):.2f}", f"{max(found):.2f}"


@_says(
    _KERNELS + "ecr_pecr.md",
    "| cost of a call that holds both sides | {} to {} us, {} at the median (`h200/adaptive.json`) |",
)
def _both_sides(results: Path) -> Sequence[str]:
    found = choices(results)
    return one_digit([min(found), max(found), statistics.median(found)])


@_says(
    _KERNELS + "coo_star.md",
    """\
| rule | compared with | median loss (`h200/cost_model.json`, {} layers and maps) |
|---|---|---|
| this model | the best configuration of each map | {} % |
| this model | the configuration that is best on average over a layer's maps | {} % |
| the paper's equations (4) to (9) alone | the best configuration of each map | {} %;""",
)
def _models_of_coo(results: Path) -> Sequence[str]:
    rows = rows_of(results / "h200" / "cost_model.json")
    keys = ("model_loss", "offline_loss", "published_loss")
    return str(len(rows)), *one_digit(100 * statistics.median(row[key] for row in rows) for key in keys)


@_says(
    _KERNELS + "coo_star.md",
    "At 95 % zeros it takes {} us for 512->512 7x7 and {} us for 64->64 224x224 (`h200/layers.json`)",
)
def _none_beside_cusnn(results: Path) -> Sequence[str]:
    layers = ("conv 3x3 512->512 7x7", "conv 3x3 64->64 224x224")
    about: dict[str, Any] = {"requested": "auto", "implementation": "direct", "zeros_target": 95}
    rows = [rows_of(results / "h200" / "layers.json", layer=layer, **about)[-1] for layer in layers]
    return one_digit(row["ours_us"] for row in rows)


@_says(
    _KERNELS + "mma.md",
    """\
Change of time by each technique, ResNet-50 conv3 at batch 8 (`h200/direct_ablation.json`):

| technique | here | in the paper |
|---|---|---|
| sums in registers by unrolling | {} % | -71 % of cycles |
| strength-reduced addresses | {} % | -26 % |
| outer products on tensor cores, TF32 | {} % | a bar without a number |
| bounds checks hoisted | {} % | -2.6 % |
| table of indices | {} % | -5 %, with their hardware unit |
| inner products | {} % | -66 %, with their hardware unit |""",
)
def _ablation(results: Path) -> Sequence[str]:
    rows = direct_ablation.figures(rows_of(results / "h200" / "direct_ablation.json"))
    changes = {row["figure"]: row["change_percent"] for row in rows if row["layer"].startswith("ResNet-50")}
    return [f"{changes[figure]:+.0f}" for figure in ("14", "28", "24", "31", "34", "20")]


@_says(
    _KERNELS + "few_channels.md",
    "VGG-19's first layer is {} times as fast as XLA in TF32 at batch 1. "
    "In bfloat16 it is {} times as fast (`h200/zoo.json`)",
)
def _first_layer(results: Path) -> Sequence[str]:
    rows = rows_of(results / "h200" / "zoo.json", batch=1, implementation="direct")
    found = {zoo_rows.kind(row): row["ratio"] for row in rows if "vgg19/conv1_1" in row["users"]}
    return one_digit([found["default"], found["bfloat16"]])


@_says(
    _KERNELS + "wgmma.md",
    "Against XLA at batch 1, 15 layers: {} in bfloat16 and {} in TF32 in geometric mean (`h200/layers.json`)",
)
def _fifteen_layers(results: Path) -> Sequence[str]:
    return [ratio(_fifteen(results, dtype, "default")) for dtype in ("bfloat16", "float32")]


@_says(
    _KERNELS + "highest.md",
    "Over XLA at batch 1, 15 layers: {} in geometric mean (`h200/layers.json`)",
)
def _fifteen_at_highest(results: Path) -> Sequence[str]:
    return one_digit([_fifteen(results, "float32", "highest")])


def _fifteen(results: Path, dtype: str, precision: str) -> float:
    about: dict[str, Any] = {"requested": "direct", "op": "conv", "batch": 1, "dtype": dtype, "precision": precision}
    rows = rows_of(results / "h200" / "layers.json", **about)
    if len(rows) != 15:
        raise ValueError(f"h200/layers.json has {len(rows)} layers with {about}, not the 15 that pages tell of")
    return geometric_mean(row["ratio"] for row in rows)


@_says(
    _KERNELS + "matvec.md",
    "| 4096->4096, weights in no cache (`h200/zoo.json`) | {} / {} | {} / {} |",
)
def _cold_weights(results: Path) -> Sequence[str]:
    about: dict[str, Any] = {"call": "1x4096 * 4096x4096", "weights": "cold", "zeros_target": 0}
    found = {zoo_rows.kind(row): row for row in rows_of(results / "h200" / "zoo.json", **about)}
    return one_digit(found[kind][key] for kind in ("default", "bfloat16") for key in ("xla_us", "ours_us"))


@_says(_KERNELS + "hopper.md", '| smallest `"direct"` layer, one node of a graph | {} us (`h200/calls.json`) |')
def _smallest_layer(results: Path) -> Sequence[str]:
    return one_digit(row["us"] for row in rows_of(results / "h200" / "calls.json", side="direct"))


@_says(_KERNELS + "hopper.md", "| smallest kernel of XLA, one node of a graph | {} us (`h200/calls.json`) |")
def _smallest_kernel(results: Path) -> Sequence[str]:
    return one_digit(row["us"] for row in rows_of(results / "h200" / "calls.json", side="xla"))


@_says(
    _KERNELS + "dense_block.md",
    "In TF32 that is {} to {} us at 8x56x56x256 and {} to {} at 8x14x14x1024 (`h100/zoo.json`)",
)
def _transitions(results: Path) -> Sequence[str]:
    times = []
    for call in ("8x56x56x256 * 1x1x256x128", "8x14x14x1024 * 1x1x1024x512"):
        for label in ("average behind", None):
            rows = rows_of(results / "h100" / "zoo.json", label, call=call, op="conv_pool")
            times += [row["ours_us"] for row in rows if zoo_rows.kind(row) == "default"]
    return one_digit(times)


@_says(
    _KERNELS + "chain.md",
    """\
| ResNet-50 | {} | {} | `h200/chain_tiles.json` |
| VGG-19 | {} | {} | `h200/chain_tiles.json` |
| RegNetX-16GF | {} | {} | `h200/chain_tiles.json` |""",
)
def _tiles(results: Path) -> Sequence[str]:
    rows = {
        row["network"]: row["us"] for row in rows_of(results / "h200" / "chain_tiles.json", kind="default", batch=1)
    }
    networks = ("resnet50", "vgg19", "regnetx_16gf")
    return [f"{rows[network][tiles]:.0f}" for network in networks for tiles in ("model", "kept")]


@_says(
    _KERNELS + "chain.md",
    "Eight images gain {} % on ResNet-50 in TF32 and {} % in bfloat16 (`h100/networks.json`)",
)
def _chains_of_eight(results: Path) -> Sequence[str]:
    path = results / "h100" / "networks.json"
    rows = [rows_of(path, "layer by layer", case=f"resnet50/{kind}/8")[-1]["us"] for kind in ("default", "bfloat16")]
    return [f"{100 * (us['auto'] / us['fused'] - 1):.0f}" for us in rows]


# --- kernels of CPUs -------------------------------------------------------------------------------------------------


@_says(
    _KERNELS + "cpu.md",
    """\
Multiply-adds from registers reach {} to {} GFLOP/s on two cores, those with a weight load each {} to {}
(`cpu_amd_epyc/cpu.json`, `limits`)""",
)
def _limits(results: Path) -> Sequence[str]:
    limits = [row["limits"] for row in rows_of(results / "cpu_amd_epyc" / "cpu.json")]
    found = [end(each[key] for each in limits) for key in ("flops", "loaded_flops") for end in (min, max)]
    return [f"{each / 1e9:.0f}" for each in found]


@_says(
    _KERNELS + "cpu.md",
    """\
| zeros | 0 % | 50 % | 75 % | 85 % | 95 % |
|---|---|---|---|---|---|
| in one program, best (`cpu_amd_epyc/cpu.json`) | {} % | {} % | {} % | {} % | {} % |
| batch 8, in one program, best (`cpu_amd_epyc/cpu.json`) | {} % | {} % | {} % | {} % | {} % |
| over XLA, batch 1 (`cpu_amd_epyc/cpu.json`) | {} | {} | {} | {} | {} |""",
)
def _shares_of_the_peak(results: Path) -> Sequence[str]:
    zeros = (0, 50, 75, 85, 95)
    shares = [
        nine_layers(results, each, "fma_program_best_percent", requested="ecr", batch=b)
        for b in (1, 8)
        for each in zeros
    ]
    return *(f"{each:.0f}" for each in shares), *(ratio(nine_layers(results, each, requested="ecr")) for each in zeros)


@_says(
    _KERNELS + "cpu.md",
    """\
Instructions of one call, AVX2, one thread, in thousands (`cpu_amd_epyc/instructions.json`, callgrind):

| layer, its real map | direct | windows | scatter | pixels | pixels, packed |
|---|---|---|---|---|---|
| 256->256 14x14, {} % zeros | {} | {} | {} | {} | {} |
| 64->64 56x56, {} % | {} | {} | {} | {} | {} |
| 128->32 7x7, {} % | {} | {} | {} | {} | {} |""",
)
def _instructions(results: Path) -> Sequence[str]:
    found = []
    for layer in ("resnet50 conv4_block5 3x3", "resnet50 conv2_block3 3x3", "densenet169 conv5_block20 3x3"):
        rows = {row["loop"]: row for row in rows_of(results / "cpu_amd_epyc" / "instructions.json", layer=layer)}
        loops = ("direct", "windows", "scatter", "pixels", "pixels, packed")
        found += [f"{rows['direct']['zeros_percent']:.0f}", *(f"{rows[loop]['thousands']:,.0f}" for loop in loops)]
    return found


@_says(
    _KERNELS + "cpu.md",
    """\
These are microseconds with constant weights (`cpu_amd_epyc_zen3/loops.json`).

| layer | zeros | direct | pixels | winograd |
|---|---|---|---|---|
| 4x56x56, 64->64 | none | {} | {} | {} |
| 1x28x28, 512->512 | none | {} | {} | {} |
| 1x112x112, 128->128 | none | {} | {} | {} |
| 1x112x112, 128->128 | half | {} | {} | {} |
| 1x112x112, 128->128 | 70 % | {} | {} | {} |""",
)
def _winograd_beside_others(results: Path) -> Sequence[str]:
    path, found = results / "cpu_amd_epyc_zen3" / "loops.json", list[str]()
    for layer, zeros in (
        ("4x56x56, 3x3 64->64", 0),
        ("1x28x28, 3x3 512->512", 0),
        *(("1x112x112, 3x3 128->128", zeros) for zeros in (0, 50, 70)),
    ):
        (row,) = rows_of(path, layer=layer, dtype="float32", weights="constant", zeros_percent=zeros)
        found += [f"{row[f'{loop}_us']:,.0f}" for loop in ("direct", "pixels", "winograd")]
    return found


@_says(
    _KERNELS + "cpu.md",
    "With AVX2 it takes {} of that loop's time in geometric mean, {} at worst (`cpu_amd_epyc_zen3/loops.json`)",
)
def _regret_of_loops(results: Path) -> Sequence[str]:
    rows = rows_of(results / "cpu_amd_epyc_zen3" / "loops.json")
    regrets = [row["regret"] for row in rows if "dots_us" not in row]
    return ratio(geometric_mean(regrets)), ratio(max(regrets))


@_says(
    _KERNELS + "cpu.md",
    """\
Six such layers without zeros take {} to {} of XLA's time, and {} to {} of the direct loop's
(`cpu_amd_epyc_zen3/loops.json`).""",
)
def _few_output_channels(results: Path) -> Sequence[str]:
    rows = rows_of(results / "cpu_amd_epyc_zen3" / "loops.json", zeros_percent=0, weights="argument")
    shares = [[row["auto_us"] / row[f"{side}_us"] for row in rows if "dots_us" in row] for side in ("xla", "direct")]
    return [ratio(bound(each)) for each in shares for bound in (min, max)]


@_says(
    _KERNELS + "cpu.md",
    """\
With AVX-512 it takes {} of that time in geometric mean and {} at worst, in bfloat16 {} and {}
(`cpu_amd_epyc/loops.json`).""",
)
def _regret_of_loops_with_avx512(results: Path) -> Sequence[str]:
    found = list[str]()
    for dtype in ("float32", "bfloat16"):
        regrets = [row["regret"] for row in rows_of(results / "cpu_amd_epyc" / "loops.json", dtype=dtype)]
        found += [ratio(geometric_mean(regrets)), ratio(max(regrets))]
    return found


@_says(
    _KERNELS + "cpu.md",
    "Without zeros its errors are {} to {} of XLA's (`cpu_amd_epyc_zen3/accuracy.json`)",
)
def _errors_of_winograd(results: Path) -> Sequence[str]:
    rows = rows_of(results / "cpu_amd_epyc_zen3" / "accuracy.json", implementation="winograd")
    ratios = [row["ratio"] for row in rows if row["case"].endswith(" 0 % zeros")]
    return ratio(min(ratios)), ratio(max(ratios))


def _of_densities(results: Path) -> Sequence[Row]:
    return paper_rows.read(results / "h200" / "paper" / "cusnn_density.json")


@_says(
    _KERNELS + "coo_star.md",
    "A kernel that returns at once takes {} us, and a sample {} us (`h200/paper/cusnn_density.json`)",
)
def _costs_of_variants(results: Path) -> Sequence[str]:
    rows = [row for row in _of_densities(results) if "sample_us" in row]
    return one_digit(statistics.median(row[key] for row in rows) for key in ("closed_kernel_us", "sample_us"))


@_says(
    _KERNELS + "coo_star.md",
    """\
With counts such calls take {} of the time of the one configuration in geometric mean, {} at best and {} at worst
  (`h200/paper/cusnn_density.json`).""",
)
def _gains_of_variants(results: Path) -> Sequence[str]:
    rows = [row["us"] for row in _of_densities(results) if "model, counted" in row["us"]]
    shares = [us["model, counted"] / us["coo"] for us in rows]
    return [ratio(each) for each in (geometric_mean(shares), min(shares), max(shares))]


@_says(
    _KERNELS + "coo_star.md",
    """\
The kernel that reads stored lists takes {} times as long as the one that makes them, {} at 95 % zeros, without the
conversion (`h200/paper/cusnn_density.json`, geometric means of six layers and batches 1 and 8).""",
)
def _times_of_stored_lists(results: Path) -> Sequence[str]:
    rows = [row for row in _of_densities(results) if "stored_ratio" in row]
    sparsest = [row for row in rows if row["zeros_target"] == 95]
    return one_digit(geometric_mean(1 / row["stored_ratio"]["stored"] for row in each) for each in (rows, sparsest))


def _layer_of_resnet(results: Path, layer: str) -> Sequence[str]:
    """Ours and XLA's microseconds of the row of a layer with a trained network's zeros, or of an image."""
    rows = rows_of(results / "cpu_amd_epyc" / "zoo.json", batch=1, weights="packed")
    row = [row for row in rows if f"resnet50/{layer}" in row["users"]][-1]
    return f"{row['ours_us']:.0f}", f"{row['xla_us']:.0f}"


@_says(_KERNELS + "cpu.md", "ResNet-50's `conv3_block1_2` takes {} us, XLA {} (`cpu_amd_epyc/zoo.json`)")
def _strides_of_two(results: Path) -> Sequence[str]:
    return _layer_of_resnet(results, "conv3_block1_2")


@_says(_KERNELS + "cpu.md", "ResNet-50's `conv1` with its pool takes {} us, XLA {} (`cpu_amd_epyc/zoo.json`)")
def _stem_with_pool(results: Path) -> Sequence[str]:
    return _layer_of_resnet(results, "conv1")


@_says(
    _KERNELS + "cpu.md",
    "| channels sorted by how often they fire | {} (medians), {} (best times); not built | "
    "`cpu_intel_xeon/sorting.json` |",
)
def _sorted_channels(results: Path) -> Sequence[str]:
    rows = rows_of(results / "cpu_intel_xeon" / "sorting.json")
    return [f"{geometric_mean(row[key] for row in rows):.3f}" for key in ("sorted_gain", "sorted_best_gain")]
