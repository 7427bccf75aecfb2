"""The models: microseconds that XLA and the package's kernels are expected to take on a GPU.

They choose where no table has a row. Their constants are in `model.json` beside this file, with the residuals of the
fit; `python -m jax_sparse_conv tune --fit` fits them to raw times. One file serves every GPU, since times are shares of
what a GPU's properties promise. A user's own GPU may have one in the user's cache folder. The models of the kernels are
in C++, beside each planner (`cuda/core/model.h`), because the planners choose tiles by them.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jax_sparse_conv._src.devices import Device
from jax_sparse_conv._src.dispatch import folders
from jax_sparse_conv._src.problem.geometry import Geometry
from jax_sparse_conv._src.problem.workload import Workload

SHIPPED = Path(__file__).with_name("model.json")
KINDS = ("highest", "tf32", "16bit")
"""Of products; bfloat16 and float16 take the same time."""
ALL = "all"
"""The kind of groups that do not differ by it."""

_FORMAT = 2
_TILE, _STEP = 128, 64  # results and output channels of a tile of cuDNN's, products of a step
_GROUP_CHANNELS = (4, 8, 16, 32, 64, 128, 256)  # of groups that cuDNN has kernels for
_FEW_CHANNELS = 4  # of an image
_SPECTRUM = 32  # rows or columns of a map that cuDNN multiplies as Fourier transforms
_COMPLEX = 8  # bytes of a complex number, and operations of a product of two that is added
_ENTRY = 2  # side, in pixels, of an entry of "ecr"'s lists, which is left out where all are zero
_LIST_CHANNELS = 32  # output channels of a group that a warp's lanes cover


@dataclasses.dataclass(frozen=True)
class Group:
    """Constants that belong together.

    Attributes:
      names: of the constants, in the order of the struct or function that has them.
      kinds: values by kind of products, all in that order.
      first: the values that a fit begins with and is drawn to, so that fitting again changes nothing.
    """

    names: tuple[str, ...]
    kinds: Mapping[str, tuple[float, ...]]
    first: Mapping[str, tuple[float, ...]]


@dataclasses.dataclass(frozen=True)
class Model:
    """All constants.

    Attributes:
      kernels: of the C++ planners, by family; their order is that of `cmake/model_header.py`.
      xla: of `xla_us`, by class of convolutions.
      others: of `sparse_us` and `pool_us`, of rules (`choice`, `cpu_choice`), of COO* and of the CPU's planners. In C++
        each has its name, as `cmake/model_header.py` makes it.
      fit: what fitted them: date, command, raw times, and residuals by group and kind.
    """

    kernels: Mapping[str, Group]
    xla: Mapping[str, Group]
    others: Mapping[str, Group]
    fit: Mapping[str, Any]

    @functools.cached_property
    def of_planners(self) -> list[float]:
        """The kernels' constants as `_planner` takes them."""
        return [value for group in self.kernels.values() for kind in group.kinds.values() for value in kind]


# --- what is expected ------------------------------------------------------------------------------------------------


def kind_of(workload: Workload) -> str:
    """Of `KINDS`."""
    return "16bit" if workload.itemsize == 2 else "highest" if workload.is_precise else "tf32"


def class_of(workload: Workload) -> str:
    """Of `Model.xla`: by which of XLA's kernels a convolution gets."""
    if workload.geometry.groups > 1:
        return "grouped" if workload.kernel_shape[3] in _GROUP_CHANNELS else "other_groups"
    if workload.x_shape[3] <= _FEW_CHANNELS:
        return "few_channels"
    if math.prod(workload.kernel_shape[1:3]) > 1:
        return "window"
    return "product" if max(workload.geometry.strides) == 1 else "strided_product"


def features(workload: Workload, device: Device) -> tuple[float, ...]:
    """What `xla_of` takes of a convolution: microseconds that the device's properties promise, and shares."""
    out_channels = workload.kernel_shape[4] // workload.geometry.groups
    tiles = [math.ceil(size / _TILE) * _TILE / size for size in (workload.pixels, out_channels)]
    flops = workload.flops / (device.flops if workload.is_precise else device.dense_flops(workload.dtype, False))
    is_window = math.prod(workload.kernel_shape[1:3]) > 1
    x_bytes = math.prod(workload.x_shape) * workload.itemsize if is_window else 0
    spectra, spectral_products = _spectra(workload)
    seconds = (
        flops,
        workload.products / device.clock_hz,
        workload.elements * workload.itemsize / device.memory_bytes_per_second,
        x_bytes / device.memory_bytes_per_second,
        _COMPLEX * spectra / device.memory_bytes_per_second,
        _COMPLEX * spectral_products / device.flops,
    )
    return *(1e6 * each for each in seconds), math.prod(tiles) - 1, _STEP / workload.products


def _spectra(workload: Workload) -> tuple[int, int]:
    """Complex numbers of the transforms of x, kernel and result, and products of these; 0 where cuDNN has none.

    It has them in float32, for windows that move by a pixel over small maps. Both sides of a transform are the power of
    2 that has room for the padded map. Half of it is kept, as x is real.
    """
    geometry, size = workload.geometry, workload.x_shape[1:3]
    moves_by_pixels = max(*geometry.strides, *geometry.dilation) == 1
    if not (workload.is_precise and class_of(workload) == "window" and moves_by_pixels and min(size) <= _SPECTRUM):
        return 0, 0
    padded = max(length + sum(pads) for length, pads in zip(size, geometry.padding, strict=True))
    side = 1 << max(padded - 1, 0).bit_length()
    kept = side * (side // 2 + 1)
    images, channels, out_channels = workload.x_shape[0], workload.x_shape[3], workload.kernel_shape[4]
    maps = images * channels + images * out_channels + channels * out_channels
    return kept * maps, kept * images * channels * out_channels


def xla_of(constants: Any, found: Any) -> Any:
    """Microseconds of XLA's convolution, of one or of arrays: the faster of cuDNN's two ways.

    The first is a matrix product. Several blocks may share the products of a result, whose parts are then added up.
    Where products are few that does not pay, and each takes longer. The second way is by Fourier transforms.

    Args:
      constants: of a class and kind: the floor; operations, as a multiple of the time that the peak promises; what
        tiles compute beyond the result; steps that are few; cycles of a product that nothing hides; bytes, as a
        multiple of the time that bandwidth promises; the same for x alone where windows read it several times; cycles
        of a product more where products are not shared; microseconds of sharing them; the floor with transforms, and
        their bytes as such a multiple.
      found: `features`.
    """
    floor, flops, tiles, depth, chain, memory, windows, alone, shared, spectra_floor, spectra = constants
    of_flops, of_chain, of_bytes, of_x, of_spectra, of_spectral_flops, of_tiles, of_depth = found
    work = flops * of_flops * (1 + tiles * of_tiles) * (1 + depth * of_depth)
    chained = chain * of_chain + np.minimum(alone * of_chain, shared)
    product = floor + chained + np.cbrt(work**3 + (memory * of_bytes) ** 3) + windows * of_x
    transformed = spectra_floor + np.cbrt((flops * of_spectral_flops) ** 3 + (spectra * of_spectra) ** 3)
    return np.where(np.asarray(of_spectra) > 0, np.minimum(product, transformed), product)


def xla_us(workload: Workload, device: Device) -> float:
    """Microseconds of XLA's convolution, without a pool."""
    constants = of(device).xla[class_of(workload)].kinds[kind_of(workload)]
    return float(xla_of(constants, features(workload, device)))


def pool_us(workload: Workload, device: Device) -> float:
    """Microseconds of XLA's pool behind a convolution."""
    return float(pool_of(of(device).others["pool"].kinds[ALL], pool_features(workload, device)))


def pool_features(workload: Workload, device: Device) -> tuple[float, float]:
    """What `pool_of` takes: microseconds of the maps' bytes, and of a cycle for each value that windows read again."""
    geometry, pool = workload.geometry, workload.geometry.pool
    assert pool is not None
    results = workload.x_shape[0] * math.prod(geometry.out_size(workload.x_shape[1:3], workload.kernel_shape[1:3]))
    channels = workload.kernel_shape[4]
    moved = (workload.pixels + results) * channels * workload.itemsize / device.memory_bytes_per_second
    overlaps = any(window > stride for window, stride in zip(pool.window, pool.strides, strict=True))
    read = results * channels * math.prod(pool.window) if overlaps else 0
    return 1e6 * moved, 1e6 * read / device.multiprocessors / device.clock_hz


def pool_of(constants: Any, found: Any) -> Any:
    """Microseconds of XLA's pool, of one or of arrays.

    Args:
      constants: the floor; bytes, as a multiple of the time that bandwidth promises; cycles of a multiprocessor for
        each value of windows that overlap, which XLA reads one by one.
      found: `pool_features`.
    """
    floor, memory, overlap = constants
    of_bytes, of_overlap = found
    return floor + memory * of_bytes + overlap * of_overlap


def sparse_us(workload: Workload, device: Device, density: float) -> float:
    """Microseconds of "ecr", or of "pecr" where there is a pool, for x of a density.

    Entries of the lists are 2x2 pixels, of which one is left out only where all four are zero: of density d,
    1 - (1 - d)^4 are listed, so the time falls slowly until few non-zeros are left, and then steeply. The constants are
    from 233 times at HIGHEST on an H200, of independent zeros (`benchmarks paper`, Figs. 9, 11, 12 and Table III): 11 %
    (rms). They are a floor, shares of what the device promises for what is listed and for making lists, cycles of a
    listed product that nothing hides, and bytes.
    """
    floor, sums, step, lists, memory = of(device).others["sparse"].kinds[ALL]
    group = workload.kernel_shape[4] // workload.geometry.groups
    size = workload.geometry.conv_size(workload.x_shape[1:3], workload.kernel_shape[1:3])
    entries = math.prod(math.ceil(length / _ENTRY) * _ENTRY / length for length in size)
    flops = workload.flops * entries * max(1.0, _LIST_CHANNELS / group) * _recomputed(workload.geometry)
    listed = 1 - (1 - density) ** _ENTRY**2
    seconds = listed * (sums * flops / device.flops + step * workload.products / device.clock_hz)
    seconds += lists * flops / device.flops + memory * _read_bytes(workload) / device.memory_bytes_per_second
    return floor + 1e6 * seconds


def density_of(listed: float) -> float:
    """The density of x of which so large a share of entries is listed."""
    return float(1 - (1 - listed) ** (1 / _ENTRY**2))


def _recomputed(geometry: Geometry) -> float:
    """How often PECR computes a result that several pooling windows share."""
    if geometry.pool is None:
        return 1.0
    pairs = zip(geometry.pool.window, geometry.pool.strides, strict=True)
    return math.prod(max(1.0, window / stride) for window, stride in pairs)


def _read_bytes(workload: Workload) -> float:
    """Of the pixels of x that windows reach, the kernel and the result."""
    sides = zip(workload.kernel_shape[1:3], workload.geometry.strides, strict=True)
    x = math.prod(workload.x_shape) * math.prod(min(1.0, side / stride) for side, stride in sides)
    return workload.itemsize * (x + math.prod(workload.kernel_shape) + workload.pixels * workload.kernel_shape[4])


# --- files -----------------------------------------------------------------------------------------------------------


def path_of_user(device: str) -> Path:
    """Where `tune --fit` writes the constants of a GPU."""
    return folders.cache_folder() / f"{folders.slug(device)}.model.json"


@functools.lru_cache(maxsize=8)
def shipped(group: str) -> Mapping[str, float]:
    """The shipped constants of a group of `Model.others`, by name: one that no GPU has of its own."""
    found = load(SHIPPED).others[group]
    return dict(zip(found.names, found.kinds[ALL], strict=True))


def of(device: Device) -> Model:
    """The constants for a GPU: the user's own, or the shipped ones."""
    return _of(device.name, folders.switch(), os.environ.get(folders.CACHE, ""))


@functools.lru_cache(maxsize=16)
def _of(device: str, switch: str, cache: str) -> Model:
    del cache  # what `path_of_user` reads
    own = path_of_user(device)
    return load(own if device and switch == "" and own.exists() else SHIPPED)


def forget() -> None:
    """Read the constants again at the next call: after they were written."""
    _of.cache_clear()


def load(path: str | os.PathLike[str]) -> Model:
    """Read constants.

    Raises:
      ValueError: a file that holds none; names the first thing that is wrong.
      OSError: the file cannot be read.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        if content["format"] != _FORMAT:
            raise ValueError(f"its format is {content['format']!r}, not {_FORMAT}")
        kernels, xla, others = ({name: _group(name, group) for name, group in content[part].items()} for part in _PARTS)
        return Model(kernels, xla, others, dict(content["fit"]))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{os.fspath(path)} holds no model: {type(error).__name__}: {error}") from error


_PARTS = ("kernels", "xla", "others")


def _group(name: str, content: Mapping[str, Any]) -> Group:
    names = tuple(map(str, content["names"]))
    kinds, first = (
        {str(kind): tuple(map(float, values)) for kind, values in content[part].items()} for part in ("kinds", "first")
    )
    for kind, values in (*kinds.items(), *first.items()):
        if len(values) != len(names) or min(values) < 0:
            raise ValueError(f"{name}, {kind}: {len(names)} constants of 0 or more are wanted, one for each name")
    if kinds.keys() != first.keys():
        raise ValueError(f"{name}: kinds and first are of {sorted(kinds)} and {sorted(first)}")
    return Group(names, kinds, first)


def save(path: str | os.PathLike[str], model: Model) -> None:
    """Write constants, a kind a line, so that changes can be read."""
    parts = []
    for part in _PARTS:
        groups = [f'  "{name}": {_text(group)}' for name, group in getattr(model, part).items()]
        parts.append(f' "{part}": {{\n' + ",\n".join(groups) + "\n }")
    fit = json.dumps(dict(model.fit), indent=1, sort_keys=True).replace("\n", "\n ")
    text = f'{{\n "format": {_FORMAT},\n "fit": {fit},\n' + ",\n".join(parts) + "\n}\n"
    folders.write_whole(path, text)


def _text(group: Group) -> str:
    parts = []
    for name, kinds in (("kinds", group.kinds), ("first", group.first)):
        lines = ",\n".join(f'    "{kind}": {_numbers(values)}' for kind, values in kinds.items())
        parts.append(f'   "{name}": {{\n{lines}\n   }}')
    return f'{{\n   "names": {json.dumps(list(group.names))},\n' + ",\n".join(parts) + "\n  }"


def _numbers(values: Sequence[float]) -> str:
    return json.dumps([float(f"{value:.4g}") for value in values])
