"""The formats as objects: written by `jax.export`, checked before they are read, and no arrays."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from coo_star_checks import feature_map
from jax import export
from platforms import require

import jax_sparse_conv as jsc

X = np.asarray(feature_map((2, 9, 8, 6), 0.4))
KERNEL = np.random.default_rng(0).standard_normal((3, 3, 6, 5), np.float32)
STORED = jsc.CooStar.fromdense(X, (4, 4, 1))


def through_a_file(function: Any, *arguments: Any) -> Any:
    written = export.export(jax.jit(function), disabled_checks=jsc.export_checks())(*arguments).serialize()
    return export.deserialize(written).call(*arguments)


@pytest.mark.parametrize("implementation", [None, "coo"])
def test_a_stored_map_is_an_argument_of_an_exported_program(implementation: Any) -> None:
    require("coo_lists", "float32")
    found = through_a_file(lambda stored: jsc.conv(stored, KERNEL, implementation=implementation), STORED)
    np.testing.assert_allclose(found, jsc.conv(X, KERNEL, implementation="xla"), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "made",
    [
        lambda x: jsc.CooStar.fromdense(x, (4, 3, 2)),
        lambda x: jsc.ECR.fromdense(x, 3, strides=2),
        lambda x: jsc.PECR.fromdense(x, 3, window_shape=2),
    ],
)
def test_formats_are_results_of_exported_programs(made: Any) -> None:
    found, wanted = through_a_file(made, X), made(X)
    assert type(found) is type(wanted)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(one, other)


def test_they_are_shown_without_their_values() -> None:
    assert repr(STORED) == (
        "CooStar(values=float32[2, 3, 2, 6, 16], positions=uint8[2, 3, 2, 6, 16], counts=int32[2, 3, 2, 6], "
        "size=(9, 8), channels=6, tile=(4, 4, 1))"
    )
    assert repr(jsc.ECR.fromdense(X, 3)).startswith("ECR(values=float32[2, 9, 8, 54], indices=int32[2, 9, 8, 54], ")
    assert "values=float32[2, 4, 4, 4, 54]" in repr(jsc.PECR.fromdense(X, 3, window_shape=2))


@pytest.mark.parametrize(
    ("changes", "error", "sentence"),
    [
        ({"values": None}, TypeError, "x.values=None is not an array"),
        ({"values": STORED.values.astype("int32")}, TypeError, "x.values.dtype=int32 must be float32 or"),
        ({"counts": STORED.counts.astype("float32")}, TypeError, "x.counts.dtype=float32 must be int32"),
        ({"positions": STORED.values, "values": STORED.values}, TypeError, "x.positions.dtype=float32 must be uint8"),
        ({"tile": [4, 4, 1]}, ValueError, r"x.tile=\[4, 4, 1\] is not a tuple of three ints"),
        ({"tile": (0, 4, 1)}, ValueError, "is not three ints of at least 1"),
        ({"tile": (4, 4)}, ValueError, "is not three ints of at least 1"),
        ({"size": (9, 8, 1)}, ValueError, r"x.size=\(9, 8, 1\) and x.channels=6 are not"),
        ({"size": None}, ValueError, "x.size=None and x.channels=6 are not"),
        ({"size": (-9, 8)}, ValueError, r"x.size=\(-9, 8\) and"),
        ({"size": (90, 80)}, ValueError, r"x.values.shape=\(2, 3, 2, 6, 16\) must be \(2, 23, 20, 6, 16\)"),
        ({"channels": 6.0}, ValueError, "x.channels=6.0 are not"),
    ],
)
def test_what_is_no_map_is_named(changes: Any, error: Any, sentence: str) -> None:
    damaged = dataclasses.replace(STORED, **changes)
    for reads in (damaged.todense, lambda: jsc.conv(damaged, KERNEL)):
        with pytest.raises(error, match=sentence):
            reads()


@pytest.mark.parametrize(
    "reads",
    [jsc.density, jsc.CooStar.fromdense, lambda x: jsc.conv_general_dilated(x, KERNEL, (1, 1), "SAME"), jnp.sum],
)
def test_a_stored_map_is_no_array(reads: Any) -> None:
    with pytest.raises(TypeError, match=r"a CooStar is not an array, .* x.todense\(\) is one"):
        reads(STORED)


def test_the_models_tile_is_no_larger_than_the_map() -> None:
    for strides in (60, 70, (70000, 1)):
        found = jsc.CooStar.fromdense(X, kernel_shape=(1, 1, 6, 4), strides=strides)
        assert found.tile[:2] <= (9, 8)
        np.testing.assert_array_equal(found.todense(), X)
    assert jsc.CooStar.fromdense(np.ones((8, 1, 1, 16), np.float32)).tile == (1, 1, 1)
    function = jax.jit(lambda x: jsc.CooStar.fromdense(x).todense())
    shape = export.symbolic_shape("n, h, w, 6")
    found = export.export(function, disabled_checks=jsc.export_checks())(jax.ShapeDtypeStruct(shape, X.dtype)).call(X)
    np.testing.assert_array_equal(found, X)


@pytest.mark.parametrize("shape", [3, (3, 3, 6), (3, 3, 6, 2.5), (3, 3, 0, 4), (3, 3, 2, 4), (3, 3, 6, 2**40)])
def test_kernel_shapes_that_are_none(shape: Any) -> None:
    with pytest.raises(ValueError, match="kernel_shape"):
        jsc.CooStar.fromdense(X, kernel_shape=shape)
    assert jsc.CooStar.fromdense(X, kernel_shape=np.array(KERNEL.shape)).tile


def test_a_convolution_of_lists_is_transposed_by_its_kernel() -> None:
    require("coo_lists", "float32")
    cotangent = np.ones((2, 9, 8, 5), np.float32)

    def transposed(x: Any, implementation: Any) -> Any:
        return jax.linear_transpose(lambda k: jsc.conv(x, k, implementation=implementation), KERNEL)(cotangent)[0]

    wanted = transposed(X, "xla")
    for implementation in (None, "coo"):
        np.testing.assert_allclose(transposed(STORED, implementation), wanted, rtol=1e-4, atol=1e-4)
