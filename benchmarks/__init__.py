"""Benchmarks, run from the repository's root: `python -m benchmarks` lists the suites.

suites/ has a module for each that times layers, networks/ for whole networks, common/ what they share, paper/ the
papers' experiments, tune/ searches for tiles and what choices lose, results/ a file for each device and suite. A new
suite is a module with `main(argv)`, a line in `__main__.SUITES` and its keys in `common/results.py`. The package
imports nothing from here. tests/benchmarks holds it.
"""
