"""Everything behind the public names of `jax_sparse_conv`; nothing here is public.

The rooms along the path of the data: `api` (the call is checked) -> `problem` (the call as data) -> `primitive` (the
call inside JAX) -> `dispatch` (what runs) -> the native kernels. Around it: `formats`, `fusion`, `layers`, `plans`,
`cli`. docs/design/architecture.md has the picture.
"""
