"""`python -m jax_sparse_conv tune`: times what kernels can take against XLA and writes the table of the GPU at hand.

`workloads` finds what to time, `measure` times it, `raw_times` keeps it. `command` makes the table that
`dispatch.table` reads, `fit` fits the constants of `dispatch.model`. tests/tune runs it all on stand-ins for a GPU.
"""
