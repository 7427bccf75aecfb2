"""The public operations: arguments are checked and become one call of the primitive.

What may be changed: names and errors of arguments, within the contract that tests/api holds. What an operation
computes is defined in `primitive.reference`; what runs for it is decided in `dispatch`.
"""
