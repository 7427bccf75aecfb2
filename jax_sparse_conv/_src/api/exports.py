"""What `jax.export` asks of a program with this package's custom calls."""

from __future__ import annotations

from jax import export

from jax_sparse_conv._src import _native


def export_checks() -> list[export.DisabledSafetyCheck]:
    """For `jax.export.export(..., disabled_checks=...)`: the custom calls of this package as allowed, by name.

    JAX refuses to export custom calls of others, because it does not know whether they stay stable between versions.
    Run an exported program by the version of this package that exported it. The list is the same on every installation.
    It names those of all platforms and operations, the formats' (`ECR`, `CooStar`) included.
    """
    return [export.DisabledSafetyCheck.custom_call(name) for name in _native.TARGETS]
