"""Plans: what was measured for the layers of one model, kept in a file and applied to it.

`calibration` times, `plan` keeps, `timing` is the stopwatch that benchmarks use too. tests/plans holds it, with
damaged files.
"""
