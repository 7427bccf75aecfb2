"""`python -m jax_sparse_conv tune`: times what kernels can take against XLA and writes the table of the device at hand.

`workloads` finds what to time, `measure` times it on a GPU, `cpu` on a CPU, `raw_times` keeps it. `command` makes the
table that `dispatch.table` or `dispatch.cpu_table` reads, `fit` fits the constants of `dispatch.model`. tests/tune runs
it all on stand-ins for a GPU and on given times of a CPU.
"""
