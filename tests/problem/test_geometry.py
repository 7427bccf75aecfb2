"""Static shapes against lax's own, and the sentence of every error."""

from __future__ import annotations

from typing import Any

import cases
import jax
import numpy as np
import oracle
import pytest

from jax_sparse_conv._src.problem import geometry as geo


@pytest.mark.parametrize("case", [*cases.CONV_CASES, *cases.CONV_POOL_CASES], ids=lambda case: case.name)
def test_sizes_are_those_of_lax(case: cases.Case) -> None:
    geometry = geo.resolve(
        case.x,
        (*case.kernel, case.x[3] // case.groups, case.out_channels),
        strides=case.strides,
        padding=case.padding,
        kernel_dilation=case.dilation,
        feature_group_count=case.groups,
    )
    conv_size = geometry.conv_size(case.x[1:3], case.kernel)
    if case.pool is not None:
        geometry = geo.with_pool(
            geometry,
            conv_size,
            kind=case.pool,
            window_shape=case.window,
            window_strides=case.window_strides,
            window_padding=case.window_padding,
        )
    shapes = [None if v is None else jax.ShapeDtypeStruct(v.shape, np.float32) for v in cases.inputs(case)]
    expected = jax.eval_shape(lambda *a: oracle._compute(case, *a), *shapes)
    assert geometry.out_size(case.x[1:3], case.kernel) == expected.shape[1:3]
    assert hash(geometry) == hash(geo.dataclasses.replace(geometry))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"padding": "SAMEE"}, r"padding='SAMEE' is not \"SAME\", \"SAME_LOWER\", \"VALID\""),
        ({"padding": ((1, 2, 3), (0, 0))}, r"padding=\(\(1, 2, 3\), \(0, 0\)\) is not"),
        ({"padding": 1.5}, r"padding=1.5 is not"),
        ({"padding": -5}, r"padding=-5 crops more than there is of x.shape=\(1, 8, 8, 8\)"),
        ({"padding": ((1, 1),)}, r"padding=\(\(1, 1\),\) is not"),
        ({"strides": 0}, r"strides=0 is not an int or two ints of 1 to 2"),
        ({"strides": (1, 2, 3)}, r"strides=\(1, 2, 3\) is not an int or two ints"),
        ({"strides": "2"}, r"strides='2' is not an int or two ints"),
        ({"kernel_dilation": -1}, r"kernel_dilation=-1 is not an int or two ints"),
        ({"feature_group_count": 0}, r"feature_group_count=0 is not an int of 1 to 2"),
        ({"feature_group_count": 2.0}, r"feature_group_count=2.0 is not an int of 1 to 2"),
        ({"feature_group_count": 2**63}, r"feature_group_count=9223372036854775808 is not an int of 1 to 2"),
        ({"strides": 2**63}, r"strides=9223372036854775808 is not an int or two ints of 1 to 2\*\*31 - 1"),
        ({"strides": True}, r"strides=True is not an int or two ints"),
        ({"kernel_dilation": 2**31}, r"kernel_dilation=2147483648 is not an int or two ints"),
        ({"padding": 2**31}, r"padding=2147483648 is not .* an int below 2\*\*31"),
        ({"padding": ((-(2**62), 2**62), (0, 0))}, r"padding=\(\(-4611686018427387904, .* is not"),
        ({"padding": ((True, 1), (0, 0))}, r"padding=\(\(True, 1\), \(0, 0\)\) is not"),
        ({"padding": 2**30}, r"padding=1073741824 with kernel_dilation=1 makes an array of .*56, 2147483656, 8\)"),
        ({"feature_group_count": 3}, r"takes 8 x feature_group_count=3 input channels, but x.shape=.* has C=8"),
    ],
)
def test_a_bad_argument_is_named_with_its_value(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        geo.resolve((1, 8, 8, 8), (3, 3, 8, 4), **arguments)


@pytest.mark.parametrize(
    ("x", "kernel", "sentence"),
    [
        ((8, 8, 8), (3, 3, 8, 4), r"x.shape=\(8, 8, 8\) has 3 dimensions; it must be \[N, H, W, C\]"),
        ((1, 8, 8, 8), (3, 8, 4), r"kernel.shape=\(3, 8, 4\) has 3 dimensions; it must be \[kh, kw,"),
        ((1, 8, 8, 8), (0, 3, 8, 4), r"kernel.shape=\(0, 3, 8, 4\) has an empty window"),
    ],
)
def test_a_bad_shape_is_named(x: tuple[int, ...], kernel: tuple[int, ...], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        geo.resolve(x, kernel)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"kind": "min"}, r"pool='min' is not one of 'max', 'avg'"),
        ({"window_shape": 0}, r"window_shape=0 is not an int or two ints"),
        ({"window_strides": (0, 1)}, r"window_strides=\(0, 1\) is not an int or two ints"),
        ({"window_padding": -1}, r"window_padding=-1 is negative"),
        ({"window_shape": 2**40}, r"window_shape=1099511627776 is not an int or two ints of 1 to 2"),
        ({"window_padding": 2**31}, r"window_padding=2147483648 is not"),
        ({"window_padding": 2**30}, r"window_padding=1073741824 makes an array of shape"),
        ({"window_padding": "FULL"}, r"window_padding='FULL' is not \"SAME\""),
    ],
)
def test_a_bad_pool_is_named(arguments: dict[str, Any], sentence: str) -> None:
    good: dict[str, Any] = {"kind": "max", "window_shape": 2, "window_strides": None, "window_padding": "VALID"}
    with pytest.raises(ValueError, match=sentence):
        geo.with_pool(geo.Geometry(), (8, 8), **(good | arguments))


def test_sizes_beyond_31_bits_are_named() -> None:
    geometry = geo.Geometry()
    assert geo.too_large(geometry, (9, 8, 8, 8), (3, 3, 8, 4)) is None
    assert "one image of x has 17179869184" in str(geo.too_large(geometry, (1, 2**16, 2**15, 8), (1, 1, 8, 4)))
    assert "kernel has 8589934592 elements" in str(geo.too_large(geometry, (1, 2, 2, 8), (1, 1, 8, 2**30)))
    assert "one image's result has" in str(geo.too_large(geometry, (1, 2**12, 2**12, 1), (1, 1, 1, 128)))
    for far in (
        geo.Geometry(padding=((2**32, -(2**32)), (1, 1))),
        geo.Geometry(dilation=(1, 2**31)),
        geo.Geometry(strides=(2**31, 1)),
    ):
        assert "pixels; at most 2**31 - 1" in str(geo.too_large(far, (1, 8, 8, 8), (3, 3, 8, 4)))


def test_numpy_arrays_are_sequences() -> None:
    given = geo.resolve((1, 8, 8, 8), (3, 3, 8, 4), strides=np.asarray([1, 2]), padding=np.asarray([[0, 1], [2, 0]]))
    assert given == geo.Geometry((1, 2), ((0, 1), (2, 0)))
