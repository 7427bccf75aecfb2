"""Dense blocks that the tests run: sizes, parameters, and what comes out against float64, layer by layer."""

from __future__ import annotations

import dataclasses
from typing import Any

import cases
import numpy as np
import oracle
from cases import Case

from jax_sparse_conv._src.fusion.block_parameters import DenseBlockLayer, DenseTransition

# Of two convolutions, one after the other: TF32 may be off by 5e-4 in each.
TOLERANCE = {"highest": 2e-6, "default": 8e-4, "bfloat16": 6e-3, "float16": 8e-4}
KINDS = [("float32", "highest"), ("float32", "default"), ("bfloat16", "default"), ("float16", "default")]
EXTREMES = [np.inf, -np.inf, np.nan]
KIND_IDS = [f"{dtype} {precision}" for dtype, precision in KINDS]


@dataclasses.dataclass(frozen=True)
class Block:
    """Sizes of a block: x [N, H, W, C0] and how many layers."""

    name: str
    x: tuple[int, int, int, int]
    layers: int


BLOCKS = (
    Block("56x56", (1, 56, 56, 64), 6),
    Block("28x28", (1, 28, 28, 128), 12),
    Block("14x14", (1, 14, 14, 256), 24),
    Block("7x7", (1, 7, 7, 512), 16),
    Block("batch 2", (2, 14, 14, 256), 3),
    Block("batch 8", (8, 28, 28, 128), 2),
    Block("batch 8, 7x7", (8, 7, 7, 512), 2),
    Block("batch 9", (9, 7, 7, 64), 2),
    Block("one pixel", (1, 1, 1, 32), 2),
    Block("one row", (1, 1, 37, 64), 2),
    Block("one column", (2, 41, 1, 64), 2),
    Block("odd sizes", (3, 13, 19, 96), 3),
    Block("one layer", (1, 9, 8, 160), 1),
    Block("larger map", (1, 61, 59, 64), 2),
    Block("batch 12, 56x56", (12, 56, 56, 64), 3),
    Block("batch 32, 14x14", (32, 14, 14, 256), 2),
    Block("batch 33, 7x7", (33, 7, 7, 512), 2),
    Block("batch 10, odd sizes", (10, 13, 19, 96), 3),
    Block("batch 9, wide map", (9, 5, 130, 32), 3),
    Block("batch 9, 64 columns", (9, 6, 64, 64), 2),
    Block("batch 10, one column", (10, 41, 1, 64), 2),
    Block("batch 20, one pixel", (20, 1, 1, 32), 2),
)


def values(block: Block, dtype: Any, middle: int = 128, growth: int = 32) -> tuple[Any, list[DenseBlockLayer]]:
    """x with negative values, and parameters that keep magnitudes; as a trained network's, half of y is zero."""
    random = np.random.default_rng(len(block.name) + block.layers)

    def draw(*shape: int, by: float = 1.0, at: float = 0.0) -> Any:
        return (by * random.standard_normal(shape) + at).astype(dtype)

    layers, channels = [], block.x[3]
    for _ in range(block.layers):
        scale, shift = draw(channels, by=0.3, at=1.0), draw(channels, by=0.5, at=-0.2)
        kernel1 = draw(1, 1, channels, middle, by=1.6 / np.sqrt(max(channels, 1)))
        kernel2 = draw(3, 3, middle, growth, by=1.6 / np.sqrt(9 * middle))
        layers.append(DenseBlockLayer(scale, shift, kernel1, draw(middle, by=0.3), kernel2))
        channels += growth
    return draw(*block.x), layers


def transition_values(block: Block, dtype: Any, out_channels: int = 48, growth: int = 32) -> DenseTransition:
    """Parameters of a transition behind a block."""
    random = np.random.default_rng(block.layers)
    channels = block.x[3] + block.layers * growth
    scale, shift = 1 + 0.3 * random.standard_normal(channels), 0.5 * random.standard_normal(channels) - 0.2
    kernel = random.standard_normal((1, 1, channels, out_channels)) * 1.6 / np.sqrt(channels)
    return DenseTransition(scale.astype(dtype), shift.astype(dtype), kernel.astype(dtype))


def check_transition(out: Any, map_before: Any, transition: DenseTransition, tolerance: float) -> None:
    """What a transition makes of a map [N, H, W, C], against float64."""
    wide = [np.asarray(v).astype(np.float64) for v in (map_before, *transition)]
    with np.errstate(all="ignore"):
        y = wide[0] * wide[1] + wide[2]
        y = np.where(y < 0, 0, y)  # keeps NaN
    case = Case("transition", y.shape, wide[3].shape[3], kernel=(1, 1), pool="avg")
    wanted = oracle.expected(case, cases.Inputs(y, wide[3], None, None))
    assert out.shape == wanted.shape
    error = oracle.relative_error(np.asarray(out), wanted)
    assert error <= tolerance, f"transition: {error}"


def expected_layer(map_before: Any, layer: DenseBlockLayer) -> np.ndarray:
    """What a layer appends, in float64, of the map [N, H, W, C] that it reads."""
    wide = [np.asarray(v).astype(np.float64) for v in (map_before, *layer)]
    with np.errstate(all="ignore"):
        y = wide[0] * wide[1] + wide[2]
        y = np.where(y < 0, 0, y)  # keeps NaN
    first = Case("1x1", y.shape, wide[3].shape[3], kernel=(1, 1), bias=True, activation="relu")
    mid = oracle.expected(first, cases.Inputs(y, wide[3], wide[4], None))
    second = Case("3x3", mid.shape, wide[5].shape[3], padding=1)
    return oracle.expected(second, cases.Inputs(mid, wide[5], None, None))


def check(out: Any, x: Any, layers: list[DenseBlockLayer], tolerance: float) -> None:
    """Every layer against float64 of the map that it was given; the first channels are x itself."""
    out = np.asarray(out)
    np.testing.assert_array_equal(out[..., : x.shape[3]].astype(np.float64), np.asarray(x).astype(np.float64))
    channels = x.shape[3]
    for index, layer in enumerate(layers):
        growth = layer.kernel2.shape[3]
        wanted = expected_layer(out[..., :channels], layer)
        error = oracle.relative_error(out[..., channels : channels + growth], wanted)
        assert error <= tolerance, f"layer {index}: {error}"
        channels += growth
    assert channels == out.shape[3]
