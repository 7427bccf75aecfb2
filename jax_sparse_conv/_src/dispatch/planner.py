"""What the CUDA kernels can take, as the native planners say (`cuda/ffi/planner.cc`); no GPU is needed.

A candidate is a kernel family and the numbers that cut a call into its tiles. The planners list the candidates of a
call and check the one that a custom call is told; no rule of theirs is repeated in Python.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from jax_sparse_conv._src import _native
from jax_sparse_conv._src.devices import Device
from jax_sparse_conv._src.dispatch import model
from jax_sparse_conv._src.problem.geometry import POOL_CODES, Geometry, Pool
from jax_sparse_conv._src.problem.workload import Workload

FAMILIES = {
    "model": 0,  # the planners' models choose
    "few_channels": 3,
    "splitk_channels": 6,
    "grouped": 5,
    "wgmma": 4,
    "mma": 2,
    "per_output": 0,
    "ecr": 7,
}
"""Kernel families by the number that `candidate` has for them, with how many numbers cut their tiles."""

_TILE = 7  # numbers of the attribute, behind the family

Numbers: TypeAlias = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A kernel that a call may have.

    Attributes:
      family: of `FAMILIES`.
      tile: what cuts the call, beside each planner in `cuda/dense_conv/plan/` and `cuda/sparse/ecr/plan.h`.
    """

    family: str
    tile: Numbers

    @property
    def attribute(self) -> np.ndarray:
        """As the custom call takes it, int64 [8]."""
        values = [list(FAMILIES).index(self.family), *self.tile]
        return np.asarray(values + [0] * (1 + _TILE - len(values)), np.int64)

    @classmethod
    def of(cls, family: str, tile: Sequence[int]) -> Candidate:
        """From a planner's answer, or from JSON.

        Raises:
          ValueError: an unknown family, or numbers that cannot be its tile.
        """
        if family not in FAMILIES:
            raise ValueError(f"family={family!r} is not one of {', '.join(map(repr, FAMILIES))}")
        numbers = tuple(int(number) for number in tile[: FAMILIES[family]])
        if len(numbers) != FAMILIES[family] or any(number < 0 for number in numbers) or any(tile[FAMILIES[family] :]):
            raise ValueError(
                f"tile={list(tile)} is not {FAMILIES[family]} numbers of 0 or more, as {family!r} has them"
            )
        return cls(family, numbers)


@dataclasses.dataclass(frozen=True)
class Rated:
    """A candidate and the microseconds that its family's model expects."""

    candidate: Candidate
    us: float


@dataclasses.dataclass(frozen=True)
class Dense:
    """The dense kernel that the models choose.

    Attributes:
      candidate: the kernel; "per_output" where no other fits.
      us: microseconds that the models expect; infinite where no other fits.
      pools: whether the kernel takes the pool behind the convolution.
    """

    candidate: Candidate
    us: float
    pools: bool


@dataclasses.dataclass(frozen=True)
class KernelGradient:
    """The plan of a kernel's gradient at HIGHEST (`cuda/training/kernel_gradient_plan.h`).

    Attributes:
      tile: what cuts the call, as its attribute `tile` has it.
      us: microseconds that the model expects.
      workspace_bytes: that the call takes.
    """

    tile: Numbers
    us: float
    workspace_bytes: int


@dataclasses.dataclass(frozen=True)
class Layer:
    """A convolution as the planners see it.

    Attributes:
      sizes: N, H, W, C, kh, kw, K, then rows and columns of strides, padding (low, high of H, then of W) and dilation,
        and groups.
      pool: rows and columns of its window, strides and padding, and 1 for a max pool or 2 for an average; or nothing.
      element_bytes: 2 or 4.
      precise: whether float32 is multiplied as float32.
      residual: whether a map is added.
    """

    sizes: Numbers
    pool: Numbers
    element_bytes: int
    precise: bool
    residual: bool = False

    @classmethod
    def of(cls, workload: Workload) -> Layer:
        """Of a convolution of known sizes by one kernel."""
        sizes, pool = numbers(workload.x_shape, workload.kernel_shape, workload.geometry)
        return cls(sizes, pool, workload.itemsize, workload.is_precise, workload.residual)

    @property
    def _numbers(self) -> Numbers:
        return *self.sizes, int(self.residual)

    def expected(
        self,
        candidates: Sequence[Candidate],
        device: Device,
        constants: Sequence[float] = (),
        *,
        any_build: bool = False,
    ) -> list[float]:
        """Microseconds that the models expect of candidates, 0 of one that does not fit.

        Args:
          candidates: of any family.
          device: the GPU.
          constants: of the models, in place of the device's.
          any_build: whether kernels count that this build has no code for.

        Raises:
          RuntimeError: this copy of the package is not built.
          ValueError: sizes that make no sense.
        """
        asked = described(device)
        if any_build:
            asked["warpgroups"] = device.takes_warpgroups
        if constants:
            asked["model"] = list(constants)
        attributes = [candidate.attribute.tolist() for candidate in candidates]
        found: list[float] = _native.planner().expected(
            self._numbers, self.pool, self.element_bytes, self.precise, attributes, asked
        )
        return found

    def model_group(self, candidate: Candidate, device: Device) -> tuple[str, str] | None:
        """The group and kind of `model.Model.kernels` that a candidate's model takes; None where it does not fit.

        Kernels that this build has no code for count. Errors as of `expected`.
        """
        asked = described(device) | {"warpgroups": device.takes_warpgroups}
        group, kind = _native.planner().model_group(
            self._numbers, self.pool, self.element_bytes, self.precise, candidate.attribute.tolist(), asked
        )
        return (group, kind) if group else None

    def candidates(self, device: Device, most: int = 8) -> list[Rated]:
        """What kernels can take on a GPU: at most so many of each family, by what its model expects.

        None for sizes beyond those that the planners know (`native/layer.cc`).

        Raises:
          RuntimeError: this copy of the package is not built.
        """
        asked = self._numbers, self.pool, self.element_bytes, self.precise, most, described(device)
        try:
            found = _native.planner().candidates(*asked)
        except ValueError:
            return []
        return [Rated(Candidate.of(family, tile), us) for family, tile, us in found]

    def dense(self, device: Device, in_chain: bool = False) -> Dense:
        """The dense kernel that the models choose, alone or in a chain; sizes and errors as of `candidates`."""
        asked = self._numbers, self.pool, self.element_bytes, self.precise, in_chain, described(device)
        try:
            family, tile, us, pools = _native.planner().direct(*asked)
        except ValueError:
            return Dense(Candidate("per_output", ()), math.inf, False)
        return Dense(Candidate.of(family, tile), us, pools)

    def why_not_in_chain(self, device: Device) -> str | None:
        """Why no kernel of a chain takes it on a GPU, or none would be a good one, or None.

        Raises:
          RuntimeError: this copy of the package is not built.
        """
        asked = self._numbers, self.pool, self.element_bytes, self.precise, described(device)
        return _native.planner().why_not_in_chain(*asked) or None

    def ecr_us(self, device: Device) -> float:
        """Microseconds that the model of ECR and PECR expects of its best tile, for x with as few zeros as `tune` has.

        Infinite where no tile fits; sizes and errors as of `candidates`.
        """
        asked = self._numbers, self.pool, self.element_bytes, self.precise, described(device)
        try:
            family, _, us, _ = _native.planner().sparse(*asked)
        except ValueError:
            return math.inf
        return math.inf if family == "per_output" else float(us)

    def kernel_gradients(self, device: Device, most: int = 1) -> list[KernelGradient]:
        """How the gradient of the layer's kernel may be cut, at most so many plans, the fastest by the model first.

        None for what no kernel of ours takes, and for sizes as of `candidates`, whose errors it has, too.
        """
        try:
            found = _native.planner().kernel_gradients(self._numbers, most, described(device))
        except ValueError:
            return []
        return [KernelGradient(*plan) for plan in found]


def numbers(x_shape: Sequence[int], kernel_shape: Sequence[int], geometry: Geometry) -> tuple[Numbers, Numbers]:
    """`Layer.sizes` and `Layer.pool` of x [N, H, W, C] and kernel [1, kh, kw, C / groups, K]."""
    windows = (*geometry.strides, *geometry.padding[0], *geometry.padding[1], *geometry.dilation)
    sizes = (*x_shape, *kernel_shape[1:3], kernel_shape[4], *windows, geometry.groups)
    pool = geometry.pool
    if pool is None:
        return sizes, ()
    return sizes, (*pool.window, *pool.strides, *pool.padding[0], *pool.padding[1], POOL_CODES[pool.kind])


def geometry_of(windows: Sequence[int], groups: int, pool: Sequence[int]) -> Geometry:
    """The inverse of `numbers`: of the last numbers of `Layer.sizes`, and of `Layer.pool`."""
    down, across, top, bottom, left, right, *dilation = windows
    behind = None
    if pool:
        kinds = {number: name for name, number in POOL_CODES.items() if name is not None}
        rows, columns, row_step, column_step, *pads, kind = pool
        behind = Pool(kinds[kind], (rows, columns), (row_step, column_step), ((pads[0], pads[1]), (pads[2], pads[3])))
    padding = (top, bottom), (left, right)
    return Geometry((down, across), padding, (dilation[0], dilation[1]), groups, behind)


def described(device: Device) -> dict[str, Any]:
    """A GPU as the planners take it, with the constants of their models."""
    return device.description() | {"model": model.of(device).of_planners}
