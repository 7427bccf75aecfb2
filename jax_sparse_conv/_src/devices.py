"""Which device a computation is for, and what the models of this package know of a GPU.

During lowering JAX knows the devices: those of committed arrays, of `jax.default_device`, or of a mesh. `for_lowering`
makes the first of them that is a GPU of this process `current()`. Everything that depends on a GPU is chosen by it.
Before lowering, as where a kernel is packed during tracing, only `default()` is known.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import os
import re
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import numpy as np

from jax_sparse_conv._src import _native, environment

_GPU = "gpu"  # `jax.Device.platform` of CUDA devices
_FP32_LANES = {(7, 0): 64, (7, 5): 64, (8, 0): 64}  # of an SM; 128 in every other since
_TF32 = (8, 0)  # compute capability from which on there is TF32 ...
_CLUSTERS = (9, 0)  # ... and clusters of blocks
_WARPGROUPS = (9, 0)  # the one with warpgroup products that this package has code for
# Operations a cycle of an SM's tensor cores by compute capability: float32 as TF32, 16-bit types.
_TENSOR_CORES = {(8, 0): (1024, 2048), (9, 0): (2048, 4096), (10, 0): (2048, 8192), (10, 3): (2048, 8192)}
_TENSOR_CORES_ELSEWHERE = (256, 512)

CAPABILITY = "JSC_CAPABILITY"
"""Environment variable: "8.0" has a newer GPU look like one of that compute capability, without a table, for tests."""

_ordinal: contextvars.ContextVar[int | None] = contextvars.ContextVar("jax_sparse_conv_ordinal", default=None)
Rule = TypeVar("Rule", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True)
class Device:
    """What planners and models have to know of a GPU; by default an H200, for where there is none.

    Attributes:
      name: its kind, as JAX names it.
      multiprocessors: how many SMs there are.
      threads: resident threads of an SM.
      blocks: resident blocks of an SM.
      registers: 32-bit registers of an SM.
      shared_memory: bytes of an SM.
      block_shared_memory: bytes that one block may have.
      clock_hz: of the SMs.
      memory_bytes_per_second: bandwidth of device memory.
      lanes: float32 multiply-adds of an SM in one cycle.
      capability: compute capability.
      clusters: how many clusters of n blocks run at once, by n from 0 to 16, each block on an SM of its own. Zeros
        where there are no clusters, or no code for them.
      tensor_maps: whether the driver makes tensor maps for TMA.
    """

    name: str = "NVIDIA H200"
    multiprocessors: int = 132
    threads: int = 2048
    blocks: int = 32
    registers: int = 65536
    shared_memory: int = 233472
    block_shared_memory: int = 232448
    clock_hz: float = 1.98e9
    memory_bytes_per_second: float = 4.8e12
    lanes: int = 128
    capability: tuple[int, int] = (9, 0)
    clusters: tuple[int, ...] = (0, 132, 66, 39, 30, 22, 17, 15, 15, 7, 7, 7, 7, 7, 7, 7, 7)
    tensor_maps: bool = True

    @property
    def flops(self) -> float:
        """Floating-point operations a second, a multiply-add counted as two: the paper's comp_thr."""
        return 2.0 * self.multiprocessors * self.lanes * self.clock_hz

    @property
    def has_tf32(self) -> bool:
        """Whether tensor cores take float32, rounded to TF32."""
        return self.capability >= _TF32

    @property
    def has_fast_tf32(self) -> bool:
        """Whether they do so much faster than FFMA; the same list is in `cuda/core/device_info.cu`."""
        return self.capability in _TENSOR_CORES

    @property
    def has_clusters(self) -> bool:
        """Whether blocks of a cluster share memory, as from Hopper on, in code that is there for it."""
        return self.capability >= _CLUSTERS and self.clusters[1] > 0

    @property
    def takes_warpgroups(self) -> bool:
        """Whether it has Hopper's warpgroup products."""
        return self.capability == _WARPGROUPS and self.tensor_maps

    @property
    def has_warpgroups(self) -> bool:
        """Whether it has them, and this build code for them."""
        return self.takes_warpgroups and _native.has_warpgroups()

    def description(self) -> dict[str, Any]:
        """What the planners want to know of it (`cuda/ffi/planner.cc`)."""
        return {
            "multiprocessors": self.multiprocessors,
            "shared_memory": self.block_shared_memory,
            "shared_memory_sm": self.shared_memory,
            "tensor_maps": self.tensor_maps,
            "fast_tf32": self.has_fast_tf32,
            "warpgroups": self.has_warpgroups,
            "clusters": list(self.clusters),
            "clock_hz": self.clock_hz,
            "memory_bytes_per_second": self.memory_bytes_per_second,
        }

    def tensor_flops(self, dtype: str) -> float:
        """Operations a second of the tensor cores on "float32" as TF32 or on a 16-bit type."""
        if not self.has_tf32:
            return 0.0
        cycle = _TENSOR_CORES.get(self.capability, _TENSOR_CORES_ELSEWHERE)[0 if dtype == "float32" else 1]
        return float(cycle) * self.multiprocessors * self.clock_hz

    def dense_flops(self, dtype: str, exact: bool) -> float:
        """Operations a second on a dense convolution of this dtype; float32 as TF32 or exact.

        Exact products of float32 take one instruction, or three of the tensor cores.
        """
        tensor = self.tensor_flops(dtype)
        return max(self.flops, tensor / 3 if exact and dtype == "float32" else tensor)

    @classmethod
    @functools.lru_cache(maxsize=64)
    def of(cls, ordinal: int) -> Device:
        """The CUDA device of this ordinal.

        Raises:
          RuntimeError: there is no such device, or no CUDA extension.
          ValueError: JSC_CAPABILITY is no compute capability.
        """
        found = _native.device_properties(ordinal)
        named = {field.name: found[field.name] for field in dataclasses.fields(cls) if field.name in found}
        looks_like = os.environ.get(CAPABILITY, "")
        if looks_like:
            found["major"], found["minor"] = _capability(looks_like)
        return cls(
            **named,
            name="" if looks_like else _name(ordinal),
            clock_hz=found["clock_khz"] * 1e3,
            memory_bytes_per_second=2 * found["memory_clock_khz"] * 1e3 * found["memory_bus_bits"] / 8,
            lanes=_FP32_LANES.get((found["major"], found["minor"]), 128),
            capability=(found["major"], found["minor"]),
        )


def _capability(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)\.(\d)", text)
    if found is None:
        raise ValueError(f"{CAPABILITY}={text!r} is not a compute capability, such as 8.0")
    return int(found[1]), int(found[2])


def _name(ordinal: int) -> str:
    try:
        here = jax.local_devices(backend="cuda")
    except RuntimeError:
        return ""  # JAX has no GPU
    return next((str(each.device_kind) for each in here if (each.local_hardware_id or 0) == ordinal), "")


@dataclasses.dataclass(frozen=True)
class Cpu:
    """What times on a CPU depend on.

    Attributes:
      model: its name, as the system says it, and the numbers of its design.
      isa: the instruction set that the kernels use; "none" without them.
      threads: of XLA and the kernels, one for each core that this process may use.
    """

    model: str
    isa: str
    threads: int

    @property
    def slug(self) -> str:
        """Its name in file names, such as "cpu_amd_epyc_7b13_avx2_2_threads"."""
        named = re.sub(r"\((r|tm)\)", "", self.model.lower())
        return "_".join(["cpu", *re.findall(r"[a-z0-9]+", f"{named} {self.isa} {self.threads}"), "threads"])


def cpu() -> Cpu:
    """The CPU of this process."""
    return Cpu(environment.cpu_model(), _native.cpu_isa(), int(environment.cores()))


def default() -> jax.Device:
    """The device of computations on uncommitted arrays: `jax.default_device`'s, or the first one."""
    chosen: Any = getattr(jax.config, "jax_default_device", None)
    if chosen is None or isinstance(chosen, str):
        return jax.local_devices(backend=chosen)[0]
    device: jax.Device = chosen
    return device


def default_platform() -> str:
    """The platform of `default()`: "cpu", "gpu" or another."""
    return str(default().platform)


def for_lowering(rule: Rule) -> Rule:
    """A lowering rule that knows the GPU it is for, as `ordinal()`, `known()` and `current()`.

    It has float64 where an operand has it. XLA's partitioner lowers in threads that lack the caller's settings.
    """

    @functools.wraps(rule)
    def knowing(ctx: Any, *operands: Any, **parameters: Any) -> Any:
        is_wide = any(getattr(aval, "dtype", None) == np.float64 for aval in ctx.avals_in)
        with jax.enable_x64(True) if is_wide else contextlib.nullcontext():
            return placed(ctx, *operands, **parameters)

    def placed(ctx: Any, *operands: Any, **parameters: Any) -> Any:
        found = next(_ordinals_of(ctx), None)  # the first
        if found is None:  # another platform's device, or a rule inside one that knows
            return rule(ctx, *operands, **parameters)
        token = _ordinal.set(found)
        try:
            return rule(ctx, *operands, **parameters)
        finally:
            _ordinal.reset(token)

    return knowing  # type: ignore[return-value]


def ordinals(ctx: Any) -> tuple[int, ...]:
    """CUDA's numbers of the GPUs of this process that a lowering is for.

    None for an export, which others run, and under an abstract mesh, which names none.
    """
    return () if ctx.module_context.lowering_parameters.for_export else tuple(_ordinals_of(ctx))


def _ordinals_of(ctx: Any) -> Iterator[int]:
    """Of the GPUs of this process among the devices of a lowering's context."""
    axes = ctx.module_context.axis_context
    mesh = getattr(axes, "mesh", None)
    assigned = mesh.devices.flat if isinstance(mesh, jax.sharding.Mesh) else getattr(axes, "device_assignment", None)
    here = (d for d in assigned or () if d.platform == _GPU and d.process_index == jax.process_index())
    return (device.local_hardware_id or 0 for device in here)


def ordinal() -> int:
    """CUDA's number of the GPU that is lowered for, or of this process's first one where that is not known."""
    known = _ordinal.get()
    if known is not None:
        return known
    try:
        return jax.local_devices(backend="cuda")[0].local_hardware_id or 0
    except RuntimeError:
        return 0  # JAX has no GPU


def known() -> Device | None:
    """The GPU of `ordinal()`; None where there is none, as in an export."""
    try:
        return Device.of(ordinal())
    except RuntimeError:
        return None


def current() -> Device:
    """The GPU of `ordinal()`; the default `Device` where there is none."""
    return known() or Device()
