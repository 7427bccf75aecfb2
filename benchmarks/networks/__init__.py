"""Suites that time whole networks: the package's own, and models that others wrote."""
