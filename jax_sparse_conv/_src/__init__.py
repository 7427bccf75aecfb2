"""Everything behind the public names of `jax_sparse_conv`; nothing here is public.

The rooms along the path of the data: `api` checks the call, `problem` is the call as data, `primitive` is the call
inside JAX, and `dispatch` decides which native kernel runs. Around them are `formats`, `fusion`, `layers`, `plans`,
`tune` and `cli`. docs/design/architecture.md has the picture.
"""
