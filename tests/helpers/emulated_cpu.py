"""A pytest plugin: the CPU's custom calls run in another program, such as one for aarch64 under an emulator.

JAX and XLA are those of this machine. A call's operands and attributes go to the program `tests/emulated/serve.cc`, and
its results come back, by a callback in the place of the custom call. `tests/emulated/emulate.sh` builds the program
and names it in JSC_EMULATED, with the words in front of it.
"""

from __future__ import annotations

import functools
import os
import shlex
import subprocess
import threading
from collections.abc import Callable, Sequence
from typing import IO, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.interpreters import mlir

from jax_sparse_conv._src import _native

# As XLA's C API has them.
DTYPES = {"int32": 4, "uint8": 6, "uint16": 7, "float16": 10, "float32": 11, "float64": 12, "bfloat16": 16}


class Program:
    """The running program; one call at a time."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._lock = threading.Lock()
        self.calls = 0

    def loop(self, name: str) -> None:
        """As `_native.set_cpu_loop`."""
        self._ask(f"loop {name}")

    def isa(self) -> tuple[str, bool]:
        """The instruction set, and whether it has many registers."""
        name, has_many = self._ask("isa")[0].split()
        return name, has_many == "1"

    def call(
        self, target: str, results: Sequence[Any], operands: Sequence[np.ndarray], attributes: dict[str, Any]
    ) -> list[np.ndarray]:
        """What the custom call writes. A ValueError where it returns an error."""
        words = ["call", target, _described(operands)]
        words.append(str(len(attributes)))
        for name, value in sorted(attributes.items()):
            array = np.asarray(value, np.int64)
            words += [name, str(-1 if np.ndim(value) == 0 else array.size), *map(str, array.ravel())]
        words.append(_described(results))
        self.calls += 1
        return self._ask(" ".join(words), operands, results)[1]

    def _ask(
        self, line: str, operands: Sequence[np.ndarray] = (), results: Sequence[Any] = ()
    ) -> tuple[str, list[np.ndarray]]:
        to, back = self._process.stdin, self._process.stdout
        assert to is not None
        assert back is not None
        with self._lock:
            try:
                to.write(line.encode() + b"\n")
                for operand in operands:
                    to.write(np.ascontiguousarray(operand).tobytes())
                to.flush()
                answer = back.readline().decode().strip()
            except BrokenPipeError:
                answer = ""
            if not answer:
                raise RuntimeError(f"the program ended with {self._process.wait()} at: {line}")
            if not answer.startswith("ok"):
                raise ValueError(answer.removeprefix("error "))
            return answer.removeprefix("ok"), [_read(back, result) for result in results]


def _read(pipe: IO[bytes], like: Any) -> np.ndarray:
    count = int(np.prod(like.shape)) * like.dtype.itemsize
    return np.frombuffer(bytearray(pipe.read(count)), like.dtype).reshape(like.shape)


def _described(arrays: Sequence[Any]) -> str:
    words = [[DTYPES[str(array.dtype)], len(array.shape), *array.shape] for array in arrays]
    return " ".join(map(str, [len(words), *(word for each in words for word in each)]))


class Module:
    """What `_native` asks of the CPU's extension, with the program behind it."""

    def __init__(self, program: Program, module: Any) -> None:
        self._module = module
        self._isa, self._has_many = program.isa()
        self.set_loop = program.loop

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def isa(self) -> str:
        return self._isa

    def isas(self) -> list[str]:
        return [self._isa]

    def many_registers(self) -> bool:
        return self._has_many

    def multiplies_pairs(self) -> bool:
        return False

    def multiplies_tiles(self) -> bool:
        return False

    def set_isa(self, name: str) -> None:
        assert name == self._isa


def install(program: Program) -> None:
    """From here on, custom calls are the program's; nothing may be compiled before."""
    lowering_of_xla = jax.ffi.ffi_lowering

    def ffi_call(target: str, types: Any, vmap_method: str | None = None) -> Callable[..., Any]:
        like, tree = jax.tree.flatten(types)

        def call(*operands: Any, **attributes: Any) -> Any:
            rank, dtypes = jnp.ndim(operands[0]), [each.dtype for each in operands]

            def run(*words: Any) -> list[np.ndarray]:
                values = [np.asarray(each).view(dtype) for each, dtype in zip(words, dtypes, strict=True)]
                values = [each[..., 0] if each.dtype == np.float64 else each for each in values]
                batch = values[0].shape[: values[0].ndim - rank]  # of vmap
                results = [jax.ShapeDtypeStruct((*batch, *each.shape), each.dtype) for each in like]
                return [_words(each) for each in program.call(target, results, values, attributes)]

            words = [jax.eval_shape(_words, each) for each in like]
            settings = ", ".join(f"{name} = {value}" for name, value in sorted(attributes.items()))
            given = list(map(_words, operands))
            with set_xla_metadata(custom_call=f"@{target}({settings})"):  # for tests that read a program
                found = jax.pure_callback(run, words, *given, vmap_method=vmap_method)
            return tree.unflatten([_of_words(*each) for each in zip(found, like, strict=True)])

        return call

    def ffi_lowering(target: str) -> Callable[..., Any]:
        def rule(ctx: Any, *operands: Any, **attributes: Any) -> Any:
            if tuple(ctx.module_context.platforms) != ("cpu",):
                return lowering_of_xla(target)(ctx, *operands, **attributes)
            types = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in ctx.avals_out]
            function = functools.partial(ffi_call(target, types), **attributes)
            return mlir.lower_fun(function, multiple_results=True)(ctx, *operands)

        return rule

    _native._modules["cpu"] = Module(program, _native._modules["cpu"])
    jax.ffi.ffi_call, jax.ffi.ffi_lowering = ffi_call, ffi_lowering


# A callback may run outside of jax.enable_x64 and would have its float64 rounded: those go as pairs of words.


def _words(array: Any) -> Any:
    if array.dtype != np.float64:
        return array
    if isinstance(array, np.ndarray):
        return array[..., None].view(np.uint32)
    return lax.bitcast_convert_type(array, np.uint32)


def _of_words(words: Any, like: Any) -> jax.Array:
    return lax.bitcast_convert_type(words, like.dtype) if like.dtype == np.float64 else words


def pytest_configure() -> None:
    install(Program(shlex.split(os.environ["JSC_EMULATED"])))
