"""Benchmarks that print the floor first and check the values they time."""
