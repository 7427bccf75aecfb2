"""Which COO* kernel for which call: the analytical model of Xiang et al. 2022, section 3.5, fed by the device itself.

Three stages: enumerate every configuration (a row of `cpu/coo_variants.h` and execution parameters), drop those of low
occupancy, keep the share that moves least data, take the one whose estimated time is smallest. Nothing here runs on the
device or depends on values: the choice is made at trace time and travels with the call as an attribute.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence

import jax

from jax_sparse_conv import _native
from jax_sparse_conv.geometry import Geometry

DENSITY = 0.25
"""The share of non-zeros that a call is planned for where nothing else is known: the middle of real feature maps."""

_WARP = 32
_CHUNK = 32  # channels that a block lists at a time
_MAX_SPLITS = 16
_LEAST_OCCUPANCY = 0.5
_KEPT = 2 / 3
Attribute = tuple[int, int, int, int]
_FP32_LANES = {(7, 0): 64, (7, 5): 64, (8, 0): 64}  # of a multiprocessor; 128 in every other since


@dataclasses.dataclass(frozen=True)
class Device:
    """What the model has to know of a GPU; by default an H200, for programs that are compiled where there is none.

    Attributes:
      multiprocessors: how many there are.
      threads: resident threads of a multiprocessor.
      blocks: resident blocks of a multiprocessor.
      registers: 32-bit registers of a multiprocessor.
      shared_memory: bytes of a multiprocessor.
      block_shared_memory: bytes that one block may have.
      clock_hz: of the multiprocessors.
      memory_bytes_per_second: bandwidth of device memory.
      lanes: float32 multiply-adds of a multiprocessor in one cycle.
    """

    multiprocessors: int = 132
    threads: int = 2048
    blocks: int = 32
    registers: int = 65536
    shared_memory: int = 233472
    block_shared_memory: int = 232448
    clock_hz: float = 1.98e9
    memory_bytes_per_second: float = 4.8e12
    lanes: int = 128

    @property
    def flops(self) -> float:
        """Floating-point operations a second, a multiply-add counted as two: the paper's comp_thr."""
        return 2.0 * self.multiprocessors * self.lanes * self.clock_hz

    @classmethod
    def of(cls, ordinal: int) -> Device:
        """The CUDA device of this ordinal.

        Raises:
          RuntimeError: there is no such device, or no CUDA extension.
        """
        found = _native.device_properties(ordinal)
        named = {field.name: found[field.name] for field in dataclasses.fields(cls) if field.name in found}
        return cls(
            **named,
            clock_hz=found["clock_khz"] * 1e3,
            memory_bytes_per_second=2 * found["memory_clock_khz"] * 1e3 * found["memory_bus_bits"] / 8,
            lanes=_FP32_LANES.get((found["major"], found["minor"]), 128),
        )


@dataclasses.dataclass(frozen=True)
class Variant:
    """A row of `cpu/coo_variants.h`: a compiled micro-kernel.

    Attributes:
      index: its place in the table.
      kernel: rows and columns of the kernel, R = S.
      stride: of rows and columns.
      height: TH, results of a tile.
      width: TW.
      features: output channels of a thread.
      max_warps: of a block.
      min_blocks: blocks of `max_warps` that its registers leave room for on a multiprocessor.
    """

    index: int
    kernel: int
    stride: int
    height: int
    width: int
    features: int
    max_warps: int
    min_blocks: int

    @property
    def pixels(self) -> int:
        return self.height * self.width

    @property
    def taps(self) -> int:
        return self.kernel**2

    @property
    def positions(self) -> int:
        """Pixels of x that a tile reads, its halo included."""
        return ((self.height - 1) * self.stride + self.kernel) * ((self.width - 1) * self.stride + self.kernel)

    def covers(self, kernel_size: Sequence[int], geometry: Geometry) -> bool:
        """Whether it computes convolutions of this kernel, stride and dilation; a 1x1 kernel of any."""
        if tuple(kernel_size) != (self.kernel, self.kernel):
            return False
        return self.kernel == 1 or (geometry.strides == (self.stride, self.stride) and geometry.dilation == (1, 1))


@dataclasses.dataclass(frozen=True)
class CooCall:
    """A convolution as the model sees it.

    Attributes:
      images: N.
      height: Ho, results.
      width: Wo.
      channels: C of a group.
      features: K of a group.
      groups: how many.
      element_bytes: of x and kernel.
      density: share of non-zeros of x, the paper's rho.
    """

    images: int
    height: int
    width: int
    channels: int
    features: int
    groups: int = 1
    element_bytes: int = 4
    density: float = DENSITY

    @property
    def results(self) -> int:
        return self.images * self.height * self.width * self.features * self.groups


@dataclasses.dataclass(frozen=True)
class Configuration:
    """A variant and how it is launched.

    Attributes:
      variant: the row.
      feature_warps: warps of a block along output channels; with the variant's features the paper's block size in N.
      slices: warps that share the lists of a tile.
      splits: blocks that share the channels of a tile; C / splits is the paper's TC.
    """

    variant: Variant
    feature_warps: int
    slices: int
    splits: int

    @property
    def attribute(self) -> Attribute:
        """As the custom call takes it."""
        return self.variant.index, self.feature_warps, self.slices, self.splits

    @property
    def block_features(self) -> int:
        return _WARP * self.feature_warps * self.variant.features

    @property
    def block_threads(self) -> int:
        return _WARP * self.feature_warps * self.slices

    def tiles(self, call: CooCall) -> int:
        """Tiles of results of all images, groups and blocks of output channels: num_blk of eq. (3) without C / TC."""
        spatial = math.ceil(call.height / self.variant.height) * math.ceil(call.width / self.variant.width)
        return call.images * call.groups * spatial * math.ceil(call.features / self.block_features)

    def blocks(self, call: CooCall) -> int:
        """num_blk, eq. (3)."""
        return self.tiles(call) * self.splits

    def shared_bytes(self, call: CooCall) -> int:
        """Shared memory of a block, as `cuda/coo_plan.cc` counts it."""
        variant, warps = self.variant, self.feature_warps * self.slices
        stages = 2 * warps * variant.taps * _WARP * variant.features * call.element_bytes
        lists = _CHUNK * ((variant.positions + 2) | 1) * 8
        patch = variant.positions * _CHUNK * call.element_bytes
        counts = (warps + 1) * _CHUNK * 4
        return max(stages + lists + patch + counts, warps * variant.pixels * _WARP * variant.features * 4)

    def resident(self, call: CooCall, device: Device) -> int:
        """Blocks that fit on a multiprocessor at a time."""
        registers = device.registers // (self.variant.min_blocks * self.variant.max_warps * _WARP) // 8 * 8
        return min(
            device.blocks,
            device.threads // self.block_threads,
            device.shared_memory // (self.shared_bytes(call) + 1024),
            device.registers // (registers * self.block_threads),
        )

    def occupancy(self, call: CooCall, device: Device) -> float:
        """Share of a multiprocessor's threads that can be resident."""
        return self.resident(call, device) * self.block_threads / device.threads

    def data_movement(self, call: CooCall) -> float:
        """Bytes that multiprocessors read through the L2 cache: Table 2, with halos and every reader counted.

        Results are written once: partial sums meet within clusters.
        """
        variant = self.variant
        spatial = call.images * math.ceil(call.height / variant.height) * math.ceil(call.width / variant.width)
        feature_tiles = math.ceil(call.features / self.block_features)
        inputs = spatial * feature_tiles * variant.positions * call.channels * call.element_bytes
        kernel = spatial * variant.taps * call.channels * call.features * call.element_bytes
        return call.groups * (inputs + kernel)


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
    flops = 2 * variant.pixels * variant.taps * channels * configuration.block_features * call.density  # eq. (6)
    time_of_wave = at_once * flops / (device.flops * occupancy)  # eqs. (7) and (8)
    return time_of_wave * waves(configuration, call, device)  # eq. (9)


# --- the time that chooses -------------------------------------------------------------------------------------------
#
# Eq. (8) counts multiply-adds at the device's rate. At these sizes a wave is mostly something else: the jump and the
# latency of an entry, fetching a channel's weights, listing a chunk, bringing sums together. Cycles, fitted to
# times on an H200 by a development harness (benchmarks/NOTES.md); only their ratios matter.

_ENTRY_LATENCY = 110  # of an entry, whatever its multiply-adds
_ENTRY_ISSUE = 15  # instructions of an entry that are no multiply-adds
_STALL = 1.78  # cycles per instruction where warps hide each other's latency
_CHANNEL_LATENCY = 260  # until the weights of a channel are in registers
_CHANNEL_ISSUE = 52
_TAP_ISSUE = 4.8  # of it for each kernel position and four output channels of a thread
_CHUNK_CYCLES = 1900  # listing a chunk: barriers and the patch
_POSITION_LATENCY = 125  # of each position, shared by the warps
_POSITION_ISSUE = 35
_UNEVEN = 0.6  # channels by which the work of slices differs
_BLOCK_CYCLES = 3600  # begin and end of a block
_SUM_CYCLES = 6.3  # bringing together each sum of a thread, ...
_SLICE_CYCLES = 42  # ... each slice ...
_CLUSTER_CYCLES = (2200, 34)  # ... and the splits: once, and each
_CALL_CYCLES = 6600
_L2_BYTES_PER_CYCLE = 31  # of a multiprocessor
_OVERLAP = 0.3  # of the shorter of arithmetic and data movement, that shows


def estimated_time(configuration: Configuration, call: CooCall, device: Device) -> float:
    """Seconds of a call: eq. (9), the waves of eq. (4) times the time of one, with all that a wave does."""
    cycles = _CALL_CYCLES + waves(configuration, call, device) * _cycles_of_wave(configuration, call, device)
    moving = configuration.data_movement(call) / (_L2_BYTES_PER_CYCLE * device.multiprocessors)
    return (max(cycles, moving) + _OVERLAP * min(cycles, moving)) / device.clock_hz


def _cycles_of_wave(c: Configuration, call: CooCall, device: Device) -> float:
    variant = c.variant
    blocks = min(c.resident(call, device), math.ceil(c.blocks(call) / device.multiprocessors))
    warps = max(1.0, blocks * c.feature_warps * c.slices / 4)  # that share a scheduler
    channels = call.channels / c.splits
    positions = variant.positions * _share_inside(variant, call)
    active = 1 - (1 - call.density) ** positions  # channels with any entry in a tile
    multiply_adds = variant.pixels * variant.taps * variant.features / variant.positions
    entry = max(_ENTRY_LATENCY, warps * _STALL * (_ENTRY_ISSUE + multiply_adds))
    fetch = _CHANNEL_ISSUE + _TAP_ISSUE * variant.taps * max(1.0, variant.features / 4)
    channel = max(_CHANNEL_LATENCY, warps * fetch) + call.density * positions * entry
    listing = max(_POSITION_LATENCY, warps * _POSITION_ISSUE) * variant.positions / (c.feature_warps * c.slices)
    uneven = 1 + _UNEVEN * c.slices / max(min(_CHUNK, channels) * active, 1e-9)
    lists = math.ceil(channels / _CHUNK) * (_CHUNK_CYCLES + listing)
    finish = _BLOCK_CYCLES + _SUM_CYCLES * variant.pixels * variant.features + _SLICE_CYCLES * c.slices
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


def configurations(variants: Sequence[Variant], call: CooCall, device: Device) -> Iterator[Configuration]:
    """Every configuration of these variants that the kernel can run and that leaves no warp without work."""
    for variant in variants:
        warps = _WARP * variant.features
        for feature_warps in (1, 2, 4, 8):
            if feature_warps > 1 and warps * feature_warps // 2 >= call.features:
                continue
            for slices in (1, 2, 4, 8):
                if feature_warps * slices > variant.max_warps or slices > call.channels:
                    continue
                for splits in (1, 2, 4, 8, _MAX_SPLITS):
                    found = Configuration(variant, feature_warps, slices, splits)
                    if _can_run(found, call, device):
                        yield found


def _can_run(configuration: Configuration, call: CooCall, device: Device) -> bool:
    if configuration.shared_bytes(call) > device.block_shared_memory or configuration.blocks(call) >= 2**31:
        return False
    if configuration.splits == 1:
        return True
    few_blocks = configuration.blocks(call) <= 8 * device.multiprocessors
    return few_blocks and 8 * configuration.splits <= call.channels and call.results < 2**31


def choose(
    variants: Sequence[Variant],
    call: CooCall,
    device: Device,
    kept: float = _KEPT,
    time: Callable[[Configuration, CooCall, Device], float] = estimated_time,
) -> Configuration:
    """The configuration for a call: the paper's three stages.

    Occupancy counts against the best that any configuration reaches: sums in registers keep every one of them under
    half of the 2048 threads that today's multiprocessors hold. Of the rest, the `kept` share that moves least data
    stays (a third in the paper: that leaves the largest tiles only, which is right at high sparsity only;
    benchmarks/NOTES.md), and the least `time` is taken.
    """
    found = list(configurations(variants, call, device))
    best = max(c.occupancy(call, device) for c in found)
    found = [c for c in found if c.occupancy(call, device) >= _LEAST_OCCUPANCY * best]
    most = sorted(c.data_movement(call) for c in found)[math.ceil(kept * len(found)) - 1]
    return min((c for c in found if c.data_movement(call) <= most), key=lambda c: time(c, call, device))


def choose_as_published(variants: Sequence[Variant], call: CooCall, device: Device) -> Configuration:
    """The paper's own: a third of the configurations stays, and eqs. (4) to (9) alone choose. For comparison."""
    return choose(variants, call, device, 1 / 3, paper_time)


@functools.lru_cache(maxsize=1)
def variants() -> tuple[Variant, ...]:
    """The compiled variants; none where the package is not built."""
    return tuple(Variant(index, *row) for index, row in enumerate(_native.coo_variants()))


def why_not(kernel_shape: Sequence[int], geometry: Geometry) -> str | None:
    """Why no variant computes a convolution with kernel [kh, kw, ...], naming the argument, or None."""
    table = variants()
    size = tuple(kernel_shape[:2])
    if not table or any(variant.covers(size, geometry) for variant in table):
        return None
    sizes = sorted({variant.kernel for variant in table})
    if size not in {(kernel, kernel) for kernel in sizes}:
        choices = ", ".join(f"{kernel}x{kernel}" for kernel in sizes)
        return f"kernel.shape={tuple(kernel_shape)} has a window of {size[0]}x{size[1]}, and there are {choices}"
    if geometry.dilation != (1, 1):
        return f"kernel_dilation={geometry.dilation} is not 1"
    strides = sorted({variant.stride for variant in table if variant.kernel == size[0]})
    return f"strides={geometry.strides} is not one of {', '.join(str((s, s)) for s in strides)}"


def call_of(
    x_shape: Sequence[int],
    kernel_shape: Sequence[int],
    geometry: Geometry,
    element_bytes: int,
    density: float = DENSITY,
) -> CooCall:
    """x [N, H, W, C] and kernel [S, kh, kw, C / groups, K] as the model sees them; empty axes count as 1."""
    height, width = geometry.conv_size(x_shape[1:3], kernel_shape[1:3])
    return CooCall(
        images=max(1, x_shape[0]),
        height=max(1, height),
        width=max(1, width),
        channels=kernel_shape[3],
        features=max(1, kernel_shape[4] // geometry.groups),
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
    """The configuration for x [N, H, W, C] and kernel [S, kh, kw, C / groups, K] on this process's GPU."""
    covering = tuple(v for v in variants() if v.covers(kernel_shape[1:3], geometry))
    return _choose(covering, call_of(x_shape, kernel_shape, geometry, element_bytes, density), this_device())


_choose = functools.lru_cache(maxsize=4096)(choose)


@functools.lru_cache(maxsize=1)
def this_device() -> Device:
    """The first GPU of this process; the default `Device` where there is none, as in an export."""
    try:
        ordinal = jax.local_devices(backend="cuda")[0].local_hardware_id
        return Device.of(ordinal or 0)
    except RuntimeError:
        return Device()


def attribute_and_workspace(
    x: jax.core.ShapedArray, kernel: jax.core.ShapedArray, geometry: Geometry, forced: Sequence[int] | None
) -> tuple[tuple[int, ...], int]:
    """What the custom call on these operands takes: its attribute and the bytes of its workspace.

    `forced` is an attribute to take instead of the model's choice.
    """
    attribute = forced or for_operands(x.shape, kernel.shape, geometry, x.dtype.itemsize).attribute
    splits = attribute[3]
    results = x.shape[0] * math.prod(geometry.conv_size(x.shape[1:3], kernel.shape[1:3])) * kernel.shape[4]
    return tuple(attribute), 0 if splits == 1 else 4 * splits * results
