"""Rows of sparse matrices in CSR format. This file never imports SciPy: a program with a matrix has imported it."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np


def is_csr(value: Any) -> bool:
    """Whether ``value`` is a two-dimensional ``scipy.sparse.csr_matrix`` or ``csr_array``."""
    module = sys.modules.get("scipy.sparse")
    kinds = () if module is None else tuple(getattr(module, name, ()) for name in ("csr_matrix", "csr_array"))
    return isinstance(value, kinds) and value.ndim == 2


def csr_parts(value: Any) -> tuple[CsrRows, list[tuple[np.ndarray, bool]]]:
    """Return an object that builds rows of a CSR matrix, and the arrays that it needs.

    Returns
    -------
    make : CsrRows
    parts : list of (ndarray, is_whole)
        The stored elements and their columns, of the whole matrix, and for each row where its elements start and stop.
        So rows are divided as for any array, and no rank reads the elements of other ranks' rows.
    """
    num_elements = value.indptr[-1]
    whole = value.data[:num_elements], value.indices[:num_elements]
    parts = [*((array, True) for array in whole), (value.indptr[:-1], False), (value.indptr[1:], False)]
    is_matrix = isinstance(value, sys.modules["scipy.sparse"].csr_matrix)
    return CsrRows("csr_matrix" if is_matrix else "csr_array", value.shape[1]), parts


@dataclass(frozen=True)
class CsrRows:
    """Builds a CSR matrix from some rows of another one.

    Examples
    --------
    >>> import scipy.sparse
    >>> make, parts = csr_parts(scipy.sparse.csr_array([[0, 1], [2, 3], [4, 0]]))
    >>> make(*[array if is_whole else array[1:] for array, is_whole in parts]).toarray()
    array([[2, 3],
           [4, 0]])
    """

    kind: str
    num_columns: int
    what = "sparse matrix"
    cure = ".toarray(), by blocks of rows if it is large"

    def __call__(self, data: np.ndarray, columns: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> Any:
        bounds = np.zeros(len(starts) + 1, starts.dtype)
        np.cumsum(stops - starts, out=bounds[1:])
        if np.array_equal(starts[1:], stops[:-1]):  # the rows are consecutive
            chosen: Any = slice(starts[0], stops[-1]) if len(starts) else slice(0)
        else:
            chosen = np.arange(bounds[-1]) + np.repeat(starts - bounds[:-1], stops - starts)
        shape = len(starts), self.num_columns
        cls = getattr(importlib.import_module("scipy.sparse"), self.kind)
        return cls((data[chosen], columns[chosen], bounds), shape=shape)
