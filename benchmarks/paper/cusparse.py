"""Xu et al. 2023, Fig. 10: im2col, conversion to CSR and SpMM as separate steps, each timed, against one kernel.

The steps are a concatenation of shifted slices, `CSR.fromdense` and `CSR @ matrix`. On a CUDA GPU the last two are
cuSPARSE's DenseToSparse and SpMM, inside the same jit and so timed like everything else; elsewhere they are XLA's. The
capacity of the CSR matrix is given, which spares the baseline the wait for the number of non-zeros.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import sparse

from benchmarks.common import data
from benchmarks.paper import networks, plots, runner, sides
from benchmarks.paper.experiment import Experiment
from benchmarks.paper.layers import ECR_LAYERS, TABLE3, PaperLayer
from benchmarks.paper.ocpa import OCPA_NETWORKS
from benchmarks.paper.runner import Case, Context, Row
from jax_sparse_conv._src.plans import timing

WHOLE = "im2col + csr + spmm"
_REPEATS = 5  # of a step, of which there are four for every row


def _fig10(context: Context) -> list[Row]:
    cases = runner.chosen(context, [*_network_cases(context), *_single_cases()])
    rows = runner.measure(context, cases)
    pairs = [(case.layer, inputs[0]) for case in cases for _, inputs in runner.inputs(context, case)]
    pipelines = [_Pipeline(layer, x) for layer, x in pairs]
    runner.compiled([pipeline.compile_ahead for pipeline in pipelines], [False] * len(pipelines))
    for row, pipeline in zip(rows, pipelines, strict=True):
        row["steps_us"] = pipeline.time(min(context.repeats, _REPEATS))
        row["us"][WHOLE] = row["steps_us"].pop(WHOLE)
        row["error"][WHOLE] = pipeline.error()
        runner.add_ratios(row)
        ours = [side for side in row["us"] if side != WHOLE and not sides.is_dense(side)]
        row["over_cusparse"] = {side: row["us"][WHOLE] / row["us"][side] for side in ours}
        runner.progress(f"{row['layer']}: {row['steps_us']}, {row['over_cusparse']}")
    return rows + runner.measure(context, map(_empty, (case for case in cases if case.layer.kernel > 1)))


def _empty(case: Case) -> Case:
    """The same layer on a map of zeros, by our kernel alone: what is left then is the conversion."""
    return dataclasses.replace(case, sources=(100,), inputs={}, sides=(sides.HIGHEST, "ecr"))


def _single_cases() -> list[Case]:
    cases = [Case(layer, sources=(0, *layer.zeros, "real"), sides=_sides()) for layer in ECR_LAYERS]
    return cases + [Case(layer, sources=(*layer.zeros, "real"), sides=_sides()) for layer in TABLE3]


def _sides() -> tuple[str, ...]:
    return (*sides.dense_sides(), "ecr", sides.AUTO)


def _network_cases(context: Context) -> list[Case]:
    """The layers of Fig. 9's networks without groups, which a single SpMM does not know, and without their pools."""
    cases = []
    for name in networks.available(context, OCPA_NETWORKS):
        network = networks.prepared(context, name)
        cases += [
            Case(
                dataclasses.replace(layer, op="conv", implementation="ecr"),
                sources=(0,) if layer.kernel > 1 else (),
                inputs={"profile": network.inputs[layer.name]},
                sides=_sides(),
                notes={"network": name},
            )
            for layer in network.layers
            if layer.groups == 1
        ]
    return cases


class _Pipeline:
    """The steps on one map."""

    def __init__(self, layer: PaperLayer, x: data.Map) -> None:
        self.layer, self.x = layer, x
        self.capacity = max(1, patch_non_zeros(layer, x))

    def compile_ahead(self) -> None:
        shapes = (self.x.shape, self.layer.kernel_shape, (self.layer.out_channels,))
        x, kernel, bias = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
        matrix = jax.eval_shape(_im2col(self.layer), x)
        csr = jax.eval_shape(_to_csr(self.capacity), matrix)
        for step, arguments in self._steps(x, matrix, csr, jax.eval_shape(_as_matrix, kernel), kernel, bias).values():
            timing.compile_ahead(step, [arguments])

    def time(self, repeats: int) -> dict[str, float]:
        """Microseconds of each step and of all in one jit."""
        x, kernel, bias = self._operands()
        matrix = _im2col(self.layer)(x)
        csr = _to_csr(self.capacity)(matrix)
        steps = self._steps(x, matrix, csr, _as_matrix(kernel), kernel, bias)
        return {
            name: timing.per_call({name: step}, [arguments], repeats)[name].microseconds
            for name, (step, arguments) in steps.items()
        }

    def error(self) -> float:
        """Relative Frobenius error of the steps to XLA's convolution at HIGHEST."""
        found = _whole(self.layer, self.capacity)(*self._operands())
        expected = sides.function(self.layer, sides.HIGHEST)(*self._operands()).reshape(found.shape)
        return float(jnp.linalg.norm(found - expected) / jnp.linalg.norm(expected))

    def _operands(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        kernel, bias = data.weights(self.layer, 0)
        return jnp.asarray(self.x), jnp.asarray(kernel), jnp.asarray(bias)

    def _steps(self, x: Any, matrix: Any, csr: Any, weights: Any, kernel: Any, bias: Any) -> dict[str, Any]:
        return {
            "im2col": (_im2col(self.layer), (x,)),
            "to csr": (_parts_of_csr(self.capacity), (matrix,)),
            "spmm": (_spmm, (csr, weights)),
            WHOLE: (_whole(self.layer, self.capacity), (x, kernel, bias)),
        }


def patch_non_zeros(layer: PaperLayer, x: data.Map) -> int:
    """Non-zeros of x's im2col matrix: every pixel's, times the number of windows that see the pixel."""
    seen = np.zeros(layer.size, np.int64)
    for window in range(layer.conv_size):
        first = window * layer.strides - padding_of(layer)[0]
        seen[max(0, first) : max(0, first + layer.kernel)] += 1
    return int(np.sum(np.count_nonzero(x, axis=(0, 3)) * np.outer(seen, seen)))


def padding_of(layer: PaperLayer) -> tuple[int, int]:
    """Rows of zeros before and behind x."""
    if layer.padding != "SAME":
        low, high = layer.padding[0]
        return low, high
    total = max(0, (layer.conv_size - 1) * layer.strides + layer.kernel - layer.size)
    return total // 2, total - total // 2


@functools.cache
def _im2col(layer: PaperLayer) -> timing.Function:
    """x [N, H, W, C] -> [N * Ho * Wo, kh * kw * C]."""
    low, high = padding_of(layer)
    reach = (layer.conv_size - 1) * layer.strides + 1

    @jax.jit
    def im2col(x: jax.Array) -> jax.Array:
        padded = jnp.pad(x, ((0, 0), (low, high), (low, high), (0, 0)))
        taps = [
            padded[:, row : row + reach : layer.strides, column : column + reach : layer.strides]
            for row in range(layer.kernel)
            for column in range(layer.kernel)
        ]
        return jnp.concatenate(taps, axis=-1).reshape(-1, layer.kernel**2 * x.shape[3])

    return im2col


def _as_matrix(kernel: jax.Array) -> jax.Array:
    """kernel [kh, kw, C, K] -> [kh * kw * C, K], in the order of the patches."""
    return kernel.reshape(-1, kernel.shape[3])


@functools.cache
def _to_csr(capacity: int) -> timing.Function:
    return jax.jit(lambda matrix: sparse.CSR.fromdense(matrix, nse=capacity))


@functools.cache
def _parts_of_csr(capacity: int) -> timing.Function:
    def parts(matrix: jax.Array) -> jax.Array:
        csr = sparse.CSR.fromdense(matrix, nse=capacity)
        kept: tuple[jax.Array, ...] = lax.optimization_barrier((csr.data, csr.indices, csr.indptr))
        return kept[0]

    return jax.jit(parts)


@jax.jit
def _spmm(csr: Any, weights: jax.Array) -> jax.Array:
    return csr @ weights


@functools.cache
def _whole(layer: PaperLayer, capacity: int) -> timing.Function:
    @jax.jit
    def whole(x: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
        csr = sparse.CSR.fromdense(_im2col(layer)(x), nse=capacity)
        return jax.nn.relu(csr @ _as_matrix(kernel) + bias)

    return whole


EXPERIMENTS = (
    Experiment(
        "fig10",
        "Xu et al. 2023, Fig. 10",
        "against im2col, conversion to CSR and cuSPARSE's SpMM.",
        _fig10,
        plots.bars(lambda row: f"{row['layer']} {row['source']} {row['zeros_percent']:.0f} %"),
        ("layer", "source", "zeros_percent", "steps_us"),
    ),
)
