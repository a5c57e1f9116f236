"""One runtime a file, each a program that the harness starts: ``python -m benchmarks.peers.NAME``."""
