"""What programs would be on a GPU that is not there, by a description of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from jax_sparse_conv._src import _native, devices
from jax_sparse_conv._src.devices import Device


@contextlib.contextmanager
def as_on(gpu: Device) -> Iterator[None]:
    """As if programs were lowered for this GPU by an installation that has all kernels."""
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (devices, "current", lambda: gpu),
            (devices, "known", lambda: gpu),
            (devices, "default_platform", lambda: "gpu"),
            (devices, "ordinals", lambda _: [0]),
            (Device, "of", lambda _: gpu),
            (_native, "why_missing", lambda *_: None),
            (_native, "workspace_bytes", lambda *_: 0),
            (_native, "dense_layers_bytes", lambda *_: 1024),
            (_native, "has_warpgroups", lambda: True),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield
