"""What a COO* call can be (Xiang et al. 2022, section 3): the compiled variants, and how each is launched.

A `Configuration` is one way to run a `CooCall`: a row of `native/coo_variants.h` and execution parameters. Which there
are for a call says the planner (`cuda/sparse/coo/plan.h`). What one takes of a GPU (threads, registers, shared memory)
and how many bytes it moves, as the paper counts them, is here. How long that takes, and which one a call gets, is in
`cost_model`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence

from jax_sparse_conv._src import _native
from jax_sparse_conv._src.devices import Device
from jax_sparse_conv._src.problem.geometry import Geometry, is_symbolic

DENSITY = 0.25
"""The share of non-zeros that a call is planned for where nothing else is known: the middle of real feature maps."""

_WARP = 32
Attribute = tuple[int, int, int, int]


@dataclasses.dataclass(frozen=True)
class Variant:
    """A row of `native/coo_variants.h`: a compiled micro-kernel.

    Attributes:
      index: its place in the table.
      kernel: rows and columns of the kernel, R = S.
      stride: of rows and columns.
      height: TH, results of a tile.
      width: TW.
      out_channels: K of a thread.
      max_warps: of a block.
      min_blocks: blocks of `max_warps` that its registers leave room for on an SM.
    """

    index: int
    kernel: int
    stride: int
    height: int
    width: int
    out_channels: int
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
        """Whether it computes convolutions of this kernel, stride and dilation."""
        return self.index in _covering(tuple(kernel_size), geometry.strides, geometry.dilation)


@dataclasses.dataclass(frozen=True)
class CooCall:
    """A convolution as the model sees it.

    Attributes:
      images: N.
      height: Ho, results.
      width: Wo.
      channels: C of a group.
      out_channels: K of a group.
      groups: how many.
      element_bytes: of x and kernel.
      density: share of non-zeros of x, the paper's rho.
    """

    images: int
    height: int
    width: int
    channels: int
    out_channels: int
    groups: int = 1
    element_bytes: int = 4
    density: float = DENSITY

    @property
    def results(self) -> int:
        return self.images * self.height * self.width * self.out_channels * self.groups


@dataclasses.dataclass(frozen=True)
class Configuration:
    """A variant and how it is launched.

    Attributes:
      variant: the row.
      out_channel_warps: warps of a block along output channels. With those of a thread they make the paper's block size
        in N.
      slices: warps that share the lists of a tile.
      splits: blocks that share the channels of a tile; C / splits is the paper's TC.
    """

    variant: Variant
    out_channel_warps: int
    slices: int
    splits: int

    @property
    def attribute(self) -> Attribute:
        """As the custom call takes it."""
        return self.variant.index, self.out_channel_warps, self.slices, self.splits

    @property
    def block_out_channels(self) -> int:
        return _WARP * self.out_channel_warps * self.variant.out_channels

    @property
    def block_threads(self) -> int:
        return _WARP * self.out_channel_warps * self.slices

    def tiles(self, call: CooCall) -> int:
        """Tiles of results of all images, groups and blocks of output channels: num_blk of eq. (3) without C / TC."""
        spatial = math.ceil(call.height / self.variant.height) * math.ceil(call.width / self.variant.width)
        return call.images * call.groups * spatial * math.ceil(call.out_channels / self.block_out_channels)

    def blocks(self, call: CooCall) -> int:
        """num_blk, eq. (3)."""
        return self.tiles(call) * self.splits

    def shared_bytes(self, call: CooCall) -> int:
        """Shared memory of a block."""
        return _shared_bytes(self.variant.index, self.out_channel_warps * self.slices, call.element_bytes)

    def resident(self, call: CooCall, device: Device) -> int:
        """Blocks that fit on an SM at a time."""
        registers = device.registers // (self.variant.min_blocks * self.variant.max_warps * _WARP) // 8 * 8
        return min(
            device.blocks,
            device.threads // self.block_threads,
            device.shared_memory // (self.shared_bytes(call) + 1024),
            device.registers // (registers * self.block_threads),
        )

    def occupancy(self, call: CooCall, device: Device) -> float:
        """Share of an SM's threads that can be resident."""
        return self.resident(call, device) * self.block_threads / device.threads

    def data_movement(self, call: CooCall) -> float:
        """Bytes that SMs read through the L2 cache: Table 2, with halos and every reader counted.

        Results are written once: a cluster reduction adds partial sums.
        """
        variant = self.variant
        spatial = call.images * math.ceil(call.height / variant.height) * math.ceil(call.width / variant.width)
        out_channel_tiles = math.ceil(call.out_channels / self.block_out_channels)
        inputs = spatial * out_channel_tiles * variant.positions * call.channels * call.element_bytes
        kernel = spatial * variant.taps * call.channels * call.out_channels * call.element_bytes
        return call.groups * (inputs + kernel)


# --- what there is ---------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def variants() -> tuple[Variant, ...]:
    """The compiled variants; none where the package is not built."""
    return tuple(Variant(index, *row) for index, row in enumerate(_native.coo_variants()))


def why_not(kernel_shape: Sequence[int], geometry: Geometry) -> str | None:
    """Why no variant computes a convolution with kernel [kh, kw, ...], naming the argument, or None."""
    table = variants()
    size = tuple(kernel_shape[:2])
    if not table or _covering(size, geometry.strides, geometry.dilation):
        return None
    sizes = sorted({variant.kernel for variant in table})
    if size not in {(kernel, kernel) for kernel in sizes}:
        choices = ", ".join(f"{kernel}x{kernel}" for kernel in sizes)
        return f"kernel.shape={tuple(kernel_shape)} has a window of {size[0]}x{size[1]}, and there are {choices}"
    if geometry.dilation != (1, 1):
        return f"kernel_dilation={geometry.dilation} is not 1"
    strides = sorted({variant.stride for variant in table if variant.kernel == size[0]})
    return f"strides={geometry.strides} is not one of {', '.join(str((s, s)) for s in strides)}"


def configurations(variants: Sequence[Variant], call: CooCall, device: Device) -> Iterator[Configuration]:
    """Every configuration of these variants that the kernel can run and that leaves no warp without work."""
    sizes = (call.images, call.height, call.width, call.channels, call.out_channels, call.groups)
    described = device.description()
    for variant in variants:
        for launched in _native.planner().coo_plans(variant.index, sizes, call.element_bytes, described):
            yield Configuration(variant, *launched)


@functools.lru_cache(maxsize=1024)
def _covering(size: tuple[int, ...], strides: tuple[int, int], dilation: tuple[int, int]) -> frozenset[int]:
    """Rows of the table that compute convolutions of a kernel's size, strides and dilation."""
    if is_symbolic(*size):
        return frozenset()
    return frozenset(_native.planner().coo_covering((*size, *strides, *dilation)))


@functools.lru_cache(maxsize=1024)
def _shared_bytes(variant: int, warps: int, element_bytes: int) -> int:
    return int(_native.planner().coo_shared_bytes(variant, warps, element_bytes))
