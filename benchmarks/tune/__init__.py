"""Searches for the fastest tiles of fused chains, XLA's times for tables, and what choices lose, by raw times."""
