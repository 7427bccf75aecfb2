"""Suites that time single layers: a module with `main(argv)` for each, and the rows of one of them."""
