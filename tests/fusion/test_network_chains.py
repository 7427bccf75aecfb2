"""Networks under `implementation=None` as chains: when they are traced so, what lowering makes of it, and results."""

from __future__ import annotations

import itertools
import re
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chain_checks import require_kernel
from chains import equations, names, weights
from flax import nnx
from networks import copied

import jax_sparse_conv as jsc
from jax_sparse_conv import models
from jax_sparse_conv._src import _native, devices
from jax_sparse_conv._src.devices import Device
from jax_sparse_conv._src.fusion import chain_rules, chains, rewrite
from jax_sparse_conv._src.layers import layer_calls
from jax_sparse_conv._src.primitive import lowering
from jax_sparse_conv.models.resnet import ResNet
from jax_sparse_conv.models.vgg import VGG

CHAIN = ["chain 13"]


@pytest.fixture
def extension(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation with the kernel of fused chains."""
    missing = _native.why_missing
    monkeypatch.setattr(_native, "why_missing", lambda name, *of: None if name == "chain" else missing(name, *of))


@copied
def network(**options: Any) -> ResNet:
    model = ResNet((1, 2), 16, width=8, rngs=nnx.Rngs(0), **options)
    models.fold_batch_norm(model)
    return model


@pytest.fixture(scope="module")
def model() -> ResNet:
    return network()


def image(images: int = 1) -> jax.Array:
    return weights(0, images, 40, 40, 3)


def assert_close(one: Any, other: Any) -> None:
    """As exact as float32 on a CPU; a GPU multiplies as TF32, and a chain's sums are others than its layers'."""
    tolerance = 2e-2 if jax.default_backend() == "gpu" else 1e-5
    np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance * max(1.0, float(jnp.abs(other).max())))


def layers_of(model: Any, x: Any) -> list[str]:
    return names(lambda x: model(x), x)


def test_a_network_is_traced_as_a_chain(extension: None, model: ResNet) -> None:
    assert layers_of(model, image()) == CHAIN
    assert layers_of(model, image(8)) == ["chain 12", "conv"]  # dense layers of one image alone
    assert layers_of(nnx.clone(model), image().astype(jnp.bfloat16))[0].startswith("chain")
    vgg = VGG((1, 1), 10, features=(8, 8), hidden=16, pool_size=2, rngs=nnx.Rngs(0))
    assert layers_of(vgg, image())[0] == "chain 2"


def test_where_it_is_not(extension: None, model: ResNet, monkeypatch: pytest.MonkeyPatch) -> None:
    apart = ["conv"] * 13
    assert layers_of(model, image(9)) == apart  # more than was measured
    named = network()
    named.fuses = False
    assert layers_of(named, image()) == apart
    assert layers_of(network(implementation="direct"), image())[:12] == apart[:12]
    names_of_layers = lambda x: model(x, before_layer=lambda *_: None)  # noqa: E731
    assert names(names_of_layers, image()) == apart
    with layer_calls.record_calls():
        assert layers_of(model, image()) == apart
    monkeypatch.setattr(_native, "why_missing", lambda *_: "there is no kernel")
    assert layers_of(model, image()) == apart


def test_fuse_takes_what_a_network_has_chosen(extension: None, model: ResNet) -> None:
    """Asked for, a chain is made wherever it can be, also of a network that was traced under `jit` before."""
    jitted = jax.jit(lambda x: model(x))
    jax.eval_shape(jitted, image())
    for function in (lambda x: model(x), jitted, lambda x: jnp.tanh(jitted(x))):
        assert names(rewrite.fuse(function), image())[:2] == CHAIN
        (chain,) = (e for e in equations(rewrite.fuse(function), image()) if e.primitive is chains.fused_chain_p)
        assert not chain.params["chosen"]
    x = image()
    assert_close(jax.jit(rewrite.fuse(model))(x), model(x))


def test_a_network_that_changes_when_it_runs_is_not_fused(extension: None) -> None:
    class Dropping(ResNet):
        def logits(self, x: jax.Array, **options: Any) -> jax.Array:
            return self.drop(super().logits(x, **options))

    class Watched(nnx.Linear):
        def __call__(self, x: jax.Array) -> jax.Array:  # type: ignore[override]
            self.sow(nnx.Intermediate, "x", x)
            return super().__call__(x)

    x = image()
    training = ResNet((1, 2), 16, width=8, rngs=nnx.Rngs(0))
    training.train()
    before = jax.tree.leaves(nnx.state(training, nnx.BatchStat))
    nnx.jit(lambda model, x: model(x))(training, x)
    after = jax.tree.leaves(nnx.state(training, nnx.BatchStat))
    assert not all(np.array_equal(old, new) for old, new in zip(before, after, strict=True))
    dropping = Dropping((1, 2), 16, width=8, rngs=nnx.Rngs(0))
    models.fold_batch_norm(dropping)
    dropping.drop = nnx.Dropout(0.5, rngs=nnx.Rngs(1))
    first, second = (nnx.jit(lambda model, x: model(x))(dropping, x) for _ in range(2))
    assert not np.array_equal(first, second)
    watched = network(implementation="direct")
    watched.fc = Watched(64, 16, rngs=nnx.Rngs(2))  # type: ignore[assignment]
    captured: Any = nnx.jit(lambda model, x: nnx.capture(model, nnx.Intermediate)(x))(watched, x)
    assert jax.tree.leaves(captured[1])[0].shape == (1, 64)
    outputs: Any = jax.jit(lambda x: nnx.capture(network(), nnx.Intermediate, method_outputs=nnx.Intermediate)(x))(x)
    assert len(jax.tree.leaves(outputs[1])) > 10


def test_named_layers_stay_apart(extension: None) -> None:
    model = network()
    dict(model.named_blocks())["conv3_block1"].convs[1].conv.implementation = "ecr"
    found = layers_of(model, image())
    assert found.count("conv") == 1
    assert [name.startswith("chain") for name in found].count(True) == 2


def test_results_are_those_of_the_layers(extension: None, model: ResNet) -> None:
    """Where lowering takes the chain apart, under every transformation."""
    apart = network()
    apart.fuses = False
    x = image()
    for one, other in (
        (jax.jit(lambda x: model(x))(x), jax.jit(lambda x: apart(x))(x)),
        (nnx.jit(lambda m, x: m(x))(model, x), nnx.jit(lambda m, x: m(x))(apart, x)),
        (model(x), apart(x)),
        (jax.vmap(jax.jit(lambda x: model(x)))(image(3)[:, None]), jax.jit(lambda x: apart(x))(image(3))[:, None]),
        (jax.jit(jax.vmap(lambda x: model(x)))(image(3)[:, None]), jax.jit(lambda x: apart(x))(image(3))[:, None]),
    ):
        assert_close(one, other)


@pytest.mark.parametrize("order", [lambda f: jax.jit(jax.grad(f)), lambda f: jax.grad(jax.jit(f)), jax.grad])
def test_derivatives(extension: None, order: Callable[[Any], Any]) -> None:
    found = []
    for fuses in (True, False):
        model = network()
        model.fuses = fuses
        graph, state = nnx.split(model)
        loss = order(lambda state, x, graph=graph: jnp.sum(nnx.merge(graph, state)(x) ** 2))
        found.append((loss(state, image()), order(lambda x, m=model: jnp.sum(m(x) ** 2))(image())))
    for ours, theirs in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-3 * float(np.abs(theirs).max()))


def lowered(monkeypatch: pytest.MonkeyPatch, model: Any, x: jax.Array, **device: Any) -> str:
    """The program for a GPU, of an installation with all kernels."""
    monkeypatch.setattr(_native, "why_missing", lambda *_: None)
    monkeypatch.setattr(_native, "workspace_bytes", lambda *_: 0)
    monkeypatch.setattr(_native, "has_warpgroups", lambda: True)
    if device:
        monkeypatch.setattr(Device, "of", classmethod(lambda cls, ordinal: Device(**device)))
    text = jax.jit(lambda x: model(x)).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    return str(text)


def test_lowering_decides(model: ResNet, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a Hopper GPU, and layer by layer on another one, for a batch of vmap's, and where no GPU is known."""
    assert lowered(monkeypatch, model, image(), capability=(9, 0)).count("@jsc_chain") == 1
    assert lowered(monkeypatch, model, image(), capability=(10, 0)).count("@jsc_chain") == 0
    assert lowered(monkeypatch, model, image(), capability=(8, 0)).count("@jsc_chain") == 0
    batched = jax.vmap(jax.jit(lambda x: model(x)))
    assert lowered(monkeypatch, batched, image(8)[:, None], capability=(9, 0)).count("@jsc_chain") == 1
    assert lowered(monkeypatch, batched, image(9)[:, None], capability=(9, 0)).count("@jsc_chain") == 0
    monkeypatch.setattr(Device, "of", classmethod(no_device))
    assert lowered(monkeypatch, model, image()).count("@jsc_chain") == 0


def no_device(cls: type[Device], ordinal: int) -> Device:
    raise RuntimeError(f"{cls} {ordinal} is not there")


def test_dense_layers_that_do_not_fit_leave_the_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows, or inputs that shared memory does not hold: the rest stays one call, where code has clusters."""

    @rewrite.fuse
    def fused(x: jax.Array) -> jax.Array:
        y = jsc.conv(jsc.conv(x, weights(1, 3, 3, 8, 8)), weights(2, 3, 3, 8, 8))
        return jsc.dense(y.reshape(1, -1), weights(3, 8 * y.shape[1] * y.shape[2], 160))

    def targets(function: Any, x: jax.Array, **device: Any) -> list[tuple[str, int]]:
        """Calls of this package, and of how many arrays."""
        text = lowered(monkeypatch, function, x, **{"capability": (9, 0), **device})
        return [(name, operands.count("%")) for name, operands in re.findall(r"custom_call @(jsc_\w+)\((.*?)\)", text)]

    x = weights(0, 1, 7, 7, 8)
    assert names(fused, x) == ["chain 3"]
    assert targets(fused, x) == [("jsc_chain", 4)]
    assert targets(jax.vmap(fused), weights(0, 2, 1, 7, 7, 8)) == [("jsc_chain", 3)]  # XLA has two rows
    assert targets(fused, x, block_shared_memory=2**16) == [("jsc_chain", 3), ("jsc_dense", 2)]
    apart = targets(fused, x, clusters=(0,) * 17)
    assert [name for name, _ in apart] == ["jsc_direct", "jsc_direct", "jsc_dense"]


def test_short_chains_are_taken_apart(model: ResNet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_rules, "LEAST_LAYERS", 8)
    dict(model.named_blocks())["conv3_block1"].convs[1].conv.implementation = "direct"
    try:
        text = lowered(monkeypatch, model, image(), capability=(9, 0))
    finally:
        dict(model.named_blocks())["conv3_block1"].convs[1].conv.implementation = None
    assert text.count("@jsc_chain") == 0


def test_chains_are_of_small_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """One image has a bound of its own."""
    exact, rules = network(precision="highest"), chain_rules._RULES
    monkeypatch.setattr(chain_rules, "_RULES", {**rules, "operations, mean": 1e5})
    assert lowered(monkeypatch, exact, image(), capability=(9, 0)).count("@jsc_chain") == 1
    assert lowered(monkeypatch, network(), image(), capability=(9, 0)).count("@jsc_chain") == 1
    assert lowered(monkeypatch, network(), image(2), capability=(9, 0)).count("@jsc_chain") == 0
    monkeypatch.setattr(chain_rules, "_RULES", {**rules, "operations, mean, one image": 1e5})
    assert lowered(monkeypatch, exact, image(), capability=(9, 0)).count("@jsc_chain") == 0
    assert lowered(monkeypatch, network(), image(), capability=(9, 0)).count("@jsc_chain") == 0
    assert lowered(monkeypatch, network(), image(2), capability=(9, 0)).count("@jsc_chain") == 1


@pytest.mark.parametrize(
    ("images", "flops", "precision", "dtype", "gains"),
    [
        (1, 1e8, None, "float32", True),
        (1, 1e12, None, "float32", False),
        (1, 1e8, "highest", "float32", True),
        (2, 1e8, "highest", "bfloat16", True),  # as exact as it can be
        (8, 1e8, None, "bfloat16", True),
        (8, 1e12, None, "float32", False),
        (9, 1e8, None, "bfloat16", False),  # more images than a chain takes
    ],
)
def test_chains_gain_up_to_so_much_work(
    h200: None, monkeypatch: pytest.MonkeyPatch, images: int, flops: float, precision: Any, dtype: str, gains: bool
) -> None:
    """Operations of a layer on average: half of these have less, half more."""
    x, kernel = jnp.zeros((images, 8, 8, 16), dtype), jnp.zeros((3, 3, 16, 16), dtype)
    (equation,) = equations(lambda x: jsc.conv(x, kernel, precision=precision), x)
    calls = [(equation.params["config"], x, kernel[None])] * 6  # as GoogLeNet's chains
    workloads = itertools.cycle([types.SimpleNamespace(flops=share * flops) for share in (0.5, 1.5)])
    monkeypatch.setattr(lowering, "workload_of", lambda *_: next(workloads))
    assert chain_rules.pays(calls) == gains
    assert not chain_rules.pays(calls[1:])


def test_on_the_gpu(model: ResNet, gpu: jax.Device) -> None:
    require_kernel("float32")
    apart = network()
    apart.fuses = False
    x = weights(0, 1, 64, 64, 3)
    chain, layers = (jax.jit(lambda x, m=m: m(x)) for m in (model, apart))
    is_measured = getattr(devices.known(), "capability", None) == (9, 0)
    assert (chain.lower(x).compile().as_text() or "").count('custom_call_target="jsc_chain"') == is_measured
    assert "jsc_chain" not in (layers.lower(x).compile().as_text() or "")
    assert_close(chain(x), layers(x))
