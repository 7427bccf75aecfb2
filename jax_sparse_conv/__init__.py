"""jax_sparse_conv: CNN inference in JAX that losslessly skips the zeros ReLU leaves in feature maps.

The package reads along the path of the data: `geometry` (static shapes), `formats` and `coo_star` (a feature map as
ECR, PECR or COO*), `reference` (what every operation means), `primitives` (the custom calls inside JAX), `ops` (the
public operations), `nnx` and `linen` (layers), `models` (networks), `calibration`, `plan` and `cost_model` (which
implementation for which layer), `segments` and `fusion` (chains of layers as one call) and `report` (what it brings).
"""

import importlib
from typing import TYPE_CHECKING, Any

from jax_sparse_conv.lax_signature import conv_general_dilated
from jax_sparse_conv.ops import conv, conv_pool, dense, density
from jax_sparse_conv.packing import PackedKernel, pack

if TYPE_CHECKING:
    from jax_sparse_conv import linen, models, nnx
    from jax_sparse_conv.block_parameters import (
        DenseBlockLayer,
        DenseTransition,
        PackedDenseBlock,
        pack_dense_block,
    )
    from jax_sparse_conv.calibration import calibrate
    from jax_sparse_conv.coo_star import CooStar
    from jax_sparse_conv.dense_blocks import dense_block
    from jax_sparse_conv.formats import ECR, PECR
    from jax_sparse_conv.fusion import fuse
    from jax_sparse_conv.plan import Plan, apply_plan

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
    "apply_plan",
    "calibrate",
    "conv",
    "conv_general_dilated",
    "conv_pool",
    "dense",
    "dense_block",
    "density",
    "fuse",
    "linen",
    "models",
    "nnx",
    "pack",
    "pack_dense_block",
]

_LAZY_MODULES = ("linen", "models", "nnx")  # they import Flax's layers, which not every user needs
_LAZY_NAMES = {
    "ECR": "formats",
    "PECR": "formats",
    "CooStar": "coo_star",
    "DenseBlockLayer": "block_parameters",
    "DenseTransition": "block_parameters",
    "PackedDenseBlock": "block_parameters",
    "Plan": "plan",
    "apply_plan": "plan",
    "calibrate": "calibration",
    "fuse": "fusion",
    "dense_block": "dense_blocks",
    "pack_dense_block": "block_parameters",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY_MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _LAZY_NAMES:
        return getattr(importlib.import_module(f"{__name__}.{_LAZY_NAMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
