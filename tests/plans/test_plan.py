"""Plans: what calibration records, how it chooses, and what a plan refuses to be applied to."""

from __future__ import annotations

import dataclasses
import html
import json
import re
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import networks
import numpy as np
import pytest
from flax import nnx
from plan_checks import Small, X, calibrated, with_choices
from platforms import PLATFORM, require

import jax_sparse_conv as jsc
from jax_sparse_conv._src import _native, typed_json
from jax_sparse_conv._src.layers.calls import Call, precision_name
from jax_sparse_conv._src.plans import calibration, plan, timing
from jax_sparse_conv.nnx import SparseConv, SparseLinear


def test_calibrate_records_every_call_with_its_zeros_and_times_what_it_can_run() -> None:
    said: list[tuple[str, int | None]] = []
    made = jsc.calibrate(Small(), [X, jnp.ones_like(X)], repeats=2, progress=lambda *step: said.append(step))
    assert [layer.path for layer in made.layers] == ["conv", "conv", "pool", "dense"]
    assert [layer.call.op for layer in made.layers] == ["conv", "conv", "conv_pool", "dense"]
    assert [layer.call.residual for layer in made.layers] == [False, True, False, False]
    assert made.layers[0].densities == (0.5, 1.0)
    assert made.layers[0].density == 0.75
    assert made.layers[2].call.geometry.pool is not None
    assert made.layers[3].call.x_shape == (2, 6)
    assert made.uncalled == ("unused",)
    for layer in made.layers:
        timed = [candidate.implementation for candidate in layer.candidates]
        left_out = dict(layer.left_out)
        assert timed[0] == "xla"
        assert sorted([*timed, *left_out]) == sorted(layer.call.implementations)
        assert layer.implementation in timed
        assert all(c.low_us <= c.us <= c.high_us and c.high_us > 0 for c in layer.candidates)
    assert said[0] == ("recording batch 1", None)
    assert said[-1] == ("timing dense", 8)


def test_native_candidates_are_timed() -> None:
    require("ecr", "float32")
    for layer in calibrated().layers:
        assert layer.us("ecr") is not None
    assert calibrated().layers[2].us("pecr") is not None


def test_what_a_candidate_cannot_run_is_left_out_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "why_missing", lambda *_: "none is built")
    made = calibrated(SparseLinear(7, 3, rngs=nnx.Rngs(0)), jnp.ones((2, 7)))  # a call that is not compiled yet
    (layer,) = made.layers
    assert [candidate.implementation for candidate in layer.candidates] == ["xla"]
    assert layer.implementation == "xla"
    assert "implementation='ecr' cannot run here: none is built" in dict(layer.left_out)["ecr"]
    assert "left out ecr: implementation='ecr' cannot run here" in str(made)


def test_a_plan_is_used_eagerly_and_under_jit() -> None:
    require("pecr", "float32")
    model = Small()
    expected = model(X)
    jsc.apply_plan(model, with_choices(calibrated(model), ["xla", "ecr", "pecr", "xla"]))
    run = nnx.jit(lambda model, x: model(x))
    text = run.lower(model, X).compile().as_text()
    assert sorted(re.findall(r'custom_call_target="jsc_(\w+)"', text)) == ["ecr", "pecr"]
    np.testing.assert_allclose(run(model, X), expected, rtol=1e-2, atol=1e-3)
    np.testing.assert_allclose(model(X), expected, rtol=1e-2, atol=1e-3)
    assert model(X[:1]).shape == (1, 5)  # not in the plan
    with jax.default_matmul_precision("highest"):  # nor this
        assert nnx.jit(lambda model, x: model(x))(model, X).shape == (2, 5)
    jsc.nnx.set_implementation(model, conv="xla", conv_pool="xla", dense="xla")
    assert model.conv.implementation == "xla"


def test_a_plan_of_a_network_survives_a_file(tmp_path: Path) -> None:
    model = networks.small_resnet()
    x = networks.photographs(2, 24, 24)
    made = calibrated(model, [x])  # with batch norms of their own
    made.save(tmp_path / "plan.json")
    loaded = jsc.Plan.load(tmp_path / "plan.json")
    assert loaded == made
    assert loaded.layers[1].path == "conv2_block1_0"
    expected = model(x)
    jsc.apply_plan(model, loaded)
    networks.assert_close(model(x), expected, 1e-2)
    jsc.models.fold_batch_norm(model)
    with pytest.raises(ValueError, match=r"layer 'conv1' has a bias, unlike the plan's; it is for another model"):
        jsc.apply_plan(model, loaded)


def test_a_plan_prints_as_a_table() -> None:
    made = calibrated()
    assert made.seconds > 0
    text = str(made)
    assert repr(made) == text
    assert f"Plan for Small on {plan.device_label()}" in text
    header, first = text.splitlines()[1:3]
    assert header.split()[:4] == ["layer", "call", "zeros", "%"]
    assert "xla us" in header
    assert first.split()[0] == "conv"
    assert "2x8x8x4 * 3x3x4x4" in first
    assert "50.0" in first
    assert "2x8x8x4 * 3x3x4x6 /2x2" in text
    assert "sum of the layers: dense " in text
    title, _, *lines = text.splitlines()
    rows, notes = lines[: len(made.layers)], lines[len(made.layers) :]
    shown = made._repr_html_()  # as notebooks show it
    cells = [cell for line in rows for cell in re.split("  +", line)]
    assert re.findall("<td>(.*?)</td>", shown) == list(map(html.escape, cells))
    assert re.findall("<p>(.*?)</p>", shown) == list(map(html.escape, (title, *notes)))


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"device": "NVIDIA K80"}, r"the plan is for device 'NVIDIA K80', and this is "),
        (
            {"versions": {"jax": "0.1"}},
            rf"the plan is for jax 0.1, and this is {re.escape(jax.__version__)}; calibrate",
        ),
    ],
)
def test_a_plan_of_elsewhere_is_refused_by_name(changed: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    made = calibrated()
    if "versions" in changed:
        changed = {"versions": {**made.versions, **changed["versions"]}}
    other = dataclasses.replace(made, **changed)
    other.save(tmp_path / "plan.json")
    with pytest.raises(ValueError, match=sentence):
        jsc.Plan.load(tmp_path / "plan.json")
    assert jsc.Plan.load(tmp_path / "plan.json", any_device=True) == other
    with pytest.raises(ValueError, match=sentence):
        jsc.apply_plan(Small(), other)


def test_a_plan_of_another_model_is_refused_by_the_first_difference() -> None:
    made = calibrated()
    other = Small()
    other.pool.strides = (1, 1)
    with pytest.raises(ValueError, match=r"layer 'pool' has strides=\(1, 1\), not \(2, 2\); it is for another model"):
        jsc.apply_plan(other, made)
    wide = Small()
    wide.conv.kernel = nnx.Param(jnp.zeros((3, 3, 4, 8)))
    with pytest.raises(ValueError, match=r"layer 'conv' has kernel.shape=\(3, 3, 4, 8\), not \(3, 3, 4, 4\)"):
        jsc.apply_plan(wide, made)
    with pytest.raises(ValueError, match=r"layer 'conv' has kernel.dtype=bfloat16, not float32"):
        jsc.apply_plan(Small(param_dtype=jnp.bfloat16), made)
    with pytest.raises(ValueError, match=r"layer 'conv' has precision='highest', not 'default'"):
        jsc.apply_plan(Small(precision="highest"), made)
    more = Small()
    more.extra = SparseLinear(2, 2, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"the model has a layer 'extra', and the plan has none of that name"):
        jsc.apply_plan(more, made)
    with pytest.raises(ValueError, match=r"the plan has a layer 'conv', and the model has none of that name"):
        jsc.apply_plan(networks.small_vgg(), made)


def test_what_cannot_be_calibrated_is_said() -> None:
    with pytest.raises(TypeError, match=r"model is a Linen module \(Dense\), whose layers cannot be set .* by name"):
        jsc.calibrate(nn.Dense(3), X)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"model is a dict, which is not an nnx.Module"):
        jsc.calibrate({}, X)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Conv calls no layer of this package; jax_sparse_conv.nnx.replace\(model\)"):
        jsc.calibrate(nnx.Conv(4, 4, (3, 3), rngs=nnx.Rngs(0)), X)
    with pytest.raises(ValueError, match=r"batches is empty"):
        jsc.calibrate(Small(), [])
    with pytest.raises(ValueError, match=r"repeats=0 must be an int of at least 1"):
        jsc.calibrate(Small(), X, repeats=0)
    with pytest.raises(ValueError, match=r"repeats=1.5 must be an int of at least 1"):
        jsc.calibrate(Small(), X, repeats=1.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"batches is a NoneType, not an array or an iterable"):
        jsc.calibrate(Small(), None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"plan is a dict, not a jax_sparse_conv.Plan"):
        jsc.apply_plan(Small(), {})  # type: ignore[arg-type]

    class Mapped(Small):
        def __call__(self, x: jax.Array) -> jax.Array:
            return jax.vmap(super().__call__)(x[:, None])

    with pytest.raises(ValueError, match=r"layer 'conv' is called under jit, vmap, scan .* has no values"):
        calibrated(Mapped())


class Preceded(jsc.models.VGG):
    """A network of the package with a layer of its own in front, at a place that is the name of another."""

    def __init__(self) -> None:
        super().__init__((1,), 3, features=(4,), hidden=4, pool_size=1, rngs=nnx.Rngs(0))
        self.conv1_1 = SparseConv(3, 3, (3, 3), rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array, **arguments: Any) -> jax.Array:
        return super().__call__(self.conv1_1(x), **arguments)


class Dotted(nnx.Module):
    """Two layers of one shape whose places differ in a dot that is a key's own."""

    def __init__(self) -> None:
        first, second = (SparseConv(3, 3, (3, 3), rngs=nnx.Rngs(0)) for _ in range(2))
        self.layers = nnx.Dict({"a.b": first, "a": nnx.Dict({"b": second})})

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.layers["a"]["b"](self.layers["a.b"](x))


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (Preceded, r"two layers of the Preceded are named 'conv1_1', those at 'conv1_1' and 'convs' > 0 > 'conv'; "),
        (
            Dotted,
            r"two layers of the Dotted are named 'layers.a.b', those at 'layers' > 'a' > 'b' and 'layers' > 'a.b'",
        ),
    ],
)
def test_layers_of_one_name_are_refused(model: type[nnx.Module], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        jsc.calibrate(model(), jnp.ones((1, 8, 8, 3)))
    with pytest.raises(ValueError, match=sentence):
        jsc.apply_plan(model(), calibrated())


def test_only_a_win_beyond_the_spread_counts() -> None:
    def timed(*samples: float) -> timing.Timing:
        return timing.Timing.of(samples)

    assert calibration.wins(timed(1.1, 2.2, 3.3, 1.1), timed(1, 2, 3, 1))  # in every turn, though turns differ
    assert not calibration.wins(timed(1.02, 1.02, 1.02, 1.02), timed(1, 1, 1, 1))
    assert not calibration.wins(timed(2, 2, 1, 1), timed(1, 1, 1, 1))
    assert calibration.wins(timed(1.2), timed(1))


def test_direct_is_judged_by_all_layers_with_equal_calls_and_a_sparse_kernel_by_its_own_map() -> None:
    call, other = (layer.call for layer in calibrated().layers[:2])
    assert call != other

    def timed(xla: float, direct: float, ecr: float = 9.0) -> dict[str, timing.Timing]:
        return {name: timing.Timing.of([us] * 3) for name, us in {"xla": xla, "direct": direct, "ecr": ecr}.items()}

    lucky, unlucky = timed(8, 7), timed(8, 8.5)
    assert calibration.choose([call], [lucky]) == ["direct"]
    assert calibration.choose([call, call], [lucky, unlucky]) == ["xla", "xla"]
    assert calibration.choose([call, other], [lucky, unlucky]) == ["direct", "xla"]
    assert calibration.choose([call] * 5, [lucky] * 4 + [unlucky]) == ["direct"] * 5
    assert calibration.choose([call, call], [timed(8, 7, 4), timed(8, 7)]) == ["ecr", "direct"]
    assert calibration.choose([call, call], [timed(8, 9, 4), timed(8, 9)]) == ["ecr", "xla"]


def test_calls_survive_json_and_know_the_precision_in_force() -> None:
    for layer in calibrated().layers:
        assert typed_json.read(Call, json.loads(json.dumps(dataclasses.asdict(layer.call))), "call") == layer.call
    assert precision_name(None) == "default"
    assert precision_name(jax.lax.Precision.HIGHEST) == precision_name("float32") == "highest"
    assert precision_name(("high", "highest")) == "high,highest"
    with jax.default_matmul_precision("tensorfloat32"):
        assert precision_name(None) == "high"
    call = Call.of("dense", (X[0, 0], X[0, 0].T, None, None), {"precision": ("high", "highest")})
    np.testing.assert_allclose(call.function("xla")(X[0, 0], X[0, 0].T), np.asarray(X[0, 0]) @ X[0, 0].T, rtol=1e-2)


def test_the_device_has_a_label() -> None:
    assert plan.device_label()
    assert ("cores" in plan.device_label()) == (PLATFORM == "cpu")
