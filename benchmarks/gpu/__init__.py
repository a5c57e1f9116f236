"""Benchmarks on one GPU: ``python -m benchmarks.gpu``. Not run on a GPU so far."""
