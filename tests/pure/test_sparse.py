"""Rows of sparse matrices. The oracle is SciPy's own indexing."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import scipy.sparse

from synk._pure.sparse import csr_parts, is_csr


def test_chosen_rows_are_those_of_scipy(subtests: Any) -> None:
    rng = np.random.default_rng(0)
    for kind, shape, density in itertools.product(
        (scipy.sparse.csr_matrix, scipy.sparse.csr_array), ((0, 4), (1, 1), (50, 20)), (0.0, 0.2, 1.0)
    ):
        dense = rng.normal(size=shape) * (rng.random(shape) < density)
        make, parts = csr_parts(kind(dense))
        for rows in (
            slice(None),
            slice(2, 5),
            slice(None, None, -1),
            rng.integers(0, max(shape[0], 1), 9 * (shape[0] > 0)),
        ):
            with subtests.test(kind=kind.__name__, shape=shape, density=density, rows=str(rows)):
                found = make(*[array if is_whole else array[rows] for array, is_whole in parts])
                assert type(found) is kind
                np.testing.assert_array_equal(found.toarray(), dense[rows])
                found.check_format(full_check=True)


def test_what_counts_as_csr() -> None:
    for kind in (scipy.sparse.csr_matrix, scipy.sparse.csr_array):
        assert is_csr(kind(np.eye(2)))
    for other in (scipy.sparse.csc_array(np.eye(2)), scipy.sparse.coo_matrix(np.eye(2)), np.eye(2), None, "csr"):
        assert not is_csr(other)
