"""Every case of cases.py and tile_cases.py once on the GPU, without pytest, for compute-sanitizer; see sanitize.sh.

Arguments: the element types to cover, and names of checks ("chains" is check_chains); by default all of either.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import tile_cases
from adaptive_checks import BOTH, DENSE, SPARSE, adaptive
from blocks import BLOCKS, Block, check_transition, transition_values, values
from blocks import TOLERANCE as BLOCK_TOLERANCE
from blocks import check as check_block
from cases import Case
from chain_checks import CASES, ENDS, KINDS, LARGER, PAIRS, check, check_end
from coo_star_checks import SHAPES_AND_TILES, feature_map
from coo_star_checks import check as check_lists
from dense_block_checks import run
from direct_checks import LARGE_KINDS
from kernel_checks import TF32, TOLERANCE, call, check_counts
from split_checks import FIRST, TILED
from split_checks import check as check_split
from tile_cases import SHARED_TILES

import jax_sparse_conv as jsc
from jax_sparse_conv._src.primitive.coo_star import CooStar

# Chains of two layers whose blocks send each other sums (splits of 3 or more, by wgmma_plan.cc); the last two where
# stages were.
SENT = (
    cases.Case("sent", (1, 7, 7, 64), 64, bias=True, residual=True, activation="relu"),
    cases.Case("sent, odd sizes", (2, 5, 9, 96), 72, residual=True),
    cases.Case("sent, pooled", (1, 7, 10, 64), 64, bias=True, activation="relu", pool="max"),
    cases.Case("sent, pixels of several images", (3, 5, 5, 256), 72, kernel=(1, 1), bias=True),
)
SENT_LATE = (
    cases.Case("sent late, pooled", (1, 27, 26, 64), 64, kernel=(5, 5), pool="max"),
    cases.Case("sent late", (4, 7, 7, 512), 512, bias=True, activation="relu"),
)
# A tile or a few of each kernel of dense blocks, with edges: racecheck needs seconds for each block of threads.
SMALL_PAIRS = [pair for pair in PAIRS if pair[0].out_channels < 512]
SMALL_BLOCKS = (
    Block("few", (1, 3, 5, 32), 2),
    Block("few, middle tiles", (1, 17, 15, 64), 2),
    Block("few, large tiles", (1, 29, 57, 32), 2),
    Block("many", (9, 2, 3, 32), 2),
    Block("many, half a chunk", (10, 3, 5, 96), 2),
    Block("many, wide map", (9, 2, 66, 64), 2),
)


def check_runs(dtype: str) -> int:
    # "adaptive" leaves a pool to XLA, whose kernels the sanitizer does not see write.
    chosen = [(case, name) for case, name in cases.runs() if not (name == "adaptive" and case.pool)]
    for case, implementation in chosen:
        inputs = cases.inputs(case, jnp.dtype(dtype))
        operands = [cases.on_device(v) for v in inputs]
        # Counts from the host: the sanitizer does not see what XLA's kernels write, and XLA counts without them.
        counts = jnp.asarray(SPARSE, jnp.int32) if implementation == "adaptive" else None
        result = call(case, *operands, implementation, nonzeros=counts)
        error = oracle.relative_error(result, oracle.expected(case, inputs))
        assert error <= TOLERANCE[dtype], (case.name, implementation)
    return len(chosen)


def check_large(dtype: str) -> int:
    """Large layers of "direct", which other kernels than small ones serve, at every precision."""
    kinds = [kind for kind in LARGE_KINDS if kind[0] == dtype]
    for case in (*cases.LARGE_CASES, *cases.LARGE_POOL_CASES):
        inputs = cases.inputs(case, jnp.dtype(dtype))
        wanted = oracle.expected(case, inputs)
        for _, precision, tolerance in kinds:
            result = call(case, *(cases.on_device(v) for v in inputs), "direct", precision)
            assert oracle.relative_error(result, wanted) <= tolerance, (case.name, precision)
    return len(kinds) * (len(cases.LARGE_CASES) + len(cases.LARGE_POOL_CASES))


def check_small(dtype: str) -> int:
    """Small layers of "direct" and groups of few channels, and of float32 with sums that are computed again."""
    kinds = [kind for kind in LARGE_KINDS if kind[0] == dtype]
    of_dtype = (
        *tile_cases.SMALL_CASES,
        *(tile_cases.SPLITK_CASES if dtype == "float32" else ()),
        *tile_cases.GROUP_CASES,
    )
    for case in of_dtype:
        inputs = cases.inputs(case, jnp.dtype(dtype))
        for value in (1.0, np.nan):
            inputs.x[-1, -1, 0, 3] = value
            wanted = oracle.expected(case, inputs)
            for _, precision, tolerance in kinds:
                result = call(case, *(cases.on_device(v) for v in inputs), "direct", precision)
                assert oracle.relative_error(result, wanted) <= tolerance, (case.name, precision)
    return 2 * len(kinds) * len(of_dtype)


def check_warpgroups(dtype: str) -> int:
    """Blocks of two consumer warpgroups in TF32; those at HIGHEST are among the small and the large layers."""
    if dtype != "float32":
        return 0
    for case in tile_cases.TF32_WARPGROUP_CASES:
        inputs = cases.inputs(case)
        result = call(case, *(cases.on_device(v) for v in inputs), "direct", None)
        assert oracle.relative_error(result, oracle.expected(case, inputs)) <= TF32, case.name
    return len(tile_cases.TF32_WARPGROUP_CASES)


def check_dense(dtype: str) -> int:
    for (rows, channels, out_channels), zeros in cases.DENSE_CASES:
        case = cases.Case("dense", (rows, 1, 1, channels), out_channels, kernel=(1, 1), zeros=zeros)
        inputs = cases.inputs(case, jnp.dtype(dtype))
        x, kernel = jnp.asarray(inputs.x).reshape(rows, channels), jnp.asarray(inputs.kernel)[0, 0]
        result = jsc.dense(x, kernel, implementation="ecr")
        wanted = oracle.expected(case, inputs).reshape(rows, out_channels)
        assert oracle.relative_error(result, wanted) <= TOLERANCE[dtype], (rows, channels, out_channels)
    return len(cases.DENSE_CASES)


def check_coo_star(dtype: str) -> int:
    """Conversions to COO* and back: tiles beyond the map's edge, positions of one byte and of two."""
    for shape, tile in SHAPES_AND_TILES:
        x = feature_map(shape, dtype=jnp.dtype(dtype))
        made = CooStar.fromdense(jnp.asarray(x), tile)
        check_lists(made, x, tile)
        np.testing.assert_array_equal(np.asarray(made.todense()), x)
    return len(SHAPES_AND_TILES)


def check_stored(dtype: str) -> int:
    """Convolutions of stored lists: tiles smaller and larger than those of results, of one channel and of several."""
    chosen = [case for case, implementation in cases.runs() if implementation == "coo"][::4]
    tiles = (4, 4, 1), (3, 5, 4), (16, 17, 2)
    for case, tile in itertools.product(chosen, tiles):
        inputs = cases.inputs(case, jnp.dtype(dtype))
        x, kernel, bias, residual = (cases.on_device(v) for v in inputs)
        stored = CooStar.fromdense(x, tile)
        result = jsc.conv(stored, kernel, bias, residual=residual, implementation="coo", **case.arguments)
        assert oracle.relative_error(result, oracle.expected(case, inputs)) <= TOLERANCE[dtype], (case.name, tile)
    return len(chosen) * len(tiles)


def check_stacks(dtype: str) -> int:
    """Images and kernels both batched: several kernels in one call."""
    case = cases.Case("stacked", (2, 9, 7, 37), 41)
    inputs = [cases.inputs(case, jnp.dtype(dtype), seed) for seed in range(3)]
    # Stacked on the host: the sanitizer does not see what XLA's kernels write.
    x, kernel = (jnp.asarray(np.stack(values)) for values in list(zip(*inputs, strict=True))[:2])
    result = jax.vmap(lambda x, k: jsc.conv(x, k, implementation="ecr"))(x, kernel)
    wanted = np.stack([oracle.expected(case, each) for each in inputs])
    assert oracle.relative_error(result, wanted) <= TOLERANCE[dtype], case.name
    return 1


def check_non_finite(dtype: str) -> int:
    """What "direct" computes again: tiles of its float32 sums that are not all finite."""
    if dtype != "float32":
        return 0
    chosen = [case for case in cases.CONV_CASES if case.name in ("3x3", "3x3 residual relu", "odd C and K")]
    chosen.append(cases.Case("large tiles", (1, 28, 28, 256), 512, padding="VALID", zeros=0.0))
    chosen.append(cases.Case("large windows", (2, 57, 55, 96), 136, strides=2, padding="VALID", zeros=0.0))
    chosen.extend(SHARED_TILES)
    for case in chosen:
        inputs = cases.inputs(case, jnp.dtype(dtype))
        inputs.x[0, 3, 3, 3], inputs.x[0, 1, 2, 5] = np.inf, np.nan
        result = call(case, *(cases.on_device(v) for v in inputs), "direct")
        assert oracle.relative_error(result, oracle.expected(case, inputs)) <= TOLERANCE[dtype], case.name
    return len(chosen)


def check_adaptive(dtype: str) -> int:
    """Both sides, by counts from the host, and counting what they write."""
    chosen = [case for case in BOTH if case.pool is None]
    for case in chosen:
        inputs = cases.inputs(case, jnp.dtype(dtype))
        for nonzeros in (SPARSE, DENSE):
            result, counts = adaptive(case, inputs, nonzeros, counted=True)
            assert oracle.relative_error(result, oracle.expected(case, inputs)) <= TOLERANCE[dtype], case.name
            check_counts(result, counts)
    return 2 * len(chosen)


def check_two_layers(dtype: str) -> int:
    """Two layers as a chain: splits, strides, pools."""
    chosen = [(case, kind) for case in (*LARGER[1:4], *CASES[::6]) for kind in KINDS if kind[0] == dtype]
    for case, (_, precision) in chosen:
        check(case, dtype, precision, cases.inputs(case, jnp.dtype(dtype)))
    return len(chosen)


def check_chains(dtype: str) -> int:
    """Chains whose blocks send each other sums."""
    kinds = [kind for kind in KINDS if kind[0] == dtype]
    for case in (*SENT, *SENT_LATE):
        for _, precision in kinds:
            check(case, dtype, precision, cases.inputs(case, jnp.dtype(dtype)))
    return len(kinds) * len(SENT + SENT_LATE)


def check_low_parts(dtype: str) -> int:
    """Chains at HIGHEST, whose kernels leave low parts to each other, on a GPU."""
    if dtype != "float32" or jax.default_backend() != "gpu":
        return 0
    chosen = [(case, 24, True) for case in TILED] + [(case, 24, False) for case in FIRST]
    chosen += [(case, out_channels, True) for case, out_channels in SMALL_PAIRS]
    for case, out_channels, has_front in chosen:
        check_split(case, cases.inputs(case), out_channels, window=3 if has_front else 1, has_front=has_front)
    return len(chosen)


def check_ends(dtype: str) -> int:
    """Chains that end in dense layers, on a GPU; elsewhere they are separate operations."""
    if jax.default_backend() != "gpu":
        return 0
    kinds = [kind for kind in KINDS if kind[0] == dtype]
    for end in ENDS:
        for _, precision in kinds:
            check_end(end, 80, dtype, precision)
    return len(kinds) * len(ENDS)


def check_pairs(dtype: str, pairs: Sequence[tuple[Case, int]] = SMALL_PAIRS) -> int:
    """Two 1x1 layers in one kernel, where there is one."""
    kinds = [kind for kind in KINDS if kind[0] == dtype]
    for case, out_channels in pairs:
        for _, precision in kinds:
            check(case, dtype, precision, cases.inputs(case, jnp.dtype(dtype)), out_channels)
    return len(kinds) * len(pairs)


def check_large_pairs(dtype: str) -> int:
    """Those of ResNet-50, by clusters of 8 and 16."""
    return check_pairs(dtype, [pair for pair in PAIRS if pair not in SMALL_PAIRS])


def run_block(block: Block, dtype: str, precision: str) -> None:
    """The block, and where it has windows of 2x2 the block with a transition."""
    x, layers = values(block, jnp.dtype(dtype))
    tolerance = BLOCK_TOLERANCE[precision if dtype == "float32" else dtype]
    out = run(x, layers, precision)
    check_block(out, x, layers, tolerance)
    if min(block.x[1:3]) > 1:
        transition = transition_values(block, jnp.dtype(dtype))
        check_transition(run(x, layers, precision, transition), out, transition, tolerance)


def check_blocks(dtype: str, blocks: Sequence[Block] = SMALL_BLOCKS) -> int:
    """Dense blocks, on a GPU; elsewhere a block is separate operations."""
    if jax.default_backend() != "gpu":
        return 0
    chosen = [(block, kind) for block in blocks for kind in KINDS if kind[0] == dtype]
    for block, (_, precision) in chosen:
        run_block(block, dtype, precision)
    return len(chosen)


def check_dense_blocks(dtype: str) -> int:
    """Larger ones: each shape of tile, with edges, and one layer alone."""
    return check_blocks(dtype, [block for block in BLOCKS if block.layers <= 3])


CHECKS = {
    check.__name__.removeprefix("check_"): check
    for check in (
        check_runs, check_large, check_small, check_warpgroups, check_dense, check_coo_star, check_stored, check_stacks,
        check_non_finite, check_adaptive, check_two_layers, check_chains, check_low_parts, check_ends, check_pairs,
        check_large_pairs, check_blocks, check_dense_blocks,
    )
}  # fmt: skip


def main(arguments: list[str]) -> None:
    names = [name for name in arguments if name in CHECKS] or list(CHECKS)
    dtypes = [name for name in arguments if name not in CHECKS] or ["float32", "bfloat16", "float16"]
    count = sum(CHECKS[name](dtype) for dtype in dtypes for name in names)
    print(f"{count} cases on {jax.devices()[0].device_kind}")


if __name__ == "__main__":
    main(sys.argv[1:])
