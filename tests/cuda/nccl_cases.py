"""What NCCL can reduce, and what NumPy makes of it. Imports nothing but NumPy: ranks of their own import it, too."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

INTEGERS = ("int8", "uint8", "int32", "uint32", "int64", "uint64")
FLOATS = ("float16", "float32", "float64")
COMPLEXES = ("complex64", "complex128")
SUPPORTED = [
    *((op, dtype) for op in ("sum", "prod", "min", "max") for dtype in INTEGERS + FLOATS),
    *(("avg", dtype) for dtype in FLOATS + COMPLEXES),
    *(("sum", dtype) for dtype in COMPLEXES),
    *((op, "bool") for op in ("min", "max")),
]
NUMPY_REDUCTIONS: dict[str, Any] = {
    "sum": np.add.reduce,
    "prod": np.multiply.reduce,
    "min": np.minimum.reduce,
    "max": np.maximum.reduce,
    "avg": functools.partial(np.mean, axis=0),
}


def random_array(shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    """Return small integers in ``dtype``: every sum and product of a few of them is exact."""
    rng = np.random.default_rng(seed)
    values = rng.integers(0 if dtype in ("bool", "uint8", "uint32", "uint64") else -2, 3, shape)
    if dtype in COMPLEXES:
        return (values + 1j * rng.integers(-2, 3, shape)).astype(dtype)
    return values.astype(dtype)
