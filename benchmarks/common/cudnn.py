"""cuDNN's convolution by a named algorithm, through ctypes: XLA picks one itself and cannot be told which.

The library is the one that JAX has loaded, and buffers are JAX's arrays. Layouts are cuDNN's own, NCHW and KCRS,
because GEMM and FFT_TILING take no other. The mathematics is float32's (CUDNN_FMA_MATH), so no TF32.
"""

from __future__ import annotations

import ctypes
import functools
import glob
import importlib.util
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.paper.cusparse import padding_of
from benchmarks.paper.layers import PaperLayer

ALGORITHMS = {"GEMM": 2, "IMPLICIT_GEMM": 0, "FFT_TILING": 5}
"""cudnnConvolutionFwdAlgo_t of the algorithms that Xu et al. compare with, beside the fastest of all."""

_FLOAT, _NCHW, _CROSS_CORRELATION, _FMA_MATH, _THREAD_LOCAL = 0, 0, 1, 3, 1
_CALLS = 16  # in one graph
_WARM_UP = 2
_MAPS = Path("/proc/self/maps")


class Library:
    """cuDNN and the CUDA runtime, with a handle on a stream of its own.

    Raises:
      ValueError: one of the two is not here, or cuDNN has no GPU.
    """

    def __init__(self, cudnn: Any = None, cudart: Any = None) -> None:
        self._cudnn, self._cudart = cudnn or _loaded("libcudnn"), cudart or _loaded("libcudart")
        self.handle, self.stream = ctypes.c_void_p(), ctypes.c_void_p()
        self.cuda("cudaStreamCreate", ctypes.byref(self.stream))
        self.call("cudnnCreate", ctypes.byref(self.handle))
        self.call("cudnnSetStream", self.handle, self.stream)

    def version(self) -> int:
        return int(self._cudnn.cudnnGetVersion())

    def call(self, name: str, *arguments: Any) -> None:
        """A function of cuDNN; a ValueError with its status where that is not 0."""
        status = getattr(self._cudnn, name)(*arguments)
        if status:
            raise ValueError(f"{name}: cuDNN's status {status}")

    def cuda(self, name: str, *arguments: Any) -> None:
        """The same of the CUDA runtime."""
        status = getattr(self._cudart, name)(*arguments)
        if status:
            raise ValueError(f"{name}: CUDA's error {status}")

    def made(self, kind: str) -> ctypes.c_void_p:
        """A new descriptor, which stays until the process ends."""
        descriptor = ctypes.c_void_p()
        self.call(f"cudnnCreate{kind}Descriptor", ctypes.byref(descriptor))
        return descriptor


class Convolution:
    """One layer's convolution, without bias and activation, by one algorithm.

    Args:
      library: of which process.
      layer: strides, padding and groups; padding that differs between the sides is added to x before.
      algorithm: a value of `ALGORITHMS`.
      xs: maps [N, H, W, C] that calls take in turn.
      kernel: [kh, kw, C / groups, K].

    Raises:
      ValueError: cuDNN does not have the algorithm for this layer.
    """

    def __init__(
        self, library: Library, layer: PaperLayer, algorithm: int, xs: Sequence[jax.Array], kernel: jax.Array
    ) -> None:
        low, high = padding_of(layer)
        pad, extra = (low, 0) if low == high else (0, 1)
        widths = ((0, 0), *((low * extra, high * extra),) * 2, (0, 0))
        self._xs = [jnp.transpose(jnp.pad(x, widths), (0, 3, 1, 2)) for x in xs]
        self._kernel = jnp.transpose(kernel, (3, 2, 0, 1))
        self._y = jnp.zeros((xs[0].shape[0], kernel.shape[3], layer.conv_size, layer.conv_size), jnp.float32)
        self._library, self._algorithm = library, ctypes.c_int(algorithm)
        self._x_of, self._y_of = library.made("Tensor"), library.made("Tensor")
        for descriptor, array in ((self._x_of, self._xs[0]), (self._y_of, self._y)):
            library.call("cudnnSetTensor4dDescriptor", descriptor, _NCHW, _FLOAT, *array.shape)
        self._kernel_of, self._conv = library.made("Filter"), library.made("Convolution")
        library.call("cudnnSetFilter4dDescriptor", self._kernel_of, _FLOAT, _NCHW, *self._kernel.shape)
        steps = (pad, pad, layer.strides, layer.strides, 1, 1)
        library.call("cudnnSetConvolution2dDescriptor", self._conv, *steps, _CROSS_CORRELATION, _FLOAT)
        library.call("cudnnSetConvolutionMathType", self._conv, _FMA_MATH)
        library.call("cudnnSetConvolutionGroupCount", self._conv, layer.groups)
        size = ctypes.c_size_t()
        about = (self._x_of, self._kernel_of, self._conv, self._y_of, self._algorithm)
        library.call("cudnnGetConvolutionForwardWorkspaceSize", library.handle, *about, ctypes.byref(size))
        self.workspace_bytes = size.value
        self._workspace = jnp.zeros(max(1, size.value), jnp.uint8)
        jax.block_until_ready((self._xs, self._kernel, self._y, self._workspace))

    def run(self, index: int = 0) -> None:
        """Start a call on the library's stream."""
        one, zero = ctypes.c_float(1), ctypes.c_float(0)
        self._library.call(
            "cudnnConvolutionForward",
            *(self._library.handle, ctypes.byref(one), self._x_of, _pointer(self._xs[index % len(self._xs)])),
            *(self._kernel_of, _pointer(self._kernel), self._conv, self._algorithm, _pointer(self._workspace)),
            *(ctypes.c_size_t(self.workspace_bytes), ctypes.byref(zero), self._y_of, _pointer(self._y)),
        )

    def result(self) -> jax.Array:
        """[N, Ho, Wo, K] of the first map."""
        self.run()
        self._library.cuda("cudaStreamSynchronize", self._library.stream)
        return jnp.transpose(self._y, (0, 2, 3, 1))

    def microseconds(self, repeats: int) -> float:
        """Of a call: the median over replays of a CUDA graph of calls on the maps in turn."""
        library, graph, replay = self._library, ctypes.c_void_p(), ctypes.c_void_p()
        library.cuda("cudaStreamBeginCapture", library.stream, _THREAD_LOCAL)
        try:
            for index in range(_CALLS):
                self.run(index)
        finally:
            library.cuda("cudaStreamEndCapture", library.stream, ctypes.byref(graph))
        library.cuda("cudaGraphInstantiate", ctypes.byref(replay), graph, ctypes.c_ulonglong(0))
        try:
            times = [self._milliseconds(replay) for _ in range(_WARM_UP + repeats)]
        finally:
            library.cuda("cudaGraphExecDestroy", replay)
            library.cuda("cudaGraphDestroy", graph)
        return 1e3 * statistics.median(times[_WARM_UP:]) / _CALLS

    def _milliseconds(self, replay: ctypes.c_void_p) -> float:
        """Of one replay; events lie on the stream around it."""
        library, spent = self._library, ctypes.c_float()
        begin, end = _events(library)
        library.cuda("cudaEventRecord", begin, library.stream)
        library.cuda("cudaGraphLaunch", replay, library.stream)
        library.cuda("cudaEventRecord", end, library.stream)
        library.cuda("cudaEventSynchronize", end)
        library.cuda("cudaEventElapsedTime", ctypes.byref(spent), begin, end)
        return spent.value


@functools.cache
def _events(library: Library) -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
    begin, end = ctypes.c_void_p(), ctypes.c_void_p()
    for event in (begin, end):
        library.cuda("cudaEventCreate", ctypes.byref(event))
    return begin, end


def _pointer(array: jax.Array) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.unsafe_buffer_pointer())


def _loaded(name: str) -> Any:
    """A shared library that this process has loaded, else of the packages that JAX takes it from, else the system's."""
    if jax.default_backend() != "gpu":  # which loads them; PyTorch brings its own without a GPU, too
        raise ValueError("cuDNN's algorithms need a GPU, and JAX has none here")
    lines = _MAPS.read_text("utf-8").splitlines() if _MAPS.is_file() else []
    mapped = sorted({line.split()[-1] for line in lines if f"/{name}.so" in line})
    for path in (*mapped, *_of_packages(name), f"{name}.so"):
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    raise ValueError(f"cuDNN's algorithms need {name}, which is not here")


def _of_packages(name: str) -> list[str]:
    spec = importlib.util.find_spec("nvidia")
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    return sorted(path for folder in folders for path in glob.glob(f"{folder}/*/lib/{name}.so*"))
