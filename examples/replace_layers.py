"""Make the layers of your own Flax model skip zeros, check the result, and see where the zeros are.

python examples/replace_layers.py
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx

import jax_sparse_conv as jsc


class Network(nnx.Module):
    """Any nnx model: this one knows nothing of this package."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        # A bias below zero, so that ReLU leaves more zeros than half.
        kernel, bias = nnx.initializers.he_normal(), nnx.initializers.constant(-0.4)
        conv = functools.partial(nnx.Conv, kernel_size=(3, 3), kernel_init=kernel, bias_init=bias, rngs=rngs)
        self.stem = conv(3, 16)
        self.blocks = nnx.List([conv(16, 16) for _ in range(3)])
        self.wrap = conv(16, 16, padding="CIRCULAR")
        self.head = nnx.Linear(16 * 8 * 8, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.stem(x))
        for block in self.blocks:
            x = nnx.relu(block(x))
        x = nnx.relu(self.wrap(x))
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        return self.head(x.reshape(x.shape[0], -1))


def main() -> float:
    """Replace the layers; returns the largest relative difference of the outputs."""
    model = Network(nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (1, 16, 16, 3))

    dense = jsc.nnx.jit_inference(model)(x)
    report = jsc.nnx.replace(model)  # in place; parameters and the state tree stay as they are
    predict = jsc.nnx.jit_inference(model)  # costs the host less in every call than nnx.jit
    sparse = predict(x)
    print(report)

    difference = float(jnp.abs(sparse - dense).max() / jnp.abs(dense).max())
    print(f"\nlargest relative difference of the outputs: {difference:.1e}\n")

    with jsc.nnx.record_calls() as calls:  # outside jit, to see the values
        model(x)
    paths = jsc.nnx.layer_paths(model)
    print("zeros in what each sparse layer reads:")
    for call in calls:
        print(f"  {paths[id(call.layer)]:9} {100 * (1 - float(jsc.density(call.inputs))):4.0f} %")
    return difference


if __name__ == "__main__":
    main()
