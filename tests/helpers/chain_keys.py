"""Layers by the keys of the table of chains' tiles, a chain of such layers, and cases whose tiles are given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import pytest
from cases import Case
from chains import weights

import jax_sparse_conv as jsc
from jax_sparse_conv._src.devices import Device

LAYER = (1, 14, 14, 256, 3, 3, 256, 1, 1, 1, 1, 1, 1, 1, 1, 1)
POOLED = (1, 28, 28, 64, 3, 3, 64, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 0, 0, 0, 0)


def on(monkeypatch: pytest.MonkeyPatch, **device: Any) -> None:
    monkeypatch.setattr(Device, "of", classmethod(lambda cls, ordinal: Device(**device)))


def chain(x: jax.Array, parameters: Sequence[jax.Array], **options: Any) -> jax.Array:
    """x [N, 28, 28, 64]: a layer with a pool, then two of LAYER's kind."""
    pooled, wide, plain = parameters
    y = jsc.conv(jsc.conv_pool(x, pooled, **options), wide, **options)
    return jsc.conv(jsc.conv(y, plain, **options), plain, **options)


def chain_parameters() -> list[jax.Array]:
    return [weights(1, 3, 3, 64, 64), weights(2, 1, 1, 64, 256), weights(3, 3, 3, 256, 256)]


TILE_CASES = (
    Case("pixels", (1, 14, 14, 256), 136, kernel=(1, 1), bias=True, residual=True, activation="relu"),
    Case("taps", (2, 13, 15, 64), 72, bias=True, activation="relu"),
    Case("strided", (1, 28, 28, 128), 128, strides=2, activation="relu"),
    Case("groups", (1, 14, 14, 128), 128, groups=2, activation="relu"),
    Case("pooled", (1, 28, 30, 64), 72, bias=True, activation="relu", pool="max"),
    Case("pooled, high", (1, 66, 18, 64), 72, bias=True, activation="relu", pool="max"),
    Case("wide pool", (1, 28, 30, 64), 72, activation="relu", pool="max", window=(3, 3), window_strides=(2, 2)),
    Case("half a tile of output channels", (1, 14, 14, 64), 192, bias=True, activation="relu"),
)
