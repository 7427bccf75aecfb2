"""Searches for the fastest tiles of fused chains, which the package's table keeps."""
