"""Loads the native extensions, registers their XLA custom calls and remembers why one is missing.

Nothing here raises at import: a missing extension is an answer (`why_missing`) that the call which needs it gives to
the user, with the original exception's text.
"""

from __future__ import annotations

import importlib
import pathlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import jax


def _find_build_info() -> ModuleType | None:
    try:
        return importlib.import_module("jax_sparse_conv._build_info")
    except ImportError:
        return None  # the source tree, without anything built


# Platform names as MLIR lowering rules spell them -> (extension module, name in the FFI registry).
PLATFORMS = {"cpu": ("_cpu", "cpu"), "cuda": ("_cuda", "CUDA")}
_HERE = pathlib.Path(__file__).parents[1]
_INSTALL = (
    "install it with `pip install -e .` in the clone, or run from another directory what `pip install .` installed"
)
DTYPES = {
    "cpu": ("float32", "bfloat16", "float16", "float64"),
    "cuda": ("float32", "bfloat16", "float16"),
}

# Every custom call of every platform, as the extensions register them (`cpu/ffi/handlers.cc`, `cuda/ffi/ffi.cc`).
TARGETS = (
    *("jsc_ecr", "jsc_pecr", "jsc_coo", "jsc_direct", "jsc_dense", "jsc_adaptive"),
    *("jsc_coo_by_density", "jsc_coo_lists"),
    *("jsc_chain", "jsc_dense_block", "jsc_kernel_gradient", "jsc_max_pool_gradient", "jsc_max_pool_tangent"),
    *("jsc_channel_sums", "jsc_channel_sums_gradient", "jsc_channel_affine", "jsc_channel_affine_gradient"),
    *("jsc_channel_joined", "jsc_channel_joined_gradient", "jsc_channel_masked_gradient", "jsc_turned_kernel"),
    *("jsc_coo_fromdense", "jsc_coo_todense"),
)

_modules: dict[str, ModuleType] = {}
_reasons: dict[str, str] = {}
_registered: dict[str, list[str]] = {}


def target_name(method: str) -> str:
    """The custom call's name in HLO."""
    return f"jsc_{method}"


def why_missing(method: str, platform: str, dtype: Any) -> str | None:
    """None where `method` runs natively on `platform` for `dtype`, else one sentence that says why it does not."""
    if platform not in PLATFORMS:
        return f"there are no kernels for platform {platform!r}, only for {', '.join(map(repr, PLATFORMS))}"
    if platform not in _modules:
        return f"the {platform} extension is missing: {_reasons[platform]}"
    if target_name(method) not in _registered[platform]:
        return f"the {platform} extension has no target {target_name(method)!r}"
    if str(dtype) not in DTYPES[platform]:
        return f"dtype {dtype} is not supported on {platform}, only {', '.join(DTYPES[platform])}"
    return None


def workspace_bytes(
    method: str,
    x_shape: Sequence[int],
    kernel_shape: Sequence[int],
    conv_size: Sequence[int],
    out_size: Sequence[int],
    device: int,
) -> int:
    """Scratch memory that the CUDA kernel of `method` takes as a result on a device, bytes; 0 with clusters."""
    return int(
        _modules["cuda"].workspace_bytes(
            target_name(method), list(x_shape), list(kernel_shape), list(conv_size), list(out_size), device
        )
    )


def dense_layers_bytes(element_bytes: int, precise: bool, pixels: int, channels: int, layers: int) -> int:
    """Scratch memory of a dense block of many images, bytes: `cuda/densenet/layers.h`."""
    return int(_modules["cuda"].dense_layers_bytes(element_bytes, precise, pixels, channels, layers))


def why_no_dense_block_on_cpu(
    x_shape: Sequence[int], layers: int, middle: int, growth: int, out_channels: int, pairs: bool
) -> str | None:
    """Why the CPU's one call does not take a dense block (`cpu/ffi/dense_block.h`), or None.

    `pairs` says whether it is of pairs of bfloat16, not of float32.
    """
    return str(_modules["cpu"].why_no_dense_block(*x_shape, layers, middle, growth, out_channels, pairs)) or None


def coo_variants() -> list[list[int]]:
    """Rows of `native/coo_variants.h`; none if unbuilt.

    A row is kernel, stride, height, width, output channels, max_warps, min_blocks.
    """
    return [list(row) for row in planner().coo_variants()] if "planner" in _modules else []


def device_properties(device: int) -> dict[str, Any]:
    """Properties of the CUDA device with this ordinal, see `devices.Device`; a RuntimeError where there is none."""
    if "cuda" not in _modules:
        raise RuntimeError(_reasons["cuda"])
    return dict(_modules["cuda"].device_properties(device))


def planner() -> ModuleType:
    """The planners of CUDA kernels (`cuda/ffi/planner.cc`), which need no GPU.

    Raises:
      RuntimeError: this copy of the package is not built.
    """
    if "planner" not in _modules:
        raise RuntimeError(_reasons["planner"])
    return _modules["planner"]


def has_warpgroups() -> bool:
    """Whether this build has code for Hopper's warpgroup products (`cuda/dense_conv/wgmma/kernel.cuh`)."""
    build = _find_build_info()
    return build is not None and "90a-real" in build.CUDA_ARCHITECTURES.split(";")


def registered_targets() -> dict[str, list[str]]:
    """Registered custom calls by platform; platforms whose extension is missing have an empty list."""
    return {platform: list(_registered.get(platform, [])) for platform in PLATFORMS}


def missing_reasons() -> dict[str, str]:
    """Why an extension is missing, by platform."""
    return {platform: reason for platform, reason in _reasons.items() if platform in PLATFORMS}


def cpu_isa() -> str:
    """The instruction set the CPU kernels use on this machine, or `"none"` without the extension."""
    return str(_modules["cpu"].isa()) if "cpu" in _modules else "none"


def cpu_isas() -> list[str]:
    """The instruction sets the CPU kernels could use on this machine, the preferred one first."""
    return list(_modules["cpu"].isas()) if "cpu" in _modules else []


def cpu_has_many_registers() -> bool:
    """Whether the instruction set in use has 32 registers of vectors, not 16."""
    return "cpu" in _modules and bool(_modules["cpu"].many_registers())


def cpu_multiplies_pairs() -> bool:
    """Whether the CPU kernels multiply bfloat16 in pairs of channels: AVX-512 in use, and AVX512-BF16 there."""
    return "cpu" in _modules and bool(_modules["cpu"].multiplies_pairs())


def cpu_multiplies_tiles() -> bool:
    """Whether they multiply tiles of such pairs, too: AMX."""
    return "cpu" in _modules and bool(_modules["cpu"].multiplies_tiles())


def cpu_limits() -> dict[str, float]:
    """What the CPU can do at most, measured now (`cpu/core/machine_limits.h`): threads, flops and bytes a second."""
    if "cpu" not in _modules:
        raise RuntimeError(_reasons["cpu"])
    return dict(_modules["cpu"].measure_limits())


def set_cpu_isa(name: str) -> None:
    """Have the CPU kernels use one of `cpu_isas()`, for tests."""
    _modules["cpu"].set_isa(name)


def set_cpu_loop(name: str) -> None:
    """Have CPU convolutions run a loop of `cpu/plan/plan_choice.cc`, or `"auto"`, the cheapest one: for tests."""
    _modules["cpu"].set_loop(name)


def _why_not_built(platform: str) -> str | None:
    build = _find_build_info()
    if build is None:
        return f"this copy of the package, 'jax_sparse_conv' in {_HERE}, is not built; {_INSTALL}"
    if platform == "cuda" and not build.CUDA_BUILT:
        return f"{build.CUDA_REASON}; rebuild with JSC_CUDA=ON where nvcc is on PATH"
    return None


def _load(platform: str, module_name: str, registry_name: str | None) -> None:
    """Load an extension and register its custom calls; without a registry it has none."""
    reason = _why_not_built(platform)
    if reason is not None:
        _reasons[platform] = reason
        return
    try:
        module = importlib.import_module(f"jax_sparse_conv.{module_name}")
        if registry_name is not None:
            for name, capsule in module.registrations().items():
                jax.ffi.register_ffi_target(name, capsule, platform=registry_name)
                _registered.setdefault(platform, []).append(name)
    except (AttributeError, ImportError, OSError, RuntimeError, TypeError, ValueError) as error:  # why it is missing
        _reasons[platform] = f"{type(error).__name__}: {error}"
        _registered.pop(platform, None)
        return
    _modules[platform] = module


for _platform, (_module_name, _registry_name) in PLATFORMS.items():
    _load(_platform, _module_name, _registry_name)
_load("planner", "_planner", None)
