"""The command line: reports of networks on photographs, and feature maps as files.

`python -m jax_sparse_conv` is `jax_sparse_conv/__main__.py`, which parses and calls. tests/cli runs every command.
"""
