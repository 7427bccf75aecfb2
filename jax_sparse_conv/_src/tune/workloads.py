"""What to time: the layers of networks, or of a file, as calls."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jax_sparse_conv import models
from jax_sparse_conv._src import typed_json
from jax_sparse_conv._src.layers import layers
from jax_sparse_conv._src.layers.calls import Call
from jax_sparse_conv._src.problem import taps
from jax_sparse_conv.models import registry

KINDS = {
    "highest": ("float32", "highest"),
    "tf32": ("float32", "default"),
    "16bit": ("bfloat16", "default"),
}
"""Dtype and precision of what is timed for each kind of products of `dispatch.table`."""


class OneKey:
    """In the place of `nnx.Rngs` where a network is only traced, which its counter makes four times as long."""

    def params(self) -> jax.Array:
        return jax.random.key(0)


def of_networks(names: Sequence[str]) -> list[Call]:
    """The distinct layers of these networks on one image; no weights are made."""
    return list(dict.fromkeys(call for name in names for call in _traced(name)))


def _traced(name: str) -> list[Call]:
    network = registry.get(name)
    found: list[Call] = []

    def run(images: jax.Array) -> jax.Array:
        model = models.build(network.name, rngs=OneKey())
        models.fold_batch_norm(model)

        def observe(layer: Any, call: Call, operands: Any, arguments: Any) -> jax.Array:
            found.append(call)
            return call.function("xla")(*call.present(operands))

        with layers.observed(observe):
            return model(network.preprocess(images))

    jax.eval_shape(run, jax.ShapeDtypeStruct((1, network.input_size, network.input_size, 3), jnp.uint8))
    return found


def convolutions(calls: Sequence[Call]) -> list[Call]:
    """The distinct convolutions among calls, a pool behind one left out: what a GPU's table holds."""
    found = [call for call in calls if call.op != "dense"]
    return list(dict.fromkeys(replace(call, op="conv", geometry=call.geometry.without_pool()) for call in found))


def of_file(path: str | os.PathLike[str]) -> list[Call]:
    """Calls of a JSON file: a list of what `dataclasses.asdict` makes of a `Call`, as a plan has them.

    Raises:
      ValueError: a file that holds no calls; names the first entry that is wrong.
      OSError: the file cannot be read.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        calls = typed_json.read(tuple[Call, ...], content, "")
        for call in calls:
            call.check()
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)} holds no calls: {error}") from error
    return list(calls)


def expanded(calls: Sequence[Call], batches: Sequence[int] | None, kinds: Sequence[str] | None) -> Iterator[Call]:
    """The calls for every batch and kind of products; None is the calls' own. Of kernels the taps that are read."""
    for batch in (None,) if batches is None else batches:
        for kind in (None,) if kinds is None else kinds:
            for call in calls:
                images = call.x_shape[0] if batch is None else batch
                dtype, precision = (call.dtype, call.precision) if kind is None else KINDS[kind]
                shape = (images, *call.x_shape[1:])
                yield _with_taps_read(replace(call, x_shape=shape, dtype=dtype, precision=precision))


def _with_taps_read(call: Call) -> Call:
    """The call as operations run it, without the taps that meet nothing but padding."""
    if call.op == "dense":
        return call
    (rows, columns), geometry = taps.read(call.geometry, call.x_shape[1:3], call.kernel_shape)
    window = (rows.stop - rows.start, columns.stop - columns.start)
    return replace(call, kernel_shape=(*window, *call.kernel_shape[2:]), geometry=geometry)
