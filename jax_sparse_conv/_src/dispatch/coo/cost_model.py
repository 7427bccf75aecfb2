"""Which COO* kernel for which call: the analytical model of Xiang et al. 2022, section 3.5, fed by the device itself.

Three stages: enumerate every configuration (`configurations`), drop those of low occupancy, keep the share that
moves least data, take the one whose estimated time is smallest. Nothing here runs on the device or depends on values:
the choice is made at trace time and travels with the call as an attribute. Where the density of x decides much, several
configurations travel with it (`by_density`), and the device takes one.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence

from jax_sparse_conv._src import _native, devices
from jax_sparse_conv._src.devices import Device
from jax_sparse_conv._src.dispatch import model
from jax_sparse_conv._src.dispatch.coo.configurations import (
    DENSITY,
    Attribute,
    Configuration,
    CooCall,
    Variant,
    configurations,
    variants,
)
from jax_sparse_conv._src.problem.geometry import Geometry, is_symbolic

# The stages' shares are rules of the method, exact fractions, and not fitted: half of the best occupancy, and twice the
# paper's third.
_LEAST_OCCUPANCY = 0.5
_KEPT = 2 / 3


# --- the paper's time, eqs. (4) to (9) -------------------------------------------------------------------------------


def waves(configuration: Configuration, call: CooCall, device: Device) -> int:
    """Eq. (4) the right way up: rounds in which the device can run all blocks."""
    at_once = device.multiprocessors * device.threads * configuration.occupancy(call, device)
    return math.ceil(configuration.blocks(call) * configuration.block_threads / at_once)


def paper_time(configuration: Configuration, call: CooCall, device: Device) -> float:
    """Seconds by eqs. (4) to (9) alone, with R * S in eq. (6), which leaves it out."""
    occupancy = configuration.occupancy(call, device)
    at_once = device.multiprocessors * device.threads * occupancy / configuration.block_threads  # eq. (5)
    variant = configuration.variant
    channels = call.channels / configuration.splits
    flops = 2 * variant.pixels * variant.taps * channels * configuration.block_out_channels * call.density  # eq. (6)
    time_of_wave = at_once * flops / (device.flops * occupancy)  # eqs. (7) and (8)
    return time_of_wave * waves(configuration, call, device)  # eq. (9)


# --- the time that chooses -------------------------------------------------------------------------------------------
#
# Eq. (8) counts multiply-adds at the device's rate. At these sizes a wave is mostly something else: the jump and the
# latency of an entry, fetching a channel's weights, listing a chunk, bringing sums together. These are cycles, "coo
# times" of `dispatch/model.json`, fitted to times on an H200. Only their ratios matter.

_TIMES = model.shipped("coo times")
_ENTRY_LATENCY = _TIMES["entry latency"]  # of an entry, whatever its multiply-adds
_ENTRY_ISSUE = _TIMES["entry issue"]  # instructions of an entry that are no multiply-adds
_STALL = _TIMES["stall"]  # cycles per instruction where warps hide each other's latency
_CHANNEL_LATENCY = _TIMES["channel latency"]  # until the weights of a channel are in registers
_CHANNEL_ISSUE = _TIMES["channel issue"]
_TAP_ISSUE = _TIMES["tap issue"]  # of it for each kernel position and four output channels of a thread
_CHUNK_CYCLES = _TIMES["chunk"]  # listing a chunk: barriers and the patch
_POSITION_LATENCY = _TIMES["position latency"]  # of each position, shared by the warps
_POSITION_ISSUE = _TIMES["position issue"]
_UNEVEN = _TIMES["uneven"]  # channels by which the work of slices differs
_BLOCK_CYCLES = _TIMES["block"]  # begin and end of a block
_SUM_CYCLES = _TIMES["sum"]  # bringing together each sum of a thread, ...
_SLICE_CYCLES = _TIMES["slice"]  # ... each slice ...
_CLUSTER_CYCLES = (_TIMES["cluster"], _TIMES["cluster split"])  # ... and the splits: once, and each
_CALL_CYCLES = _TIMES["call"]
_L2_BYTES_PER_CYCLE = _TIMES["L2 bytes"]  # of an SM
_OVERLAP = _TIMES["overlap"]  # of the shorter of arithmetic and data movement, that shows


def estimated_time(configuration: Configuration, call: CooCall, device: Device) -> float:
    """Seconds of a call: eq. (9), the waves of eq. (4) times the time of one, with all that a wave does."""
    cycles = _CALL_CYCLES + waves(configuration, call, device) * _cycles_of_wave(configuration, call, device)
    moving = configuration.data_movement(call) / (_L2_BYTES_PER_CYCLE * device.multiprocessors)
    return (max(cycles, moving) + _OVERLAP * min(cycles, moving)) / device.clock_hz


def _cycles_of_wave(c: Configuration, call: CooCall, device: Device) -> float:
    variant = c.variant
    blocks = min(c.resident(call, device), math.ceil(c.blocks(call) / device.multiprocessors))
    warps = max(1.0, blocks * c.out_channel_warps * c.slices / 4)  # that share a scheduler
    channels = call.channels / c.splits
    positions = variant.positions * _share_inside(variant, call)
    active = 1 - (1 - call.density) ** positions  # channels with any entry in a tile
    multiply_adds = variant.pixels * variant.taps * variant.out_channels / variant.positions
    entry = max(_ENTRY_LATENCY, warps * _STALL * (_ENTRY_ISSUE + multiply_adds))
    fetch = _CHANNEL_ISSUE + _TAP_ISSUE * variant.taps * max(1.0, variant.out_channels / 4)
    channel = max(_CHANNEL_LATENCY, warps * fetch) + call.density * positions * entry
    listing = max(_POSITION_LATENCY, warps * _POSITION_ISSUE) * variant.positions / (c.out_channel_warps * c.slices)
    chunk = _native.planner().coo_chunk
    uneven = 1 + _UNEVEN * c.slices / max(min(chunk, channels) * active, 1e-9)
    lists = math.ceil(channels / chunk) * (_CHUNK_CYCLES + listing)
    finish = _BLOCK_CYCLES + _SUM_CYCLES * variant.pixels * variant.out_channels + _SLICE_CYCLES * c.slices
    if c.splits > 1:
        finish += _CLUSTER_CYCLES[0] + _CLUSTER_CYCLES[1] * c.splits
    return lists + channels * active / c.slices * uneven * channel + finish


def _share_inside(variant: Variant, call: CooCall) -> float:
    """Of the positions of all tiles, those that are pixels of the map or its halo."""
    step = variant.stride
    tiles = math.ceil(call.height / variant.height) * math.ceil(call.width / variant.width)
    pixels = (call.height * step + variant.kernel - 1) * (call.width * step + variant.kernel - 1)
    return min(1.0, pixels / (tiles * variant.positions))


# --- the choice ------------------------------------------------------------------------------------------------------


def choose(
    variants: Sequence[Variant],
    call: CooCall,
    device: Device,
    kept: float = _KEPT,
    time: Callable[[Configuration, CooCall, Device], float] = estimated_time,
) -> Configuration:
    """The configuration for a call: the paper's three stages.

    Occupancy counts against the best that any configuration reaches. Sums in registers keep every one of them under
    half of the 2048 threads that an SM holds. Of the rest, the `kept` share that moves least data stays. In the paper
    that is a third, which leaves the largest tiles only and is right at high sparsity only. Then the least `time` is
    taken.
    """
    return min(_kept(variants, call, device, kept), key=lambda c: time(c, call, device))


def _kept(variants: Sequence[Variant], call: CooCall, device: Device, kept: float) -> list[Configuration]:
    """What the first two stages leave, which does not depend on the density."""
    found = list(configurations(variants, call, device))
    best = max(c.occupancy(call, device) for c in found)
    found = [c for c in found if c.occupancy(call, device) >= _LEAST_OCCUPANCY * best]
    most = sorted(c.data_movement(call) for c in found)[math.ceil(kept * len(found)) - 1]
    return [c for c in found if c.data_movement(call) <= most]


def choose_as_published(variants: Sequence[Variant], call: CooCall, device: Device) -> Configuration:
    """The paper's own: a third of the configurations stays, and eqs. (4) to (9) alone choose. For comparison."""
    return choose(variants, call, device, 1 / 3, paper_time)


def call_of(
    x_shape: Sequence[int],
    kernel_shape: Sequence[int],
    geometry: Geometry,
    element_bytes: int,
    density: float = DENSITY,
) -> CooCall:
    """x [N, H, W, C] and kernel [S, kh, kw, C / groups, K] as the model sees them.

    Empty axes count as 1, and so does a symbolic number of images.
    """
    height, width = geometry.conv_size(x_shape[1:3], kernel_shape[1:3])
    return CooCall(
        images=1 if is_symbolic(x_shape[0]) else max(1, x_shape[0]),
        height=max(1, height),
        width=max(1, width),
        channels=kernel_shape[3],
        out_channels=max(1, kernel_shape[4] // geometry.groups),
        groups=geometry.groups,
        element_bytes=element_bytes,
        density=density,
    )


def for_operands(
    x_shape: Sequence[int],
    kernel_shape: Sequence[int],
    geometry: Geometry,
    element_bytes: int,
    density: float = DENSITY,
) -> Configuration:
    """The configuration for x [N, H, W, C] and kernel [S, kh, kw, C / groups, K] on the GPU that is lowered for."""
    covering = tuple(v for v in variants() if v.covers(kernel_shape[1:3], geometry))
    return _choose(covering, call_of(x_shape, kernel_shape, geometry, element_bytes, density), devices.current())


_choose = functools.lru_cache(maxsize=4096)(choose)


def workspace_bytes(
    x_shape: Sequence[int], kernel_shape: Sequence[int], geometry: Geometry, attributes: Sequence[Sequence[int]]
) -> int:
    """Bytes that every one of these configurations has enough of."""
    splits = max(attribute[3] for attribute in attributes)
    results = x_shape[0] * math.prod(geometry.conv_size(x_shape[1:3], kernel_shape[1:3])) * kernel_shape[4]
    return 0 if splits == 1 else 4 * splits * results


# --- several configurations, of which the running program takes one --------------------------------------------------

DENSITIES = tuple(round(0.1 + 0.05 * step, 2) for step in range(11))
"""What variants are planned for: the paper's list of sparsities, 0.9 to 0.4 in steps of 0.05 (section 3.4)."""

# A variant has to win by more than having it costs: the model's own error, each kernel that returns at once, and taking
# a sample of x where nobody has counted it. These are "coo variants" of `dispatch/model.json`, whose seconds are those
# that `benchmarks paper cusnn_density` measured on an H200.
_VARIANTS = "coo variants"


def most_variants() -> int:
    """How many variants a call may have (`cuda/sparse/coo/plan.h`)."""
    return int(_native.planner().most_coo_variants)


@dataclasses.dataclass(frozen=True)
class Variants:
    """The configurations of a call, and up to which density of x each of them but the last one runs."""

    configurations: tuple[Configuration, ...]
    densities: tuple[float, ...] = ()

    @property
    def attributes(self) -> list[Attribute]:
        return [configuration.attribute for configuration in self.configurations]


def by_density(
    x_shape: Sequence[int],
    kernel_shape: Sequence[int],
    geometry: Geometry,
    element_bytes: int,
    *,
    is_counted: bool = False,
) -> Variants:
    """The variants of a call for the density of the map that comes in (Xiang et al. 2022, sections 3.2 and 3.4).

    One where the model picks one tile for all densities of `DENSITIES`, or where others gain less than they cost. That
    one is planned for `DENSITY`. `is_counted`: the density is known without a sample of x.
    """
    covering = tuple(v for v in variants() if v.covers(kernel_shape[1:3], geometry))
    call = call_of(x_shape, kernel_shape, geometry, element_bytes)
    of = model.shipped(_VARIANTS)
    costs = of["seconds, closed kernel"] + (0.0 if is_counted else of["seconds, sample"])
    return _by_density(covering, call, devices.current(), of["gain, least"], costs)


@functools.lru_cache(maxsize=4096)
def _by_density(variants: Sequence[Variant], call: CooCall, device: Device, least: float, costs: float) -> Variants:
    calls = [dataclasses.replace(call, density=density) for density in DENSITIES]
    kept = _kept(variants, call, device, _KEPT)

    def fastest(call: CooCall) -> Configuration:
        return min(kept, key=lambda c: estimated_time(c, call, device))

    usual = fastest(call)

    def gain(configuration: Configuration, call: CooCall) -> float:
        """Seconds that it is expected to save; 0 where that is less than it costs."""
        of_usual, its = (estimated_time(c, call, device) for c in (usual, configuration))
        return of_usual - its if of_usual - its > costs and of_usual > least * its else 0.0

    gains = [(found, gain(found, each)) for found, each in zip(map(fastest, calls), calls, strict=True)]
    chosen = [found if gained > 0 else usual for found, gained in gains]
    while len(runs := [list(run) for _, run in itertools.groupby(range(len(chosen)), chosen.__getitem__)]) > 1:
        others = [run for run in runs if chosen[run[0]] != usual]
        if len(runs) <= most_variants():
            break
        for index in min(others, key=lambda run: max(gains[index][1] for index in run)):
            chosen[index] = usual
    ends = [round((DENSITIES[run[-1]] + DENSITIES[run[-1] + 1]) / 2, 3) for run in runs[:-1]]
    return Variants(tuple(chosen[run[0]] for run in runs), tuple(ends))
