"""The claims of the sources, one number each, and how our number for it is read from a result file."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from jax_sparse_conv.timing import geometric_mean

Content: TypeAlias = dict[str, Any]
Row: TypeAlias = dict[str, Any]
Keep: TypeAlias = Callable[[Row], bool]
NOT_YET = "-"


@dataclasses.dataclass(frozen=True)
class Claim:
    """One number of a paper.

    Attributes:
      number: our number for it: source, section or figure, and a letter.
      text: what is claimed.
      theirs: the paper's number.
      experiment: name of the experiment that answers it; a result file of that name in paper/ and in paper/cpu/.
      ours: from the file's content to our number, as text.
      why: a sentence on why the two differ.
    """

    number: str
    text: str
    theirs: str
    experiment: str
    ours: Callable[[Content], str]
    why: str


def ratios(rows: Sequence[Row], side: str, precision: str) -> list[float]:
    """XLA's time over the side's, each row as often as its network has the layer."""
    return [
        row["ratio"][precision][side]
        for row in rows
        for _ in range(row.get("count", 1))
        if side in row.get("ratio", {}).get(precision, {})
    ]


def over_xla(sides: Sequence[str], keep: Keep = lambda row: True) -> Callable[[Content], str]:
    """Geometric means of the ratios to XLA at HIGHEST and at its default precision, of the rows to keep."""

    def text(content: Content) -> str:
        rows = [row for row in content["rows"] if keep(row)]
        parts = []
        for side in sides:
            found = {p: ratios(rows, side, p) for p in ("highest", "default")}
            means = [f"{geometric_mean(values):.2f}x ({p})" for p, values in found.items() if values]
            if means:
                parts.append(f"{side} {', '.join(means)}")
        return "; ".join(parts) or NOT_YET

    return text


def each(side: str, keep: Keep, key: str) -> Callable[[Content], str]:
    """The ratio to XLA at HIGHEST against a quantity of the rows: "1: 5.1x, 8: 3.0x"."""

    def text(content: Content) -> str:
        groups: dict[Any, list[Row]] = {}
        for row in content["rows"]:
            if keep(row):
                groups.setdefault(row[key], []).append(row)
        means = {value: geometric_mean(ratios(rows, side, "highest")) for value, rows in groups.items()}
        return f"{side} " + ", ".join(f"{value}: {mean:.2f}x" for value, mean in means.items() if mean == mean)

    return text


def _own(row: Row) -> bool:
    return row.get("zeros") == "own"


def _of_network(name: str, source: str = "profile") -> Keep:
    return lambda row: row.get("network") == name and row["source"] == source


def _all_of(*tests: Keep) -> Keep:
    return lambda row: all(test(row) for test in tests)


def _starts(text: str) -> Keep:
    return lambda row: row["layer"].startswith(text)


def _op(name: str) -> Keep:
    return lambda row: row["op"] == name


def _over_cusparse(name: str) -> Callable[[Content], str]:
    def text(content: Content) -> str:
        rows = [row for row in content["rows"] if row.get("network") == name]
        found = [row["over_cusparse"]["ecr"] for row in rows if "ecr" in row.get("over_cusparse", {})]
        return f"ecr {geometric_mean(found):.1f}x over the three steps, {len(found)} 3x3 layers" if found else NOT_YET

    return text


def _empty_share(op: str) -> Callable[[Content], str]:
    def text(content: Content) -> str:
        rows = [row for row in content["rows"] if row["op"] == op and row["zeros_target"] not in (0, 100)]
        found = [f"{row['layer']} {100 * row['empty_share']:.0f} %" for row in rows if row["source"] == "iid"]
        return "; ".join(found) or NOT_YET

    return text


def _workspace(content: Content) -> str:
    rows = content["rows"]
    shares = {}
    for side in dict.fromkeys(side for row in rows for side in row["workspace_bytes"]):
        having = [row for row in rows if side in row["workspace_bytes"]]
        own = sum(row["workspace_bytes"][side] for row in having)
        shares[side] = 100 * own / sum(row["im2col_bytes"] for row in having)
    return ", ".join(f"{side} {share:.0f} %" for side, share in shares.items()) + " of im2col's matrices"


def _energy(content: Content) -> str:
    rows = [row for row in content["rows"] if row.get("energy_ratio")]
    names = list(dict.fromkeys(side for row in rows for side in row["energy_ratio"]))
    parts = []
    for side in names:
        found = [1 / row["energy_ratio"][side] for row in rows if side in row["energy_ratio"]]
        parts.append(f"{side} {100 * (1 - geometric_mean(found)):.0f} % less")
    return "; ".join(parts) or NOT_YET


_ONE_CHANNEL = (
    "The published ECR and PECR code times one channel and counts cudaMalloc on both sides; these are the real "
    "multi-channel layers with all memory allocated."
)
_FIXED_ALGORITHM = (
    "cuSNN's baseline fixes one cuDNN algorithm, and its maps come from unnormalised, padded images; XLA picks the "
    "fastest algorithm, on a newer cuDNN and GPU."
)
_WHOLE = "Fully connected layers and pools count too; default is TF32, against which float32 kernels lose large maps."

_OCPA_NETWORKS = (
    ("vgg19", "VGG-19", "3.91x; Tensor Core GEMM 2.97x", "1.97x", "3.28x"),
    ("resnet50", "ResNet-50", "3.53x; Tensor Core GEMM 2.44x", "2.23x", "3.3x"),
    ("densenet121", "DenseNet-121", "3.48x; Tensor Core GEMM 3.74x", "2.74x", "3.13x"),
    ("regnetx_16gf", "RegNetX-16GF", "2.79x; Tensor Core GEMM 3.30x", "1.58x", "2.49x"),
)


def _ocpa_claims() -> Iterator[Claim]:
    table = over_xla(("ecr", "coo", "auto"), _own)
    yield Claim("O3", "Table 3: ECR over cuDNN FAST, 14 layers", "2.24x to 2.78x", "table3", table, _ONE_CHANNEL)
    nothing = over_xla(("ecr", "coo"), lambda row: row["zeros_target"] == 0)
    yield Claim("O3a", "Table 3's layers with 0 % zeros", "-", "table3", nothing, "What is left is not from zeros.")
    for letter, (name, title, layers, _, _) in zip("abcd", _OCPA_NETWORKS, strict=True):
        ours = over_xla(("ecr", "pecr", "auto"), _of_network(name))
        yield Claim(f"O9{letter}", f"Fig. 9: layers of {title} over cuDNN FAST", layers, "fig9", ours, _ONE_CHANNEL)
    for letter, (name, title, _, whole, _) in zip("abcd", _OCPA_NETWORKS, strict=True):
        ours = over_xla(("ocpa", "auto", "auto default"), _of_network(name))
        yield Claim(f"O8.2{letter}", f"whole {title} over cuDNN FAST", whole, "networks", ours, _WHOLE)
    for letter, (name, title, _, _, cusparse) in zip("abc", _OCPA_NETWORKS[:3], strict=True):
        ours = _over_cusparse(name)
        why = "Here cuSPARSE's steps share one jit and are given the matrix's capacity; the paper's do not."
        yield Claim(f"O10{letter}", f"Fig. 10: layers of {title} over cuSPARSE", cusparse, "fig10", ours, why)
    why = "Not run as a whole; the layers say it (O10)."
    theirs = "2.10x VGG-19, 1.83x ResNet-50, 2.35x DenseNet-121, 1.35x RegNetX-16GF"
    yield Claim("O10w", "section 8.2.2: whole networks over cuSPARSE", theirs, "-", lambda content: NOT_YET, why)
    rising = "Same direction: XLA's time does not depend on zeros; a part of ours does not either (O14)."
    for letter, op, side in (("a", "conv", "ecr"), ("b", "conv_pool", "pecr")):
        ours = each(side, _all_of(_op(op), lambda row: row["source"] == "iid"), "zeros_target")
        text = f"Fig. 11{letter}: {side.upper()}'s speed-up by % zeros"
        yield Claim(f"O11{letter}", text, "rises with sparsity", "fig11", ours, rising)
    larger = "A large batch fills the GPU for cuDNN too, and one channel of the published code never does."
    for letter, op, side, theirs in (
        ("a", "conv", "ecr", "~1.5x at 128"),
        ("b", "conv_pool", "pecr", "over 6x at 128"),
    ):
        ours = each(side, _all_of(_op(op), _own), "batch")
        yield Claim(
            f"O12{letter}", f"Fig. 12{letter}: {side.upper()}'s speed-up by batch", theirs, "fig12", ours, larger
        )
    ours = each("ecr", _own, "strides")
    theirs = "2.51x, 2.70x, 2.83x"
    yield Claim("O13", "Fig. 13: VGG-19 with strides 1, 2, 3", theirs, "fig13", ours, _ONE_CHANNEL)
    bound = "Here an upper bound: the layer's time with a map of zeros, fixed costs of a call included."
    theirs = "34 % DenseNet, 47 % RegNet, 30 % ResNet, 17 % VGG"
    yield Claim("O14a", "Fig. 14a: conversion in ECR's time", theirs, "fig14", _empty_share("conv"), bound)
    theirs = "50 % DenseNet, 39 % ResNet, 14 % VGG"
    yield Claim("O14b", "Fig. 14b: conversion in PECR's time", theirs, "fig14", _empty_share("conv_pool"), bound)
    yield from _claims_of_2019()


def _claims_of_2019() -> Iterator[Claim]:
    vgg = _of_network("vgg19")
    theirs = "3.5x (GTX 1080), 2x (RTX 2080)"
    ours = over_xla(("ecr",), _all_of(vgg, _op("conv")))
    yield Claim("O19a", "2019: ECR over cuDNN FAST, layers of VGG-19", theirs, "fig9", ours, _ONE_CHANNEL)
    theirs = "4.1x (GTX 1080), 4.3x (RTX 2080)"
    ours = over_xla(("pecr",), _all_of(vgg, _op("conv_pool")))
    why = "The paper's baseline moves the map to the host before it pools; XLA's pool runs on the GPU."
    yield Claim("O19b", "2019: PECR over cuDNN FAST, layers of VGG-19", theirs, "fig9", ours, why)
    ours = each("ecr", _own, "strides")
    yield Claim("O19c", "2019: strides 2 and 3", "1.8x, 1.75x", "fig13", ours, _ONE_CHANNEL)
    why = "The kernels hold their lists in shared memory; what they take is room for partial sums."
    theirs = "35 % less than cuDNN, 17 % less than im2col"
    yield Claim("O19m", "2019: memory, VGG-19", theirs, "memory", _workspace, why)
    yield Claim("O19s", "2019: speed-up grows with sparsity / size", "grows", "size", _by_theta, _ONE_CHANNEL)


def _by_theta(content: Content) -> str:
    rows = sorted((row for row in content["rows"] if _own(row)), key=lambda row: row["theta"])
    return "ecr " + ", ".join(f"{row['theta']:.1f}: {row['ratio']['highest']['ecr']:.2f}x" for row in rows)


def _median_loss(key: str) -> Callable[[Content], str]:
    def text(content: Content) -> str:
        losses = [row[key] for row in content["rows"]]
        return f"median {statistics.median(losses):.1%}, largest {max(losses):.1%}"

    return text


def _cusnn_claims() -> Iterator[Claim]:
    why = "The model has eq. (4) the right way up, and is fed by the device's own properties."
    text = "Fig. 8: loss of the model's choice, offline search"
    yield Claim("C8", text, "better or comparable", "cusnn_fig8", _median_loss("offline_loss"), why)
    text = "Fig. 9: loss of the model's choice, oracle"
    yield Claim("C9", text, "low for most layers", "cusnn_fig9", _median_loss("model_loss"), why)
    for letter, family, theirs in (("a", "DenseNet", "3.11x (V100), 3.23x"), ("b", "ResNet", "2.83x (V100), 3.5x")):
        ours = over_xla(("coo", "ecr", "auto"), _all_of(_starts(family), lambda row: row["source"] == "real"))
        text = f"Fig. 10{letter}: 3x3 layers of {family} over cuDNN, real maps"
        yield Claim(f"C10{letter}", text, theirs, "cusnn_fig10", ours, _FIXED_ALGORITHM)
        ours = over_xla(("coo", "ecr"), _all_of(_starts(family), lambda row: row["zeros_target"] == 0))
        why = "What is left at 0 % zeros is the kernel's schedule on small maps."
        yield Claim(f"C10{letter}0", f"the same layers with 0 % zeros, {family}", "-", "cusnn_fig10", ours, why)
    for letter, family in (("a", "DenseNet"), ("b", "ResNet")):
        ours = each("coo", _all_of(_starts(family), _own), "batch")
        yield Claim(
            f"C11{letter}", f"Fig. 11{letter}: {family} by batch", "a plot", "cusnn_fig11", ours, _FIXED_ALGORITHM
        )
    families = (
        ("a", ("densenet169", "densenet201"), "DenseNet", "1.23x (V100), 1.24x"),
        ("b", ("resnet50", "resnet152"), "ResNet", "1.3x (V100), 1.26x"),
        ("c", ("vgg16", "vgg19"), "VGG", "1.12x (V100), 1.2x"),
    )
    for letter, names, family, theirs in families:
        ours = over_xla(("coo", "auto"), lambda row, names=names: row["layer"] in names)
        yield Claim(f"C12{letter}", f"Fig. 12: whole {family}s", theirs, "cusnn_fig12", ours, _FIXED_ALGORITHM)
    yield Claim("C13", "Fig. 13: energy against cuDNN", "19 % less", "cusnn_fig13", _energy, _WHOLE)


def claims() -> list[Claim]:
    """All of them, in the order of the document."""
    return [*_ocpa_claims(), *_cusnn_claims()]
