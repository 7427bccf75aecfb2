"""Kernels packed once for the CPU's pixel loop, beside the kernel as it lies.

The loop (`cpu/loops/pixel_kernel.h`) reads slices of [channels, kh * kw, block] weights. From a kernel as it lies it
packs them in every call. That is a third to a half of a sparse layer with few pixels. Two ways spare it:

- A kernel that is a constant of a traced function, as in `jax.jit(lambda x: model(x))`, is packed during tracing and
  goes along with the call (`of_constant`). JAX arrays do not change, so the copy stays right.
- `pack` makes a `PackedKernel`, kernel and copy as one value. Operations take it in the kernel's place, as an argument
  of a jitted function too. Nothing but `pack` makes the pair, so that new weights have a new copy or none.

The other loops read the kernel as it lies, so a packed kernel takes twice its memory.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import export
from jax.custom_derivatives import SymbolicZero

from jax_sparse_conv._src import _native, devices
from jax_sparse_conv._src.primitive.derived import Derived
from jax_sparse_conv._src.problem import described
from jax_sparse_conv._src.problem.arrays import as_array
from jax_sparse_conv._src.problem.geometry import Geometry, positive_int

_MAX_BLOCK = 128
_LEAST_BLOCK = 16
_WINDOWS = ((3, 3), (1, 1))
_LARGE_WINDOWS = ((5, 5),)  # whose sums need 32 registers
READERS = ("ecr", "pecr")  # native methods with a pixel loop

# What layers that compute with their kernel first, such as those that standardize it, ask of an array.
_ARRAY_ATTRIBUTES = (
    *("T", "at", "astype", "copy", "flatten", "item", "max", "mean", "min", "prod", "ravel", "reshape", "squeeze"),
    *("std", "sum", "swapaxes", "tolist", "transpose", "var"),
)

_copies = Derived()  # of constant kernels, by groups


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("kernel", "packed"), meta_fields=("feature_group_count",)
)
@dataclasses.dataclass(frozen=True, eq=False)
class PackedKernel:
    """A kernel and its copy for the CPU's kernels, made by `pack`. A pytree that stands for the kernel.

    `conv`, `conv_pool` and `dense` take it in a kernel's place, inside and outside of `jit`. Everything else in JAX and
    NumPy takes it as the kernel. Derivatives by it are refused, because separate updates of kernel and copy would part
    them. Differentiate by `kernel`, and pack the result. What maps every element alike, such as a cast or a running
    mean, may be done to the pair. What treats the two arrays differently, such as noise, must be done to `kernel`.

    Attributes:
      kernel: [kh, kw, C / feature_group_count, K].
      packed: the same weights in the order of the CPU's kernels, or None where no kernel would read them.
      feature_group_count: what the operation must be called with.
    """

    kernel: jax.Array
    packed: jax.Array | None
    feature_group_count: int = 1

    def __repr__(self) -> str:
        """Without the values: what arrays there are."""
        copy = "no copy" if self.packed is None else "with a copy"
        kind = described.type_of(self.kernel)
        return f"PackedKernel({kind}, {copy}, feature_group_count={self.feature_group_count})"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.kernel.shape

    @property
    def dtype(self) -> Any:
        return self.kernel.dtype

    @property
    def ndim(self) -> int:
        return self.kernel.ndim

    @property
    def size(self) -> int:
        return self.kernel.size

    @property
    def nbytes(self) -> int:
        """Bytes of both parts."""
        return self.kernel.nbytes + (0 if self.packed is None else self.packed.nbytes)

    def __getattr__(self, name: str) -> Any:
        if name not in _ARRAY_ATTRIBUTES:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.__jax_array__(), name)

    def __jax_array__(self) -> jax.Array:
        kernel: jax.Array = plain(self)
        return kernel

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return np.array(self.kernel, dtype, copy=copy)

    def __getitem__(self, index: Any) -> jax.Array:
        return self.__jax_array__()[index]

    def __len__(self) -> int:
        return len(self.kernel)

    def __iter__(self) -> Iterator[jax.Array]:
        return iter(self.__jax_array__())


export.register_pytree_node_serialization(
    PackedKernel,
    serialized_name="jax_sparse_conv.PackedKernel",
    serialize_auxdata=lambda groups: str(groups[0]).encode(),
    deserialize_auxdata=lambda text: (int(text),),
)


def pack(kernel: jax.typing.ArrayLike | PackedKernel, *, feature_group_count: int = 1) -> PackedKernel:
    """The kernel with a copy of it in the order in which the CPU's kernels read weights, to be made once.

    It pays where weights are arguments of a jitted function and change seldom or never. Weights that are constants of a
    jitted function are packed during tracing anyway. Inside `jit` the copy is made where `pack` is called, such as in
    front of a `lax.scan`.

    Only float32 kernels on one CPU get a copy: those of 1x1, 3x3 and, with AVX-512 or on aarch64, 5x5. So do bfloat16
    ones of an even number of input channels where the CPU has AVX512-BF16; `implementation=None` reads those. They have
    16 output channels in a group or more. Calls with a stride of 1 read it, with AVX-512 those of 3x3 with strides of
    2, and 1x1 calls with any strides and no padding. For any other kernel or device the result holds the kernel alone,
    and runs as the kernel does. During tracing the device is not known. A traced kernel gets a copy where
    `jax.default_device`, or else the first device, is a CPU.

    Args:
      kernel: [kh, kw, C / feature_group_count, K], or [C, K] of a dense layer, which is read as it lies. A packed one
        is packed anew.
      feature_group_count: of the convolution.

    Returns:
      A `PackedKernel` for the `kernel` of `conv`, `conv_pool` or `dense`.

    Raises:
      TypeError: a kernel that is no array.
      ValueError: a kernel of another number of axes, or a feature_group_count that is not an int of at least 1 or does
        not divide K.
    """
    kernel = as_array("kernel", kernel)
    feature_group_count = positive_int("feature_group_count", feature_group_count)
    if kernel.ndim not in (2, 4):
        raise ValueError(
            f"kernel.shape={kernel.shape} has {kernel.ndim} dimensions; a kernel is "
            "[kh, kw, C / feature_group_count, K] or, of a dense layer, [C, K]"
        )
    if kernel.shape[-1] % feature_group_count:
        raise ValueError(f"feature_group_count={feature_group_count} does not divide K of kernel.shape={kernel.shape}")
    if not _has_copy(kernel, feature_group_count):
        return PackedKernel(kernel, None, feature_group_count)
    # A copy of constants, so that derivatives go through the kernel alone.
    return PackedKernel(kernel, _copy(jax.lax.stop_gradient(kernel), feature_group_count), feature_group_count)


def block_out_channels(kernel_shape: tuple[int, ...], groups: int, dtype: Any) -> int:
    """Output channels of a block, as `PackedBlock` of `native/call.cc`; kernel_shape is [kh, kw, C / groups, K]."""
    block = _LEAST_BLOCK
    if dtype == jnp.bfloat16 and kernel_shape[0] == 3 and kernel_shape[3] // groups > block:
        return 2 * block
    while kernel_shape[0] == 1 and block < min(_MAX_BLOCK, kernel_shape[3] // groups):
        block *= 2
    return block


def packed_shape(kernel_shape: tuple[int, ...], groups: int, dtype: Any = jnp.float32) -> tuple[int, ...]:
    """[groups, blocks, C / groups, kh * kw, block] of a kernel [kh, kw, C / groups, K].

    In bfloat16 channels are in pairs: [groups, blocks, C / groups / 2, kh * kw, 2 * block].
    """
    height, width, channels, out_channels = kernel_shape
    block, each = block_out_channels(kernel_shape, groups, dtype), _channels_together(dtype)
    return (groups, -(-(out_channels // groups) // block), channels // each, height * width, each * block)


def reordered(values: Any, groups: int) -> Any:
    """[kh, kw, C / groups, K] -> [groups, blocks, C / groups, kh * kw, block], the last block filled with zeros.

    In bfloat16 the two weights of a pair of channels lie side by side. By the module that the values belong to: a NumPy
    array stays one and is contiguous.
    """
    numpy: Any = np if isinstance(values, np.ndarray) else jnp
    height, width, channels, out_channels = values.shape
    shape = packed_shape(values.shape, groups, values.dtype)
    block, each, out_of_group = (
        block_out_channels(values.shape, groups, values.dtype),
        _channels_together(values.dtype),
        out_channels // groups,
    )
    split = values.reshape(height * width, channels, groups, out_of_group)
    padded = numpy.pad(split, ((0, 0), (0, 0), (0, 0), (0, shape[1] * block - out_of_group)))
    cut = padded.reshape(height * width, channels // each, each, groups, shape[1], block).transpose(3, 4, 1, 0, 5, 2)
    packed = cut.reshape(shape)
    return np.ascontiguousarray(packed) if numpy is np else packed


def _other(dtype: Any) -> Any:
    """The dtype whose copies are in another order."""
    return jnp.float32 if dtype == jnp.bfloat16 else jnp.bfloat16


def _channels_together(dtype: Any) -> int:
    """Input channels whose weights lie side by side."""
    return 2 if dtype == jnp.bfloat16 else 1


def restored(values: jax.Array, kernel_shape: tuple[int, ...]) -> jax.Array:
    """What `reordered` made of a kernel of one group, as a kernel [kh, kw, C, K] again."""
    height, width, channels, out_channels = kernel_shape
    each = _channels_together(values.dtype)
    apart = values[0].reshape(*values.shape[1:4], -1, each)  # [blocks, C / each, kh * kw, block, each]
    taps = apart.transpose(2, 1, 4, 0, 3).reshape(height * width, channels, -1)
    return taps[:, :, :out_channels].reshape(height, width, channels, out_channels)


def for_call(
    x: Any, kernel: jax.Array, given: PackedKernel | None, geometry: Geometry, method: str, *, may_be_dense: bool
) -> jax.Array | None:
    """The copy that goes along with a call, [groups, blocks, ...]: of its packed kernel or of a constant one.

    `may_be_dense` says whether the call may multiply zeros.

    Raises:
      ValueError: a packed kernel for another number of groups, or whose parts are not of one kernel.
    """
    if given is not None and given.feature_group_count != geometry.groups:
        raise ValueError(
            f"kernel is packed for feature_group_count={given.feature_group_count}, not {geometry.groups}; "
            f"jax_sparse_conv.pack(kernel, feature_group_count={geometry.groups}) packs it for this call"
        )
    if method not in READERS or not reads(kernel.shape, geometry) or not has_reader(kernel.dtype, may_be_dense):
        return None
    if given is None:
        return of_constant(x, kernel, geometry)
    if given.packed is None or given.packed.dtype != kernel.dtype:
        return None
    if given.packed.shape == packed_shape(kernel.shape, geometry.groups, _other(kernel.dtype)):
        return None  # it was cast
    expected = packed_shape(kernel.shape, geometry.groups, kernel.dtype)
    if given.packed.shape != expected:
        raise ValueError(
            f"the packed copy of kernel.shape={kernel.shape} has shape {given.packed.shape}, not {expected}; "
            "make packed kernels by jax_sparse_conv.pack, and slice or stack them before it"
        )
    return given.packed


def is_read(kernel_shape: tuple[int, ...], strides: Sequence[int], dilation: Sequence[int]) -> bool:
    """Whether the loops over pixels can run the convolution; kernel_shape is [kh, kw, C / groups, K]."""
    if tuple(strides) == (2, 2):
        return kernel_shape[:2] == (3, 3) and tuple(dilation) == (1, 1) and _native.cpu_isa() == "avx512"
    return _has_window(kernel_shape[:2]) and dilation[1] == 1 and tuple(strides) == (1, 1)


def reads(kernel_shape: tuple[int, ...], geometry: Geometry) -> bool:
    """As `is_read`, and for 1x1 convolutions with strides, which run as ones without."""
    strides = (1, 1) if geometry.reads_few_pixels(kernel_shape[:2]) else geometry.strides
    return is_read(kernel_shape, strides, geometry.dilation)


def has_reader(dtype: Any, may_be_dense: bool) -> bool:
    """Whether the loops of a dtype read copies; those of bfloat16 multiply the zero of a pair, too."""
    return bool(dtype == jnp.float32 or (dtype == jnp.bfloat16 and may_be_dense))


def _has_window(size: Sequence[int]) -> bool:
    return tuple(size) in _WINDOWS or (tuple(size) in _LARGE_WINDOWS and _native.cpu_has_many_registers())


def plain(kernel: Any) -> Any:
    """The kernel alone of a packed one, any other as it is. A derivative by a copy is refused from here on."""
    if not isinstance(kernel, PackedKernel):
        return kernel
    if not isinstance(kernel.packed, jax.core.Tracer):
        return kernel.kernel
    return _without_copy(kernel.kernel, kernel.packed)


def beside(kernel: jax.Array, before: jax.Array, given: Any) -> jax.Array | PackedKernel:
    """The kernel with the copy of `given` where it is what `plain(given)` was `before`, else the kernel alone."""
    if not isinstance(given, PackedKernel) or kernel is not before:
        return kernel
    return PackedKernel(kernel, given.packed, given.feature_group_count)


@jax.custom_jvp
def _without_copy(kernel: jax.Array, packed: jax.Array) -> jax.Array:
    del packed
    return kernel


def _without_copy_jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    if not isinstance(tangents[1], SymbolicZero):
        raise TypeError(
            "a derivative by a packed kernel was asked for, and an update by it would part the kernel and its copy; "
            "differentiate by its attribute `kernel`, or call jax_sparse_conv.nnx.unpack(model) first, and pack again"
        )
    return primals[0], tangents[0]


_without_copy.defjvp(_without_copy_jvp, symbolic_zeros=True)


def of_constant(x: Any, kernel: Any, geometry: Geometry) -> jax.Array | None:
    """The packed kernel where a call is traced with a constant kernel that the pixel loop could run, else None."""
    if not isinstance(x, jax.core.Tracer) or isinstance(kernel, jax.core.Tracer) or not isinstance(kernel, jax.Array):
        return None
    if not reads(kernel.shape, geometry) or not _has_copy(kernel, geometry.groups):
        return None
    return _copies.of(kernel, geometry.groups, lambda: _copy(kernel, geometry.groups))


def _has_copy(kernel: jax.Array, groups: int) -> bool:
    """Whether there are kernels here that would read a copy."""
    if not _native.cpu_isas() or kernel.ndim != 4 or not _is_on_one_cpu(kernel):
        return False
    is_paired = kernel.dtype == jnp.bfloat16 and kernel.shape[2] % 2 == 0 and _native.cpu_multiplies_pairs()
    if kernel.dtype != jnp.float32 and not is_paired:
        return False
    return _has_window(kernel.shape[:2]) and kernel.shape[3] // groups >= _LEAST_BLOCK


def _is_on_one_cpu(kernel: jax.Array) -> bool:
    """Whether it is; of one that is traced, whether the default device is a CPU."""
    if isinstance(kernel, jax.core.Tracer):
        return devices.default_platform() == "cpu"
    return kernel.is_fully_addressable and [device.platform for device in kernel.devices()] == ["cpu"]


def _copy(kernel: jax.Array, groups: int) -> jax.Array:
    """The packed kernel, where the kernel is."""
    if isinstance(kernel, jax.core.Tracer):
        return jnp.asarray(reordered(kernel, groups))
    # Not jnp.asarray, which `jax.linear_transpose` traces even where all else is computed.
    with jax.default_device(next(iter(kernel.devices()))):
        return jax.device_put(reordered(np.asarray(kernel), groups))
