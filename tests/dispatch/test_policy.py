"""What may run for a call under `implementation=None`, whatever was measured: facts that no table changes.

What is chosen for the layers of all networks is in tests/golden.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import decisions
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from platforms import on_a_gpu

from jax_sparse_conv._src import _native
from jax_sparse_conv._src.devices import Device
from jax_sparse_conv._src.dispatch import model, planner
from jax_sparse_conv._src.dispatch.chain_tiles import key_of
from jax_sparse_conv._src.primitive import lowering
from jax_sparse_conv._src.primitive.primitives import Config
from jax_sparse_conv._src.problem.geometry import Geometry, Pool
from jax_sparse_conv._src.problem.workload import Workload

SAME = Geometry(padding=((1, 1), (1, 1)))
OF_PAIRS = Pool("max", (2, 2), (2, 2), ((0, 0), (0, 0)))
PAIRS = dataclasses.replace(SAME, pool=OF_PAIRS)
EXACT = (lax.Precision.HIGHEST,) * 2
KINDS = ((jnp.float32, EXACT), (jnp.float32, None), (jnp.bfloat16, None), (jnp.float16, None))
MAPS = ((1, 14, 256, 256), (1, 56, 64, 64), (8, 28, 128, 512), (32, 56, 128, 128), (128, 7, 512, 512))


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation with all kernels."""
    monkeypatch.setattr(_native, "why_missing", lambda *_: None)


def operands(
    images: Any, size: int, channels: int, out_channels: int, side: int = 3, groups: int = 1, dtype: Any = jnp.float32
) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    x = jax.ShapeDtypeStruct((images, size, size, channels), dtype)
    return x, jax.ShapeDtypeStruct((1, side, side, channels // groups, out_channels), dtype)


def runs(config: Config, of: tuple[Any, Any], platform: str = "cuda") -> str:
    """The implementation of a convolution without its pool; XLA's where it has none."""
    found = lowering.resolved(*of, config, platform)
    return "xla" if found is None else found.method


def chosen(geometry: Geometry = SAME, precision: Any = None, **fields: Any) -> Config:
    method = "ecr" if geometry.pool is None else "pecr"
    return Config(geometry, method, "relu", fallback=True, precision=precision, **fields)


def all_kinds() -> list[tuple[Config, tuple[Any, Any]]]:
    return [
        (chosen(precision=precision), operands(*sizes, side=side, dtype=dtype))
        for sizes, side, (dtype, precision) in itertools.product(MAPS, (1, 3), KINDS)
    ]


@pytest.mark.parametrize("capability", [(6, 1), (7, 0), (7, 5)])
def test_direct_wants_tensor_cores_that_take_the_type(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]
) -> None:
    on_a_gpu(monkeypatch, capability, has_warpgroups=False)
    assert "direct" not in {runs(*each) for each in all_kinds()}


def test_float32_in_parts_wants_tensor_cores_much_faster_than_ffma(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_gpu(monkeypatch, (8, 9), has_warpgroups=True)
    exact = [each for each in all_kinds() if each[0].precision == EXACT]
    assert "direct" not in {runs(*each) for each in exact}
    assert "direct" in {runs(*each) for each in all_kinds()}  # as TF32, and in 16 bits


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.parametrize(("dtype", "precision"), KINDS)
def test_images_have_no_zeros_to_skip(h200: Device, platform: str, dtype: Any, precision: Any) -> None:
    for images, channels in itertools.product((1, 8, 256), (1, 3)):
        found = runs(chosen(precision=precision), operands(images, 224, channels, 64, dtype=dtype), platform)
        is_paired = jnp.dtype(dtype) == jnp.bfloat16 and _native.cpu_multiplies_pairs()
        has_dense = platform == "cpu" and (jnp.dtype(dtype).itemsize > 2 or is_paired)  # which may skip nothing
        assert found in (("ecr",) if has_dense else ("xla",) if platform == "cpu" else ("xla", "direct"))


@pytest.mark.parametrize(("dtype", "precision"), KINDS)
def test_depthwise_layers_are_too_narrow_for_lists_on_a_gpu(h200: Device, dtype: Any, precision: Any) -> None:
    geometry = dataclasses.replace(SAME, groups=64)
    assert runs(chosen(geometry, precision), operands(1, 56, 64, 64, groups=64, dtype=dtype)) == "xla"


@pytest.mark.parametrize(("dtype", "precision"), KINDS)
@pytest.mark.parametrize("of", [(0, 14, 64, 64), (2, 14, 64, 0), (2, 2, 64, 64)], ids=str)
def test_nothing_to_compute_has_no_zeros_to_skip(h200: Device, of: Any, dtype: Any, precision: Any) -> None:
    geometry = Geometry() if of[1] == 2 else SAME
    assert runs(chosen(geometry, precision), operands(*of, dtype=dtype)) in ("xla", "direct")


def test_several_kernels_are_as_fast_as_one_but_are_told_no_tile(h200: Device) -> None:
    """As `vmap` over kernels has them."""
    x, kernel = operands(4, 14, 256, 256)
    several = jax.ShapeDtypeStruct((2, *kernel.shape[1:]), kernel.dtype)
    of_one, of_two = (lowering.resolved(x, each, chosen(precision=EXACT), "cuda") for each in (kernel, several))
    assert of_one is not None
    assert of_two is not None
    assert (of_one.method, of_two.method, of_two.candidate) == ("direct", "direct", None)
    assert of_one.candidate is not None


def test_sizes_beyond_what_the_planners_know_are_xlas(h200: Device) -> None:
    for pool in (None, OF_PAIRS):
        geometry = dataclasses.replace(SAME, pool=pool)
        assert runs(chosen(geometry), operands(1, 2**13 + 2, 8, 16, dtype=jnp.bfloat16)) == "xla"


def test_a_window_larger_than_the_map_is_xlas(h200: Device) -> None:
    pool = Pool("max", (5, 5), (1, 1), ((0, 0), (0, 0)))
    of = operands(1, 4, 64, 64)
    assert runs(chosen(Geometry()), operands(1, 2, 64, 64)) == "xla"
    assert not lowering._pools_apart(*of, chosen(dataclasses.replace(SAME, pool=pool)), "cuda")


def test_sizes_that_are_not_known_yet(h200: Device) -> None:
    """A GPU's kernels want a workspace of a known size; a CPU's native call looks at x when it runs."""
    (images,) = jax.export.symbolic_shape("n")
    of = operands(images, 14, 64, 64)
    assert runs(chosen(precision=EXACT), of, "cuda") == "xla"
    assert runs(chosen(precision=EXACT), of, "cpu") == "ecr"


def test_a_named_implementation_runs(h200: Device) -> None:
    for method, (_, of) in itertools.product(("ecr", "direct"), all_kinds()):
        assert runs(Config(SAME, method, "relu", fallback=False), of) == method


def test_overlapping_pools_cost_the_sparse_kernel_more(h200: Device) -> None:
    pool = Pool("max", (3, 3), (1, 1), ((1, 1), (1, 1)))
    shapes = (1, 28, 28, 256), (1, 3, 3, 256, 256)
    plain = Workload("ecr", *shapes, SAME, "float32", True)
    pooled = Workload("pecr", *shapes, dataclasses.replace(SAME, pool=pool), "float32", True)
    assert model.sparse_us(pooled, h200, 0.75) > model.sparse_us(plain, h200, 0.75)


# --- pools -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["direct", None])
def test_a_pool_inside_direct_is_lowered_as_one_call(h200: Device, implementation: str | None) -> None:
    method = "direct" if implementation else "pecr"
    config = Config(PAIRS, method, "relu", fallback=implementation is None)
    of = operands(1, 56, 128, 128, dtype=jnp.bfloat16)
    assert not lowering._pools_apart(*of, config, "cuda")
    found = lowering.resolved(*of, config, "cuda")
    assert found is not None
    assert (found.method, found.geometry) == ("direct", PAIRS)
    assert lowering._pools_apart(*of, config, "cpu") == (implementation == "direct")


def test_a_pool_behind_direct_is_xlas(h200: Device) -> None:
    """Unless "pecr" is named, or a native call of a CPU may be either."""
    pool = Pool("max", (3, 3), (2, 2), ((0, 0), (0, 0)))
    config, of = chosen(dataclasses.replace(SAME, pool=pool), EXACT), operands(1, 56, 128, 128)
    assert runs(dataclasses.replace(config, geometry=SAME, method="ecr"), of) == "direct"
    assert lowering._pools_apart(*of, config, "cuda")
    assert not lowering._pools_apart(*of, dataclasses.replace(config, fallback=False), "cuda")
    assert not lowering._pools_apart(*of, config, "cpu")


APART: dict[str, tuple[Geometry, dict[str, Any]]] = {
    "strides": (dataclasses.replace(PAIRS, strides=(2, 2)), {}),
    "window": (dataclasses.replace(SAME, pool=Pool("max", (3, 3), (2, 2), ((0, 0), (0, 0)))), {}),
    "groups": (dataclasses.replace(PAIRS, groups=2), {"groups": 2}),
    "1x1": (dataclasses.replace(PAIRS, padding=((0, 0), (0, 0))), {"side": 1}),
    "channels in no whole copies": (PAIRS, {"channels": 126}),
    "float64": (PAIRS, {"dtype": jnp.float64}),
}


@pytest.mark.parametrize("why", APART)
def test_pools_that_no_kernel_of_direct_takes(h200: Device, why: str) -> None:
    geometry, changes = APART[why]
    sizes = {"images": 1, "size": 56, "channels": 128, "out_channels": 128} | changes
    with jax.enable_x64(True):
        of = operands(**sizes)
    assert lowering._pools_apart(*of, Config(geometry, "direct", "relu", fallback=False), "cuda")


@pytest.mark.parametrize(
    ("capability", "has_warpgroups"), [((7, 5), True), ((8, 0), True), ((9, 0), False), ((10, 0), True)]
)
def test_pools_of_pairs_want_warpgroup_products(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], has_warpgroups: bool
) -> None:
    on_a_gpu(monkeypatch, capability, has_warpgroups=has_warpgroups)
    for dtype, precision in KINDS:
        config = Config(PAIRS, "direct", "relu", fallback=False, precision=precision)
        assert lowering._pools_apart(*operands(1, 56, 128, 128, dtype=dtype), config, "cuda")


@pytest.mark.parametrize(("dtype", "precision"), KINDS)
def test_the_kernel_takes_every_pool_that_is_left_to_it(h200: Device, dtype: Any, precision: Any) -> None:
    """Of all networks' layers, as the planner says."""
    taken = 0
    pooled = [call for call in decisions.calls() if call.geometry.pool is not None]
    for call, images in itertools.product(pooled, decisions.BATCHES):
        x = jax.ShapeDtypeStruct((images, *call.x_shape[1:]), dtype)
        kernel = jax.ShapeDtypeStruct((1, *call.kernel_shape), dtype)
        geometry = call.geometry
        config = Config(geometry, "direct", call.activation, fallback=False, precision=precision)
        if lowering._pools_apart(x, kernel, config, "cuda"):
            continue
        key = key_of(x.shape, kernel.shape, geometry)
        pool = (*key[16:], 1 if geometry.pool.kind == "max" else 2)
        asked = key[:16], pool, x.dtype.itemsize, precision == EXACT and dtype == jnp.float32, False
        *_, pools = _native.planner().direct(*asked, planner.described(h200))
        assert pools, (x.shape, kernel.shape, geometry)
        taken += 1
    assert taken
