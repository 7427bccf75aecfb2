"""The public operations' arguments: what is accepted, what each refusal says, and lax's own signature."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from platforms import require

import jax_sparse_conv as jsc
from jax_sparse_conv._src.primitive import primitives


def arrays(c: int = 6, k: int = 8, dtype: Any = jnp.float32) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    x = np.maximum(rng.standard_normal((2, 8, 9, c)), 0)
    return jnp.asarray(x, dtype), jnp.asarray(rng.standard_normal((3, 3, c, k)), dtype)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"implementation": "cudnn"}, r"implementation='cudnn' is not one that conv has: None, 'xla', 'ecr'"),
        ({"implementation": "pecr"}, r"implementation='pecr' is not one that conv has"),
        ({"activation": "gelu"}, r"activation='gelu' is not one of None, 'relu'"),
        ({"bias": np.zeros(7, np.float32)}, r"bias.shape=\(7,\) must be \(8,\)"),
        ({"residual": np.zeros((2, 8, 8, 8), np.float32)}, r"residual.shape=\(2, 8, 8, 8\) must be \(2, 8, 9, 8\)"),
    ],
)
def test_conv_names_a_bad_argument(arguments: dict[str, Any], sentence: str) -> None:
    x, kernel = arrays()
    with pytest.raises(ValueError, match=sentence):
        jax.jit(lambda: jsc.conv(x, kernel, **arguments))()


@pytest.mark.parametrize("argument", ["activation", "implementation"])
def test_an_array_is_no_name(argument: str) -> None:
    x, kernel = arrays()
    for operation in (jsc.conv, jsc.conv_pool):
        with pytest.raises(ValueError, match=rf"{argument}=.*array.* is not one "):
            operation(x, kernel, **{argument: np.zeros(3)})
    with pytest.raises(ValueError, match=rf"{argument}=.*array.* is not one "):
        jsc.nnx.SparseConv(6, 8, (3, 3), rngs=nnx.Rngs(0), **{argument: np.zeros(3)})


@pytest.mark.parametrize("flag", ["no", None, 1, np.ones(2)])
def test_a_flag_is_a_bool(flag: Any) -> None:
    x, kernel = arrays()
    for operation in (jsc.conv, jsc.conv_pool):
        with pytest.raises(TypeError, match=r"count_nonzeros=.* is not True or False"):
            operation(x, kernel, count_nonzeros=flag)


def test_shapes_have_no_values() -> None:
    x, kernel = arrays()
    with pytest.raises(TypeError, match=r"kernel is a ShapeDtypeStruct, which has no values; jax\.eval_shape takes"):
        jsc.conv(x, jax.eval_shape(lambda: kernel))
    assert jax.eval_shape(jsc.conv, x, kernel).shape == (2, 8, 9, 8)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda x, k: jsc.conv("a", k), "x='a'"),
        (lambda x, k: jsc.conv(x, {}), "kernel={}"),
        (lambda x, k: jsc.conv(x, k, residual="x"), "residual='x'"),
        (lambda x, k: jsc.conv(np.array([None]), k), "x=array"),
        (lambda x, k: jsc.dense(x, "k"), "kernel='k'"),
        (lambda x, k: jsc.pack(None), "kernel=None"),
        (lambda x, k: jsc.density("x"), "x='x'"),
        (lambda x, k: jsc.conv(x, k, implementation="adaptive", nonzeros="n"), "nonzeros='n'"),
        (lambda x, k: jsc.CooStar.fromdense(None), "x=None"),
        (lambda x, k: jsc.ECR.fromdense(None, 3), "x=None"),
        (lambda x, k: jsc.models.preprocess(None), "images=None"),
    ],
)
def test_what_is_no_array_is_named(call: Any, named: str) -> None:
    with pytest.raises(TypeError, match=f"^{re.escape(named)}.* is no array, and none can be made of it"):
        call(jnp.ones((1, 4, 4, 8)), jnp.ones((3, 3, 8, 8)))


def test_dtypes_must_agree() -> None:
    x, kernel = arrays()
    with pytest.raises(TypeError, match=r"kernel.dtype=bfloat16 must equal x.dtype=float32"):
        jsc.conv(x, kernel.astype(jnp.bfloat16))
    with pytest.raises(TypeError, match=r"bias.dtype=float16 must equal x.dtype=float32"):
        jsc.conv(x, kernel, jnp.zeros(8, jnp.float16))
    with pytest.raises(TypeError, match=r"must equal x.dtype=uint8; x.astype\('float32'\) makes x that"):
        jsc.conv(x.astype(jnp.uint8), kernel)


def test_conv_pool_and_dense_name_a_bad_argument() -> None:
    x, kernel = arrays()
    with pytest.raises(ValueError, match=r"implementation='winograd' is not one that conv_pool has: None, 'xla'"):
        jsc.conv_pool(x, kernel, implementation="winograd")
    with pytest.raises(ValueError, match=r"x.shape=\(2, 5\) and kernel.shape=\(6, 8\) are not"):
        jsc.dense(jnp.ones((2, 5)), jnp.ones((6, 8)))
    with pytest.raises(ValueError, match=r"implementation='pecr' is not one that dense has"):
        jsc.dense(jnp.ones((2, 6)), jnp.ones((6, 8)), implementation="pecr")


def test_integers_run_in_lax_or_say_so() -> None:
    x, kernel = (jnp.round(3 * a).astype(jnp.int32) for a in arrays())
    with pytest.raises(ValueError, match=r"implementation='ecr' cannot run with x.dtype=int32; it takes float32, "):
        jsc.conv(x, kernel, implementation="ecr")
    with jax.default_device(jax.devices("cpu")[0]):  # cuDNN has no int32 convolution
        x, kernel = np.asarray(x), np.asarray(kernel)
        expected = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        np.testing.assert_array_equal(jsc.conv(x, kernel), expected)


def test_numpy_arrays_and_lists_are_arrays() -> None:
    x, kernel = arrays()
    expected = jsc.conv(x, kernel, jnp.arange(8.0), precision="highest", implementation="xla")
    result = jsc.conv(np.asarray(x), np.asarray(kernel), [float(i) for i in range(8)], precision="highest")
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4)


def test_dense_keeps_leading_axes() -> None:
    x = jnp.maximum(jnp.asarray(np.random.default_rng(1).standard_normal((2, 3, 5))), 0)
    kernel = jnp.ones((5, 4), x.dtype)
    for implementation in (None, "xla", "ecr"):
        if implementation == "ecr":
            require("dense", "float32")
        result = jsc.dense(x, kernel, implementation=implementation)
        assert result.shape == (2, 3, 4)
        np.testing.assert_allclose(result, np.asarray(x) @ np.asarray(kernel), rtol=2e-3)
    assert jsc.dense(x[0, 0], kernel, implementation="ecr").shape == (4,)


def test_density() -> None:
    x = jnp.asarray([[0.0, -0.0, jnp.nan, 1e-41], [1.0, jnp.inf, -2.0, 0.0]], jnp.float32)
    assert jsc.density(x[1]) == 0.75
    np.testing.assert_array_equal(jsc.density(x[:, :3], axis=0), [0.5, 0.5, 1.0])
    assert jsc.density(x[0]) == 0.5
    assert jsc.density(jnp.asarray([[0, 3], [1, 0]])) == 0.5
    np.testing.assert_array_equal(jsc.density(x[:, :2], axis=(-1,)), [0.0, 1.0])
    assert jsc.density(jnp.float32(3), axis=()) == 1


@pytest.mark.parametrize("axis", [7, -3, (0, 0), (0, -2), "a", 1.0, (0, 1.0), True])
def test_an_axis_that_there_is_not_is_named(axis: Any) -> None:
    wanted = f"axis={axis!r} is not an int or a tuple of different ints of -2 to 1, the axes of x.shape=(2, 4)"
    with pytest.raises(ValueError, match=f"^{re.escape(wanted)}$"):
        jsc.density(jnp.ones((2, 4)), axis=axis)


@pytest.mark.parametrize("shape", [(), (3,), (3, 8, 8), (3, 3, 3, 8, 8)])
def test_a_kernel_of_other_axes_is_not_packed(shape: tuple[int, ...]) -> None:
    with pytest.raises(
        ValueError, match=rf"^kernel.shape={re.escape(str(shape))} has {len(shape)} dimensions; a kernel"
    ):
        jsc.pack(jnp.ones(shape))


def test_conv_general_dilated_is_lax_where_conv_applies() -> None:
    x, kernel = arrays()
    for arguments in (
        {"window_strides": (2, 1), "padding": "SAME"},
        {"window_strides": (1, 1), "padding": [(1, 2), (0, 3)], "rhs_dilation": (2, 1)},
        {"window_strides": [1, 1], "padding": "VALID", "lhs_dilation": (1, 1), "out_sharding": None},
    ):
        common: dict[str, Any] = {"dimension_numbers": ("NHWC", "HWIO", "NHWC"), "precision": "highest", **arguments}
        np.testing.assert_allclose(
            jsc.conv_general_dilated(x, kernel, **common),
            lax.conv_general_dilated(x, kernel, **common),
            rtol=1e-4,
            atol=1e-4,
        )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"lhs_dilation": (2, 2)}, r"lhs_dilation=\(2, 2\) is not 1"),
        ({"dimension_numbers": None}, r"dimension_numbers=None is not"),
        ({"preferred_element_type": jnp.float32}, r"preferred_element_type=.* is not lhs's dtype"),
        ({"batch_group_count": 2}, r"batch_group_count=2 is not 1"),
    ],
)
def test_conv_general_dilated_steps_aside_or_says_why_not(arguments: dict[str, Any], sentence: str) -> None:
    x, kernel = arrays()
    common: dict[str, Any] = {"window_strides": (1, 1), "padding": [(1, 1), (1, 1)], "precision": "highest"}
    common |= {"dimension_numbers": ("NHWC", "HWIO", "NHWC")} | arguments
    if arguments.get("dimension_numbers", "") is None:
        x, kernel = jnp.transpose(x, (0, 3, 1, 2)), jnp.transpose(kernel, (3, 2, 0, 1))
    if "preferred_element_type" in arguments:
        x, kernel = x.astype(jnp.bfloat16), kernel.astype(jnp.bfloat16)
    np.testing.assert_array_equal(
        jsc.conv_general_dilated(x, kernel, **common), lax.conv_general_dilated(x, kernel, **common)
    )
    with pytest.raises(ValueError, match=sentence):
        jsc.conv_general_dilated(x, kernel, **common, implementation="ecr")


def test_conv_general_dilated_leaves_strides_beyond_31_bits_to_lax() -> None:
    common: dict[str, Any] = {
        "window_strides": (2**31, 1),
        "padding": "SAME",
        "dimension_numbers": ("NHWC", "HWIO", "NHWC"),
    }
    with jax.default_device(jax.devices("cpu")[0]):  # cuDNN has no such strides
        x, kernel = map(np.asarray, arrays())
        found = jsc.conv_general_dilated(x, kernel, **common)
        np.testing.assert_array_equal(found, lax.conv_general_dilated(x, kernel, **common))
        with pytest.raises(
            ValueError, match=r"its padding, dilation or strides reach 2147483648 pixels, beyond 2\*\*31"
        ):
            jsc.conv_general_dilated(x, kernel, **common, implementation="ecr")


@pytest.mark.parametrize("implementation", [None, "xla", "ecr"])
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"window_strides": (1,)}, "window_strides"),
        ({"padding": "SAMEE"}, "padding type.*SAMEE"),
        ({"feature_group_count": 4}, "feature_group_count"),
    ],
)
def test_conv_general_dilated_names_the_arguments_as_lax_does(
    implementation: str | None, arguments: dict[str, Any], sentence: str
) -> None:
    x, kernel = arrays()
    common = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": ("NHWC", "HWIO", "NHWC")}
    with pytest.raises((ValueError, RuntimeError), match=sentence):
        jsc.conv_general_dilated(x, kernel, **(common | arguments), implementation=implementation)


@pytest.mark.parametrize("implementation", [None, "xla", "ecr"])
def test_precision_is_checked(implementation: str | None) -> None:
    x, kernel = arrays()
    with pytest.raises(ValueError, match=r"precision='exact' is not None, 'default'"):
        jsc.conv(x, kernel, precision="exact", implementation=implementation)
    assert jsc.conv(x, kernel, precision=["high", "highest"]).shape == (2, 8, 9, 8)


def test_sizes_beyond_31_bits_are_refused_by_name_or_left_to_lax() -> None:
    x = jax.ShapeDtypeStruct((1, 2**12, 2**12, 256), jnp.bfloat16)
    kernel = jax.ShapeDtypeStruct((1, 1, 256, 2), jnp.bfloat16)
    with pytest.raises(ValueError, match=r"implementation='ecr' cannot run: one image of x has 4294967296 elements"):
        jax.eval_shape(lambda x, k: jsc.conv(x, k, implementation="ecr"), x, kernel)
    assert "jsc_conv" not in str(jax.make_jaxpr(jsc.conv)(x, kernel))


def test_empty_and_missing_operands() -> None:
    assert not jsc.dense(jnp.ones((2, 0)), jnp.ones((0, 3))).any()
    assert jsc.dense(jnp.ones((0, 4)), jnp.ones((4, 3)), implementation="xla").shape == (0, 3)
    assert not jsc.conv(jnp.ones((1, 4, 4, 0)), jnp.ones((3, 3, 0, 5))).any()
    with pytest.raises(TypeError, match="x=None is not an array"):
        jsc.conv(None, jnp.ones((3, 3, 1, 1)))  # type: ignore[arg-type]


def test_pools_of_integers() -> None:
    x = np.arange(16, dtype=np.int32).reshape(1, 4, 4, 1)
    with jax.default_device(jax.devices("cpu")[0]):
        result = jsc.conv_pool(x, np.ones((1, 1, 1, 1), np.int32), activation=None)
    np.testing.assert_array_equal(result[0, :, :, 0], [[5, 7], [13, 15]])


def test_eager_calls_do_not_retrace(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = []
    bind = primitives.bind
    monkeypatch.setattr(primitives, "bind", lambda *a: (traced.append(1), bind(*a))[1])
    x, kernel = arrays(c=5)
    for _ in range(3):
        jsc.conv(x, kernel)
    assert len(traced) == 1


def test_eager_products_do_not_copy_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    x, kernel = jnp.ones((2, 3, 16)), jnp.ones((16, 8))
    monkeypatch.setattr(type(kernel), "__getitem__", lambda *_: pytest.fail("a copy with more axes"))
    for implementation in (None, "xla"):
        found = jsc.dense(x, kernel, jnp.ones(8), implementation=implementation)
        np.testing.assert_allclose(found, np.full((2, 3, 8), 17.0))


@pytest.mark.parametrize(
    ("kernel", "arguments", "sentence"),
    [
        ((1, 3), {}, r"kernel\.shape=\(1, 3, 4, 8\) has a window of 1x3, and there are 1x1, 3x3, 5x5, 7x7"),
        ((3, 3), {"strides": (2, 1)}, r"strides=\(2, 1\) is not one of \(1, 1\), \(2, 2\)"),
        ((5, 5), {"strides": 3}, r"strides=\(3, 3\) is not one of \(1, 1\), \(2, 2\)"),
        ((3, 3), {"kernel_dilation": 2}, r"kernel_dilation=\(2, 2\) is not 1"),
    ],
)
def test_coo_says_which_argument_it_has_no_variant_for(
    kernel: tuple[int, int], arguments: dict[str, Any], sentence: str
) -> None:
    x, weights = jnp.ones((1, 9, 9, 4)), jnp.ones((*kernel, 4, 8))
    with pytest.raises(ValueError, match=sentence + r": implementation='coo' cannot run; None, 'ecr' or 'xla' can"):
        jax.eval_shape(lambda: jsc.conv(x, weights, implementation="coo", **arguments))
    assert jsc.conv(x, weights, **arguments).shape[3] == 8
