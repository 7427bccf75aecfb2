"""Feature maps as ECR, PECR and COO*: pytrees with `fromdense`, `todense` and counts of operations.

They serve study and storage; the kernels compress on the fly. tests/formats holds them to numpy.
"""
