"""Rows of sparse matrices. The oracle is SciPy's own indexing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from synk._pure.sparse import csr_parts, is_csr


@pytest.mark.sampled(20)
@pytest.mark.parametrize("kind", ["csr_matrix", "csr_array"])
@pytest.mark.parametrize("shape", [(0, 4), (1, 1), (7, 3), (50, 20)], ids=str)
@pytest.mark.parametrize("density", [0.0, 0.2, 1.0])
def test_chosen_rows_are_those_of_scipy(kind: str, shape: tuple[int, int], density: float) -> None:
    import scipy.sparse as sparse

    rng = np.random.default_rng(0)
    dense = rng.normal(size=shape) * (rng.random(shape) < density)
    matrix: Any = getattr(sparse, kind)(dense)
    make, parts = csr_parts(matrix)
    count = shape[0]
    chosen: list[Any] = [slice(None), slice(2, 5), slice(None, None, -1), rng.permutation(count)]
    if count:
        chosen.append(rng.integers(0, count, 9))
    for rows in chosen:
        found = make(*[array if is_whole else array[rows] for array, is_whole in parts])
        assert type(found) is type(matrix)
        np.testing.assert_array_equal(found.toarray(), dense[rows])
        found.check_format(full_check=True)


def test_what_counts_as_csr() -> None:
    import scipy.sparse as sparse

    for kind in ("csr_matrix", "csr_array"):
        assert is_csr(getattr(sparse, kind)(np.eye(2)))
    for other in (sparse.csc_array(np.eye(2)), sparse.coo_matrix(np.eye(2)), np.eye(2), None, "csr"):
        assert not is_csr(other)
