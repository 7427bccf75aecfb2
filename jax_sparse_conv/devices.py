"""What the models of this package know of a GPU."""

from __future__ import annotations

import dataclasses
import functools

import jax

from jax_sparse_conv import _native

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


@functools.lru_cache(maxsize=1)
def this_device() -> Device:
    """The first GPU of this process; the default `Device` where there is none, as in an export."""
    try:
        ordinal = jax.local_devices(backend="cuda")[0].local_hardware_id
        return Device.of(ordinal or 0)
    except RuntimeError:
        return Device()
