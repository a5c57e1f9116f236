"""Sparse matrices in CSR format. This file never imports SciPy: a program with a matrix has imported it."""

from __future__ import annotations

import sys
from typing import Any


def is_csr(value: Any) -> bool:
    """Whether ``value`` is a two-dimensional ``scipy.sparse.csr_matrix`` or ``csr_array``."""
    module = sys.modules.get("scipy.sparse")
    kinds = () if module is None else tuple(getattr(module, name, ()) for name in ("csr_matrix", "csr_array"))
    return isinstance(value, kinds) and value.ndim == 2
