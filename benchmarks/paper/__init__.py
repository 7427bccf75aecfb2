"""The papers' experiments as commands: `python -m benchmarks paper table3`; `--help` lists them."""
