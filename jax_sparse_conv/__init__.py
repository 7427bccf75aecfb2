"""jax_sparse_conv: CNN inference in JAX that losslessly skips the zeros ReLU leaves in feature maps.

Operations: `conv`, `conv_pool`, `dense`, `conv_general_dilated`, `density`. Layers: `nnx`, `linen`. Networks: `models`.
Any function: `accelerate`, `jit_inference`. A block of layers as one call: `dense_block`. Weights packed once: `pack`.
Which implementation for which layer, by measurement: `calibrate`, `Plan`, `apply_plan`. Sparse formats: `ECR`, `PECR`,
`CooStar`. For `jax.export`: `export_checks`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from jax_sparse_conv._src.api.exports import export_checks
from jax_sparse_conv._src.api.lax_signature import conv_general_dilated
from jax_sparse_conv._src.api.ops import conv, conv_pool, dense, density
from jax_sparse_conv._src.primitive.packing import PackedKernel, pack

if TYPE_CHECKING:
    from jax_sparse_conv import linen, models, nnx
    from jax_sparse_conv._src.accelerate.inference import compiler_options, jit_inference
    from jax_sparse_conv._src.accelerate.transform import accelerate
    from jax_sparse_conv._src.formats.formats import ECR, PECR
    from jax_sparse_conv._src.fusion.block_parameters import (
        DenseBlockLayer,
        DenseTransition,
        PackedDenseBlock,
        pack_dense_block,
    )
    from jax_sparse_conv._src.fusion.dense_blocks import dense_block
    from jax_sparse_conv._src.plans.calibration import calibrate
    from jax_sparse_conv._src.plans.plan import Plan, apply_plan
    from jax_sparse_conv._src.primitive.coo_star import CooStar

__version__ = "0.1.0"

__all__ = [
    "ECR",
    "PECR",
    "CooStar",
    "DenseBlockLayer",
    "DenseTransition",
    "PackedDenseBlock",
    "PackedKernel",
    "Plan",
    "__version__",
    "accelerate",
    "apply_plan",
    "calibrate",
    "compiler_options",
    "conv",
    "conv_general_dilated",
    "conv_pool",
    "dense",
    "dense_block",
    "density",
    "export_checks",
    "jit_inference",
    "linen",
    "models",
    "nnx",
    "pack",
    "pack_dense_block",
]

_LAZY_MODULES = ("linen", "models", "nnx")  # they import Flax's layers, which not every user needs
_LAZY_NAMES = {
    "ECR": "formats.formats",
    "PECR": "formats.formats",
    "CooStar": "primitive.coo_star",
    "DenseBlockLayer": "fusion.block_parameters",
    "DenseTransition": "fusion.block_parameters",
    "PackedDenseBlock": "fusion.block_parameters",
    "accelerate": "accelerate.transform",
    "compiler_options": "accelerate.inference",
    "jit_inference": "accelerate.inference",
    "Plan": "plans.plan",
    "apply_plan": "plans.plan",
    "calibrate": "plans.calibration",
    "dense_block": "fusion.dense_blocks",
    "pack_dense_block": "fusion.block_parameters",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY_MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _LAZY_NAMES:
        return getattr(importlib.import_module(f"{__name__}._src.{_LAZY_NAMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
