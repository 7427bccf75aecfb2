"""Layers for `flax.nnx` that skip the zeros of their input, and `replace`, which puts them into any nnx model.

`SparseConv`, `SparseConvPool` and `SparseLinear` have the parameters and the state tree of `nnx.Conv` and `nnx.Linear`.
Checkpoints, optimizers and transformations do not see a difference.
"""

from jax_sparse_conv._src.layers.layer_calls import LayerCall, record_calls
from jax_sparse_conv._src.layers.packed_params import PackedParam
from jax_sparse_conv.nnx.inference import Inference, jit_inference
from jax_sparse_conv.nnx.layers import SparseConv, SparseConvPool, SparseLinear
from jax_sparse_conv.nnx.models import (
    Report,
    ReportEntry,
    layer_paths,
    pack,
    replace,
    set_implementation,
    unpack,
    unreplace,
)

__all__ = [
    "Inference",
    "LayerCall",
    "PackedParam",
    "Report",
    "ReportEntry",
    "SparseConv",
    "SparseConvPool",
    "SparseLinear",
    "jit_inference",
    "layer_paths",
    "pack",
    "record_calls",
    "replace",
    "set_implementation",
    "unpack",
    "unreplace",
]


def __dir__() -> list[str]:
    return sorted(__all__)
