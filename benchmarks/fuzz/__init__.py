"""Random calls of the package, each compared with NumPy in float64.

`case` is a call, `draws` draws one, and `operands` makes its arrays. `oracle` is the call in NumPy and `checks` the
comparison. `worker` is a process that makes it, and `command` what a user runs.
"""
