"""Programs exported for maps of any size: lax runs there, as the kernels want to know height and width."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import export
from networks import small_resnet, small_vgg

import jax_sparse_conv as jsc
from jax_sparse_conv import models
from jax_sparse_conv._src.fusion import rewrite
from jax_sparse_conv._src.problem import geometry

pytestmark = [
    pytest.mark.usefixtures("float32_products"),
    pytest.mark.filterwarnings("ignore:implementation=None is XLA's own operation where H"),
]

KERNEL = 0.1 * jax.random.normal(jax.random.key(1), (3, 3, 16, 32))
POINTWISE = 0.1 * jax.random.normal(jax.random.key(2), (1, 1, 32, 32))
BIAS = jnp.linspace(-1, 1, 32)
Function = Callable[..., Any]
CALLS: dict[str, Function] = {
    "same": lambda x, i: jsc.conv(x, KERNEL, BIAS, activation="relu", implementation=i),
    "strided": lambda x, i: jsc.conv(x, KERNEL, strides=(2, 3), implementation=i),
    "lower": lambda x, i: jsc.conv(x, KERNEL, strides=2, padding="SAME_LOWER", implementation=i),
    "valid": lambda x, i: jsc.conv(x, KERNEL, padding="VALID", kernel_dilation=2, implementation=i),
    "pool": lambda x, i: jsc.conv_pool(x, KERNEL, BIAS, implementation=i),
    "average": lambda x, i: jsc.conv_pool(
        x, KERNEL, pool="avg", window_shape=3, window_strides=2, window_padding="SAME", implementation=i
    ),
    "counted": lambda x, i: jsc.conv(x, KERNEL, count_nonzeros=True, implementation=i)[0],
    "vmap": lambda x, i: jax.vmap(lambda x: jsc.conv(x[None], KERNEL, implementation=i))(x),
    "gradient": lambda x, i: jax.grad(lambda x: (jsc.conv(x, KERNEL, implementation=i) ** 2).sum())(x),
    "dense": lambda x, i: jsc.dense(x, KERNEL[0, 0], BIAS, implementation=i),
    "fused": lambda x, i: rewrite.fuse(
        lambda x: jsc.conv(jsc.conv(x, KERNEL, activation="relu", implementation=i), POINTWISE, implementation=i)
    )(x),
}


def exported(function: Function, shape: str) -> Any:
    x = jax.ShapeDtypeStruct(export.symbolic_shape(shape), jnp.float32)
    return export.export(jax.jit(function), disabled_checks=jsc.export_checks())(x)


@pytest.mark.parametrize("shape", ["n,h,w,16", "2,8*h,8*w,16"])
@pytest.mark.parametrize(("name", "implementation"), [("same", "xla"), *((name, None) for name in CALLS)])
def test_any_height_and_width(name: str, implementation: str | None, shape: str) -> None:
    found = exported(lambda x: CALLS[name](x, implementation), shape)
    for height, width in ((16, 8), (8, 24)):
        x = jax.nn.relu(jax.random.normal(jax.random.key(0), (2, height, width, 16)))
        close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)  # noqa: E731
        jax.tree.map(close, found.call(x), CALLS[name](x, "xla"))


@pytest.mark.parametrize("name", ["same", "pool", "fused"])
def test_a_named_kernel_says_what_it_wants_to_know(name: str) -> None:
    with pytest.raises(ValueError, match=r"'ecr' cannot run: x\.shape=\(n, h, w, 16\) is symbolic"):
        exported(lambda x: CALLS[name](x, "ecr"), "n,h,w,16")


def test_a_kernel_of_symbolic_shape() -> None:
    kernel = jax.ShapeDtypeStruct(export.symbolic_shape("3,3,16,k"), jnp.float32)
    x = jax.ShapeDtypeStruct((2, 8, 8, 16), jnp.float32)

    def of(implementation: str | None) -> Any:
        function = jax.jit(lambda x, kernel: jsc.conv(x, kernel, implementation=implementation))
        return export.export(function, disabled_checks=jsc.export_checks())(x, kernel)

    with pytest.raises(ValueError, match=r"'ecr' cannot run: kernel\.shape=\(3, 3, 16, k\) is symbolic"):
        of("ecr")
    with pytest.warns(UserWarning, match="where H, W, C or the kernel's shape is symbolic"):
        assert "jsc_" not in of(None).mlir_module()


def test_none_says_once_that_it_is_xlas() -> None:
    def network(x: jax.Array) -> jax.Array:
        return jsc.conv_pool(jsc.conv(x, KERNEL), POINTWISE)

    for function in (network, jsc.jit_inference(lambda kernel, x: jsc.conv(x, kernel), KERNEL)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            exported(function, "n,h,w,16")
        assert [str(each.message)[:53] for each in caught] == ["implementation=None is XLA's own operation where H, W"]


def test_a_network() -> None:
    model = small_resnet()
    models.fold_batch_norm(model)
    found = exported(jsc.nnx.jit_inference(model), "n,8*h,8*w,3")
    x = jax.random.normal(jax.random.key(0), (2, 32, 24, 3))
    wanted = nnx.jit(lambda model, x: model(x))(model, x)
    np.testing.assert_allclose(found.call(x), wanted, rtol=1e-4, atol=1e-4)


def test_a_network_that_must_know_its_size() -> None:
    with pytest.raises(ValueError, match="is averaged to 3 x 3 by windows that depend on its size"):
        exported(jsc.nnx.jit_inference(small_vgg()), "n,8*h,8*w,3")


def test_counts_are_of_everything() -> None:
    counts = exported(lambda x: jsc.conv(x, KERNEL, activation="relu", count_nonzeros=True)[1], "n,h,w,16")
    x = jax.nn.relu(jax.random.normal(jax.random.key(0), (2, 9, 8, 16)))
    y = jsc.conv(x, KERNEL, activation="relu", implementation="xla")
    np.testing.assert_array_equal(counts.call(x).sum(0), [jnp.count_nonzero(y), y.size])


def test_what_is_known_is_checked() -> None:
    with pytest.raises(ValueError, match=r"kernel\.shape=\(3, 3, 16, 32\) takes 16 x feature_group_count=1 input"):
        exported(lambda x: jsc.conv(x, KERNEL), "n,h,w,17")
    size = export.symbolic_shape("h,w")
    known = geometry.resolve((1, *size, 16), KERNEL.shape, padding=1)
    assert known.padding == ((1, 1), (1, 1))
    assert known.conv_size(size, (3, 3)) == size
