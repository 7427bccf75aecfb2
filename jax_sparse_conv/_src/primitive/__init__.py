"""The operation inside JAX: one primitive with its shape rule, batching, derivatives, sharding and lowering.

`reference` is what every implementation means, in jnp and lax. A new transformation gets its rule here; a new kernel
does not: it is a candidate of `dispatch`. tests/primitive compares all of it with float64.
"""
