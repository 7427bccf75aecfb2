"""A call as data: geometry (strides, padding, dilation, groups, pool) and workload (sizes, dtype, precision).

Everything else reads these two types. They hold no arrays and know no device. tests/problem and tests/golden say that
they still hold.
"""
