"""Maps side by side under a scale and a shift of each channel: batch norms of dense blocks in training.

    joined(maps, center, scale, shift)   relu((x - center) * scale + shift), with x the maps side by side

The maps are [..., C1], [..., C2], ..., the rest is [C1 + C2 + ...]. No map of all channels is written but the result,
and its gradient adds to what the maps have as cotangents already, in place. y may be sums of 2x2 pixels: an average
pool behind the ReLU, whose division belongs to scale and shift. Else all is as in `channels`, with three primitives
again, of which the last two are each other's transpose:

    jsc_channel_joined           maps, center, scale, shift -> y
    jsc_channel_joined_tangent   the same, their tangents -> tangents of the maps given back and of y
    jsc_channel_joined_gradient  the same, cotangents of the maps given back and of y -> cotangents of the operands
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_sparse_conv._src.primitive import channels
from jax_sparse_conv._src.primitive.channels import Affine
from jax_sparse_conv._src.primitive.primitives import same_varying_axes


@dataclasses.dataclass(frozen=True)
class Joined:
    """A call.

    Attributes:
      maps: how many there are.
      relu: whether a ReLU follows.
      sums: whether sums of 2x2 pixels follow that.
      gives_back: whether the maps are results, too, for what else reads them.
    """

    maps: int
    relu: bool
    sums: bool
    gives_back: bool

    @property
    def shared(self) -> int:
        """How many operands derivatives are not linear in."""
        return self.maps + 3


def joined(
    maps: Sequence[jax.Array],
    center: jax.Array,
    scale: jax.Array,
    shift: jax.Array,
    *,
    relu: bool = False,
    sums: bool = False,
    gives_back: bool = False,
) -> tuple[list[jax.Array], jax.Array]:
    """The maps, and y [..., C1 + C2 + ...] in their common dtype; with `sums` of [N, H, W, ...], both even.

    With `gives_back` what else reads the maps is to read those of the result, whose cotangents are added in the same
    pass.
    """
    dtype = jnp.result_type(*maps)
    rows = (each.astype(channels.dtype_of_sums(dtype)) for each in (center, scale, shift))
    operands = same_varying_axes([*(each.astype(dtype) for each in maps), *rows])
    *back, y = _joined(Joined(len(maps), relu, sums, gives_back), *operands)
    return back or operands[: len(maps)], y


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _joined(given: Joined, *operands: jax.Array) -> tuple[jax.Array, ...]:
    return (*(operands[: given.maps] if given.gives_back else ()), *joined_p.bind(*operands, given=given))


@_joined.defjvp
def _joined_jvp(given: Joined, primals: Sequence[jax.Array], tangents: Sequence[jax.Array]) -> tuple[Any, Any]:
    operands = same_varying_axes([*primals, *tangents])
    return _joined(given, *primals), tuple(joined_tangent_p.bind(*operands, given=given))


# --- the same in lax -------------------------------------------------------------------------------------------------


def _side_by_side(operands: Sequence[jax.Array], given: Joined) -> list[jax.Array]:
    """One map in the place of the maps."""
    return [jnp.concatenate(operands[: given.maps], axis=-1), *operands[given.maps :]]


def _summed(y: jax.Array, given: Joined) -> jax.Array:
    if not given.sums:
        return y
    images, height, width, count = y.shape
    wide = y.astype(channels.dtype_of_sums(y.dtype))
    return wide.reshape(images, height // 2, 2, width // 2, 2, count).sum((2, 4)).astype(y.dtype)


def _by_lax(*operands: jax.Array, given: Joined) -> list[jax.Array]:
    (y,) = channels.affine_by_lax(*_side_by_side(operands, given), given=Affine(given.relu))
    return [_summed(y, given)]


def _tangent_by_lax(*operands: jax.Array, given: Joined) -> list[jax.Array]:
    shared, linear = operands[: given.shared], operands[given.shared :]
    every = [*_side_by_side(shared, given), *_side_by_side(linear, given)]
    back = linear[: given.maps] if given.gives_back else ()
    (tangent,) = channels.affine_tangent_by_lax(*every, given=Affine(given.relu))
    return [*back, _summed(tangent, given)]


def _gradient_by_lax(*operands: jax.Array, given: Joined) -> list[jax.Array]:
    shared, (*others, cotangent) = operands[: given.shared], operands[given.shared :]
    if given.sums:
        cotangent = cotangent.repeat(2, 1).repeat(2, 2)
    whole, *rows = channels.affine_gradient_by_lax(*_side_by_side(shared, given), cotangent, given=Affine(given.relu))
    ends = np.cumsum([each.shape[-1] for each in shared[: given.maps]])
    of_maps = jnp.split(whole, ends[:-1], axis=-1)
    if given.gives_back:
        of_maps = [one + other for one, other in zip(of_maps, others, strict=True)]
    return [*of_maps, *rows]


# --- the native calls ------------------------------------------------------------------------------------------------


def _native(*operands: jax.Array, given: Joined) -> list[jax.Array]:
    maps, rows = operands[: given.maps], operands[given.maps :]
    y = jax.ShapeDtypeStruct(_shape_of_result(maps[0], rows[0], given), maps[0].dtype)
    return [channels.native_call(_JOINED)(y)(*rows, *maps, **_attributes(given))]


def _native_gradient(*operands: jax.Array, given: Joined) -> list[jax.Array]:
    maps, rows = operands[: given.maps], operands[given.maps : given.shared]
    *others, cotangent = operands[given.shared :]
    results = [channels.row_of(cotangent)] * 2 + [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in maps]
    in_place = {4 + given.maps + i: 2 + i for i in range(len(others))}
    call = channels.native_call(_GRADIENT)(results, input_output_aliases=in_place)
    of_scale, of_shift, *of_maps = call(*rows, cotangent, *maps, *others, **_attributes(given))
    return [*of_maps, -rows[1] * of_shift, of_scale, of_shift]


def _attributes(given: Joined) -> dict[str, Any]:
    return {"relu": np.int64(given.relu), "sums": np.int64(given.sums)}


# --- rules -----------------------------------------------------------------------------------------------------------


def _shape_of_result(first: Any, row: Any, given: Joined) -> tuple[int, ...]:
    *pixels, _ = first.shape
    if given.sums:
        pixels[1:] = [size // 2 for size in pixels[1:]]
    return *pixels, *row.shape


def _abstract(*operands: Any, given: Joined) -> list[Any]:
    first, row = operands[0], operands[given.maps]
    return [first.update(shape=_shape_of_result(first, row, given), weak_type=False)]


def _abstract_tangent(*operands: Any, given: Joined) -> list[Any]:
    back = operands[: given.maps] if given.gives_back else ()
    return [*(each.update(weak_type=False) for each in back), *_abstract(*operands, given=given)]


def _abstract_gradient(*operands: Any, given: Joined) -> list[Any]:
    return [each.update(weak_type=False) for each in operands[: given.shared]]


_JOINED, _TANGENT, _GRADIENT = "channel_joined", "channel_joined_tangent", "channel_joined_gradient"
joined_p = channels.new_primitive(_JOINED, _abstract, _by_lax, _native)
joined_tangent_p = channels.new_primitive(_TANGENT, _abstract_tangent, _tangent_by_lax)
joined_gradient_p = channels.new_primitive(_GRADIENT, _abstract_gradient, _gradient_by_lax, _native_gradient)
channels.are_transposes((joined_tangent_p, _tangent_by_lax), (joined_gradient_p, _gradient_by_lax))
