"""Densities at which a planned layer changes its implementation while the program runs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from plan_checks import Small, X, calibrated

import jax_sparse_conv as jsc
from jax_sparse_conv._src.layers import layers
from jax_sparse_conv._src.plans import thresholds
from jax_sparse_conv._src.plans.plan import Threshold


def with_thresholds(made: jsc.Plan, **of_kind: Any) -> jsc.Plan:
    """The plan with thresholds for layers of an operation, by its name."""
    planned = []
    for layer in made.layers:
        steps = of_kind.get(layer.call.op, ())
        planned.append(dataclasses.replace(layer, implementation="xla", thresholds=steps) if steps else layer)
    return dataclasses.replace(made, layers=tuple(planned))


STEPS = {
    "conv": (Threshold(0.1, "coo"), Threshold(0.6, "ecr")),
    "conv_pool": (Threshold(0.5, "pecr"),),
    "dense": (Threshold(0.5, "ecr"),),
}
DENSE = [np.random.default_rng(1).standard_normal((2, 8, 8, 4)).astype(np.float32) * keep for keep in (0, 1)]


@pytest.mark.parametrize("x", [X, *DENSE], ids=["half", "zero", "full"])
def test_every_density_gives_the_same_result(x: Any) -> None:
    plain, planned = Small(), Small()
    jsc.apply_plan(planned, with_thresholds(calibrated(), **STEPS))
    with jax.default_matmul_precision("highest"):
        wanted = plain(jnp.asarray(x))
        np.testing.assert_allclose(planned(jnp.asarray(x)), wanted, rtol=1e-4, atol=1e-5)
        mapped = jax.jit(jax.vmap(planned))(jnp.stack([x, x]))
        np.testing.assert_allclose(mapped[1], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("density", "ran"), [(0.0, "coo"), (0.05, "coo"), (0.4, "ecr"), (0.9, "xla")])
def test_the_density_of_the_map_decides(monkeypatch: pytest.MonkeyPatch, density: float, ran: str) -> None:
    """Each implementation adds a number of its own, so that the result says which one it was."""
    model = Small()
    jsc.apply_plan(model, with_thresholds(calibrated(), conv=STEPS["conv"]))
    marks = {"coo": 1.0, "ecr": 2.0, "xla": 3.0}

    def marked(op: str, operands: Any, arguments: Any, implementation: str) -> jax.Array:
        del op, arguments
        return jnp.zeros_like(operands[0]) + marks[implementation]

    monkeypatch.setattr(layers.calls, "run", marked)
    x = np.zeros(512, np.float32)
    x[: round(density * 512)] = 1
    x = jnp.asarray(np.random.default_rng(0).permutation(x).reshape(2, 8, 8, 4))
    assert float(jax.jit(model.conv)(x)[0, 0, 0, 0]) == marks[ran]
    counts = jnp.array([[round(density * 512), 512]], jnp.int32)
    assert float(model.conv(x, nonzeros=counts)[0, 0, 0, 0]) == marks[ran]


def test_counts_of_the_result() -> None:
    model = Small()
    jsc.apply_plan(model, with_thresholds(calibrated(), conv=STEPS["conv"]))
    y, counts = model.conv(X, count_nonzeros=True)
    assert counts.shape == (64, 2)
    assert int(counts[:, 1].sum()) > 0
    assert y.shape == X.shape


def test_a_stored_map_is_read_where_it_can_be() -> None:
    model = Small()
    jsc.apply_plan(model, with_thresholds(calibrated(), conv=STEPS["conv"]))
    for density in (0.02, 0.3, 1.0):
        x = jnp.asarray(np.where(np.random.default_rng(0).random(X.shape) < density, 1, 0), jnp.float32)
        stored = jsc.CooStar.fromdense(x)
        with jax.default_matmul_precision("highest"):  # else a GPU's dense kernels are in TF32
            wanted = Small().conv(x)
            np.testing.assert_allclose(model.conv(stored), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("sparse", "method"), [("ecr", "adaptive"), ("coo", "coo")])
def test_a_gpu_chooses_without_the_host(monkeypatch: pytest.MonkeyPatch, sparse: str, method: str) -> None:
    monkeypatch.setattr(layers.calls.devices, "default_platform", lambda: "gpu")
    model = Small()
    made = with_thresholds(calibrated(), conv=(Threshold(0.5, sparse),))
    monkeypatch.setattr(jsc.Plan, "check_device", lambda *_: None)
    direct = [
        dataclasses.replace(layer, implementation="direct") if layer.call.op == "conv" else layer
        for layer in made.layers
    ]
    jsc.apply_plan(model, dataclasses.replace(made, layers=tuple(direct)))
    (equation,) = _calls(jax.make_jaxpr(model.conv)(X))
    config = equation.params["config"]
    assert (config.method, config.below) == (method, 0.5)
    np.testing.assert_allclose(model.conv(X), Small().conv(X), rtol=1e-2, atol=1e-2)


def _calls(jaxpr: Any) -> list[Any]:
    found = [each for each in jaxpr.eqns if each.primitive.name == "jsc_conv"]
    for each in jaxpr.eqns:
        for value in each.params.values():
            if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
                found += _calls(value)
    return found


def test_thresholds_survive_a_file(tmp_path: Path) -> None:
    made = with_thresholds(calibrated(), **STEPS)
    made.save(tmp_path / "plan.json")
    assert json.loads((tmp_path / "plan.json").read_text())["format"] == 3
    loaded = jsc.Plan.load(tmp_path / "plan.json")
    assert loaded == made
    assert loaded.layers[0].thresholds == STEPS["conv"]
    assert "coo from 90 % zeros, ecr from 40 % zeros, xla" in str(loaded)


def test_an_older_file_has_none(tmp_path: Path) -> None:
    made = calibrated()
    made.save(tmp_path / "plan.json")
    content = json.loads((tmp_path / "plan.json").read_text())
    for layer in content["layers"]:
        del layer["thresholds"]
    (tmp_path / "plan.json").write_text(json.dumps(content | {"format": 2}))
    assert jsc.Plan.load(tmp_path / "plan.json") == made
    (tmp_path / "plan.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"layers\[0\].thresholds is missing; it must be a list"):
        jsc.Plan.load(tmp_path / "plan.json")


@pytest.mark.parametrize(
    ("steps", "sentence"),
    [
        ([{"density": 0.0, "implementation": "ecr"}], r"thresholds\[0\].density=0.0 must be between 0 and 1"),
        ([{"density": 1.0, "implementation": "ecr"}], r"thresholds\[0\].density=1.0 must be between 0 and 1"),
        ([{"density": float("nan"), "implementation": "ecr"}], r"thresholds\[0\].density=nan must be between 0 and 1"),
        (
            [{"density": 0.5, "implementation": "coo"}, {"density": 0.5, "implementation": "ecr"}],
            r"thresholds\[1\].density=0.5 must be between thresholds\[0\].density=0.5 and 1",
        ),
        ([{"density": 0.5, "implementation": "pecr"}], r"thresholds\[0\].implementation='pecr' is not one that conv"),
        ([{"density": "0.5", "implementation": "ecr"}], r'thresholds\[0\].density="0.5" is not a number'),
        ([{"density": 0.5}], r"thresholds\[0\].implementation is missing; it must be a string"),
        ({}, r"thresholds=\{\} is not a list"),
    ],
)
def test_thresholds_that_are_none(steps: Any, sentence: str, tmp_path: Path) -> None:
    calibrated().save(tmp_path / "plan.json")
    content = json.loads((tmp_path / "plan.json").read_text())
    content["layers"][0]["thresholds"] = steps
    (tmp_path / "plan.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=sentence):
        jsc.Plan.load(tmp_path / "plan.json")


# --- where thresholds are from ---------------------------------------------------------------------------------------


def test_calibration_finds_thresholds_or_leaves_them() -> None:
    with pytest.raises(TypeError, match="thresholds=1 is not True or False"):
        jsc.calibrate(Small(), X, thresholds=1)  # type: ignore[arg-type]
    made = jsc.calibrate(Small(), X, repeats=1, thresholds=True)
    for layer in made.layers:
        assert len(layer.thresholds) <= 1
        for step in layer.thresholds:
            assert 0 < step.density < 1
            assert step.implementation in thresholds.SPARSE
            assert layer.implementation not in thresholds.SPARSE
    model = Small()
    jsc.apply_plan(model, made)
    np.testing.assert_allclose(model(X), Small()(X), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("density", [0.0, 0.05, 0.5, 0.8, 1.0])
def test_maps_of_other_densities(density: float) -> None:
    x = jnp.asarray(np.where(np.random.default_rng(0).random((1, 8, 8, 16)) < 0.5, 2.5, 0), jnp.bfloat16)
    made = np.asarray(thresholds.at_density(x, density))
    assert made.shape == x.shape
    assert made.dtype == x.dtype
    assert np.count_nonzero(made) == round(density * x.size)
    own = np.asarray(x) != 0
    assert (own & (made != 0)).sum() == min(np.count_nonzero(made), own.sum())  # x's own come first
    assert set(np.unique(made.astype(np.float32))) <= {0.0, 2.5}
    assert np.count_nonzero(thresholds.at_density(jnp.zeros(8), 0.5)) == 4


@pytest.mark.parametrize(
    ("sparse", "density"),
    [
        ([1, 2, 4, 8, 16, 32], 0.6),  # crosses 8 at the fourth of the densities
        ([1, 1, 1, 1, 1, 1], None),  # faster at any
        ([9, 9, 9, 9, 9, 9], None),  # slower at any
        ([7.9, 8, 8, 8, 8, 8.1], None),  # level
        ([1, 1, 1, 1, 1, 64], 0.9),
    ],
)
def test_the_threshold_of_times(sparse: list[float], density: float | None) -> None:
    times = [(d, 8.0, time) for d, time in zip(thresholds.DENSITIES, sparse, strict=True)]
    found, gain = thresholds._threshold(times)
    if density is None:
        assert found is None
        return
    assert found == pytest.approx(density, abs=0.11)
    assert gain > 0


MAP = np.random.default_rng(0).standard_normal((2, 9, 8, 6)).astype(np.float32)


class Layered(nnx.Module):
    def __init__(self) -> None:
        self.a = jsc.nnx.SparseConv(6, 4, (3, 3), rngs=nnx.Rngs(0))

    def __call__(self, x: Any, **counts: Any) -> Any:
        return self.a(x, **counts)


def test_counts_of_planned_layers_and_plans_in_memory_are_checked() -> None:
    plan = jsc.calibrate(Layered(), [MAP], repeats=1)
    first = dataclasses.replace(plan.layers[0], implementation="xla")  # whatever was the fastest here
    for steps in ((Threshold(0.5, "ecr"),), ()):
        model = Layered()
        chosen = dataclasses.replace(first, thresholds=steps)
        jsc.apply_plan(model, dataclasses.replace(plan, layers=(chosen,)))
        with pytest.raises(ValueError, match=r"nonzeros.shape=\(1, 3\) must be \[parts, 2\]"):
            model(MAP, nonzeros=jnp.zeros((1, 3), jnp.int32))
        with pytest.raises(TypeError, match=r"nonzeros.dtype=float32 must be int32"):
            model(MAP, nonzeros=jnp.zeros((1, 2)))
    for threshold in (Threshold(float("nan"), "ecr"), Threshold(-1, "ecr"), Threshold(0.5, "foo")):
        wrong = dataclasses.replace(first, thresholds=(threshold,))
        with pytest.raises(ValueError, match=r"layers\[0\] \('a'\): thresholds\[0\]"):
            jsc.apply_plan(Layered(), dataclasses.replace(plan, layers=(wrong,)))
    small = dataclasses.replace(first.call, kernel_shape=(2, 2, 6, 4))
    wrong = dataclasses.replace(first, call=small, candidates=(), thresholds=(Threshold(0.5, "coo"),))
    with pytest.raises(ValueError, match=r"thresholds\[0\].implementation='coo' cannot run: .* has a window of 2x2"):
        jsc.apply_plan(Layered(), dataclasses.replace(plan, layers=(wrong,)))
