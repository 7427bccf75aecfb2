"""Flax's own linen layers inside of `sparse_layers`, against the same layers outside of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax_checks import feature_map

import jax_sparse_conv as jsc
from jax_sparse_conv._src.layers.layer_calls import record_calls
from jax_sparse_conv.linen import SparseConv, sparse_layers

pytestmark = pytest.mark.usefixtures("float32_products")


class Net(nn.Module):
    """Convolutions with every argument that matters, and two dense layers."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        draw = nn.initializers.normal()
        x = nn.relu(nn.Conv(8, (3, 3), kernel_init=nn.initializers.he_normal(), bias_init=draw)(x))
        x = nn.BatchNorm(use_running_average=not train)(x)
        x = nn.relu(nn.Conv(8, (3, 3), strides=2, padding="VALID", use_bias=False, name="strided")(x))
        x = nn.relu(nn.Conv(8, [3, 3], kernel_dilation=2, padding=2, feature_group_count=4, bias_init=draw)(x))
        x = nn.relu(nn.Conv(6, (3, 3), padding="CIRCULAR", bias_init=draw)(x))
        x = nn.relu(nn.Conv(6, (2, 2), mask=np.tril(np.ones((2, 2, 6, 6), np.float32)))(inputs=x))
        x = nn.Dense(7, bias_init=draw)(x.mean((-3, -2)))
        return nn.Dense(5, use_bias=False)(nn.relu(x))


class Doubled(nn.Conv):
    """A subclass, which computes something else."""

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        return 2 * super().__call__(inputs)


def sparsely(function: Callable[..., Any], *args: Any, implementation: str | None = None, **kwargs: Any) -> Any:
    with sparse_layers(implementation):
        return function(*args, **kwargs)


def operations(function: Callable[..., Any], *args: Any) -> list[str]:
    """This package's primitives (one for dense layers too) and lax's products that the function runs, in order."""

    def names(jaxpr: Any) -> Iterator[str]:
        for equation in jaxpr.eqns:
            yield equation.primitive.name
            inner = jax.tree.leaves(list(equation.params.values()), is_leaf=lambda value: hasattr(value, "eqns"))
            for each in inner:
                if hasattr(each, "eqns"):
                    yield from names(each)

    kinds = {"jsc_conv", "conv_general_dilated", "dot_general"}
    return [name for name in names(jax.make_jaxpr(function)(*args).jaxpr) if name in kinds]


def assert_close(got: Any, wanted: Any, tolerance: float = 1e-5) -> None:
    def check(got: jax.Array, wanted: jax.Array) -> None:
        assert got.dtype == wanted.dtype
        np.testing.assert_allclose(
            np.asarray(got, np.float64), np.asarray(wanted, np.float64), rtol=tolerance, atol=tolerance
        )

    jax.tree.map(check, got, wanted)


X = feature_map((2, 12, 12, 4))


@pytest.fixture(scope="module")
def variables() -> Any:
    return jax.jit(Net().init)(jax.random.key(0), X)


def test_init_is_the_same(variables: Any) -> None:
    ours = jax.jit(lambda key: sparsely(Net().init, key, X))(jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, ours, variables)
    assert jax.tree.structure(ours) == jax.tree.structure(variables)


@pytest.mark.parametrize(
    ("implementation", "leading"),
    [(None, (2,)), ("xla", (2,)), ("ecr", ()), ("ecr", (2,)), ("ecr", (3, 2)), ("ecr", (0,))],
)
def test_result_is_the_same(variables: Any, implementation: str | None, leading: tuple[int, ...]) -> None:
    x = feature_map((*leading, 12, 12, 4))
    got = sparsely(jax.jit(lambda v, x: Net().apply(v, x)), variables, x, implementation=implementation)
    assert_close(got, jax.jit(Net().apply)(variables, x))


def test_only_what_the_package_has_runs_by_it(variables: Any) -> None:
    def names(implementation: str) -> list[str]:
        return operations(lambda v: sparsely(Net().apply, v, X, implementation=implementation), variables)

    assert names("ecr") == [*["jsc_conv"] * 3, "conv_general_dilated", *["jsc_conv"] * 3]  # the circular one is Flax's
    assert "jsc_conv" not in names("xla")
    assert operations(lambda v: Net().apply(v, X), variables).count("conv_general_dilated") == 5


def test_batch_statistics_and_intermediates_are_as_outside(variables: Any) -> None:
    def run(variables: Any) -> Any:
        return Net().apply(variables, X, True, mutable=["batch_stats", "intermediates"], capture_intermediates=True)

    assert_close(jax.jit(lambda v: sparsely(run, v))(variables), jax.jit(run)(variables))


@pytest.mark.parametrize("layer", [nn.Conv(4, (3, 3)), nn.Dense(4)], ids=["conv", "dense"])
def test_dtypes_promote_as_in_flax(layer: Any) -> None:
    integers, half = jnp.asarray(np.sign(X), jnp.int32), layer.clone(dtype=jnp.bfloat16)
    variables = layer.init(jax.random.key(0), X)
    assert_close(sparsely(layer.apply, variables, integers), layer.apply(variables, integers))
    assert_close(sparsely(half.apply, variables, X), half.apply(variables, X), 2e-2)
    stored = layer.clone(param_dtype=jnp.bfloat16)
    jax.tree.map(
        np.testing.assert_array_equal,
        sparsely(stored.init, jax.random.key(0), X),
        stored.init(jax.random.key(0), X),
    )


def test_grad_and_vmap(variables: Any) -> None:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(Net().apply({**variables, "params": params}, x) ** 2)

    def sparse_loss(params: Any, x: jax.Array) -> jax.Array:
        return sparsely(loss, params, x)

    assert_close(
        jax.jit(jax.grad(sparse_loss))(variables["params"], X), jax.jit(jax.grad(loss))(variables["params"], X), 1e-4
    )
    sparse_losses, losses = (jax.jit(jax.vmap(each, (None, 0)))(variables["params"], X) for each in (sparse_loss, loss))
    assert_close(sparse_losses, losses)


class Lifted(nn.Module):
    """Flax's transformations of layers and of a block."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.relu(nn.remat(nn.Conv)(4, (3, 3))(x))
        x = nn.relu(nn.jit(nn.Conv)(4, (3, 3))(x))

        class Step(nn.Module):
            @nn.compact
            def __call__(self, carry: jax.Array, _: None) -> tuple[jax.Array, None]:
                return carry + nn.relu(nn.Conv(4, (3, 3))(carry)), None

        x, _ = nn.scan(Step, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)()(x, None)
        each = nn.vmap(nn.Dense, variable_axes={"params": None}, split_rngs={"params": False})
        return each(3)(x)


def test_lifted_transformations() -> None:
    with sparse_layers("ecr"):
        ours = jax.jit(lambda key: Lifted().init(key, X))(jax.random.key(0))
        names = operations(lambda v: Lifted().apply(v, X), ours)
    variables = jax.jit(Lifted().init)(jax.random.key(0), X)
    jax.tree.map(np.testing.assert_array_equal, ours, variables)
    assert names == ["jsc_conv"] * 4

    def loss(variables: Any) -> jax.Array:
        return jnp.sum(Lifted().apply(variables, X) ** 2)

    def sparse_loss(variables: Any) -> jax.Array:
        return sparsely(loss, variables, implementation="ecr")

    assert_close(jax.jit(jax.grad(sparse_loss))(variables), jax.jit(jax.grad(loss))(variables), 1e-4)


def test_subclasses_and_own_functions_are_left() -> None:
    def own(*args: Any, **kwargs: Any) -> jax.Array:
        return -jax.lax.conv_general_dilated(*args, **kwargs)

    for layer, shape in [
        (Doubled(4, (3, 3)), (1, 6, 6, 4)),
        (nn.Conv(4, (3, 3), conv_general_dilated=own), (1, 6, 6, 4)),
        (nn.Conv(4, (3,), padding="CAUSAL"), (1, 6, 4)),
        (nn.ConvTranspose(4, (3, 3)), (1, 6, 6, 4)),
        (nn.Dense(4, dot_general=lambda *a, **k: -jax.lax.dot_general(*a, **k)), (2, 4)),
        (nn.DenseGeneral(4), (2, 4)),
    ]:
        x = feature_map(shape)
        variables = layer.init(jax.random.key(0), x)
        run = lambda v, layer=layer, x=x: sparsely(layer.apply, v, x, implementation="ecr")  # noqa: E731
        assert "jsc_conv" not in operations(run, variables)
        np.testing.assert_array_equal(run(variables), layer.apply(variables, x))


def test_this_packages_layers_stay_as_they_are() -> None:
    layer = SparseConv(4, (3, 3), activation="relu", implementation="xla")
    variables = layer.init(jax.random.key(0), X)
    assert "jsc_conv" not in operations(lambda v: sparsely(layer.apply, v, X, implementation="ecr"), variables)
    np.testing.assert_array_equal(sparsely(layer.apply, variables, X), layer.apply(variables, X))


def test_the_inner_block_counts_and_ends() -> None:
    layer = nn.Conv(4, (3, 3))
    variables = layer.init(jax.random.key(0), X)

    def names() -> list[str]:
        return operations(lambda v: layer.apply(v, X), variables)

    with sparse_layers("ecr"):
        assert names() == ["jsc_conv"]
        with sparse_layers("xla"):
            assert "jsc_conv" not in names()
        with pytest.raises(RuntimeError), sparse_layers("xla"):
            raise RuntimeError
        assert names() == ["jsc_conv"]
    assert names() == ["conv_general_dilated"]


def test_interceptors_outside_see_the_layers(variables: Any) -> None:
    seen = []

    def note(function: Any, args: Any, kwargs: Any, context: Any) -> Any:
        seen.append(type(context.module))
        return function(*args, **kwargs)

    with nn.intercept_methods(note), sparse_layers("ecr"):
        Net().apply(variables, X)
    assert seen.count(nn.Conv) == 5
    assert seen.count(nn.Dense) == 2


def test_record_calls(variables: Any) -> None:
    with record_calls() as calls:
        y = sparsely(Net().apply, variables, X)
    assert [type(call.layer) for call in calls] == [nn.Conv] * 4 + [nn.Dense] * 2
    assert calls[-1].output is y


def test_packed_kernels() -> None:
    layer = nn.Conv(8, (3, 3))
    variables = layer.init(jax.random.key(0), X)
    packed = {"params": {**variables["params"], "kernel": jsc.pack(variables["params"]["kernel"])}}
    assert_close(sparsely(layer.apply, packed, X), layer.apply(variables, X))


def test_bad_arguments() -> None:
    for name in ("nonsense", "coo", 3):
        with pytest.raises(ValueError, match=f"implementation={name!r} is not one of None, 'xla', 'ecr'"):
            sparse_layers(name)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="feature_group_count=3 does not divide the C=4"):
        sparsely(nn.Conv(3, (3, 3), feature_group_count=3).init, jax.random.key(0), X)
    with pytest.raises(ValueError, match=r"implementation='ecr' cannot run with x\.dtype=complex64"):
        sparsely(nn.Dense(3).init, jax.random.key(0), X.astype(jnp.complex64), implementation="ecr")
    with pytest.raises(TypeError, match="inputs"):
        sparsely(nn.Dense(3).init, jax.random.key(0))
