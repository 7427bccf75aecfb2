"""The sides of `benchmarks peers`: one network with the same weights, as each framework runs it on a CPU.

A side is a function of an image's number. Every framework has the images in the layout and dtype that it takes, before
any time is taken. Each has the same number of threads.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

import jax_sparse_conv as jsc
from benchmarks.common.prepared import Prepared
from benchmarks.networks import to_torch
from jax_sparse_conv import models

Call: TypeAlias = Callable[[int], Any]

OURS, XLA = "ours", "xla"
ONNXRUNTIME, OPENVINO, TORCH, INDUCTOR = "onnxruntime", "openvino", "torch", "inductor"
PEERS = {ONNXRUNTIME: "onnxruntime", OPENVINO: "OpenVINO", TORCH: "PyTorch", INDUCTOR: "Inductor"}
"""Other frameworks, as tables call them."""
KINDS = ("float32", "bfloat16")

_PACKAGES = ("onnxruntime", "openvino", "torch", "onnx", "onnxscript")
_NEEDS = {
    ONNXRUNTIME: ("torch", "onnx", "onnxscript", "onnxruntime"),
    OPENVINO: ("torch", "onnx", "onnxscript", "openvino"),
    TORCH: ("torch",),
    INDUCTOR: ("torch",),
}
_REMEDY = "pip install 'jax-sparse-conv[peers]'"


def missing(peer: str) -> str | None:
    """Why a peer cannot run here; None where all that it needs is installed."""
    found = [name for name in _NEEDS[peer] if importlib.util.find_spec(name) is None]
    return f"{' and '.join(found)} not installed: {_REMEDY}" if found else None


def versions() -> dict[str, str]:
    """Of what is installed for the peers."""
    found = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


class Sides:
    """A network on a CPU by all frameworks.

    Args:
      network: with the weights that are to be run, float32.
      images: batches, float32 [N, H, W, 3], one of which each call takes.
      kind: of `KINDS`.
      threads: of each framework. XLA's and this package's are those that the process may use.
      folder: where the exported network goes.
    """

    def __init__(self, network: Prepared, images: Sequence[jax.Array], kind: str, threads: int, folder: Path) -> None:
        self.network, self.images, self.kind, self.threads, self.folder = network, images, kind, threads, folder

    def made(self, side: str) -> Call:
        """A side, ready to be called.

        Raises:
          Exception: whatever a framework raises that does not take the network.
        """
        makers = {
            OURS: self._ours,
            XLA: self._xla,
            ONNXRUNTIME: self._onnxruntime,
            OPENVINO: self._openvino,
            TORCH: self._torch,
            INDUCTOR: self._inductor,
        }
        with _quiet():
            return makers[side]()

    # --- JAX ----------------------------------------------------------------------------------------------------------

    def _ours(self) -> Call:
        function = jsc.nnx.jit_inference(self._model())
        return lambda index: function(self._as_kind[index])

    def _xla(self) -> Call:
        model = _dense(self._model())
        function = jax.jit(lambda x: model(x))
        return lambda index: function(self._as_kind[index])

    def _model(self) -> models.ConvNet:
        return self.network.model([leaf.astype(self.kind) for leaf in self.network.weights])

    @functools.cached_property
    def _as_kind(self) -> list[jax.Array]:
        return [image.astype(self.kind) for image in self.images]

    # --- others -------------------------------------------------------------------------------------------------------

    @functools.cached_property
    def _module(self) -> Any:
        """The network in PyTorch, float32."""
        importlib.import_module("torch").set_num_threads(self.threads)
        model = _dense(self.network.model())
        return to_torch.module(lambda x: model(x), self.images[0].shape)

    @functools.cached_property
    def _channels_first(self) -> list[np.ndarray]:
        return [np.ascontiguousarray(np.asarray(image).transpose(to_torch.CHANNELS_FIRST)) for image in self.images]

    @functools.cached_property
    def onnx(self) -> Path:
        """The network in a file of ONNX, float32, for batches of this size."""
        torch = importlib.import_module("torch")
        path = self.folder / "network.onnx"
        images = torch.from_numpy(self._channels_first[0])
        torch.onnx.export(self._module, (images,), str(path), dynamo=True, verbose=False, external_data=True)
        return path

    def _onnxruntime(self) -> Call:
        if self.kind != "float32":
            raise ValueError(f"onnxruntime has no convolution in {self.kind} for CPUs")
        runtime = importlib.import_module("onnxruntime")
        options = runtime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = self.threads, 1
        options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_ENABLE_ALL
        # Its threads wait for work in a loop. They do so within a call, not in the next side's.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        session = runtime.InferenceSession(str(self.onnx), options, providers=["CPUExecutionProvider"])
        name = session.get_inputs()[0].name
        return lambda index: session.run(None, {name: self._channels_first[index]})[0]

    def _openvino(self) -> Call:
        sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]  # forks, and reports the import
        openvino = importlib.import_module("openvino")
        precision = {"float32": "f32", "bfloat16": "bf16"}[self.kind]  # in a CPU with such products bf16 is the default
        config = {"INFERENCE_NUM_THREADS": self.threads, "PERFORMANCE_HINT": "LATENCY"}
        config |= {"INFERENCE_PRECISION_HINT": precision}
        core = openvino.Core()
        compiled = core.compile_model(core.read_model(str(self.onnx)), "CPU", config)
        taken = compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()
        if taken != precision:
            raise ValueError(f"OpenVINO takes {taken} for {precision} on this CPU")
        request = compiled.create_infer_request()
        return lambda index: request.infer([self._channels_first[index]], share_inputs=True)[0]

    @functools.cached_property
    def _of_torch(self) -> tuple[Any, list[Any]]:
        """The module in the kind's dtype, and images in it, channels last."""
        torch: Any = importlib.import_module("torch")
        dtype = getattr(torch, self.kind)
        images = [torch.from_numpy(each) for each in self._channels_first]
        last = [each.to(dtype=dtype, memory_format=torch.channels_last) for each in images]
        if self.kind == "float32":
            return self._module, last
        return importlib.import_module("copy").deepcopy(self._module).to(dtype), last

    def _torch(self) -> Call:
        return self._called(self._of_torch[0])

    def _inductor(self) -> Call:
        """Frozen: weights are constants, packed once, and what is behind a convolution is fused with it."""
        torch: Any = importlib.import_module("torch")
        config: Any = importlib.import_module("torch._inductor.config")
        config.freezing = True
        return self._called(torch.compile(self._of_torch[0], backend="inductor", dynamic=False))

    def _called(self, function: Any) -> Call:
        torch: Any = importlib.import_module("torch")
        images = self._of_torch[1]

        def call(index: int) -> np.ndarray:
            with torch.inference_mode():
                return np.asarray(function(images[index]).float())

        return call


def exact(network: Prepared, images: jax.Array) -> np.ndarray:
    """The network in float64, dense, of one image after another: what sides' results are compared with."""
    with jax.enable_x64(True):

        @jax.jit
        def run(weights: list[jax.Array], x: jax.Array) -> jax.Array:
            return _dense(network.model(weights))(x)

        weights = [jnp.asarray(np.asarray(leaf, np.float64)) for leaf in network.weights]
        return np.concatenate([np.asarray(run(weights, image)) for image in np.asarray(images, np.float64)[:, None]])


def _dense(model: models.ConvNet) -> models.ConvNet:
    models.set_network_implementation(model, "xla")
    return model


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what an export says of packages that it does not need."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
