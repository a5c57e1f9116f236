"""Benchmarks of synk against its peers, measured in the same run: ``python -m benchmarks``."""
