"""Feature maps as ECR and PECR: pytrees with `fromdense`, `todense` and counts of operations.

They serve study and storage; the kernels compress on the fly. tests/formats holds them to numpy. COO*, which `conv`
reads as it is stored, is `primitive.coo_star`.
"""
