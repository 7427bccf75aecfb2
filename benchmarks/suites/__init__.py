"""What is timed: a module with `main(argv)` for each suite of `benchmarks.__main__`, and the rows of two of them."""
