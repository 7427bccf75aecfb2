"""What runs for a call: implementation, engine, tile and split, by device, table and model.

`planner` asks the native planners what a kernel can take; nothing here repeats their rules. tests/golden holds every
choice for the known networks, tests/dispatch the rest.
"""
