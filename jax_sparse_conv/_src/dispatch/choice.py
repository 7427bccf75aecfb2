"""What `implementation=None` does on a GPU without a plan: a row of a table, else the models.

The models say how long XLA, the dense kernels and the sparse ones are expected to take (`model`), and the fastest runs.
Density is not known before the program runs, so the sparse kernels are taken at `ASSUMED_DENSITY`. With a branch of
XLA's the host would wait for the device. XLA has a start, so that what is level is its. A CPU's choice is in
`cpu_choice`.

The papers' own rule (OCPA, Xu et al. 2023, section 7: PECR where a pool follows, ECR elsewhere) is what naming the
implementations gives. The decision is made while a program is lowered, so it sees the images that `vmap` added.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os

from jax_sparse_conv._src import devices
from jax_sparse_conv._src.devices import Device
from jax_sparse_conv._src.dispatch import folders, model, table
from jax_sparse_conv._src.dispatch.planner import Candidate, Layer
from jax_sparse_conv._src.problem.workload import Workload

ASSUMED_DENSITY = 0.75
"""Of a feature map that nothing is known of, on a GPU: early layers have about 25 % zeros, and None shall not lose."""

_DTYPES = ("float32", "bfloat16", "float16")  # of the dense kernels
_LEAST_CHANNELS = 4  # output channels of a group that lists serve
MEASURED = (9, 0)
"""The compute capability whose times the shipped constants are fitted to."""

# "gpu choice" of model.json, chosen by hand from times:
#   margin           XLA's expected time over ours, from which on ours runs: the errors of both models, about 10 % each,
#                    lose little then; on a GPU that was not measured more is asked
#   averages first   what they are to gain over a pool behind, by both models: DenseNet-121 in bfloat16 at batch 1 lost
#                    with less
#   both sides       of "adaptive", in one call, cost about 2 us more than the one that runs would cost alone. Where
#                    "ecr" is slower by no more than that without zeros, it may run alone, and where it gains less on
#                    an empty map, "direct"
#   weights, bytes,  of a dense layer: cuBLAS streams its weights for some rows as fast as for one, and ours does not.
#   channels         With few weights XLA is faster, too, or with few input channels, which it has no second kernel for,
#                    unless weights are many; and where weights may still lie in the cache: from there cuBLAS reads
#                    them half again as fast
_RULES = model.shipped("gpu choice")


@dataclasses.dataclass(frozen=True)
class Choice:
    """What runs a convolution on a GPU.

    Attributes:
      method: "xla", "direct" or the sparse method.
      candidate: the kernel and its tile, where one is told.
      pools_apart: whether the pool behind it is XLA's.
    """

    method: str
    candidate: Candidate | None = None
    pools_apart: bool = False


XLA = Choice("xla")


def on_gpu(workload: Workload) -> Choice:
    """The fastest by the table of the GPU, else by the models; XLA where sizes are not known."""
    if workload.is_symbolic or not _computes(workload):
        return XLA
    if workload.method == "dense":
        return Choice("dense") if _is_faster_row(workload) else XLA
    row = table.decision(workload)
    if row is not None:
        return XLA if row.candidate is None else _of_candidate(row.candidate)
    return by_models(workload, devices.current())


def _computes(workload: Workload) -> bool:
    """Whether there is a result, which a window larger than the map has none of."""
    size = workload.geometry.out_size(workload.x_shape[1:3], workload.kernel_shape[1:3])
    return workload.method == "dense" or (workload.flops > 0 and min(size) > 0)


def _of_candidate(candidate: Candidate) -> Choice:
    return Choice("ecr" if candidate.family == "ecr" else "direct", candidate)


def by_models(workload: Workload, device: Device) -> Choice:
    """The fastest by the models of a GPU."""
    return _by_models(workload, device, folders.switch(), os.environ.get(folders.CACHE, ""))


@functools.lru_cache(maxsize=4096)
def _by_models(workload: Workload, device: Device, switch: str, cache: str) -> Choice:
    del switch, cache  # which constants there are
    plain = workload.unpooled()
    behind = 0.0 if plain is workload else model.pool_us(workload, device)
    margin = _RULES["margin" if device.capability == MEASURED else "margin, elsewhere"]
    choices = [(XLA, (model.xla_us(plain, device) + behind) / margin)]
    if _has_dense(workload, device):
        choices += _dense(workload, device)
    best, us = min(choices, key=lambda choice: choice[1])
    return Choice(workload.method) if _is_sparse(workload) and _sparse_us(workload, device, us) < us else best


def _sparse_us(workload: Workload, device: Device, least: float) -> float:
    """Of "ecr" and "pecr" the longer of two models: by density, and, if that is less than `least`, by tiles."""
    by_density = model.sparse_us(workload, device, ASSUMED_DENSITY)
    return by_density if by_density >= least else max(by_density, Layer.of(workload).ecr_us(device))


def _has_dense(workload: Workload, device: Device) -> bool:
    """Whether tensor cores take the products, those of float32 in parts where they are much faster than FFMA."""
    has_products = device.has_fast_tf32 if workload.is_precise else device.has_tf32
    return has_products and workload.dtype in _DTYPES


def _dense(workload: Workload, device: Device) -> list[tuple[Choice, float]]:
    """The dense kernel, with the pool in it and with XLA's behind it; of several kernels as of one for all images."""
    stacks = workload.kernel_shape[0]
    plain = workload.unpooled()
    alone = Layer.of(plain).dense(device)
    if plain is workload:
        return [(Choice("direct", alone.candidate if stacks == 1 else None), alone.us)]
    pooled = Layer.of(workload).dense(device)
    found = [(Choice("direct", pools_apart=True), alone.us + model.pool_us(workload, device))]
    return [*found, (Choice("direct"), pooled.us)] if pooled.pools else found


def _is_sparse(workload: Workload) -> bool:
    """Whether lists of non-zeros may pay.

    Not for images, nor where a list would serve too few channels. Rows of weights of 2 bytes at odd places are read one
    by one, which takes two to three times as long as the models say.
    """
    channels = workload.kernel_shape[4] // workload.geometry.groups
    is_odd = workload.itemsize == 2 and workload.kernel_shape[4] % 2 == 1
    return not workload.is_image and channels >= _LEAST_CHANNELS and not is_odd


def _is_faster_row(workload: Workload) -> bool:
    """Whether the product of a row with a matrix, whose rows are skipped, beats cuBLAS's."""
    if workload.x_shape[0] > workload.kernel_shape[0]:
        return False
    weights = math.prod(workload.kernel_shape[1:])
    is_cached = _RULES["bytes, cached"] <= weights * workload.itemsize <= _RULES["bytes, not cached"]
    is_long = workload.x_shape[3] >= _RULES["channels of a row, least"]
    least = _RULES["weights of a row, least" if is_long else "weights of a row, many"]
    return weights >= least and not is_cached


def pools_apart(workload: Workload) -> bool:
    """Whether "direct" has XLA's pool behind it, because its kernel takes none, or is slower with it."""
    if workload.is_symbolic or not _computes(workload) or not _has_dense(workload, devices.current()):
        return True
    return min(_dense(workload, devices.current()), key=lambda choice: choice[1])[0].pools_apart


def density_of_sparse(workload: Workload) -> float:
    """The density of x up to which the sparse CUDA kernel is expected to be as fast as "direct", for "adaptive".

    Infinite or 0 where one of them is to run whatever the density.
    """
    if workload.is_symbolic or not _computes(workload):
        return math.inf
    device, plain = devices.current(), workload.unpooled()
    direct = Layer.of(plain).dense(device).us
    empty, full = (model.sparse_us(plain, device, density) for density in (0.0, 1.0))
    both = _RULES["us of both sides"]
    if full - direct <= both:
        return math.inf if direct - empty > both else 0.0
    if direct - empty <= both:
        return 0.0
    return model.density_of((direct - empty - both) / (full - empty))


def prefers_averages(workload: Workload, platform: str | None) -> bool:
    """Whether an average pool is expected to be faster in front of a 1x1 convolution than behind it.

    On a CPU it is: DenseNet's transitions take 0.2 to 0.6 of the time, and 0.5 to 0.95 at 95 % zeros, of which averages
    have fewer.
    """
    if platform != "cuda":
        return platform == "cpu"
    if workload.is_symbolic or not _computes(workload) or workload.dtype not in _DTYPES:
        return False
    device, pool = devices.current(), workload.geometry.pool
    assert pool is not None
    size = workload.geometry.out_size(workload.x_shape[1:3], workload.kernel_shape[1:3])
    plain = workload.unpooled()
    small = dataclasses.replace(plain, x_shape=(plain.x_shape[0], *size, plain.x_shape[3]))
    first = dataclasses.replace(workload, kernel_shape=(*workload.kernel_shape[:4], workload.kernel_shape[3]))
    averages = model.pool_us(first, device) + _best_us(small, device)
    return _RULES["gain of averages first"] * averages < model.pool_us(workload, device) + _best_us(plain, device)


def _best_us(workload: Workload, device: Device) -> float:
    xla = model.xla_us(workload, device)
    return min(xla, Layer.of(workload).dense(device).us) if _has_dense(workload, device) else xla
