"""`accelerate`: any function's convolutions, with what surrounds them, as calls of this package.

The way of a function through this room: `equations` makes its jaxpr one list, `recognise` walks it and makes calls of
convolutions and their neighbours (`maps` are feature maps in any layout, `pending` a call that still grows), `hoist`
takes out what depends on weights alone (computed `by_numpy`), and `fusion` makes chains of the rest. In between
`dense_blocks` finds those of a DenseNet, and behind it `few_arguments` puts the weights of chains into one array each.
`transform` is the public function, `inference` keeps weights, `report` says what became of every convolution, a
`rows.Row` each. Tests: `tests/accelerate`.
"""
