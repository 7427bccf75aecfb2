"""Run by test_partitioning.py in a process of its own with eight CPU devices; asserts, and prints what it checked.

Functions and models under a mesh: `accelerate`, `jit_inference`, replaced models, training, chains and dense blocks.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import blocks
import cases
import chains as chain_helpers
import jax
import numpy as np
import oracle
from cases import Case
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from kernel_checks import call
from sharded_maps import HALO, SUM, collectives, mesh

import jax_sparse_conv as jsc
from jax_sparse_conv._src.fusion import rewrite
from jax_sparse_conv.models import units
from jax_sparse_conv.models.densenet import DenseNet

PLACES = ((mesh(8), P("a"), set()), (mesh(2, 4), P("a", "b"), {HALO, SUM}), (mesh(4), P(None, None, None, "a"), {SUM}))


class Network(nnx.Module):
    """Two convolutions with what follows them, a pool, the average of the pixels and a classifier."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Conv(8, 16, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(16, use_running_average=True, rngs=rngs)
        self.second = nnx.Conv(16, 16, (3, 3), strides=2, rngs=rngs)
        self.classes = nnx.Linear(16, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = jax.nn.relu(self.norm(self.first(x)))
        y = nnx.max_pool(jax.nn.relu(self.second(y)), (2, 2), strides=(2, 2))
        return self.classes(y.mean((1, 2)))


def wanted(model: nnx.Module, x: np.ndarray) -> np.ndarray:
    """By Flax, in float64, on one device."""
    graph, state = nnx.split(model)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda value: np.asarray(value, np.float64), state)
        return np.asarray(nnx.merge(graph, wide)(x.astype(np.float64)))


def maps(shape: tuple[int, ...]) -> np.ndarray:
    return np.maximum(np.random.default_rng(0).standard_normal(shape), 0).astype(np.float32)


def check(function: Callable[..., Any], x: Any, expected: np.ndarray, sent: set[str], calls: int = 2) -> None:
    """The program's values, and that it sends nothing else."""
    compiled = jax.jit(function).lower(x).compile()
    text = compiled.as_text()
    assert oracle.relative_error(compiled(x), expected) <= 2e-6
    assert text.count('custom_call_target="jsc_') >= calls, text
    assert set(collectives(text)) == sent, (collectives(text), sent)


def check_functions() -> None:
    """Arrays that lie on a mesh, and constraints inside, which `accelerate` and `jit_inference` keep."""
    model = Network(nnx.Rngs(0))
    graph, state = nnx.split(model)
    x = maps((8, 32, 8, 8))
    expected = wanted(model, x)
    for over, spec, sent in PLACES:
        place = NamedSharding(over, spec)
        placed = jax.device_put(x, place)
        inside = lambda x: model(jax.lax.with_sharding_constraint(x, place))  # noqa: B023, E731
        check(jsc.accelerate(model.__call__), placed, expected, sent, calls=3)
        check(jsc.accelerate(inside), x, expected, sent, calls=3)
        by_weights = jsc.jit_inference(lambda weights, x: nnx.merge(graph, weights)(x), state)
        for predict in (by_weights, jsc.nnx.jit_inference(model)):
            result = predict(placed)
            assert oracle.relative_error(result, expected) <= 2e-6
            assert result.sharding.device_set == place.device_set
        assert result.sharding.is_equivalent_to(NamedSharding(over, P(*spec[:1])), 2)
    print("accelerate and jit_inference")


def check_replaced_models() -> None:
    """`jax.set_mesh` with axes of both kinds; weights that are split over output channels, too."""
    x = maps((8, 32, 8, 8))
    for kind in (AxisType.Auto, AxisType.Explicit):
        over = jax.make_mesh((2, 4), ("a", "b"), axis_types=(kind,) * 2)
        model = Network(nnx.Rngs(0))
        expected = wanted(model, x)
        jsc.nnx.replace(model)
        apply = nnx.jit(lambda model, x: model(x))
        with jax.set_mesh(over):
            for spec in (P("a"), P(("a", "b")), P("a", "b")):
                result = apply(model, jax.device_put(x, spec))
                assert oracle.relative_error(result, expected) <= 2e-6, (kind, spec)
                assert result.sharding.spec[0] == spec[0], (kind, spec)
            if kind == AxisType.Auto:
                model.second.kernel[...] = jax.device_put(model.second.kernel[...], P(None, None, None, "b"))
                constrained = nnx.jit(lambda model, x: model(jax.lax.with_sharding_constraint(x, P("a"))))
                assert oracle.relative_error(constrained(model, x), expected) <= 2e-6
                predict = jsc.nnx.jit_inference(model)
                assert oracle.relative_error(predict(jax.device_put(x, P("a"))), expected) <= 2e-6
    print("replaced models")


def check_training() -> None:
    """Steps with batch norms, of images that are split: statistics and gradients are of all of them.

    Of Flax's layers by `accelerate`, where types say nothing, as lax wants to be told of each convolution else.
    """
    x = maps((8, 16, 8, 8))
    unit = functools.partial(units.ConvUnit, 8, 16, 3, padding=1)
    for kind, build in ((AxisType.Auto, Network), (AxisType.Auto, unit), (AxisType.Explicit, unit)):
        loss, params = loss_of(build(rngs=nnx.Rngs(0)))
        expected = flat(jax.value_and_grad(loss, has_aux=True)(params, x))
        used = jsc.accelerate(loss) if build is Network else loss
        step = jax.jit(jax.value_and_grad(used, has_aux=True))
        with jax.set_mesh(jax.make_mesh((2, 4), ("a", "b"), axis_types=(kind,) * 2)):
            for spec in (P("a"), P(("a", "b"))):
                found = flat(step(params, jax.device_put(x, spec)))
                assert oracle.relative_error(found, expected) <= 1e-5, (kind, build, spec)
    x = maps((8, 32, 32, 3))
    loss, params = loss_of(DenseNet((1, 1), 10, width=32, rngs=nnx.Rngs(0)))
    step = jax.jit(jax.value_and_grad(loss, has_aux=True))
    expected = flat(step(params, x))
    with jax.set_mesh(jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))):
        found = flat(step(params, jax.device_put(x, P("a"))))
        assert oracle.relative_error(found, expected) <= 1e-4, "a dense block"
    print("training")


def loss_of(model: nnx.Module) -> tuple[Callable[..., Any], Any]:
    """A loss of parameters and images, with the statistics that batch norms store, and the parameters."""
    model.train()
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        merged: Any = nnx.merge(graph, params, rest, copy=True)
        return (merged(x) ** 2).sum(), nnx.state(merged, nnx.BatchStat)

    return loss, params


def flat(found: Any) -> np.ndarray:
    """All arrays as one: the gradient of a bias in front of a batch norm alone is what rounding left."""
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(found)])


def check_chains_and_blocks() -> None:
    """Where `jit` splits a program these run layer by layer, each as it is split."""
    case = Case("3x3", (2, 16, 8, 16), 16, activation="relu")
    inputs = cases.inputs(case)

    def chain(x: Any) -> jax.Array:
        return functools.reduce(lambda y, _: call(case, y, *inputs[1:], None), range(3), x)

    fused = rewrite.fuse(chain)
    assert chain_helpers.names(fused, inputs.x) == ["chain 3"]
    expected = inputs.x
    for _ in range(3):
        expected = oracle.expected(case, inputs._replace(x=expected))
    check(fused, jax.device_put(inputs.x, NamedSharding(mesh(2, 4), P("a", "b"))), expected, {HALO}, calls=0)

    block = blocks.Block("8x8", (2, 8, 8, 32), 2)
    x, layers = blocks.values(block, np.float32)
    for spec, sent in ((P("a"), set()), (P("a", "b"), {HALO})):
        placed = jax.device_put(x, NamedSharding(mesh(2, 4), spec))
        compiled = jax.jit(lambda x: jsc.dense_block(x, layers, precision="highest")).lower(placed).compile()
        blocks.check(compiled(placed), x, layers, blocks.TOLERANCE["highest"])
        assert set(collectives(compiled.as_text())) == sent
    print("chains and dense blocks")


def main() -> None:
    check_functions()
    check_replaced_models()
    check_training()
    check_chains_and_blocks()


if __name__ == "__main__":
    sys.exit(main())
