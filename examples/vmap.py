"""`jax.vmap` over images and over kernels: each is one sparse operation again, not a loop.

python examples/vmap.py
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

import jax_sparse_conv as jsc


def convolve(image: jax.Array, kernel: jax.Array) -> jax.Array:
    """One image [H, W, C] and one kernel [3, 3, C, K] -> [H, W, K]."""
    return jsc.conv(image[None], kernel, activation="relu")[0]


def main() -> float:
    """Map three ways; returns the largest difference to a Python loop."""
    keys = jax.random.split(jax.random.key(0), 2)
    images = jax.nn.relu(jax.random.normal(keys[0], (4, 14, 14, 16)) - 0.8)  # about 79 % zeros
    kernels = jax.random.normal(keys[1], (3, 3, 3, 16, 8))
    print(f"images {images.shape}, {100 * (1 - float(jsc.density(images))):.0f} % zeros; kernels {kernels.shape}")

    over_images = jax.vmap(convolve, in_axes=(0, None))
    over_kernels = jax.vmap(convolve, in_axes=(None, 0))
    over_both = jax.vmap(over_kernels, in_axes=(0, None))

    one = jax.jit(convolve)
    wanted = jnp.stack([jnp.stack([one(image, kernel) for kernel in kernels]) for image in images])
    results = {
        "every image with one kernel": (jax.jit(over_images)(images, kernels[0]), wanted[:, 0]),
        "one image with every kernel": (jax.jit(over_kernels)(images[0], kernels), wanted[0]),
        "every image with every kernel": (jax.jit(over_both)(images, kernels), wanted),
    }
    worst = 0.0
    for name, (result, loop) in results.items():
        difference = float(jnp.abs(result - loop).max() / jnp.abs(loop).max())
        worst = max(worst, difference)
        print(f"{name}: {result.shape}, difference to a loop {difference:.1e}")
    return worst


if __name__ == "__main__":
    main()
