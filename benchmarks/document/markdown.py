"""Tables of the pages: lines of Markdown, and figures as all pages write them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax_sparse_conv._src.plans.timing import geometric_mean

NETWORKS = {
    "vgg19": "VGG-19",
    "resnet34": "ResNet-34",
    "resnet50": "ResNet-50",
    "densenet121": "DenseNet-121",
    "densenet169": "DenseNet-169",
    "googlenet": "GoogLeNet",
    "regnetx_400mf": "RegNetX-400MF",
    "regnetx_800mf": "RegNetX-800MF",
    "regnetx_1_6gf": "RegNetX-1.6GF",
    "regnetx_3_2gf": "RegNetX-3.2GF",
    "regnetx_6_4gf": "RegNetX-6.4GF",
    "regnetx_16gf": "RegNetX-16GF",
}
MODELS = {
    "nnx_resnet50": "ResNet-50, Flax nnx",
    "keras_vgg16": "VGG16, Keras",
    "keras_densenet121": "DenseNet121, Keras",
    "equinox_resnet50": "ResNet-50, Equinox, channels first",
    "haiku_resnet50": "ResNet-50, Haiku",
    "keras_resnet50": "ResNet50, Keras",
    "linen_vgg16": "VGG-16, Linen",
}
"""Models that others wrote."""
KINDS = {"highest": "`HIGHEST`", "default": "TF32", "bfloat16": "bfloat16", "float16": "float16"}
"""Precisions and dtypes on a GPU."""


def table(titles: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Lines of cells below their titles."""
    rule = "|---" * len(titles) + "|"
    head, *body = (f"| {' | '.join(cells)} |".replace("  |", " |") for cells in (titles, *lines))
    return "\n".join([head, rule, *body])


def ratio(value: float) -> str:
    """With three digits, below 1 with two."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


def mean(values: Sequence[float]) -> str:
    """Their geometric mean."""
    return ratio(geometric_mean(values)) if values else ""


def mean_and_range(values: Sequence[float]) -> str:
    """Their geometric mean, and the least and the most in brackets."""
    return f"{mean(values)} ({ratio(min(values))} to {ratio(max(values))})" if len(values) > 1 else mean(values)


def microseconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def kind(name: str, row: Mapping[str, Any]) -> str:
    """A precision or dtype as the device of a row has it."""
    return "float32" if row["backend"] == "cpu" and name in ("highest", "default") else KINDS[name]


def network(name: str) -> str:
    return NETWORKS.get(name, name)


def rank(name: str) -> tuple[int, str]:
    """Where a network stands in a table."""
    return (list(NETWORKS).index(name) if name in NETWORKS else len(NETWORKS), name)
