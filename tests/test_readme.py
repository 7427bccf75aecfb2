"""The README's Python runs as it stands there, section by section, given what it takes for granted."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import blocks
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from networks import small_vgg

import jax_sparse_conv as jsc
from jax_sparse_conv import models

README = (Path(__file__).parents[1] / "README.md").read_text("utf-8")
SECTIONS = re.findall(r"^### ([^\n]+)\n(.*?)(?=^##)", README, re.MULTILINE | re.DOTALL)
CODE = {
    title: found for title, text in SECTIONS if (found := re.findall(r"^```python\n(.*?)^```", text, re.M | re.DOTALL))
}


def operations() -> dict[str, Any]:
    def kernel(seed: int) -> jax.Array:
        return 0.02 * jax.random.normal(jax.random.key(seed), (3, 3, 256, 256))

    shortcut = jnp.ones((1, 14, 14, 256))
    rows, matrix = jax.nn.relu(shortcut[0, 0, :2]), kernel(2)[0, 0]
    given = {"bias": jnp.zeros(256), "shortcut": shortcut, "rows": rows, "matrix": matrix}
    return given | {"first": kernel(3), "second": kernel(4)}


def network() -> dict[str, Any]:
    images = jax.random.normal(jax.random.key(0), (1, 32, 32, 3))
    model = small_vgg()
    return {"rngs": nnx.Rngs(0), "model": model, "images": images, "batches": [images], "x": images}


def chain() -> dict[str, Any]:
    kernel = 0.1 * jax.random.normal(jax.random.key(0), (3, 3, 3, 3))
    return network() | {"function": lambda x: jsc.conv(jsc.conv(x, kernel, activation="relu"), kernel)}


def convolution() -> dict[str, Any]:
    model = jsc.nnx.SparseConv(32, 32, (3, 3), rngs=nnx.Rngs(0))
    return {"x": jnp.ones((1, 7, 7, 32)), "kernel": jnp.ones((3, 3, 32, 32)), "model": model}


def dense_block() -> dict[str, Any]:
    block = blocks.Block("a small one", (1, 8, 8, 64), 2)
    x, layers = blocks.values(block, jnp.float32)
    transition = blocks.transition_values(block, jnp.float32)
    model = convolution()["model"]
    parameters = [tuple(layer) for layer in layers]
    scale, shift, kernel = transition
    return {"x": x, "parameters": parameters, "scale": scale, "shift": shift, "kernel": kernel, "model": model}


GIVEN: dict[str, Callable[[], dict[str, Any]]] = {
    "Operations": operations,
    "In Flax": network,
    "Plans": network,
    "Weights, packed": convolution,
    "Chains of layers as one call": chain,
    "Dense blocks": dense_block,
}


@pytest.mark.parametrize("title", GIVEN)
def test_it_runs(title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a plan is saved
    monkeypatch.setattr(models, "vgg19", lambda rngs: small_vgg())  # the other takes seconds to build
    names: dict[str, Any] = {"jax": jax, "jsc": jsc, **GIVEN[title]()}
    for code in CODE[title]:
        exec(compile(code, f"README.md, {title}", "exec"), names)
    results = [names[name] for name in ("y", "z", "logits", "plan") if name in names]
    assert results
    assert all(bool(jnp.isfinite(result).all()) for result in results if isinstance(result, jax.Array))


def test_no_section_with_python_is_left_out() -> None:
    assert set(CODE) == set(GIVEN)
