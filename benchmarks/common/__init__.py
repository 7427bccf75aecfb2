"""What the suites share: layers, inputs, networks, commands, tables, and files of results."""
