"""Classify a photograph with a network whose convolutions skip zeros, and check it against the dense network.

    python examples/classify_photo.py
    python examples/classify_photo.py --network vgg19 --image photo.jpg --weights vgg19.safetensors

Needs the examples extra: pip install "jax-sparse-conv[examples]".
"""

from __future__ import annotations

import argparse
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

import jax_sparse_conv as jsc
from jax_sparse_conv._src.cli.photograph import batch_of, load


def main(argv: list[str] | None = None) -> float:
    """Classify densely and sparsely; returns the largest relative difference of the logits."""
    options = _parser().parse_args(argv)
    network = jsc.models.NETWORKS[options.network]
    images = batch_of(load(options.image, options.size), size=1)  # uint8 [1, size, size, 3]

    # 1. The network, with trained weights or with seeded ones that leave as many zeros as trained ones would.
    # On a GPU, XLA's dense convolution would use TF32 by default; the sparse kernels are always float32-exact.
    model = jsc.models.build(options.network, precision="highest", rngs=nnx.Rngs(0))
    loaded = jsc.models.load_weights(model, options.weights) if options.weights else None
    x = network.preprocess(images, loaded.convention if loaded else "torchvision")
    jsc.models.fold_batch_norm(model)
    if loaded is None:
        jsc.models.set_sparsity_profile(model, x)
        print("The weights are seeded: the classes mean nothing.")

    # 2. The same weights twice: None skips zeros where there is a kernel for it, "xla" never does.
    logits = {}
    runs: dict[str, Literal["xla"] | None] = {"sparse": None, "dense": "xla"}
    for name, implementation in runs.items():
        jsc.models.set_network_implementation(model, implementation)
        logits[name] = jsc.nnx.jit_inference(model)(x)
        probabilities = jax.nn.softmax(logits[name][0])
        best = jnp.argsort(-probabilities)[:5]
        print(f"{name}: " + ", ".join(f"class {c} {100 * probabilities[c]:.1f} %" for c in best.tolist()))

    # 3. Skipping zeros loses nothing.
    error = jnp.abs(logits["sparse"] - logits["dense"]).max() / jnp.abs(logits["dense"]).max()
    print(f"largest relative difference of the logits: {error:.1e}")
    return float(error)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="resnet50", choices=sorted(jsc.models.NETWORKS))
    parser.add_argument("--image", help="default: a sample photograph of scikit-learn's")
    parser.add_argument("--weights", help="safetensors file with torchvision, timm or Keras names")
    parser.add_argument("--size", type=int, default=224, help="height and width of the image")
    return parser


if __name__ == "__main__":
    main()
