"""What Flax layers of both kinds share: the call of a layer, how it is observed, and its packed weights.

`jax_sparse_conv.nnx` and `jax_sparse_conv.linen` are thin classes over it. tests/layers and tests/nnx hold it.
"""
