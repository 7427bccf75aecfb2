"""What runs for every layer of every network, as text: the content of the golden files beside this.

Nothing is computed and no GPU is asked: calls are found by tracing, and the host's planners know the GPUs by
description. `python tests/golden/decisions.py` writes the files anew; a change of them is read like any other change.
"""

from __future__ import annotations

import array
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
from flax import nnx

from benchmarks.common import zoo_layers
from benchmarks.common.as_on import as_on
from jax_sparse_conv import _cpu, models
from jax_sparse_conv._src import _native, devices, typed_json
from jax_sparse_conv._src.devices import Device
from jax_sparse_conv._src.dispatch import planner
from jax_sparse_conv._src.dispatch.chain_tiles import key_of
from jax_sparse_conv._src.layers.calls import Call
from jax_sparse_conv._src.primitive import custom_call, lowering
from jax_sparse_conv._src.primitive.primitives import Config
from jax_sparse_conv._src.tune.measure import bound
from jax_sparse_conv._src.tune.workloads import OneKey

FOLDER = Path(__file__).parent
CALLS = FOLDER / "calls.json"
BATCHES = (1, 8, 32, 128)
CHAIN_BATCHES = (1, 8)
CHAIN_NETWORKS = ("vgg19", "resnet18", "resnet50", "googlenet", "densenet121", "regnetx_400mf", "regnetx_16gf")
KINDS = {
    "highest": ("float32", "highest"),
    "default": ("float32", "default"),
    "bfloat16": ("bfloat16", "default"),
    "float16": ("float16", "default"),
}
H200 = Device()
H100 = dataclasses.replace(H200, name="NVIDIA H100 80GB HBM3", memory_bytes_per_second=3.35e12)
GPUS = {"h200": H200, "h100": H100}
NUMBERS = {"few_channels": 3, "splitk_channels": 6, "grouped": 5, "wgmma": 4, "mma": 2, "per_output": 0}  # of a tile
CPU_MACHINE = (48 << 10, 1 << 20, 64, 2)  # bytes of L1, L2 and a vector, threads
CPU_DENSITIES = (0.05, 0.3, 0.6, 1.0)


def files() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Every golden file's name, with its platform and the kinds that all have this content."""
    found: dict[str, tuple[str, tuple[str, ...]]] = {"cpu_float32.txt": ("cpu", ("highest", "default"))}
    found |= {f"cpu_{kind}.txt": ("cpu", (kind,)) for kind in ("bfloat16", "float16")}
    for platform in GPUS:
        found[f"{platform}_16bit.txt"] = (platform, ("bfloat16", "float16"))
    for gpu in GPUS:
        found |= {f"{gpu}_{kind}.txt": (gpu, (kind,)) for kind in ("highest", "default")}
    return found


def text_of(platform: str, kind: str) -> str:
    """The content of a golden file."""
    lines = list(_layers(platform, kind))
    if platform in GPUS:
        lines += ["", "# chains", *_chains(platform, kind)]
    return "\n".join(lines) + "\n"


# --- layers ----------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def calls() -> list[Call]:
    """The distinct calls of all networks on one image, as `CALLS` keeps them."""
    return list(typed_json.read(tuple[Call, ...], json.loads(CALLS.read_text(encoding="utf-8")), ""))


def traced_calls(names: Sequence[str]) -> list[Call]:
    """The distinct calls of these networks on one image, by tracing, which takes two minutes for all."""
    return [layer.call for layer in zoo_layers.layers_of(tuple(names), 1)]


def _layers(platform: str, kind: str) -> Iterator[str]:
    dtype, precision = KINDS[kind]
    with _with_pairs() if platform == "cpu" else as_on(GPUS[platform]):
        for call in calls():
            config, x, kernel, _ = bound(dataclasses.replace(call, dtype=dtype, precision=precision))
            on = "cpu" if platform == "cpu" else "cuda"
            found = [_decided(x.update(shape=(n, *x.shape[1:])), kernel, config, on) for n in BATCHES]
            yield f"{_named(call)}: {found[0] if len(set(found)) == 1 else ' | '.join(found)}"


def _with_pairs() -> contextlib.AbstractContextManager[Any]:
    """As if this processor multiplied pairs of bfloat16, whether it does or not."""
    return mock.patch.object(_native, "cpu_multiplies_pairs", return_value=True)


def _named(call: Call) -> str:
    geometry = call.geometry
    words = [f"{'x'.join(map(str, call.x_shape[1:]))} * {'x'.join(map(str, call.kernel_shape))}"]
    words += [f"/{geometry.strides}"] if geometry.strides != (1, 1) else []
    words += [f"g{geometry.groups}"] if geometry.groups > 1 else []
    words += [f"{geometry.pool.kind} pool {geometry.pool.window}"] if geometry.pool else []
    words += [name for name in ("bias", "residual") if getattr(call, name)]
    return " ".join([*words, call.activation or "linear"]).replace(", ", ",")


def _decided(x: Any, kernel: Any, config: Config, platform: str) -> str:
    if lowering.averages_first(x, kernel, config, platform):
        size = config.geometry.out_size(x.shape[1:3], kernel.shape[1:3])
        averaged = x.update(shape=(x.shape[0], *size, x.shape[3]))
        return "average first, " + _decided(averaged, kernel, lowering._unpooled(config), platform)
    if lowering.reads_few_pixels(x, kernel, config, platform):
        size = config.geometry.out_size(x.shape[1:3], kernel.shape[1:3])
        read = x.update(shape=(x.shape[0], *size, x.shape[3]))
        return "pixels read, " + _decided(read, kernel, lowering.without_strides(config), platform)
    if lowering._pools_apart(x, kernel, config, platform):
        return _decided(x, kernel, lowering._unpooled(config), platform) + ", XLA pools"
    chosen = lowering.resolved(x, kernel, config, platform)
    if chosen is None:
        return "xla"
    if chosen.method == "dense":
        return "dense" + ("" if chosen.below is None else f" below {chosen.below:.3g}")
    return _planned(x, kernel, chosen, platform)


def _planned(x: Any, kernel: Any, config: Config, platform: str) -> str:
    if config.candidate is not None:
        return _short(config.candidate.family, *config.candidate.tile)
    key = key_of(x.shape, kernel.shape, config.geometry)
    layer, pool = key[:16], list(key[16:])
    if pool and config.geometry.pool is not None:
        pool.append(1 if config.geometry.pool.kind == "max" else 2)
    itemsize, precise = x.dtype.itemsize, int(custom_call.attributes(config)["precision"]) == 2
    if platform == "cpu":
        below = "" if config.below is None else f" below {config.below:.3g}"
        pairs = str(x.dtype) == "bfloat16"
        plans = [_cpu.plan(layer, pool, 4, config.may_be_dense, d, CPU_MACHINE, pairs) for d in CPU_DENSITIES]
        return f"{config.method}{below} " + " ".join(_short(*plan) for plan in plans)
    asked = layer, pool, itemsize, precise
    if config.method == "direct":
        family, tile, _, pools = _native.planner().direct(*asked, False, planner.described(devices.current()))
        return _short(family, *tile[: NUMBERS[family]]) + (" with its pool" if pools else "")
    family, tile, *_ = _native.planner().sparse(*asked, planner.described(devices.current()))
    return f"{config.method} " + _short("lists", *tile)


def _short(name: str, *numbers: int) -> str:
    return name + "".join(f" {n}" if i == 0 else f",{n}" for i, n in enumerate(numbers))


# --- chains ----------------------------------------------------------------------------------------------------------


def _chains(platform: str, kind: str) -> Iterator[str]:
    """Of some networks the native calls of its program: chains with their layers' tiles, and what runs beside them."""
    for name in CHAIN_NETWORKS:
        for batch in CHAIN_BATCHES:
            yield f"{name} batch {batch}: {' '.join(_targets(name, batch, platform, kind))}"


def _targets(name: str, batch: int, platform: str, kind: str) -> Iterator[str]:
    dtype, precision = KINDS[kind]
    graph, state = _network(name)

    def run(state: Any, images: jax.Array) -> jax.Array:
        with jax.default_matmul_precision(precision):
            return nnx.merge(graph, state)(images)

    typed = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), state)
    size, channels = models.NETWORKS[name].input_size, 1 if name == "lenet5" else 3
    images = jax.ShapeDtypeStruct((batch, size, size, channels), dtype)
    with as_on(GPUS[platform]):
        text = jax.jit(run).trace(typed, images).lower(lowering_platforms=("cuda",)).as_text()
    found: dict[str, int] = {}
    for target, attributes in re.findall(r"custom_call @(jsc_\w+)\(.*?(\{.*)", text):
        described = _chain(attributes) if target == "jsc_chain" else target.removeprefix("jsc_")
        found[described] = found.get(described, 0) + 1
    for described, count in found.items():
        yield described if count == 1 else f"{count}*{described}"


def _chain(attributes: str) -> str:
    """A chain's layers with their tiles, equal ones behind each other counted, and a digest of what reads what."""
    layers, tiles = (_numbers(attributes, name) for name in ("layers", "tiles"))
    each = [_of_chain(layer, tile) for layer, tile in zip(_in(18, layers), _in(4, tiles), strict=True)]
    runs = [(what, len(list(same))) for what, same in itertools.groupby(each)]
    said = ", ".join(what if count == 1 else f"{what} x{count}" for what, count in runs)
    return f"chain({said}; {hashlib.sha256(repr(layers).encode()).hexdigest()[:8]})"


def _of_chain(layer: Sequence[int], tile: Sequence[int]) -> str:
    """A layer's kind and kernel, and its tile unless the model chooses it."""
    if layer[0]:
        return ("pool", "dense")[layer[0] - 1]
    height, width, stride, *_ = layer[6:]
    kernel = f"{height}x{width}" + (f"/{stride}" if stride > 1 else "")
    return kernel + (" " + ",".join(map(str, tile)) if any(tile) else "")


def _in(size: int, numbers: Sequence[int]) -> list[tuple[int, ...]]:
    return [tuple(numbers[at : at + size]) for at in range(0, len(numbers), size)]


def _numbers(attributes: str, name: str) -> list[int]:
    """An attribute of integers, which large ones are as hexadecimal digits, and equal ones one of them."""
    found = re.search(rf"{name} = dense<([^>]*)> : tensor<(\d+)xi64>", attributes)
    assert found, attributes[:300]
    if found[1].startswith('"0x'):
        return list(array.array("q", bytes.fromhex(found[1][3:-1])))
    numbers = [int(number) for number in found[1].strip("[]").split(",")]
    return numbers if len(numbers) > 1 else numbers * int(found[2])


@functools.cache
def _network(name: str) -> tuple[Any, Any]:
    def build() -> Any:
        model = models.build(name, rngs=OneKey())
        models.fold_batch_norm(model)
        return model

    return nnx.split(nnx.eval_shape(build))


def main() -> None:
    """Write the files that are named, or all."""
    os.environ["JSC_TABLES"] = "shipped"
    if "calls.json" in sys.argv[1:] or not CALLS.exists():
        rows = [json.dumps(dataclasses.asdict(call)) for call in traced_calls(tuple(models.NETWORKS))]
        CALLS.write_text("[\n" + ",\n".join(rows) + "\n]\n", encoding="utf-8")
    for name, (platform, kinds) in files().items():
        if not sys.argv[1:] or name in sys.argv[1:]:
            (FOLDER / name).write_text(text_of(platform, kinds[0]), encoding="utf-8")
            print(name)


if __name__ == "__main__":
    main()
