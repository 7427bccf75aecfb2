"""Fused chains: convolutions that feed each other become one native call, found by rewriting a function's jaxpr.

`rewrite` finds them, `chains` is the primitive, `schedule` and `placement` lay out its steps and memory, and
`chain_rules` says what fits. `dense_blocks` is the same for DenseNet. tests/fusion runs every chain against its
layers one by one.
"""
