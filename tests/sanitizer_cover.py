"""Every case of tests/cases.py once on the GPU, without pytest, for compute-sanitizer; see sanitize.sh."""

from __future__ import annotations

import cases
import jax
import jax.numpy as jnp
import oracle
from test_kernels import TOLERANCE, call

import jax_sparse_conv as jsc


def main() -> None:
    count = 0
    for dtype in ("float32", "bfloat16"):
        for case in (*cases.CONV_CASES, *cases.CONV_POOL_CASES):
            inputs = cases.inputs(case, jnp.dtype(dtype))
            operands = [None if v is None else jnp.asarray(v) for v in inputs]
            result = call(case, *operands, "ecr" if case.pool is None else "pecr")
            assert oracle.relative_error(result, oracle.expected(case, inputs)) <= TOLERANCE[dtype], case.name
            count += 1
        for (rows, channels, features), zeros in cases.DENSE_CASES:
            case = cases.Case("dense", (rows, 1, 1, channels), features, kernel=(1, 1), zeros=zeros)
            inputs = cases.inputs(case, jnp.dtype(dtype))
            x, kernel = jnp.asarray(inputs.x).reshape(rows, channels), jnp.asarray(inputs.kernel)[0, 0]
            result = jsc.dense(x, kernel, implementation="ecr")
            wanted = oracle.expected(case, inputs).reshape(rows, features)
            assert oracle.relative_error(result, wanted) <= TOLERANCE[dtype], (rows, channels, features)
            count += 1
    print(f"{count} cases on {jax.devices()[0].device_kind}")


if __name__ == "__main__":
    main()
