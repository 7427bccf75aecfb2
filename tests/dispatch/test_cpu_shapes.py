"""What None takes on a CPU for shapes that the loops do not suit, and for images that they do."""

from __future__ import annotations

import math

import pytest

from jax_sparse_conv._src.dispatch import cpu_choice
from jax_sparse_conv._src.dispatch.cpu_choice import Choice
from jax_sparse_conv._src.problem import geometry as geo
from jax_sparse_conv._src.problem.workload import Workload

ALWAYS, DENSE_TOO = Choice(math.inf), Choice(math.inf, may_be_dense=True)
NEVER = Choice(0.0)


def of(
    x: tuple[int, int, int, int], out: int, window: int, stride: int = 1, dtype: str = "float32", groups: int = 1
) -> Choice:
    kernel = (window, window, x[3] // groups, out)
    geometry = geo.resolve(x, kernel, strides=stride, padding="SAME", feature_group_count=groups)
    return cpu_choice.by_rules(Workload("ecr", x, (1, *kernel), geometry, dtype, True))


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        (of((1, 224, 224, 64), 3, 3), DENSE_TOO),  # dot products
        (of((1, 112, 112, 64), 1, 3), DENSE_TOO),
        (of((1, 112, 112, 64), 6, 3), DENSE_TOO),
        (of((1, 112, 112, 64), 6, 3, dtype="bfloat16"), DENSE_TOO),
        (of((1, 112, 112, 64), 1, 1, 8), DENSE_TOO),
        (of((1, 112, 112, 64), 3, 3, 4), DENSE_TOO),
        (of((1, 24, 24, 462), 4, 5, 4), NEVER),  # strides that pass over pixels, and few windows
        (of((1, 36, 36, 64), 6, 3, 4), Choice(0.3)),
        (of((1, 224, 224, 16), 3, 3), DENSE_TOO),  # few input channels
        (of((1, 112, 112, 64), 10, 3), DENSE_TOO),
        (of((1, 14, 14, 64), 2, 3), DENSE_TOO),  # few operations
        (of((1, 112, 112, 64), 64, 3), DENSE_TOO),
    ],
)
def test_few_output_channels(found: Choice, wanted: Choice) -> None:
    assert found == wanted


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        (of((1, 64, 64, 32), 3, 9), DENSE_TOO),  # dot products
        (of((1, 24, 24, 32), 3, 9, 3), NEVER),
        (of((1, 64, 64, 16), 3, 9), DENSE_TOO),
        (of((1, 56, 56, 32), 32, 9), DENSE_TOO),
        (of((2, 4, 3, 156), 40, 11), DENSE_TOO),
        (of((1, 28, 28, 64), 64, 7), DENSE_TOO),
    ],
)
def test_large_windows(found: Choice, wanted: Choice) -> None:
    assert found == wanted


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        (of((16, 96, 96, 1), 1, 1), NEVER),
        (of((8, 89, 90, 5), 9, 1), NEVER),
        (of((1, 89, 90, 5), 10, 1), DENSE_TOO),
        (of((8, 89, 90, 5), 10, 1), NEVER),  # of a large map up to 16
        (of((2, 152, 154, 16), 16, 1), NEVER),
        (of((2, 152, 154, 16), 17, 1), DENSE_TOO),
        (of((2, 152, 154, 17), 16, 1), DENSE_TOO),
        (of((1, 28, 28, 10), 3, 1), DENSE_TOO),
        (of((1, 72, 71, 3), 3, 1, groups=3), NEVER),
        (of((1, 72, 72, 16), 16, 1, groups=16), ALWAYS),
        (of((1, 99, 101, 264), 264, 1, groups=264), NEVER),  # each channel is scaled
        (of((1, 99, 101, 264), 528, 1, groups=264), ALWAYS),
    ],
)
def test_products_of_few_channels(found: Choice, wanted: Choice) -> None:
    assert found == wanted


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        (of((1, 128, 128, 64), 64, 3, 8), NEVER),
        (of((1, 60, 60, 128), 128, 3, 4), Choice(0.3)),
        (of((1, 96, 96, 64), 64, 2, 3), Choice(0.3)),
        (of((1, 56, 56, 64), 128, 2, 2), DENSE_TOO),
        (of((1, 56, 56, 64), 128, 1, 2), DENSE_TOO),  # runs on the pixels that it reads
    ],
)
def test_strides_beyond_the_window(found: Choice, wanted: Choice) -> None:
    assert found == wanted


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        (of((256, 28, 28, 1), 6, 5), DENSE_TOO),
        (of((1, 28, 28, 1), 6, 5), DENSE_TOO),
        (of((1, 224, 224, 3), 32, 3, 2), DENSE_TOO),
        (of((64, 32, 32, 3), 16, 3, dtype="float16"), ALWAYS),
        (of((1, 224, 224, 3), 32, 3, 2, dtype="float16"), NEVER),
        (of((1, 224, 224, 3), 64, 7, 2), DENSE_TOO),
        (of((1, 224, 224, 3), 64, 3), DENSE_TOO),
        (of((64, 224, 224, 3), 32, 3), DENSE_TOO),
    ],
)
def test_images(found: Choice, wanted: Choice) -> None:
    assert found == wanted


@pytest.mark.parametrize("has_pairs", [True, False])
def test_pairs_of_bfloat16_are_never_left_to_xla(monkeypatch: pytest.MonkeyPatch, has_pairs: bool) -> None:
    monkeypatch.setattr(cpu_choice._native, "cpu_multiplies_pairs", lambda: has_pairs)
    shapes = [((1, 224, 224, 3), 32, 3, 2), ((1, 56, 56, 64), 64, 3), ((8, 14, 14, 256), 16, 1)]
    found = [of(*shape, dtype="bfloat16") for shape in shapes]
    assert found == ([DENSE_TOO] * 3 if has_pairs else [NEVER, ALWAYS, ALWAYS])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_groups_have_no_such_limits(dtype: str) -> None:
    assert of((1, 56, 56, 32), 32, 9, dtype=dtype, groups=32) == ALWAYS
